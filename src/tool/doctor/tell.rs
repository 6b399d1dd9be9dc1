//! The findings for people, the worst first, and as JSON.

use std::cmp::Reverse;

use serde::Serialize;

use super::TOOL;
use super::finding::{Finding, Severity};
use super::trial::Trial;
use crate::backend::BackendKind;
use crate::tool::host::Host;
use crate::tool::report::SCHEMA;

/// Columns of text, and of what stands before it.
const WIDTH: usize = 100;
const INDENT: usize = 10;

/// Everything the doctor has to say.
#[derive(Debug, Serialize)]
pub(super) struct Diagnosis {
    schema: u32,
    tool: &'static str,
    version: &'static str,
    host: Host,
    /// Whether a backend for GPUs works.
    works: bool,
    /// The one thing to fix, if there is one.
    fix_first: Option<Advice>,
    findings: Vec<Finding>,
    self_test: Vec<Trial>,
}

/// A finding's remedy, and what for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Advice {
    what: String,
    remedy: String,
}

impl Diagnosis {
    pub(super) fn new(mut findings: Vec<Finding>, self_test: Vec<Trial>) -> Self {
        let works = self_test.iter().any(Trial::is_real);
        if works {
            findings.iter_mut().for_each(Finding::soften);
        }
        // The sort keeps the order of the checks, which is that of need.
        findings.sort_by_key(|finding| Reverse(finding.severity));
        let fix_first = first(&findings, &self_test, works);
        let (host, version) = (Host::read(), env!("CARGO_PKG_VERSION"));
        Self { schema: SCHEMA, tool: TOOL, version, host, works, fix_first, findings, self_test }
    }

    pub(super) fn works(&self) -> bool {
        self.works
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain structures serialise") + "\n"
    }

    pub(super) fn lines(&self, verbose: bool) -> Vec<String> {
        let mut lines = vec![format!("{TOOL} {}", self.version), String::new()];
        for finding in &self.findings {
            let is_fine = finding.severity == Severity::Ok;
            lines.extend(wrapped(finding.severity.name(), &format!("{}: {}", finding.area, finding.what)));
            lines.extend(finding.remedy.iter().flat_map(|remedy| wrapped("", &format!("-> {remedy}"))));
            if verbose || !is_fine {
                lines.extend(finding.evidence.iter().flat_map(|read| wrapped("", &format!("read: {read}"))));
            }
            if !is_fine {
                lines.push(String::new());
            }
        }
        if !self.self_test.is_empty() {
            lines.extend([String::new(), "Self-test: 70001 bytes written and read through each backend".to_owned()]);
            lines.extend(self.self_test.iter().flat_map(trial));
        }
        lines.push(String::new());
        lines.extend(wrapped("Result", &self.result()));
        lines
    }

    /// The last line, which is all that some will read.
    fn result(&self) -> String {
        let working: Vec<_> =
            self.self_test.iter().filter(|trial| trial.is_real()).map(|trial| trial.backend).collect();
        let state = match (working.as_slice(), self.self_test.is_empty()) {
            ([], true) => "no backend was tried.".to_owned(),
            ([], false) => "no backend for GPUs works.".to_owned(),
            ([one], _) => format!("backend {one} works."),
            (several, _) => format!("backends {} work; {} is taken unasked.", several.join(", "), several[0]),
        };
        match &self.fix_first {
            Some(advice) if self.works => format!("{state} Worth fixing: {}: {}", advice.what, advice.remedy),
            Some(advice) => format!("{state} Fix this first: {}: {}", advice.what, advice.remedy),
            None if self.works => format!("{state} Nothing needs fixing."),
            None => state,
        }
    }
}

/// The one thing to fix.
fn first(findings: &[Finding], trials: &[Trial], works: bool) -> Option<Advice> {
    let least = if works { Severity::Warning } else { Severity::Problem };
    let worst = findings.iter().find(|finding| finding.severity >= least);
    let found = worst.and_then(|finding| Some(Advice { what: finding.what.clone(), remedy: finding.remedy.clone()? }));
    // What no check foresaw: the backend that needs least says what it needs.
    let unforeseen = || {
        let trial = trials.iter().find(|trial| trial.kind == BackendKind::Rm && !works)?;
        let (what, remedy) = trial.reason.as_ref()?.split_once("; ")?;
        Some(Advice { what: format!("backend rm: {what}"), remedy: remedy.to_owned() })
    };
    found.or_else(unforeseen)
}

fn trial(trial: &Trial) -> Vec<String> {
    let label = if trial.kind == BackendKind::Emulated {
        "works (the CPU's side only: host memory stands in for a GPU)"
    } else {
        "works"
    };
    let mut lines = wrapped(trial.backend, trial.reason.as_deref().unwrap_or(label));
    if trial.works && trial.kind != BackendKind::Emulated {
        lines.extend(trial.notes.iter().flat_map(|note| wrapped("", note)));
    }
    lines
}

/// A text in lines, under a title.
fn wrapped(title: &str, text: &str) -> Vec<String> {
    let mut lines = vec![format!("{title:<INDENT$}")];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("there is the first");
        let is_fresh = last.chars().count() <= INDENT;
        if is_fresh {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() <= WIDTH {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(" ".repeat(INDENT) + word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(kind: BackendKind, reason: Option<&str>) -> Trial {
        let (works, reason) = (reason.is_none(), reason.map(str::to_owned));
        Trial { backend: kind.name(), kind, works, reason, notes: Vec::new(), session: None, seconds: 0.1 }
    }

    fn node_missing() -> Finding {
        Finding::problem("gdrdrv", "no node", "make one").only_for(BackendKind::Gdrdrv)
    }

    #[test]
    fn a_backend_s_problem_is_a_warning_where_another_works() {
        let trials = vec![outcome(BackendKind::Gdrdrv, Some("x")), outcome(BackendKind::Rm, None)];
        let findings = vec![Finding::note("a", "b", "c"), node_missing(), Finding::warning("link", "narrow", "seat")];
        let diagnosis = Diagnosis::new(findings, trials);
        let severities: Vec<_> = diagnosis.findings.iter().map(|finding| (finding.area, finding.severity)).collect();
        assert_eq!(severities, [("gdrdrv", Severity::Warning), ("link", Severity::Warning), ("a", Severity::Note)]);
        assert_eq!(diagnosis.result(), "backend rm works. Worth fixing: no node: make one");
    }

    #[test]
    fn the_first_problem_in_order_of_need_is_the_one_to_fix() {
        let trials = vec![outcome(BackendKind::Rm, Some("open: x; y")), outcome(BackendKind::Emulated, None)];
        let findings = vec![Finding::ok("a", "b"), Finding::problem("driver", "none", "install"), node_missing()];
        let diagnosis = Diagnosis::new(findings, trials.clone());
        assert!(!diagnosis.works());
        assert_eq!(diagnosis.result(), "no backend for GPUs works. Fix this first: none: install");
        let diagnosis = Diagnosis::new(vec![Finding::warning("a", "b", "c")], trials);
        assert_eq!(diagnosis.result(), "no backend for GPUs works. Fix this first: backend rm: open: x: y");
        let fine = Diagnosis::new(vec![Finding::ok("a", "b")], vec![outcome(BackendKind::Gdrdrv, None)]);
        assert_eq!(fine.result(), "backend gdrdrv works. Nothing needs fixing.");
    }

    #[test]
    fn lines_are_wrapped_under_their_title() {
        let text = "word ".repeat(40);
        let lines = wrapped("problem", &text);
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("problem   word") && lines[1].starts_with("          word"));
        assert!(lines.iter().all(|line| line.len() <= WIDTH));
        assert_eq!(wrapped("", &"x".repeat(200)).len(), 1, "a path is not broken");
    }
}
