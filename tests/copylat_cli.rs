//! `gdrcopy_copylat` as a user meets it: the real program, on the emulated backend.

#![cfg(feature = "tools")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests, too")]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Flags of a run that takes a fraction of a second.
const SMALL: [&str; 6] = ["-s", "4K", "-w", "200", "-r", "50"];

/// The program on one emulated GPU, in an environment that sets nothing else of ours.
fn copylat() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gdrcopy_copylat"));
    for name in ["GDRCOPY_RM", "GDRCOPY_COPY", "GDRCOPY_EMULATED_GPUS"] {
        command.env_remove(name);
    }
    command.env("GDRCOPY_BACKEND", "emulated").stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    copylat().args(args).output().unwrap()
}

fn small(args: &[&str]) -> Output {
    copylat().args(SMALL).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
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

/// Exit status and the one line on standard error that a refusal consists of.
#[track_caller]
fn refusal(output: &Output) -> (i32, &str) {
    let stderr = text(&output.stderr);
    assert_eq!(stderr.lines().count(), 1, "not one line: {stderr:?}");
    let line = stderr.trim_end().strip_prefix("gdrcopy_copylat: ");
    (output.status.code().unwrap(), line.expect("the line begins with the program's name"))
}

/// A directory that goes away with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("copylat-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_table_for_each_direction_under_a_banner() {
    let output = small(&[]);
    assert_ok(&output);
    let stdout = text(&output.stdout);
    for line in stdout.lines().filter(|line| !line.starts_with("CPU ")) {
        assert!(line.len() <= 100, "{} columns: {line}", line.len());
    }
    let tables: Vec<&str> = stdout.split("*** EMULATED GPU").skip(1).collect();
    assert_eq!(tables.len(), 2, "a banner above each table: {stdout}");
    for (table, heading) in tables.iter().zip(["Host to device", "Device to host"]) {
        let mut lines = table.lines();
        assert!(lines.next().unwrap().contains("say nothing about a GPU"));
        assert!(lines.next().unwrap().starts_with(heading));
        assert!(lines.next().unwrap().contains("sustained"));
        assert!(lines.next().unwrap().contains("[ns]"));
        let sizes: Vec<&str> = lines.map_while(|line| line.split_whitespace().next()).collect();
        assert_eq!(sizes, ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1Ki", "2Ki", "4Ki"]);
    }
    for fact in ["GPU ", "CPU ", "Mapping ", "backend emulated", "routine ", "Clock ", "kernel "] {
        assert!(stdout.contains(fact), "{fact}: {stdout}");
    }
}

#[test]
fn a_full_default_run_stays_under_30_seconds() {
    let begin = Instant::now();
    let output = run(&["--json", "-"]);
    let report = report(&output);
    for line in text(&output.stderr).lines().filter(|line| !line.starts_with("CPU ")) {
        assert!(line.len() <= 100, "{} columns: {line}", line.len());
    }
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    assert_eq!(results(&report).len(), 25 * 2 * 2);
    for entry in results(&report) {
        let most = if entry["direction"] == "h2d" { 10_000 } else { 100 };
        let calls = entry["iterations"].as_u64().unwrap();
        assert!((20..=most).contains(&calls), "{entry}");
        assert_eq!(entry["verified"], true);
    }
}

#[test]
fn json_follows_schema_1() {
    let scratch = Scratch::new("json");
    let path = scratch.path("out.json");
    fs::write(&path, "old").unwrap();
    assert_ok(&small(&["--json", &path]));
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(report["schema"], 1);
    assert_eq!(report["tool"], "gdrcopy_copylat");
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["backend"], "emulated");
    assert!(report["host"]["cpu_model"].is_string() && report["host"]["kernel"].is_string());
    assert!(report["mapping"]["type"].is_string() && report["mapping"]["routine"].is_string());
    assert_eq!(report["mapping"]["bytes"], 4096);
    assert!(report["timer_overhead_ns"].as_f64().unwrap() > 0.0);
    assert_eq!(results(&report).len(), 13 * 2 * 2);
    for entry in results(&report) {
        let ns = |name: &str| entry[name].as_f64().unwrap_or_else(|| panic!("{name} of {entry}"));
        let order = ["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns"].map(ns);
        // A byte in host memory can take less than the clock resolves.
        let least = if entry["bytes"] == 4096 { 1.0 } else { 0.0 };
        assert!(order.is_sorted() && order[0] >= least, "{entry}");
        assert_eq!(entry["method"], "bar1");
        assert_eq!(entry["offset"], 0);
        assert_eq!(entry["verified"], true);
        assert_eq!(entry["iterations"], if entry["direction"] == "h2d" { 200 } else { 50 }, "counts given are exact");
        assert_eq!(entry["mean_ns"].is_number(), entry["metric"] == "sustained", "{entry}");
    }
    for (direction, metric) in [("h2d", "sustained"), ("h2d", "single"), ("d2h", "sustained"), ("d2h", "single")] {
        let rows = results(&report).iter().filter(|entry| entry["direction"] == direction && entry["metric"] == metric);
        assert!(rows.map(|entry| entry["bytes"].as_u64().unwrap()).eq((0..13).map(|n| 1 << n)));
    }
    let names: Vec<_> = fs::read_dir(&scratch.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["out.json"], "no draft is left behind");
}

#[test]
fn a_report_on_standard_output_is_alone_there() {
    let output = small(&["--json", "-"]);
    report(&output);
    let stderr = text(&output.stderr);
    assert!(stderr.contains("EMULATED GPU") && stderr.contains("sustained"), "{stderr}");

    let output = small(&["--csv", "-"]);
    assert_ok(&output);
    let csv = text(&output.stdout);
    assert!(csv.starts_with("direction,method,metric,bytes,offset,verified,min_ns,"), "{csv}");
    assert_eq!(csv.lines().count(), 1 + 13 * 2 * 2);
    assert!(csv.lines().skip(1).all(|row| row.starts_with("h2d,bar1,") || row.starts_with("d2h,bar1,")));
    assert!(text(&output.stderr).contains("EMULATED GPU"));
}

#[test]
fn json_and_csv_tell_the_same() {
    let scratch = Scratch::new("same");
    let path = scratch.path("out.csv");
    let report = report(&small(&["--json", "-", "--csv", &path]));
    let csv = fs::read_to_string(path).unwrap();
    let mut rows = csv.lines().map(|row| row.split(',').collect::<Vec<_>>());
    let titles = rows.next().unwrap();
    let column = |name: &str| titles.iter().position(|title| *title == name).unwrap();
    assert_eq!(rows.clone().count(), results(&report).len());
    for (row, entry) in rows.zip(results(&report)) {
        for name in ["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns", "bytes", "iterations"] {
            assert_eq!(row[column(name)].parse::<f64>().unwrap(), entry[name].as_f64().unwrap(), "{name} of {entry}");
        }
        assert_eq!(row[column("direction")], entry["direction"].as_str().unwrap());
        assert_eq!(row[column("metric")], entry["metric"].as_str().unwrap());
    }
}

#[test]
fn sizes_and_offsets_make_a_grid() {
    let output = run(&["--sizes", "1,7,63-65:1", "--offsets", "0-2,63", "-w", "20", "-r", "20", "--json", "-"]);
    let report = report(&output);
    let cells: BTreeSet<_> = results(&report)
        .iter()
        .filter(|entry| entry["metric"] == "single" && entry["direction"] == "d2h" && entry["verified"] == true)
        .map(|entry| (entry["offset"].as_u64().unwrap(), entry["bytes"].as_u64().unwrap()))
        .collect();
    let wanted = [0, 1, 2, 63].into_iter().flat_map(|offset| [1, 7, 63, 64, 65].map(|bytes| (offset, bytes)));
    assert!(cells.into_iter().eq(wanted));
    assert!(text(&output.stderr).contains("  offset "));
}

#[test]
fn directions_checks_and_loops_can_be_left_out() {
    let entries = |args: &[&str]| {
        let output = copylat().args(["-s", "64", "--json", "-"]).args(args).output().unwrap();
        results(&report(&output)).to_vec()
    };
    assert!(entries(&["-w", "0", "-r", "20"]).iter().all(|entry| entry["direction"] == "d2h"));
    assert!(entries(&["-w", "20", "-r", "0"]).iter().all(|entry| entry["direction"] == "h2d"));
    assert!(entries(&["-w", "20", "-r", "20", "--no-verify"]).iter().all(|entry| entry["verified"] == false));
    let cold = entries(&["-w", "20", "-r", "20", "-C"]);
    assert_eq!(cold.len(), 7 * 2);
    assert!(cold.iter().all(|entry| entry["metric"] == "single" && entry["verified"] == true));
}

#[test]
fn the_comparison_is_passed_over_aloud_without_a_gpu() {
    for flag in [&["-c"][..], &["--compare", "cuda"]] {
        let output = small(flag);
        assert_ok(&output);
        assert!(text(&output.stderr).contains("-c is passed over"), "{}", text(&output.stderr));
    }
}

#[test]
fn every_allocator_can_be_measured() {
    for allocator in ["buffer", "cuMemAlloc", "cuMemCreate"] {
        let report = report(&small(&["-a", allocator, "--json", "-"]));
        assert_eq!(report["host"]["allocator"], allocator);
    }
}

#[test]
fn flags_win_over_the_environment() {
    let routine = |args: &[&str]| {
        let output = copylat().args(SMALL).args(args).args(["--json", "-"]).env("GDRCOPY_COPY", "sse41").output();
        report(&output.unwrap())["mapping"]["routine"].clone()
    };
    assert_eq!(routine(&[]), "sse41");
    assert_eq!(routine(&["--copy", "scalar"]), "scalar");
    let output =
        copylat().args(SMALL).args(["--backend", "emulated", "--json", "-"]).env("GDRCOPY_BACKEND", "rm").output();
    assert_eq!(report(&output.unwrap())["backend"], "emulated");
}

#[test]
fn the_gpu_is_the_one_asked_for() {
    let second =
        |gpus| copylat().args(SMALL).args(["-d", "1", "--json", "-"]).env("GDRCOPY_EMULATED_GPUS", gpus).output();
    assert_eq!(report(&second("2").unwrap())["host"]["gpu_ordinal"], 1);
    let output = second("1").unwrap();
    let (status, line) = refusal(&output);
    assert!(status == 1 && line.contains("-d 1") && line.contains("the only one is 0"), "{line}");
}

#[test]
fn nonsense_on_the_command_line_is_status_2_and_one_line() {
    let table: [(&[&str], &str); 25] = [
        (&["--nonsense"], "--nonsense"),
        (&["-x"], "-x"),
        (&["extra"], "extra"),
        (&["-s"], "-s"),
        (&["-s", "0"], "at least 1"),
        (&["-s", "4X"], "not a unit"),
        (&["-s", "17179869184G"], "64 bits"),
        (&["-s", "-1"], "-1"),
        (&["-w", "many"], "many"),
        (&["-w", "0", "-r", "0"], "nothing to measure"),
        (&["-w", "99999999999999999999"], "99999999999999999999"),
        (&["-d", "x"], "'x'"),
        (&["-M", "uncached"], "wc, cache, device"),
        (&["-a", "malloc"], "buffer, cuMemAlloc, cuMemCreate"),
        (&["--backend", "rdma"], "gdrdrv, rm, vulkan, emulated"),
        (&["--copy", "rep_movsb"], "scalar"),
        (&["--compare", "hip"], "cuda"),
        (&["--sizes", "64-1"], "write 1-64"),
        (&["--sizes", "0"], "at least 1"),
        (&["--sizes", "1-1G:1"], "larger step"),
        (&["-s", "64", "--sizes", "65"], "-s 65"),
        (&["-s", "64", "--offsets", "64"], "-s 65"),
        (&["--offsets", "18446744073709551615"], "address space"),
        (&["--json", "-", "--csv", "-"], "name a file"),
        (&["--json", ""], "--json"),
    ];
    for (args, why) in table {
        let output = run(args);
        let (status, line) = refusal(&output);
        assert!(status == 2 && line.contains(why), "{args:?}: {status}: {line}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn what_cannot_be_done_is_status_1_and_one_line() {
    let scratch = Scratch::new("refused");
    let (missing, directory) = (scratch.path("no/out.json"), scratch.path(""));
    let table: [(&[&str], &str); 10] = [
        (&["-d", "7"], "no such GPU"),
        (&["-M", "device"], "leave it out"),
        (&["-M", "wc"], "leave it out"),
        (&["--cpu", "1023"], "CPU 1023"),
        (&["--cpu", "4294967295"], "may use CPUs"),
        (&["-s", "4611686018427387904", "--sizes", "64"], "bytes"),
        (&["--sizes", "2305843009213693952"], "bytes"),
        (&["--json", &missing], "No such file"),
        (&["--csv", &missing], "No such file"),
        (&["--json", &directory], "directory"),
    ];
    for (args, why) in table {
        let output = run(args);
        let (status, line) = refusal(&output);
        assert!(status == 1 && line.contains(why), "{args:?}: {status}: {line}");
        assert!(output.stdout.is_empty(), "{args:?} was noticed before measuring");
    }
}

#[test]
fn environment_errors_name_the_value_and_the_choices() {
    for name in ["GDRCOPY_BACKEND", "GDRCOPY_COPY"] {
        let output = copylat().args(SMALL).env(name, "nonsense").output().unwrap();
        let (status, line) = refusal(&output);
        assert!(status == 1 && line.contains("nonsense") && line.contains("choose one of"), "{name}: {line}");
    }
}

#[test]
fn a_full_device_is_reported() {
    for flag in ["--json", "--csv"] {
        let output = small(&[flag, "/dev/full"]);
        let (status, line) = refusal(&output);
        assert!(status == 1 && line.contains("/dev/full") && line.contains("No space left"), "{line}");
    }
    for args in [&[][..], &["--json", "-"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = copylat().args(SMALL).args(args).stdout(full).stderr(Stdio::piped()).spawn();
        let output = output.unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let last = text(&output.stderr).lines().last().unwrap();
        assert!(last.contains("cannot write standard output") && last.contains("No space left"), "{last}");
    }
}

#[test]
fn a_reader_who_leaves_is_no_error() {
    for args in [&[][..], &["--json", "-"], &["--help"], &["--version"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = copylat().args(SMALL).args(args).stdout(writer).stderr(Stdio::piped()).spawn();
        let output = child.unwrap().wait_with_output().unwrap();
        assert_ok(&output);
        assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
    }
}

#[test]
fn a_report_is_written_though_nobody_reads_the_tables() {
    let scratch = Scratch::new("unread");
    for (name, csv) in [("stdout", "/dev/null"), ("stderr", "-")] {
        let path = scratch.path(name);
        let (reader, gone) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = copylat();
        command.args(SMALL).args(["--json", &path, "--csv", csv]);
        if name == "stdout" {
            command.stdout(gone)
        } else {
            command.stdout(Stdio::null()).stderr(gone)
        };
        assert!(command.status().unwrap().success());
        let report: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(results(&report).len(), 13 * 2 * 2);
    }
}

#[test]
fn a_failed_run_leaves_an_old_report_alone() {
    let scratch = Scratch::new("old");
    let path = scratch.path("out.json");
    fs::write(&path, "old").unwrap();
    assert_eq!(small(&["--json", &path, "-d", "7"]).status.code(), Some(1));
    assert_eq!(fs::read_to_string(path).unwrap(), "old");
}

#[test]
fn help_and_version_go_to_standard_output() {
    for (flag, what) in [("-h", "-s <BYTES>"), ("--help", "SFENCE"), ("--version", env!("CARGO_PKG_VERSION"))] {
        let output = run(&[flag]);
        assert_ok(&output);
        assert!(text(&output.stdout).contains(what) && text(&output.stdout).ends_with('\n'), "{flag}");
        assert!(output.stderr.is_empty());
    }
}
