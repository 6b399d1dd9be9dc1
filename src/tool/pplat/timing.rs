//! Rounds timed one by one.

use std::time::{Duration, Instant};

use crate::tool::clock::Clock;
use crate::tool::cpu;
use crate::tool::exchange::Exchange;
use crate::tool::fail::Failure;
use crate::tool::interrupt;
use crate::tool::measure::Amount;
use crate::tool::report::Figures;
use crate::tool::stats::{Samples, nanoseconds};

/// Rounds before those that count, or a tenth of the time.
const WARM_UP: u64 = 1000;
/// Rounds that a row makes however long they take.
const FLOOR: u64 = 20;
/// As many buckets, or up to twice as many, a row's rounds are divided into, as upstream's are.
const BUCKETS: usize = 100;

/// Means of equally many rounds in a row, of a number of rounds that is not known beforehand.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    /// Rounds in a bucket.
    size: u64,
    sums: Vec<u64>,
    open: (u64, u64),
}

impl Buckets {
    fn add(&mut self, ps: u64) {
        self.size = self.size.max(1);
        self.open = (self.open.0 + 1, self.open.1.saturating_add(ps));
        if self.open.0 < self.size {
            return;
        }
        self.sums.push(self.open.1);
        self.open = (0, 0);
        if self.sums.len() == 2 * BUCKETS {
            self.sums = self.sums.chunks(2).map(|pair| pair.iter().sum()).collect();
            self.size *= 2;
        }
    }

    pub(super) fn min_and_median(&self) -> (f64, f64) {
        let mut means: Vec<u64> = self.sums.iter().map(|sum| sum / self.size.max(1)).collect();
        means.sort_unstable();
        let at = |n: usize| means.get(n).copied().map_or(0.0, nanoseconds);
        (at(0), at(means.len() / 2))
    }
}

/// Times of rounds.
#[derive(Debug)]
pub(super) struct Timed {
    samples: Samples,
    pub(super) buckets: Buckets,
    total_ps: u64,
}

impl Timed {
    pub(super) fn figures(&self) -> Figures {
        let mut figures = Figures::new(&self.samples);
        figures.mean_ns = Some(nanoseconds(self.total_ps / self.samples.len().max(1)));
        figures
    }
}

/// Something that goes round.
pub(super) trait Rounds {
    /// Makes the next round ready; not timed.
    fn prepare(&mut self);

    /// A message and its answer.
    fn round(&mut self) -> Result<(), Failure>;
}

impl Rounds for Exchange<'_> {
    fn prepare(&mut self) {
        Self::prepare(self);
    }

    #[inline]
    fn round(&mut self) -> Result<(), Failure> {
        Self::round(self)
    }
}

/// Rounds that do not count: caches, branch predictors and the bus get used to it.
pub(super) fn warm_up(rounds: &mut impl Rounds, amount: Amount) -> Result<(), Failure> {
    let (most, time) = match amount {
        Amount::Exactly(n) => (n, Duration::from_millis(10)),
        Amount::UpTo(n, time) => (n, time / 10),
    };
    let begin = Instant::now();
    for _ in 0..most.min(WARM_UP) {
        rounds.prepare();
        rounds.round()?;
        if begin.elapsed() > time {
            break;
        }
    }
    Ok(())
}

/// Times `amount` of rounds; before each `prepare` runs, untimed, with an MFENCE behind it.
pub(super) fn time<S: ?Sized>(
    clock: &Clock,
    amount: Amount,
    subject: &mut S,
    mut prepare: impl FnMut(&mut S),
    mut round: impl FnMut(&mut S) -> Result<(), Failure>,
) -> Result<Timed, Failure> {
    let (most, limit_ps) = match amount {
        Amount::Exactly(n) => (n, u64::MAX),
        Amount::UpTo(n, time) => (n, u64::try_from(time.as_nanos() * 1000).unwrap_or(u64::MAX)),
    };
    let mut timed = Timed { samples: Samples::new(), buckets: Buckets::default(), total_ps: 0 };
    let begin = clock.stop();
    let (mut last, mut rounds) = (begin, 0);
    while rounds < most && (rounds < FLOOR || clock.ps(last.ticks.saturating_sub(begin.ticks)) < limit_ps) {
        prepare(subject);
        cpu::mfence();
        let start = clock.start();
        let outcome = round(subject);
        let stop = clock.stop();
        outcome?;
        // Whoever moved to another CPU meanwhile has read two clocks.
        if stop.cpu == last.cpu {
            let ps = clock.ps(stop.ticks.saturating_sub(start)).saturating_sub(clock.overhead_ps());
            timed.samples.record(ps);
            timed.buckets.add(ps);
            timed.total_ps = timed.total_ps.saturating_add(ps);
        }
        last = stop;
        rounds += 1;
        interrupt::check()?;
    }
    Ok(timed)
}

/// The same loop with no device in it: the thread waits as long as a round takes, by the clock alone. What its tail
/// shows is the host's own.
pub(super) fn host_alone(clock: &Clock, amount: Amount, round_ns: f64) -> Result<Figures, Failure> {
    let round_ps = crate::tool::num::u64_of_f64(round_ns * 1000.0);
    let timed = time(
        clock,
        amount,
        &mut (),
        |()| (),
        |()| {
            let start = clock.start();
            while clock.ps(clock.start().saturating_sub(start)) < round_ps {}
            Ok(())
        },
    )?;
    Ok(timed.figures())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_double_and_keep_every_round() {
        let mut buckets = Buckets::default();
        // Rounds of 1 ns, and in the second half of 3 ns.
        (0..100_000).for_each(|n| buckets.add(if n < 50_000 { 1000 } else { 3000 }));
        assert!((BUCKETS..2 * BUCKETS).contains(&buckets.sums.len()), "{}", buckets.sums.len());
        let (min, median) = buckets.min_and_median();
        assert_eq!(min, 1.0);
        assert!((1.0..=3.0).contains(&median), "{median}");
        assert_eq!(Buckets::default().min_and_median(), (0.0, 0.0));
    }

    #[test]
    fn a_round_that_fails_ends_the_row() {
        let clock = Clock::calibrate();
        let mut left = 30;
        let failing = |left: &mut u32| {
            *left -= 1;
            if *left == 0 { Err(Failure::run("gone")) } else { Ok(()) }
        };
        let error = time(&clock, Amount::Exactly(100), &mut left, |_| (), failing).unwrap_err();
        assert_eq!((error.to_string().as_str(), left), ("gone", 0));
    }

    #[test]
    fn the_host_alone_waits_as_long_as_told() {
        let clock = Clock::calibrate();
        let figures = host_alone(&clock, Amount::Exactly(200), 2000.0).unwrap();
        assert!((1900.0..100_000.0).contains(&figures.p50_ns), "{figures:?}");
        assert_eq!(figures.iterations, 200);
    }
}
