//! Why a message was not sent or received.

use std::fmt;

use crate::error::Error;

/// Why a message was not sent or received. The first three cost no allocation.
#[non_exhaustive]
#[derive(Debug)]
pub enum ChannelError {
    /// The ring has no room for the message now; nothing was sent.
    Full,
    /// The timeout passed. What waited to be sent was not sent; an answer may still come and is dropped then.
    TimedOut,
    /// The kernel has reported its end, and everything that it sent before has been received.
    KernelGone,
    /// The call can never succeed: a message longer than the ring takes, a forked process.
    Failed(Error),
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("send: the ring to the GPU is full; wait for the kernel, or make it larger"),
            Self::TimedOut => f.write_str("channel: the kernel did not act in time; is it running?"),
            Self::KernelGone => f.write_str("channel: the kernel has ended; launch it on a new channel"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ChannelError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Error> for ChannelError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}
