//! Results of copies as text: one row per size, printed as it is measured, at most 100 columns wide.

use super::flags::Binary;
use super::num::{f64_of, u64_of_f64};
use super::report::{Entry, Metric};
use super::stats::supports;

/// A table of copies in one direction by one method.
pub trait Layout {
    /// The lines of column titles.
    fn titles(&self) -> Vec<String>;

    /// One row, from what was measured at one size and offset.
    fn row(&self, entries: &[Entry]) -> String;
}

/// Times of every kind: those of single calls as percentiles.
#[derive(Debug, Clone, Copy)]
pub struct Times<'a> {
    /// Show the offset: only where it varies.
    pub offsets: bool,
    /// A sustained figure comes first.
    pub sustained: bool,
    /// The kinds of single calls; the last gives the percentiles.
    pub singles: &'a [Metric],
}

/// A column between size and samples: title, statistic, and the figure of a row.
type Column = (Metric, &'static str, fn(&Entry) -> Option<f64>);

impl Times<'_> {
    fn columns(&self) -> Vec<Column> {
        let mut columns: Vec<Column> = Vec::new();
        if self.sustained {
            columns.push((Metric::Sustained, "mean", |e| Some(e.figures.typical_ns())));
        }
        if let Some((&last, others)) = self.singles.split_last() {
            let median: fn(&Entry) -> Option<f64> = |e| Some(e.figures.p50_ns);
            columns.extend(others.iter().map(|&metric| (metric, "p50", median)));
            columns.push((last, "p0", |e| Some(e.figures.min_ns)));
            columns.push((last, "p50", median));
            columns.push((last, "p99", |e| supports(e.figures.iterations, 100).then_some(e.figures.p99_ns)));
            columns.push((last, "p99.9", |e| supports(e.figures.iterations, 1000).then_some(e.figures.p999_ns)));
            columns.push((last, "max", |e| Some(e.figures.max_ns)));
        }
        columns
    }

    fn line(&self, offset: &str, size: &str, figures: &[String], samples: &str, rate: &str) -> String {
        let offset = if self.offsets { format!("{offset:>8} ") } else { String::new() };
        let figures: String = figures.iter().map(|text| format!(" {text:>9}")).collect();
        format!("{offset}{size:>6}{figures} {samples:>7} {rate:>6}")
    }
}

impl Layout for Times<'_> {
    fn titles(&self) -> Vec<String> {
        let columns = self.columns();
        let all = |text: fn(&Column) -> &'static str| columns.iter().map(|c| text(c).to_owned()).collect::<Vec<_>>();
        vec![
            self.line("", "", &all(|(metric, ..)| metric.title()), "", "").trim_end().to_owned(),
            self.line("offset", "size", &all(|(_, statistic, _)| statistic), "samples", "rate"),
            self.line("[B]", "[B]", &all(|_| "[ns]"), "[calls]", "[GB/s]"),
        ]
    }

    /// Percentiles that the samples cannot support are left out.
    fn row(&self, entries: &[Entry]) -> String {
        let of = |wanted: Metric| entries.iter().find(|entry| entry.metric == wanted);
        let Some(last) = entries.last() else { return String::new() };
        let figures: Vec<String> = self
            .columns()
            .iter()
            .map(|(metric, _, figure)| of(*metric).and_then(figure).map_or_else(|| "-".to_owned(), nanoseconds))
            .collect();
        let rate = gigabytes_per_second(of(Metric::Sustained).unwrap_or(last));
        let offset = Binary(last.offset).to_string();
        self.line(&offset, &Binary(last.bytes).to_string(), &figures, &last.figures.iterations.to_string(), &rate)
    }
}

/// What goes over the bus in a second.
#[derive(Debug, Clone, Copy)]
pub struct Rates;

impl Rates {
    fn line(columns: [&str; 8]) -> String {
        let [direction, method, offset, size, mb, gb, time, samples] = columns;
        format!("{direction:9} {method:20} {offset:>8} {size:>7} {mb:>12} {gb:>10} {time:>12} {samples:>8}")
    }
}

impl Layout for Rates {
    fn titles(&self) -> Vec<String> {
        vec![
            Self::line(["direction", "method", "offset", "size", "bandwidth", "bandwidth", "time/copy", "samples"]),
            Self::line(["", "", "[B]", "[B]", "[MB/s 2^20]", "[GB/s 1e9]", "[ns]", "[calls]"]),
        ]
    }

    fn row(&self, entries: &[Entry]) -> String {
        let Some(entry) = entries.first() else { return String::new() };
        Self::line([
            entry.direction.name(),
            &entry.label(),
            &Binary(entry.offset).to_string(),
            &Binary(entry.bytes).to_string(),
            &rate(entry, 1024.0 * 1024.0 / 1e9),
            &rate(entry, 1.0),
            &nanoseconds(entry.figures.typical_ns()),
            &entry.figures.iterations.to_string(),
        ])
    }
}

/// A time: tenths below a microsecond, whole nanoseconds above, a power of ten from 1 s.
#[must_use]
pub fn nanoseconds(ns: f64) -> String {
    match ns {
        ns if ns < 999.95 => format!("{ns:.1}"),
        ns if ns < 1e9 => u64_of_f64(ns).to_string(),
        ns => format!("{ns:.3e}"),
    }
}

/// Bytes over typical time, decimal.
fn gigabytes_per_second(entry: &Entry) -> String {
    rate(entry, 1.0)
}

/// Bytes over typical time in units of so many bytes per nanosecond, with about four digits.
fn rate(entry: &Entry, unit: f64) -> String {
    let rate = f64_of(entry.bytes) / entry.figures.typical_ns() / unit;
    match rate {
        // Faster than the clock resolves.
        rate if !rate.is_finite() => "-".to_owned(),
        rate if rate < 10.0 => format!("{rate:.3}"),
        rate if rate < 100.0 => format!("{rate:.2}"),
        rate if rate < 1000.0 => format!("{rate:.1}"),
        rate => u64_of_f64(rate).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Direction::{self, DeviceToHost, HostToDevice};
    use super::super::report::tests::entry;
    use super::*;

    const READS: Times<'static> = Times { offsets: false, sustained: true, singles: &[Metric::Single] };
    const WRITES: Times<'static> = Times { offsets: true, sustained: true, singles: &[Metric::Issue, Metric::Drained] };

    fn cell(times: Times<'_>, direction: Direction, bytes: u64, ns: u64, calls: u64) -> Vec<Entry> {
        let metrics = std::iter::once(Metric::Sustained).chain(times.singles.iter().copied());
        let mut cell: Vec<_> = metrics.map(|metric| entry(direction, "bar1", metric, bytes, ns)).collect();
        cell.iter_mut().for_each(|entry| entry.figures.iterations = calls);
        cell
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn columns_line_up_within_100() {
        for times in [READS, WRITES] {
            let titles = times.titles();
            let rows = [
                times.row(&cell(times, HostToDevice, 1, 0, 10_000)),
                times.row(&cell(times, HostToDevice, 64, 175, 10_000)),
                times.row(&cell(times, DeviceToHost, 16 << 20, 17_800_000, 20)),
                times.row(&cell(times, DeviceToHost, 1 << 30, 9_999_999_999, 9_999_999)),
            ];
            for line in rows.iter().chain(&titles[1..]) {
                assert!(line.len() <= 100, "{} columns: {line}", line.len());
                assert_eq!(line.len(), titles[1].len(), "{line}");
            }
            // Right-aligned: every title's last character stands over a value's last character.
            let ends = |line: &str| -> Vec<usize> {
                let pairs = line.as_bytes().windows(2).enumerate();
                pairs.filter(|(_, pair)| pair[0] != b' ' && pair[1] == b' ').map(|(at, _)| at).collect()
            };
            rows.iter().for_each(|row| assert_eq!(ends(row), ends(&titles[1]), "{row}"));
        }
    }

    #[test]
    fn metrics_are_named_above_their_figures() {
        let titles = WRITES.titles();
        assert_eq!(words(&titles[0]), ["sustained", "issue", "drained", "drained", "drained", "drained", "drained"]);
        assert_eq!(
            words(&titles[1]),
            ["offset", "size", "mean", "p50", "p0", "p50", "p99", "p99.9", "max", "samples", "rate"]
        );
    }

    #[test]
    fn every_title_fits_its_column() {
        let metrics = [Metric::Sustained, Metric::Issue, Metric::Drained, Metric::Single, Metric::GpuVisible];
        assert!(metrics.iter().all(|metric| metric.title().len() <= 9));
        let visible = Times { offsets: false, sustained: false, singles: &[Metric::GpuVisible] };
        assert_eq!(words(&visible.titles()[0]), ["visible"; 5]);
    }

    #[test]
    fn percentiles_need_samples() {
        let few = READS.row(&cell(READS, DeviceToHost, 64, 1050, 20));
        assert_eq!(words(&few), ["64", "1050", "1050", "1050", "-", "-", "1050", "20", "0.061"]);
        let many = READS.row(&cell(READS, DeviceToHost, 64, 1050, 1000));
        assert!(!many.contains('-'), "{many}");
    }

    #[test]
    fn without_a_sustained_figure_the_median_gives_the_rate() {
        let cold = Times { sustained: false, ..READS };
        let row = cold.row(&cell(READS, HostToDevice, 1000, 100, 1000)[1..]);
        assert_eq!(words(&row), ["1000", "100.0", "100.0", "100.0", "100.0", "100.0", "1000", "10.00"]);
        assert_eq!(words(&cold.titles()[0]), ["single"; 5]);
    }

    #[test]
    fn both_units_of_bandwidth() {
        let row = Rates.row(&cell(READS, HostToDevice, 1 << 20, 100_000, 1000));
        assert_eq!(words(&row), ["h2d", "bar1", "0", "1Mi", "10000", "10.49", "100000", "1000"]);
        assert_eq!(Rates.row(&cell(READS, HostToDevice, 64, 0, 1000)).split_whitespace().nth(4), Some("-"));
        Rates.titles().iter().for_each(|line| assert!(line.len() <= 100 && line.len() == row.len(), "{line}"));
    }

    #[test]
    fn figures_keep_sensible_digits() {
        assert_eq!(nanoseconds(3.25), "3.2");
        assert_eq!(nanoseconds(999.9), "999.9");
        assert_eq!(nanoseconds(999.96), "1000");
        assert_eq!(nanoseconds(17_812_345.6), "17812346");
        assert_eq!(nanoseconds(1.5e9), "1.500e9");
    }
}
