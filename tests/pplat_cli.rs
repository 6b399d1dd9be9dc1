//! `gdrcopy_pplat` as a user meets it: the real program, on the emulated backend, where a thread answers.

#![cfg(feature = "tools")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests, too")]

#[path = "common/program.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]
mod program;

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use program::text;
use serde_json::Value;

fn command() -> Command {
    let mut command = program::plain(env!("CARGO_BIN_EXE_gdrcopy_pplat"));
    command.env("GDRCOPY_BACKEND", "emulated");
    command
}

fn pplat(args: &[&str]) -> Output {
    command().args(args).output().unwrap()
}

#[track_caller]
fn report(args: &[&str]) -> Value {
    let output = pplat(&[args, &["--json", "-"]].concat());
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
    assert!(text(&output.stderr).contains("EMULATED GPU"), "the table goes to standard error");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn refusal(args: &[&str]) -> (i32, String) {
    let output = pplat(args);
    assert!(output.stdout.is_empty(), "{args:?}: noticed before measuring");
    let (status, line) = program::refusal("gdrcopy_pplat", &output);
    (status, line.to_owned())
}

/// Figures and names of this machine, as what stands for them.
fn masked(line: &str) -> String {
    let fact = ["GPU", "CPU", "Clock", "Mapping"].into_iter().find(|name| line.starts_with(&format!("{name} ")));
    if let Some(name) = fact {
        return format!("{name} ..");
    }
    let mut words = line.split_whitespace().map(|word| match word.parse::<f64>() {
        // Sizes and counts that were asked for are whole and stay.
        Ok(_) if word.contains('.') || word.len() > 4 => "#",
        _ => word,
    });
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |line, word| line + " " + word)
}

#[test]
fn the_output_of_a_default_run() {
    let output = pplat(&["-t", "20"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let all = text(&output.stdout);
    for line in all.lines().filter(|line| !line.starts_with("CPU ")) {
        assert!(line.len() <= 100, "{} columns: {line}", line.len());
    }
    let (head, rest) = all.split_once("\nmessage ").unwrap();
    let head: Vec<String> = head.lines().map(masked).collect();
    let wanted = [
        &format!("gdrcopy_pplat {}", env!("CARGO_PKG_VERSION")),
        "GPU ..",
        "CPU ..",
        "Mapping ..",
        "Clock ..",
        "Rows exactly 20 rounds; 1 x 32 threads; data compared by the GPU",
        "",
        "*** EMULATED GPU: host memory stands in for it. These figures say nothing about a GPU. ***",
        "Round trips: a message from CPU to GPU, 4 bytes back (through a channel: sizes of both)",
    ];
    assert_eq!(head, wanted);
    let mut rows = rest.lines().skip(2);
    let mut wanted = vec![("flag", "4")];
    wanted.extend(["16", "64", "512", "4Ki"].map(|size| ("packets", size)));
    wanted.extend(["4", "64", "512", "4Ki"].map(|size| ("data+flag", size)));
    wanted.extend(["48/48", "512/4"].map(|size| ("channel", size)));
    for (mode, size) in wanted {
        for place in ["gpumem", "hostmem"] {
            let row: Vec<&str> = rows.next().unwrap().split_whitespace().collect();
            assert_eq!((&row[..3], row.len()), (&[mode, size, place][..], 11), "{row:?}");
            assert_eq!((row[5], row[6], row[10]), ("-", "-", "20"), "too few for p99");
        }
    }
    assert!(rows.next().unwrap().starts_with("(host "));
    assert!(rows.next().unwrap().is_empty() && rows.next().unwrap().contains("too few rounds"));
    assert!(rows.next().unwrap().starts_with("channel: bytes of message/answer"));
    assert!(!all.contains("% less") && !all.contains("% more"), "an emulated GPU has no verdict");
}

#[test]
fn json_follows_schema_1() {
    let report = report(&["-t", "50", "--sizes", "64,512"]);
    assert_eq!((&report["schema"], &report["tool"]), (&Value::from(1), &Value::from("gdrcopy_pplat")));
    assert!(report["hiccups"]["p50_ns"].as_f64().unwrap() > 0.0);
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 2 * (1 + 2 + 2 + 2));
    for entry in results {
        assert_eq!(entry["metric"], "rtt");
        assert_eq!((&entry["verified"], &entry["wrong_messages"]), (&Value::from(true), &Value::from(0)));
        assert_eq!((&entry["iterations"], &entry["load"]), (&Value::from(50), &Value::from(false)));
        let ns = |name: &str| entry[name].as_f64().unwrap();
        let order = ["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns"].map(ns);
        assert!(order.is_sorted() && order[0] > 0.0 && ns("mean_ns") >= order[0], "{entry}");
        assert!(ns("bucket_min_ns") <= ns("bucket_median_ns") && ns("bucket_min_ns") >= order[0] - 0.1, "{entry}");
    }
    let methods: Vec<&str> = results.iter().map(|entry| entry["method"].as_str().unwrap()).collect();
    assert!(methods.chunks(2).all(|pair| pair == ["bar1", "host_flag"]), "{methods:?}");
    let packets = results.iter().find(|entry| entry["mode"] == "packets" && entry["payload_bytes"] == 512).unwrap();
    assert_eq!((&packets["data_bytes"], &packets["answer_bytes"]), (&Value::from(384), &Value::from(4)));
}

#[test]
fn a_channel_is_measured_with_its_ring_in_either_memory() {
    let report = report(&["-t", "50", "-m", "channel"]);
    let results = report["results"].as_array().unwrap();
    let facts =
        ["mode", "method", "payload_bytes", "data_bytes", "answer_bytes", "blocks", "threads", "flag_in", "answer_in"];
    let found: Vec<String> =
        results.iter().map(|entry| facts.map(|fact| entry[fact].to_string()).join(" ").replace('"', "")).collect();
    let wanted = [
        "channel bar1 48 48 48 1 32 gpumem hostmem",
        "channel host_flag 48 48 48 1 32 hostmem hostmem",
        "channel bar1 512 512 4 1 32 gpumem hostmem",
        "channel host_flag 512 512 4 1 32 hostmem hostmem",
    ];
    assert_eq!(found, wanted);
    for entry in results {
        assert_eq!((&entry["verified"], &entry["iterations"]), (&Value::from(true), &Value::from(50)), "{entry}");
        assert!(entry["min_ns"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn rows_of_a_channel_end_with_the_time() {
    let begin = std::time::Instant::now();
    let report = report(&["--seconds", "1", "-m", "channel", "-s", "100"]);
    let results = report["results"].as_array().unwrap();
    assert!(results.len() == 2 && results.iter().all(|entry| entry["answer_bytes"] == 4), "{results:?}");
    // Two rows and the host alone.
    assert!((3..20).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
}

#[test]
fn a_channel_that_does_not_fit_is_left_out_aloud() {
    let output = pplat(&["-t", "20", "-B", "2", "-s", "64"]);
    assert!(output.status.success());
    assert!(
        text(&output.stderr).contains("do not go through a channel: one warp receives"),
        "{}",
        text(&output.stderr)
    );
    assert!(!text(&output.stdout).contains("channel: bytes"));
}

#[test]
fn csv_has_a_row_for_each_result() {
    let output = pplat(&["-t", "20", "-m", "flag", "--csv", "-"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let csv: Vec<&str> = text(&output.stdout).lines().collect();
    assert!(
        csv[0].starts_with("mode,method,metric,payload_bytes,data_bytes,answer_bytes,blocks,threads,"),
        "{}",
        csv[0]
    );
    assert!(csv[1].starts_with("flag,bar1,rtt,4,4,4,1,32,") && csv[2].starts_with("flag,host_flag,rtt,4,4,4,1,32,"));
    assert_eq!(csv.len(), 3);
}

#[test]
fn every_block_count_thread_count_and_place_works() {
    let table: [(&[&str], &[&str]); 5] = [
        (&["-B", "8", "-T", "1", "-m", "data", "-s", "100"], &["bar1", "host_flag"]),
        (&["-B", "300", "-T", "992", "-m", "packets", "-s", "64"], &["bar1", "host_flag"]),
        (&["-G", "hostmem", "-D", "hostmem", "-C", "gpumem", "-m", "data"], &["host_flag"; 4]),
        (&["-G", "gpumem", "-D", "hostmem", "-m", "data+flag", "-s", "64"], &["mixed", "host_flag"]),
        (&["-C", "gpumem", "-m", "flag", "--copy", "scalar", "-a", "buffer"], &["bar1", "host_flag"]),
    ];
    for (args, methods) in table {
        let report = report(&[args, &["-t", "20"]].concat());
        let results = report["results"].as_array().unwrap();
        assert!(results.iter().map(|entry| entry["method"].as_str().unwrap()).eq(methods.iter().copied()), "{args:?}");
        assert!(results.iter().all(|entry| entry["verified"] == true), "{args:?}");
    }
}

#[test]
fn the_load_is_passed_over_aloud_without_a_gpu() {
    let output = pplat(&["-t", "20", "-m", "flag", "--load"]);
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("--load is passed over"), "{}", text(&output.stderr));
}

#[test]
fn nonsense_is_refused_in_one_line() {
    let table: [(&[&str], i32, &str); 15] = [
        (&["-x"], 2, "-x"),
        (&["extra"], 2, "extra"),
        (&["-t", "0"], 2, "1..="),
        (&["-t", "many"], 2, "many"),
        (&["-t", "5", "--seconds", "5"], 2, "cannot be used with"),
        (&["-T", "1024"], 2, "1..=992"),
        (&["-B", "0"], 2, "1..=65536"),
        (&["-m", "both"], 2, "flag, data, packets, channel"),
        (&["-m", "channel", "-B", "8"], 2, "leave out -B"),
        (&["-m", "channel", "-s", "64K"], 2, "16 KiB at most"),
        (&["-G", "bar1"], 2, "gpumem, hostmem"),
        (&["-s", "1G"], 2, "256 MiB is the most"),
        (&["--json", "-", "--plot", "-"], 2, "name a file"),
        (&["-d", "7"], 1, "no such GPU"),
        (&["--json", "/no/such/folder/out.json"], 1, "No such file"),
    ];
    for (args, status, why) in table {
        let (found, line) = refusal(args);
        assert!(found == status && line.contains(why), "{args:?}: {found}: {line}");
    }
}

#[test]
fn a_picture_has_a_panel_for_medians_and_one_for_tails() {
    let output = pplat(&["-t", "200", "--sizes", "64,512", "--plot", "-"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let svg = text(&output.stdout);
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    for wanted in [
        "Median",
        "99th percentile",
        "packets, polled in host memory",
        "channel, its ring in GPU memory",
        "say nothing about a GPU",
        "512 B",
    ] {
        assert!(svg.contains(wanted), "{wanted}");
    }
}

#[test]
fn a_reader_that_has_had_enough_is_no_error() {
    let output = program::closed_pipe(command().args(["-t", "200", "-m", "flag"]));
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn an_interrupted_run_says_so_and_reports_whole_rows() {
    let scratch = program::Scratch::new("pplat-interrupted");
    let path = scratch.path("out.json");
    let mut child = command();
    child.args(["--seconds", "60", "-m", "flag", "--json", &path]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("[ns]")), "the titles");
    let kill = Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().unwrap();
    assert!(kill.success());
    assert_eq!(lines.count(), 0, "no half row");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(text(&output.stderr).contains("interrupted"), "{}", text(&output.stderr));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!((&report["partial"], report["results"].as_array().unwrap().len()), (&Value::from(true), 0));
}
