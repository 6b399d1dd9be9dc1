//! One row: what was measured, and how it is told.

use serde::Serialize;

use super::message::{Letter, Memory, RIVAL, Row};
use super::timing::Timed;
use crate::sys::num::u64_of;
use crate::tool::exchange::Outcome;
use crate::tool::flags::Binary;
use crate::tool::report::{Figures, Metric, Record};
use crate::tool::stats::supports;
use crate::tool::table;

/// What a row found.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Ping {
    mode: &'static str,
    method: &'static str,
    metric: Metric,
    /// Bytes of a message: as stored, or as given to the channel.
    payload_bytes: u64,
    /// Of these, without the packets' numbers.
    data_bytes: u64,
    /// Bytes of an answer.
    answer_bytes: u64,
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
        let (bucket_min_ns, bucket_median_ns) = timed.buckets.min_and_median();
        let (blocks, threads) = row.grid();
        let (data_bytes, answer_bytes, places) = match *row {
            Row::Plain { shape, at } => (shape.data_bytes(), 4, [at.flag, at.data, at.answer]),
            Row::Channel(Letter { bytes, answer_bytes, ring }) => (bytes, answer_bytes, [ring, ring, Memory::Hostmem]),
        };
        let [flag_in, data_in, answer_in] = places.map(Memory::name);
        Self {
            mode: row.mode(),
            method: row.method(),
            metric: Metric::Rtt,
            payload_bytes: u64_of(row.bytes()),
            data_bytes: u64_of(data_bytes),
            answer_bytes: u64_of(answer_bytes),
            blocks: u64_of(blocks),
            threads,
            flag_in,
            data_in,
            answer_in,
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
        let message = |ping: &Self| (ping.mode, ping.payload_bytes, ping.answer_bytes);
        self.method != other.method && message(self) == message(other)
    }

    pub(super) fn is_rival(&self) -> bool {
        self.method == RIVAL
    }

    /// Bytes of a message.
    pub(super) fn bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Whether it is of this kind.
    pub(super) fn is(&self, kind: (&str, &str)) -> bool {
        (self.mode, self.method) == kind
    }

    /// Whether it went through a channel.
    pub(super) fn is_of_channel(&self) -> bool {
        self.mode == Letter::MODE
    }

    /// Whether more than 4 bytes come back.
    pub(super) fn has_long_answer(&self) -> bool {
        self.answer_bytes > 4
    }

    /// Bytes of the message, of a channel also those of the answer.
    fn size(&self) -> String {
        match self.is_of_channel() {
            true => format!("{}/{}", Binary(self.payload_bytes), self.answer_bytes),
            false => Binary(self.payload_bytes).to_string(),
        }
    }

    /// The message in words.
    pub(super) fn message(&self) -> String {
        match self.is_of_channel() {
            true => format!("{}, {}/{} B", self.mode, self.payload_bytes, self.answer_bytes),
            false => format!("{}, {} B", self.mode, self.payload_bytes),
        }
    }
}

impl Record for Ping {
    const COLUMNS: &'static [&'static str] = &[
        "mode",
        "method",
        "metric",
        "payload_bytes",
        "data_bytes",
        "answer_bytes",
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
            self.answer_bytes.to_string(),
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
            "{mode:<9} {size:>7} {place:<7} {p0:>7} {p50:>7} {p99:>7} {p999:>8} {max:>9} {bucket_min:>7} \
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
        RIVAL => Memory::Hostmem.name(),
        other => other,
    };
    let buckets = [ping.bucket_min_ns, ping.bucket_median_ns].map(table::nanoseconds);
    text([ping.mode, &ping.size(), place], &ping.figures, buckets)
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
        "{mode:<9} {size:>7} {place:<7} {p0:>7} {p50:>7} {p99:>7} {p999:>8} {max:>9} {bucket_min:>7} \
         {bucket_median:>7} {rounds:>8}"
    )
}

#[cfg(test)]
mod tests {
    use super::super::timing::host_alone;
    use super::*;
    use crate::tool::clock::Clock;
    use crate::tool::measure::Amount;

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
