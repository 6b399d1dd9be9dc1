//! Several ways of doing one thing, compared in one run: in interleaved blocks, by the ratio of medians.
//!
//! Clocks drift, neighbours come and go, a hypervisor steps in. So the arms of a comparison take turns: every *round*
//! runs one block of each, in an order that changes, and whatever the machine does meets all of them alike. An arm's
//! figure is its median over the rounds, a comparison is the ratio of two medians, and its 95 % interval comes from the
//! bootstrap: rounds are drawn again, whole, because blocks of one round belong together. The same arm twice gives the
//! noise floor, a ratio that would be 1 on a perfect machine.
//!
//! Write-combining buffers are drained by an MFENCE before each timed region and outside of it.

use std::fmt;
use std::time::{Duration, Instant};

use super::clock::{Clock, Stop};
use super::cpu;
use super::num::{f64_of, u64_of_f64};
use super::pattern::mix;
use crate::Result;
use crate::sys::num::{u64_of, usize_of};

/// Rounds a comparison makes however long they take.
const FEWEST_ROUNDS: usize = 5;
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

    /// Whether the interval has `at` inside.
    #[must_use]
    pub fn spans(&self, at: f64) -> bool {
        self.low <= at && at <= self.high
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} [{:.digits$}, {:.digits$}]", self.value, self.low, self.high)
    }
}

/// Runs one block and says how long a call took, in nanoseconds; `None` if the thread was moved to another CPU meanwhile.
type Block<'a> = dyn FnMut(&Clock) -> Result<Option<f64>> + 'a;

/// One way of doing it: a block of calls that is timed as a whole, or call by call.
pub struct Arm<'a> {
    block: Box<Block<'a>>,
}

impl<'a> Arm<'a> {
    /// `calls` calls back to back in one timed region: time over calls. `op` is told which call it is.
    pub fn sustained(calls: u32, mut op: impl FnMut(u32) -> Result<()> + 'a) -> Self {
        let block = move |clock: &Clock| {
            cpu::mfence();
            let before = clock.stop();
            let start = clock.start();
            let mut outcome = Ok(());
            for call in 0..calls {
                outcome = op(call);
                if outcome.is_err() {
                    break;
                }
            }
            let stop = clock.stop();
            outcome?;
            Ok(region(clock, before, start, stop).map(|ps| f64_of(ps) / 1000.0 / f64::from(calls.max(1))))
        };
        Self { block: Box::new(block) }
    }

    /// `calls` calls in a timed region each: the median. `op` is told which call it is.
    pub fn single(calls: u32, mut op: impl FnMut(u32) -> Result<()> + 'a) -> Self {
        let mut times = Vec::new();
        let block = move |clock: &Clock| {
            times.clear();
            times.reserve(usize::try_from(calls).unwrap_or(0));
            for call in 0..calls {
                cpu::mfence();
                let before = clock.stop();
                let start = clock.start();
                let outcome = op(call);
                let stop = clock.stop();
                outcome?;
                let Some(ps) = region(clock, before, start, stop) else { return Ok(None) };
                times.push(f64_of(ps) / 1000.0);
            }
            Ok((!times.is_empty()).then(|| median(&mut times)))
        };
        Self { block: Box::new(block) }
    }

    /// The same arm with something before each of its blocks, untimed.
    #[must_use]
    pub fn after(mut self, mut prepare: impl FnMut() -> Result<()> + 'a) -> Self {
        Self {
            block: Box::new(move |clock| {
                prepare()?;
                (self.block)(clock)
            }),
        }
    }

    /// Runs one block.
    ///
    /// # Errors
    ///
    /// What the operation returns.
    pub fn run(&mut self, clock: &Clock) -> Result<Option<f64>> {
        (self.block)(clock)
    }
}

impl fmt::Debug for Arm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arm").finish_non_exhaustive()
    }
}

/// A region's picoseconds without what timing costs, if it began and ended on one CPU.
fn region(clock: &Clock, before: Stop, start: u64, stop: Stop) -> Option<u64> {
    let ps = clock.ps(stop.ticks.saturating_sub(start)).saturating_sub(clock.overhead_ps());
    (before.cpu == stop.cpu).then_some(ps)
}

/// How many calls of `op` fill `time`: from 1 to `most`. Calls it for a quarter of that, and so warms it up, too.
///
/// # Errors
///
/// What `op` returns.
pub fn calls_in(time: Duration, most: u32, mut op: impl FnMut(u32) -> Result<()>) -> Result<u32> {
    let begin = Instant::now();
    let mut calls: u32 = 0;
    loop {
        op(calls)?;
        calls += 1;
        let elapsed = begin.elapsed();
        if elapsed * 4 >= time || calls >= most {
            let fit = time.as_nanos() * u128::from(calls) / elapsed.as_nanos().max(1);
            return Ok(u32::try_from(fit).unwrap_or(u32::MAX).clamp(1, most.max(1)));
        }
    }
}

/// When a comparison ends.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// After so many rounds.
    pub rounds: usize,
    /// Or after this time, but not before a handful of rounds.
    pub time: Duration,
}

/// What every arm took, round by round, in nanoseconds per call.
#[derive(Debug, Clone, PartialEq)]
pub struct Rounds {
    /// By arm, then by round.
    arms: Vec<Vec<f64>>,
}

impl Rounds {
    /// Runs the arms in turn; the first block of each warms it up and does not count.
    ///
    /// # Errors
    ///
    /// What an arm returns.
    pub fn run(clock: &Clock, arms: &mut [Arm<'_>], limit: Limit) -> Result<Self> {
        for arm in arms.iter_mut() {
            arm.run(clock)?;
        }
        let begin = Instant::now();
        let count = arms.len();
        let mut taken: Vec<Vec<f64>> = (0..count).map(|_| Vec::with_capacity(limit.rounds)).collect();
        let mut round = vec![0.0; count];
        for turn in 0..limit.rounds {
            if turn >= FEWEST_ROUNDS && begin.elapsed() >= limit.time {
                break;
            }
            let mut is_whole = true;
            for index in order(turn, count) {
                match arms[index].run(clock)? {
                    Some(ns) => round[index] = ns,
                    None => is_whole = false,
                }
            }
            // Blocks of one round belong together: one that a move of the thread spoilt spoils all.
            if is_whole {
                taken.iter_mut().zip(&round).for_each(|(arm, &ns)| arm.push(ns));
            }
        }
        Ok(Self { arms: taken })
    }

    /// From times taken elsewhere: by arm, then by round.
    ///
    /// # Panics
    ///
    /// If the arms have different numbers of rounds.
    #[must_use]
    pub fn of(arms: Vec<Vec<f64>>) -> Self {
        assert!(arms.windows(2).all(|pair| pair[0].len() == pair[1].len()), "every round has every arm");
        Self { arms }
    }

    /// How many rounds there were.
    #[must_use]
    pub fn len(&self) -> usize {
        self.arms.first().map_or(0, Vec::len)
    }

    /// Whether there was none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The times of one arm, in nanoseconds per call.
    #[must_use]
    pub fn times(&self, arm: usize) -> &[f64] {
        &self.arms[arm]
    }

    /// An arm's median, in nanoseconds per call.
    #[must_use]
    pub fn median(&self, arm: usize) -> Estimate {
        self.bootstrap(|pick| pick(arm))
    }

    /// The median of `arm` over the median of `over`.
    #[must_use]
    pub fn ratio(&self, arm: usize, over: usize) -> Estimate {
        self.bootstrap(|pick| pick(arm) / pick(over))
    }

    /// A figure made of medians, each asked for by its arm.
    pub fn bootstrap(&self, figure: impl Fn(&mut dyn FnMut(usize) -> f64) -> f64) -> Estimate {
        let rounds = self.len();
        let mut drawn = Vec::with_capacity(rounds);
        let value = figure(&mut |arm| {
            drawn.clear();
            drawn.extend_from_slice(&self.arms[arm]);
            median(&mut drawn)
        });
        if rounds == 0 {
            return Estimate { value: f64::NAN, low: f64::NAN, high: f64::NAN };
        }
        let mut random = SplitMix(0x0067_6472_636f_7079);
        let mut picks = vec![0; rounds];
        let mut figures = Vec::with_capacity(RESAMPLES);
        for _ in 0..RESAMPLES {
            picks.iter_mut().for_each(|pick| *pick = random.below(rounds));
            figures.push(figure(&mut |arm| {
                drawn.clear();
                drawn.extend(picks.iter().map(|&round| self.arms[arm][round]));
                median(&mut drawn)
            }));
        }
        figures.sort_unstable_by(f64::total_cmp);
        Estimate { value, low: share(&figures, TAIL), high: share(&figures, 1.0 - TAIL) }
    }
}

/// Arms in the order of one round: each is first in its turn, and every other time round they go backwards.
fn order(turn: usize, count: usize) -> impl Iterator<Item = usize> {
    let is_backward = (turn / count.max(1)) % 2 == 1;
    (0..count).map(move |place| {
        let index = (turn + place) % count;
        if is_backward { count - 1 - index } else { index }
    })
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
struct SplitMix(u64);

impl SplitMix {
    /// From 0 to `n - 1`. The bias of the multiplication is below 2^-32 for any number of rounds.
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = mix(self.0);
        let scaled = (u128::from(mixed) * u128::from(u64_of(n))) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::{Error, ErrorKind};

    const MS: Duration = Duration::from_millis(1);

    fn spin(time: Duration) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Times around a centre, each a little different, in no order.
    fn noisy(centre: f64, spread: f64, rounds: u32, seed: u64) -> Vec<f64> {
        let mut random = SplitMix(seed);
        let mut time = || {
            let place = u32::try_from(random.below(2001)).unwrap();
            centre + spread * (f64::from(place) / 1000.0 - 1.0)
        };
        (0..rounds).map(|_| time()).collect()
    }

    #[test]
    fn medians() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 9.0]), 3.0);
        assert_eq!(median(&mut [7.0]), 7.0);
        assert!(median(&mut []).is_nan());
    }

    #[test]
    fn every_arm_runs_once_a_round_and_first_in_its_turn() {
        let rounds: Vec<Vec<usize>> = (0..6).map(|turn| order(turn, 3).collect()).collect();
        for round in &rounds {
            let mut sorted = round.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2]);
        }
        let firsts: Vec<usize> = rounds.iter().map(|round| round[0]).collect();
        assert_eq!(firsts, [0, 1, 2, 2, 1, 0]);
        // Whoever follows whom changes too.
        assert_eq!((&rounds[0][..], &rounds[5][..]), (&[0, 1, 2][..], &[0, 2, 1][..]));
    }

    #[test]
    fn arms_are_interleaved_and_the_first_blocks_do_not_count() {
        let clock = Clock::calibrate();
        let log = RefCell::new(Vec::new());
        let arm = |name: char| {
            let log = &log;
            Arm::sustained(2, move |call| {
                log.borrow_mut().push((name, call));
                Ok(())
            })
        };
        let limit = Limit { rounds: 4, time: Duration::MAX };
        let rounds = Rounds::run(&clock, &mut [arm('a'), arm('b')], limit).unwrap();
        // A round in which the thread was moved is dropped.
        assert!(rounds.len() <= 4);
        let firsts: String = log.borrow().iter().filter(|(_, call)| *call == 0).map(|(name, _)| *name).collect();
        assert_eq!(firsts, "ab".to_owned() + "ab" + "ba" + "ba" + "ab");
    }

    #[test]
    fn a_slower_arm_shows_in_both_kinds() {
        let clock = Clock::calibrate();
        let limit = Limit { rounds: 20, time: 2 * Duration::from_secs(1) };
        let (fast, slow) = (MS / 20, MS / 5);
        let kinds: [fn(u32, Duration) -> Arm<'static>; 2] =
            [|n, time| Arm::sustained(n, move |_| spin(time)), |n, time| Arm::single(n, move |_| spin(time))];
        for kind in kinds {
            let rounds = Rounds::run(&clock, &mut [kind(3, slow), kind(3, fast), kind(3, fast)], limit).unwrap();
            let (ratio, noise) = (rounds.ratio(0, 1), rounds.ratio(2, 1));
            assert!(ratio.value > 1.5 && ratio.low <= ratio.value && ratio.value <= ratio.high, "{ratio}");
            assert!(noise.value < ratio.value, "{noise} {ratio}");
            let ns = rounds.median(0).value;
            assert!(ns >= 190_000.0, "{ns}");
        }
    }

    #[test]
    fn intervals_hold_what_is_true_and_shrink_with_rounds() {
        let of = |rounds| Rounds::of(vec![noisy(300.0, 30.0, rounds, 1), noisy(200.0, 20.0, rounds, 2)]);
        let (few, many) = (of(20).ratio(0, 1), of(2000).ratio(0, 1));
        assert!(few.spans(1.5) && many.spans(1.5), "{few} {many}");
        assert!(many.high - many.low < (few.high - few.low) / 3.0, "{few} {many}");
        assert!(!many.spans(1.45), "{many}");
    }

    #[test]
    fn what_meets_all_arms_alike_is_no_difference() {
        // A machine that slows down to a third while the run lasts, three per cent between the arms.
        let drift = |round: u32| 100.0 * (1.0 + f64::from(round) / 50.0);
        let one: Vec<f64> = (0..100).map(drift).collect();
        let other = one.iter().map(|ns| ns * 1.03).collect();
        let ratio = Rounds::of(vec![other, one]).ratio(0, 1);
        assert!((ratio.low - 1.03).abs() < 1e-9 && (ratio.high - 1.03).abs() < 1e-9, "{ratio:.4}");
    }

    #[test]
    fn the_same_times_give_the_same_interval() {
        let rounds = Rounds::of(vec![noisy(5.0, 1.0, 50, 3)]);
        assert_eq!(rounds.median(0), rounds.median(0));
        assert_eq!(Rounds::of(vec![vec![4.0; 9]]).median(0), Estimate { value: 4.0, low: 4.0, high: 4.0 });
    }

    #[test]
    fn no_rounds_are_no_figure() {
        let nothing = Rounds::of(vec![Vec::new(), Vec::new()]);
        assert!(nothing.is_empty() && nothing.ratio(0, 1).value.is_nan());
        assert!(!nothing.ratio(0, 1).spans(1.0));
    }

    #[test]
    fn a_figure_of_a_figure_keeps_its_ends_in_order() {
        let rate = Estimate { value: 4.0, low: 2.0, high: 8.0 }.map(|ns| 1.0 / ns);
        assert_eq!(rate, Estimate { value: 0.25, low: 0.125, high: 0.5 });
        assert_eq!(format!("{rate:.3}"), "0.250 [0.125, 0.500]");
    }

    #[test]
    fn time_ends_a_comparison_after_a_handful_of_rounds() {
        let clock = Clock::calibrate();
        let limit = Limit { rounds: 1000, time: Duration::ZERO };
        let rounds = Rounds::run(&clock, &mut [Arm::sustained(1, |_| spin(MS))], limit).unwrap();
        assert!(rounds.len() <= FEWEST_ROUNDS && !rounds.is_empty(), "{}", rounds.len());
    }

    #[test]
    fn a_block_is_as_long_as_asked() {
        let calls = calls_in(8 * MS, 1000, |_| spin(MS / 4)).unwrap();
        assert!((1..=33).contains(&calls), "{calls}");
        assert_eq!(calls_in(MS, 1000, |_| spin(2 * MS)).unwrap(), 1);
        assert_eq!(calls_in(Duration::from_secs(1), 7, |_| Ok(())).unwrap(), 7);
    }

    #[test]
    fn what_comes_before_a_block_is_not_timed() {
        let clock = Clock::calibrate();
        let log = RefCell::new(String::new());
        let mut arm = Arm::single(2, |_| {
            log.borrow_mut().push('.');
            Ok(())
        })
        .after(|| {
            log.borrow_mut().push('p');
            spin(MS)
        });
        let ns = (0..10).find_map(|_| arm.run(&clock).unwrap()).unwrap();
        assert!(ns < 500_000.0, "{ns}");
        assert!(log.borrow().starts_with("p.."), "{}", log.borrow());
    }

    #[test]
    fn an_error_ends_the_run() {
        let clock = Clock::calibrate();
        let failing = |call| if call == 1 { Err(Error::new("write", ErrorKind::Stale, "gone")) } else { Ok(()) };
        for mut arm in [Arm::sustained(3, failing), Arm::single(3, failing)] {
            assert_eq!(arm.run(&clock).unwrap_err().kind(), ErrorKind::Stale);
        }
        assert_eq!(calls_in(MS, 100, failing).unwrap_err().kind(), ErrorKind::Stale);
    }
}
