//! `gdrcopy_doctor` as a user meets it: the real program, in set-ups that are broken on purpose.

#![cfg(feature = "tools")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests, too")]

#[path = "../common/program.rs"]
#[allow(dead_code, reason = "each test binary uses its own part of this")]
mod program;
#[path = "../common/standin.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]
mod standin;

mod broken;
mod cli;
mod tree;
mod works;
