//! All samples of one call: their figures, and how many fall into each of ten bins.

use serde::Serialize;

use crate::tool::measure::Measured;
use crate::tool::report::Figures;
use crate::tool::stats::{Samples, nanoseconds};

const BINS: usize = 10;

/// Bins of equal width.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Histogram {
    /// Lower edge of the first bin: the shortest time.
    pub(super) from_ns: f64,
    /// Upper edge of the last bin: the longest time, which is in it.
    pub(super) to_ns: f64,
    /// Calls in each bin.
    pub(super) counts: [u64; BINS],
}

impl Histogram {
    /// Of times in picoseconds.
    pub(super) fn new(times: &[u64]) -> Self {
        let from = times.iter().copied().min().unwrap_or(0);
        let to = times.iter().copied().max().unwrap_or(0);
        let mut counts = [0; BINS];
        for time in times {
            let bin = (u128::from(time - from) * 10).checked_div(u128::from(to - from)).unwrap_or(0);
            let bin = usize::try_from(bin).unwrap_or(BINS).min(BINS - 1);
            counts[bin] += 1;
        }
        Self { from_ns: nanoseconds(from), to_ns: nanoseconds(to), counts }
    }
}

/// The figures of times in picoseconds, mean included.
pub(super) fn figures(times: &[u64]) -> Figures {
    let mut samples = Samples::new();
    times.iter().for_each(|&ps| samples.record(ps));
    let sum: u128 = times.iter().map(|&ps| u128::from(ps)).sum();
    let calls = samples.len();
    let mean_ps = u64::try_from(sum / u128::from(calls.max(1))).unwrap_or(u64::MAX);
    Figures::with_mean(&Measured { samples, calls, mean_ps })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_in_a_bin() {
        let times: Vec<u64> = (0..100).map(|n| 1000 + n * 10).collect();
        let histogram = Histogram::new(&times);
        assert_eq!((histogram.from_ns, histogram.to_ns), (1.0, 2.0));
        assert_eq!(histogram.counts.iter().sum::<u64>(), 100);
        assert!(histogram.counts.iter().all(|count| (9..=11).contains(count)), "{histogram:?}");
    }

    #[test]
    fn equal_or_no_samples_are_no_division_by_zero() {
        assert_eq!(Histogram::new(&[5000; 7]).counts, [7, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Histogram::new(&[]).counts, [0; 10]);
        assert_eq!(Histogram::new(&[0, u64::MAX]).counts, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(figures(&[]).iterations, 0);
    }

    #[test]
    fn the_mean_is_exact() {
        let figures = figures(&[1_000_000, 2_000_000, 6_000_000]);
        assert_eq!((figures.mean_ns, figures.max_ns, figures.iterations), (Some(3000.0), 6000.0, 3));
    }
}
