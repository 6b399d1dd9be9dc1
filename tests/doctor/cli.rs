//! The command line, the outputs, and this very machine.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::program::{closed_pipe, plain, refusal, text};
use crate::tree::{Diagnosis, Tree};

const TOOL: &str = "gdrcopy_doctor";

fn doctor() -> Command {
    plain(env!("CARGO_BIN_EXE_gdrcopy_doctor"))
}

#[test]
fn this_machine_is_examined_and_the_cpu_s_side_works() {
    let output = doctor().args(["--json", "-"]).output().unwrap();
    let diagnosis = Diagnosis::of(&output);
    assert_eq!((&diagnosis.json["schema"], &diagnosis.json["tool"]), (&1.into(), &TOOL.into()));
    assert!(diagnosis.json["host"]["kernel"].is_string());
    let trials = diagnosis.json["self_test"].as_array().unwrap();
    let names: Vec<_> = trials.iter().map(|trial| trial["backend"].as_str().unwrap()).collect();
    assert_eq!(names, ["gdrdrv", "rm", "vulkan", "emulated"]);
    assert_eq!(trials[3]["works"], true, "{}", trials[3]);
    assert!(diagnosis.text.contains("works (the CPU's side only: host memory stands in for a GPU)"));
    let works = trials[..3].iter().any(|trial| trial["works"] == true);
    assert_eq!((&diagnosis.json["works"], output.status.code()), (&works.into(), Some(i32::from(!works))));
    if !works {
        assert!(diagnosis.json["fix_first"]["remedy"].is_string(), "{}", diagnosis.json["fix_first"]);
    }
    // Without a driver the emulated backend is still no reason to say that GPUs work.
    assert!(works || diagnosis.text.contains("no backend for GPUs works"), "{}", diagnosis.text);
}

#[test]
fn lines_are_short_and_the_worst_come_first() {
    let tree = Tree::healthy();
    tree.remove("dev/gdrdrv");
    tree.bar1(256 << 20);
    tree.gpu_file("current_link_speed", "2.5 GT/s PCIe");
    let output = tree.doctor().output().unwrap();
    assert_eq!(output.status.code(), Some(1), "nothing was tried");
    let out = text(&output.stdout);
    assert!(out.lines().all(|line| line.chars().count() <= 100), "{out}");
    let at = |word: &str| out.find(&format!("\n{word}")).unwrap_or_else(|| panic!("no {word}: {out}"));
    assert!(at("problem ") < at("warning ") && at("warning ") < at("note ") && at("note ") < at("ok "), "{out}");
    assert!(out.lines().last().unwrap().starts_with("          ") || out.contains("\nResult    "), "{out}");
    assert!(!out.contains("read: CPUID") && out.contains("read: /sys/module") | out.contains("read: /proc/devices"));

    let verbose = tree.doctor().arg("-v").output().unwrap();
    let words = text(&verbose.stdout);
    assert!(words.matches("read: ").count() > out.matches("read: ").count() + 5, "{words}");
}

#[test]
fn nonsense_on_the_command_line_is_status_2_and_one_line() {
    let table: [(&[&str], &str); 7] = [
        (&["--nonsense"], "--nonsense"),
        (&["extra"], "extra"),
        (&["--timeout", "0"], "0"),
        (&["--timeout", "x"], "'x'"),
        (&["--root", "/no/such"], "--root /no/such: there is no such folder"),
        (&["--self-test"], "--root"),
        (&["--json", ""], "--json"),
    ];
    for (args, why) in table {
        let output = doctor().args(args).output().unwrap();
        let (status, line) = refusal(TOOL, &output);
        assert!(status == 2 && line.contains(why), "{args:?}: {status}: {line}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn what_cannot_be_written_is_status_1_and_said_before_anything_is_read() {
    let tree = Tree::healthy();
    let missing = tree.path().join("no/out.json");
    for (path, why) in [(missing.as_path(), "No such file"), (Path::new("/"), "directory")] {
        let output = tree.doctor().arg("--json").arg(path).output().unwrap();
        let (status, line) = refusal(TOOL, &output);
        assert!(status == 1 && line.contains(why), "{line}");
    }
    let output = tree.doctor().args(["--json", "/dev/full"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write /dev/full: No space left"), "{}", text(&output.stderr));
}

#[test]
fn a_report_goes_to_its_file_and_the_text_to_the_screen() {
    let tree = Tree::healthy();
    let path = tree.path().join("report.json");
    let output = tree.doctor().arg("--json").arg(&path).output().unwrap();
    assert!(text(&output.stdout).contains("\nResult    "), "{}", text(&output.stdout));
    let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(report["tool"], TOOL);
}

#[test]
fn a_reader_who_leaves_is_no_error() {
    for args in [&[][..], &["--json", "-"], &["--help"]] {
        let output = closed_pipe(Tree::healthy().doctor().args(args));
        let stderr = text(&output.stderr);
        assert!(output.status.success() && !stderr.contains("gdrcopy_doctor: "), "{args:?}: {stderr}");
    }
}
