//! `gdrcopy_copylat`: how long a copy takes, by size, direction and method.
//!
//! `args` turns the command line into a plan, `cell` measures one row by one
//! `method`, `verdict` says what it amounts to. Here they are put in order.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use self::args::{Args, Plan};
use self::cell::{Bench, Cell, arena_bytes, host_memory};
use self::method::{Bar1, CudaMemcpy, Method};
use super::fail::{self, Failure};
use super::interrupt;
use super::measure::Sampler;
use super::output::Screen;
use super::report::{Direction, Entry, Report};
use super::rig::{self, Rig};
use super::table::Table;
use crate::backend::BackendKind;
use crate::cuda::PinnedHost;

mod args;
mod cell;
mod method;
mod verdict;

const TOOL: &str = "gdrcopy_copylat";

/// Time for one row, shared by its loops.
const ROW: Duration = Duration::from_millis(150);
/// Time for all rows together.
const RUN: Duration = Duration::from_secs(25);

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    rig::program(TOOL, args, run)
}

fn run(args: &Args) -> Result<(), Failure> {
    let plan = Plan::new(args)?;
    let sinks = args.outputs.open()?;
    let screen = &sinks.screen;

    let rig = Rig::new(TOOL, &args.common, plan.buffer)?;
    let pinned = rig.session.pin(&rig.buffer)?;
    let mapping = rig::map(&pinned, args.common.mapping_type)?;
    let (host, clock) = rig.settle(&args.common, &mapping)?;
    let mut report = Report::new(TOOL, host, &mapping, rig.session.backend(), &clock);

    let with_cuda = plan.cuda && !rig.is_emulated();
    if plan.cuda && !with_cuda {
        fail::say(TOOL, "-c is passed over: an emulated GPU has no cuMemcpy to compare with");
    }

    let methods = 1 + usize::from(with_cuda);
    let rows = plan.places.len() * plan.directions().count() * methods;
    let row_time = ROW.min(RUN / u32::try_from(rows).unwrap_or(u32::MAX));
    let mut header = report.header();
    let [counts, columns] = plan.in_words(row_time);
    header.extend([format!("Rows      {counts}"), format!("Columns   {columns}")]);
    header.iter().try_for_each(|line| screen.line(line))?;

    let mut series = Series { plan: &plan, screen, rows_left: rows, is_emulated: rig.is_emulated() };
    let mut bench = Bench::new(&plan, &rig.buffer, Sampler::new(&clock, RUN))?;
    let mut arena = host_memory(arena_bytes(plan.largest()))?;
    let mut locked = with_cuda.then(|| PinnedHost::new(args.common.device, arena_bytes(plan.largest()))).transpose()?;
    let outcome = plan.directions().try_for_each(|direction| {
        series.run(&mut bench, &Bar1(&mapping), direction, &mut arena, &mut report.results)?;
        if let Some(locked) = &mut locked {
            let rival = CudaMemcpy::new(&rig.buffer)?;
            series.run(&mut bench, &rival, direction, locked.as_mut_slice(), &mut report.results)?;
        }
        Ok(())
    });
    report.partial = fail::is_partial(&outcome);
    if report.partial {
        sinks.write(&report)?;
        return outcome;
    }
    outcome?;

    for line in closing(&report, &bench, with_cuda) {
        screen.line(&line)?;
    }
    sinks.write(&report)?;
    mapping.unmap()?;
    Ok(())
}

/// The tables of one run.
struct Series<'a> {
    plan: &'a Plan,
    screen: &'a Screen,
    rows_left: usize,
    is_emulated: bool,
}

impl Series<'_> {
    /// Measures every size and offset of the plan by one method in one direction, printing rows as they come.
    fn run<M: Method>(
        &mut self,
        bench: &mut Bench<'_>,
        method: &M,
        direction: Direction,
        arena: &mut [u8],
        results: &mut Vec<Entry>,
    ) -> Result<(), Failure> {
        let table = Table { offsets: self.plan.has_offsets };
        self.screen.line("")?;
        self.screen.banner(self.is_emulated)?;
        self.screen.line(&format!("{}: {}", direction.in_words(), M::describe(direction)))?;
        table.titles().iter().try_for_each(|line| self.screen.line(line))?;
        for &(offset, bytes) in &self.plan.places {
            let time = ROW.min(bench.sampler.share(self.rows_left)) / self.plan.loops();
            let entries = bench.cell(method, direction, Cell { offset, bytes, time }, arena)?;
            // What the loops found until Ctrl-C is no whole row.
            interrupt::check()?;
            self.rows_left -= 1;
            self.screen.line(&table.row(&entries))?;
            results.extend(entries);
        }
        Ok(())
    }
}

/// What is said below the tables.
fn closing(report: &Report, bench: &Bench<'_>, with_cuda: bool) -> Vec<String> {
    let mut lines = vec![String::new()];
    if with_cuda {
        lines.extend(verdict::crossovers(&report.results, Bar1::NAME, CudaMemcpy::NAME));
    }
    if report.backend != BackendKind::Emulated.name() {
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
