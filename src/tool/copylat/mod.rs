//! `gdrcopy_copylat`: how long a copy takes, by size, direction and method.
//!
//! `args` turns the command line into a plan, `contenders` finds what of it can be measured here, `tables` measures.

use std::ffi::OsString;
use std::process::ExitCode;

use self::args::{Args, MethodFlag, Plan};
use self::contenders::Contenders;
use self::tables::Subject;
use self::visible::Listener;
use super::bench::{Bench, Loops};
use super::fail::{self, Failure};
use super::measure::Sampler;
use super::method::Method;
use super::plot;
use super::quickest;
use super::report::{Direction, Report};
use super::rig::{self, BANNER, Rig};
use super::series::{RUN, Series, hiccups, row_time};
use super::table::Times;
use super::verdict;

mod args;
mod calibrate;
mod contenders;
mod tables;
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
    // Whatever starts threads comes before this one is kept on its CPU.
    rig::approach(&args.common, &rig.gpu);
    let contenders = Contenders::new(&plan, &rig)?;
    let wants_echo = !args.no_echo
        && contenders.bar1
        && plan.terms.loops == Loops::All
        && plan.terms.directions().any(|direction| direction == Direction::HostToDevice);
    let listener = wants_echo.then(|| Listener::new(&rig)).and_then(|listener| {
        let explain = |failure: &Failure| fail::say(TOOL, &format!("no echo, so nothing is GPU-visible: {failure}"));
        listener.inspect_err(explain).ok()
    });
    let (host, clock) = rig.settle(&args.common, &mapping)?;
    let mut report = Report::new(TOOL, host, &mapping, rig.session.backend(), &clock);

    // Writes can also be posted, and be answered.
    let of_writes = if contenders.bar1 { 1 + usize::from(listener.is_some()) } else { 0 };
    let more = |direction| if direction == Direction::HostToDevice { of_writes } else { 0 };
    let tables = |direction| contenders.tables_per_direction() + more(direction);
    let rows = plan.places.len() * plan.terms.directions().map(tables).sum::<usize>();

    let mut sampler = Sampler::new(&clock, RUN);
    let (hiccups, hiccups_line) = hiccups(&mut sampler);
    report.hiccups = Some(hiccups);
    let mut header = report.header();
    header.push(hiccups_line);
    header.extend(contenders.in_words());
    header.push(format!("Rows      {}", plan.terms.in_words(row_time(rows))));
    header.extend(plan.columns_in_words(listener.is_some()).iter().map(|text| format!("Columns   {text}")));
    header.iter().try_for_each(|line| sinks.screen.line(line))?;
    sinks.begin(rows);

    let mut bench = Bench::new(plan.terms, &rig.buffer, sampler)?;
    let outcome = {
        let series =
            Series { screen: &sinks.screen, places: &plan.places, rows_left: rows, is_emulated: rig.is_emulated() };
        let listener = listener.as_ref();
        let subject = Subject { plan: &plan, rig: &rig, mapping: &mapping, listener, contenders: &contenders };
        tables::measure(&subject, series, &mut bench, &mut report.results)
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

impl Plan {
    fn table<M: Method>(&self, method: &M, direction: Direction) -> Times<'static> {
        Times {
            offsets: self.has_offsets,
            sustained: self.terms.loops != Loops::Cold && method.sustains(),
            singles: method.singles(direction),
        }
    }

    /// What the columns say.
    fn columns_in_words(&self, has_echo: bool) -> Vec<&'static str> {
        let mut lines = Vec::with_capacity(3);
        lines.push(match self.terms.loops {
            Loops::Cold => "all one at a time, caches cold",
            _ => "sustained: back to back, time over calls; the others: one at a time",
        });
        if self.methods.contains(&MethodFlag::Bar1)
            && self.terms.directions().any(|direction| direction == Direction::HostToDevice)
        {
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
    let results = &report.results;
    let mut lines = Vec::new();
    if quickest::is_due(results) {
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            let table = quickest::table(results, direction);
            if table.is_empty() {
                continue;
            }
            lines.push(String::new());
            lines.extend(is_emulated.then(|| BANNER.to_owned()));
            lines.push(format!("{}, side by side: {}", direction.in_words(), quickest::describe(results)));
            lines.extend(table);
        }
        lines.push(String::new());
        lines.extend(quickest::in_words(results));
    } else {
        lines.push(String::new());
        lines.extend(verdict::crossovers(results));
    }
    if !is_emulated {
        lines.extend(verdict::advice(results));
    }
    if results.iter().any(|entry| entry.figures.iterations < 1000) {
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
