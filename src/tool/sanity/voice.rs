//! How a test in its own process speaks to the program that started it: marked lines on standard output, so that what
//! libraries print there does no harm.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::bench::{Stop, after_free_in_words};
use crate::session::Session;
use crate::tool::num::f64_of;

const MARK: &str = "@gdrcopy-sanity ";

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::tool) enum Word {
    /// What the test runs on.
    Session(Facts),
    /// The test will touch memory that must not be there: it has to die of this signal.
    DyingOf { signal: i32, because: String },
    /// For `-v`.
    Note(String),
    /// The end of it.
    Passed,
    /// The end of it.
    Failed(String),
    /// The end of it.
    Waived(String),
}

/// What a test ran on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::tool) struct Facts {
    pub(in crate::tool) backend: String,
    pub(in crate::tool) level: Option<String>,
    pub(in crate::tool) module: Option<String>,
    pub(in crate::tool) routine: String,
    pub(in crate::tool) gpus: Vec<Gpu>,
    pub(in crate::tool) whole_object: String,
    pub(in crate::tool) shared_object: String,
}

/// A GPU, as far as a report needs it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::tool) struct Gpu {
    pub(in crate::tool) name: String,
    pub(in crate::tool) pci: Option<String>,
    pub(in crate::tool) driver: Option<String>,
    pub(in crate::tool) bar1_gib: Option<f64>,
}

/// Says one thing. If nobody listens there is nobody to tell.
pub(in crate::tool) fn say(word: &Word) {
    if let Ok(text) = serde_json::to_string(word) {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{MARK}{text}").and_then(|()| out.flush());
    }
}

/// The words in a process's standard output.
pub(in crate::tool) fn heard(output: &str) -> impl Iterator<Item = Word> {
    output.lines().filter_map(|line| serde_json::from_str(line.strip_prefix(MARK)?).ok())
}

pub(super) fn note(text: impl Into<String>) {
    say(&Word::Note(text.into()));
}

/// Announces an access that must end this process.
pub(super) fn dying_of(signal: i32, because: impl Into<String>) {
    say(&Word::DyingOf { signal, because: because.into() });
}

pub(in crate::tool) fn introduce(session: &Session) {
    let gib = |bytes: u64| f64_of(bytes) / f64_of(1 << 30);
    let gpus = session.gpus().unwrap_or_default().into_iter().map(|gpu| Gpu {
        name: gpu.name,
        pci: gpu.pci.map(|pci| pci.to_string()),
        driver: gpu.driver,
        bar1_gib: gpu.bar1.map(|bar1| gib(bar1.total_bytes)),
    });
    let row = session.semantics();
    say(&Word::Session(Facts {
        backend: session.backend().to_string(),
        level: session.rm_level().map(|level| level.to_string()),
        module: session.module_version().map(|(major, minor)| format!("{major}.{minor}")),
        routine: session.routine().name().to_owned(),
        gpus: gpus.collect(),
        whole_object: after_free_in_words(row.whole_object).to_owned(),
        shared_object: after_free_in_words(row.shared_object).to_owned(),
    }));
}

/// The last word of a test.
pub(super) fn conclude(outcome: Result<(), Stop>) {
    say(&match outcome {
        Ok(()) => Word::Passed,
        Err(Stop::Failed(reason)) => Word::Failed(reason),
        Err(Stop::Waived(reason)) => Word::Waived(reason),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_lines_are_heard_among_others() {
        let words = [Word::Note("a \"b\"\nc".to_owned()), Word::DyingOf { signal: 7, because: "x".to_owned() }];
        let lines: String =
            words.iter().map(|word| format!("noise\n{MARK}{}\n", serde_json::to_string(word).unwrap())).collect();
        assert_eq!(heard(&(lines + MARK + "{}\n")).collect::<Vec<_>>(), words);
    }
}
