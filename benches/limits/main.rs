//! The copy engine against the limits of the machine, in one run: every target with what was measured.
//!
//! `cargo bench --features tools,vulkan --bench limits -- --json limits.json --plot limits.svg`
//!
//! All figures are taken as `gdrcopy::tool::ab` says: arms interleaved in blocks on one mapping, ratios of medians with a
//! 95 % interval, an arm twice as the noise floor. Every part ends with a comparison of the bytes copied. Without a GPU it
//! runs on an emulated one, which shows that it works and nothing else.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use gdrcopy::Allocator;
use gdrcopy::tool::ab::Limit;
use gdrcopy::tool::cpu;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::interrupt;
use gdrcopy::tool::output::{Screen, Target};
use gdrcopy::tool::rig::{self, BANNER, Common, Rig};

use lab::Lab;
use parallel::Crews;
use report::{Findings, Report};

mod agent;
mod auto;
mod backends;
mod bare;
mod calls;
mod channel;
mod chosen;
mod grid;
mod lab;
mod parallel;
mod plot;
mod posted;
mod report;

pub(crate) const TOOL: &str = "limits";

/// Measures the copy engine against the limits of the machine and prints every target with its verdict.
#[derive(Parser, Debug)]
#[command(name = TOOL, version)]
struct Args {
    #[command(flatten)]
    common: Common,

    /// Parts to run, separated by commas [default: all]
    #[arg(long, value_name = "NAME,..", value_enum, value_delimiter = ',')]
    only: Vec<Part>,

    /// A twentieth of the time for each part: to see that it runs
    #[arg(long)]
    quick: bool,

    /// Fail unless every target was met
    #[arg(long)]
    strict: bool,

    /// Write the results as JSON, with - to standard output
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,

    /// Draw the results
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,

    /// Passed by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// A part of the run.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Messages of 64 bytes: posted, in batches, fenced one by one
    Posted,
    /// Reads of 1 to 256 bytes at every offset in a line
    Grid,
    /// Copies by several cores beside a bare loop on the same ones, and how soon workers sleep
    Parallel,
    /// The library's choice of routine against every other
    Chosen,
    /// What a call costs beside bare stores
    Calls,
    /// The push agent against every other way, alone and beside matrix products, and what it costs these
    Agent,
    /// Backend vulkan against backend rm
    Backends,
    /// Messages to a running kernel: round trips, rates, time one way
    Channel,
    /// The automatic copier against every method that it chooses from
    Auto,
}

impl Part {
    fn run(self, lab: &Lab<'_>, found: &mut Findings) -> Result<(), Failure> {
        match self {
            Self::Posted => posted::run(lab, found),
            Self::Grid => grid::run(lab, found),
            Self::Parallel => parallel::run(lab, found),
            Self::Chosen => chosen::run(lab, found),
            Self::Calls => calls::run(lab, found),
            Self::Agent => agent::run(lab, found),
            Self::Backends => backends::run(lab, found),
            Self::Channel => channel::run(lab, found),
            Self::Auto => auto::run(lab, found),
        }
    }
}

/// How much time there is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    is_quick: bool,
}

impl Pace {
    const SHARE: u32 = 20;

    /// For a comparison that may take `time` when it matters.
    pub(crate) fn limit(self, time: Duration) -> Limit {
        if self.is_quick { Limit { rounds: 10, time: time / Self::SHARE } } else { Limit { rounds: 1000, time } }
    }

    /// How often something of a fixed length is done.
    pub(crate) fn times(self, full: u32) -> u32 {
        if self.is_quick { (full / Self::SHARE).max(2) } else { full }
    }
}

fn main() -> ExitCode {
    rig::program(TOOL, std::env::args_os(), run)
}

fn run(args: &Args) -> Result<(), Failure> {
    let open = |path: &Option<PathBuf>| path.as_deref().map(Target::open).transpose();
    let (json, svg) = (open(&args.json)?, open(&args.plot)?);
    if svg.as_ref().is_some_and(Target::is_stdout) {
        return Err(Failure::usage("--plot needs a file; name one, such as --plot limits.svg"));
    }
    let screen = Screen::beside(json.iter());
    let begin = Instant::now();

    let mut common = args.common.clone();
    // A whole memory object of its own, which every backend maps.
    common.allocator.get_or_insert(Allocator::Buffer);
    let rig = Rig::new(TOOL, &common, lab::BUFFER)?;
    let pinned = rig.session.pin(&rig.buffer)?;
    let mapping = rig::map(&pinned, common.mapping_type)?;
    let wanted = if args.only.is_empty() { Part::value_variants() } else { &args.only };
    // Workers take CPUs of the process's own choice, and then this thread one that is left.
    let has_workers = wanted.iter().any(|part| matches!(part, Part::Parallel | Part::Agent | Part::Auto));
    let crews = if has_workers { Crews::hire(rig.gpu.pci, common.cpu) } else { Crews::default() };
    let cpus = cpu::allowed();
    common.cpu = crews.keep_off(common.cpu, rig.gpu.pci)?;
    let (host, clock) = rig.settle(&common, &mapping)?;

    let mut report = Report::new(host, &rig, &mapping, &clock);
    if rig.is_emulated() {
        screen.line(BANNER)?;
    }
    report.header().iter().try_for_each(|line| screen.line(line))?;
    let pace = Pace { is_quick: args.quick || rig.is_emulated() };
    let lab =
        Lab { clock: &clock, mapping: &mapping, rig: &rig, pace, screen: &screen, crews: &crews, cpus: cpus.as_ref() };
    for part in wanted {
        if interrupt::requested() {
            report.partial = true;
            break;
        }
        part.run(&lab, &mut report.found)?;
    }
    if rig.is_emulated() {
        report.found.dismiss_verdicts();
    }
    report.seconds = begin.elapsed().as_secs_f64();

    screen.line("")?;
    if rig.is_emulated() {
        screen.line(BANNER)?;
    }
    report.verdict_table().iter().try_for_each(|line| screen.line(line))?;
    if let Some(target) = json {
        target.write(&report.to_json())?;
    }
    if let Some(target) = svg {
        target.write(&plot::draw(&report)?)?;
    }
    mapping.unmap()?;
    interrupt::check()?;
    let open: Vec<&str> = report.found.unmet().collect();
    match open.as_slice() {
        [_, ..] if args.strict => Err(Failure::run(format!("not met: {}", open.join("; ")))),
        _ => Ok(()),
    }
}
