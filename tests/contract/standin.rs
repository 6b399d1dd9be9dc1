//! The contract over backend `gdrdrv`, on every version of the module and in each of its modes.
//!
//! The module is the stand-in's, which has to be there from the start: each setting is a process of its own.

use std::path::Path;
use std::process::Command;
use std::thread;

use crate::common::standin::{MODULES, Module, command, counted, text};

/// Everything but what has nothing to do with the backend, and this.
const OTHERS: [&str; 4] = ["--skip", "emulated::", "--skip", "standin::"];

fn listed(mut command: Command) -> usize {
    let output = command.args(OTHERS).arg("--list").output().expect("a process");
    text(&output).lines().filter(|line| line.ends_with(": test")).count()
}

fn passes(module: Module, tests: usize) {
    let output = command(module).args(OTHERS).output().expect("a process");
    let text = text(&output);
    assert!(output.status.success() && !text.contains("SKIPPED"), "{module:?}: {text}");
    assert_eq!(counted(&text, "passed"), tests, "{module:?}: {text}");
}

#[test]
fn every_module_version_keeps_the_contract() {
    if Module::here().is_some() {
        return;
    }
    // A binary that was carried elsewhere has nowhere to build the stand-in.
    if !Path::new(env!("CARGO_TARGET_TMPDIR")).exists() {
        eprintln!("SKIPPED the stand-in: this is not the machine that the tests were built on");
        return;
    }
    let tests = listed(command(MODULES[0]));
    assert!(tests > 20, "the contract has {tests} tests");
    for pair in MODULES.chunks(2) {
        thread::scope(|scope| {
            for &module in pair {
                scope.spawn(move || passes(module, tests));
            }
        });
    }
}
