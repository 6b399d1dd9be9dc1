//! `gdrcopy_sanity` as a user meets it: the real program, on the emulated backend and over the stand-in.

#![cfg(feature = "tools")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests, too")]

#[path = "common/standin.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]
mod standin;

#[path = "common/program.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]
mod program;

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Output, Stdio};

use program::{Scratch, closed_pipe, plain, refusal, text};
use serde_json::Value;

const TOOL: &str = "gdrcopy_sanity";

fn sanity() -> Command {
    let mut command = plain(env!("CARGO_BIN_EXE_gdrcopy_sanity"));
    command.env("GDRCOPY_BACKEND", "emulated");
    command
}

fn run(args: &[&str]) -> Output {
    sanity().args(args).output().unwrap()
}

#[track_caller]
fn status(output: &Output, wanted: i32) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(wanted), "{out}{err}");
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
}

/// Name and outcome of every test in a report.
fn outcomes(report: &Value) -> Vec<(&str, &str)> {
    let results = report["results"].as_array().unwrap();
    results.iter().map(|result| (result["test"].as_str().unwrap(), result["outcome"].as_str().unwrap())).collect()
}

#[test]
fn everything_passes_or_is_waived_with_a_reason_in_both_modes() {
    for mode in [&["--json", "-"][..], &["--json", "-", "--sigbus"]] {
        let output = run(mode);
        status(&output, 0);
        let report = report(&output);
        assert_eq!(
            (&report["schema"], &report["tool"], &report["backend"]),
            (&1.into(), &TOOL.into(), &"emulated".into())
        );
        assert!(report["host"]["cpu_model"].is_string() && report["session"]["routine"].is_string());
        let outcomes = outcomes(&report);
        let passed = outcomes.iter().filter(|(_, outcome)| *outcome == "passed").count();
        assert!(passed >= 50 && outcomes.iter().all(|(_, outcome)| *outcome != "failed"), "{outcomes:?}");
        assert_eq!(report["counts"]["passed"], passed);
        for result in report["results"].as_array().unwrap() {
            let reason = result["reason"].as_str();
            assert_eq!(reason.is_some(), result["outcome"] == "waived", "{result}");
            assert!(reason.is_none_or(|reason| reason.starts_with("backend emulated: ")), "{result}");
        }
        let stderr = text(&output.stderr);
        assert!(stderr.contains("EMULATED GPU") && stderr.contains("Total: "), "{stderr}");
    }
}

/// What semantics waive in one mode runs in the other.
#[test]
fn waivers_follow_the_backend_s_semantics() {
    let name = "invalidation_next_owner_cumemalloc";
    let output = run(&["-t", name]);
    status(&output, 3);
    assert!(text(&output.stdout).contains("blocks share an object"), "{}", text(&output.stdout));
    status(&run(&["-t", name, "--sigbus"]), 0);
}

#[test]
fn the_list_names_what_t_takes() {
    let output = run(&["--list"]);
    status(&output, 0);
    let names: BTreeSet<&str> = text(&output.stdout).lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert!(names.len() > 60, "{names:?}");
    for group in ["basic_", "data_", "thread_", "fork_", "fd_", "invalidation_", "leak_"] {
        assert!(names.iter().any(|name| name.starts_with(group)), "{group}");
    }
    assert_eq!(text(&run(&["-l"]).stdout), text(&output.stdout));
    assert!(text(&output.stdout).contains("(extended: -e)"));

    let output = run(&["-t", "basic_buffer", "-t", "data_publish", "--json", "-"]);
    assert_eq!(outcomes(&report(&output)), [("basic_buffer", "passed"), ("data_publish", "passed")]);
}

#[test]
fn filter_and_extended_choose() {
    let names = |args: &[&str]| -> Vec<String> {
        let output = run(&[args, &["--filter", "data_every", "--json", "-"]].concat());
        status(&output, 0);
        outcomes(&report(&output)).into_iter().map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(names(&[]), ["data_every_routine"]);
    assert_eq!(names(&["-e"]), ["data_every_routine", "data_every_offset"]);
}

#[test]
fn lines_for_people() {
    let output = run(&["--filter", "basic_unaligned"]);
    status(&output, 0);
    let out = text(&output.stdout);
    assert!(out.contains("backend emulated") && out.contains("after free: the old bytes stay"), "{out}");
    assert_eq!(out.matches("passed  basic_unaligned_mapping_").count(), 3, "{out}");
    assert!(out.contains("Total: 3, Passed: 3, Failed: 0, Waived: 0\n"), "{out}");
    assert!(!out.contains("  - "), "{out}");

    let out = run(&["-t", "basic_buffer", "-v", "-s"]);
    let out = text(&out.stdout);
    assert!(out.contains("- pin, map, write, read") && out.contains("mapped as cached"), "{out}");
    assert!(!out.contains("Total"), "{out}");
}

#[test]
fn tap_is_tap() {
    let output = run(&["--tap", "--filter", "fd_"]);
    status(&output, 0);
    let out = text(&output.stdout);
    let (subject, first) = (out.find("# gdrcopy_sanity ").unwrap(), out.find("ok 1 - ").unwrap());
    assert!(subject < first, "what is tested comes first: {out}");
    let mut lines = out.lines().filter(|line| !line.starts_with('#'));
    assert_eq!((lines.next(), lines.next()), (Some("TAP version 13"), Some("1..4")), "{out}");
    assert_eq!(lines.next(), Some("ok 1 - fd_closed_on_exec"));
    for (number, line) in (2..).zip(lines.by_ref()) {
        assert!(
            line.starts_with(&format!("ok {number} - fd_")) && line.contains(" # SKIP backend emulated: "),
            "{line}"
        );
    }
    let faulty = faulty("unpin:5").args(["--tap", "-t", "basic_buffer"]).output().unwrap();
    status(&faulty, 1);
    let out = text(&faulty.stdout);
    assert!(out.contains("\nnot ok 1 - basic_buffer\n# unpin: "), "{out}");
}

/// The program on backend `gdrdrv` over the stand-in.
fn over_standin(module: standin::Module) -> Command {
    let mut command = plain(env!("CARGO_BIN_EXE_gdrcopy_sanity"));
    command.env("LD_PRELOAD", standin::library()).env(standin::VERSION, module.version).args(["--backend", "gdrdrv"]);
    if module.persistent {
        command.env(standin::PERSISTENT, "1");
    }
    command
}

/// With a module whose calls fail so.
fn faulty(fault: &str) -> Command {
    let mut command = over_standin(standin::MODULES[7]);
    command.env(standin::FAULT, fault);
    command
}

#[test]
fn old_and_new_modules_pass() {
    for module in [standin::MODULES[0], standin::MODULES[3], standin::MODULES[7]] {
        let output = over_standin(module).args(["--json", "-"]).output().unwrap();
        status(&output, 0);
        let report = report(&output);
        assert_eq!(report["session"]["module"], module.version);
        assert!(report["counts"]["passed"].as_u64().unwrap() >= 48, "{}", report["counts"]);
    }
}

#[test]
fn a_module_that_fails_makes_named_failures() {
    let output = faulty("pin_v2:12").args(["--json", "-"]).output().unwrap();
    status(&output, 1);
    let report = report(&output);
    let failed: Vec<_> = outcomes(&report).into_iter().filter(|(_, outcome)| *outcome == "failed").collect();
    assert!(failed.len() > 40, "{failed:?}");
    let reason = report["results"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("pin: no room to pin"), "{reason}");
    assert!(text(&output.stderr).contains("\nFailed: basic_buffer, "), "{}", text(&output.stderr));
}

#[test]
fn a_time_limit_ends_what_hangs() {
    let output = run(&["--timeout", "1", "-e", "-t", "thread_soak"]);
    status(&output, 1);
    assert!(text(&output.stdout).contains("it hung: killed after 1 s (--timeout)"), "{}", text(&output.stdout));
}

#[test]
fn nothing_but_waivers_is_status_3() {
    let output = run(&["--filter", "leak_killed"]);
    status(&output, 3);
    let out = text(&output.stdout);
    assert!(out.contains("waived  leak_killed_process") && out.contains("Waived: 1"), "{out}");
}

#[test]
fn nonsense_on_the_command_line_is_status_2_and_one_line() {
    let table: [(&[&str], &str); 12] = [
        (&["--nonsense"], "--nonsense"),
        (&["extra"], "extra"),
        (&["-t"], "-t"),
        (&["-t", "basic"], "-t basic: there is no such test; -l lists them"),
        (&["--filter", "no such name"], "no test's name contains it"),
        (&["-d", "x"], "'x'"),
        (&["--backend", "rdma"], "gdrdrv, rm, vulkan, emulated"),
        (&["--copy", "rep_movsb"], "scalar"),
        (&["--timeout", "0"], "0"),
        (&["--tap", "--json", "-"], "name a file"),
        (&["--json", ""], "--json"),
        (&["--list", "--json", "-"], "'--list' cannot be used with '--json"),
    ];
    for (args, why) in table {
        let output = run(args);
        let (status, line) = refusal(TOOL, &output);
        assert!(status == 2 && line.contains(why), "{args:?}: {status}: {line}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    let output = over_standin(standin::MODULES[7]).arg("--sigbus").output().unwrap();
    let (status, line) = refusal(TOOL, &output);
    assert!(status == 2 && line.contains("a setting of emulated GPUs; add --backend emulated"), "{line}");
}

#[test]
fn what_cannot_be_done_is_status_1_and_one_line() {
    let scratch = Scratch::new("sanity");
    let missing = scratch.path("no/out.json");
    for (args, why) in [(&["--json", &missing][..], "No such file"), (&["--json", "/"], "directory")] {
        let output = run(args);
        let (status, line) = refusal(TOOL, &output);
        assert!(status == 1 && line.contains(why), "{args:?}: {status}: {line}");
    }
    let output = run(&["--json", "/dev/full", "-t", "basic_buffer"]);
    status(&output, 1);
    assert!(text(&output.stderr).contains("cannot write /dev/full: No space left"), "{}", text(&output.stderr));
    let output = run(&["-d", "7", "-t", "basic_buffer"]);
    status(&output, 1);
    assert!(text(&output.stdout).contains("no emulated GPU 7; choose 0 to 0"), "{}", text(&output.stdout));
}

#[test]
fn a_report_replaces_its_file() {
    let scratch = Scratch::new("sanity-file");
    let path = scratch.path("out.json");
    fs::write(&path, "old").unwrap();
    let output = run(&["--json", &path, "-t", "basic_buffer"]);
    status(&output, 0);
    assert!(text(&output.stdout).contains("passed  basic_buffer"));
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(outcomes(&report), [("basic_buffer", "passed")]);
}

#[test]
fn a_reader_who_leaves_is_no_error() {
    for args in [&["-t", "basic_buffer"][..], &["--list"], &["--tap", "-t", "basic_buffer"], &["--help"]] {
        let output = closed_pipe(sanity().args(args));
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        assert!(output.stderr.is_empty(), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn without_a_gpu_an_emulated_one_is_tested_aloud() {
    if std::path::Path::new("/dev/nvidiactl").exists() || std::path::Path::new("/dev/gdrdrv").exists() {
        return;
    }
    let mut command = plain(env!("CARGO_BIN_EXE_gdrcopy_sanity"));
    let output = command.args(["-t", "basic_buffer"]).stdin(Stdio::null()).output().unwrap();
    status(&output, 0);
    assert!(text(&output.stderr).contains("no GPU to test, so an emulated one is used"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("EMULATED GPU"));
}
