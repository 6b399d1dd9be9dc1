//! The command line of `gdrcopy_copylat`, and the plan it amounts to.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::sys::num::usize_of;
use crate::tool::bench::{Loops, Terms};
use crate::tool::fail::Failure;
use crate::tool::flags::{self, MAX_VALUES, Values, size_in_words};
use crate::tool::outputs::{Outputs, PlotFlag};
use crate::tool::rig::Common;

const DEFAULT_BUFFER: u64 = 16 << 20;

/// Times copies between host and GPU memory, from 1 byte up to the size of the buffer.
///
/// All times are per call. "sustained": calls back to back; "issue": one write until it returns;
/// "drained": one write until MFENCE finds the core's write-combining buffers empty, not until the
/// GPU has it; "single": one read until its bytes are in host memory. Every row ends with a
/// comparison of the bytes copied. A tail says something about a copy where it is longer than that
/// of the hiccups: the same loop around nothing.
#[derive(Parser, Debug, Clone)]
#[command(name = super::TOOL, version, verbatim_doc_comment)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) common: Common,

    /// Size of the buffer; copies of 1, 2, 4 .. bytes up to it [default: 16M]
    #[arg(short = 's', value_name = "BYTES", value_parser = flags::positive_bytes)]
    pub(super) buffer: Option<u64>,

    /// Writes per size, 0 for none [default: 100000, or what fits in the time]
    ///
    /// A count given here is exact, however long it takes.
    #[arg(short = 'w', value_name = "N")]
    pub(super) writes: Option<u64>,

    /// Reads per size, 0 for none [default: 10000, or what fits in the time]
    ///
    /// A count given here is exact, however long it takes.
    #[arg(short = 'r', value_name = "N")]
    pub(super) reads: Option<u64>,

    /// Also time cuMemcpy, page-locked and pageable host memory
    #[arg(short = 'c')]
    pub(super) cuda: bool,

    /// Cold caches: flush the host's lines before every copy
    ///
    /// Copies are then timed one at a time only.
    #[arg(short = 'C')]
    pub(super) cold: bool,

    /// What to compare with: cuda, which is the same as -c
    #[arg(long, value_name = "WHAT", value_enum, hide_possible_values = true)]
    pub(super) compare: Option<Compare>,

    /// Ways of copying: bar1,parallel,agent,auto,cuda or all [default: bar1]
    ///
    /// bar1: one thread's loads and stores. parallel: those of several threads. agent: a
    /// block of threads that stays on the GPU, with any host memory and with page-locked
    /// memory. auto: whichever of these and cuMemcpy the library finds to be the quickest
    /// for a size. cuda: as -c.
    /// A call of the agent returns when the GPU has answered, so there is no figure for
    /// calls back to back. Its kernel is on the GPU only while its own tables are measured.
    #[arg(
        long,
        value_name = "LIST",
        value_enum,
        value_delimiter = ',',
        hide_possible_values = true,
        verbatim_doc_comment
    )]
    methods: Vec<MethodFlag>,

    /// Threads of method parallel, this one included: 4 or 1,2,4,8 [default: 8]
    ///
    /// By default two of them write. Each number given is measured, and all of its threads write.
    #[arg(long, value_name = "LIST|A-B", value_parser = flags::sizes)]
    threads: Option<Values>,

    /// On an emulated GPU, let CPU threads play the agent's kernel
    ///
    /// Otherwise methods agent and auto do without it there.
    #[arg(long)]
    stand_in: bool,

    /// Sizes of the copies: 64,4K or 1-1M (doubling) or 1-256:1 (by ones)
    #[arg(long, value_name = "LIST|A-B", value_parser = flags::sizes)]
    pub(super) sizes: Option<Values>,

    /// Offsets in device memory: 0,63 or 0-63 (each) or 0-4K:64 (by 64)
    #[arg(long, value_name = "LIST|A-B", value_parser = flags::offsets)]
    pub(super) offsets: Option<Values>,

    /// Leave out when the GPU sees a write: no kernel is launched
    #[arg(long)]
    pub(super) no_echo: bool,

    /// Measure all ways of copying and write the best as a policy, instead
    ///
    /// Sizes from 64 bytes up to -s, 4 MiB by default. GDRCOPY_POLICY=FILE puts it in force.
    #[arg(long, value_name = "FILE|-", conflicts_with_all = [
        "writes", "reads", "cuda", "cold", "compare", "methods", "threads", "stand_in", "copy", "sizes", "offsets", "no_verify", "no_echo", "allocator", "mapping_type", "json", "csv", "plot",
    ])]
    pub(super) calibrate: Option<PathBuf>,

    /// Do not compare the bytes after the timed copies
    #[arg(long)]
    pub(super) no_verify: bool,

    #[command(flatten)]
    pub(super) outputs: Outputs,

    #[command(flatten)]
    pub(super) plot: PlotFlag,
}

/// What else to time.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compare {
    /// Synchronous cuMemcpy, page-locked and pageable host memory.
    Cuda,
}

/// Methods as `--methods` takes them.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MethodFlag {
    /// One thread's loads and stores.
    Bar1,
    /// Those of several threads.
    Parallel,
    /// A block of threads that stays on the GPU.
    Agent,
    /// Whatever is quickest.
    Auto,
    /// Synchronous cuMemcpy.
    Cuda,
    /// Every one of them.
    All,
}

impl MethodFlag {
    const EACH: [Self; 5] = [Self::Bar1, Self::Parallel, Self::Agent, Self::Auto, Self::Cuda];
}

/// What to measure.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// Bytes of device memory.
    pub(super) buffer: usize,
    /// Offset and size of every copy, in the order of the table.
    pub(super) places: Vec<(usize, usize)>,
    /// The offset varies, or is not 0.
    pub(super) has_offsets: bool,
    /// What copies; never `All`.
    pub(super) methods: Vec<MethodFlag>,
    /// Numbers of threads for parallel copies; none for the library's own.
    pub(super) threads: Vec<usize>,
    /// The agent's kernel may be played.
    pub(super) stand_in: bool,
    /// How each row is measured.
    pub(super) terms: Terms,
}

impl Plan {
    /// Puts sizes, offsets and the buffer's size together.
    pub(super) fn new(args: &Args) -> Result<Self, Failure> {
        let offsets = args.offsets.clone().unwrap_or_else(|| Values(vec![0]));
        let wanted = args.sizes.clone().unwrap_or_else(|| Values::powers_up_to(args.buffer.unwrap_or(DEFAULT_BUFFER)));
        let Some(end) = wanted.largest().checked_add(offsets.largest()).filter(|&end| isize::try_from(end).is_ok())
        else {
            return Err(Failure::usage(
                "--sizes and --offsets reach past the end of the address space; name smaller ones",
            ));
        };
        let sizes = match args.buffer {
            Some(buffer) if end > buffer => {
                let room = buffer.saturating_sub(offsets.largest());
                if args.sizes.is_some() || room == 0 {
                    return Err(past_the_end(&wanted, &offsets, buffer, args.sizes.is_some()));
                }
                Values::powers_up_to(room)
            }
            _ => wanted,
        };
        let cells = sizes.0.len().saturating_mul(offsets.0.len());
        if cells > MAX_VALUES {
            return Err(Failure::usage(format!(
                "{cells} pairs of size and offset are too many; name at most {MAX_VALUES}"
            )));
        }
        let terms = Terms {
            writes: args.writes,
            reads: args.reads,
            loops: if args.cold { Loops::Cold } else { Loops::All },
            verify: !args.no_verify,
            largest: usize_of(sizes.largest()),
        };
        terms.check()?;
        args.outputs.check_with(&args.plot)?;
        let places =
            offsets.0.iter().flat_map(|&offset| sizes.0.iter().map(move |&size| (usize_of(offset), usize_of(size))));
        Ok(Self {
            buffer: usize_of(args.buffer.unwrap_or_else(|| end.max(DEFAULT_BUFFER))),
            places: places.collect(),
            has_offsets: offsets.0 != [0],
            methods: args.methods(),
            threads: args.threads.iter().flat_map(|list| &list.0).map(|&threads| usize_of(threads)).collect(),
            stand_in: args.stand_in,
            terms,
        })
    }
}

impl Args {
    /// Each method once.
    fn methods(&self) -> Vec<MethodFlag> {
        let is_named = |method| match method {
            MethodFlag::Bar1 if self.methods.is_empty() => true,
            MethodFlag::Parallel if self.threads.is_some() => true,
            MethodFlag::Cuda if self.cuda || self.compare == Some(Compare::Cuda) => true,
            method => self.methods.contains(&method) || self.methods.contains(&MethodFlag::All),
        };
        MethodFlag::EACH.into_iter().filter(|&method| is_named(method)).collect()
    }
}

fn past_the_end(sizes: &Values, offsets: &Values, buffer: u64, sizes_named: bool) -> Failure {
    let at = if offsets.largest() == 0 { String::new() } else { format!(" at offset {}", offsets.largest()) };
    let smallest = if sizes_named { sizes.largest() } else { 1 };
    Failure::usage(format!(
        "a copy of {}{at} reaches past the end of the buffer of {}; make the buffer larger with -s {}",
        size_in_words(smallest),
        size_in_words(buffer),
        smallest + offsets.largest(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::measure::Amount;
    use crate::tool::report::Direction;
    use std::time::Duration;

    fn plan(line: &str) -> Result<Plan, String> {
        let args = std::iter::once("copylat").chain(line.split_whitespace());
        let args = Args::try_parse_from(args).map_err(|error| error.to_string())?;
        Plan::new(&args).map_err(|failure| failure.to_string())
    }

    #[test]
    fn upstream_defaults() {
        let plan = plan("").unwrap();
        assert_eq!((plan.buffer, plan.places.len(), plan.terms.largest), (16 << 20, 25, 16 << 20));
        assert_eq!(plan.methods, [MethodFlag::Bar1]);
        assert!(!plan.has_offsets && plan.terms.loops == Loops::All && plan.terms.verify);
        let time = Duration::from_millis(75);
        assert!(matches!(plan.terms.amount(Direction::HostToDevice, time), Amount::UpTo(100_000, t) if t == time));
        assert!(matches!(plan.terms.amount(Direction::DeviceToHost, time), Amount::UpTo(10_000, _)));
    }

    #[test]
    fn upstream_flags() {
        let plan = plan("-d 1 -a cuMemCreate -M wc -s 1000 -w 50 -r 0 -c -C").unwrap();
        assert_eq!((plan.buffer, plan.terms.largest), (1000, 512));
        assert_eq!(plan.methods, [MethodFlag::Bar1, MethodFlag::Cuda]);
        assert!(plan.terms.loops == Loops::Cold);
        assert!(matches!(plan.terms.amount(Direction::HostToDevice, Duration::ZERO), Amount::Exactly(50)));
        assert_eq!(plan.terms.directions().collect::<Vec<_>>(), [Direction::HostToDevice]);
    }

    #[test]
    fn methods_are_those_that_were_named() {
        use MethodFlag::{Agent, Auto, Bar1, Cuda, Parallel};
        let methods = |line| plan(line).unwrap().methods;
        assert_eq!(methods("--methods agent,agent,bar1"), [Bar1, Agent]);
        assert_eq!(methods("--methods agent -c"), [Agent, Cuda], "only what was named, and what -c adds");
        assert_eq!(methods("--methods all"), [Bar1, Parallel, Agent, Auto, Cuda]);
        assert_eq!(methods("--threads 2,4 --compare cuda"), [Bar1, Parallel, Cuda]);
        assert_eq!(plan("--threads 2,4").unwrap().threads, [2, 4]);
    }

    #[test]
    fn the_buffer_grows_to_fit_unless_named() {
        assert_eq!(plan("--sizes 32M --offsets 1").unwrap().buffer, (32 << 20) + 1);
        assert_eq!(plan("--sizes 64 --offsets 1").unwrap().buffer, 16 << 20);
        // Only the sizes the user did not name give way.
        let fitted = plan("-s 64K --offsets 0,1").unwrap();
        assert_eq!((fitted.buffer, fitted.terms.largest, fitted.places.len()), (65_536, 32_768, 32));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_a_size_that_does() {
        let table = [
            ("-s 64 --sizes 65", "-s 65"),
            ("-s 64 --sizes 64 --offsets 0,1", "-s 65"),
            ("-s 64 --offsets 64", "-s 65"),
            ("-s 64 --offsets 1G", "-s 1073741825"),
        ];
        for (line, remedy) in table {
            let error = plan(line).unwrap_err();
            assert!(error.contains("past the end") && error.ends_with(remedy), "{line}: {error}");
            assert!(plan(&line.replace("-s 64", remedy)).is_ok(), "{line}: the remedy works");
        }
        assert!(plan("--sizes 17179869183G").unwrap_err().contains("address space"));
        assert!(plan("--offsets 18446744073709551615").unwrap_err().contains("address space"));
    }

    #[test]
    fn help_fits_the_screen() {
        use clap::CommandFactory;
        let mut command = Args::command();
        for text in [command.render_help(), command.render_long_help()] {
            let text = text.to_string();
            let long: Vec<_> = text.lines().filter(|line| line.len() > 100).collect();
            assert!(long.is_empty(), "{long:?}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let table = [
            ("-w 0 -r 0", "nothing to measure"),
            ("--json - --csv -", "mix"),
            ("--sizes 1-65536:1 --offsets 0-1", "too many"),
            ("--backend rdma", "rm, vulkan, emulated"),
            ("--copy rep_movsb", "choose one of scalar"),
            ("-a malloc", "buffer, cuMemAlloc, cuMemCreate"),
            ("-M uc", "[possible values: "),
            ("--compare hip", "[possible values: "),
            ("--methods bar1,dma", "[possible values: bar1, parallel, agent, auto, cuda, all]"),
            ("--methods", "a value is required"),
            ("--threads 0", "at least 1"),
            ("-s 99999999999G", "64 bits"),
            ("-w x", "invalid"),
            ("-d -1", "unexpected"),
            ("extra", "unexpected"),
        ];
        for (line, why) in table {
            let error = plan(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
