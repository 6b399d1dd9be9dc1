//! What was found: figures, comparisons and verdicts, as text and as JSON (schema 1 of the tools, with lists of its own).

use gdrcopy::Mapping;
use gdrcopy::tool::ab::{Estimate, Rounds};
use gdrcopy::tool::clock::Clock;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::size_in_words;
use gdrcopy::tool::host::Host;
use gdrcopy::tool::output::Screen;
use gdrcopy::tool::report::{Direction, MappingReport, Metric, SCHEMA};
use gdrcopy::tool::rig::Rig;
use gdrcopy::tool::stats::nanoseconds;
use serde::Serialize;

use crate::TOOL;

/// Where a figure belongs.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Place {
    pub(crate) part: &'static str,
    pub(crate) direction: Direction,
    pub(crate) metric: Metric,
    pub(crate) bytes: u64,
}

/// What one arm took.
#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    #[serde(flatten)]
    pub(crate) place: Place,
    pub(crate) method: String,
    /// Of the rounds' figures: smallest, median with its 95 % interval, high percentiles, largest.
    pub(crate) min_ns: f64,
    pub(crate) p50_ns: f64,
    pub(crate) p50_low_ns: f64,
    pub(crate) p50_high_ns: f64,
    pub(crate) p99_ns: f64,
    pub(crate) p999_ns: f64,
    pub(crate) max_ns: f64,
    pub(crate) rounds: usize,
    /// Calls timed, all rounds together.
    pub(crate) iterations: u64,
    /// The bytes were compared on the other side.
    pub(crate) verified: bool,
}

/// One arm over another, with its 95 % interval.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    #[serde(flatten)]
    pub(crate) place: Place,
    pub(crate) method: String,
    pub(crate) over: String,
    pub(crate) ratio: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// The same arm twice.
    pub(crate) is_noise: bool,
}

/// What each of several mappings of one backend took.
#[derive(Debug, Serialize)]
pub(crate) struct Windows {
    #[serde(flatten)]
    pub(crate) place: Place,
    pub(crate) method: &'static str,
    /// Of each window, over its rounds.
    pub(crate) medians_ns: Vec<f64>,
    pub(crate) rounds: usize,
}

/// A target and what came of it.
#[derive(Debug, Serialize)]
pub(crate) struct Verdict {
    pub(crate) part: &'static str,
    pub(crate) target: &'static str,
    pub(crate) limit: f64,
    /// Larger is better.
    pub(crate) is_floor: bool,
    pub(crate) unit: &'static str,
    pub(crate) measured: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Where, for the worst of many.
    pub(crate) detail: String,
    /// Not only the figure but its whole interval must keep the limit.
    pub(crate) is_by_interval: bool,
    /// Absent on emulated GPUs.
    pub(crate) met: Option<bool>,
}

/// What could not be measured here.
#[derive(Debug, Serialize)]
pub(crate) struct Skipped {
    pub(crate) part: &'static str,
    pub(crate) why: String,
}

/// The rows of one size in the grid of small reads: over all offsets.
#[derive(Debug, Serialize)]
pub(crate) struct GridRow {
    pub(crate) bytes: u32,
    pub(crate) min_ns: f64,
    pub(crate) median_ns: f64,
    pub(crate) max_ns: f64,
    pub(crate) max_at_offset: u32,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Findings {
    pub(crate) results: Vec<Figure>,
    pub(crate) comparisons: Vec<Comparison>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) windows: Vec<Windows>,
    pub(crate) grid: Vec<GridRow>,
    pub(crate) verdicts: Vec<Verdict>,
    pub(crate) skipped: Vec<Skipped>,
}

/// A limit that a figure must keep.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    AtMost(f64),
    /// With its whole interval.
    SurelyAtMost(f64),
    AtLeast(f64),
}

impl Findings {
    /// Keeps what an arm took; `calls` per round, each of which counts as one.
    pub(crate) fn figure(&mut self, place: Place, method: &str, taken: &Arm<'_>, verified: bool) -> Estimate {
        let mut times = taken.rounds.times(taken.index).to_vec();
        times.sort_unstable_by(f64::total_cmp);
        let scale = |ns: Option<&f64>| ns.map_or(f64::NAN, |ns| ns / taken.per_call);
        // What one in so many exceeds; the largest where there are fewer.
        let beyond = |one_in: usize| scale(times.iter().nth_back(times.len() / one_in));
        let median = taken.rounds.median(taken.index).map(|ns| scale(Some(&ns)));
        self.results.push(Figure {
            place,
            method: method.to_owned(),
            min_ns: scale(times.first()),
            p50_ns: median.value,
            p50_low_ns: median.low,
            p50_high_ns: median.high,
            p99_ns: beyond(100),
            p999_ns: beyond(1000),
            max_ns: scale(times.last()),
            rounds: times.len(),
            iterations: u64::try_from(times.len()).unwrap_or(u64::MAX).saturating_mul(u64::from(taken.calls)),
            verified,
        });
        median
    }

    pub(crate) fn compare(&mut self, place: Place, method: &str, over: &str, ratio: Estimate) {
        let (method, over) = (method.to_owned(), over.to_owned());
        let Estimate { value: ratio, low, high } = ratio;
        let is_noise = method == over;
        self.comparisons.push(Comparison { place, method, over, ratio, low, high, is_noise });
    }

    pub(crate) fn judge(
        &mut self,
        part: &'static str,
        target: &'static str,
        limit: Target,
        unit: &'static str,
        measured: Estimate,
        detail: String,
    ) {
        let Estimate { value, low, high } = measured;
        let is_by_interval = matches!(limit, Target::SurelyAtMost(_));
        let (limit, is_floor, met) = match limit {
            Target::AtMost(limit) => (limit, false, value <= limit),
            Target::SurelyAtMost(limit) => (limit, false, high <= limit),
            Target::AtLeast(limit) => (limit, true, value >= limit),
        };
        self.verdicts.push(Verdict {
            part,
            target,
            limit,
            is_floor,
            unit,
            measured: value,
            low,
            high,
            detail,
            is_by_interval,
            met: Some(met),
        });
    }

    /// The targets that were not met, or not judged.
    pub(crate) fn unmet(&self) -> impl Iterator<Item = &'static str> {
        self.verdicts.iter().filter(|verdict| verdict.met != Some(true)).map(|verdict| verdict.target)
    }

    /// An emulated GPU meets no target and misses none.
    pub(crate) fn dismiss_verdicts(&mut self) {
        self.verdicts.iter_mut().for_each(|verdict| verdict.met = None);
    }

    pub(crate) fn skip(&mut self, screen: &Screen, part: &'static str, why: String) -> Result<(), Failure> {
        screen.line(&format!("{part}: SKIPPED, {why}"))?;
        self.skipped.push(Skipped { part, why });
        Ok(())
    }
}

/// An arm of a comparison that has been run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arm<'a> {
    pub(crate) rounds: &'a Rounds,
    pub(crate) index: usize,
    /// Calls in a round.
    pub(crate) calls: u32,
    /// Messages in a call.
    pub(crate) per_call: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: u32,
    tool: &'static str,
    version: &'static str,
    backend: String,
    pub(crate) host: Host,
    mapping: MappingReport,
    timer_overhead_ns: f64,
    /// The run was interrupted: parts are missing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) partial: bool,
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) found: Findings,
}

impl Report {
    pub(crate) fn new(host: Host, rig: &Rig, mapping: &Mapping<'_>, clock: &Clock) -> Self {
        Self {
            schema: SCHEMA,
            tool: TOOL,
            version: env!("CARGO_PKG_VERSION"),
            backend: rig.session.backend().to_string(),
            host,
            mapping: MappingReport {
                memory_type: mapping.mapping_type().to_string(),
                bytes: u64::try_from(mapping.len()).unwrap_or(u64::MAX),
                routine: mapping.routine().name().to_owned(),
            },
            timer_overhead_ns: nanoseconds(clock.overhead_ps()),
            partial: false,
            seconds: 0.0,
            found: Findings::default(),
        }
    }

    pub(crate) fn header(&self) -> Vec<String> {
        let host = &self.host;
        let known = |facts: &[Option<String>]| facts.iter().flatten().cloned().collect::<Vec<_>>().join(", ");
        let link = host.link_generation.zip(host.link_width);
        let gpu = [
            host.gpu.clone(),
            host.pci.clone(),
            link.map(|(generation, width)| format!("PCIe gen {generation} x{width}")),
            host.driver.as_ref().map(|version| format!("driver {version}")),
        ];
        let cpu = [
            host.cpu.map(|cpu| format!("CPU {cpu}")),
            host.cpu_model.clone(),
            host.virtual_machine.then(|| "virtual machine".to_owned()),
            host.kernel.as_ref().map(|release| format!("kernel {release}")),
        ];
        let mapping = &self.mapping;
        vec![
            format!("GPU       {}", known(&gpu)),
            format!("Host      {}", known(&cpu)),
            format!(
                "Mapping   backend {}, {}, {}, routine {}",
                self.backend,
                mapping.memory_type,
                size_in_words(mapping.bytes),
                mapping.routine
            ),
            format!("Clock     {} ns for reading it are subtracted", self.timer_overhead_ns),
            "Figures   medians over interleaved rounds [95 % interval by bootstrap]".to_owned(),
        ]
    }

    /// What and where, in one line.
    pub(crate) fn title(&self) -> String {
        let host = &self.host;
        let gpu = host.gpu.as_deref().unwrap_or("unknown GPU");
        let cpu = host.cpu_model.as_deref().unwrap_or("unknown CPU");
        format!("{gpu}, {cpu}: backend {}, routine {}", self.backend, self.mapping.routine)
    }

    /// Every target with its verdict.
    pub(crate) fn verdict_table(&self) -> Vec<String> {
        let mut lines =
            vec![format!("{:<10}{:<52}{:>12}  {:<28}verdict", "part", "target", "limit", "measured [95 %]")];
        for verdict in &self.found.verdicts {
            let Verdict { part, target, limit, unit, .. } = verdict;
            let estimate = Estimate { value: verdict.measured, low: verdict.low, high: verdict.high };
            let sign = if verdict.is_floor { ">=" } else { "<=" };
            let limit = format!("{sign} {limit} {unit}");
            let word = match verdict.met {
                Some(true) => "met",
                Some(false) if estimate.spans(verdict.limit) && verdict.is_by_interval => "not shown by the interval",
                Some(false) if estimate.spans(verdict.limit) => "not met, within the interval",
                Some(false) => "not met",
                None => "not judged: emulated",
            };
            let detail = if verdict.detail.is_empty() { String::new() } else { format!(" ({})", verdict.detail) };
            lines.push(format!("{part:<10}{target:<52}{limit:>12}  {:<28}{word}{detail}", estimate.to_string()));
        }
        for skipped in &self.found.skipped {
            lines.push(format!("{:<10}SKIPPED: {}", skipped.part, skipped.why));
        }
        let unverified = self.found.results.iter().filter(|figure| !figure.verified).count();
        lines.push(match unverified {
            0 => {
                format!("{} figures, all with their bytes compared, in {:.1} s", self.found.results.len(), self.seconds)
            }
            n => format!("{n} of {} figures copied WRONG BYTES", self.found.results.len()),
        });
        lines
    }

    /// As one JSON object, indented, with a newline at the end.
    ///
    /// # Panics
    ///
    /// Never: no map, and no serialiser that fails. Figures that are none are `null`.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain structures serialise") + "\n"
    }
}
