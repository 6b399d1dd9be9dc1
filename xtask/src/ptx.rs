//! `cargo xtask ptx`: the GPU kernels of this tree as PTX, which is committed beside its source, so that nobody who builds
//! the library needs a CUDA compiler.
//!
//! The compiler is NVRTC 12.4, the last but one line that still knows sm_70. It states a newer version of PTX than the
//! code uses, which older drivers would refuse; the header is set back to the file's level, and `ptxas` then holds the code
//! to it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::c_programs::is_there;
use crate::ci::Verdict;
use crate::nvrtc::{self, Source};
use crate::run::{Log, capture, command, run};
use crate::wheels::{Wheel, unpacked};
use crate::workspace::Workspace;

/// Where kernels lie.
const FOLDERS: [&str; 3] = ["src/ptx", "tests/ptx", "examples/order_book"];

/// What a file asks of driver and GPU.
#[derive(Debug, PartialEq, Eq)]
struct Level {
    header: [&'static str; 3],
    compiled_for: &'static str,
    /// What the code is assembled for, to see that it can be.
    assembled_for: &'static [&'static str],
}

/// What every driver from 450 on takes, for every GPU from Volta on.
const COMMON: Level = Level {
    header: [".version 7.0", ".target sm_70", ".address_size 64"],
    compiled_for: "--gpu-architecture=compute_70",
    assembled_for: &["sm_70", "sm_75", "sm_80", "sm_90", "sm_100"],
};

/// Bulk asynchronous copies: drivers from 525 on, GPUs from Hopper on.
const BULK: Level = Level {
    header: [".version 8.0", ".target sm_90", ".address_size 64"],
    compiled_for: "--gpu-architecture=compute_90",
    assembled_for: &["sm_90", "sm_100"],
};

/// Files, by their name without `.cu`, that are not of the common level.
const LEVELS: [(&str, &Level); 1] = [("push_bulk", &BULK)];

const NVRTC: Wheel = Wheel {
    requirement: "nvidia-cuda-nvrtc-cu12==12.4.127",
    sha256: "a178759ebb095827bd30ef56598ec182b85547f1508941a3d560eb7ea1fbf338",
};
const NVRTC_PATH: &str = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12";

const PTXAS: Wheel = Wheel {
    requirement: "nvidia-cuda-nvcc-cu12==12.9.86",
    sha256: "5d6a0d32fdc7ea39917c20065614ae93add6f577d840233237ff08e9a38f58f0",
};
const PTXAS_PATH: &str = "nvidia/cuda_nvcc/bin/ptxas";

/// A kernel file and everything it includes.
#[derive(Debug)]
struct Kernel {
    /// The `.cu` file.
    path: PathBuf,
    text: String,
    /// Name as the source includes it, and text.
    includes: Vec<(String, String)>,
    /// A comment line for each source file, with its hash.
    origin: Vec<String>,
    level: &'static Level,
}

impl Kernel {
    fn read(log: &mut Log, path: PathBuf) -> Result<Self, String> {
        let text = read(&path)?;
        let origin = vec![origin_line(log, &path)?];
        let level = path.file_stem().and_then(|stem| LEVELS.iter().find(|(name, _)| stem == *name));
        let level = level.map_or(&COMMON, |(_, level)| level);
        let mut kernel = Self { path, text, includes: Vec::new(), origin, level };
        kernel.include(log, &kernel.path.clone(), &kernel.text.clone())?;
        Ok(kernel)
    }

    /// What a file of this kernel includes, each file once.
    fn include(&mut self, log: &mut Log, path: &Path, text: &str) -> Result<(), String> {
        for name in included(text) {
            if self.includes.iter().any(|(known, _)| known == name) {
                continue;
            }
            let file = path.with_file_name(name);
            let header = read(&file)?;
            self.origin.push(origin_line(log, &file)?);
            self.includes.push((name.to_owned(), header.clone()));
            self.include(log, &file, &header)?;
        }
        Ok(())
    }

    fn ptx_path(&self) -> PathBuf {
        self.path.with_extension("ptx")
    }

    fn shown(&self) -> String {
        self.ptx_path().display().to_string()
    }

    fn file_name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Compiles, and puts our own header in place of the compiler's.
    fn compile(&self, library: &Path) -> Result<String, String> {
        let source = Source { name: &self.file_name(), text: &self.text, includes: &self.includes };
        let ptx = nvrtc::compile(library, &source, &[self.level.compiled_for, "--std=c++14"])?;
        let body = body(&ptx).ok_or_else(|| format!("{}: NVRTC's output has no .address_size 64", self.shown()))?;
        Ok(format!("{}\n{}\n{body}\n", self.origin.join("\n"), self.level.header.join("\n")))
    }

    /// That the committed PTX has the right header and was made from the source that lies beside it.
    fn check_header(&self) -> Result<(), String> {
        let ptx = read(&self.ptx_path())?;
        let wanted = self.origin.iter().map(String::as_str).chain(self.level.header);
        match wanted.zip(ptx.lines().chain(std::iter::repeat(""))).find(|(wanted, found)| wanted != found) {
            None => Ok(()),
            Some((wanted, found)) => Err(format!(
                "{}: `{found}` should be `{wanted}`; run `cargo xtask ptx` after a change of the source",
                self.shown()
            )),
        }
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The names in `#include "NAME"` lines.
fn included(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'))
}

fn origin_line(log: &mut Log, file: &Path) -> Result<String, String> {
    let sum = capture(log, command("sha256sum", [file]))?;
    let sum = sum.split_whitespace().next().unwrap_or_default();
    let name = file.file_name().unwrap_or_default().display();
    Ok(format!("// cargo xtask ptx: {name} sha256 {sum}"))
}

/// What follows the compiler's header, without blank lines around it.
fn body(ptx: &str) -> Option<&str> {
    ptx.split_once(".address_size 64").map(|(_, body)| body.trim())
}

fn kernels(log: &mut Log, workspace: &Workspace) -> Result<Vec<Kernel>, String> {
    let mut paths = Vec::new();
    for folder in FOLDERS {
        let folder = workspace.root.join(folder);
        let at = |error: std::io::Error| format!("{}: {error}", folder.display());
        for entry in fs::read_dir(&folder).map_err(at)? {
            let path = entry.map_err(at)?.path();
            if path.extension().is_some_and(|extension| extension == "cu") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    paths.into_iter().map(|path| Kernel::read(log, path)).collect()
}

/// The file of a wheel, or why there is none.
fn tool(log: &mut Log, workspace: &Workspace, wheel: Wheel, path: &str) -> Result<Result<PathBuf, String>, String> {
    if !is_there("python3") {
        return Ok(Err("python3 is not installed, which fetches and unpacks wheels".to_owned()));
    }
    Ok(match unpacked(log, workspace, wheel)? {
        Some(root) => Ok(root.join(path)),
        None => Err(format!("{} cannot be downloaded", wheel.requirement)),
    })
}

/// `cargo xtask ptx`: writes every PTX file anew.
pub(crate) fn regenerate(log: &mut Log, workspace: &Workspace) -> Result<(), String> {
    let library = tool(log, workspace, NVRTC, NVRTC_PATH)??;
    for kernel in kernels(log, workspace)? {
        let path = kernel.ptx_path();
        fs::write(&path, kernel.compile(&library)?).map_err(|error| format!("{}: {error}", path.display()))?;
        log.keep(format!("    {}", path.display()));
    }
    match assemble(log, workspace)? {
        Verdict::Passed => Ok(()),
        Verdict::Skipped(why) => Err(format!("written, but not assembled: {why}")),
    }
}

/// `cargo xtask ptx --check` and the CI step: headers and hashes always; where the compiler is there or can be fetched,
/// that it makes the same of the source, and that the result can be assembled.
pub(crate) fn check(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    let kernels = kernels(log, workspace)?;
    kernels.iter().try_for_each(Kernel::check_header)?;
    log.keep(format!("{} PTX files belong to their sources", kernels.len()));
    let library = match tool(log, workspace, NVRTC, NVRTC_PATH)? {
        Ok(library) => library,
        Err(why) => return Ok(Verdict::Skipped(format!("headers and hashes are right; not compiled again: {why}"))),
    };
    for kernel in &kernels {
        if kernel.compile(&library)? != read(&kernel.ptx_path())? {
            return Err(format!("{} is not what the compiler makes of its source", kernel.shown()));
        }
    }
    assemble(log, workspace)
}

fn assemble(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    let ptxas = match tool(log, workspace, PTXAS, PTXAS_PATH)? {
        Ok(ptxas) => ptxas,
        Err(why) => return Ok(Verdict::Skipped(format!("not assembled: {why}"))),
    };
    // Python's zipfile does not keep the permission to execute.
    fs::set_permissions(&ptxas, fs::Permissions::from_mode(0o755))
        .map_err(|error| format!("{}: {error}", ptxas.display()))?;
    let program = ptxas.display().to_string();
    for kernel in kernels(log, workspace)? {
        for architecture in kernel.level.assembled_for {
            let flags = ["--warning-as-error", "--output-file", "/dev/null", "--gpu-name", architecture];
            let mut job = command(&program, flags);
            job.arg(kernel.ptx_path());
            run(log, job)?;
        }
    }
    Ok(Verdict::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_header_goes() {
        let ptx = "//\n// NVVM\n\n.version 8.4\n.target sm_70\n.address_size 64\n\n\t// .globl\tk\n.visible .entry k() { ret; }\n\n";
        assert_eq!(body(ptx), Some("// .globl\tk\n.visible .entry k() { ret; }"));
        assert_eq!(body("error"), None);
    }

    #[test]
    fn only_own_headers_are_includes() {
        let text = "#include \"a.cuh\"\n#include <cuda.h>\n// #include \"b.cuh\"\n#include \"../c.cuh\"\n";
        assert_eq!(included(text).collect::<Vec<_>>(), ["a.cuh", "../c.cuh"]);
    }

    #[test]
    fn what_headers_include_is_read_once() {
        let scratch = std::env::temp_dir().join(format!("xtask-ptx-includes-{}", std::process::id()));
        fs::create_dir_all(&scratch).unwrap();
        for (name, text) in [
            ("push_bulk.cu", "#include \"a.cuh\"\n#include \"k.cu\"\n"),
            ("k.cu", "#include \"a.cuh\"\n#include \"b.cuh\"\n"),
            ("a.cuh", ""),
            ("b.cuh", "#include \"a.cuh\"\n"),
        ] {
            fs::write(scratch.join(name), text).unwrap();
        }
        let mut log = Log::new(std::io::sink());
        let mut read = |name: &str| Kernel::read(&mut log, scratch.join(name)).unwrap();
        let (common, bulk) = (read("k.cu"), read("push_bulk.cu"));
        let names = |kernel: &Kernel| kernel.includes.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&common), ["a.cuh", "b.cuh"]);
        assert_eq!(names(&bulk), ["a.cuh", "k.cu", "b.cuh"]);
        assert_eq!((common.origin.len(), bulk.origin.len()), (3, 4));
        assert_eq!((common.level, bulk.level), (&COMMON, &BULK));
        fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    fn a_changed_source_or_header_is_noticed() {
        let scratch = std::env::temp_dir().join(format!("xtask-ptx-{}", std::process::id()));
        fs::create_dir_all(&scratch).unwrap();
        let (source, header) = (scratch.join("k.cu"), scratch.join("h.cuh"));
        fs::write(&source, "#include \"h.cuh\"\n").unwrap();
        fs::write(&header, "").unwrap();
        let mut log = Log::new(std::io::sink());
        let mut checked = || Kernel::read(&mut log, source.clone()).and_then(|kernel| kernel.check_header());
        assert!(checked().unwrap_err().contains("k.ptx"), "there is none yet");

        let mut other = Log::new(std::io::sink());
        let kernel = Kernel::read(&mut other, source.clone()).unwrap();
        fs::write(kernel.ptx_path(), format!("{}\n{}\n", kernel.origin.join("\n"), COMMON.header.join("\n"))).unwrap();
        assert_eq!(checked(), Ok(()));
        fs::write(&header, "// changed\n").unwrap();
        assert!(checked().unwrap_err().contains("h.cuh"));
        fs::write(&header, "").unwrap();
        fs::write(kernel.ptx_path(), format!("{}\n.version 9.0\n", kernel.origin.join("\n"))).unwrap();
        assert!(checked().unwrap_err().contains("`.version 9.0` should be `.version 7.0`"));
        fs::remove_dir_all(&scratch).unwrap();
    }
}
