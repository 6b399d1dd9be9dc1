//! Several ways of doing one thing, compared in one run: in interleaved blocks, by the ratio of medians.
//!
//! Clocks drift, neighbours come and go, a hypervisor steps in. So the arms of a comparison take turns: every *round*
//! runs one block of each, in an order that changes, and whatever the machine does meets all of them alike. An arm's
//! figure is its median over the rounds, a comparison is the ratio of two medians, and its 95 % interval comes from the
//! bootstrap: rounds are drawn again, whole, because blocks of one round belong together. The same arm twice gives the
//! noise floor, a ratio that would be 1 on a perfect machine.
//!
//! Write-combining buffers are drained by an MFENCE before each timed region and outside of it.

mod bootstrap;

use std::fmt;
use std::time::{Duration, Instant};

pub use bootstrap::{Estimate, median, shortest_resolved};

use bootstrap::drawn_again;

use super::clock::{Clock, Stop};
use super::cpu;
use super::num::f64_of;
use crate::Result;

/// Rounds a comparison makes however long they take.
const FEWEST_ROUNDS: usize = 5;
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

    /// The mean of `arm` over the mean of `over`: for what cannot be told apart by time, such as places in memory. The
    /// interval is that of a mean, so it is a little narrow for fewer than about twenty.
    #[must_use]
    pub fn ratio_of_means(&self, arm: usize, over: usize) -> Estimate {
        drawn_again(self.len(), |picks| {
            let sum = |arm: usize| picks.iter().map(|&round| self.arms[arm][round]).sum::<f64>();
            sum(arm) / sum(over)
        })
    }

    /// A figure made of medians, each asked for by its arm.
    pub fn bootstrap(&self, figure: impl Fn(&mut dyn FnMut(usize) -> f64) -> f64) -> Estimate {
        let mut drawn = Vec::with_capacity(self.len());
        drawn_again(self.len(), |picks| {
            figure(&mut |arm| {
                drawn.clear();
                drawn.extend(picks.iter().map(|&round| self.arms[arm][round]));
                median(&mut drawn)
            })
        })
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::bootstrap::SplitMix;
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
        let mut random = SplitMix::new(seed);
        let mut time = || {
            let place = u32::try_from(random.below(2001)).unwrap();
            centre + spread * (f64::from(place) / 1000.0 - 1.0)
        };
        (0..rounds).map(|_| time()).collect()
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
    fn means_weigh_what_medians_pass_over() {
        // One place in four takes twice as long by one way, none by the other.
        let by_place = |slow: f64| (0..40).map(|n| if n % 4 == 0 { slow } else { 100.0 }).collect();
        let places = Rounds::of(vec![by_place(200.0), by_place(100.0)]);
        let (medians, means) = (places.ratio(0, 1), places.ratio_of_means(0, 1));
        assert_eq!(medians, Estimate { value: 1.0, low: 1.0, high: 1.0 });
        assert!((means.value - 1.25).abs() < 1e-9 && means.low > 1.05 && means.high < 1.45, "{means}");
        assert!(Rounds::of(vec![Vec::new(); 2]).ratio_of_means(0, 1).value.is_nan());
    }

    #[test]
    fn a_mean_of_few_places_that_differ_is_known_only_roughly() {
        let of = |places| Rounds::of(vec![noisy(100.0, 7.0, places, 5), noisy(100.0, 7.0, places, 6)]);
        let (few, many) = (of(8).ratio_of_means(0, 1), of(128).ratio_of_means(0, 1));
        // The deviation of a uniform spread of +-7 % is 4 %: 1.96 x 4 % x sqrt(2 / 8) and sqrt(2 / 128).
        assert!((0.05..0.12).contains(&(few.high - few.low)), "{few:.3}");
        assert!((0.014..0.027).contains(&(many.high - many.low)) && many.spans(1.0), "{many:.3}");
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
