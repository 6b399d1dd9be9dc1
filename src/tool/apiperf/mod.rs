//! `gdrcopy_apiperf`: what pinning, mapping and their opposites cost, by size.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use serde::Serialize;

use self::bins::Histogram;
use super::clock::{Clock, Stop};
use super::fail::Failure;
use super::flags::{self, Binary, Values, size_in_words};
use super::interrupt;
use super::measure::Sampler;
use super::num::f64_of;
use super::outputs::{Outputs, PlotFlag, Sinks};
use super::plot::{self, Curve, Panel, Picture, Quantity};
use super::report::{Figures, Metric, Record, Report};
use super::rig::{self, Common, Rig, WantedType};
use super::series::{RUN, hiccups};
use super::stats::supports;
use crate::error::Error;
use crate::range::{DeviceRange, GPU_PAGE};
use crate::session::Session;
use crate::sys::num::{u64_of, usize_of};

mod bins;

const TOOL: &str = "gdrcopy_apiperf";

const DEFAULT_BUFFER: u64 = 16 << 20;

/// Measures what pinning and mapping GPU memory costs.
///
/// Each iteration pins, maps, asks for the facts of the mapping (get_info), unmaps and unpins.
#[derive(Parser, Debug, Clone)]
#[command(name = TOOL, version, verbatim_doc_comment)]
struct Args {
    #[command(flatten)]
    common: Common,

    /// Largest size; sizes double from 64 KiB up to it
    #[arg(short = 's', value_name = "BYTES", value_parser = flags::positive_bytes, default_value = "16M")]
    buffer: u64,

    /// Sizes in place of -s: 64K,1M or 64K-16M (doubling)
    #[arg(long, value_name = "LIST|A-B", value_parser = flags::sizes, conflicts_with = "buffer")]
    sizes: Option<Values>,

    /// Iterations per size
    #[arg(short = 'n', value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,

    /// Untimed iterations before them
    #[arg(short = 'w', value_name = "N", default_value_t = 10)]
    warm_up: u32,

    #[command(flatten)]
    outputs: Outputs,

    #[command(flatten)]
    plot: PlotFlag,
}

/// The calls of one iteration, in their order, by the names of upstream's columns.
const OPS: [&str; 5] = ["pin", "map", "get_info", "unmap", "unpin"];

/// The times of one call at one size.
#[derive(Debug, Clone, Serialize)]
struct Call {
    /// One of [`OPS`].
    op: &'static str,
    /// `bar1`: the calls that make a window of it.
    method: &'static str,
    metric: Metric,
    /// Size pinned.
    bytes: u64,
    #[serde(flatten)]
    figures: Figures,
    /// Ten bins of equal width from the shortest to the longest.
    histogram: Histogram,
}

impl Record for Call {
    const COLUMNS: &'static [&'static str] = &["op", "method", "metric", "bytes"];

    fn fields(&self) -> Vec<String> {
        vec![self.op.to_owned(), self.method.to_owned(), self.metric.name().to_owned(), self.bytes.to_string()]
    }

    fn figures(&self) -> &Figures {
        &self.figures
    }
}

/// Sizes from one GPU page up, doubling.
fn sizes(args: &Args) -> Result<Vec<u64>, Failure> {
    let sizes = match &args.sizes {
        Some(sizes) => sizes.0.clone(),
        None => {
            let page = u64_of(GPU_PAGE);
            let sizes = std::iter::successors(Some(page), |n| n.checked_mul(2));
            sizes.take_while(|&n| n <= args.buffer.max(page)).collect()
        }
    };
    match sizes.iter().find(|&&size| isize::try_from(size).is_err()) {
        Some(size) => Err(Failure::usage(format!("{size} bytes are more than an address space has; name less"))),
        None => Ok(sizes),
    }
}

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    rig::program(TOOL, args, run)
}

fn run(args: &Args) -> Result<(), Failure> {
    let sizes = sizes(args)?;
    let sinks = args.outputs.open_with(&args.plot)?;
    let largest = sizes.iter().copied().max().unwrap_or(DEFAULT_BUFFER);
    let rig = Rig::new(TOOL, &args.common, usize_of(largest))?;
    let pinned = rig.session.pin(&rig.buffer)?;
    let mapping = rig::map(&pinned, args.common.mapping_type)?;
    let (host, clock) = rig.settle(&args.common, &mapping)?;
    let mut report = Report::new(TOOL, host, &mapping, rig.session.backend(), &clock);
    mapping.unmap()?;
    pinned.unpin().map_err(Error::from)?;

    let (hiccups, hiccups_line) = hiccups(&mut Sampler::new(&clock, RUN));
    report.hiccups = Some(hiccups);
    let mut header = report.header();
    header.push(hiccups_line);
    header.push(format!("Rows      {} iterations after {} untimed ones", args.iterations, args.warm_up));
    header.iter().try_for_each(|line| sinks.screen.line(line))?;
    sinks.begin(sizes.len());
    let outcome = measure(args, &rig, &clock, &sizes, &sinks, &mut report.results);
    report.settle(outcome)?;
    for line in details(&report.results) {
        sinks.screen.line(&line)?;
    }
    sinks.finish(&report, || picture(&report))
}

/// Size after size, each a row of means.
fn measure(
    args: &Args,
    rig: &Rig,
    clock: &Clock,
    sizes: &[u64],
    sinks: &Sinks,
    results: &mut Vec<Call>,
) -> Result<(), Failure> {
    sinks.screen.line("")?;
    sinks.screen.banner(rig.is_emulated())?;
    sinks.screen.line("Means")?;
    sinks.screen.line(&means("Size(B)", OPS.map(|op| format!("{op}.Time(us)"))))?;
    for &bytes in sizes {
        sinks.screen.doing(&size_in_words(bytes));
        let range = DeviceRange::from(&rig.buffer).slice(..usize_of(bytes))?;
        let wanted = usize_of(u64::from(args.iterations));
        let mut times = OPS.map(|_| Vec::with_capacity(wanted.min(1 << 20)));
        let mut warm_up = args.warm_up;
        while times[0].len() < wanted {
            let once = iteration(&rig.session, &range, args.common.mapping_type, clock)?;
            interrupt::check()?;
            match once {
                _ if warm_up > 0 => warm_up -= 1,
                Some(once) => times.iter_mut().zip(once).for_each(|(times, ps)| times.push(ps)),
                // A move to another CPU makes the two ends of a time incomparable.
                None => {}
            }
        }
        let calls = OPS.iter().zip(times).map(|(op, times)| call(op, bytes, &times));
        let calls: Vec<Call> = calls.collect();
        let mean = |n: usize| format!("{:.6}", calls.get(n).map_or(0.0, |call| call.figures.typical_ns() / 1000.0));
        sinks.screen.line(&means(&bytes.to_string(), [0, 1, 2, 3, 4].map(mean)))?;
        sinks.screen.done();
        results.extend(calls);
    }
    Ok(())
}

fn means(size: &str, times: [String; 5]) -> String {
    let times: String = times.iter().map(|time| format!(" {time:>17}")).collect();
    format!("{size:>10}{times}")
}

/// One round of all calls: picoseconds of each, in the order of [`OPS`]; nothing if the thread changed its CPU.
fn iteration(
    session: &Session,
    range: &DeviceRange<'_>,
    wanted: WantedType,
    clock: &Clock,
) -> Result<Option<[u64; 5]>, Failure> {
    let first = clock.stop();
    let mut stops: [Stop; 5] = [first; 5];
    let mut starts = [0; 5];

    starts[0] = clock.start();
    let pinned = session.pin(range.clone())?;
    stops[0] = clock.stop();

    starts[1] = clock.start();
    let mapping = rig::map(&pinned, wanted)?;
    stops[1] = clock.stop();

    starts[2] = clock.start();
    std::hint::black_box(mapping.facts());
    stops[2] = clock.stop();

    starts[3] = clock.start();
    mapping.unmap()?;
    stops[3] = clock.stop();

    starts[4] = clock.start();
    pinned.unpin().map_err(Error::from)?;
    stops[4] = clock.stop();

    if stops.iter().any(|stop| stop.cpu != first.cpu) {
        return Ok(None);
    }
    let mut times = [0; 5];
    for ((time, start), stop) in times.iter_mut().zip(starts).zip(stops) {
        *time = clock.ps(stop.ticks.saturating_sub(start)).saturating_sub(clock.overhead_ps());
    }
    Ok(Some(times))
}

fn call(op: &'static str, bytes: u64, times: &[u64]) -> Call {
    Call {
        op,
        method: super::method::Bar1::NAME,
        metric: Metric::Call,
        bytes,
        figures: bins::figures(times),
        histogram: Histogram::new(times),
    }
}

/// The tables below that of the means: percentiles and histograms of every call.
fn details(results: &[Call]) -> Vec<String> {
    if results.is_empty() {
        return Vec::new();
    }
    let row = |size: &str, op: &str, figures: [String; 6], samples: &str| {
        let figures: String = figures.iter().map(|figure| format!(" {figure:>10}")).collect();
        format!("{size:>8} {op:<8}{figures} {samples:>8}")
    };
    let names = ["p0", "p50", "p99", "p99.9", "max", "mean"].map(str::to_owned);
    let units = [(); 6].map(|()| "[us]".to_owned());
    let mut lines = vec![
        String::new(),
        "Percentiles".to_owned(),
        row("size", "call", names, "samples"),
        row("[B]", "", units, "[calls]"),
    ];
    for call in results {
        let Figures { min_ns, p50_ns, p99_ns, p999_ns, max_ns, iterations, .. } = call.figures;
        let enough = |one_in, ns| supports(iterations, one_in).then_some(ns);
        let figures = [
            Some(min_ns),
            Some(p50_ns),
            enough(100, p99_ns),
            enough(1000, p999_ns),
            Some(max_ns),
            call.figures.mean_ns,
        ];
        let figures = figures.map(|ns| ns.map_or_else(|| "-".to_owned(), microseconds));
        lines.push(row(&Binary(call.bytes).to_string(), call.op, figures, &iterations.to_string()));
    }
    lines.push(String::new());
    lines.push("Histograms: calls in each of ten bins of equal width, from the shortest to the longest".to_owned());
    lines.push(format!("{:>8} {:<8} {:>10} {:>10}  {}", "size", "call", "from", "to", "calls in bins 1 to 10"));
    lines.push(format!("{:>8} {:<8} {:>10} {:>10}", "[B]", "", "[us]", "[us]"));
    for call in results {
        let Histogram { from_ns, to_ns, counts } = &call.histogram;
        let counts: String = counts.iter().map(|count| format!(" {count:>5}")).collect();
        let (from, to) = (microseconds(*from_ns), microseconds(*to_ns));
        lines.push(format!("{:>8} {:<8} {from:>10} {to:>10} {counts}", Binary(call.bytes).to_string(), call.op));
    }
    if results.iter().any(|call| call.figures.iterations < 1000) {
        lines.push(String::new());
        lines.push("-: too few samples for that percentile (p99 takes 100, p99.9 takes 1000: see -n).".to_owned());
    }
    lines
}

fn microseconds(ns: f64) -> String {
    if ns < 1e9 { format!("{:.3}", ns / 1000.0) } else { format!("{:.3e}", ns / 1000.0) }
}

fn picture(report: &Report<Call>) -> Result<String, Failure> {
    let (title, subtitles) = plot::titles(report);
    let curves = OPS.iter().enumerate().map(|(style, op)| {
        let of_op = report.results.iter().filter(|call| call.op == *op);
        let points = of_op.map(|call| (f64_of(call.bytes), call.figures.p50_ns)).filter(|(_, ns)| *ns > 0.0);
        Curve { name: format!("{op} (p50)"), style, points: points.collect() }
    });
    let curves = curves.filter(|curve| !curve.points.is_empty()).collect();
    let panel = Panel { title: "Time per call, by size pinned".to_owned(), quantity: Quantity::Time, curves };
    plot::draw(&Picture { title, subtitles, panels: vec![panel] })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Result<Args, String> {
        let args = std::iter::once("apiperf").chain(line.split_whitespace());
        Args::try_parse_from(args).map_err(|error| error.to_string())
    }

    #[test]
    fn upstream_defaults_and_flags() {
        let defaults = args("").unwrap();
        assert_eq!((defaults.iterations, defaults.warm_up, defaults.buffer), (100, 10, 16 << 20));
        assert_eq!(sizes(&defaults).unwrap().len(), 9);
        assert_eq!(sizes(&args("-s 1").unwrap()).unwrap(), [65_536], "a GPU page is the least");
        assert_eq!(sizes(&args("-s 200000").unwrap()).unwrap(), [65_536, 131_072]);
        assert_eq!(sizes(&args("--sizes 1,64K-256K").unwrap()).unwrap(), [1, 65_536, 131_072, 262_144]);
    }

    #[test]
    fn nonsense_is_refused() {
        for (line, why) in
            [("-n 0", "1.."), ("-n x", "invalid"), ("-s 0", "at least 1"), ("-s 1M --sizes 1M", "cannot")]
        {
            let error = args(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
        let error = sizes(&args("--sizes 17179869183G").unwrap()).unwrap_err().to_string();
        assert!(error.contains("address space"), "{error}");
    }

    #[test]
    fn tables_fit_the_screen() {
        let calls: Vec<Call> = OPS.iter().map(|op| call(op, 16 << 20, &[999_999_999_999, 1_000, 5_000_000])).collect();
        for line in details(&calls) {
            assert!(line.len() <= 100, "{}: {line}", line.len());
        }
        assert_eq!(means("Size(B)", OPS.map(|op| format!("{op}.Time(us)"))).len(), 100);
    }

    #[test]
    fn a_call_as_json_has_its_name_and_its_bins() {
        let json = serde_json::to_value(call("unmap", 65_536, &[1_000_000, 2_000_000, 2_000_000])).unwrap();
        assert_eq!((&json["op"], &json["metric"], &json["bytes"]), (&"unmap".into(), &"call".into(), &65_536.into()));
        assert_eq!(json["iterations"], 3);
        assert_eq!(json["histogram"]["counts"], serde_json::json!([1, 0, 0, 0, 0, 0, 0, 0, 0, 2]));
        assert_eq!((&json["min_ns"], &json["max_ns"]), (&1000.0.into(), &2000.0.into()));
    }
}
