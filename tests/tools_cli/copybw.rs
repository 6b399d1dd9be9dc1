//! What `gdrcopy_copybw` measures and prints.

use super::program::text;
use super::{COPYBW, assert_ok, report, results};

#[test]
fn one_size_in_both_directions_by_default() {
    let output = COPYBW.run(&["-w", "50", "-r", "50"]);
    assert_ok(&output);
    let stdout = text(&output.stdout);
    let rows: Vec<Vec<&str>> = stdout
        .lines()
        .map(|line| line.split_whitespace().collect())
        .skip_while(|row: &Vec<_>| row.first() != Some(&"direction"))
        .collect();
    assert_eq!(rows.len(), 4, "{stdout}");
    assert!(rows[0].contains(&"bandwidth") && rows[1].contains(&"[MB/s") && rows[1].contains(&"[GB/s"));
    for (row, direction) in rows[2..].iter().zip(["h2d", "d2h"]) {
        assert_eq!((row[0], row[1], row[2], row[3], row[7]), (direction, "bar1", "0", "128Ki", "50"));
        let figure = |n: usize| row[n].parse::<f64>().unwrap();
        // MB = 2^20 bytes, GB = 10^9: both of the one time, to the digits printed.
        let (mb, gb, ns) = (figure(4), figure(5), figure(6));
        assert!((mb * 1.048_576e6 / (gb * 1e9) - 1.0).abs() < 0.01, "{row:?}");
        assert!((131_072.0 / ns / gb - 1.0).abs() < 0.01, "{row:?}");
    }
}

#[test]
fn a_sweep_has_every_power_of_two() {
    let report = report(&COPYBW.run(&["-l", "-c", "4K", "-o", "3", "-w", "20", "-r", "20", "--json", "-"]));
    assert_eq!(report["tool"], "gdrcopy_copybw");
    assert_eq!(report["mapping"]["bytes"], 131_072);
    for direction in ["h2d", "d2h"] {
        let of = results(&report).iter().filter(|entry| entry["direction"] == direction);
        assert!(of.map(|entry| entry["bytes"].as_u64().unwrap()).eq((0..13).map(|n| 1 << n)));
    }
    for entry in results(&report) {
        assert_eq!((&entry["metric"], &entry["offset"]), (&"sustained".into(), &3.into()));
        assert_eq!((&entry["iterations"], &entry["verified"]), (&20.into(), &true.into()));
        assert!(entry["mean_ns"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn what_does_not_fit_is_refused_with_a_size_that_does() {
    let output = COPYBW.run(&["-s", "64K", "-c", "64K", "-o", "1"]);
    let (status, line) = COPYBW.refusal(&output);
    assert!(status == 2 && line.ends_with("-s 65537"), "{line}");
    assert_ok(&COPYBW.run(&["-s", "65537", "-c", "64K", "-o", "1", "-w", "20", "-r", "20"]));
}

#[test]
fn the_comparison_is_passed_over_aloud_without_a_gpu() {
    let output = COPYBW.small(&["--compare", "cuda"]);
    assert_ok(&output);
    assert!(text(&output.stderr).contains("--compare is passed over"), "{}", text(&output.stderr));
}

#[test]
fn threads_are_a_method_of_their_own() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    let list = if cpus > 1 { "1,2" } else { "1" };
    let output = COPYBW.run(&["-c", "64K", "-w", "20", "-r", "20", "--threads", list, "--json", "-"]);
    let report = report(&output);
    let of = |threads: Option<u64>| {
        let wanted = |entry: &&serde_json::Value| entry.get("threads").map(|n| n.as_u64().unwrap()) == threads;
        results(&report).iter().filter(wanted).collect::<Vec<_>>()
    };
    assert!(of(None).len() == 2 && of(None).iter().all(|entry| entry["method"] == "bar1"));
    for threads in 1..=u64::try_from(cpus.min(2)).unwrap() {
        let shared = of(Some(threads));
        assert_eq!(shared.iter().map(|entry| entry["direction"].clone()).collect::<Vec<_>>(), ["h2d", "d2h"]);
        assert!(shared.iter().all(|entry| entry["method"] == "parallel" && entry["verified"] == true));
        assert!(text(&output.stderr).contains(&format!("parallel-{threads} ")), "{}", text(&output.stderr));
    }
    let output = COPYBW.run(&["--threads", "65"]);
    let (status, line) = COPYBW.refusal(&output);
    assert!(status == 1 && line.contains("1 to 64"), "{line}");
}
