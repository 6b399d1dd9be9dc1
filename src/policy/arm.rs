//! One way of copying at one size, and how well its time is known.

use std::time::Duration;

use super::measure::MAX_ROUNDS;
use super::{Block, CopyDirection, CopyMethod, Subject};
use crate::error::Result;

/// A block of calls takes about this long, so that reading the clock costs nothing.
const BLOCK: Duration = Duration::from_micros(100);
const MAX_CALLS: u32 = 1000;
/// Ways as close as this must be told apart,
const CLOSE: f64 = 1.15;
/// for which each must be known as well as this, on either side.
const KNOWN: f64 = 0.01;

/// A way, and what it took.
pub(super) struct Arm {
    pub(super) method: CopyMethod,
    pub(super) calls: u32,
    /// Nanoseconds per call, in order of size.
    samples: Vec<f64>,
}

/// How many calls fill a block.
fn calls_of(call: Duration) -> u32 {
    let calls = BLOCK.as_nanos() / call.as_nanos().max(1);
    u32::try_from(calls).unwrap_or(MAX_CALLS).clamp(1, MAX_CALLS)
}

impl Arm {
    /// With its first block.
    pub(super) fn new(
        subject: &mut impl Subject,
        method: CopyMethod,
        direction: CopyDirection,
        bytes: usize,
    ) -> Result<Self> {
        let once = Block { calls: 1 };
        let first = subject.block(method, direction, bytes, once)?;
        // Twice, for whatever comes in between makes a quick call look slow.
        let call = subject.block(method, direction, bytes, once)?.min(first);
        let calls = calls_of(call);
        let mut arm = Self { method, calls, samples: Vec::with_capacity(MAX_ROUNDS) };
        if calls == 1 {
            arm.samples.push(call.as_secs_f64() * 1e9);
        } else {
            arm.run(subject, direction, bytes)?;
        }
        Ok(arm)
    }

    pub(super) fn run(&mut self, subject: &mut impl Subject, direction: CopyDirection, bytes: usize) -> Result<()> {
        let time = subject.block(self.method, direction, bytes, Block { calls: self.calls })?;
        let ns = time.as_secs_f64() * 1e9 / f64::from(self.calls);
        let at = self.samples.partition_point(|&sample| sample < ns);
        self.samples.insert(at, ns);
        // More where the first calls were slow by chance.
        self.calls = self.calls.max(calls_of(time / self.calls) / 2);
        Ok(())
    }

    pub(super) fn least(&self) -> f64 {
        self.samples.first().copied().unwrap_or(f64::INFINITY)
    }

    pub(super) fn median(&self) -> f64 {
        let middle = self.samples.len() / 2;
        match self.samples.len() {
            0 => f64::INFINITY,
            n if n % 2 == 1 => self.samples[middle],
            _ => f64::midpoint(self.samples[middle - 1], self.samples[middle]),
        }
    }

    /// Where the median would be in 95 of 100 such cells: between the samples that are 0.98 times the root of their number
    /// away from the middle, which is the normal approximation of the binomial distribution.
    fn interval(&self) -> (f64, f64) {
        let n = self.samples.len();
        // 0.98 is 49/50; rounded up.
        let away = (n * 49 * 49).isqrt().div_ceil(50);
        let low = (n / 2).saturating_sub(away);
        match (self.samples.get(low), self.samples.get(n.saturating_sub(1 + low))) {
            (Some(&low), Some(&high)) => (low, high),
            _ => (0.0, f64::INFINITY),
        }
    }

    /// How far the interval reaches to either side, as a share of the median.
    pub(super) fn doubt(&self) -> f64 {
        let (low, high) = self.interval();
        // A clock that did not move is a tenth of a nanosecond.
        (high - low) / 2.0 / self.median().max(0.1)
    }
}

/// The best, and what is close to it.
pub(super) fn close(arms: &[Arm]) -> impl Iterator<Item = &Arm> {
    let best = arms.iter().map(Arm::median).fold(f64::INFINITY, f64::min);
    arms.iter().filter(move |arm| arm.median() <= CLOSE * best)
}

/// Whether more samples would change nothing: what is close to the best is either known well, or slower beyond doubt.
pub(super) fn is_decided(arms: &[Arm]) -> bool {
    let Some(best) = arms.iter().min_by(|a, b| a.median().total_cmp(&b.median())) else { return true };
    let others = || close(arms).filter(|arm| arm.method != best.method);
    others().all(|arm| arm.interval().0 > best.interval().1 || arm.doubt().max(best.doubt()) <= KNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_intervals() {
        let arm = |samples: &[f64]| Arm { method: CopyMethod::Agent, calls: 1, samples: samples.to_vec() };
        assert_eq!(arm(&[1.0, 2.0, 3.0]).median(), 2.0);
        assert_eq!(arm(&[1.0, 2.0, 3.0, 4.0]).median(), 2.5);
        assert_eq!(arm(&[]).median(), f64::INFINITY);
        assert_eq!(arm(&[1.0, 2.0, 3.0]).interval(), (1.0, 3.0));
        let hundred: Vec<f64> = (0..101).map(f64::from).collect();
        assert_eq!(arm(&hundred).interval(), (40.0, 60.0));
        assert!((arm(&hundred).doubt() - 0.2).abs() < 1e-9);
    }

    #[test]
    fn what_is_close_decides_when_it_is_known() {
        let arm = |method: &str, samples: &[f64]| Arm {
            method: method.parse().unwrap(),
            calls: 1,
            samples: samples.to_vec(),
        };
        let far = arm("copy_engine", &[100.0, 200.0, 900.0]);
        assert!(is_decided(&[arm("avx2", &[9.0, 10.0, 11.0])]) && is_decided(&[]));
        assert!(is_decided(&[arm("avx2", &[9.0, 10.0, 11.0]), far]), "far behind, known or not");
        let agent = |samples| arm("agent", samples);
        assert!(!is_decided(&[arm("avx2", &[9.0, 10.0, 11.0]), agent(&[9.5, 10.5, 11.0])]));
        assert!(is_decided(&[arm("avx2", &[9.95, 10.0, 10.05]), agent(&[10.05, 10.1, 10.15])]), "both known");
        assert!(is_decided(&[arm("avx2", &[9.0, 9.9, 10.0]), agent(&[10.1, 10.5, 11.0])]), "apart");
    }
}
