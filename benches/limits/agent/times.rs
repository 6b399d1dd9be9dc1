//! Times of single calls, one by one: tails are what is asked for here, and a median over blocks has none.

use gdrcopy::tool::ab::Estimate;

/// Sorted, in nanoseconds.
#[derive(Debug)]
pub(super) struct Times(Vec<f64>);

impl Times {
    pub(super) fn new(mut all: Vec<f64>) -> Self {
        all.sort_unstable_by(f64::total_cmp);
        Self(all)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn at(&self, rank: usize) -> f64 {
        self.0.get(rank.min(self.0.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }

    pub(super) fn min(&self) -> f64 {
        self.at(0)
    }

    pub(super) fn max(&self) -> f64 {
        self.at(usize::MAX)
    }

    /// What so many in a thousand do not exceed. The interval is by ranks: how many of so many calls lie below the true
    /// value is binomial, with a deviation of at most 1.96 standard deviations in 95 of 100 runs.
    pub(super) fn quantile(&self, per_mille: usize) -> Estimate {
        let n = self.0.len();
        let rank = n * per_mille / 1000;
        // 1.96 squared is 3.8416; shares are in thousandths.
        let reach = (n * per_mille * (1000 - per_mille) / 1000 * 38_416 / 10_000_000).isqrt();
        Estimate { value: self.at(rank), low: self.at(rank.saturating_sub(reach)), high: self.at(rank + reach) }
    }

    /// The 99th percentile over the median.
    pub(super) fn tail(&self) -> Estimate {
        let median = self.quantile(500).value;
        self.quantile(990).map(|ns| ns / median)
    }
}
