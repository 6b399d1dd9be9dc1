//! What opens, and why: the program's word before the environment's, the environment's before probing.
//!
//! The environment belongs to a whole process, so each case is one of its own: this program again, running
//! [`in_a_process_of_its_own`] alone, which opens a session and says what came of it.

use std::env;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use gdrcopy::emulated::EmulatedConfig;
use gdrcopy::{BackendKind, Policy, Result, RmLevel, Session, SessionBuilder, copy};

/// Names what a case asks its builder for.
const ASK: &str = "GDRCOPY_TEST_ASK";
const ANSWER: &str = "answer: ";

fn builder(ask: &str) -> Result<SessionBuilder> {
    ask.split_whitespace().try_fold(Session::builder(), |builder, word| {
        let (setting, value) = word.split_once('=').unwrap_or((word, ""));
        Ok(match setting {
            "backend" => builder.backend(value.parse::<BackendKind>()?),
            "rm" => builder.rm(value.parse::<RmLevel>()?),
            "copy" => builder.copy_routine(value),
            "policy" => builder.policy(Policy::read(value)?),
            "gpus" => builder.emulated(EmulatedConfig::default().gpus(value.parse().expect("a number"))),
            "ignore_env" => builder.ignore_env(),
            _ => panic!("no such setting: {word}"),
        })
    })
}

fn answer(ask: &str) -> String {
    let mut answer = String::new();
    match builder(ask).and_then(SessionBuilder::open) {
        Ok(session) => {
            let (backend, routine) = (session.backend(), session.routine().name());
            let gpus = session.emulated().map_or(0, |_| session.gpus().expect("emulated GPUs").len());
            let level = session.rm_level().map_or("none", RmLevel::name);
            let report = session.probe_report().to_string();
            let policy = session.policy().source();
            write!(answer, "opened {backend} level={level} copy={routine} gpus={gpus} policy={policy} report={report}")
        }
        Err(error) => write!(answer, "failed {:?} {error}", error.kind()),
    }
    .expect("a string");
    answer
}

/// One case, if this process was started for one.
#[test]
fn in_a_process_of_its_own() {
    if let Ok(ask) = env::var(ASK) {
        println!("{ANSWER}{}", answer(&ask).replace('\n', "\\n"));
    }
}

/// What a fresh process with these variables says to `ask`.
fn process(vars: &[(&str, &OsStr)], ask: &str) -> String {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", "in_a_process_of_its_own", "--nocapture"]).env(ASK, ask);
    for name in ["GDRCOPY_BACKEND", "GDRCOPY_RM", "GDRCOPY_COPY", "GDRCOPY_POLICY", "GDRCOPY_EMULATED_GPUS"] {
        command.env_remove(name);
    }
    let output = command.envs(vars.iter().copied()).output().expect("a process");
    let text = String::from_utf8(output.stdout).expect("text");
    let start = text.find(ANSWER).unwrap_or_else(|| panic!("no answer to '{ask}' with {vars:?}: {text}"));
    text[start + ANSWER.len()..].lines().next().expect("a line").to_owned()
}

#[track_caller]
fn says(vars: &[(&str, &str)], ask: &str, wanted: &[&str]) -> String {
    let os: Vec<_> = vars.iter().map(|&(name, value)| (name, OsStr::new(value))).collect();
    let found = process(&os, ask);
    for part in wanted {
        assert!(found.contains(part), "{vars:?}, '{ask}': no '{part}' in: {found}");
    }
    assert!(!found.contains("\\n"), "more than one line: {found}");
    found
}

/// Any routine but the one that would be taken anyway, which this processor has.
fn another_routine() -> &'static str {
    let usable = copy::routines().iter().filter(|routine| routine.is_available());
    usable
        .map(|routine| routine.name())
        .find(|&name| name != copy::preferred().name())
        .expect("scalar, or a better one")
}

/// What asking for `rm` says where it is not switched off.
fn rm_answers(found: &str) {
    let cause = if cfg!(feature = "cuda") { "" } else { "built without backend 'rm'" };
    assert!(found.contains(cause) && !found.contains("switched off"), "{found}");
}

#[test]
fn the_program_s_backend_comes_first() {
    says(&[("GDRCOPY_BACKEND", "emulated")], "", &["opened emulated", "chosen by GDRCOPY_BACKEND"]);
    says(&[("GDRCOPY_BACKEND", "rm")], "backend=emulated", &["opened emulated", "chosen by the program"]);
    says(&[("GDRCOPY_BACKEND", "emulated")], "backend=emulated", &["chosen by the program"]);
    let found = says(&[("GDRCOPY_BACKEND", "emulated")], "backend=rm", &[]);
    assert!(!found.contains("emulated"), "{found}");
    // Settings of the emulated GPUs choose nothing.
    let found = says(&[], "gpus=2", &[]);
    assert!(!found.contains("opened emulated"), "{found}");
}

#[test]
fn an_empty_variable_is_none() {
    let empty = [("GDRCOPY_COPY", ""), ("GDRCOPY_RM", ""), ("GDRCOPY_EMULATED_GPUS", "")];
    let copy = format!("copy={}", copy::preferred().name());
    says(&empty, "backend=emulated", &["opened emulated", "gpus=1", &copy]);
    assert_eq!(process(&[("GDRCOPY_BACKEND", OsStr::new(""))], ""), process(&[], ""));
}

#[test]
fn the_program_s_copy_routine_comes_first() {
    let (best, other) = (copy::preferred().name(), another_routine());
    let copy = |name: &str| format!("copy={name} ");
    says(&[], "backend=emulated", &[&copy(best)]);
    says(&[("GDRCOPY_COPY", other)], "backend=emulated", &[&copy(other)]);
    says(&[("GDRCOPY_COPY", other)], &format!("backend=emulated copy={best}"), &[&copy(best)]);
    says(&[("GDRCOPY_COPY", other)], "backend=emulated ignore_env", &[&copy(best)]);
}

#[test]
fn the_program_s_level_comes_first() {
    let off = "backend 'rm' is switched off by GDRCOPY_RM or the program";
    rm_answers(&says(&[], "backend=rm", &[]));
    rm_answers(&says(&[("GDRCOPY_RM", "off")], "backend=rm rm=vmm", &[]));
    rm_answers(&says(&[("GDRCOPY_RM", "off")], "backend=rm ignore_env", &[]));
    if cfg!(feature = "cuda") {
        says(&[("GDRCOPY_RM", "off")], "backend=rm", &["failed PermissionDenied", off, "; choose level vmm or ipc"]);
        says(&[("GDRCOPY_RM", "ipc")], "backend=rm rm=off", &["failed PermissionDenied", off]);
        says(&[("GDRCOPY_RM", "off")], "", &["failed PermissionDenied", off, "GDRCOPY_BACKEND=emulated"]);
    }
}

#[test]
fn unknown_names_are_errors_that_list_the_known_ones() {
    let bad = "failed InvalidArgument";
    says(
        &[("GDRCOPY_BACKEND", "rdma")],
        "",
        &[bad, "GDRCOPY_BACKEND: unknown backend 'rdma'; choose one of: gdrdrv, rm, vulkan, emulated"],
    );
    says(&[("GDRCOPY_BACKEND", "RM")], "", &[bad, "GDRCOPY_BACKEND"]);
    says(&[("GDRCOPY_RM", "all")], "", &[bad, "GDRCOPY_RM: unknown rm level 'all'; choose one of: off, vmm, ipc"]);
    let copies = r#"there is no routine "mmx"; choose one of scalar, sse41, avx2, avx512, movdir64b"#;
    says(&[("GDRCOPY_COPY", "mmx")], "backend=emulated", &[bad, &format!("GDRCOPY_COPY: {copies}")]);
    says(&[], "backend=emulated copy=mmx", &[bad, copies]);
    says(&[], "backend=rdma", &[bad, "unknown backend 'rdma'"]);
    says(&[], "rm=all", &[bad, "unknown rm level 'all'"]);
    // A mistake is not hidden by the program's own choice.
    says(&[("GDRCOPY_BACKEND", "rdma")], "backend=emulated", &[bad, "GDRCOPY_BACKEND"]);
    says(&[("GDRCOPY_RM", "all")], "backend=emulated rm=vmm", &[bad, "GDRCOPY_RM"]);
    says(&[("GDRCOPY_COPY", "mmx")], "backend=emulated copy=scalar", &[bad, "GDRCOPY_COPY"]);
}

#[test]
fn what_is_no_text_is_an_error() {
    for name in ["GDRCOPY_BACKEND", "GDRCOPY_RM", "GDRCOPY_COPY", "GDRCOPY_POLICY", "GDRCOPY_EMULATED_GPUS"] {
        let found = process(&[(name, OsStr::from_bytes(b"\xff\xfe"))], "backend=emulated");
        assert!(found.contains(&format!("{name} is not valid text; unset {name} or correct it")), "{found}");
        assert!(found.contains("failed InvalidArgument"), "{found}");
        let found = process(&[(name, OsStr::from_bytes(b"\xff\xfe"))], "backend=emulated ignore_env");
        assert!(found.contains("opened emulated"), "{found}");
    }
}

#[test]
fn the_number_of_emulated_gpus_is_checked() {
    let gpus = |value| [("GDRCOPY_EMULATED_GPUS", value)];
    for (value, number) in [("1", "gpus=1"), ("3", "gpus=3"), (" 64 ", "gpus=64")] {
        says(&gpus(value), "backend=emulated", &["opened emulated", number]);
    }
    for value in ["many", "0", "65", "-1", "1.5", "0x4", "99999999999999999999"] {
        let cause =
            format!("GDRCOPY_EMULATED_GPUS is '{value}', not a number from 1 to 64; set it to one, or unset it");
        says(&gpus(value), "backend=emulated", &["failed InvalidArgument", &cause]);
        says(&gpus(value), "backend=emulated ignore_env", &["opened emulated", "gpus=1"]);
        says(&gpus(value), "backend=emulated gpus=2", &["opened emulated", "gpus=2"]);
    }
    for value in ["0", "65"] {
        says(&[], &format!("backend=emulated gpus={value}"), &["failed InvalidArgument", "ask for 1 to 64"]);
    }
}

#[test]
fn ignoring_the_environment_ignores_all_of_it() {
    let all = [
        ("GDRCOPY_BACKEND", "rdma"),
        ("GDRCOPY_RM", "all"),
        ("GDRCOPY_COPY", "mmx"),
        ("GDRCOPY_EMULATED_GPUS", "many"),
    ];
    let found = says(&all, "ignore_env backend=emulated", &["opened emulated", "gpus=1", "chosen by the program"]);
    assert_eq!(found, says(&[], "backend=emulated", &[]));
    assert_eq!(says(&all, "ignore_env", &[]), says(&[], "", &[]));
}

/// Without a GPU probing fails with one line, and emulated GPUs are never taken unasked.
#[test]
fn probing_never_ends_in_emulated_gpus() {
    let found = says(&[], "", &[]);
    if found.starts_with("opened") {
        assert!(!found.starts_with("opened emulated") && found.contains("chosen by probing"), "{found}");
        return;
    }
    let asked = says(&[], "backend=rm", &["failed"]);
    let cause = asked.split_once("open: ").expect("the operation").1.split("; ").next().expect("the cause");
    let cause = cause.split(" (").next().expect("without the system's word");
    assert!(found.contains("open: no backend works here: gdrdrv: "), "{found}");
    assert!(found.contains(&format!("; rm: {cause}")), "{found}");
    assert!(found.ends_with("; for a try without a GPU set GDRCOPY_BACKEND=emulated"), "{found}");
    says(&[("GDRCOPY_EMULATED_GPUS", "4")], "", &["failed"]);
    if !cfg!(feature = "cuda") {
        assert!(found.contains("built without backend 'rm'; build gdrcopy with feature 'cuda'"), "{found}");
    }
}

#[test]
fn a_policy_comes_from_the_program_or_a_file_and_gives_way_to_a_named_routine() {
    let emulated = ("GDRCOPY_BACKEND", "emulated");
    says(&[emulated], "", &["policy=built-in table"]);
    says(&[emulated, ("GDRCOPY_POLICY", "")], "", &["policy=built-in table"]);

    let file = |name: &str, routine: &str| {
        let path = env::temp_dir().join(format!("gdrcopy-{}-{name}", std::process::id()));
        let text = format!("schema = 1\nh2d 1- routine={routine}\nd2h 1- routine={routine}\n");
        std::fs::write(&path, text).expect("a file");
        path.to_str().expect("text").to_owned()
    };
    let (scalar, bad) = (file("scalar", "scalar"), file("bad", "abacus"));
    let other = file("other", another_routine());
    let in_env = ("GDRCOPY_POLICY", scalar.as_str());
    says(&[emulated, in_env], "", &[&format!("policy={scalar}"), "copy=scalar"]);
    says(&[emulated, in_env], "ignore_env backend=emulated", &["policy=built-in table"]);
    let program = format!("policy={other}");
    says(&[emulated, in_env], &program, &[&program, &format!("copy={}", another_routine())]);
    let named = format!("copy={}", copy::preferred().name());
    says(&[emulated, in_env], &named, &[&format!("policy={scalar}"), &named]);
    says(&[emulated, in_env, ("GDRCOPY_COPY", copy::preferred().name())], "", &[&named]);

    let cause =
        format!("failed InvalidArgument open: GDRCOPY_POLICY: {bad} line 2: there is no routine \"abacus\"; choose");
    says(&[emulated, ("GDRCOPY_POLICY", &bad)], "", &[&cause]);
    let missing = "GDRCOPY_POLICY: the policy file /no/such/file cannot be read: No such file or directory";
    says(&[emulated, ("GDRCOPY_POLICY", "/no/such/file")], "", &[missing, "; correct the path, or calibrate"]);
    for path in [scalar, bad, other] {
        std::fs::remove_file(path).expect("our file");
    }
}
