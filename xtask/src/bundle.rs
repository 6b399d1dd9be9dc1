//! `cargo xtask gpu-bundle`: release programs and tests in one folder, to be run on a machine that has a GPU and no Rust.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::run::{Log, capture, cargo, command, query, run};
use crate::workspace::{LIBRARY, Workspace};

/// The script that runs what lies beside it.
pub(crate) const SCRIPT: &str = "run.sh";
const SCRIPT_TEXT: &str = include_str!("../run.sh");

/// Says what the folder was built from, and marks it as ours to replace.
const ORIGIN: &str = "build.txt";

/// Names the tests beside the script, one a line, in the order in which they run.
const TESTS: &str = "tests.txt";

/// Integration tests that stay here, for they prove nothing on a GPU that they do not prove here, or need the module's
/// virtual machine. So do those that run cargo's programs, which lie elsewhere there. All others go along.
const STAY: [&str; 9] =
    ["agent", "auto", "channel", "copy_alloc", "copy_once", "gdrdrv", "ordering", "pin_pages", "session_env"];
/// What cargo tells a test about where it put a program.
const RUNS_PROGRAMS: &str = "CARGO_BIN_EXE_";

/// The proof of the copy engine's targets.
const BENCH: &str = "limits";

/// The C library, every backend built in, and what tries it on PyTorch's memory.
const C_PACKAGE: &str = "gdrapi";
const C_LIBRARY: &str = "libgdrapi.so.2";
const TORCH: &str = "ffi/tests/gpu/torch_tensors.py";

const MAX_BYTES: u64 = 48 << 20;

pub(crate) fn build(log: &mut Log, workspace: &Workspace, out: &Path) -> Result<(), String> {
    let package = ["--locked", "--release", "-p", LIBRARY, "--features", "tools,vulkan", "--message-format", "json"];
    let mut messages = capture(log, cargo(["build", "--bins", "--bench", BENCH].into_iter().chain(package)))?;
    let mut tests = ["test", "--no-run", "--lib"].into_iter().chain(package).collect::<Vec<_>>();
    for name in &workspace.tests {
        if goes_along(workspace, name)? {
            tests.extend(["--test", name]);
        }
    }
    messages.push_str(&capture(log, cargo(tests))?);
    let library = ["--locked", "--release", "-p", C_PACKAGE, "--features", "vulkan", "--message-format", "json"];
    let library = capture(log, cargo(["build"].into_iter().chain(library)))?;

    empty(out)?;
    for (name, path) in executables(&messages)? {
        copy_stripped(log, &path, &out.join(name))?;
    }
    copy_stripped(log, &shared_library(&library)?, &out.join(C_LIBRARY))?;
    let torch = workspace.root.join(TORCH);
    let name = torch.file_name().ok_or("a file without a name")?;
    fs::copy(&torch, out.join(name)).map_err(at(&torch))?;
    write(&out.join(TESTS), &test_names(&messages)?)?;
    write(&out.join(ORIGIN), &origin())?;
    let script = out.join(SCRIPT);
    write(&script, SCRIPT_TEXT)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).map_err(at(&script))?;

    let bytes = report_sizes(log, out)?;
    if bytes < MAX_BYTES { Ok(()) } else { Err(format!("the bundle has {bytes} bytes; the limit is {MAX_BYTES}")) }
}

fn goes_along(workspace: &Workspace, test: &str) -> Result<bool, String> {
    if STAY.contains(&test) {
        return Ok(false);
    }
    let (folder, file) = (workspace.root.join("tests"), format!("{test}.rs"));
    let sources = match folder.join(&file) {
        alone if alone.exists() => vec![alone],
        _ => {
            let folder = folder.join(test);
            let entries =
                fs::read_dir(&folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(at(&folder))?;
            entries.iter().map(fs::DirEntry::path).filter(|path| path.is_file()).collect()
        }
    };
    for source in sources {
        if fs::read(&source)
            .map_err(at(&source))?
            .windows(RUNS_PROGRAMS.len())
            .any(|part| part == RUNS_PROGRAMS.as_bytes())
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The executables in cargo's JSON messages, by names without a hash: programs, benches and integration tests have their
/// own, the library's unit tests are `<library>-unit`.
pub(crate) fn executables(messages: &str) -> Result<BTreeMap<String, PathBuf>, String> {
    Ok(programs(messages)?.into_iter().map(|(name, path, _)| (name, path)).collect())
}

/// Name, path, and whether Rust's test harness runs it.
fn programs(messages: &str) -> Result<Vec<(String, PathBuf, bool)>, String> {
    let program = |message: &Value| {
        let target = &message["target"];
        let (path, name) = (message["executable"].as_str()?, target["name"].as_str()?);
        let (name, is_test) = match (target["kind"][0].as_str()?, message["profile"]["test"] == true) {
            ("bin", false) | ("bench", _) => (name.to_owned(), false),
            ("test", true) => (name.to_owned(), true),
            ("lib", true) => (format!("{name}-unit"), true),
            _ => return None,
        };
        Some((name, path.into(), is_test))
    };
    Ok(parsed(messages)?.iter().filter_map(program).collect())
}

fn parsed(messages: &str) -> Result<Vec<Value>, String> {
    let json = |line| serde_json::from_str(line).map_err(|error| format!("cargo printed no JSON: {error}"));
    messages.lines().map(json).collect()
}

/// The shared library in cargo's JSON messages.
fn shared_library(messages: &str) -> Result<PathBuf, String> {
    let messages = parsed(messages)?;
    let ours = messages.iter().filter(|message| message["target"]["name"] == C_PACKAGE);
    let files = ours.filter_map(|message| message["filenames"].as_array()).flatten().filter_map(Value::as_str);
    let found = files.into_iter().find(|file| file.ends_with(".so"));
    found.map(PathBuf::from).ok_or_else(|| format!("cargo built no shared library of {C_PACKAGE}"))
}

/// Quick ones first: the library's own, then by name, then what soaks.
fn test_names(messages: &str) -> Result<String, String> {
    let mut tests: Vec<String> =
        programs(messages)?.into_iter().filter_map(|(name, _, is_test)| is_test.then_some(name)).collect();
    tests.sort_by_key(|name| (name.contains("soak"), !name.ends_with("-unit"), name.clone()));
    Ok(tests.iter().map(|name| format!("{name}\n")).collect())
}

/// Makes an empty folder of `out`. Results in its sub-folders stay; a folder that is not a bundle is refused.
fn empty(out: &Path) -> Result<(), String> {
    fs::create_dir_all(out).map_err(at(out))?;
    let entries = fs::read_dir(out).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(at(out))?;
    if !entries.is_empty() && !out.join(ORIGIN).exists() {
        return Err(format!("{} is neither empty nor a bundle: name another folder with --out", out.display()));
    }
    for entry in entries {
        let path = entry.path();
        if entry.file_type().map_err(at(&path))?.is_file() {
            fs::remove_file(&path).map_err(at(&path))?;
        }
    }
    Ok(())
}

fn copy_stripped(log: &mut Log, from: &Path, to: &Path) -> Result<(), String> {
    if query("strip", ["--version"]).is_some() {
        run(log, command("strip", [Path::new("-o"), to, from]))
    } else if query("objcopy", ["--version"]).is_some() {
        run(log, command("objcopy", [Path::new("--strip-all"), from, to]))
    } else {
        log.keep("neither strip nor objcopy is installed (Debian: binutils): symbols are kept".to_owned());
        fs::copy(from, to).map(drop).map_err(at(to))
    }
}

/// The commit, the compiler and the C library that the programs come from: a result without them is no evidence.
fn origin() -> String {
    let mut text = String::new();
    for (program, args) in [
        ("git", &["rev-parse", "HEAD"][..]),
        ("git", &["status", "--short"]),
        ("rustc", &["--version", "--verbose"]),
        ("ldd", &["--version"]),
    ] {
        let answer = query(program, args.iter().copied()).unwrap_or_else(|| "not available\n".to_owned());
        text.push_str(&format!("$ {program} {}\n{answer}\n", args.join(" ")));
    }
    text
}

fn report_sizes(log: &mut Log, out: &Path) -> Result<u64, String> {
    let mut sizes = Vec::new();
    for entry in fs::read_dir(out).map_err(at(out))? {
        let entry = entry.map_err(at(out))?;
        let metadata = entry.metadata().map_err(at(out))?;
        if metadata.is_file() {
            sizes.push((entry.file_name().display().to_string(), metadata.len()));
        }
    }
    sizes.sort();
    for (name, bytes) in &sizes {
        log.keep(format!("{bytes:>10} bytes  {name}"));
    }
    let total = sizes.iter().map(|(_, bytes)| bytes).sum();
    log.keep(format!("{total:>10} bytes in {}", out.display()));
    Ok(total)
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(at(path))
}

fn at(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_get_stable_names() {
        let artifact = |kind: &str, name: &str, test: bool, path: Option<&str>| {
            let target = serde_json::json!({"kind": [kind], "name": name});
            serde_json::json!({"target": target, "profile": {"test": test}, "executable": path}).to_string()
        };
        let messages = [
            artifact("lib", "libc", false, None),
            artifact("bin", "gdrcopy_copylat", false, Some("/t/gdrcopy_copylat")),
            artifact("bin", "gdrcopy_copylat", true, Some("/t/deps/gdrcopy_copylat-2c")),
            artifact("lib", "gdrcopy", true, Some("/t/deps/gdrcopy-0a")),
            artifact("test", "gpu", true, Some("/t/deps/gpu-1b")),
            artifact("test", "a_soak", true, Some("/t/deps/a_soak-3d")),
            artifact("bench", "limits", true, Some("/t/deps/limits-4e")),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let expected = [
            ("a_soak", "/t/deps/a_soak-3d"),
            ("gdrcopy-unit", "/t/deps/gdrcopy-0a"),
            ("gdrcopy_copylat", "/t/gdrcopy_copylat"),
            ("gpu", "/t/deps/gpu-1b"),
            ("limits", "/t/deps/limits-4e"),
        ];
        let expected = expected.map(|(name, path)| (name.to_owned(), PathBuf::from(path)));
        let messages = messages.join("\n");
        assert_eq!(executables(&messages), Ok(BTreeMap::from(expected)));
        assert_eq!(test_names(&messages).as_deref(), Ok("gdrcopy-unit\ngpu\na_soak\n"));
        assert!(executables("warning: text").is_err());
    }

    #[test]
    fn the_shared_library_is_found_among_what_was_built() {
        let artifact = |name: &str, files: &[&str]| {
            serde_json::json!({"target": {"name": name}, "filenames": files, "executable": null}).to_string()
        };
        let messages =
            [artifact("gdrcopy", &["/t/libgdrcopy.rlib"]), artifact("gdrapi", &["/t/libgdrapi.a", "/t/libgdrapi.so"])];
        assert_eq!(shared_library(&messages.join("\n")), Ok(PathBuf::from("/t/libgdrapi.so")));
        assert!(shared_library(&messages[0]).is_err());
    }

    #[test]
    fn tests_go_along_unless_they_belong_here() {
        let workspace = Workspace::load().unwrap();
        let (along, stay): (Vec<&str>, Vec<&str>) =
            workspace.tests.iter().map(String::as_str).partition(|name| goes_along(&workspace, name).unwrap());
        for name in ["gpu", "gpu_stale", "contract", "hot_path", "vulkan", "parallel"] {
            assert!(along.contains(&name), "{along:?}");
        }
        for name in STAY.into_iter().chain(["tools_cli"]) {
            assert!(stay.contains(&name), "{stay:?}");
        }
        assert!(workspace.root.join(TORCH).exists());
    }

    #[test]
    fn a_folder_that_is_not_a_bundle_is_refused() {
        let scratch = std::env::temp_dir().join(format!("xtask-bundle-{}", std::process::id()));
        fs::create_dir_all(scratch.join("out")).unwrap();
        fs::write(scratch.join("letter.txt"), "keep me").unwrap();
        assert!(empty(&scratch).is_err());
        assert!(scratch.join("letter.txt").exists());

        fs::write(scratch.join(ORIGIN), "").unwrap();
        assert_eq!(empty(&scratch), Ok(()));
        assert!(!scratch.join("letter.txt").exists() && scratch.join("out").exists());
        fs::remove_dir_all(&scratch).unwrap();
    }
}
