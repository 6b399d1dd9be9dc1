//! One row: rounds timed one by one.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::args::{Memory, Row};
use crate::sys::num::u64_of;
use crate::tool::answer::Mode;
use crate::tool::clock::Clock;
use crate::tool::cpu;
use crate::tool::exchange::{Exchange, Outcome};
use crate::tool::fail::Failure;
use crate::tool::flags::Binary;
use crate::tool::interrupt;
use crate::tool::measure::Amount;
use crate::tool::report::{Figures, Metric, Record};
use crate::tool::stats::{Samples, nanoseconds, supports};
use crate::tool::table;

/// Rounds before those that count, or a tenth of the time.
const WARM_UP: u64 = 1000;
/// Rounds that a row makes however long they take.
const FLOOR: u64 = 20;
/// As many buckets, or up to twice as many, a row's rounds are divided into, as upstream's are.
const BUCKETS: usize = 100;

/// What a row found.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Ping {
    mode: &'static str,
    method: &'static str,
    metric: Metric,
    /// Bytes of a message as stored.
    payload_bytes: u64,
    /// Of these, without the packets' numbers.
    data_bytes: u64,
    blocks: u64,
    threads: u32,
    flag_in: &'static str,
    data_in: &'static str,
    answer_in: &'static str,
    /// Every SM was busy meanwhile.
    load: bool,
    #[serde(flatten)]
    pub(super) figures: Figures,
    /// Of the means of about 100 buckets of rounds, the smallest and the median: the figures of GDRCopy's own program.
    bucket_min_ns: f64,
    bucket_median_ns: f64,
    /// Messages whose data the GPU found to be wrong.
    pub(super) wrong_messages: u64,
    verified: bool,
}

impl Ping {
    pub(super) fn new(row: &Row, load: bool, timed: &Timed, outcome: Outcome) -> Self {
        let Row { shape, at } = *row;
        let (bucket_min_ns, bucket_median_ns) = timed.buckets.min_and_median();
        Self {
            mode: shape.mode.name(),
            method: row.method(),
            metric: Metric::Rtt,
            payload_bytes: u64_of(shape.bytes),
            data_bytes: u64_of(shape.data_bytes()),
            blocks: u64_of(shape.blocks),
            threads: shape.threads,
            flag_in: at.flag.name(),
            data_in: at.data.name(),
            answer_in: at.answer.name(),
            load,
            figures: timed.figures(),
            bucket_min_ns,
            bucket_median_ns,
            wrong_messages: outcome.wrong_messages,
            verified: outcome.wrong_messages == 0 && outcome.wrong_words == 0,
        }
    }

    /// Whether both rows carry the same messages.
    pub(super) fn is_rival_of(&self, other: &Self) -> bool {
        self.method != other.method && (self.mode, self.payload_bytes) == (other.mode, other.payload_bytes)
    }

    pub(super) fn is_rival(&self) -> bool {
        self.method == "host_flag"
    }

    /// Bytes of a message.
    pub(super) fn bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Whether it is of this kind.
    pub(super) fn is(&self, (mode, method): (Mode, &str)) -> bool {
        self.mode == mode.name() && self.method == method
    }

    /// The message in words.
    pub(super) fn message(&self) -> String {
        format!("{}, {} B", self.mode, self.payload_bytes)
    }
}

impl Record for Ping {
    const COLUMNS: &'static [&'static str] = &[
        "mode",
        "method",
        "metric",
        "payload_bytes",
        "data_bytes",
        "blocks",
        "threads",
        "flag_in",
        "data_in",
        "answer_in",
        "load",
        "bucket_min_ns",
        "bucket_median_ns",
        "wrong_messages",
        "verified",
    ];

    fn fields(&self) -> Vec<String> {
        vec![
            self.mode.to_owned(),
            self.method.to_owned(),
            self.metric.name().to_owned(),
            self.payload_bytes.to_string(),
            self.data_bytes.to_string(),
            self.blocks.to_string(),
            self.threads.to_string(),
            self.flag_in.to_owned(),
            self.data_in.to_owned(),
            self.answer_in.to_owned(),
            self.load.to_string(),
            self.bucket_min_ns.to_string(),
            self.bucket_median_ns.to_string(),
            self.wrong_messages.to_string(),
            self.verified.to_string(),
        ]
    }

    fn figures(&self) -> &Figures {
        &self.figures
    }
}

/// The two lines of column titles: name, unit.
pub(super) fn titles() -> [String; 2] {
    let line = |[mode, size, place]: [&str; 3], times: [&str; 7], rounds: &str| {
        let [p0, p50, p99, p999, max, bucket_min, bucket_median] = times;
        format!(
            "{mode:<9} {size:>6} {place:<7} {p0:>7} {p50:>7} {p99:>7} {p999:>8} {max:>9} {bucket_min:>7} \
             {bucket_median:>7} {rounds:>8}"
        )
    };
    [
        line(["message", "size", "polled"], ["p0", "p50", "p99", "p99.9", "max", "bkt.min", "bkt.med"], "rounds"),
        line(["", "[B]", "in"], ["[ns]"; 7], "").trim_end().to_owned(),
    ]
}

/// A row of the table. Percentiles that the rounds cannot support are left out.
pub(super) fn line(ping: &Ping) -> String {
    let place = match ping.method {
        "bar1" => Memory::Gpumem.name(),
        "host_flag" => Memory::Hostmem.name(),
        other => other,
    };
    let buckets = [ping.bucket_min_ns, ping.bucket_median_ns].map(table::nanoseconds);
    text([ping.mode, &Binary(ping.payload_bytes).to_string(), place], &ping.figures, buckets)
}

/// The row of the host by itself.
pub(super) fn host_line(figures: &Figures) -> String {
    text(["(host", "alone", ")"], figures, ["-", "-"].map(str::to_owned))
}

fn text([mode, size, place]: [&str; 3], figures: &Figures, [bucket_min, bucket_median]: [String; 2]) -> String {
    let enough = |one_in, ns| {
        if supports(figures.iterations, one_in) { table::nanoseconds(ns) } else { "-".to_owned() }
    };
    let (p99, p999) = (enough(100, figures.p99_ns), enough(1000, figures.p999_ns));
    let [p0, p50, max] = [figures.min_ns, figures.p50_ns, figures.max_ns].map(table::nanoseconds);
    let rounds = figures.iterations;
    format!(
        "{mode:<9} {size:>6} {place:<7} {p0:>7} {p50:>7} {p99:>7} {p999:>8} {max:>9} {bucket_min:>7} \
         {bucket_median:>7} {rounds:>8}"
    )
}

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

    fn min_and_median(&self) -> (f64, f64) {
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
    buckets: Buckets,
    total_ps: u64,
}

impl Timed {
    fn figures(&self) -> Figures {
        let mut figures = Figures::new(&self.samples);
        figures.mean_ns = Some(nanoseconds(self.total_ps / self.samples.len().max(1)));
        figures
    }
}

/// Rounds that do not count: caches, branch predictors and the bus get used to it.
pub(super) fn warm_up(exchange: &mut Exchange<'_>, amount: Amount) -> Result<(), Failure> {
    let (most, time) = match amount {
        Amount::Exactly(n) => (n, Duration::from_millis(10)),
        Amount::UpTo(n, time) => (n, time / 10),
    };
    let begin = Instant::now();
    for _ in 0..most.min(WARM_UP) {
        exchange.prepare();
        exchange.round()?;
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

    #[test]
    fn rows_line_up_within_100_columns() {
        let clock = Clock::calibrate();
        let figures = host_alone(&clock, Amount::Exactly(1000), 1.0).unwrap();
        let [names, units] = titles();
        let row = host_line(&figures);
        assert!(names.len() <= 100 && units.len() <= names.len());
        assert_eq!(row.len(), names.len(), "{row}");
    }
}
