//! `gdrcopy_copylat`, `gdrcopy_copybw` and `gdrcopy_apiperf` as a user meets them: the real programs, on the emulated
//! backend.

#![cfg(feature = "tools")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests, too")]

#[path = "../common/program.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]
mod program;

mod apiperf;
mod copybw;
mod copylat;
mod ending;
mod everyone;
mod snapshots;

use std::process::{Command, Output};

use program::{plain, text};
use serde_json::Value;

/// A program, and flags with which it takes a fraction of a second.
#[derive(Clone, Copy)]
struct Tool {
    name: &'static str,
    path: &'static str,
    small: &'static [&'static str],
}

const COPYLAT: Tool = Tool {
    name: "gdrcopy_copylat",
    path: env!("CARGO_BIN_EXE_gdrcopy_copylat"),
    small: &["-s", "4K", "-w", "200", "-r", "50", "--no-echo"],
};
const COPYBW: Tool = Tool {
    name: "gdrcopy_copybw",
    path: env!("CARGO_BIN_EXE_gdrcopy_copybw"),
    small: &["-s", "64K", "-w", "200", "-r", "50"],
};
const APIPERF: Tool = Tool {
    name: "gdrcopy_apiperf",
    path: env!("CARGO_BIN_EXE_gdrcopy_apiperf"),
    small: &["-s", "128K", "-n", "20", "-w", "2"],
};
const TOOLS: [Tool; 3] = [COPYLAT, COPYBW, APIPERF];

impl Tool {
    /// On one emulated GPU, in an environment that sets nothing else of ours.
    fn command(&self) -> Command {
        let mut command = plain(self.path);
        command.env("GDRCOPY_BACKEND", "emulated");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command().args(args).output().unwrap()
    }

    /// With the flags that make it short.
    fn small(&self, args: &[&str]) -> Output {
        self.command().args(self.small).args(args).output().unwrap()
    }

    #[track_caller]
    fn refusal<'a>(&self, output: &'a Output) -> (i32, &'a str) {
        program::refusal(self.name, output)
    }
}

#[track_caller]
fn assert_ok(output: &Output) {
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
}

/// The report that a run printed on standard output, where nothing else may be.
#[track_caller]
fn report(output: &Output) -> Value {
    assert_ok(output);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn results(report: &Value) -> &[Value] {
    report["results"].as_array().unwrap()
}
