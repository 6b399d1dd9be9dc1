//! What a put and a get cost here: measured on scratch memory, as the two numbers of a linear model.

use std::time::{Duration, Instant};

use gdrcopy::{Mapping, Result, Session};

use crate::types::Cost;

const SMALL: usize = 64;
/// Long enough to fill every buffer on the way, and short enough for a fifth of a millisecond at the slowest.
const LONG: usize = 64 << 10;
/// Each measurement is the best of so many: whatever makes one slower is not the link.
const ROUNDS: usize = 16;

fn best(mut run: impl FnMut() -> Result<()>) -> Result<Duration> {
    run()?;
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        run()?;
        best = best.min(started.elapsed());
    }
    Ok(best)
}

/// Time of a small copy in nanoseconds, and bytes per second of what comes on top.
fn model(mut copy: impl FnMut(usize) -> Result<()>) -> Result<(f64, f64)> {
    let small = best(|| copy(SMALL))?;
    let long = best(|| copy(LONG))?;
    // A clock that did not move is 1 ns.
    let more = long.saturating_sub(small).max(Duration::from_nanos(1));
    let bytes = u32::try_from(LONG - SMALL).map_or(0.0, f64::from);
    Ok((small.as_secs_f64() * 1e9, bytes / more.as_secs_f64()))
}

fn measure(mapping: &Mapping<'_>) -> Result<Cost> {
    let mut bytes = vec![0; LONG];
    // A put counts as done when it has arrived, not when it was posted.
    let (put_overhead_ns, put_bytes_per_second) = {
        let flush = best(|| mapping.flush())?.as_secs_f64() * 1e9;
        let (ns, rate) = model(|size| mapping.write(0, &bytes[..size]).and_then(|()| mapping.flush()))?;
        ((ns - flush).max(0.0), rate)
    };
    let (get_overhead_ns, get_bytes_per_second) = model(|size| mapping.read(0, &mut bytes[..size]))?;
    Ok(Cost { put_overhead_ns, put_bytes_per_second, get_overhead_ns, get_bytes_per_second })
}

/// Measures on memory of the GPU `ordinal`, or of the current one.
pub(crate) fn estimate(session: &Session, ordinal: Option<usize>) -> Result<Cost> {
    let buffer = match ordinal {
        Some(ordinal) => session.alloc_on(ordinal, LONG)?,
        None => session.alloc(LONG)?,
    };
    let cost = measure(&session.pin(&buffer)?.map()?)?;
    buffer.free()?;
    Ok(cost)
}
