//! Where the dynamic loader looks for libraries: `LD_LIBRARY_PATH`, its cache, its own folders (ld.so(8)).

use std::env;
use std::path::{Path, PathBuf};

use crate::tool::doctor::root::{Root, parent};

const CACHE: &str = "/etc/ld.so.cache";
/// How the part of the cache begins that every glibc since 2.2 reads.
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// Folders that glibc searches by itself; Debian's among them.
const DEFAULTS: [&str; 6] =
    ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// The loader's view.
#[derive(Debug, Default)]
pub(super) struct Loader {
    named: Vec<PathBuf>,
    /// Name and path of each library in the cache.
    cache: Vec<(String, PathBuf)>,
}

impl Loader {
    pub(super) fn read(root: &Root) -> Self {
        let named = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        Self {
            named: env::split_paths(&named).filter(|path| path.is_absolute()).collect(),
            cache: root.bytes(CACHE).map_or_else(Vec::new, |bytes| cached(&bytes)),
        }
    }

    /// The file that `dlopen` of this name opens, unless something in the program says otherwise.
    pub(super) fn find(&self, root: &Root, name: &str) -> Option<PathBuf> {
        let in_folder = |folder: &Path| Some(folder.join(name)).filter(|path| root.exists(path));
        let cached = || self.cache.iter().filter(|(found, _)| found == name).map(|(_, path)| path.clone());
        self.named
            .iter()
            .find_map(|folder| in_folder(folder))
            .or_else(|| cached().find(|path| root.exists(path)))
            .or_else(|| DEFAULTS.iter().find_map(|folder| in_folder(Path::new(folder))))
    }

    /// Every folder that is searched, in order.
    pub(super) fn folders(&self) -> Vec<PathBuf> {
        let cached = self.cache.iter().map(|(_, path)| parent(path));
        let all = self.named.iter().cloned().chain(cached).chain(DEFAULTS.map(PathBuf::from));
        let mut folders: Vec<PathBuf> = Vec::new();
        for folder in all {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        folders
    }

    /// What was looked at.
    pub(super) fn in_words(&self) -> String {
        let named: String = self.named.iter().map(|folder| format!("{}, ", folder.display())).collect();
        format!("looked in {named}{CACHE} ({} entries), {}", self.cache.len(), DEFAULTS.join(", "))
    }
}

/// The entries of `ld.so.cache`: each has offsets of its name and its path from the start of this part of the file.
fn cached(bytes: &[u8]) -> Vec<(String, PathBuf)> {
    let Some(start) = bytes.windows(MAGIC.len()).position(|part| part == MAGIC) else { return Vec::new() };
    let part = &bytes[start..];
    let number = |at: usize| -> Option<usize> {
        let word = part.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(word)).ok()
    };
    let text = |at: usize| -> Option<String> {
        let rest = part.get(at..)?;
        let end = rest.iter().position(|&byte| byte == 0)?;
        String::from_utf8(rest[..end].to_vec()).ok()
    };
    let count = number(MAGIC.len()).unwrap_or(0).min(part.len() / ENTRY);
    (0..count)
        .filter_map(|entry| {
            let at = HEADER + entry * ENTRY;
            Some((text(number(at + 4)?)?, PathBuf::from(text(number(at + 8)?)?)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of these libraries.
    fn cache(libraries: &[(&str, &str)]) -> Vec<u8> {
        let mut strings = Vec::new();
        let table = HEADER + libraries.len() * ENTRY;
        let mut entries = Vec::new();
        for (name, path) in libraries {
            let mut offset = |text: &str| {
                let at = u32::try_from(table + strings.len()).unwrap();
                strings.extend(text.bytes().chain([0]));
                at.to_le_bytes()
            };
            let (name, path) = (offset(name), offset(path));
            entries.extend([[3, 3, 0, 0], name, path, [0; 4]].concat());
            entries.extend([0; 8]);
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(u32::try_from(libraries.len()).unwrap().to_le_bytes());
        bytes.extend(u32::try_from(strings.len()).unwrap().to_le_bytes());
        bytes.resize(HEADER, 0);
        [bytes, entries, strings].concat()
    }

    #[test]
    fn entries_are_found_wherever_the_part_begins() {
        let libraries = [("libgdrapi.so.2", "/opt/g/libgdrapi.so.2"), ("libc.so.6", "/lib/libc.so.6")];
        let wanted = libraries.map(|(name, path)| (name.to_owned(), PathBuf::from(path)));
        let bytes = cache(&libraries);
        assert_eq!(cached(&bytes), wanted);
        // Older files have another table before it.
        assert_eq!(cached(&[b"ld.so-1.7.0\0\0\0\0".to_vec(), bytes.clone()].concat()), wanted);
        for len in 0..bytes.len() {
            let _ = cached(&bytes[..len]);
        }
        assert_eq!(cached(b"nonsense"), []);
    }

    #[test]
    fn this_machine_finds_its_c_library() {
        let root = Root::default();
        let loader = Loader::read(&root);
        let found = loader.find(&root, "libc.so.6").expect("a C library");
        assert!(found.is_absolute() && loader.folders().contains(&parent(&found)), "{found:?}");
        assert_eq!(loader.find(&root, "libnonesuch.so.9"), None);
    }
}
