//! The library's contract suite inside the guest, over the kernel module.
//!
//! The guest has no CUDA: the stand-in of `tests/standin` plays it, with the device's own memory behind it, and leaves
//! `/dev/gdrdrv` to the module.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::bundle::executables;
use crate::c_programs::stand_in;
use crate::run::{Log, capture, cargo, command, query};
use crate::vm_build::Program;
use crate::workspace::{LIBRARY, Workspace};

/// A file of the guest, by its path there.
#[derive(Debug)]
pub(crate) struct GuestFile {
    pub(crate) place: String,
    pub(crate) path: PathBuf,
}

const HOME: &str = "/contract";

/// Runs each test in a process of its own, since the stand-in gives no address out twice, and reports as TAP.
const SCRIPT: &str = r#"#!/bin/sh
bar=
for file in /sys/bus/pci/devices/*/resource2; do bar=$file; done
export GDRCOPY_STANDIN_MEMORY=$bar GDRCOPY_STANDIN_VA=0x1000000000 GDRCOPY_TEST_REQUIRE=gdrdrv
export GDRCOPY_STANDIN_FREE=/sys/kernel/debug/nvp2p/free
[ "$GDRDRV_PERSISTENT" = 1 ] && export GDRCOPY_STANDIN_PERSISTENT=1
suite() { LD_PRELOAD=/contract/libcuda.so.1 /contract/contract "$@" --test-threads=1; }
suite --list --skip emulated:: --skip standin:: | sed -n 's/: test$//p' >/tmp/contract
echo "1..$(wc -l </tmp/contract)"
n=0
while read -r test; do
    n=$((n + 1))
    if suite --exact "$test" >/tmp/contract.log 2>&1 && ! grep -q '^SKIPPED gdrdrv' /tmp/contract.log; then
        echo "ok $n - $test"
    else
        echo "not ok $n - $test"
        sed 's/^/# /' /tmp/contract.log
    fi
done </tmp/contract
"#;

/// The suite as a program of the guest's, and the files that it needs there.
pub(crate) fn collect(log: &mut Log, workspace: &Workspace, dir: &Path) -> Result<(Program, Vec<GuestFile>), String> {
    let flags = ["test", "--no-run", "--locked", "--release", "-p", LIBRARY, "--features", "tools"];
    let messages = capture(log, cargo(flags.into_iter().chain(["--test", "contract", "--message-format", "json"])))?;
    let suite = executables(&messages)?.remove("contract").ok_or("cargo built no contract suite")?;
    let stripped = dir.join("contract");
    let mut strip = command("strip", ["-o"]);
    strip.arg(&stripped).arg(&suite);
    crate::run::run(log, strip)?;
    let cuda = stand_in(log, workspace)?;

    let mut files = Vec::new();
    for program in [&stripped, &cuda] {
        for library in libraries(program)? {
            let path = PathBuf::from(&library);
            files.push(GuestFile { place: library, path });
        }
    }
    files.push(GuestFile { place: format!("{HOME}/contract"), path: stripped });
    files.push(GuestFile { place: format!("{HOME}/libcuda.so.1"), path: cuda });
    let mut seen = BTreeSet::new();
    files.retain(|file| seen.insert(file.place.clone()));

    let script = dir.join("contract.sh");
    fs::write(&script, SCRIPT).map_err(|error| format!("{}: {error}", script.display()))?;
    Ok((Program { name: "85-contract".to_owned(), path: script }, files))
}

/// The shared libraries, the loader too, that a program is started with.
fn libraries(program: &Path) -> Result<Vec<String>, String> {
    let text =
        query("ldd", [program.to_string_lossy().as_ref()]).ok_or_else(|| format!("ldd {}", program.display()))?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(Into::into)
        .collect())
}
