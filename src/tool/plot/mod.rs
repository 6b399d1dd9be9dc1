//! Results as a picture: times and bandwidths against the size, both axes logarithmic.

use std::collections::BTreeSet;

use super::fail::Failure;
use super::method::{Agent, AgentPinned, Auto, Bar1, CudaMemcpy, Parallel, Posted};
use super::num::f64_of;
use super::report::{Direction, Entry, Metric, Record, Report};
use super::rig::BANNER;
use crate::backend::BackendKind;

mod draw;

pub use draw::draw;

/// A picture: panels side by side, two in a row, over one legend.
#[derive(Debug, Clone)]
pub struct Picture {
    /// What was measured on what.
    pub title: String,
    /// The machine; a warning.
    pub subtitles: Vec<String>,
    /// The panels.
    pub panels: Vec<Panel>,
}

/// What an axis shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// Nanoseconds.
    Time,
    /// Bytes per nanosecond.
    Bandwidth,
}

/// One pair of axes. The horizontal one shows bytes.
#[derive(Debug, Clone)]
pub struct Panel {
    /// What the curves are.
    pub title: String,
    /// What the vertical axis shows.
    pub quantity: Quantity,
    /// The curves.
    pub curves: Vec<Curve>,
}

/// One curve.
#[derive(Debug, Clone)]
pub struct Curve {
    /// As in the legend.
    pub name: String,
    /// Colour and marker, the same in every picture; the order of the legend.
    pub style: usize,
    /// Bytes, and the quantity of the panel.
    pub points: Vec<(f64, f64)>,
}

/// The title of a picture, and what stands below it.
pub fn titles<R: Record>(report: &Report<R>) -> (String, Vec<String>) {
    let host = &report.host;
    let date = host.time_utc.as_deref().and_then(|time| time.get(..10)).unwrap_or("no date");
    let gpu = host.gpu.as_deref().unwrap_or("unknown GPU");
    let title = format!("{}: {gpu}, backend {}, {date}", report.tool, report.backend);
    let link = host.link_generation.zip(host.link_width);
    let facts = [
        host.cpu_model.clone(),
        link.map(|(generation, width)| format!("PCIe gen {generation} x{width}")),
        host.driver.as_ref().map(|version| format!("driver {version}")),
        Some(format!("routine {}", report.mapping.routine)),
        report.partial.then(|| "INTERRUPTED, PARTIAL".to_owned()),
    ];
    let mut subtitles = vec![facts.into_iter().flatten().collect::<Vec<_>>().join(", ")];
    if report.backend == BackendKind::Emulated.name() {
        subtitles.push(BANNER.to_owned());
    }
    (title, subtitles)
}

/// The curves of a picture of copies, in the order of the legend. Those of several threads come last.
const CURVES: [(&str, Metric, &str); 10] = [
    (Bar1::NAME, Metric::Sustained, "BAR1, a fence per call, back to back (mean)"),
    (Posted::NAME, Metric::Sustained, "BAR1 posted, one fence after many (mean)"),
    (CudaMemcpy::PINNED, Metric::Sustained, "cuMemcpy, page-locked host memory (mean)"),
    (CudaMemcpy::PAGEABLE, Metric::Sustained, "cuMemcpy, pageable host memory (mean)"),
    (Bar1::NAME, Metric::Drained, "BAR1, one write until drained (p50)"),
    (Bar1::NAME, Metric::GpuVisible, "BAR1, one write until a kernel sees it (p50)"),
    (Bar1::NAME, Metric::Single, "BAR1, one read (p50)"),
    (Agent::NAME, Metric::Single, "agent, any host memory (p50)"),
    (AgentPinned::NAME, Metric::Single, "agent, page-locked host memory (p50)"),
    (Auto::NAME, Metric::Sustained, "auto, any host memory (mean)"),
];

/// Copies: time and bandwidth in each direction, every method.
///
/// # Errors
///
/// There is nothing to draw.
pub fn copies(report: &Report<Entry>) -> Result<String, Failure> {
    picture_of_copies(report, &[Quantity::Time, Quantity::Bandwidth])
}

/// Copies: bandwidth in each direction, every method.
///
/// # Errors
///
/// There is nothing to draw.
pub fn bandwidths(report: &Report<Entry>) -> Result<String, Failure> {
    picture_of_copies(report, &[Quantity::Bandwidth])
}

fn picture_of_copies(report: &Report<Entry>, quantities: &[Quantity]) -> Result<String, Failure> {
    let (title, mut subtitles) = titles(report);
    let offset = report.results.first().map_or(0, |entry| entry.offset);
    if offset != 0 {
        subtitles.push(format!("Copies at offset {offset}"));
    }
    let mut panels = Vec::new();
    for &quantity in quantities {
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            let what = match quantity {
                Quantity::Time => "time per copy",
                Quantity::Bandwidth => "bandwidth",
            };
            let curves = curves(&report.results, direction, offset, quantity);
            if !curves.is_empty() {
                panels.push(Panel { title: format!("{}: {what}", direction.in_words()), quantity, curves });
            }
        }
    }
    draw(&Picture { title, subtitles, panels })
}

/// The curves of one panel: those at the first offset measured.
fn curves(results: &[Entry], direction: Direction, offset: u64, quantity: Quantity) -> Vec<Curve> {
    let of = |method: &str, metric: Metric, threads: Option<usize>| {
        let wanted = (direction, method, metric, offset, threads);
        let matching = results
            .iter()
            .filter(|entry| (entry.direction, entry.method, entry.metric, entry.offset, entry.threads) == wanted);
        let point = |entry: &Entry| {
            let (bytes, ns) = (f64_of(entry.bytes), entry.figures.typical_ns());
            (bytes, if quantity == Quantity::Time { ns } else { bytes / ns })
        };
        let mut points: Vec<_> = matching.map(point).filter(|(_, y)| y.is_finite() && *y > 0.0).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let is_sustained =
        |method: &str| results.iter().any(|entry| (entry.method, entry.metric) == (method, Metric::Sustained));
    // Copies that were made one at a time only, caches cold, are drawn by those.
    let typical = |method: &'static str, name: &str, style: usize, threads: Option<usize>| match is_sustained(method) {
        true => Curve { name: name.to_owned(), style, points: of(method, Metric::Sustained, threads) },
        false => {
            let points = of(method, Metric::Single, threads);
            Curve { name: name.replace("(mean)", "(p50)"), style, points }
        }
    };
    let single = CURVES
        .iter()
        .enumerate()
        // A single read repeats the sustained curve; it stands in only where there is none. Other single calls have no
        // bandwidth.
        .filter(|(_, (method, metric, _))| match metric {
            Metric::Sustained => true,
            Metric::Single => !is_sustained(method),
            _ => quantity == Quantity::Time || !is_sustained(method),
        })
        .map(|(style, &(method, metric, name))| match (method, metric) {
            (CudaMemcpy::PINNED | CudaMemcpy::PAGEABLE | Auto::NAME, _) => typical(method, name, style, None),
            _ => Curve { name: name.to_owned(), style, points: of(method, metric, None) },
        });
    let threads: BTreeSet<usize> = results.iter().filter_map(|entry| entry.threads).collect();
    let shared = threads.iter().enumerate().map(|(n, &threads)| {
        let plural = if threads == 1 { "" } else { "s" };
        let name = format!("BAR1, {threads} thread{plural} (mean)");
        typical(Parallel::NAME, &name, CURVES.len() + n, Some(threads))
    });
    single.chain(shared).filter(|curve| !curve.points.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{entry, report};
    use super::*;

    fn with(results: Vec<Entry>) -> Report {
        Report { results, ..report() }
    }

    fn sweep(direction: Direction, method: &'static str, metric: Metric) -> Vec<Entry> {
        (0..25).map(|n| entry(direction, method, metric, 1 << n, 100 + (1 << n) / 10)).collect()
    }

    #[test]
    fn a_panel_for_each_direction_and_quantity() {
        let mut results = sweep(Direction::HostToDevice, Bar1::NAME, Metric::Sustained);
        results.extend(sweep(Direction::HostToDevice, Bar1::NAME, Metric::Drained));
        results.extend(sweep(Direction::DeviceToHost, CudaMemcpy::PINNED, Metric::Sustained));
        let svg = copies(&with(results.clone())).unwrap();
        for text in [
            "Host to device: time per copy",
            "Device to host: bandwidth",
            "cuMemcpy, page-locked",
            "until drained",
            "64 KiB",
            "1 us",
            "1 GB/s",
            "EMULATED GPU",
            "backend emulated",
        ] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("pageable"), "no curve, no legend");
        let svg = bandwidths(&with(results)).unwrap();
        assert!(svg.contains("bandwidth") && !svg.contains("time per copy") && !svg.contains("drained"));
    }

    #[test]
    fn cold_copies_are_drawn_by_their_single_calls() {
        let svg = copies(&with(sweep(Direction::DeviceToHost, Bar1::NAME, Metric::Single))).unwrap();
        assert!(svg.contains("BAR1, one read (p50)") && !svg.contains("Host to device"));
    }

    #[test]
    fn every_method_is_in_one_picture() {
        let all = |sustained: Metric| {
            let by = |method, metric| sweep(Direction::DeviceToHost, method, metric);
            let mut results: Vec<Entry> =
                [Bar1::NAME, CudaMemcpy::PINNED, CudaMemcpy::PAGEABLE, Auto::NAME, Parallel::NAME]
                    .into_iter()
                    .flat_map(|method| by(method, sustained))
                    .chain(by(Agent::NAME, Metric::Single))
                    .chain(by(AgentPinned::NAME, Metric::Single))
                    .collect();
            results.iter_mut().filter(|entry| entry.method == Parallel::NAME).for_each(|entry| entry.threads = Some(8));
            copies(&with(results)).unwrap()
        };
        for (metric, statistic) in [(Metric::Sustained, "(mean)"), (Metric::Single, "(p50)")] {
            let svg = all(metric);
            for name in ["cuMemcpy, page-locked host memory", "auto, any host memory", "BAR1, 8 threads"] {
                assert!(svg.contains(&format!("{name} {statistic}")), "{name} {statistic}");
            }
            for name in ["agent, any host memory (p50)", "agent, page-locked host memory (p50)"] {
                // In the legend, once for all panels.
                assert_eq!(svg.matches(name).count(), 1, "{name}");
            }
        }
    }

    #[test]
    fn only_one_offset_is_drawn() {
        let mut results = sweep(Direction::HostToDevice, Bar1::NAME, Metric::Sustained);
        results.iter_mut().for_each(|entry| entry.offset = 7);
        let mut other = sweep(Direction::HostToDevice, Bar1::NAME, Metric::Sustained);
        results.append(&mut other);
        let svg = copies(&with(results)).unwrap();
        assert!(svg.contains("Copies at offset 7"));
    }

    #[test]
    fn nothing_is_no_picture() {
        let error = copies(&with(vec![])).unwrap_err().to_string();
        assert!(error.contains("nothing to draw"), "{error}");
    }
}
