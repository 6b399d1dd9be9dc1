//! This program again, running one test alone over the stand-in.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

use crate::common::standin::{LOG, Module, command, counted, text};

/// The newest module in its usual mode.
pub(crate) const NEWEST: Module = Module { version: "2.6", persistent: true };
/// The oldest.
pub(crate) const OLDEST: Module = Module { version: "2.0", persistent: false };

const ANSWER: &str = "answer: ";

/// What a test found out in a process of its own, for the one that started it.
pub(crate) fn answer(words: &str) {
    assert!(!words.contains('\n'), "one line: {words}");
    println!("{ANSWER}{words}");
}

/// What came of a process: its answer, and the calls on the node.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) answer: String,
    pub(crate) calls: Vec<String>,
}

impl Ran {
    /// The calls by name.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.calls.iter().map(|line| line.split(' ').next().expect("a name")).collect()
    }

    pub(crate) fn count(&self, name: &str) -> usize {
        self.names().into_iter().filter(|&found| found == name).count()
    }
}

/// The name by which the harness knows the function that this is in.
macro_rules! this_test {
    () => {{
        fn inside() {}
        let path = std::any::type_name_of_val(&inside).trim_end_matches("::inside");
        path.split_once("::").expect("a path").1
    }};
}
pub(crate) use this_test;

/// Whether this process was started for one test.
pub(crate) fn inside() -> bool {
    Module::here().is_some() || env::var_os(LOG).is_some()
}

/// A name that no other process and no other call uses.
pub(crate) fn scratch(what: &str) -> PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("gdrdrv-{}-{number}.{what}", std::process::id()))
}

/// Runs the test over a module, with further settings, which it has to pass.
pub(crate) fn run(test: &str, module: Module, settings: &[(&str, &str)]) -> Ran {
    let log = scratch("log");
    let mut command = command(module);
    command.args(["--exact", test, "--nocapture"]).env(LOG, &log).envs(settings.iter().copied());
    let output = command.output().expect("a process");
    let text = text(&output);
    assert!(output.status.success() && counted(&text, "passed") == 1, "{module:?}, {settings:?}: {text}");
    let calls = fs::read_to_string(&log).unwrap_or_default();
    let _ = fs::remove_file(&log);
    let answer = text.split_once(ANSWER).map_or("", |(_, rest)| rest.lines().next().unwrap_or_default());
    Ran { answer: answer.to_owned(), calls: calls.lines().map(str::to_owned).collect() }
}
