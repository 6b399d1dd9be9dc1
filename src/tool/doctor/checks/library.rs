//! `libgdrapi.so.2` for C and C++ programs: on the loader's path, with its links, and but once.

use std::path::{Path, PathBuf};

use super::elf::soname;
use super::loader::Loader;
use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::{Root, parent};

const AREA: &str = "library";
const NAME: &str = "libgdrapi.so.2";
/// What NCCL and others open.
const DEV_NAME: &str = "libgdrapi.so";
const PREFIX: &str = "libgdrapi.so.";
const INSTALL: &str = "cargo xtask install --prefix /usr/local, then ldconfig";
/// Where libraries are put that the loader may not know of.
const OFF_PATH: [&str; 6] = [
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/local/gdrcopy/lib",
    "/usr/local/gdrcopy/lib64",
    "/opt/gdrcopy/lib",
    "/opt/gdrcopy/lib64",
];

/// A library that is really there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Copy {
    path: PathBuf,
    /// From its file's name.
    version: String,
    on_path: bool,
}

pub(super) fn check(root: &Root) -> Vec<Finding> {
    let loader = Loader::read(root);
    let copies = copies(root, &loader);
    let found = loader.find(root, NAME);
    let mut findings = vec![match (&found, copies.as_slice()) {
        (Some(path), copies) => winner(root, path, copies),
        (None, []) => none(root).read(loader.in_words()),
        (None, copies) => unreachable_copy(copies).read(loader.in_words()),
    }];
    if let Some(path) = &found {
        findings.extend(duplicates(root, path, &copies));
        if loader.find(root, DEV_NAME).is_none() {
            let folder = parent(path);
            let what = format!("{DEV_NAME} is missing beside {NAME}: NCCL and others open that name");
            let remedy = format!("ln -s {NAME} {}/{DEV_NAME}", folder.display());
            findings.push(Finding::warning(AREA, what, remedy).read(folder.display().to_string()));
        }
    }
    findings
}

/// Every file of the library in folders that are searched, or that should be.
fn copies(root: &Root, loader: &Loader) -> Vec<Copy> {
    let searched = loader.folders();
    let off_path = OFF_PATH.map(PathBuf::from).into_iter().filter(|folder| !searched.contains(folder));
    let folders = searched.iter().cloned().map(|folder| (folder, true)).chain(off_path.map(|folder| (folder, false)));
    let mut copies: Vec<Copy> = Vec::new();
    for (folder, on_path) in folders {
        for name in root.names(&folder).into_iter().filter(|name| name.starts_with(PREFIX)) {
            let Some(path) = root.real(folder.join(&name)) else { continue };
            if copies.iter().all(|copy| copy.path != path) {
                copies.push(Copy { version: version_of(&path), path, on_path });
            }
        }
    }
    copies
}

fn version_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix(PREFIX).unwrap_or("unknown").to_owned()
}

fn none(root: &Root) -> Finding {
    if root.exists("/sys/module/gdrdrv") {
        let what = "the module gdrdrv is loaded, but there is no libgdrapi.so.2 for C and C++ programs to use it";
        return Finding::warning(AREA, what, format!("install the library: {INSTALL}"))
            .read("/sys/module/gdrdrv is there");
    }
    let what = "there is no libgdrapi.so.2 for C and C++ programs; Rust programs do without";
    Finding::note(AREA, what, format!("where such programs are to run: {INSTALL}"))
}

/// The library is there, and no program finds it.
fn unreachable_copy(copies: &[Copy]) -> Finding {
    let copy = copies.iter().find(|copy| copy.on_path).unwrap_or(&copies[0]);
    let (file, folder) = (copy.path.display(), parent(&copy.path));
    let folder = folder.display();
    if copy.on_path {
        let name = copy.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let what = format!("{file} is there, but not the link {NAME} by which programs open it");
        let remedy = format!("ldconfig, or ln -s {name} {folder}/{NAME} and ln -s {NAME} {folder}/{DEV_NAME}");
        return Finding::problem(AREA, what, remedy);
    }
    let what = format!("{file} is there, but its folder is not on the loader's path");
    let remedy =
        format!("echo {folder} > /etc/ld.so.conf.d/gdrcopy.conf and ldconfig; or set LD_LIBRARY_PATH={folder}");
    Finding::problem(AREA, what, remedy)
}

fn winner(root: &Root, path: &Path, copies: &[Copy]) -> Finding {
    let real = root.real(path).unwrap_or_else(|| path.to_owned());
    let version =
        copies.iter().find(|copy| copy.path == real).map_or_else(|| version_of(&real), |copy| copy.version.clone());
    let read = format!("{} -> {}", path.display(), real.display());
    match root.bytes(path).as_deref().map(soname) {
        Some(Some(name)) if name == NAME => {
            Finding::ok(AREA, format!("{NAME} is {}, version {version}", real.display()))
        }
        Some(Some(name)) => {
            let what = format!("{} calls itself {name}, not {NAME}: programs may load two libraries", path.display());
            Finding::problem(AREA, what, format!("remove it and install a library of interface 2: {INSTALL}"))
        }
        Some(None) => {
            let what = format!("{} is not a 64-bit shared library, or has no SONAME", path.display());
            Finding::problem(AREA, what, format!("remove it and install the library again: {INSTALL}"))
        }
        None => {
            let what = format!("{} cannot be read", path.display());
            Finding::problem(AREA, what, format!("chmod a+rx {}", real.display()))
        }
    }
    .read(read)
}

/// Several libraries are one too many, whichever is found.
fn duplicates(root: &Root, path: &Path, copies: &[Copy]) -> Option<Finding> {
    let real = root.real(path)?;
    let others: Vec<_> = copies.iter().filter(|copy| copy.path != real && copy.version.starts_with('2')).collect();
    let other = others.first()?;
    let what = format!(
        "there are {} libraries: programs get {} (version {}), not {} (version {})",
        others.len() + 1,
        real.display(),
        version_of(&real),
        other.path.display(),
        other.version
    );
    let remedy = format!(
        "remove the one that is not wanted and its links, then ldconfig; to keep both, put the right folder first in \
         LD_LIBRARY_PATH ({})",
        parent(&other.path).display()
    );
    let listed = others.iter().map(|copy| copy.path.display().to_string()).collect::<Vec<_>>().join(", ");
    Some(Finding::warning(AREA, what, remedy).read(format!("{}, {listed}", real.display())))
}
