//! Results as text: one row per size, printed as it is measured, at most 100 columns wide.

use super::flags::Binary;
use super::num::{f64_of, u64_of_f64};
use super::report::{Entry, Metric};
use super::stats::supports;

/// A table of copies in one direction by one method.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// Show the offset: only where it varies.
    pub offsets: bool,
}

impl Table {
    /// The two lines of column titles: name, unit.
    #[must_use]
    pub fn titles(self) -> [String; 2] {
        let offset = |text| if self.offsets { format!("{text:>8} ") } else { String::new() };
        let row = |offset: String, size, ns: [&str; 6], samples, rate| {
            let ns: String = ns.iter().map(|ns| format!(" {ns:>10}")).collect();
            format!("{offset}{size:>6}{ns} {samples:>8} {rate:>7}")
        };
        [
            row(offset("offset"), "size", ["sustained", "p50", "p99", "p99.9", "min", "max"], "samples", "rate"),
            row(offset("[B]"), "[B]", ["[ns]"; 6], "[calls]", "[GB/s]"),
        ]
    }

    /// One row, from what was measured at one size and offset. Percentiles that the samples cannot support are left out.
    #[must_use]
    pub fn row(self, entries: &[Entry]) -> String {
        let of = |metric| entries.iter().find(|entry| entry.metric == metric);
        let (sustained, single) = (of(Metric::Sustained), of(Metric::Single));
        let Some(any) = single.or(sustained) else { return String::new() };
        let offset = if self.offsets { format!("{:>8} ", Binary(any.offset)) } else { String::new() };
        let time = |ns: Option<f64>| format!(" {:>10}", ns.map_or_else(|| "-".to_owned(), nanoseconds));
        let enough = |one_in| move |entry: &&Entry| supports(entry.figures.iterations, one_in);
        let times = [
            sustained.map(|e| e.figures.typical_ns()),
            single.map(|e| e.figures.p50_ns),
            single.filter(enough(100)).map(|e| e.figures.p99_ns),
            single.filter(enough(1000)).map(|e| e.figures.p999_ns),
            single.map(|e| e.figures.min_ns),
            single.map(|e| e.figures.max_ns),
        ];
        let times: String = times.into_iter().map(time).collect();
        let rate = sustained.or(single).map_or_else(|| "-".to_owned(), gigabytes_per_second);
        format!("{offset}{:>6}{times} {:>8} {rate:>7}", Binary(any.bytes), any.figures.iterations)
    }
}

/// A time: tenths below a microsecond, whole nanoseconds above.
pub(crate) fn nanoseconds(ns: f64) -> String {
    if ns < 999.95 { format!("{ns:.1}") } else { u64_of_f64(ns).to_string() }
}

/// Bytes over typical time, decimal.
fn gigabytes_per_second(entry: &Entry) -> String {
    let rate = f64_of(entry.bytes) / entry.figures.typical_ns();
    // Not finite: faster than the clock resolves.
    if rate.is_finite() { format!("{rate:.3}") } else { "-".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::report::Direction::{self, DeviceToHost, HostToDevice};
    use super::super::report::tests::entry;
    use super::*;

    fn pair(direction: Direction, bytes: u64, ns: u64, calls: u64) -> [Entry; 2] {
        let mut pair = [Metric::Sustained, Metric::Single].map(|m| entry(direction, "bar1", m, bytes, ns));
        pair[1].figures.iterations = calls;
        pair
    }

    #[test]
    fn columns_line_up_within_100() {
        for table in [Table { offsets: false }, Table { offsets: true }] {
            let [names, units] = table.titles();
            let rows = [
                table.row(&pair(HostToDevice, 1, 0, 10_000)),
                table.row(&pair(HostToDevice, 64, 175, 10_000)),
                table.row(&pair(DeviceToHost, 16 << 20, 17_800_000, 20)),
                table.row(&pair(DeviceToHost, 1 << 30, 9_999_999_999, 99_999_999)),
            ];
            for line in rows.iter().chain([&names]) {
                assert!(line.len() <= 100, "{} columns: {line}", line.len());
                assert_eq!(line.len(), names.len(), "{line}");
            }
            assert!(units.len() <= names.len());
            // Right-aligned: every title's last character stands over a value's last character.
            let ends = |line: &str| -> Vec<usize> {
                let mut ends = vec![];
                for (at, pair) in line.as_bytes().windows(2).enumerate() {
                    if pair[0] != b' ' && pair[1] == b' ' {
                        ends.push(at);
                    }
                }
                ends
            };
            rows.iter().for_each(|row| assert_eq!(ends(row), ends(&names), "{row}"));
        }
    }

    #[test]
    fn percentiles_need_samples() {
        let few = Table { offsets: false }.row(&pair(DeviceToHost, 64, 1050, 20));
        assert_eq!(
            few.split_whitespace().collect::<Vec<_>>(),
            ["64", "1050", "1050", "-", "-", "1050", "1050", "20", "0.061"]
        );
        let many = Table { offsets: false }.row(&pair(DeviceToHost, 64, 1050, 1000));
        assert!(!many.contains('-'), "{many}");
    }

    #[test]
    fn without_a_sustained_figure_the_median_gives_the_rate() {
        let row = Table { offsets: false }.row(&pair(HostToDevice, 1000, 100, 1000)[1..]);
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>(),
            ["1000", "-", "100.0", "100.0", "100.0", "100.0", "100.0", "1000", "10.000"]
        );
    }

    #[test]
    fn figures_keep_sensible_digits() {
        assert_eq!(nanoseconds(3.25), "3.2");
        assert_eq!(nanoseconds(999.9), "999.9");
        assert_eq!(nanoseconds(999.96), "1000");
        assert_eq!(nanoseconds(17_812_345.6), "17812346");
    }
}
