//! The two timed loops. What is inside the timed region is the call under test and nothing else.
//!
//! - [`Sampler::sustained`]: back to back. The core's buffers are as full as in real streaming; the figure is time over
//!   calls. Timed in buckets so that the loop can stop in time; next to nothing is done between two buckets.
//! - [`Sampler::single`]: one call per region, with an MFENCE before each region and outside it. Without that fence the
//!   drain of the previous call's stores falls into this region or not, and the median flips between two values.

use std::time::{Duration, Instant};

use super::clock::Clock;
use super::cpu;
use super::interrupt;
use super::report::Figures;
use super::stats::Samples;
use crate::Result;

/// Calls a cell makes however long they take, as long as the run has time left.
const FLOOR: u64 = 20;
/// Buckets a sustained loop is divided into.
const BUCKETS: u64 = 100;
/// Calls in the smallest bucket.
const SMALLEST_BUCKET: u64 = 10;
/// Warm-up ends after this many calls or this share of the cell's time, whichever is first.
const WARM_UP_CALLS: u64 = 1000;
const WARM_UP_SHARE: u32 = 10;

/// How many calls to make.
#[derive(Debug, Clone, Copy)]
pub enum Amount {
    /// Exactly so many, however long it takes.
    Exactly(u64),
    /// So many, or as many as fit in the time, but a minimum while the run has time left.
    UpTo(u64, Duration),
}

impl Amount {
    fn calls(self) -> u64 {
        match self {
            Self::Exactly(n) | Self::UpTo(n, _) => n,
        }
    }
}

/// The outcome of a timed loop.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Per call: one sample each, or one per bucket for a sustained loop.
    pub samples: Samples,
    /// Calls timed.
    pub calls: u64,
    /// Time over calls, in picoseconds.
    pub mean_ps: u64,
}

/// Runs timed loops on one clock until the run's time is up.
#[derive(Debug)]
pub struct Sampler<'a> {
    clock: &'a Clock,
    deadline: Instant,
    cut: bool,
}

impl<'a> Sampler<'a> {
    /// All cells together should take no longer than `total` from now on.
    #[must_use]
    pub fn new(clock: &'a Clock, total: Duration) -> Self {
        Self { clock, deadline: Instant::now() + total, cut: false }
    }

    /// What is left of the run's time for each of `cells` cells.
    #[must_use]
    pub fn share(&self, cells: usize) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        left / u32::try_from(cells.max(1)).unwrap_or(u32::MAX)
    }

    /// Whether a cell had to stop short of its minimum because the run's time was up.
    #[must_use]
    pub fn was_cut(&self) -> bool {
        self.cut
    }

    /// Untimed calls before a cell; returns what one call takes, roughly.
    ///
    /// # Errors
    ///
    /// What `op` returns.
    pub fn warm_up(&self, amount: Amount, mut op: impl FnMut() -> Result<()>) -> Result<Duration> {
        let limit = match amount {
            Amount::Exactly(_) => Duration::from_millis(10),
            Amount::UpTo(_, time) => time / WARM_UP_SHARE,
        };
        let begin = Instant::now();
        let mut calls: u32 = 0;
        loop {
            op()?;
            calls += 1;
            let elapsed = begin.elapsed();
            let enough = u64::from(calls) >= WARM_UP_CALLS.min(amount.calls());
            if elapsed >= limit || enough || interrupt::requested() {
                return Ok(elapsed / calls);
            }
        }
    }

    /// Calls `op` back to back. `per_call` is what [`Sampler::warm_up`] returned: it bounds the size of a bucket.
    ///
    /// # Errors
    ///
    /// What `op` returns.
    pub fn sustained(
        &mut self,
        amount: Amount,
        per_call: Duration,
        op: impl FnMut() -> Result<()>,
    ) -> Result<Measured> {
        self.batched(amount, per_call, op, || ())
    }

    /// [`Sampler::sustained`] with something to do after each bucket of calls, which is timed as well: the one fence of
    /// many posted writes.
    ///
    /// # Errors
    ///
    /// What `op` returns.
    pub fn batched(
        &mut self,
        amount: Amount,
        per_call: Duration,
        mut op: impl FnMut() -> Result<()>,
        mut close: impl FnMut(),
    ) -> Result<Measured> {
        let target = amount.calls();
        let bucket = bucket_size(amount, per_call);
        let mut tally = Tally::new(self.clock);
        let begin = self.clock.stop();
        let mut last = begin;
        while tally.calls < target && !self.is_over(amount, tally.calls, last.ticks.saturating_sub(begin.ticks)) {
            let calls = bucket.min(target - tally.calls);
            let mut outcome = Ok(());
            let start = self.clock.start();
            for _ in 0..calls {
                outcome = op();
                if outcome.is_err() {
                    break;
                }
            }
            close();
            let stop = self.clock.stop();
            outcome?;
            if stop.cpu == last.cpu {
                tally.add(stop.ticks.saturating_sub(start), calls);
            }
            last = stop;
        }
        Ok(tally.measured())
    }

    /// Calls `op` on `subject` one at a time; `prepare` runs before each, untimed.
    ///
    /// # Errors
    ///
    /// What `op` returns.
    pub fn single<S: ?Sized>(
        &mut self,
        amount: Amount,
        subject: &mut S,
        mut prepare: impl FnMut(&mut S),
        mut op: impl FnMut(&mut S) -> Result<()>,
    ) -> Result<Measured> {
        let target = amount.calls();
        let mut tally = Tally::new(self.clock);
        let begin = self.clock.stop();
        let mut last = begin;
        while tally.calls < target && !self.is_over(amount, tally.calls, last.ticks.saturating_sub(begin.ticks)) {
            prepare(subject);
            cpu::mfence();
            let start = self.clock.start();
            let outcome = op(subject);
            let stop = self.clock.stop();
            outcome?;
            if stop.cpu == last.cpu {
                tally.add(stop.ticks.saturating_sub(start), 1);
            }
            last = stop;
        }
        Ok(tally.measured())
    }

    /// The loop of [`Sampler::single`] around nothing at all: what clock, interrupts and hypervisor add to any call. A
    /// tail says something about a copy where it is longer than this one.
    pub fn hiccups(&mut self, amount: Amount) -> Figures {
        let nothing = self.single(amount, &mut (), |()| (), |()| Ok(()));
        nothing.map_or_else(|_| Figures::new(&Samples::new()), |measured| Figures::new(&measured.samples))
    }

    /// Whether a cell that has made `calls` calls in `ticks` should make no more. After Ctrl-C none should, whatever
    /// count was asked for: callers look at [`interrupt::check`] before they use the figures.
    fn is_over(&mut self, amount: Amount, calls: u64, ticks: u64) -> bool {
        if interrupt::requested() {
            return true;
        }
        let Amount::UpTo(_, time) = amount else { return false };
        if u128::from(self.clock.ps(ticks)) < time.as_nanos() * 1000 {
            return false;
        }
        if calls >= FLOOR {
            return true;
        }
        let over = calls > 0 && Instant::now() >= self.deadline;
        self.cut |= over;
        over
    }
}

/// Calls per bucket: a hundredth of all. Not fewer than [`SMALLEST_BUCKET`], for what drains between two buckets is not
/// timed; but fewer where so few calls fit into the time that a bucket would overrun it, and draining is nothing to them.
fn bucket_size(amount: Amount, per_call: Duration) -> u64 {
    let even = (amount.calls() / BUCKETS).max(SMALLEST_BUCKET);
    let Amount::UpTo(_, time) = amount else { return even };
    let fit = time.as_nanos() / u128::from(FLOOR) / per_call.as_nanos().max(1);
    even.min(u64::try_from(fit).unwrap_or(u64::MAX).max(1))
}

/// Samples in the making.
struct Tally<'a> {
    clock: &'a Clock,
    samples: Samples,
    calls: u64,
    total_ps: u64,
}

impl<'a> Tally<'a> {
    fn new(clock: &'a Clock) -> Self {
        Self { clock, samples: Samples::new(), calls: 0, total_ps: 0 }
    }

    fn add(&mut self, ticks: u64, calls: u64) {
        let ps = self.clock.ps(ticks).saturating_sub(self.clock.overhead_ps());
        self.samples.record(ps / calls);
        self.calls += calls;
        self.total_ps = self.total_ps.saturating_add(ps);
    }

    fn measured(self) -> Measured {
        Measured { mean_ps: self.total_ps / self.calls.max(1), calls: self.calls, samples: self.samples }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, ErrorKind};

    const MS: Duration = Duration::from_millis(1);

    /// Counts its calls and takes `time` for each.
    fn op(count: &mut u64, time: Duration) -> impl FnMut() -> Result<()> {
        let mut op = op_on(count, time);
        move || op(&mut ())
    }

    fn op_on(count: &mut u64, time: Duration) -> impl FnMut(&mut ()) -> Result<()> {
        move |()| {
            *count += 1;
            let begin = Instant::now();
            while begin.elapsed() < time {
                std::hint::spin_loop();
            }
            Ok(())
        }
    }

    #[test]
    fn exact_counts_are_exact() {
        let clock = Clock::calibrate();
        let mut sampler = Sampler::new(&clock, Duration::ZERO);
        for n in [1, 7, 100, 1234] {
            let (mut a, mut b) = (0, 0);
            let sustained = sampler.sustained(Amount::Exactly(n), MS, op(&mut a, Duration::ZERO)).unwrap();
            let single = sampler.single(Amount::Exactly(n), &mut (), |()| (), op_on(&mut b, Duration::ZERO)).unwrap();
            assert_eq!((sustained.calls, single.calls, single.samples.len()), (n, n, n));
            // Only samples taken across a change of CPU are repeated.
            assert!(a >= n && b >= n);
        }
        assert!(!sampler.was_cut());
    }

    #[test]
    fn slow_calls_stop_at_the_floor() {
        let clock = Clock::calibrate();
        let mut sampler = Sampler::new(&clock, Duration::from_secs(60));
        let mut calls = 0;
        let amount = Amount::UpTo(10_000, 2 * MS);
        let single = sampler.single(amount, &mut (), |()| (), op_on(&mut calls, MS)).unwrap();
        assert_eq!(single.calls, FLOOR);
        assert!(single.mean_ps >= 900_000_000, "{} ps", single.mean_ps);
        let sustained = sampler.sustained(amount, MS, op(&mut calls, MS)).unwrap();
        assert_eq!(sustained.calls, FLOOR);
        assert!(!sampler.was_cut());
    }

    #[test]
    fn a_run_out_of_time_is_cut_and_says_so() {
        let clock = Clock::calibrate();
        let mut sampler = Sampler::new(&clock, Duration::ZERO);
        let mut calls = 0;
        let single = sampler.single(Amount::UpTo(10_000, MS), &mut (), |()| (), op_on(&mut calls, 2 * MS)).unwrap();
        assert_eq!(single.calls, 1);
        assert!((1..10).contains(&calls), "{calls}");
        assert!(sampler.was_cut());
    }

    #[test]
    fn a_bucket_fits_the_time() {
        let up_to = |n, per_call| bucket_size(Amount::UpTo(n, 75 * MS), per_call);
        assert_eq!(up_to(10_000, Duration::from_nanos(200)), 100);
        assert_eq!(up_to(10_000, MS), 3);
        assert_eq!(up_to(10_000, 1000 * MS), 1);
        assert_eq!(up_to(100, Duration::ZERO), SMALLEST_BUCKET);
        assert_eq!(bucket_size(Amount::Exactly(10_000), 1000 * MS), 100);
    }

    #[test]
    fn preparation_is_not_timed() {
        let clock = Clock::calibrate();
        let mut sampler = Sampler::new(&clock, Duration::from_secs(60));
        let mut calls = 0;
        let slow = |(): &mut ()| std::thread::sleep(MS);
        let single = sampler.single(Amount::Exactly(20), &mut (), slow, op_on(&mut calls, Duration::ZERO)).unwrap();
        assert!(single.samples.quantile(0.5) < 500_000_000);
    }

    #[test]
    fn warm_up_is_bounded_both_ways() {
        let clock = Clock::calibrate();
        let sampler = Sampler::new(&clock, Duration::from_secs(60));
        let mut calls = 0;
        sampler.warm_up(Amount::Exactly(50), op(&mut calls, Duration::ZERO)).unwrap();
        assert_eq!(calls, 50);
        let mut slow = 0;
        let per_call = sampler.warm_up(Amount::UpTo(10_000, 10 * MS), op(&mut slow, 2 * MS)).unwrap();
        assert_eq!(slow, 1);
        assert!(per_call >= 2 * MS);
    }

    #[test]
    fn an_error_ends_the_loop() {
        let clock = Clock::calibrate();
        let mut sampler = Sampler::new(&clock, Duration::from_secs(60));
        let mut calls = 0;
        let mut failing = || {
            calls += 1;
            if calls == 3 { Err(Error::new("write", ErrorKind::Stale, "gone")) } else { Ok(()) }
        };
        let error = sampler.sustained(Amount::Exactly(1000), MS, &mut failing).unwrap_err();
        assert_eq!((error.kind(), calls), (ErrorKind::Stale, 3));
    }
}
