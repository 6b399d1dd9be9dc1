//! What the test binaries share.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]

pub mod counting;
pub mod fork;
pub mod seccomp;
pub mod standin;
pub mod step;
pub mod subject;
