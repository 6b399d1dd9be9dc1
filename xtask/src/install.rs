//! `cargo xtask install` and `uninstall`: the C library, its headers, and what pkg-config and CMake read.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::abi;
use crate::run::{Log, cargo, command, run};
use crate::workspace::Workspace;

/// The version in file names: that of the interface, which is not the package's.
pub(crate) const VERSION: &str = "2.6";
pub(crate) const SONAME: &str = "libgdrapi.so.2";
const REAL_NAME: &str = "libgdrapi.so.2.6";

/// Half of the known clients load this name, so it belongs to the library and not to a development package.
const LINK_NAME: &str = "libgdrapi.so";
const ARCHIVE: &str = "libgdrapi.a";
const HEADERS: [&str; 3] = ["gdrapi.h", "gdrapi_ext.h", "gdrcopy_channel.cuh"];

/// Where things go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    prefix: PathBuf,
    /// Put before every path when files are written, but not into them: a package's staging folder.
    destdir: Option<PathBuf>,
    /// Below the prefix.
    libdir: PathBuf,
    /// Of the package `gdrapi`, beyond the default ones, as cargo takes them.
    features: Option<String>,
}

impl Layout {
    pub(crate) fn at(prefix: PathBuf) -> Self {
        Self { prefix, destdir: None, libdir: "lib".into(), features: None }
    }

    /// With these features built in.
    pub(crate) fn with(self, features: &str) -> Self {
        Self { features: Some(features.to_owned()), ..self }
    }

    pub(crate) fn parse(args: &[OsString]) -> Result<Self, String> {
        let (mut prefix, mut destdir, mut libdir, mut features) = (None, None, PathBuf::from("lib"), None);
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            let mut value =
                || args.next().map(PathBuf::from).ok_or_else(|| format!("{} needs a value", flag.display()));
            match flag.to_str() {
                Some("--prefix") => prefix = Some(value()?),
                Some("--destdir") => destdir = Some(value()?),
                Some("--libdir") => libdir = value()?,
                Some("--features") => features = Some(value()?.to_string_lossy().into_owned()),
                _ => return Err(format!("unexpected argument `{}`", flag.display())),
            }
        }
        let prefix = prefix.ok_or("--prefix DIR says where to; /usr/local is the usual place")?;
        if !prefix.is_absolute() {
            return Err(format!("--prefix {} is not an absolute path", prefix.display()));
        }
        if libdir.is_absolute() {
            return Err(format!("--libdir {} is not relative to the prefix", libdir.display()));
        }
        Ok(Self { prefix, destdir, libdir, features })
    }

    fn staged(&self, path: PathBuf) -> PathBuf {
        match &self.destdir {
            Some(destdir) => destdir.join(path.strip_prefix("/").unwrap_or(&path)),
            None => path,
        }
    }

    pub(crate) fn include(&self) -> PathBuf {
        self.staged(self.prefix.join("include"))
    }

    pub(crate) fn lib(&self) -> PathBuf {
        self.staged(self.prefix.join(&self.libdir))
    }

    pub(crate) fn pkgconfig(&self) -> PathBuf {
        self.lib().join("pkgconfig")
    }

    fn cmake(&self) -> PathBuf {
        self.lib().join("cmake/gdrapi")
    }

    /// Every file, with its content or where it comes from.
    fn files(&self, workspace: &Workspace) -> Vec<(PathBuf, Content)> {
        let source = |path: &str| Content::Copy(workspace.root.join("ffi").join(path));
        let built = |name: &str| Content::Copy(build_dir(workspace).join(name));
        let lib = self.lib();
        let mut files: Vec<_> =
            HEADERS.iter().map(|header| (self.include().join(header), source(&format!("include/{header}")))).collect();
        files.extend([
            (lib.join(REAL_NAME), built(REAL_NAME)),
            (lib.join(SONAME), Content::Link(REAL_NAME)),
            (lib.join(LINK_NAME), Content::Link(SONAME)),
            (lib.join(ARCHIVE), built(ARCHIVE)),
            (self.pkgconfig().join("gdrapi.pc"), Content::Text(self.pkgconfig_text())),
            (self.cmake().join("gdrapiConfig.cmake"), Content::Text(self.cmake_text())),
            (self.cmake().join("gdrapiConfigVersion.cmake"), Content::Text(cmake_version_text())),
        ]);
        files
    }

    fn pkgconfig_text(&self) -> String {
        let (prefix, libdir) = (self.prefix.display(), self.libdir.display());
        format!(
            "prefix={prefix}\nlibdir=${{prefix}}/{libdir}\nincludedir=${{prefix}}/include\n\n\
             Name: gdrapi\nDescription: CPU access to NVIDIA GPU memory through PCIe BAR1\nVersion: {VERSION}\n\
             Libs: -L${{libdir}} -lgdrapi\nLibs.private: -lpthread -ldl -lm\nCflags: -I${{includedir}}\n"
        )
    }

    fn cmake_text(&self) -> String {
        // From <prefix>/<libdir>/cmake/gdrapi up to the prefix, so that the tree may be moved.
        let up = "../".repeat(self.libdir.components().count() + 2);
        let libdir = self.libdir.display();
        format!(
            "get_filename_component(_gdrapi_prefix \"${{CMAKE_CURRENT_LIST_DIR}}/{up}\" ABSOLUTE)\n\n\
             if(NOT TARGET gdrapi::gdrapi)\n  \
               add_library(gdrapi::gdrapi SHARED IMPORTED)\n  \
               set_target_properties(gdrapi::gdrapi PROPERTIES\n    \
                 IMPORTED_LOCATION \"${{_gdrapi_prefix}}/{libdir}/{SONAME}\"\n    \
                 IMPORTED_SONAME {SONAME}\n    \
                 INTERFACE_INCLUDE_DIRECTORIES \"${{_gdrapi_prefix}}/include\")\n\
             endif()\n\n\
             if(NOT TARGET gdrapi::gdrapi_static)\n  \
               add_library(gdrapi::gdrapi_static STATIC IMPORTED)\n  \
               set_target_properties(gdrapi::gdrapi_static PROPERTIES\n    \
                 IMPORTED_LOCATION \"${{_gdrapi_prefix}}/{libdir}/{ARCHIVE}\"\n    \
                 INTERFACE_INCLUDE_DIRECTORIES \"${{_gdrapi_prefix}}/include\"\n    \
                 INTERFACE_LINK_LIBRARIES \"pthread;dl;m\")\n\
             endif()\n\n\
             unset(_gdrapi_prefix)\n"
        )
    }
}

fn cmake_version_text() -> String {
    format!(
        "set(PACKAGE_VERSION {VERSION})\n\
         if(PACKAGE_FIND_VERSION_MAJOR EQUAL 2 AND NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)\n  \
           set(PACKAGE_VERSION_COMPATIBLE TRUE)\n\
         endif()\n\
         if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)\n  \
           set(PACKAGE_VERSION_EXACT TRUE)\n\
         endif()\n"
    )
}

#[derive(Debug)]
enum Content {
    Copy(PathBuf),
    Link(&'static str),
    Text(String),
}

fn build_dir(workspace: &Workspace) -> PathBuf {
    workspace.target.join("gdrapi")
}

/// Builds both libraries as they are shipped, into a folder of their own.
fn build(log: &mut Log, workspace: &Workspace, features: Option<&str>) -> Result<(), String> {
    let features = features.map(|features| ["--features", features]);
    run(
        log,
        cargo(
            ["build", "--locked", "--release", "--package", "gdrapi"].into_iter().chain(features.into_iter().flatten()),
        ),
    )?;
    let (from, to) = (workspace.target.join("release"), build_dir(workspace));
    fs::create_dir_all(&to).map_err(at(&to))?;
    let shared = [Path::new("--strip-unneeded"), Path::new("-o"), &to.join(REAL_NAME), &from.join(LINK_NAME)];
    run(log, command("strip", shared))?;
    abi::localise(log, workspace, &from.join(ARCHIVE), &to.join(ARCHIVE))
}

pub(crate) fn install(log: &mut Log, workspace: &Workspace, layout: &Layout) -> Result<(), String> {
    build(log, workspace, layout.features.as_deref())?;
    for (path, content) in layout.files(workspace) {
        let folder = path.parent().ok_or("a file without a folder")?;
        fs::create_dir_all(folder).map_err(at(folder))?;
        // Never written over in place: a running program may have the old file mapped.
        remove(&path)?;
        match content {
            Content::Copy(from) => fs::copy(&from, &path).map(drop).map_err(at(&from))?,
            Content::Link(target) => symlink(target, &path).map_err(at(&path))?,
            Content::Text(text) => fs::write(&path, text).map_err(at(&path))?,
        }
        log.say(&format!("    {}", path.display()));
    }
    Ok(())
}

/// Removes what `install` put there and nothing else.
pub(crate) fn uninstall(log: &mut Log, workspace: &Workspace, layout: &Layout) -> Result<(), String> {
    for (path, _) in layout.files(workspace) {
        if remove(&path)? {
            log.say(&format!("    removed {}", path.display()));
        }
    }
    // The one folder that is ours alone; it stays if somebody else put something there.
    let _ = fs::remove_dir(layout.cmake());
    Ok(())
}

fn remove(path: &Path) -> Result<bool, String> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(at(path)(error)),
    }
}

fn at(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Layout, String> {
        Layout::parse(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn arguments() {
        assert_eq!(parse(&["--prefix", "/usr"]), Ok(Layout::at("/usr".into())));
        let layout = parse(&["--destdir", "/tmp/d", "--prefix", "/usr", "--libdir", "lib/x86_64-linux-gnu"]).unwrap();
        assert_eq!(layout.lib(), Path::new("/tmp/d/usr/lib/x86_64-linux-gnu"));
        assert_eq!(layout.include(), Path::new("/tmp/d/usr/include"));
        assert_eq!(parse(&["--prefix", "/usr", "--features", "vulkan"]), Ok(Layout::at("/usr".into()).with("vulkan")));
        for wrong in [&[][..], &["--prefix"], &["--prefix", "usr"], &["--libdir", "/lib", "--prefix", "/"], &["/usr"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn texts_name_the_prefix_and_never_the_staging_folder() {
        let layout = parse(&["--destdir", "/tmp/d", "--prefix", "/opt/gdr", "--libdir", "lib64"]).unwrap();
        let pc = layout.pkgconfig_text();
        assert!(pc.contains("prefix=/opt/gdr\n") && pc.contains("libdir=${prefix}/lib64\n"), "{pc}");
        assert!(!pc.contains("/tmp/d"), "{pc}");
        let cmake = layout.cmake_text();
        assert!(cmake.contains("CMAKE_CURRENT_LIST_DIR}/../../../\""), "{cmake}");
        assert!(cmake.contains("_gdrapi_prefix}/lib64/libgdrapi.so.2\""), "{cmake}");
    }
}
