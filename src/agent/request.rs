//! Requests in flight.

use std::fmt;

use super::memory::HostBuffer;
use crate::error::Error;

/// A piece of a request: `bytes` bytes from `offset` in registered range `range`, and those from `at` in the host buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The range's place in the list that the agent was started with.
    pub range: usize,
    /// First byte in the range.
    pub offset: usize,
    /// Length in bytes; any, also 0.
    pub bytes: usize,
    /// First byte in the host buffer.
    pub at: usize,
}

/// A request in flight: [`PushAgent::submit`](super::PushAgent::submit). It owns the host buffer until
/// [`PushAgent::wait`](super::PushAgent::wait) gives it back.
///
/// Dropping it gives the buffer up; its memory is freed with the agent.
#[must_use = "the buffer comes back from PushAgent::wait"]
#[derive(Debug)]
pub struct Ticket {
    pub(super) agent: u64,
    pub(super) number: u32,
    pub(super) buffer: HostBuffer,
}

/// A request that was not made, or not as a whole.
#[derive(Debug)]
pub struct SubmitError {
    pub(super) buffer: Option<HostBuffer>,
    pub(super) error: Error,
}

impl SubmitError {
    /// The buffer, if the GPU was not asked to write to it.
    #[must_use]
    pub fn into_buffer(self) -> Option<HostBuffer> {
        self.buffer
    }

    /// What went wrong.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for SubmitError {}

impl From<SubmitError> for Error {
    fn from(error: SubmitError) -> Self {
        error.error
    }
}
