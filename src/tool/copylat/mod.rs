//! `gdrcopy_copylat`: how long a copy takes, by size, direction and method.
//!
//! `args` turns the command line into a plan; here the tables that it asks for are put in order.

use std::ffi::OsString;
use std::process::ExitCode;

use self::args::{Args, Plan};
use self::visible::Listener;
use super::bench::{Bench, Loops, arena_bytes, host_memory};
use super::fail::{self, Failure};
use super::measure::Sampler;
use super::method::{Bar1, CudaMemcpy, HostSide, Method, Posted};
use super::plot;
use super::report::{Direction, Entry, Report};
use super::rig::{self, Rig};
use super::series::{RUN, Series, hiccups, row_time};
use super::table::Times;
use super::verdict;
use crate::cuda::PinnedHost;
use crate::mapping::Mapping;

mod args;
mod calibrate;
mod visible;

const TOOL: &str = "gdrcopy_copylat";

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    rig::program(TOOL, args, run)
}

fn run(args: &Args) -> Result<(), Failure> {
    if let Some(path) = &args.calibrate {
        return calibrate::run(args, path);
    }
    let plan = Plan::new(args)?;
    let sinks = args.outputs.open_with(&args.plot)?;

    let rig = Rig::new(TOOL, &args.common, plan.buffer)?;
    let pinned = rig.session.pin(&rig.buffer)?;
    let mapping = rig::map(&pinned, args.common.mapping_type)?;
    let wants_echo = !args.no_echo
        && plan.terms.loops == Loops::All
        && plan.terms.directions().any(|direction| direction == Direction::HostToDevice);
    let listener = wants_echo.then(|| Listener::new(&rig)).and_then(|listener| {
        let explain = |failure: &Failure| fail::say(TOOL, &format!("no echo, so nothing is GPU-visible: {failure}"));
        listener.inspect_err(explain).ok()
    });
    let (host, clock) = rig.settle(&args.common, &mapping)?;
    let mut report = Report::new(TOOL, host, &mapping, rig.session.backend(), &clock);

    let with_cuda = plan.cuda && !rig.is_emulated();
    if plan.cuda && !with_cuda {
        fail::say(TOOL, "-c is passed over: an emulated GPU has no cuMemcpy to compare with");
    }
    // Writes can also be posted, and be answered.
    let of_writes = 1 + usize::from(listener.is_some());
    let more = |direction| if direction == Direction::HostToDevice { of_writes } else { 0 };
    let tables = |direction| 1 + more(direction) + 2 * usize::from(with_cuda);
    let rows = plan.places.len() * plan.terms.directions().map(tables).sum::<usize>();

    let mut sampler = Sampler::new(&clock, RUN);
    let (hiccups, hiccups_line) = hiccups(&mut sampler);
    report.hiccups = Some(hiccups);
    let mut header = report.header();
    header.push(hiccups_line);
    header.push(format!("Rows      {}", plan.terms.in_words(row_time(rows))));
    header.extend(plan.columns_in_words(listener.is_some()).iter().map(|text| format!("Columns   {text}")));
    header.iter().try_for_each(|line| sinks.screen.line(line))?;
    sinks.begin(rows);

    let mut bench = Bench::new(plan.terms, &rig.buffer, sampler)?;
    let outcome = {
        let series =
            Series { screen: &sinks.screen, places: &plan.places, rows_left: rows, is_emulated: rig.is_emulated() };
        let locked = with_cuda.then(|| PinnedHost::new(args.common.device, arena_bytes(plan.terms.largest)));
        let subject = Subject { plan: &plan, rig: &rig, mapping: &mapping, listener: listener.as_ref() };
        measure(&subject, series, locked.transpose()?, &mut bench, &mut report.results)
    };
    report.settle(outcome)?;
    if !report.partial {
        for line in closing(&report, &bench, rig.is_emulated()) {
            sinks.screen.line(&line)?;
        }
    }
    sinks.finish(&report, || plot::copies(&report))?;
    mapping.unmap()?;
    Ok(())
}

/// What is measured, and on what.
struct Subject<'a> {
    plan: &'a Plan,
    rig: &'a Rig,
    mapping: &'a Mapping<'a>,
    listener: Option<&'a Listener>,
}

/// All tables. `locked` is there if `cuMemcpy` is to be timed, too.
fn measure(
    subject: &Subject<'_>,
    mut series: Series<'_>,
    mut locked: Option<PinnedHost>,
    bench: &mut Bench<'_>,
    results: &mut Vec<Entry>,
) -> Result<(), Failure> {
    let Subject { plan, rig, mapping, listener } = *subject;
    let mut arena = host_memory(arena_bytes(plan.terms.largest))?;
    for direction in plan.terms.directions() {
        let bar1 = Bar1(mapping);
        series.table(bench, (&bar1, direction), &plan.table(bar1.singles(direction)), &mut arena, results)?;
        if direction == Direction::HostToDevice {
            let posted = Posted(mapping);
            series.table(bench, (&posted, direction), &plan.table(posted.singles(direction)), &mut arena, results)?;
            if let Some(listener) = listener {
                visible::table((plan, rig, listener), mapping, &mut series, bench, &mut arena, results)?;
            }
        }
        let Some(locked) = &mut locked else { continue };
        for (host, arena) in [(HostSide::PageLocked, locked.as_mut_slice()), (HostSide::Pageable, &mut arena)] {
            let rival = CudaMemcpy::new(&rig.buffer, host)?;
            series.table(bench, (&rival, direction), &plan.table(rival.singles(direction)), arena, results)?;
        }
    }
    Ok(())
}

impl Plan {
    fn table<'a>(&self, singles: &'a [super::report::Metric]) -> Times<'a> {
        Times { offsets: self.has_offsets, sustained: self.terms.loops != Loops::Cold, singles }
    }

    /// What the columns say.
    fn columns_in_words(&self, has_echo: bool) -> Vec<&'static str> {
        let mut lines = Vec::with_capacity(3);
        lines.push(match self.terms.loops {
            Loops::Cold => "all one at a time, caches cold",
            _ => "sustained: back to back, time over calls; the others: one at a time",
        });
        if self.terms.directions().any(|direction| direction == Direction::HostToDevice) {
            lines.push("issue: until the call returns; drained: until MFENCE finds the core's buffers empty");
        }
        if has_echo {
            lines.push("visible: until a kernel that polls has seen the flag behind the data");
        }
        lines
    }
}

/// What is said below the tables.
fn closing(report: &Report, bench: &Bench<'_>, is_emulated: bool) -> Vec<String> {
    let mut lines = vec![String::new()];
    lines.extend(verdict::crossovers(&report.results));
    if !is_emulated {
        lines.extend(verdict::advice(&report.results));
    }
    if report.results.iter().any(|entry| entry.figures.iterations < 1000) {
        lines.push(
            "-: too few samples for that percentile (p99 takes 100, p99.9 takes 1000: see -w and -r).".to_owned(),
        );
    }
    if bench.sampler.was_cut() {
        lines.push(
            "The run's time was up: the last rows have fewer samples than 20. -w and -r set exact counts.".to_owned(),
        );
    }
    lines
}
