//! Ctrl-C, and what a terminal sees.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::program::{Scratch, text};
use super::{APIPERF, COPYBW, COPYLAT, TOOLS, Tool, assert_ok, results};

/// Flags of a run that would not end, whose first row is there at once.
const ENDLESS: [(Tool, &[&str]); 3] = [
    (COPYLAT, &["--sizes", "1,16M", "-w", "100000", "-r", "0"]),
    (COPYBW, &["--sizes", "1,16M", "-w", "1000000", "-r", "0"]),
    (APIPERF, &["--sizes", "64K,128K", "-n", "100000", "-w", "0"]),
];

/// Runs until the first row of a table is printed, then sends the signal.
#[track_caller]
fn interrupted(tool: Tool, args: &[&str], signal: &str) -> (std::process::ExitStatus, String) {
    let mut child = tool.command().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let is_row = |line: &str| line.split_whitespace().next().is_some_and(|word| matches!(word, "1" | "h2d" | "65536"));
    assert!(lines.any(|line| is_row(&line.unwrap())), "a row of {}", tool.name);
    let kill = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().unwrap();
    assert!(kill.success());
    lines.for_each(drop);
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (child.wait().unwrap(), stderr)
}

#[test]
fn an_interrupted_run_reports_what_it_has_and_says_so() {
    for (tool, args) in ENDLESS {
        let scratch = Scratch::new(&format!("{}-interrupted", tool.name));
        let (json, csv, svg) = (scratch.path("out.json"), scratch.path("out.csv"), scratch.path("out.svg"));
        let args = [args, &["--json", &json, "--csv", &csv, "--plot", &svg]].concat();
        for signal in ["INT", "TERM"] {
            let (status, stderr) = interrupted(tool, &args, signal);
            assert_eq!(status.code(), Some(130), "{}: {stderr}", tool.name);
            let last = stderr.lines().last().unwrap();
            assert!(last.starts_with(&format!("{}: interrupted", tool.name)), "{stderr}");
            let report: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
            assert_eq!(report["partial"], true);
            let first = results(&report)[0]["bytes"].clone();
            assert!(results(&report).iter().all(|entry| entry["bytes"] == first), "whole rows only: {report}");
            let csv = fs::read_to_string(&csv).unwrap();
            let mut rows = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
            let titles = rows.next().unwrap();
            let at = titles.iter().position(|title| *title == "partial").unwrap();
            let marks: Vec<_> = rows.map(|row| row[at]).collect();
            assert!(!marks.is_empty() && marks.iter().all(|mark| *mark == "true"), "{csv}");
            assert!(fs::read_to_string(&svg).unwrap().contains("PARTIAL"));
        }
    }
}

#[test]
fn an_end_before_the_first_row_is_an_end_all_the_same() {
    let mut child = COPYLAT.command();
    child
        .args(["--sizes", "16M", "-w", "1000000", "-r", "0", "--no-echo"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("Mapping::write")));
    let kill = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap();
    assert!(kill.success());
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// What a run prints on a terminal: both streams, as the terminal gets them.
fn on_a_terminal(tool: Tool, flags: &str) -> Option<String> {
    let line = format!("{} {} {flags}", tool.path, tool.small.join(" "));
    let mut command = tool.command();
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
    script.env_clear().envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    script.env("PATH", std::env::var_os("PATH")?).env("TERM", "xterm");
    let output = script.output().ok()?;
    assert_ok(&output);
    command.env_clear();
    Some(text(&output.stdout).to_owned())
}

#[test]
fn a_terminal_gets_a_progress_bar_and_a_pipe_none() {
    const BAR: &str = "Ctrl-C: report what there is";
    for tool in TOOLS {
        let Some(seen) = on_a_terminal(tool, "") else {
            println!("SKIPPED: no `script` here (Debian: bsdutils)");
            return;
        };
        assert!(seen.contains(BAR), "{}: {seen:?}", tool.name);
        assert!(!seen.contains("\u{1b}[?25l"), "{}: the cursor stays visible", tool.name);
        // The bar is gone in the end: its line was cleared after it was drawn last.
        let last = seen.rfind(BAR).unwrap();
        assert!(seen[last..].contains("\u{1b}[2K"), "{}: {:?}", tool.name, &seen[last..]);
        assert!(!on_a_terminal(tool, "--no-progress").unwrap().contains(BAR), "{}", tool.name);
        let piped = tool.small(&[]);
        assert!(!text(&piped.stdout).contains(BAR) && !text(&piped.stderr).contains(BAR), "{}", tool.name);
        assert!(!text(&piped.stdout).contains('\u{1b}') && piped.stderr.is_empty(), "{}", tool.name);
    }
}
