//! The push agent on a GPU. Without one every test says so and passes; `GDRCOPY_TEST_REQUIRE=rm` makes that a failure.
//!
//! Run one at a time (`RUST_TEST_THREADS=1`), with `--nocapture` for the figures. Environment: `GDRCOPY_AGENT_ROUNDS` (100000) rounds of rewriting the source,
//! `GDRCOPY_AGENT_CYCLES` (100) of starting and stopping. With `--include-ignored` also one that starts an MPS control
//! daemon, in a folder of its own, and a table of how reads into ordinary memory can be cut up.

#![cfg(feature = "cuda")]
#![allow(unsafe_code, missing_docs, reason = "tests call the CUDA driver beside the library")]
#![allow(clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block, reason = "driver calls of tests")]
#![allow(clippy::as_conversions, clippy::unwrap_used, reason = "tests may panic and convert freely")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use gdrcopy::{RmLevel, Session};

mod beside;
#[path = "../common/mod.rs"]
mod common;
mod correctness;
mod hazards;
mod latency;
#[cfg(feature = "tools")]
mod load;
mod pull;
mod reached;
mod resources;
#[path = "../gpu/support.rs"]
#[allow(dead_code, reason = "each test binary uses its own part of this")]
mod support;

/// Seconds after which a test that hangs is killed: a hang is what an agent must not cause.
const PATIENCE: u32 = 120;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A session, if there is a GPU, for a test that has the GPU to itself.
struct Alone {
    session: Session,
    _turn: MutexGuard<'static, ()>,
}

fn alone() -> Option<Alone> {
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let session = support::session(RmLevel::Vmm)?;
    unsafe { libc::alarm(PATIENCE) };
    Some(Alone { session, _turn: turn })
}

impl Drop for Alone {
    fn drop(&mut self) {
        unsafe { libc::alarm(0) };
    }
}
