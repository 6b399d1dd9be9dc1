//! Builds what the virtual machine runs: the module, the stand-in for the driver, broken variants of the module, and the
//! guest's programs. All of it out of tree, in copies that keep what an earlier run compiled.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::run::{Log, command, run};
use crate::vm_packages::{Kernel, io_error};
use crate::workspace::Workspace;

const PROVIDER: &str = "tests/provider";

#[derive(Debug, Clone)]
pub(crate) struct Modules {
    pub(crate) gdrdrv: PathBuf,
    pub(crate) provider: PathBuf,
}

/// A static program and its name in the guest, which runs them in the order of these.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

/// A patch that takes one guarantee away from the module, and the test that must notice.
#[derive(Debug)]
pub(crate) struct Variant {
    pub(crate) name: String,
    pub(crate) test: String,
    patch: PathBuf,
}

pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn sources(workspace: &Workspace) -> PathBuf {
    workspace.root.join("gdrdrv")
}

/// Files below a folder, in order of their names.
fn files(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(dir).map_err(io_error(dir))?;
    let mut paths =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>().map_err(io_error(dir))?;
    paths.sort();
    Ok(paths)
}

/// Whether the build reads a file of this name. What someone built in the source folder stays there.
fn is_source(name: &str) -> bool {
    let made = name.ends_with(".mod.c") || name == "probes.h" || name.starts_with('.');
    !made && ([".c", ".h", ".sh"].iter().any(|end| name.ends_with(end)) || name == "Kbuild" || name == "Makefile")
}

/// Copies the sources of a folder without touching copies that are the same: make looks at times.
fn copy_sources(from: &Path, to: &Path) -> Result<(), String> {
    fs::create_dir_all(to).map_err(io_error(to))?;
    for path in files(from)? {
        let copy = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_sources(&path, &copy)?;
            continue;
        }
        if !is_source(&file_name(&path)) {
            continue;
        }
        let text = fs::read(&path).map_err(io_error(&path))?;
        if fs::read(&copy).ok().as_ref() != Some(&text) {
            fs::write(&copy, text).map_err(io_error(&copy))?;
        }
    }
    Ok(())
}

/// A copy of the module's sources to build in.
pub(crate) fn copy_module(workspace: &Workspace, dir: &Path) -> Result<(), String> {
    copy_sources(&sources(workspace), dir)
}

/// One run of the kernel's build system: all warnings on and errors, and sparse over every file.
fn kbuild(log: &mut Log, kernel: &Kernel, dir: &Path, more: &[String]) -> Result<(), String> {
    let mut make = command("make", ["-s", "-C"]);
    make.arg(&kernel.build_tree).arg(format!("M={}", dir.display()));
    make.args(["W=1", "KCFLAGS=-Werror", "C=2", "CF=-Wsparse-error"]);
    // Type information of the kernel would need pahole, and nothing here reads ours.
    make.arg("CONFIG_DEBUG_INFO_BTF_MODULES=").args(more).arg("modules");
    run(log, make)
}

fn build_gdrdrv(log: &mut Log, kernel: &Kernel, dir: &Path, provider: &Path) -> Result<PathBuf, String> {
    let header = format!("NVIDIA_P2P_DIR={}", provider.display());
    let symbols = format!("KBUILD_EXTRA_SYMBOLS={}", provider.join("Module.symvers").display());
    kbuild(log, kernel, dir, &[header, symbols])?;
    Ok(dir.join("gdrdrv.ko"))
}

/// The provider and the module linked against it.
pub(crate) fn modules(log: &mut Log, workspace: &Workspace, kernel: &Kernel, dir: &Path) -> Result<Modules, String> {
    let source = dir.join("module");
    copy_sources(&sources(workspace), &source)?;
    let provider = source.join(PROVIDER);
    kbuild(log, kernel, &provider, &[])?;
    let gdrdrv = build_gdrdrv(log, kernel, &source, &provider)?;
    Ok(Modules { gdrdrv, provider: provider.join("nvp2p.ko") })
}

/// The module with the variant's patch applied.
pub(crate) fn variant(
    log: &mut Log,
    workspace: &Workspace,
    kernel: &Kernel,
    modules: &Modules,
    variant: &Variant,
    dir: &Path,
) -> Result<Modules, String> {
    let source = dir.join("variants").join(&variant.name);
    // From scratch: a patch applies to what it was made for only.
    if source.exists() {
        fs::remove_dir_all(&source).map_err(io_error(&source))?;
    }
    copy_sources(&sources(workspace), &source)?;
    let mut patch = command("patch", ["-s", "-p2", "--fuzz=0", "-d"]);
    patch.arg(&source).arg("-i").arg(&variant.patch);
    run(log, patch)?;
    let provider = dir.join("module").join(PROVIDER);
    let gdrdrv = build_gdrdrv(log, kernel, &source, &provider)?;
    Ok(Modules { gdrdrv, provider: modules.provider.clone() })
}

/// The patches of `tests/broken`, each of which names its test on a line `Test: NAME`.
pub(crate) fn variants(workspace: &Workspace) -> Result<Vec<Variant>, String> {
    let mut variants = Vec::new();
    for patch in files(&sources(workspace).join("tests/broken"))? {
        let Some(name) = file_name(&patch).strip_suffix(".patch").map(str::to_owned) else { continue };
        let text = fs::read_to_string(&patch).map_err(io_error(&patch))?;
        let test = text
            .lines()
            .find_map(|line| line.strip_prefix("Test: "))
            .ok_or_else(|| format!("{}: no line `Test: NAME`", patch.display()))?;
        variants.push(Variant { name, test: test.trim().to_owned(), patch });
    }
    Ok(variants)
}

/// The guest's test programs, static: the guest has no libraries.
pub(crate) fn programs(log: &mut Log, workspace: &Workspace, dir: &Path) -> Result<Vec<Program>, String> {
    let source = sources(workspace).join("tests/guest");
    let out = dir.join("tests");
    fs::create_dir_all(&out).map_err(io_error(&out))?;
    let mut programs = Vec::new();
    for path in files(&source)? {
        let Some(name) = file_name(&path).strip_suffix(".c").map(str::to_owned) else { continue };
        if !name.starts_with(|first: char| first.is_ascii_digit()) {
            continue;
        }
        let program = out.join(&name);
        let mut gcc = command("gcc", ["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-I"]);
        gcc.arg(sources(workspace)).arg(&path).arg(source.join("guest.c")).arg("-o").arg(&program);
        run(log, gcc)?;
        programs.push(Program { name, path: program });
    }
    Ok(programs)
}

/// The executable files of a folder. The guest runs them after its own tests but for the last, which leaves its marks.
pub(crate) fn extra_programs(dir: &Path) -> Result<Vec<Program>, String> {
    let mut paths = files(dir)?;
    paths.retain(|path| path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0));
    if paths.is_empty() {
        return Err(format!("{}: no executable file", dir.display()));
    }
    Ok(paths.into_iter().map(|path| Program { name: format!("85-{}", file_name(&path)), path }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sources_are_copied() {
        assert!(["main.c", "gdrdrv.h", "probe.sh", "Kbuild", "Makefile"].into_iter().all(is_source));
        let made =
            ["gdrdrv.mod.c", "probes.h", "main.o", "gdrdrv.ko", ".main.o.cmd", "Module.symvers", "probes.h.c.tmp"];
        assert!(!made.into_iter().any(is_source));
    }

    #[test]
    fn every_variant_names_a_test_that_exists() {
        let workspace = Workspace::load().unwrap();
        let variants = variants(&workspace).unwrap();
        assert!(!variants.is_empty());
        for variant in variants {
            let test = sources(&workspace).join("tests/guest").join(&variant.test).with_extension("c");
            assert!(test.exists(), "{}: {}", variant.name, test.display());
        }
    }
}
