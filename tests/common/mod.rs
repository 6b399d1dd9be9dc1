//! What the test binaries share.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]

pub mod counting;
pub mod engine;
pub mod env;
#[path = "../../src/tool/sanity/fork.rs"]
mod forking;
pub mod pulls;
pub mod seccomp;
pub mod standin;
pub mod step;
pub mod subject;

/// Forked children, and memory that may not be there.
pub mod fork {
    pub(crate) use super::forking::*;

    /// Runs `work` in a forked child, which has to end well.
    pub fn in_child(work: impl FnOnce()) {
        assert_eq!(fork(work), Ended::Well);
    }
}
