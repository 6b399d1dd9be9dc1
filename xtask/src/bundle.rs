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

/// Integration tests that belong on a GPU; the others prove nothing there that they do not prove here.
const TESTS: [&str; 6] = ["gpu", "gpu_channel", "gpu_stale", "contract", "hot_path", "vulkan"];

const MAX_BYTES: u64 = 40 << 20;

pub(crate) fn build(log: &mut Log, workspace: &Workspace, out: &Path) -> Result<(), String> {
    let package = ["--locked", "--release", "-p", LIBRARY, "--features", "tools,vulkan", "--message-format", "json"];
    let mut messages = capture(log, cargo(["build", "--bins"].into_iter().chain(package)))?;
    let present = TESTS.into_iter().filter(|&test| workspace.tests.iter().any(|name| name == test));
    let tests =
        ["test", "--no-run", "--lib"].into_iter().chain(package).chain(present.flat_map(|test| ["--test", test]));
    messages.push_str(&capture(log, cargo(tests))?);

    empty(out)?;
    for (name, path) in executables(&messages)? {
        copy_stripped(log, &path, &out.join(name))?;
    }
    write(&out.join(ORIGIN), &origin())?;
    let script = out.join(SCRIPT);
    write(&script, SCRIPT_TEXT)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).map_err(at(&script))?;

    let bytes = report_sizes(log, out)?;
    if bytes < MAX_BYTES { Ok(()) } else { Err(format!("the bundle has {bytes} bytes; the limit is {MAX_BYTES}")) }
}

/// The executables in cargo's JSON messages, by names without a hash: programs and integration tests have their own, the
/// library's unit tests are `<library>-unit`.
pub(crate) fn executables(messages: &str) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut found = BTreeMap::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).map_err(|error| format!("cargo printed no JSON: {error}"))?;
        let target = &message["target"];
        let (Some(path), Some(target_name)) = (message["executable"].as_str(), target["name"].as_str()) else {
            continue;
        };
        let name = match (target["kind"][0].as_str(), message["profile"]["test"] == true) {
            (Some("bin"), false) | (Some("test"), true) => target_name.to_owned(),
            (Some("lib"), true) => format!("{target_name}-unit"),
            _ => continue,
        };
        found.insert(name, path.into());
    }
    Ok(found)
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
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let expected = [
            ("gdrcopy-unit", "/t/deps/gdrcopy-0a"),
            ("gdrcopy_copylat", "/t/gdrcopy_copylat"),
            ("gpu", "/t/deps/gpu-1b"),
        ];
        let expected = expected.map(|(name, path)| (name.to_owned(), PathBuf::from(path)));
        assert_eq!(executables(&messages.join("\n")), Ok(BTreeMap::from(expected)));
        assert!(executables("warning: text").is_err());
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
