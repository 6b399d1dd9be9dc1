//! Intervals by the bootstrap: what was drawn once is drawn again from itself, many times.

use std::fmt;

use crate::sys::num::{u64_of, usize_of};
use crate::tool::num::{f64_of, u64_of_f64};
use crate::tool::pattern::mix;

/// How often the rounds are drawn again.
const RESAMPLES: usize = 1000;
/// The share of resamples beyond either end of the interval.
const TAIL: f64 = 0.025;

/// What a figure was, and where it would be in 95 of 100 such runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The figure.
    pub value: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Estimate {
    /// Another figure that is a decreasing or increasing function of this one.
    #[must_use]
    pub fn map(self, figure: impl Fn(f64) -> f64) -> Self {
        let (value, low, high) = (figure(self.value), figure(self.low), figure(self.high));
        Self { value, low: low.min(high), high: low.max(high) }
    }

    /// Of a ratio of times around `time`: whether it can be held against a limit of `limit`. Where the limit allows less than
    /// the clock resolves (`resolution`, in the unit of `time`), one step of the clock already breaks it; only what is
    /// surely slower by more than that can be judged there.
    #[must_use]
    pub fn is_resolved(&self, limit: f64, time: f64, resolution: f64) -> bool {
        time >= shortest_resolved(limit, resolution) || (self.low - 1.0) * time > resolution
    }

    /// Whether the interval has `at` inside.
    #[must_use]
    pub fn spans(&self, at: f64) -> bool {
        self.low <= at && at <= self.high
    }
}

/// The shortest time of which a limit of `limit` allows as much as the clock resolves.
#[must_use]
pub fn shortest_resolved(limit: f64, resolution: f64) -> f64 {
    resolution / (limit - 1.0)
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} [{:.digits$}, {:.digits$}]", self.value, self.low, self.high)
    }
}

/// A figure of some of `count` things, named by their numbers: of all of them, and its interval from as many, drawn with
/// replacement. NaN for none.
pub(super) fn drawn_again(count: usize, mut figure: impl FnMut(&[usize]) -> f64) -> Estimate {
    if count == 0 {
        return Estimate { value: f64::NAN, low: f64::NAN, high: f64::NAN };
    }
    let mut picks: Vec<usize> = (0..count).collect();
    let value = figure(&picks);
    let mut random = SplitMix::new(0x0067_6472_636f_7079);
    let mut figures = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        picks.iter_mut().for_each(|pick| *pick = random.below(count));
        figures.push(figure(&picks));
    }
    figures.sort_unstable_by(f64::total_cmp);
    Estimate { value, low: share(&figures, TAIL), high: share(&figures, 1.0 - TAIL) }
}

/// The middle, or the mean of both middles; the order of `times` is lost. NaN for none.
pub fn median(times: &mut [f64]) -> f64 {
    let (half, is_odd) = (times.len() / 2, times.len() % 2 == 1);
    if times.is_empty() {
        return f64::NAN;
    }
    let (below, &mut upper, _) = times.select_nth_unstable_by(half, f64::total_cmp);
    if is_odd {
        return upper;
    }
    let lower = below.iter().copied().max_by(f64::total_cmp).unwrap_or(upper);
    f64::midpoint(lower, upper)
}

/// The value that a share `q` of sorted figures does not exceed.
fn share(sorted: &[f64], q: f64) -> f64 {
    let rank = u64_of_f64(f64_of(u64_of(sorted.len().saturating_sub(1))) * q);
    sorted.get(usize_of(rank)).copied().unwrap_or(f64::NAN)
}

/// The same draws in every run: intervals of the same times are the same.
pub(super) struct SplitMix(u64);

impl SplitMix {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// From 0 to `n - 1`. The bias of the multiplication is below 2^-32 for any number of rounds.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = mix(self.0);
        let scaled = (u128::from(mixed) * u128::from(u64_of(n))) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 9.0]), 3.0);
        assert_eq!(median(&mut [7.0]), 7.0);
        assert!(median(&mut []).is_nan());
    }

    #[test]
    fn what_the_clock_does_not_resolve_is_not_judged() {
        let equal = Estimate { value: 1.0, low: 0.99, high: 1.06 };
        assert!((shortest_resolved(1.03, 0.96) - 32.0).abs() < 1e-9);
        assert!(!equal.is_resolved(1.03, 4.0, 0.96));
        assert!(!equal.is_resolved(1.03, 31.9, 0.96));
        assert!(equal.is_resolved(1.03, 32.1, 0.96));
        assert!(equal.is_resolved(1.03, 4.0, 0.1), "another clock");
        let slower = |low| Estimate { value: 1.5, low, high: 2.0 };
        assert!(!slower(1.2).is_resolved(1.03, 4.0, 0.96), "one step");
        assert!(slower(1.3).is_resolved(1.03, 4.0, 0.96), "surely more than a step");
    }

    #[test]
    fn a_figure_of_a_figure_keeps_its_ends_in_order() {
        let rate = Estimate { value: 4.0, low: 2.0, high: 8.0 }.map(|ns| 1.0 / ns);
        assert_eq!(rate, Estimate { value: 0.25, low: 0.125, high: 0.5 });
        assert_eq!(format!("{rate:.3}"), "0.250 [0.125, 0.500]");
    }

    #[test]
    fn everything_is_drawn_and_nothing_else() {
        let mut seen = [0_u32; 7];
        let estimate = drawn_again(7, |picks| {
            assert_eq!(picks.len(), 7);
            picks.iter().for_each(|&pick| seen[pick] += 1);
            f64_of(u64_of(picks.iter().sum()))
        });
        assert_eq!(estimate.value, 21.0);
        assert!(estimate.low < 21.0 && estimate.high > 21.0, "{estimate}");
        assert!(seen.iter().all(|&times| (800..1200).contains(&times)), "{seen:?}");
    }
}
