//! What `gdrcopy_copylat` measures and prints.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::program::{Scratch, text};
use super::{COPYLAT, assert_ok, report, results};

/// Entries of one size: writes sustained, issued and drained, posted writes sustained and issued, reads sustained and
/// single.
const PER_SIZE: usize = 7;

#[test]
fn a_table_for_each_direction_under_a_banner() {
    let output = COPYLAT.small(&[]);
    assert_ok(&output);
    let stdout = text(&output.stdout);
    for line in stdout.lines().filter(|line| !line.starts_with("CPU ")) {
        assert!(line.len() <= 100, "{} columns: {line}", line.len());
    }
    let tables: Vec<&str> = stdout.split("*** EMULATED GPU").skip(1).collect();
    assert_eq!(tables.len(), 3, "a banner above each table: {stdout}");
    let headings = ["Host to device: Mapping::write ", "Host to device: Mapping::write_posted ", "Device to host"];
    for (table, heading) in tables.iter().zip(headings) {
        let mut lines = table.lines();
        assert!(lines.next().unwrap().contains("say nothing about a GPU"));
        assert!(lines.next().unwrap().starts_with(heading));
        assert!(lines.next().unwrap().contains("sustained"));
        assert!(lines.next().unwrap().contains("p99.9"));
        assert!(lines.next().unwrap().contains("[ns]"));
        let sizes: Vec<&str> = lines.map_while(|line| line.split_whitespace().next()).collect();
        assert_eq!(sizes, ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1Ki", "2Ki", "4Ki"]);
    }
    for fact in ["GPU ", "CPU ", "Mapping ", "backend emulated", "routine ", "Clock ", "Hiccups ", "kernel "] {
        assert!(stdout.contains(fact), "{fact}: {stdout}");
    }
}

#[test]
fn a_full_default_run_stays_under_30_seconds() {
    let begin = Instant::now();
    let output = COPYLAT.run(&["--json", "-"]);
    let report = report(&output);
    for line in text(&output.stderr).lines().filter(|line| !line.starts_with("CPU ")) {
        assert!(line.len() <= 100, "{} columns: {line}", line.len());
    }
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    assert_eq!(results(&report).len(), 25 * (PER_SIZE + 1));
    for entry in results(&report) {
        let most = if entry["direction"] == "h2d" { 100_000 } else { 10_000 };
        let calls = entry["iterations"].as_u64().unwrap();
        assert!((20..=most).contains(&calls), "{entry}");
        assert_eq!(entry["verified"], true);
    }
}

#[test]
fn json_follows_schema_1() {
    let scratch = Scratch::new("copylat-json");
    let path = scratch.path("out.json");
    fs::write(&path, "old").unwrap();
    assert_ok(&COPYLAT.small(&["--json", &path]));
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(report["schema"], 1);
    assert_eq!(report["tool"], "gdrcopy_copylat");
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["backend"], "emulated");
    assert!(report["host"]["cpu_model"].is_string() && report["host"]["kernel"].is_string());
    assert!(report["mapping"]["type"].is_string() && report["mapping"]["routine"].is_string());
    assert_eq!(report["mapping"]["bytes"], 4096);
    assert!(report["timer_overhead_ns"].as_f64().unwrap() > 0.0);
    assert_eq!(results(&report).len(), 13 * PER_SIZE);
    for entry in results(&report) {
        let ns = |name: &str| entry[name].as_f64().unwrap_or_else(|| panic!("{name} of {entry}"));
        let order = ["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns"].map(ns);
        // A byte in host memory can take less than the clock resolves.
        let least = if entry["bytes"] == 4096 { 1.0 } else { 0.0 };
        assert!(order.is_sorted() && order[0] >= least, "{entry}");
        let posted = entry["method"] == "bar1_posted" && entry["direction"] == "h2d";
        assert!(posted || entry["method"] == "bar1", "{entry}");
        assert_eq!(entry["offset"], 0);
        assert_eq!(entry["verified"], true);
        assert_eq!(entry["iterations"], if entry["direction"] == "h2d" { 200 } else { 50 }, "counts given are exact");
        assert_eq!(entry["mean_ns"].is_number(), entry["metric"] == "sustained", "{entry}");
    }
    assert!(report["hiccups"]["max_ns"].as_f64() >= report["hiccups"]["p50_ns"].as_f64());
    assert!(report["hiccups"]["iterations"].as_u64().unwrap() >= 1000);
    assert_eq!(report.get("partial"), None);
    let kinds = [
        ("h2d", "bar1", "sustained"),
        ("h2d", "bar1", "issue"),
        ("h2d", "bar1", "drained"),
        ("h2d", "bar1_posted", "sustained"),
        ("h2d", "bar1_posted", "issue"),
        ("d2h", "bar1", "sustained"),
        ("d2h", "bar1", "single"),
    ];
    assert_eq!(kinds.len(), PER_SIZE);
    for (direction, method, metric) in kinds {
        let rows = results(&report).iter().filter(|entry| {
            (&entry["direction"], &entry["method"], &entry["metric"])
                == (&direction.into(), &method.into(), &metric.into())
        });
        assert!(rows.map(|entry| entry["bytes"].as_u64().unwrap()).eq((0..13).map(|n| 1 << n)));
    }
    let names: Vec<_> = fs::read_dir(&scratch.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["out.json"], "no draft is left behind");
}

#[test]
fn a_report_on_standard_output_is_alone_there() {
    let output = COPYLAT.small(&["--json", "-"]);
    report(&output);
    let stderr = text(&output.stderr);
    assert!(stderr.contains("EMULATED GPU") && stderr.contains("sustained"), "{stderr}");

    let output = COPYLAT.small(&["--csv", "-"]);
    assert_ok(&output);
    let csv = text(&output.stdout);
    assert!(csv.starts_with("direction,method,threads,metric,bytes,offset,verified,min_ns,"), "{csv}");
    assert_eq!(csv.lines().count(), 1 + 13 * PER_SIZE);
    assert!(csv.lines().skip(1).all(|row| row.starts_with("h2d,bar1") || row.starts_with("d2h,bar1,")));
    assert!(text(&output.stderr).contains("EMULATED GPU"));
}

#[test]
fn sizes_and_offsets_make_a_grid() {
    let output = COPYLAT.run(&["--sizes", "1,7,63-65:1", "--offsets", "0-2,63", "-w", "20", "-r", "20", "--json", "-"]);
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
        let output = COPYLAT.command().args(["-s", "64", "--json", "-"]).args(args).output().unwrap();
        results(&report(&output)).to_vec()
    };
    assert!(entries(&["-w", "0", "-r", "20"]).iter().all(|entry| entry["direction"] == "d2h"));
    assert!(entries(&["-w", "20", "-r", "0"]).iter().all(|entry| entry["direction"] == "h2d"));
    assert!(entries(&["-w", "20", "-r", "20", "--no-verify"]).iter().all(|entry| entry["verified"] == false));
    let cold = entries(&["-w", "20", "-r", "20", "-C"]);
    assert_eq!(cold.len(), 7 * 4, "issued, drained, posted; read");
    assert!(cold.iter().all(|entry| entry["metric"] != "sustained" && entry["verified"] == true));
}

#[test]
fn the_comparison_is_passed_over_aloud_without_a_gpu() {
    for flag in [&["-c"][..], &["--compare", "cuda"]] {
        let output = COPYLAT.small(flag);
        assert_ok(&output);
        assert!(text(&output.stderr).contains("-c is passed over"), "{}", text(&output.stderr));
    }
}

#[test]
fn every_method_is_measured_and_verified() {
    let small = ["--sizes", "1,100,4K", "--offsets", "0,63", "-w", "50", "-r", "50"];
    let output =
        COPYLAT.run(&[&small[..], &["--methods", "parallel,agent,auto", "--stand-in", "--json", "-"]].concat());
    let report = report(&output);
    let kinds: BTreeSet<(&str, &str)> = results(&report)
        .iter()
        .map(|entry| (entry["method"].as_str().unwrap(), entry["metric"].as_str().unwrap()))
        .collect();
    let of = |method| [(method, "single"), (method, "sustained")];
    // Of a call that waits for the GPU there is but one figure.
    let wanted = [("agent", "single"), ("agent_pinned", "single")].into_iter().chain(of("auto")).chain(of("parallel"));
    assert_eq!(kinds, wanted.collect());
    assert_eq!(results(&report).len(), 2 * 6 * 6, "directions, places, kinds");
    for entry in results(&report) {
        assert_eq!((&entry["verified"], &entry["iterations"]), (&Value::from(true), &Value::from(50)), "{entry}");
    }
    let stderr = text(&output.stderr);
    for what in ["Agent     two CPU threads stand in", "side by side", "The quickest method", "It used "] {
        assert!(stderr.contains(what), "{what}: {stderr}");
    }
}

#[test]
fn what_an_emulated_gpu_cannot_do_is_passed_over_aloud() {
    let output = COPYLAT.small(&["--methods", "agent,bar1", "--json", "-"]);
    assert!(results(&report(&output)).iter().all(|entry| entry["method"] != "agent"));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("the agent is passed over: ") && stderr.contains("--stand-in"), "{stderr}");

    // The automatic path does without it, and without cuMemcpy nothing is left of this.
    assert_ok(&COPYLAT.small(&["--methods", "auto"]));
    for methods in ["agent", "cuda", "agent,cuda"] {
        let output = COPYLAT.small(&["--methods", methods]);
        let stderr = text(&output.stderr);
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{stderr}");
        assert!(stderr.lines().last().unwrap().contains("none of the methods asked for can be measured"), "{stderr}");
    }
}

#[test]
fn a_picture_shows_every_method() {
    let args = ["--methods", "all", "--stand-in", "--threads", "1", "--plot", "-"];
    let output = COPYLAT.small(&args);
    assert_ok(&output);
    for name in
        ["agent, any host memory", "agent, page-locked", "auto, any host memory", "BAR1, 1 thread (mean)", "posted"]
    {
        assert!(text(&output.stdout).contains(name), "{name}");
    }
}

#[test]
fn a_kernel_or_what_plays_its_part_says_when_it_sees_a_write() {
    let output = COPYLAT.run(&["--sizes", "1,4K", "--offsets", "0,63", "-w", "100", "-r", "0", "--json", "-"]);
    let report = report(&output);
    let visible: Vec<&Value> = results(&report).iter().filter(|entry| entry["metric"] == "gpu_visible").collect();
    assert_eq!(visible.len(), 4);
    for entry in visible {
        assert_eq!(
            (&entry["direction"], &entry["method"], &entry["verified"]),
            (&"h2d".into(), &"bar1".into(), &true.into())
        );
        assert!((20..=100).contains(&entry["iterations"].as_u64().unwrap()), "{entry}");
        assert!(entry["max_ns"].as_f64() > Some(0.0), "{entry}");
        assert_eq!(entry.get("mean_ns"), None);
    }
    let stderr = text(&output.stderr);
    assert!(stderr.contains("half of a bare flag's round trip"), "{stderr}");
    for args in [&["-w", "20", "--no-echo"][..], &["-w", "20", "-C"], &["-w", "0"]] {
        let output = COPYLAT.run(&[&["-r", "20", "--sizes", "64", "--json", "-"][..], args].concat());
        assert!(results(&super::report(&output)).iter().all(|entry| entry["metric"] != "gpu_visible"));
    }
}

#[test]
fn a_calibration_makes_a_policy_that_can_be_put_in_force() {
    let scratch = Scratch::new("copylat-policy");
    let path = scratch.path("here.policy");
    let output = COPYLAT.run(&["--calibrate", &path, "-s", "512"]);
    assert_ok(&output);
    let stdout = text(&output.stdout);
    for what in ["EMULATED GPU", "Host to device", "Device to host", "sizes [B]", "GDRCOPY_POLICY="] {
        assert!(stdout.contains(what), "{what}: {stdout}");
    }
    assert!(stdout.lines().all(|line| line.len() <= 110), "{stdout}");
    let policy = fs::read_to_string(&path).unwrap();
    assert!(policy.contains("backend = emulated") && policy.contains("\nd2h 1-"), "{policy}");
    let output = COPYLAT.command().args(COPYLAT.small).env("GDRCOPY_POLICY", &path).output().unwrap();
    assert_ok(&output);

    let output = COPYLAT.run(&["--calibrate", "-", "-s", "64"]);
    assert_ok(&output);
    assert!(text(&output.stdout).lines().any(|line| line == "schema = 1"));
    assert!(!text(&output.stdout).contains("sizes [B]") && text(&output.stderr).contains("sizes [B]"));

    for (args, status, why) in [
        (&["--calibrate", &path, "-c"][..], 2, "cannot be used with"),
        (&["--calibrate", &path, "-s", "63"], 1, "64"),
        (&["--calibrate", &scratch.path("no/file")], 1, "No such file"),
    ] {
        let output = COPYLAT.run(args);
        let (found, line) = COPYLAT.refusal(&output);
        assert!(found == status && line.contains(why), "{args:?}: {found}: {line}");
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), policy, "a refused calibration leaves an old file alone");
}
