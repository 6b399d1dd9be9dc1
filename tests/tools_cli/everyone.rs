//! What all programs have in common: flags, targets, refusals.

use std::fs;
use std::process::Stdio;

use super::program::{Scratch, closed_pipe, text};
use super::{COPYBW, COPYLAT, TOOLS, assert_ok, report, results};

#[test]
fn a_report_on_standard_output_is_alone_there() {
    for tool in TOOLS {
        report(&tool.small(&["--json", "-"]));
        for (flag, start) in [("--csv", ""), ("--plot", "<svg ")] {
            let output = tool.small(&[flag, "-"]);
            assert_ok(&output);
            assert!(text(&output.stdout).starts_with(start), "{}", tool.name);
            assert!(!text(&output.stdout).contains("Mapping  "), "{}", tool.name);
            assert!(text(&output.stderr).contains("EMULATED GPU"));
        }
    }
}

#[test]
fn json_and_csv_tell_the_same() {
    for tool in TOOLS {
        let scratch = Scratch::new(&format!("{}-same", tool.name));
        let path = scratch.path("out.csv");
        let report = report(&tool.small(&["--json", "-", "--csv", &path]));
        let csv = fs::read_to_string(path).unwrap();
        let mut rows = csv.lines().map(|row| row.split(',').collect::<Vec<_>>());
        let titles = rows.next().unwrap();
        let column = |name: &str| titles.iter().position(|title| *title == name).unwrap();
        assert_eq!(rows.clone().count(), results(&report).len());
        for (row, entry) in rows.zip(results(&report)) {
            for name in ["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns", "bytes", "iterations"] {
                let field = row[column(name)].parse::<f64>().unwrap();
                assert_eq!(field, entry[name].as_f64().unwrap(), "{name} of {entry}");
            }
            for name in ["direction", "op", "metric"] {
                let Some(value) = entry.get(name) else { continue };
                assert_eq!(row[column(name)], value.as_str().unwrap());
            }
            assert_eq!((row[column("partial")], row[column("tool")]), ("false", tool.name));
        }
    }
}

#[test]
fn a_picture_shows_what_was_measured() {
    for tool in TOOLS {
        let scratch = Scratch::new(&format!("{}-plot", tool.name));
        let path = scratch.path("out.svg");
        assert_ok(&tool.small(&["--plot", &path]));
        let svg = fs::read_to_string(path).unwrap();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
        for text in [tool.name, "backend emulated", "say nothing about a GPU", "64 KiB"] {
            assert!(svg.contains(text) || (text == "64 KiB" && tool.name == COPYLAT.name), "{}: {text}", tool.name);
        }
        assert!(!svg.contains("NaN") && !svg.contains("\"inf"), "{}", tool.name);
    }
}

#[test]
fn every_allocator_can_be_measured() {
    for tool in TOOLS {
        for allocator in ["buffer", "cuMemAlloc", "cuMemCreate"] {
            let report = report(&tool.small(&["-a", allocator, "--json", "-"]));
            assert_eq!(report["host"]["allocator"], allocator);
        }
    }
}

#[test]
fn flags_win_over_the_environment() {
    for tool in TOOLS {
        let routine = |args: &[&str]| {
            let mut command = tool.command();
            command.args(tool.small).args(args).args(["--json", "-"]).env("GDRCOPY_COPY", "sse41");
            report(&command.output().unwrap())["mapping"]["routine"].clone()
        };
        assert_eq!(routine(&[]), "sse41");
        assert_eq!(routine(&["--copy", "scalar"]), "scalar");
        let mut command = tool.command();
        command.args(tool.small).args(["--backend", "emulated", "--json", "-"]).env("GDRCOPY_BACKEND", "rm");
        assert_eq!(report(&command.output().unwrap())["backend"], "emulated");
    }
}

#[test]
fn the_gpu_is_the_one_asked_for() {
    for tool in TOOLS {
        let second = |gpus| {
            let mut command = tool.command();
            command.args(tool.small).args(["-d", "1", "--json", "-"]).env("GDRCOPY_EMULATED_GPUS", gpus);
            command.output().unwrap()
        };
        assert_eq!(report(&second("2"))["host"]["gpu_ordinal"], 1);
        let output = second("1");
        let (status, line) = tool.refusal(&output);
        assert!(status == 1 && line.contains("-d 1") && line.contains("the only one is 0"), "{line}");
    }
}

#[test]
fn nonsense_on_the_command_line_is_status_2_and_one_line() {
    let common: [(&[&str], &str); 16] = [
        (&["--nonsense"], "--nonsense"),
        (&["-x"], "-x"),
        (&["extra"], "extra"),
        (&["-s"], "-s"),
        (&["-s", "0"], "at least 1"),
        (&["-s", "4X"], "not a unit"),
        (&["-s", "17179869184G"], "64 bits"),
        (&["-s", "-1"], "-1"),
        (&["-w", "many"], "many"),
        (&["-w", "99999999999999999999"], "99999999999999999999"),
        (&["-d", "x"], "'x'"),
        (&["-M", "uncached"], "wc, cache, device"),
        (&["-a", "malloc"], "buffer, cuMemAlloc, cuMemCreate"),
        (&["--backend", "rdma"], "gdrdrv, rm, vulkan, emulated"),
        (&["--copy", "rep_movsb"], "scalar"),
        (&["--json", ""], "--json"),
    ];
    let mixed: [&[&str]; 3] =
        [&["--json", "-", "--csv", "-"], &["--json", "-", "--plot", "-"], &["--csv", "-", "--plot", "-"]];
    for tool in TOOLS {
        let lines = common.into_iter().chain(mixed.map(|args| (args, "name a file")));
        for (args, why) in lines.chain([(&["--sizes", "64-1"][..], "write 1-64"), (&["--sizes", "0"], "at least 1")]) {
            let output = tool.run(args);
            let (status, line) = tool.refusal(&output);
            assert!(status == 2 && line.contains(why), "{} {args:?}: {status}: {line}", tool.name);
            assert!(output.stdout.is_empty(), "{args:?}");
        }
    }
    let copies: [(&[&str], &str); 2] =
        [(&["-w", "0", "-r", "0"], "nothing to measure"), (&["--compare", "hip"], "cuda")];
    for tool in [COPYLAT, COPYBW] {
        for (args, why) in copies {
            let output = tool.run(args);
            let (status, line) = tool.refusal(&output);
            assert!(status == 2 && line.contains(why), "{} {args:?}: {status}: {line}", tool.name);
        }
    }
    let latency: [(&[&str], &str); 4] = [
        (&["--sizes", "1-1G:1"], "larger step"),
        (&["-s", "64", "--sizes", "65"], "-s 65"),
        (&["-s", "64", "--offsets", "64"], "-s 65"),
        (&["--offsets", "18446744073709551615"], "address space"),
    ];
    for (args, why) in latency {
        let output = COPYLAT.run(args);
        let (status, line) = COPYLAT.refusal(&output);
        assert!(status == 2 && line.contains(why), "{args:?}: {status}: {line}");
    }
}

#[test]
fn what_cannot_be_done_is_status_1_and_one_line() {
    for tool in TOOLS {
        let scratch = Scratch::new(&format!("{}-refused", tool.name));
        let (missing, directory) = (scratch.path("no/out"), scratch.path(""));
        let table: [(&[&str], &str); 10] = [
            (&["-d", "7"], "no such GPU"),
            (&["-M", "device"], "leave it out"),
            (&["-M", "wc"], "leave it out"),
            (&["--cpu", "1023"], "CPU 1023"),
            (&["--cpu", "4294967295"], "may use CPUs"),
            (&["--sizes", "2305843009213693952"], "bytes"),
            (&["--json", &missing], "No such file"),
            (&["--csv", &missing], "No such file"),
            (&["--plot", &missing], "No such file"),
            (&["--json", &directory], "directory"),
        ];
        for (args, why) in table {
            let output = tool.run(args);
            let (status, line) = tool.refusal(&output);
            assert!(status == 1 && line.contains(why), "{} {args:?}: {status}: {line}", tool.name);
            assert!(output.stdout.is_empty(), "{args:?} was noticed before measuring");
        }
    }
}

#[test]
fn environment_errors_name_the_value_and_the_choices() {
    for tool in TOOLS {
        for name in ["GDRCOPY_BACKEND", "GDRCOPY_COPY"] {
            let output = tool.command().args(tool.small).env(name, "nonsense").output().unwrap();
            let (status, line) = tool.refusal(&output);
            assert!(status == 1 && line.contains("nonsense") && line.contains("choose one of"), "{name}: {line}");
        }
    }
}

#[test]
fn a_full_device_is_reported() {
    for tool in TOOLS {
        for flag in ["--json", "--csv", "--plot"] {
            let output = tool.small(&[flag, "/dev/full"]);
            let (status, line) = tool.refusal(&output);
            assert!(status == 1 && line.contains("/dev/full") && line.contains("No space left"), "{line}");
        }
        for args in [&[][..], &["--json", "-"]] {
            let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
            let child = tool.command().args(tool.small).args(args).stdout(full).stderr(Stdio::piped()).spawn();
            let output = child.unwrap().wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(1));
            let last = text(&output.stderr).lines().last().unwrap();
            assert!(last.contains("cannot write standard output") && last.contains("No space left"), "{last}");
        }
    }
}

#[test]
fn a_reader_who_leaves_is_no_error() {
    for tool in TOOLS {
        for args in [&[][..], &["--json", "-"], &["--plot", "-"], &["--help"], &["--version"]] {
            let output = closed_pipe(tool.command().args(tool.small).args(args));
            assert_ok(&output);
            assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
        }
    }
}

#[test]
fn a_report_is_written_though_nobody_reads_the_tables() {
    for tool in TOOLS {
        let scratch = Scratch::new(&format!("{}-unread", tool.name));
        for (name, csv) in [("stdout", "/dev/null"), ("stderr", "-")] {
            let path = scratch.path(name);
            let (reader, gone) = std::io::pipe().unwrap();
            drop(reader);
            let mut command = tool.command();
            command.args(tool.small).args(["--json", &path, "--csv", csv]);
            if name == "stdout" {
                command.stdout(gone)
            } else {
                command.stdout(Stdio::null()).stderr(gone)
            };
            assert!(command.status().unwrap().success());
            let report = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
            assert!(!results(&report).is_empty());
        }
    }
}

#[test]
fn a_failed_run_leaves_an_old_report_alone() {
    for tool in TOOLS {
        let scratch = Scratch::new(&format!("{}-old", tool.name));
        let path = scratch.path("out.json");
        fs::write(&path, "old").unwrap();
        assert_eq!(tool.small(&["--json", &path, "-d", "7"]).status.code(), Some(1));
        assert_eq!(fs::read_to_string(path).unwrap(), "old");
    }
}

#[test]
fn help_and_version_go_to_standard_output() {
    for tool in TOOLS {
        for (flag, what) in [("-h", "-s <BYTES>"), ("--help", "--backend"), ("--version", env!("CARGO_PKG_VERSION"))] {
            let output = tool.run(&[flag]);
            assert_ok(&output);
            let stdout = text(&output.stdout);
            assert!(stdout.contains(what) && stdout.ends_with('\n'), "{} {flag}", tool.name);
            for line in stdout.lines() {
                assert!(line.len() <= 100, "{} {flag}: {line}", tool.name);
            }
            assert!(output.stderr.is_empty());
        }
    }
}
