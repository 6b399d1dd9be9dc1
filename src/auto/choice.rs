//! What an automatic copier does with a copy, and why.

use std::fmt;

use super::method::AutoMethod;
use super::table::HostKind;
use crate::policy::{Choice, CopyDirection, CopyMethod};

/// What an [`AutoCopier`](super::AutoCopier) does with a copy, and why. As text it is one line.
#[derive(Clone, Copy, Debug)]
pub struct AutoChoice<'a> {
    pub(super) choice: Choice<'a>,
    pub(super) bytes: usize,
    pub(super) method: AutoMethod,
    /// The host memory that it is about.
    pub(super) host: HostKind,
    pub(super) has_agent: bool,
}

impl AutoChoice<'_> {
    /// The method it uses.
    #[must_use]
    pub fn method(&self) -> AutoMethod {
        self.method
    }

    /// Whether it is about host memory that the agent reaches: a [host buffer](super::AutoCopier::host_buffer), or memory
    /// that was [registered](super::AutoCopier::register_host).
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.host == HostKind::Reached
    }

    /// The best method by the policy. The copier may have to do without it.
    #[must_use]
    pub fn best(&self) -> CopyMethod {
        self.choice.best()
    }

    /// The size in bytes that was measured for this one, where one was.
    #[must_use]
    pub fn measured(&self) -> Option<usize> {
        self.choice.measured()
    }

    /// What the policy's candidates took at that size: medians of calls back to back, in nanoseconds.
    #[must_use]
    pub fn candidates(&self) -> &[(CopyMethod, f64)] {
        self.choice.candidates()
    }

    /// Where the policy is from: a file's name, a measurement, or the library.
    #[must_use]
    pub fn source(&self) -> &str {
        self.choice.source()
    }

    /// How the method keeps the copier's promise: [`AutoMethod::ordering`].
    #[must_use]
    pub fn ordering(&self) -> &'static str {
        self.method.ordering(self.direction())
    }

    fn direction(&self) -> CopyDirection {
        self.choice.direction()
    }
}

impl fmt::Display for AutoChoice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = self.best();
        write!(f, "{} of {} bytes: {}", self.direction(), self.bytes, self.method)?;
        let why = match best {
            CopyMethod::AgentPinned if self.has_agent && !self.is_reached() => {
                Some("with page-locked memory that the agent reaches")
            }
            _ if AutoMethod::of(best) == self.method => None,
            CopyMethod::CudaMemcpy | CopyMethod::CopyEnginePinned => Some("with page-locked memory"),
            _ => Some("but not set up"),
        };
        if let Some(why) = why {
            write!(f, " in place of {best}, which is best {why}")?;
        }
        write!(f, " ({}); {}", self.choice.why(), self.ordering())
    }
}
