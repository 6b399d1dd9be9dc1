//! `gdrcopy_copylat`: how long a copy takes, by size, direction and method.
//!
//! `args` turns the command line into a plan, `rig` sets up what is measured, `cell` measures one row by one
//! `method`, `verdict` says what it amounts to. Here they are put in order.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

use self::args::{Args, Plan};
use self::cell::{Bench, Cell, arena_bytes, host_memory};
use self::method::{Bar1, CudaMemcpy, Method};
use self::rig::Rig;
use super::clock::Clock;
use super::cpu::{self, CpuList};
use super::fail::{self, Failure};
use super::flags::size_in_words;
use super::host::{self, Host};
use super::measure::Sampler;
use super::output::{Screen, Target};
use super::report::{Direction, Entry, MappingReport, Report, SCHEMA};
use super::stats::nanoseconds;
use super::table::Table;
use crate::backend::BackendKind;
use crate::cuda::PinnedHost;
use crate::error::Error;
use crate::mapping::Mapping;
use crate::sys::num::u64_of;

mod args;
mod cell;
mod method;
mod rig;
mod verdict;

const TOOL: &str = "gdrcopy_copylat";
const BANNER: &str = "*** EMULATED GPU: host memory stands in for it. These figures say nothing about a GPU. ***";

/// Time for one row, shared by its loops.
const ROW: Duration = Duration::from_millis(150);
/// Time for all rows together.
const RUN: Duration = Duration::from_secs(25);
/// Traffic before the facts are read: an idle link and an idle GPU run slower than they can.
const WAKE_UP: Duration = Duration::from_millis(20);

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outcome = match Args::try_parse_from(args) {
        Ok(args) => run(&args),
        Err(error) => fail::clap_outcome(&error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(TOOL),
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let plan = Plan::new(args)?;
    let open = |path: &Option<PathBuf>| path.as_deref().map(Target::open).transpose();
    let (json, csv) = (open(&args.json)?, open(&args.csv)?);
    let screen = Screen::beside(json.iter().chain(&csv));

    let rig = Rig::new(args, plan.buffer)?;
    let pinned = rig.session.pin(&rig.buffer)?;
    let mapping = rig::map(&pinned, args.mapping_type)?;
    let backend = rig.session.backend();

    // Threads that CUDA started before this stay free to run elsewhere.
    let mut host = Host::read();
    settle_on_cpu(args.cpu, &rig, &mut host)?;
    let clock = Clock::calibrate();
    wake_up(&mapping)?;
    note_gpu(&mut host, &rig, args.device, &clock)?;
    let mut report = empty_report(host, &mapping, backend, &clock);

    let with_cuda = plan.cuda && backend != BackendKind::Emulated;
    if plan.cuda && !with_cuda {
        fail::say(TOOL, "-c is passed over: an emulated GPU has no cuMemcpy to compare with");
    }

    let methods = 1 + usize::from(with_cuda);
    let rows = plan.places.len() * plan.directions().count() * methods;
    let row_time = ROW.min(RUN / u32::try_from(rows).unwrap_or(u32::MAX));
    let mut header = header(&report);
    let [counts, columns] = plan.in_words(row_time);
    header.extend([format!("Rows      {counts}"), format!("Columns   {columns}")]);
    header.iter().try_for_each(|line| screen.line(line))?;

    let mut series =
        Series { plan: &plan, screen: &screen, rows_left: rows, is_emulated: backend == BackendKind::Emulated };
    let mut bench = Bench::new(&plan, &rig.buffer, Sampler::new(&clock, RUN))?;
    let mut arena = host_memory(arena_bytes(plan.largest()))?;
    let mut locked = with_cuda.then(|| PinnedHost::new(args.device, arena_bytes(plan.largest()))).transpose()?;
    for direction in plan.directions() {
        report.results.extend(series.run(&mut bench, &Bar1(&mapping), direction, &mut arena)?);
        if let Some(locked) = &mut locked {
            let rival = CudaMemcpy::new(&rig.buffer)?;
            report.results.extend(series.run(&mut bench, &rival, direction, locked.as_mut_slice())?);
        }
    }

    for line in closing(&report, &bench, with_cuda) {
        screen.line(&line)?;
    }
    if let Some(target) = json {
        target.write(&report.to_json())?;
    }
    if let Some(target) = csv {
        target.write(&report.to_csv())?;
    }
    mapping.unmap()?;
    Ok(())
}

fn empty_report(host: Host, mapping: &Mapping<'_>, backend: BackendKind, clock: &Clock) -> Report {
    Report {
        schema: SCHEMA,
        tool: TOOL,
        version: env!("CARGO_PKG_VERSION"),
        backend: backend.to_string(),
        host,
        mapping: MappingReport {
            memory_type: mapping.mapping_type().to_string(),
            bytes: u64_of(mapping.len()),
            routine: mapping.routine().name().to_owned(),
        },
        timer_overhead_ns: nanoseconds(clock.overhead_ps()),
        results: Vec::new(),
    }
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
    ) -> Result<Vec<Entry>, Failure> {
        let table = Table { offsets: self.plan.has_offsets };
        self.screen.line("")?;
        if self.is_emulated {
            self.screen.line(BANNER)?;
        }
        self.screen.line(&format!("{}: {}", direction.in_words(), M::describe(direction)))?;
        table.titles().iter().try_for_each(|line| self.screen.line(line))?;
        let mut all = Vec::with_capacity(2 * self.plan.places.len());
        for &(offset, bytes) in &self.plan.places {
            let time = ROW.min(bench.sampler.share(self.rows_left)) / self.plan.loops();
            let entries = bench.cell(method, direction, Cell { offset, bytes, time }, arena)?;
            self.rows_left -= 1;
            self.screen.line(&table.row(&entries))?;
            all.extend(entries);
        }
        Ok(all)
    }
}

/// Keeps this thread on the CPU asked for, or on one next to the GPU.
fn settle_on_cpu(wanted: Option<u32>, rig: &Rig, host: &mut Host) -> Result<(), Failure> {
    let local = rig.gpu.pci.and_then(|pci| host::local_cpus(&pci.to_string()));
    host.gpu_local_cpus = local.as_ref().map(CpuList::to_string);
    let chosen = match (wanted, host::preferred_cpu(local.as_ref())) {
        (Some(cpu), _) => {
            cpu::pin_to(cpu)?;
            cpu
        }
        (None, Some(cpu)) => {
            if let Err(failure) = cpu::pin_to(cpu) {
                // Some sandboxes forbid it; samples across a move are dropped, so the figures stand.
                fail::say(TOOL, &format!("{failure}; the thread may move"));
            }
            cpu
        }
        (None, None) => return Ok(()),
    };
    host.set_cpu(chosen);
    if let Some(local) = local.filter(|local| !local.contains(chosen)) {
        fail::say(
            TOOL,
            &format!("CPU {chosen} is not next to the GPU (CPUs {local} are): times will be longer; see --cpu"),
        );
    }
    Ok(())
}

fn wake_up(mapping: &Mapping<'_>) -> Result<(), Error> {
    let bytes = [0; 4096];
    let len = mapping.len().min(bytes.len());
    let begin = Instant::now();
    while begin.elapsed() < WAKE_UP {
        mapping.write(0, &bytes[..len])?;
        mapping.flush()?;
    }
    Ok(())
}

fn note_gpu(host: &mut Host, rig: &Rig, ordinal: usize, clock: &Clock) -> Result<(), Failure> {
    let gpu = rig::gpu(&rig.session, ordinal)?;
    host.clock = Some(clock.to_string());
    host.gpu = Some(gpu.name);
    host.gpu_ordinal = Some(u64_of(gpu.ordinal));
    host.pci = gpu.pci.map(|pci| pci.to_string());
    host.link_generation = gpu.link.map(|link| link.generation);
    host.link_width = gpu.link.map(|link| link.width);
    host.link_max_generation = gpu.link.map(|link| link.max_generation);
    host.link_max_width = gpu.link.map(|link| link.max_width);
    host.bar1_bytes = gpu.bar1.map(|bar1| bar1.total_bytes);
    host.driver = gpu.driver;
    host.rm_level = rig.session.rm_level().map(|level| level.to_string());
    host.allocator = Some(rig.buffer.allocator().to_string());
    Ok(())
}

/// The facts above the tables.
fn header(report: &Report) -> Vec<String> {
    fn join(facts: &[Option<String>]) -> String {
        facts.iter().flatten().cloned().collect::<Vec<_>>().join(", ")
    }
    let host = &report.host;
    let link = host.link_generation.zip(host.link_width).map(|(generation, width)| {
        let link = format!("PCIe gen {generation} x{width}");
        match (host.link_max_generation, host.link_max_width) {
            (Some(g), Some(w)) if (g, w) != (generation, width) => format!("{link} (of gen {g} x{w})"),
            _ => link,
        }
    });
    let gpu = [
        host.gpu_ordinal.zip(host.gpu.as_ref()).map(|(ordinal, name)| format!("{ordinal}: {name}")),
        host.pci.clone(),
        link,
        host.driver.as_ref().map(|version| format!("driver {version}")),
    ];
    let cpu = [
        host.cpu.zip(host.cpu_model.as_ref()).map(|(cpu, model)| format!("{cpu}: {model}")),
        host.virtual_machine.then(|| "virtual machine".to_owned()),
        host.cpu_governor.as_ref().map(|governor| format!("governor {governor}")),
        host.kernel.as_ref().map(|release| format!("kernel {release}")),
    ];
    let mapping = [
        Some(format!("backend {}", report.backend)),
        host.rm_level.as_ref().map(|level| format!("level {level}")),
        Some(report.mapping.memory_type.clone()),
        host.allocator.as_ref().map(|how| format!("{} of {how}", size_in_words(report.mapping.bytes))),
        Some(format!("routine {}", report.mapping.routine)),
    ];
    let clock = host.clock.as_deref().unwrap_or_default();
    vec![
        format!("{} {}", report.tool, report.version),
        format!("GPU       {}", join(&gpu)),
        format!("CPU       {}", join(&cpu)),
        format!("Mapping   {}", join(&mapping)),
        format!("Clock     {clock}; {} ns for reading it are subtracted", report.timer_overhead_ns),
    ]
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
    if report.results.iter().any(|entry| entry.iterations < 1000) {
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
