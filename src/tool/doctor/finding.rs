//! What the doctor found: how bad it is, what was read where, and what to do.

use serde::Serialize;

use crate::backend::BackendKind;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    /// As it should be.
    Ok,
    /// Good to know.
    Note,
    /// Works, and could work better, or will not work for everybody.
    Warning,
    /// Does not work.
    Problem,
}

impl Severity {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One finding.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Finding {
    /// Which part of the set-up it is about.
    pub(super) area: &'static str,
    pub(super) severity: Severity,
    /// One sentence.
    pub(super) what: String,
    /// What was read where.
    pub(super) evidence: Vec<String>,
    /// One line; absent where nothing needs doing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
    /// The backend that it keeps from working, where it is but one.
    #[serde(skip)]
    pub(super) only_for: Option<BackendKind>,
}

impl Finding {
    fn new(area: &'static str, severity: Severity, what: impl Into<String>, remedy: Option<String>) -> Self {
        Self { area, severity, what: what.into(), evidence: Vec::new(), remedy, only_for: None }
    }

    pub(super) fn ok(area: &'static str, what: impl Into<String>) -> Self {
        Self::new(area, Severity::Ok, what, None)
    }

    pub(super) fn note(area: &'static str, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(area, Severity::Note, what, Some(remedy.into()))
    }

    pub(super) fn warning(area: &'static str, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(area, Severity::Warning, what, Some(remedy.into()))
    }

    pub(super) fn problem(area: &'static str, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(area, Severity::Problem, what, Some(remedy.into()))
    }

    /// Adds what was read.
    pub(super) fn read(mut self, evidence: impl Into<String>) -> Self {
        self.evidence.push(evidence.into());
        self
    }

    /// Says that it keeps this backend alone from working.
    pub(super) fn only_for(mut self, kind: BackendKind) -> Self {
        self.only_for = Some(kind);
        self
    }

    /// What keeps one backend from working, or the driver, is a warning where something works all the same.
    pub(super) fn soften(&mut self) {
        if self.severity == Severity::Problem && (self.only_for.is_some() || ["gpu", "driver"].contains(&self.area)) {
            self.severity = Severity::Warning;
        }
    }
}
