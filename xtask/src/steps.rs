//! The steps of `cargo xtask ci`, in the order in which they run: cheap ones first, one release build at the end.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::ci::{Step, Verdict};
use crate::run::{Log, capture, cargo, command, query, run};
use crate::vm;
use crate::workspace::{LIBRARY, Workspace};
use crate::{abi, bundle, c_programs, instructions, ptx, real_clients};

type Outcome = Result<Verdict, String>;

pub(crate) const ALL: &[Step] = &[
    Step { name: "fetch", about: "download the crates of the committed Cargo.lock", run: fetch },
    Step { name: "fmt", about: "cargo fmt --check", run: fmt },
    Step { name: "clippy", about: "all targets, all features, warnings are errors", run: clippy },
    Step { name: "clippy without features", about: "the library alone, warnings are errors", run: clippy_plain },
    Step {
        name: "features",
        about: "cargo check of the library and its tests with no feature, cuda, vulkan, tools",
        run: features,
    },
    Step { name: "test", about: "unit, property, integration and documentation tests", run: test },
    Step {
        name: "vulkan",
        about: "tests of backend vulkan with a software driver, where it is installed",
        run: vulkan,
    },
    Step { name: "docs", about: "cargo doc, warnings are errors", run: docs },
    Step { name: "msrv", about: "cargo check with the oldest promised compiler, where it is installed", run: msrv },
    Step { name: "no C in a plain build", about: "few crates, none of which builds C", run: no_c },
    Step {
        name: "ptx",
        about: "the GPU kernels' PTX belongs to its source; with compiler and assembler from PyPI (65 MB, once) for sm_70 to sm_100",
        run: ptx::check,
    },
    Step {
        name: "tools smoke",
        about: "the measuring programs as released, on the emulated backend, their JSON checked",
        run: tools_smoke,
    },
    Step {
        name: "instructions",
        about: "the copy path's instructions per call under valgrind, where it is installed",
        run: instructions::check,
    },
    Step { name: "c abi", about: "exported symbols, SONAME, headers as C and C++ by gcc and clang", run: abi::check },
    Step { name: "c tests", about: "C tests and replays of clients on the emulated backend", run: c_programs::tests },
    Step {
        name: "c gdrdrv",
        about: "the same on backend gdrdrv, over a stand-in for modules 2.0 to 2.6",
        run: c_programs::tests_over_gdrdrv,
    },
    Step { name: "c memcheck", about: "the same under valgrind, where it is installed", run: c_programs::memcheck },
    Step { name: "c sanitize", about: "the same built with AddressSanitizer", run: c_programs::sanitize },
    Step {
        name: "c install",
        about: "examples, pkg-config, CMake, the archive beside another Rust library, uninstall",
        run: c_programs::installed,
    },
    Step {
        name: "c real clients",
        about: "NCCL and NVSHMEM from PyPI (400 MB, once) open the library",
        run: real_clients::current,
    },
    Step { name: "module packages", about: "kernels and tools for the steps that follow", run: vm::step_packages },
    Step {
        name: "module build",
        about: "the kernel module for both kernels, with all warnings and sparse",
        run: vm::step_build,
    },
    Step { name: "module vm 6.1", about: "the module's tests in a virtual machine, Linux 6.1", run: vm::step_6_1 },
    Step { name: "module vm 6.12", about: "the module's tests in a virtual machine, Linux 6.12", run: vm::step_6_12 },
    Step { name: "gpu tests", about: "the tests that need an NVIDIA GPU", run: gpu_tests },
];

/// Steps that run with `--full` or when named: what they show beyond the others is seldom worth their downloads or their
/// time.
pub(crate) const FULL: &[Step] = &[
    Step {
        name: "c older clients",
        about: "with --full: the oldest NCCL and NVSHMEM in use (250 MB, once) open the library",
        run: real_clients::older,
    },
    Step { name: "benches", about: "with --full: every benchmark once, on the emulated backend", run: benches },
    Step {
        name: "limits smoke",
        about: "with --full: the bench of the copy engine's targets on the emulated backend, its JSON checked",
        run: limits_smoke,
    },
    Step {
        name: "c vulkan",
        about: "with --full: the library with backend vulkan: what it says where there is no Vulkan loader",
        run: c_programs::with_vulkan,
    },
    Step {
        name: "module contract",
        about: "with --full: the library's contract suite over the module, in a virtual machine, Linux 6.12",
        run: vm::step_contract,
    },
    Step {
        name: "bundle",
        about: "with --full: cargo xtask gpu-bundle, below its size limit; everything built once more, as released",
        run: gpu_bundle,
    },
];

pub(crate) fn every() -> impl Iterator<Item = &'static Step> {
    ALL.iter().chain(FULL)
}

fn passed(result: Result<(), String>) -> Outcome {
    result.map(|()| Verdict::Passed)
}

fn fetch(log: &mut Log, _: &Workspace) -> Outcome {
    passed(run(log, cargo(["fetch", "--locked"])))
}

/// Refuses with the way out where the toolchain lacks a component.
fn require_component(subcommand: &str, component: &str) -> Result<(), String> {
    let present = cargo([subcommand, "--version"]).output().is_ok_and(|output| output.status.success());
    if present {
        Ok(())
    } else {
        Err(format!("{component} is not installed: `rustup component add {component}` installs it"))
    }
}

fn fmt(log: &mut Log, _: &Workspace) -> Outcome {
    require_component("fmt", "rustfmt")?;
    passed(run(log, cargo(["fmt", "--all", "--check", "--", "--color", "never"])))
}

fn clippy(log: &mut Log, _: &Workspace) -> Outcome {
    require_component("clippy", "clippy")?;
    let args = ["clippy", "--locked", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
    passed(run(log, cargo(args)))
}

fn clippy_plain(log: &mut Log, _: &Workspace) -> Outcome {
    require_component("clippy", "clippy")?;
    let args = ["clippy", "--locked", "-p", LIBRARY, "--all-targets", "--no-default-features", "--", "-D", "warnings"];
    passed(run(log, cargo(args)))
}

fn features(log: &mut Log, _: &Workspace) -> Outcome {
    let check = ["check", "--locked", "-p", LIBRARY, "--all-targets", "--no-default-features"];
    for features in [&[][..], &["--features", "cuda"], &["--features", "vulkan"], &["--features", "tools"]] {
        run(log, cargo(check.iter().chain(features).copied()))?;
    }
    Ok(Verdict::Passed)
}

/// With everything built in, so that the steps of single features build nothing again. What a build without Vulkan says of
/// it is for the programs' step.
const TEST: [&str; 4] = ["test", "--locked", "--workspace", "--all-features"];

fn test(log: &mut Log, _: &Workspace) -> Outcome {
    passed(run(log, cargo(TEST.into_iter().chain(["--no-fail-fast"]))))
}

/// Where Debian's Mesa says that it has a driver which needs no GPU.
const SOFTWARE_VULKAN: &str = "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json";

/// The memory is the CPU's there, and nothing is taken from CUDA; importing and mapping are the real ones.
fn vulkan(log: &mut Log, _: &Workspace) -> Outcome {
    let driver = Path::new(SOFTWARE_VULKAN);
    if !driver.exists() {
        c_programs::install_package(log, "mesa-vulkan-drivers");
    }
    if !driver.exists() {
        let reason = "Mesa's software driver is not installed (Debian: mesa-vulkan-drivers)";
        return Ok(Verdict::Skipped(reason.to_owned()));
    }
    let unit = ["--lib", "vulkan::"];
    let whole = ["--test", "vulkan", "--test", "session_env"];
    for which in [&unit[..], &whole] {
        let mut job = cargo(TEST.iter().chain(which).copied());
        job.env("VK_DRIVER_FILES", driver).env("GDRCOPY_TEST_REQUIRE", "software-vulkan");
        run(log, job)?;
    }
    log.keep("taking the memory from CUDA: SKIPPED, it needs a GPU".to_owned());
    Ok(Verdict::Passed)
}

fn docs(log: &mut Log, _: &Workspace) -> Outcome {
    let mut doc = cargo(["doc", "--locked", "--workspace", "--no-deps", "--features", "tools,vulkan"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    passed(run(log, doc))
}

fn msrv(log: &mut Log, workspace: &Workspace) -> Outcome {
    let version = &workspace.rust_version;
    let Some(list) = query("rustup", ["toolchain", "list"]) else {
        return Ok(Verdict::Skipped("rustup is not installed, so there is no second toolchain".to_owned()));
    };
    let Some(toolchain) = toolchain_of(&list, version) else {
        let remedy = format!("rustup toolchain install {version} --profile minimal");
        return Ok(Verdict::Skipped(format!("toolchain {version} is not installed; `{remedy}` installs it")));
    };
    // Without tests: what only they depend on may ask for a newer compiler.
    let check = ["run", toolchain, "cargo", "check", "--locked", "--workspace", "--all-features"];
    passed(run(log, command("rustup", check)))
}

/// The toolchain of this version in the output of `rustup toolchain list`: `1.89-x86_64-..` or `1.89.0-x86_64-..`.
fn toolchain_of<'a>(list: &'a str, version: &str) -> Option<&'a str> {
    list.lines().filter_map(|line| line.split_whitespace().next()).find(|name| {
        name.strip_prefix(version).is_some_and(|rest| rest.is_empty() || rest.starts_with('-') || rest.starts_with('.'))
    })
}

/// The crates of a plain build, ours included, are few enough to be read.
const MAX_PLAIN_CRATES: usize = 25;

/// Crates whose place in the graph means that a build needs a C compiler or looks for C libraries.
const C_BUILDERS: [&str; 4] = ["bindgen", "cc", "cmake", "pkg-config"];

fn no_c(log: &mut Log, _: &Workspace) -> Outcome {
    let tree = ["tree", "--locked", "-p", LIBRARY, "--prefix", "none", "--format", "{p}"];
    let mut graph = |args: &[&'static str]| -> Result<BTreeSet<String>, String> {
        let output = capture(log, cargo(tree.iter().chain(args).copied()))?;
        Ok(crate_names(&output))
    };
    let plain = graph(&["--no-default-features", "-e", "normal"])?;
    let mut built = graph(&["--no-default-features", "-e", "normal,build"])?;
    built.extend(graph(&["-e", "normal,build"])?);

    log.keep(format!("{} crates without features: {}", plain.len(), Vec::from_iter(plain.iter().cloned()).join(", ")));
    if plain.is_empty() || plain.len() > MAX_PLAIN_CRATES {
        return Err(format!("{} crates without features; from 1 to {MAX_PLAIN_CRATES} are allowed", plain.len()));
    }
    match C_BUILDERS.iter().find(|&&builder| built.contains(builder)) {
        Some(builder) => {
            Err(format!("a plain build depends on `{builder}`; `cargo tree -i {builder} -e normal,build` says why"))
        }
        None => Ok(Verdict::Passed),
    }
}

/// The distinct crate names in the output of `cargo tree --prefix none --format {p}`.
fn crate_names(tree: &str) -> BTreeSet<String> {
    tree.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// The programs whose report has `results`, and flags of a short run.
const MEASURING: [(&str, &[&str]); 4] = [
    ("gdrcopy_copylat", &["-s", "4096", "-w", "100", "-r", "20"]),
    ("gdrcopy_copybw", &["-l", "-w", "100", "-r", "20"]),
    ("gdrcopy_apiperf", &["-s", "131072", "-n", "20"]),
    ("gdrcopy_pplat", &["-t", "200"]),
];

fn tools_smoke(log: &mut Log, _: &Workspace) -> Outcome {
    for (tool, flags) in MEASURING {
        let build = ["run", "--locked", "--release", "--features", "tools", "--bin", tool, "--"];
        let mut smoke = cargo(build.into_iter().chain(flags.iter().copied()).chain(["--json", "-"]));
        smoke.env("GDRCOPY_BACKEND", "emulated");
        let output = capture(log, smoke)?;
        let results = check_report(&output, tool).map_err(|error| format!("{tool}: {error}"))?;
        log.keep(format!("{tool}: {results} results, all checked"));
    }
    without_vulkan(log)?;
    Ok(Verdict::Passed)
}

/// A program built without backend vulkan that is told to use it.
fn without_vulkan(log: &mut Log) -> Result<(), String> {
    const WANTED: &str = "built without backend 'vulkan'; build gdrcopy with feature 'vulkan'";
    let program = ["run", "--locked", "--release", "--features", "tools", "--bin", "gdrcopy_copylat", "--"];
    let mut refused = cargo(program.into_iter().chain(["--backend", "vulkan"]));
    let output = refused.output().map_err(|error| format!("gdrcopy_copylat cannot be started: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() || !said.contains(WANTED) {
        return Err(format!("gdrcopy_copylat --backend vulkan does not end with \"{WANTED}\" but with: {said}"));
    }
    log.keep(format!("gdrcopy_copylat --backend vulkan: {WANTED}"));
    Ok(())
}

/// Checks a tool's JSON: nothing else on standard output, the schema we know, figures in order; every copy verified and
/// both directions there, or every call named.
fn check_report(output: &str, tool: &str) -> Result<usize, String> {
    let report: Value =
        serde_json::from_str(output).map_err(|error| format!("standard output is not JSON: {error}"))?;
    if report["schema"] != 1 || report["tool"] != tool {
        return Err(format!("`schema` is {}, not 1, or `tool` is not it: {}", report["schema"], report["tool"]));
    }
    let results = report["results"].as_array().filter(|list| !list.is_empty()).ok_or("`results` is no full list")?;
    let ns = |result: &Value, name: &str| result[name].as_f64().unwrap_or(f64::NAN);
    let is_ordered =
        |result: &&Value| ["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns"].map(|name| ns(result, name)).is_sorted();
    if let Some(result) = results.iter().find(|result| !is_ordered(result)) {
        return Err(format!("figures are missing or in disorder: {result}"));
    }
    if results.iter().any(|result| result["op"].is_string()) {
        return match results.iter().find(|result| !result["op"].is_string()) {
            Some(result) => Err(format!("a call has no name: {result}")),
            None => Ok(results.len()),
        };
    }
    if let Some(result) = results.iter().find(|result| result["verified"] != true) {
        return Err(format!("a result is not verified: {result}"));
    }
    // A round trip goes both ways.
    if results.iter().all(|result| result["metric"] == "rtt") {
        return Ok(results.len());
    }
    for direction in ["h2d", "d2h"] {
        if results.iter().all(|result| result["direction"] != direction) {
            return Err(format!("no result of direction {direction}"));
        }
    }
    Ok(results.len())
}

/// Each measured function runs once: that it compiles and works, not how fast it is.
fn benches(log: &mut Log, _: &Workspace) -> Outcome {
    let which = ["--bench", "dispatch", "--bench", "fence", "--bench", "kernels", "--bench", "api"];
    let mut once = cargo(["bench", "--locked", "-p", LIBRARY].into_iter().chain(which).chain(["--", "--test"]));
    once.env("GDRCOPY_BACKEND", "emulated");
    passed(run(log, once))
}

fn limits_smoke(log: &mut Log, _: &Workspace) -> Outcome {
    let bench = ["bench", "--locked", "--features", "tools", "--bench", "limits", "--", "--quick", "--json", "-"];
    let mut smoke = cargo(bench);
    smoke.env("GDRCOPY_BACKEND", "emulated");
    let output = capture(log, smoke)?;
    let (results, verdicts) = (check_report(&output, "limits")?, check_verdicts(&output)?);
    log.keep(format!("{results} results, all verified; {verdicts} targets, none judged on an emulated GPU"));
    Ok(Verdict::Passed)
}

/// Checks that the parts which run anywhere have their targets, and that an emulated GPU neither meets nor misses one.
fn check_verdicts(output: &str) -> Result<usize, String> {
    let report: Value =
        serde_json::from_str(output).map_err(|error| format!("standard output is not JSON: {error}"))?;
    let verdicts = report["verdicts"].as_array().ok_or("`verdicts` is not a list")?;
    for part in ["posted", "grid", "chosen"] {
        if verdicts.iter().all(|verdict| verdict["part"] != part) {
            return Err(format!("no target of part {part}"));
        }
    }
    match verdicts.iter().find(|verdict| !verdict["measured"].is_number() || !verdict["met"].is_null()) {
        Some(verdict) => Err(format!("not measured, or judged without a GPU: {verdict}")),
        None => Ok(verdicts.len()),
    }
}

fn gpu_bundle(log: &mut Log, workspace: &Workspace) -> Outcome {
    let out = workspace.target.join("ci-bundle");
    bundle::build(log, workspace, &out)?;
    passed(run(log, command("bash", [Path::new("-n"), &out.join(bundle::SCRIPT)])))
}

fn gpu_tests(log: &mut Log, _: &Workspace) -> Outcome {
    if !Path::new("/dev/nvidiactl").exists() {
        return Ok(Verdict::Skipped("no NVIDIA GPU".to_owned()));
    }
    passed(run(log, cargo(["test", "--locked", "--release", "-p", LIBRARY, "--features", "tools", "--test", "gpu"])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolchain_is_found_by_its_whole_version() {
        let list = "stable-x86_64-unknown-linux-gnu (active, default)\n1.890-x\n1.89.0-x86_64-unknown-linux-gnu\n";
        assert_eq!(toolchain_of(list, "1.89"), Some("1.89.0-x86_64-unknown-linux-gnu"));
        assert_eq!(toolchain_of("1.89-x86_64-unknown-linux-gnu", "1.89"), Some("1.89-x86_64-unknown-linux-gnu"));
        assert_eq!(toolchain_of("1.890-x\nnightly-x", "1.89"), None);
        assert_eq!(toolchain_of("no installed toolchains\n", "1.89"), None);
    }

    #[test]
    fn a_crate_counts_once() {
        let tree = "gdrcopy v0.1.0 (/src)\nlibc v0.2.1\nnix v0.32.0\n\nlibc v0.2.1 (*)\n";
        assert_eq!(Vec::from_iter(crate_names(tree)), ["gdrcopy", "libc", "nix"]);
    }

    #[test]
    fn every_part_has_its_targets_and_none_is_judged() {
        let report = |parts: &[&str], measured: Value, met: Value| {
            let verdict = |part: &&str| serde_json::json!({"part": part, "measured": measured, "met": met});
            serde_json::json!({"verdicts": parts.iter().map(verdict).collect::<Vec<_>>()}).to_string()
        };
        let parts = ["posted", "posted", "grid", "chosen"];
        assert_eq!(check_verdicts(&report(&parts, 3.5.into(), Value::Null)), Ok(4));
        assert!(check_verdicts(&report(&parts[..3], 3.5.into(), Value::Null)).is_err());
        assert!(check_verdicts(&report(&parts, 3.5.into(), true.into())).is_err());
        assert!(check_verdicts(&report(&parts, Value::Null, Value::Null)).is_err());
        assert!(check_verdicts("{}").is_err());
    }

    #[test]
    fn a_report_must_be_json_alone_ordered_and_verified_in_both_directions() {
        const TOOL: &str = "gdrcopy_copylat";
        let figures = |more: Value| {
            let mut result = serde_json::json!({"min_ns": 1, "p50_ns": 2.5, "p99_ns": 3, "p999_ns": 3, "max_ns": 4});
            result.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            result
        };
        let of = |schema: u32, results: Vec<Value>| {
            serde_json::json!({"schema": schema, "tool": TOOL, "results": results}).to_string()
        };
        let copy = |direction: &str, verified: bool| {
            figures(serde_json::json!({"direction": direction, "verified": verified}))
        };
        let good = of(1, vec![copy("h2d", true), copy("d2h", true)]);
        assert_eq!(check_report(&good, TOOL), Ok(2));
        assert!(check_report(&good, "gdrcopy_copybw").is_err());
        assert!(check_report(&format!("{good}\ndone"), TOOL).is_err());
        for bad in [
            String::new(),
            of(2, vec![copy("h2d", true), copy("d2h", true)]),
            of(1, vec![copy("h2d", true), copy("d2h", false)]),
            of(1, vec![copy("h2d", true)]),
            of(1, vec![]),
            of(1, vec![figures(serde_json::json!({"direction": "h2d"}))]),
            of(1, vec![figures(serde_json::json!({"op": "pin"})), copy("h2d", true)]),
            of(1, vec![figures(serde_json::json!({"op": "pin", "max_ns": 1}))]),
            of(1, vec![serde_json::json!({"op": "pin"})]),
        ] {
            assert!(check_report(&bad, TOOL).is_err(), "{bad}");
        }
        assert_eq!(check_report(&of(1, vec![figures(serde_json::json!({"op": "pin"}))]), TOOL), Ok(1));
    }
}
