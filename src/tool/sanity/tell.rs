//! What came of the tests: lines for people, TAP and JSON.

use std::time::Duration;

use serde::Serialize;

use super::TOOL;
use super::args::Args;
use super::cases::Test;
use super::process::{Ran, Verdict};
use super::voice::Facts;
use crate::backend::BackendKind;
use crate::tool::fail::Failure;
use crate::tool::host::Host;
use crate::tool::output::Screen;
use crate::tool::report::SCHEMA;

const BANNER: &str = "*** EMULATED GPU: host memory stands in for it. This says nothing about a GPU or its driver. ***";

/// A test and what it came to.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) verdict: Verdict,
    name: String,
    about: &'static str,
    facts: Option<Facts>,
    notes: Vec<String>,
    took: Duration,
}

impl Outcome {
    pub(super) fn new(test: &Test, ran: Ran) -> Self {
        let Ran { verdict, facts, notes, took } = ran;
        Self { verdict, name: test.name.clone(), about: test.about, facts, notes, took }
    }

    /// The word for it, and the reason where there is one.
    fn in_words(&self) -> (&'static str, Option<&str>) {
        match &self.verdict {
            Verdict::Passed => ("passed", None),
            Verdict::Failed(reason) => ("failed", Some(reason)),
            Verdict::Waived(reason) => ("waived", Some(reason)),
        }
    }
}

/// Says it as it comes.
#[derive(Debug)]
pub(super) struct Teller {
    screen: Screen,
    tap: bool,
    verbose: bool,
    summary: bool,
    emulated: bool,
    told: usize,
    introduced: bool,
}

impl Teller {
    pub(super) fn new(args: &Args, screen: Screen) -> Self {
        Self {
            screen,
            tap: args.tap,
            verbose: args.verbose,
            summary: !args.no_summary,
            emulated: args.backend == Some(BackendKind::Emulated),
            told: 0,
            introduced: false,
        }
    }

    /// A line beside the results: a comment in TAP.
    fn aside(&self, line: &str) -> Result<(), Failure> {
        if self.tap { self.screen.line(&format!("# {line}")) } else { self.screen.line(line) }
    }

    pub(super) fn begin(&self, tests: usize) -> Result<(), Failure> {
        if self.tap {
            self.screen.line("TAP version 13")?;
            self.screen.line(&format!("1..{tests}"))?;
        }
        if self.emulated { self.aside(BANNER) } else { Ok(()) }
    }

    pub(super) fn tell(&mut self, outcome: &Outcome) -> Result<(), Failure> {
        self.told += 1;
        if let (Some(facts), false) = (&outcome.facts, self.introduced) {
            self.introduced = true;
            self.aside(&introduction(facts))?;
        }
        let (word, reason) = outcome.in_words();
        if self.tap {
            return self.tap_line(outcome, reason);
        }
        let seconds = outcome.took.as_secs_f64();
        // A failure is seen at once.
        let word = if word == "failed" { "FAILED" } else { word };
        self.screen.line(&format!("{word:<6}  {:<48} {seconds:>7.2} s", outcome.name))?;
        if let Some(reason) = reason {
            self.screen.line(&format!("        {reason}"))?;
        }
        if self.verbose {
            self.screen.line(&format!("        - {}", outcome.about))?;
            outcome.notes.iter().try_for_each(|note| self.screen.line(&format!("        - {note}")))?;
        }
        Ok(())
    }

    fn tap_line(&self, outcome: &Outcome, reason: Option<&str>) -> Result<(), Failure> {
        let (number, name) = (self.told, &outcome.name);
        match (&outcome.verdict, reason) {
            (Verdict::Passed, _) => self.screen.line(&format!("ok {number} - {name}"))?,
            (Verdict::Waived(_), reason) => {
                let reason = reason.unwrap_or_default().replace('#', "no.");
                self.screen.line(&format!("ok {number} - {name} # SKIP {reason}"))?;
            }
            (Verdict::Failed(_), reason) => {
                self.screen.line(&format!("not ok {number} - {name}"))?;
                self.screen.line(&format!("# {}", reason.unwrap_or_default()))?;
            }
        }
        if self.verbose {
            self.screen.line(&format!("# {}", outcome.about))?;
            outcome.notes.iter().try_for_each(|note| self.screen.line(&format!("# {note}")))?;
        }
        Ok(())
    }

    pub(super) fn end(&self, outcomes: &[Outcome]) -> Result<(), Failure> {
        if !self.summary {
            return Ok(());
        }
        let Counts { passed, failed, waived } = Counts::of(outcomes);
        self.aside(&format!("Total: {}, Passed: {passed}, Failed: {failed}, Waived: {waived}", outcomes.len()))?;
        let failures: Vec<&str> = outcomes
            .iter()
            .filter(|outcome| matches!(outcome.verdict, Verdict::Failed(_)))
            .map(|outcome| outcome.name.as_str())
            .collect();
        if !failures.is_empty() {
            self.aside(&format!("Failed: {}", failures.join(", ")))?;
        }
        if self.emulated { self.aside(BANNER) } else { Ok(()) }
    }
}

/// What the tests run on.
fn introduction(facts: &Facts) -> String {
    let gpu = facts.gpus.first().map_or("no GPU", |gpu| gpu.name.as_str());
    let level = facts.level.as_ref().map(|level| format!(" level {level}")).unwrap_or_default();
    let module = facts.module.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
    let driver = facts.gpus.first().and_then(|gpu| gpu.driver.as_ref());
    let driver = driver.map(|version| format!(", driver {version}")).unwrap_or_default();
    format!(
        "{TOOL} {}: backend {}{module}{level}, {gpu}{driver}, routine {}; after free: {}, in shared objects {}",
        env!("CARGO_PKG_VERSION"),
        facts.backend,
        facts.routine,
        facts.whole_object,
        facts.shared_object
    )
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Counts {
    passed: usize,
    failed: usize,
    waived: usize,
}

impl Counts {
    fn of(outcomes: &[Outcome]) -> Self {
        outcomes.iter().fold(Self::default(), |mut counts, outcome| {
            match outcome.verdict {
                Verdict::Passed => counts.passed += 1,
                Verdict::Failed(_) => counts.failed += 1,
                Verdict::Waived(_) => counts.waived += 1,
            }
            counts
        })
    }
}

#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    tool: &'static str,
    version: &'static str,
    backend: Option<&'static str>,
    host: Host,
    session: Option<&'a Facts>,
    counts: Counts,
    results: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    test: &'a str,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    seconds: f64,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    notes: &'a [String],
}

impl<'a> Entry<'a> {
    fn of(outcome: &'a Outcome) -> Self {
        let (word, reason) = outcome.in_words();
        Self { test: &outcome.name, outcome: word, reason, seconds: outcome.took.as_secs_f64(), notes: &outcome.notes }
    }
}

/// Everything as one JSON object.
pub(super) fn json(args: &Args, outcomes: &[Outcome]) -> String {
    let report = Report {
        schema: SCHEMA,
        tool: TOOL,
        version: env!("CARGO_PKG_VERSION"),
        backend: args.backend.map(BackendKind::name),
        host: Host::read(),
        session: outcomes.iter().find_map(|outcome| outcome.facts.as_ref()),
        counts: Counts::of(outcomes),
        results: outcomes.iter().map(Entry::of).collect(),
    };
    serde_json::to_string_pretty(&report).expect("plain structures serialise") + "\n"
}
