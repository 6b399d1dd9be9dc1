//! Messages to a running kernel and back: round trips, rates, and the time from one end to the other while messages come
//! at a rate; beside each the rival, whose kernel polls host memory, and the host alone.

mod far;
mod latency;
mod rate;
mod rounds;

use std::time::Duration;

use gdrcopy::channel::ChannelBuilder;
use gdrcopy::tool::ab::Estimate;
use gdrcopy::tool::cpu::CpuList;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::tool::stats::{Samples, nanoseconds, supports};

use crate::lab::Lab;
use crate::report::{Figure, Findings, Place};
use far::Far;

const PART: &str = "channel";
/// Payload of a line.
const LINE_BYTES: u64 = 48;
/// No kernel outlives a run that died by much.
const LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> Result<(), Failure> {
    let gpu = (!lab.rig.is_emulated()).then_some(lab.rig.gpu.ordinal);
    let far = Far::load(gpu)?;
    rounds::run(lab, &far, found)?;
    rate::run(lab, &far, found)?;
    latency::run(lab, &far, found)
}

/// The machine's CPUs, also those that this thread does not run on.
fn every_cpu() -> Option<CpuList> {
    std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?.trim().parse().ok()
}

fn builder(lab: &Lab<'_>) -> ChannelBuilder {
    ChannelBuilder::new().gpu(lab.rig.gpu.ordinal).kernel_limit(LIMIT)
}

/// The median in nanoseconds, with its 95 % interval: the ranks that the binomial distribution gives, by its normal
/// approximation.
fn median(samples: &Samples) -> Estimate {
    let count = f64::from(u32::try_from(samples.len()).unwrap_or(u32::MAX)).max(1.0);
    let away = 0.98 / count.sqrt();
    let [value, low, high] = [0.5, 0.5 - away, 0.5 + away].map(|q| nanoseconds(samples.quantile(q.clamp(0.0, 1.0))));
    Estimate { value, low, high }
}

/// A percentile as a figure without an interval.
fn exactly(value: f64) -> Estimate {
    Estimate { value, low: value, high: value }
}

/// Keeps a distribution and shows it.
fn keep(
    lab: &Lab<'_>,
    found: &mut Findings,
    (metric, bytes): (Metric, u64),
    method: &str,
    samples: &Samples,
    verified: bool,
) -> Result<(), Failure> {
    let (p50, d) = (median(samples), samples.distribution());
    let beyond = |figure, one_in| if supports(samples.len(), one_in) { figure } else { d.max };
    let place = Place { part: PART, direction: Direction::HostToDevice, metric, bytes };
    let (p99, p999) = (beyond(d.p99, 100), beyond(d.p999, 1000));
    found.results.push(Figure {
        place,
        method: method.to_owned(),
        min_ns: d.min,
        p50_ns: p50.value,
        p50_low_ns: p50.low,
        p50_high_ns: p50.high,
        p99_ns: p99,
        p999_ns: p999,
        max_ns: d.max,
        rounds: usize::try_from(samples.len()).unwrap_or(usize::MAX),
        iterations: samples.len(),
        verified,
    });
    let note = if verified { "" } else { "  WRONG BYTES" };
    lab.screen.line(&format!(
        "  {method:<46}{:>9.0}{:>9.0}{p99:>9.0}{p999:>9.0}{:>10.0}{:>9}{note}",
        d.min,
        p50.value,
        d.max,
        samples.len()
    ))
}

/// Above a table of [`keep`].
fn head(lab: &Lab<'_>, title: &str) -> Result<(), Failure> {
    lab.screen.line("")?;
    lab.screen.line(&format!(
        "{title}\n  {:<46}{:>9}{:>9}{:>9}{:>9}{:>10}{:>9}",
        "[ns]", "p0", "p50", "p99", "p99.9", "max", "samples"
    ))
}
