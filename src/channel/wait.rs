//! Waiting for the kernel: looking again and again, for a while.

use std::hint;
use std::thread;
use std::time::{Duration, Instant};

use super::error::ChannelError;
use super::memory::Shared;

/// Looks between two looks at the clock: a microsecond or two.
const LOOKS: u32 = 256;
/// Rounds of looks after which the wait is no longer a short one, and the processor is shared: about 100 us.
const SHORT_ROUNDS: u32 = 64;

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
        for _ in 0..LOOKS {
            if let Some(found) = attempt(end)? {
                return Ok(found);
            }
            // PAUSE takes some 40 ns, which a short wait has not to spare.
            if rounds > SHORT_ROUNDS {
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
        if rounds > SHORT_ROUNDS {
            thread::yield_now();
        }
    }
}
