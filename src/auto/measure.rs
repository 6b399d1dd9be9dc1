//! Measuring the methods against each other.

use std::time::{Duration, Instant};

use super::options::SMALLEST;
use super::{AutoMethod, Row, Ways};
use crate::error::Result;
use crate::policy::CopyDirection;

/// Rounds at each size, in each of which every method has its turn.
const MIN_ROUNDS: usize = 5;
const MAX_ROUNDS: usize = 101;
/// A method that takes so many times as long as the best is given up after one round.
const HOPELESS: u32 = 4;
/// Of two methods that are as close as this, the plainer one is used.
const EQUAL: f64 = 1.02;

/// The rows of one direction, for every size. `host` is as long as the largest that is measured.
pub(super) fn table(
    ways: &mut Ways<'_, '_>,
    direction: CopyDirection,
    host: &mut [u8],
    time: Duration,
) -> Result<Vec<Row>> {
    let sizes = || {
        let doubled = std::iter::successors(Some(SMALLEST), |size| size.checked_mul(2));
        doubled.take_while(|&size| size <= host.len()).collect::<Vec<_>>()
    };
    let sizes = sizes();
    let each = time / u32::try_from(sizes.len().max(1)).unwrap_or(u32::MAX);
    let mut rows = Vec::with_capacity(sizes.len());
    for bytes in sizes {
        let candidates = cell(ways, direction, &mut host[..bytes], each)?;
        // Half-way to the next size that is measured, as its own logarithm goes.
        rows.push(Row {
            up_to: bytes.saturating_mul(181) / 128,
            measured: bytes,
            method: best(&candidates),
            candidates,
        });
    }
    if let Some(last) = rows.last_mut() {
        last.up_to = usize::MAX;
    }
    Ok(rows)
}

/// The quickest; of equals the one that comes first.
fn best(candidates: &[(AutoMethod, f64)]) -> AutoMethod {
    let least = candidates.iter().map(|(_, ns)| *ns).fold(f64::INFINITY, f64::min);
    let best = candidates.iter().find(|(_, ns)| *ns <= least * EQUAL);
    best.map_or(AutoMethod::Bar1, |(method, _)| *method)
}

/// Medians of single calls, in turn, beginning with another method in each round.
fn cell(
    ways: &mut Ways<'_, '_>,
    direction: CopyDirection,
    host: &mut [u8],
    time: Duration,
) -> Result<Vec<(AutoMethod, f64)>> {
    let mut arms: Vec<(AutoMethod, Vec<Duration>)> = AutoMethod::ALL
        .into_iter()
        .filter(|method| ways.has(*method))
        .map(|method| (method, Vec::with_capacity(MAX_ROUNDS)))
        .collect();
    let started = Instant::now();
    for round in 0..MAX_ROUNDS {
        if round >= MIN_ROUNDS && started.elapsed() > time {
            break;
        }
        for n in 0..arms.len() {
            let at = (n + round) % arms.len();
            let (method, times) = &mut arms[at];
            // Untimed, so that each finds caches, workers and kernel as it leaves them itself.
            ways.copy(direction, *method, host)?;
            let begun = Instant::now();
            ways.copy(direction, *method, host)?;
            times.push(begun.elapsed());
        }
        if round == 0 {
            let least = arms.iter().filter_map(|(_, times)| times.first().copied()).min().unwrap_or_default();
            arms.retain(|(_, times)| times.first().is_some_and(|&time| time <= least * HOPELESS));
        }
    }
    Ok(arms.into_iter().map(|(method, times)| (method, median(times))).collect())
}

/// In nanoseconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(f64::INFINITY, |time| time.as_secs_f64() * 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use AutoMethod::{Agent, Bar1, CopyEngine};

    #[test]
    fn the_quickest_is_best_and_equals_are_the_plainer() {
        assert_eq!(best(&[(Bar1, 1000.0), (Agent, 990.0), (CopyEngine, 5000.0)]), Bar1);
        assert_eq!(best(&[(Bar1, 1000.0), (Agent, 900.0), (CopyEngine, 895.0)]), Agent);
        assert_eq!(best(&[(CopyEngine, 1.0)]), CopyEngine);
        assert_eq!(best(&[]), Bar1);
    }

    #[test]
    fn medians() {
        let times = [5, 1, 9, 7, 3].map(Duration::from_nanos);
        assert!((median(times.to_vec()) - 5.0).abs() < 1e-6);
    }
}
