//! What `gdrcopy_apiperf` measures and prints.

use super::program::text;
use super::{APIPERF, assert_ok, report, results};

const OPS: [&str; 5] = ["pin", "map", "get_info", "unmap", "unpin"];

#[test]
fn upstreams_columns_then_percentiles_and_a_histogram_of_each_call() {
    let output = APIPERF.small(&[]);
    assert_ok(&output);
    let stdout = text(&output.stdout);
    for line in stdout.lines().filter(|line| !line.starts_with("CPU ")) {
        assert!(line.len() <= 100, "{} columns: {line}", line.len());
    }
    let titles = stdout.lines().find(|line| line.contains("Size(B)")).unwrap();
    let wanted: Vec<String> =
        std::iter::once("Size(B)".to_owned()).chain(OPS.map(|op| format!("{op}.Time(us)"))).collect();
    assert_eq!(titles.split_whitespace().collect::<Vec<_>>(), wanted);
    let sizes = |size: &str| stdout.lines().filter(|line| line.split_whitespace().next() == Some(size)).count();
    assert_eq!((sizes("65536"), sizes("131072")), (1, 1), "means");
    assert_eq!((sizes("64Ki"), sizes("128Ki")), (10, 10), "percentiles and histograms of five calls");
}

#[test]
fn json_names_each_call() {
    let report = report(&APIPERF.small(&["--json", "-"]));
    assert_eq!(report["tool"], "gdrcopy_apiperf");
    let calls: Vec<_> =
        results(&report).iter().map(|call| (call["bytes"].as_u64().unwrap(), call["op"].as_str().unwrap())).collect();
    let wanted: Vec<_> = [65_536, 131_072].iter().flat_map(|&bytes| OPS.map(|op| (bytes, op))).collect();
    assert_eq!(calls, wanted);
    for call in results(&report) {
        assert_eq!((&call["metric"], &call["iterations"]), (&"call".into(), &20.into()));
        let ns = |name: &str| call[name].as_f64().unwrap();
        assert!(["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns"].map(ns).is_sorted(), "{call}");
        assert!((ns("min_ns")..=ns("max_ns")).contains(&ns("mean_ns")), "{call}");
        let bins = &call["histogram"];
        assert_eq!((&bins["from_ns"], &bins["to_ns"]), (&call["min_ns"], &call["max_ns"]));
        let counts: Vec<u64> = bins["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!((counts.len(), counts.iter().sum::<u64>()), (10, 20), "{call}");
        assert!(counts[0] > 0, "the shortest is in the first bin: {call}");
    }
}

#[test]
fn any_size_can_be_pinned() {
    let report = report(&APIPERF.run(&["--sizes", "1,100000", "-n", "3", "-w", "0", "--json", "-"]));
    assert_eq!(results(&report).len(), 10);
    assert!(results(&report)[..5].iter().all(|call| call["bytes"] == 1));
}

#[test]
fn no_iterations_are_refused() {
    let output = APIPERF.run(&["-n", "0"]);
    let (status, line) = APIPERF.refusal(&output);
    assert!(status == 2 && line.contains("-n"), "{line}");
}
