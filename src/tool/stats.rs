//! What becomes of many samples: percentiles, never averages of buckets.

use hdrhistogram::Histogram;

use super::num::f64_of;

/// Samples in picoseconds: an HDR histogram (three significant digits) beside the exact extremes and sum.
#[derive(Debug, Clone)]
pub struct Samples {
    histogram: Histogram<u64>,
    min: u64,
    max: u64,
}

/// The figures of one measurement, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distribution {
    /// Shortest sample.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest sample.
    pub max: f64,
}

impl Samples {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        let mut histogram = Histogram::new_with_max(1 << 40, 3).expect("three digits up to a second are a valid shape");
        histogram.auto(true);
        Self { histogram, min: u64::MAX, max: 0 }
    }

    /// Adds a sample.
    pub fn record(&mut self, ps: u64) {
        self.histogram.saturating_record(ps);
        self.min = self.min.min(ps);
        self.max = self.max.max(ps);
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.histogram.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value at least a share `q` of the samples do not exceed, within a tenth of a per cent; 0 without samples.
    #[must_use]
    pub fn quantile(&self, q: f64) -> u64 {
        if self.is_empty() {
            return 0;
        }
        // The histogram answers with the upper edge of a bucket, which may lie outside what was recorded.
        self.histogram.value_at_quantile(q).clamp(self.min, self.max)
    }

    /// The figures to report; zeros without samples.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        let min = if self.is_empty() { 0 } else { self.min };
        Distribution {
            min: nanoseconds(min),
            p50: nanoseconds(self.quantile(0.5)),
            p99: nanoseconds(self.quantile(0.99)),
            p999: nanoseconds(self.quantile(0.999)),
            max: nanoseconds(self.max),
        }
    }
}

impl Default for Samples {
    fn default() -> Self {
        Self::new()
    }
}

/// Picoseconds as nanoseconds, rounded to a tenth: finer than any clock here resolves.
#[must_use]
pub fn nanoseconds(ps: u64) -> f64 {
    f64_of(ps.saturating_add(50) / 100) / 10.0
}

/// Whether `n` samples say anything about the quantile `1 - 1/one_in`: below that it is just the maximum.
#[must_use]
pub fn supports(n: u64, one_in: u64) -> bool {
    n >= one_in
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_a_known_set() {
        let mut samples = Samples::new();
        // In an order that is not sorted: 7919 is prime, so this visits 1..=10000 once each.
        (0..10_000_u64).for_each(|n| samples.record((n * 7919 % 10_000 + 1) * 1000));
        let d = samples.distribution();
        assert_eq!((samples.len(), d.min, d.max), (10_000, 1.0, 10_000.0));
        for (got, want) in [(d.p50, 5000.0), (d.p99, 9900.0), (d.p999, 9990.0)] {
            assert!((got - want).abs() <= want * 0.001, "{got} for {want}");
        }
    }

    #[test]
    fn one_sample_is_every_figure() {
        let mut samples = Samples::new();
        samples.record(1_234_567);
        let d = samples.distribution();
        assert_eq!([d.min, d.p50, d.p99, d.p999, d.max], [1234.6; 5]);
    }

    #[test]
    fn figures_are_ordered_even_at_the_edges_of_buckets() {
        let mut samples = Samples::new();
        [0, 3, 1_000_003, u64::MAX / 2, 17].into_iter().for_each(|ps| samples.record(ps));
        let d = samples.distribution();
        assert!(d.min <= d.p50 && d.p50 <= d.p99 && d.p99 <= d.p999 && d.p999 <= d.max, "{d:?}");
    }

    #[test]
    fn nothing_recorded_is_all_zero() {
        let d = Samples::new().distribution();
        assert_eq!([d.min, d.p50, d.p99, d.p999, d.max], [0.0; 5]);
    }

    #[test]
    fn tenths_of_a_nanosecond() {
        assert_eq!(nanoseconds(3249), 3.2);
        assert_eq!(nanoseconds(3250), 3.3);
        assert_eq!(nanoseconds(0), 0.0);
    }

    #[test]
    fn twenty_samples_have_no_p99() {
        assert!(!supports(20, 100) && supports(100, 100) && !supports(999, 1000));
    }
}
