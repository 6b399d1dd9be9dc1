//! How an automatic copier is set up.

use std::time::Duration;

use crate::agent::AgentOptions;
use crate::copy::ParallelCopierBuilder;
use crate::error::{Error, ErrorKind, Result};

/// The smallest size that is measured.
pub(super) const SMALLEST: usize = 64;

/// Settings of an [`AutoCopier`](super::AutoCopier).
#[derive(Clone, Debug)]
pub struct AutoOptions {
    pub(super) agent: Option<AgentOptions>,
    pub(super) parallel: Option<ParallelCopierBuilder>,
    pub(super) largest: usize,
    pub(super) time: Duration,
}

impl Default for AutoOptions {
    fn default() -> Self {
        Self { agent: None, parallel: None, largest: 4 << 20, time: Duration::from_millis(300) }
    }
}

impl AutoOptions {
    /// Lets a [`PushAgent`](crate::agent::PushAgent) copy where it is quickest. Its GPU is the buffer's.
    #[must_use]
    pub fn agent(mut self, options: AgentOptions) -> Self {
        self.agent = Some(options);
        self
    }

    /// Lets a [`ParallelCopier`](crate::ParallelCopier) copy where it is quickest.
    #[must_use]
    pub fn parallel(mut self, copier: ParallelCopierBuilder) -> Self {
        self.parallel = Some(copier);
        self
    }

    /// The largest size that is measured, in bytes; 4 MiB by default, at least 64. Larger copies are made like those.
    #[must_use]
    pub fn largest(mut self, bytes: usize) -> Self {
        self.largest = bytes;
        self
    }

    /// About how long measuring may take; 300 ms by default. Five rounds are made at each size in any case.
    #[must_use]
    pub fn time(mut self, time: Duration) -> Self {
        self.time = time;
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.largest >= SMALLEST {
            return Ok(());
        }
        let cause = format!("nothing is measured below {SMALLEST} bytes, and the largest size is {}", self.largest);
        Err(Error::new("auto", ErrorKind::InvalidArgument, cause).remedy("ask for a larger size"))
    }
}
