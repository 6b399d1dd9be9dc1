//! `gdrcopy_copybw`: how many bytes a second go through BAR1, by size, direction and method.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

use super::bench::{Bench, Loops, Terms, arena_bytes, host_memory};
use super::fail::{self, Failure};
use super::flags::{self, Values, size_in_words};
use super::measure::Sampler;
use super::method::{Bar1, CudaMemcpy, HostSide, Parallel};
use super::outputs::{Outputs, PlotFlag};
use super::plot;
use super::report::{Entry, Report};
use super::rig::{self, Common, Rig};
use super::series::{RUN, Series, hiccups, row_time};
use super::table::Rates;
use super::verdict;
use crate::cuda::PinnedHost;
use crate::mapping::Mapping;
use crate::range::GPU_PAGE;
use crate::sys::num::{u64_of, usize_of};
use crate::{CpuList, ParallelCopier};

const TOOL: &str = "gdrcopy_copybw";

const DEFAULT_BUFFER: u64 = 128 << 10;

/// Measures the bandwidth of copies between host and GPU memory.
///
/// Bytes over time, calls back to back. Every write is followed by its SFENCE, as in upstream's
/// program. MB/s counts in 2^20 bytes, as upstream's does; GB/s in 10^9. Every row ends with a
/// comparison of the bytes copied.
#[derive(Parser, Debug, Clone)]
#[command(name = TOOL, version, verbatim_doc_comment)]
struct Args {
    #[command(flatten)]
    common: Common,

    /// Size of the buffer, in whole 64 KiB [default: 128K, or what is needed]
    #[arg(short = 's', value_name = "BYTES", value_parser = flags::positive_bytes)]
    buffer: Option<u64>,

    /// Size of a copy [default: the buffer from the offset on]
    #[arg(short = 'c', value_name = "BYTES", value_parser = flags::positive_bytes)]
    copy_size: Option<u64>,

    /// Offset of the copies in the buffer
    #[arg(short = 'o', value_name = "BYTES", value_parser = flags::bytes, default_value = "0")]
    offset: u64,

    /// Sweep: copies of 1, 2, 4 .. bytes up to the size given by -c
    #[arg(short = 'l')]
    sweep: bool,

    /// Sizes of the copies, in place of -c and -l: 64,4K or 1-1M (doubling)
    #[arg(long, value_name = "LIST|A-B", value_parser = flags::sizes, conflicts_with_all = ["copy_size", "sweep"])]
    sizes: Option<Values>,

    /// Writes per size, 0 for none [default: 100000, or what fits in the time]
    ///
    /// A count given here is exact, however long it takes.
    #[arg(short = 'w', value_name = "N")]
    writes: Option<u64>,

    /// Reads per size, 0 for none [default: 10000, or what fits in the time]
    ///
    /// A count given here is exact, however long it takes.
    #[arg(short = 'r', value_name = "N")]
    reads: Option<u64>,

    /// Also copy with so many threads, this one included: 4 or 1,2,4,8
    #[arg(long, value_name = "LIST|A-B", value_parser = flags::sizes)]
    threads: Option<Values>,

    /// What to compare with: cuda (cuMemcpy, page-locked and pageable memory)
    #[arg(long, value_name = "WHAT", value_enum, hide_possible_values = true)]
    compare: Option<Compare>,

    /// Do not compare the bytes after the timed copies
    #[arg(long)]
    no_verify: bool,

    #[command(flatten)]
    outputs: Outputs,

    #[command(flatten)]
    plot: PlotFlag,
}

/// What else to time.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Compare {
    /// Synchronous cuMemcpy.
    Cuda,
}

/// What to measure.
#[derive(Debug)]
struct Plan {
    buffer: usize,
    places: Vec<(usize, usize)>,
    terms: Terms,
    /// Numbers of threads for parallel copies.
    threads: Vec<usize>,
}

impl Plan {
    fn new(args: &Args) -> Result<Self, Failure> {
        let offset = args.offset;
        let too_far = || Failure::usage("the offset and the size reach past the end of the address space");
        // What the copies need, before rounding, where the user named no buffer.
        let named = args.sizes.as_ref().map(Values::largest).or(args.copy_size);
        let needed = match named {
            Some(largest) => offset.checked_add(largest).ok_or_else(too_far)?,
            None => offset.checked_add(1).ok_or_else(too_far)?,
        };
        let buffer = args.buffer.unwrap_or_else(|| needed.max(DEFAULT_BUFFER));
        let buffer = buffer.checked_next_multiple_of(u64_of(GPU_PAGE)).filter(|&n| isize::try_from(n).is_ok());
        let buffer = buffer.ok_or_else(too_far)?;
        if needed > buffer {
            let largest = size_in_words(needed - offset);
            return Err(Failure::usage(format!(
                "a copy of {largest} at offset {offset} reaches past the end of the buffer of {}; make it larger with \
                 -s {needed}",
                size_in_words(buffer),
            )));
        }
        let largest = named.unwrap_or(buffer - offset);
        let sizes = match &args.sizes {
            Some(sizes) => sizes.clone(),
            None if args.sweep => Values::powers_up_to(largest),
            None => Values(vec![largest]),
        };
        let terms = Terms {
            writes: args.writes,
            reads: args.reads,
            loops: Loops::Sustained,
            verify: !args.no_verify,
            largest: usize_of(sizes.largest()),
        };
        terms.check()?;
        args.outputs.check_with(&args.plot)?;
        let places = sizes.0.iter().map(|&size| (usize_of(offset), usize_of(size))).collect();
        let threads = args.threads.iter().flat_map(|list| &list.0).map(|&threads| usize_of(threads)).collect();
        Ok(Self { buffer: usize_of(buffer), places, terms, threads })
    }
}

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    rig::program(TOOL, args, run)
}

fn run(args: &Args) -> Result<(), Failure> {
    let plan = Plan::new(args)?;
    let sinks = args.outputs.open_with(&args.plot)?;

    let rig = Rig::new(TOOL, &args.common, plan.buffer)?;
    let pinned = rig.session.pin(&rig.buffer)?;
    let mapping = rig::map(&pinned, args.common.mapping_type)?;
    rig::approach(&args.common, &rig.gpu);
    let copiers = plan.threads.iter().map(|&threads| {
        // As many for writes: what a third one adds is for the figures to show.
        ParallelCopier::builder().gpu(rig.gpu.pci).threads(threads).write_threads(threads).build()
    });
    let copiers = copiers.collect::<Result<Vec<_>, _>>()?;
    let (host, clock) = rig.settle(&args.common, &mapping)?;
    let mut report = Report::new(TOOL, host, &mapping, rig.session.backend(), &clock);

    let with_cuda = args.compare == Some(Compare::Cuda) && !rig.is_emulated();
    if args.compare.is_some() && !with_cuda {
        fail::say(TOOL, "--compare is passed over: an emulated GPU has no cuMemcpy to compare with");
    }
    let methods = 1 + copiers.len() + 2 * usize::from(with_cuda);
    let rows = plan.places.len() * plan.terms.directions().count() * methods;
    let mut sampler = Sampler::new(&clock, RUN);
    let (hiccups, hiccups_line) = hiccups(&mut sampler);
    report.hiccups = Some(hiccups);
    let mut header = report.header();
    header.push(hiccups_line);
    for copier in copiers.iter().filter(|copier| !copier.cpus().is_empty()) {
        let cpus: CpuList = copier.cpus().iter().copied().collect();
        header.push(format!("Threads   {}: this one and workers on CPUs {cpus}", copier.threads()));
    }
    header.push(format!("Rows      {}", plan.terms.in_words(row_time(rows))));
    header.iter().try_for_each(|line| sinks.screen.line(line))?;
    sinks.begin(rows);

    let mut bench = Bench::new(plan.terms, &rig.buffer, sampler)?;
    let outcome = {
        let is_emulated = rig.is_emulated();
        let series = Series { screen: &sinks.screen, places: &plan.places, rows_left: rows, is_emulated };
        let locked = with_cuda.then(|| PinnedHost::new(args.common.device, arena_bytes(plan.terms.largest)));
        let subject = Subject { rig: &rig, mapping: &mapping, copiers: &copiers };
        measure(&plan, &subject, series, locked.transpose()?, &mut bench, &mut report.results)
    };
    report.settle(outcome)?;
    if !report.partial {
        for line in closing(&report, &bench) {
            sinks.screen.line(&line)?;
        }
    }
    sinks.finish(&report, || plot::bandwidths(&report))?;
    mapping.unmap()?;
    Ok(())
}

/// What copies, and what is copied to and from.
struct Subject<'a> {
    rig: &'a Rig,
    mapping: &'a Mapping<'a>,
    copiers: &'a [ParallelCopier],
}

/// One table of everything. `locked` is there if `cuMemcpy` is to be timed, too.
fn measure(
    plan: &Plan,
    subject: &Subject<'_>,
    mut series: Series<'_>,
    mut locked: Option<PinnedHost>,
    bench: &mut Bench<'_>,
    results: &mut Vec<Entry>,
) -> Result<(), Failure> {
    let mut arena = host_memory(arena_bytes(plan.terms.largest))?;
    series.heading("Bandwidth, copies back to back", &Rates)?;
    for direction in plan.terms.directions() {
        series.rows(bench, (&Bar1(subject.mapping), direction), &Rates, &mut arena, results)?;
        for copier in subject.copiers {
            series.rows(bench, (&Parallel(subject.mapping, copier), direction), &Rates, &mut arena, results)?;
        }
        let Some(locked) = &mut locked else { continue };
        for (host, arena) in [(HostSide::PageLocked, locked.as_mut_slice()), (HostSide::Pageable, &mut arena)] {
            let rival = CudaMemcpy::new(&subject.rig.buffer, host)?;
            series.rows(bench, (&rival, direction), &Rates, arena, results)?;
        }
    }
    Ok(())
}

fn closing(report: &Report, bench: &Bench<'_>) -> Vec<String> {
    let mut lines = verdict::crossovers(&report.results);
    if bench.sampler.was_cut() {
        lines
            .push("The run's time was up: the last rows have fewer than 20 copies. -w and -r set exact counts.".into());
    }
    if !lines.is_empty() {
        lines.insert(0, String::new());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(line: &str) -> Result<Plan, String> {
        let args = std::iter::once("copybw").chain(line.split_whitespace());
        let args = Args::try_parse_from(args).map_err(|error| error.to_string())?;
        Plan::new(&args).map_err(|failure| failure.to_string())
    }

    #[test]
    fn upstream_defaults_and_flags() {
        let sizes = |line| plan(line).map(|plan| (plan.buffer, plan.places));
        assert_eq!(sizes(""), Ok((131_072, vec![(0, 131_072)])));
        assert_eq!(sizes("-s 1000"), Ok((65_536, vec![(0, 65_536)])), "the buffer is whole GPU pages");
        assert_eq!(sizes("-s 64K -c 100 -o 7"), Ok((65_536, vec![(7, 100)])));
        assert_eq!(sizes("-o 1K"), Ok((131_072, vec![(1024, 130_048)])));
        assert_eq!(sizes("-l -c 9"), Ok((131_072, vec![(0, 1), (0, 2), (0, 4), (0, 8)])));
        assert_eq!(plan("-l").unwrap().places.len(), 18);
        assert_eq!(sizes("--sizes 64,1M"), Ok((1 << 20, vec![(0, 64), (0, 1 << 20)])));
        assert_eq!(sizes("-c 1M -o 1").unwrap().0, (1 << 20) + 65_536);
    }

    #[test]
    fn nonsense_is_refused() {
        let table = [
            ("-s 64K -c 64K -o 1", "-s 65537"),
            ("-s 64K -o 64K", "-s 65537"),
            ("-o 18446744073709551615", "address space"),
            ("-c 17179869183G", "address space"),
            ("-w 0 -r 0", "nothing to measure"),
            ("-l --sizes 64", "cannot be used with"),
            ("--json - --plot -", "mix"),
            ("-c 0", "at least 1"),
        ];
        for (line, why) in table {
            let error = plan(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
        assert!(plan("-s 65537 -c 64K -o 1").is_ok(), "the remedy works");
    }
}
