//! The outputs as they are, with everything masked that differs from run to run. After a wanted change,
//! `UPDATE_SNAPSHOTS=1 cargo test --features tools --test tools_cli snapshots` writes the files anew.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::program::text;
use super::{APIPERF, COPYBW, COPYLAT, TOOLS, Tool, assert_ok, report};

/// Columns whose fields are the same in every run.
const STEADY: [&str; 7] = ["offset", "size", "Size(B)", "direction", "method", "call", "samples"];

/// One space between words; figures as `#`; the facts of the machine as `..`.
fn masked(text: &str) -> String {
    let mut titles: Vec<&str> = Vec::new();
    // The table whose rows have as many samples as the time allowed.
    let mut is_timed = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(&first) = words.first() else {
            lines.push(String::new());
            continue;
        };
        if ["sustained", "issue", "drained", "single", "visible"].contains(&first) {
            is_timed = first == "visible";
        }
        // Which method is the quickest at which size differs from run to run.
        if line.starts_with("    ") && line.contains(" up to ") {
            continue;
        }
        if words.contains(&"size") || first == "Size(B)" {
            titles = words.clone();
        }
        let is_row = first.starts_with(|c: char| c.is_ascii_digit()) || ["h2d", "d2h"].contains(&first);
        lines.push(match first {
            "CPU" | "Clock" | "Hiccups" => format!("{first} .."),
            "Mapping" => line.split_once("routine ").map_or(line, |(rest, _)| rest).to_owned() + "routine ..",
            _ if first.starts_with("gdrcopy_") => format!("{first} .."),
            _ if line.starts_with("  ") && (line.contains(" memory: ") || line.contains(", auto: ")) => {
                let (what, _) = line.split_once(": ").unwrap();
                format!("{}: ..", what.replace("any or page-locked", "any"))
            }
            "It" if words[1] == "used" => "It used ..".to_owned(),
            "less" => "less # ns for the answer's way ..".to_owned(),
            _ if is_row => row(&words, &titles, is_timed),
            _ => words.join(" "),
        });
    }
    lines.join("\n") + "\n"
}

fn row(words: &[&str], titles: &[&str], is_timed: bool) -> String {
    let field = |(n, word): (usize, &&str)| match titles.get(n) {
        Some(&("samples" | "p99" | "p99.9")) if is_timed => "#".to_owned(),
        Some(title) if STEADY.contains(title) => (*word).to_owned(),
        // Left out, as it is in every run with so few samples.
        Some(&("p99" | "p99.9")) if *word == "-" => "-".to_owned(),
        _ => "#".to_owned(),
    };
    words.iter().enumerate().map(field).collect::<Vec<_>>().join(" ")
}

fn mask_json(value: &mut Value, name: &str) {
    match value {
        Value::Object(fields) => {
            fields.iter_mut().for_each(|(field, value)| mask_json(value, if name == "host" { "host" } else { field }))
        }
        Value::Array(values) if name == "counts" => *value = Value::from(format!("{} numbers", values.len())),
        Value::Array(values) => values.iter_mut().for_each(|value| mask_json(value, name)),
        _ if name.ends_with("_ns") || ["host", "version", "routine"].contains(&name) => *value = "#".into(),
        _ => {}
    }
}

#[track_caller]
fn assert_snapshot(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, found).unwrap();
    }
    let wanted = fs::read_to_string(&path).unwrap_or_default();
    let differ = found.lines().zip(wanted.lines()).position(|(found, wanted)| found != wanted);
    let at = differ.unwrap_or_else(|| found.lines().count().min(wanted.lines().count()));
    let line = |text: &str| text.lines().nth(at).unwrap_or("(no more lines)").to_owned();
    assert!(
        found == wanted,
        "{name}, line {}:\n  found  {}\n  wanted {}\nUPDATE_SNAPSHOTS=1 accepts the change; look at it",
        at + 1,
        line(found),
        line(&wanted)
    );
}

fn assert_text(name: &str, tool: Tool, args: &[&str]) {
    let output = tool.run(args);
    assert_ok(&output);
    assert_snapshot(name, &masked(text(&output.stdout)));
}

fn assert_json(name: &str, tool: Tool, args: &[&str]) {
    let mut report = report(&tool.run(&[args, &["--json", "-"]].concat()));
    // These counts depend on how fast the machine is.
    if let Some(hiccups) = report.get_mut("hiccups") {
        hiccups["iterations"] = "#".into();
    }
    for entry in report["results"].as_array_mut().unwrap().iter_mut().filter(|e| e["metric"] == "gpu_visible") {
        entry["iterations"] = "#".into();
    }
    mask_json(&mut report, "");
    assert_snapshot(name, &(serde_json::to_string_pretty(&report).unwrap() + "\n"));
}

#[test]
fn copylat() {
    let counts = ["-w", "1000", "-r", "40"];
    assert_text("copylat.txt", COPYLAT, &[&counts[..], &["-s", "4K"]].concat());
    assert_text("copylat-cold.txt", COPYLAT, &[&counts[..], &["-C", "--sizes", "1,64K", "--no-verify"]].concat());
    let offsets = ["--sizes", "7,64", "--offsets", "0,63", "--no-echo"];
    assert_text("copylat-offsets.txt", COPYLAT, &[&counts[..], &offsets].concat());
    assert_json("copylat.json", COPYLAT, &[&counts[..], &["--sizes", "64"]].concat());
    // A number of threads that every machine has.
    let methods = ["--methods", "all", "--threads", "1", "--stand-in", "--no-echo"];
    let all = [&["-w", "100", "-r", "40"][..], &methods, &["--sizes", "64,4K"]].concat();
    assert_text("copylat-methods.txt", COPYLAT, &all);
    assert_json("copylat-methods.json", COPYLAT, &all);
    assert_text("copylat-methods-cold.txt", COPYLAT, &[&all[..], &["-C"]].concat());
}

#[test]
fn copybw() {
    let counts = ["-w", "300", "-r", "40"];
    assert_text("copybw.txt", COPYBW, &counts);
    assert_text("copybw-sweep.txt", COPYBW, &[&counts[..], &["-l", "-c", "1K", "-o", "64"]].concat());
    assert_json("copybw.json", COPYBW, &counts);
}

#[test]
fn apiperf() {
    assert_text("apiperf.txt", APIPERF, &["-s", "128K", "-n", "50", "-w", "1"]);
    assert_json("apiperf.json", APIPERF, &["-s", "64K", "-n", "50", "-w", "1"]);
}

#[test]
fn csv_columns() {
    for tool in TOOLS {
        let output = tool.small(&["--csv", "-"]);
        assert_ok(&output);
        let titles = text(&output.stdout).lines().next().unwrap().replace(',', "\n") + "\n";
        assert_snapshot(&format!("{}.csv.txt", tool.name.trim_start_matches("gdrcopy_")), &titles);
    }
}

#[test]
fn help() {
    for tool in TOOLS {
        let output = tool.run(&["-h"]);
        assert_ok(&output);
        assert_snapshot(&format!("{}-help.txt", tool.name.trim_start_matches("gdrcopy_")), text(&output.stdout));
    }
}

#[test]
fn masking_hides_figures_and_nothing_else() {
    let found = masked("gdrcopy_x 1.2.3\nCPU  3: Some\n  size  p99 samples\n   [B] [ns]\n  64Ki 17.5 200\n  1 - 20\n");
    assert_eq!(found, "gdrcopy_x ..\nCPU ..\nsize p99 samples\n[B] [ns]\n64Ki # 200\n1 - 20\n");
    let mut json = serde_json::json!({"host": {"cpu": 3}, "results": [{"p50_ns": 3.5, "bytes": 64}], "schema": 1});
    mask_json(&mut json, "");
    let wanted = serde_json::json!({"host": {"cpu": "#"}, "results": [{"p50_ns": "#", "bytes": 64}], "schema": 1});
    assert_eq!(json, wanted);
}
