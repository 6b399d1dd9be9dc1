//! Waiting for the kernel: looking again and again, for a while.

use std::hint;
use std::thread;
use std::time::{Duration, Instant};

use super::error::ChannelError;
use super::memory::Shared;

/// Looks between two looks at the clock, which an answer that comes meanwhile waits for: a few microseconds, longer than a
/// round trip to a kernel.
const LOOKS: u32 = 1024;
/// Rounds of looks after which the wait is no longer a short one, and the processor is shared: about 100 us.
const SHORT_ROUNDS: u32 = 20;
/// The same when it is: PAUSE takes some 40 ns.
const LONG_LOOKS: u32 = 128;

/// Repeats `attempt` until it brings something, the kernel has ended, or `timeout` has passed.
///
/// The time counts from the first round of looks that brought nothing, so that a short wait needs no clock. An ended kernel
/// is reported after one more attempt: what it sent before its end counts.
#[inline]
pub(crate) fn until<E, T>(
    end: &mut E,
    shared: fn(&E) -> &Shared,
    timeout: Duration,
    mut attempt: impl FnMut(&mut E) -> Result<Option<T>, ChannelError>,
) -> Result<T, ChannelError> {
    let mut started = None;
    let mut rounds = 0_u32;
    loop {
        let is_long = rounds > SHORT_ROUNDS;
        for _ in 0..if is_long { LONG_LOOKS } else { LOOKS } {
            if let Some(found) = attempt(end)? {
                return Ok(found);
            }
            if is_long {
                hint::spin_loop();
            }
        }
        if shared(end).is_gone() {
            return attempt(end)?.ok_or(ChannelError::KernelGone);
        }
        let now = Instant::now();
        if now.duration_since(*started.get_or_insert(now)) >= timeout {
            return Err(ChannelError::TimedOut);
        }
        rounds = rounds.saturating_add(1);
        if is_long {
            thread::yield_now();
        }
    }
}
