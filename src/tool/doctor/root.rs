//! Where the doctor reads: `/proc`, `/sys`, `/dev`, `/etc` and the library folders, of this machine or, in tests, of a
//! folder that is made to look like a broken one.
//!
//! Device nodes cannot be made without root, so below such a folder a node is a file of one line:
//! `char MAJOR MINOR MODE UID GID`, the mode in octal.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

/// A file system to examine.
#[derive(Debug, Clone, Default)]
pub(super) struct Root {
    prefix: Option<PathBuf>,
}

/// A device file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    /// There is none.
    Missing,
    /// There is something else of that name.
    NotADevice,
    /// A character device.
    Char(Access),
}

/// Numbers and permissions of a device file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl std::fmt::Display for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { major, minor, mode, uid, gid } = self;
        write!(f, "character device {major}:{minor}, mode {mode:04o}, uid {uid}, gid {gid}")
    }
}

/// Who asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    groups: Vec<u32>,
    /// May pass permission bits by.
    overrides: bool,
}

/// `CAP_DAC_OVERRIDE` (capabilities(7)).
const DAC_OVERRIDE: u64 = 1 << 1;

impl User {
    /// From `/proc/self/status`.
    fn of(status: &str) -> Self {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        let numbers = |name: &str| -> Vec<u32> {
            field(name).split_whitespace().filter_map(|number| number.parse().ok()).collect()
        };
        let mut groups = numbers("Groups:");
        groups.extend(numbers("Gid:").get(1));
        Self {
            uid: numbers("Uid:").get(1).copied().unwrap_or(u32::MAX),
            groups,
            overrides: u64::from_str_radix(field("CapEff:").trim(), 16).is_ok_and(|set| set & DAC_OVERRIDE != 0),
        }
    }

    /// Whether it may read and write, by owner, group and mode.
    pub(super) fn may_use(&self, node: &Access) -> bool {
        let shift = if self.uid == node.uid {
            6
        } else if self.groups.contains(&node.gid) {
            3
        } else {
            0
        };
        self.overrides || node.mode >> shift & 0o6 == 0o6
    }
}

impl Root {
    /// This machine's, or that of a folder.
    pub(super) fn new(prefix: Option<PathBuf>) -> Self {
        Self { prefix }
    }

    /// Whether it is made up.
    pub(super) fn is_made_up(&self) -> bool {
        self.prefix.is_some()
    }

    /// Where an absolute path is to be found.
    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        match &self.prefix {
            Some(prefix) => prefix.join(path.strip_prefix("/").unwrap_or(path)),
            None => path.to_owned(),
        }
    }

    pub(super) fn bytes(&self, path: impl AsRef<Path>) -> Option<Vec<u8>> {
        fs::read(self.path(path)).ok()
    }

    /// The whole of a file; `None` if it is missing or closed to us.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        self.bytes(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Its first line, without the space around it.
    pub(super) fn line(&self, path: impl AsRef<Path>) -> Option<String> {
        self.text(path)?.lines().next().map(|line| line.trim().to_owned())
    }

    pub(super) fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// The names in a folder, in order; none if it is missing.
    pub(super) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The last part of what a link leads to.
    pub(super) fn link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }

    /// A path with its links resolved, as seen from inside; `None` if it leads nowhere.
    pub(super) fn real(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let real = fs::canonicalize(self.path(path)).ok()?;
        match &self.prefix {
            Some(prefix) => {
                let inside = real.strip_prefix(fs::canonicalize(prefix).ok()?).ok()?.to_owned();
                Some(Path::new("/").join(inside))
            }
            None => Some(real),
        }
    }

    pub(super) fn node(&self, path: &str) -> Node {
        let Ok(meta) = fs::metadata(self.path(path)) else { return Node::Missing };
        if self.is_made_up() {
            return self.text(path).and_then(|text| made_up(&text)).map_or(Node::NotADevice, Node::Char);
        }
        if !meta.file_type().is_char_device() {
            return Node::NotADevice;
        }
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        let mode = meta.permissions().mode() & 0o7777;
        Node::Char(Access { major, minor, mode, uid: meta.uid(), gid: meta.gid() })
    }

    pub(super) fn user(&self) -> User {
        let own = || fs::read_to_string("/proc/self/status").ok();
        User::of(&self.text("/proc/self/status").or_else(own).unwrap_or_default())
    }

    /// Owner of the files that root owns on a real machine.
    pub(super) fn owner(&self) -> u32 {
        match &self.prefix {
            Some(prefix) => fs::metadata(prefix).map_or(0, |meta| meta.uid()),
            None => 0,
        }
    }

    /// Release of the running kernel.
    pub(super) fn kernel(&self) -> String {
        self.line("/proc/sys/kernel/osrelease").unwrap_or_default()
    }
}

fn made_up(text: &str) -> Option<Access> {
    let mut words = text.split_whitespace();
    if words.next() != Some("char") {
        return None;
    }
    let (major, minor) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let mode = u32::from_str_radix(words.next()?, 8).ok()?;
    let (uid, gid) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(Access { major, minor, mode, uid, gid })
}

/// The folder of a file.
pub(super) fn parent(path: &Path) -> PathBuf {
    path.parent()
        .filter(|parent| parent.components().next() == Some(Component::RootDir))
        .map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_is_by_owner_group_and_mode() {
        let user = User::of(
            "Uid:\t1000\t1000\t1000\t1000\nGid:\t100\t100\t100\t100\nGroups:\t44 \nCapEff:\t0000000000000000\n",
        );
        let node = |mode, uid, gid| Access { major: 1, minor: 0, mode, uid, gid };
        for (mode, uid, gid, usable) in [
            (0o666, 0, 0, true),
            (0o660, 0, 0, false),
            (0o660, 0, 44, true),
            (0o660, 0, 100, true),
            (0o644, 0, 0, false),
            (0o600, 1000, 0, true),
            // The first class that fits decides, as in the kernel.
            (0o066, 1000, 0, false),
            (0o606, 0, 44, false),
        ] {
            assert_eq!(user.may_use(&node(mode, uid, gid)), usable, "{mode:o} {uid} {gid}");
        }
        let root = User::of("Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n");
        assert!(root.may_use(&node(0, 5, 5)));
        let powerless = User::of("Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n");
        assert!(!powerless.may_use(&node(0o600, 5, 5)));
    }

    #[test]
    fn this_machine_has_a_null_device_and_a_user() {
        let root = Root::default();
        let Node::Char(null) = root.node("/dev/null") else { panic!("{:?}", root.node("/dev/null")) };
        assert_eq!((null.major, null.minor), (1, 3));
        assert!(root.user().may_use(&null));
        assert_eq!((root.node("/dev/none"), root.node("/proc")), (Node::Missing, Node::NotADevice));
        assert!(!root.kernel().is_empty());
    }

    #[test]
    fn made_up_nodes_are_lines() {
        let access = Access { major: 240, minor: 0, mode: 0o600, uid: 0, gid: 7 };
        assert_eq!(made_up("char 240 0 0600 0 7\n"), Some(access));
        for text in ["", "block 240 0 0600 0 0", "char 240 0 0600 0", "char 240 0 0900 0 0"] {
            assert_eq!(made_up(text), None, "{text}");
        }
    }
}
