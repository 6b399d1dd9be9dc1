//! The command line of `gdrcopy_pplat`, and the rows it amounts to.

use std::time::Duration;

use clap::{Parser, ValueEnum};

use super::message::{Letter, MOST_LETTER, Memory, Row, WARP, Where};
use crate::sys::num::{u64_of, usize_of};
use crate::tool::answer::{Mode, PART, Shape};
use crate::tool::exchange::bytes_of;
use crate::tool::fail::Failure;
use crate::tool::flags::{self, Values, size_in_words};
use crate::tool::measure::Amount;
use crate::tool::outputs::{Outputs, PlotFlag};
use crate::tool::rig::Common;

/// Rounds of a row, unless the user names another number, and the time for them.
const ROUNDS: u64 = 100_000;
const ROW: Duration = Duration::from_millis(150);
const PAYLOADS: [u64; 4] = [4, 64, 512, 4096];
/// Messages through a channel and their answers, unless the user names sizes.
const LETTERS: [(usize, usize); 2] = [(48, 48), (512, 4)];
/// Flags, data or answers of all blocks together.
const MOST_BYTES: usize = 256 << 20;

/// Times messages to a running kernel and back: CPU to GPU to CPU.
///
/// The CPU stores a message, the GPU waits for it, checks it and answers with 4 bytes, which the
/// CPU waits for: one round. Every row that goes through BAR1 is followed by its rival, the same
/// exchange with the GPU polling page-locked host memory. Rows of mode channel are round trips
/// through the library's message channel: 48 bytes each way, and 512 bytes with 4 bytes back.
#[derive(Parser, Debug, Clone)]
#[command(name = super::TOOL, version, verbatim_doc_comment)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) common: Common,

    /// Rounds per row [default: 100000, or what fits in 150 ms]
    ///
    /// A count given here is exact, however long it takes.
    #[arg(short = 't', value_name = "N", value_parser = clap::value_parser!(u64).range(1..=2_000_000_000))]
    iterations: Option<u64>,

    /// Seconds per row, instead of a count
    #[arg(long, value_name = "S", conflicts_with = "iterations", value_parser = clap::value_parser!(u64).range(1..=1800))]
    seconds: Option<u64>,

    /// Seconds to wait for an answer, 0 for no limit
    #[arg(short = 'u', value_name = "S", default_value_t = 10)]
    timeout: u64,

    /// Bytes of a message [default: 4, 64, 512 and 4096]
    ///
    /// Of packets, 4 of every 16 bytes are the sequence number.
    /// A channel takes 16 KiB at most, and answers with 4 bytes where a size is given.
    #[arg(short = 's', value_name = "BYTES", value_parser = flags::positive_bytes, conflicts_with = "sizes", verbatim_doc_comment)]
    size: Option<u64>,

    /// Several sizes: 64,512 or 4-4K (doubling)
    #[arg(long, value_name = "LIST|A-B", value_parser = flags::sizes)]
    sizes: Option<Values>,

    /// CUDA blocks; a round is a message to each and its answer
    #[arg(short = 'B', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    blocks: u32,

    /// Threads per block that share the loads of a message
    #[arg(short = 'T', value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=992))]
    threads: u32,

    /// Messages: flag, data (then a flag), packets, channel [default: all]
    ///
    /// A channel has one warp, answers in host memory, and has its ring where -G says.
    #[arg(short = 'm', value_name = "MODE", value_enum, hide_possible_values = true)]
    mode: Option<ModeFlag>,

    /// Where the GPU polls the flag: gpumem, hostmem
    #[arg(short = 'G', value_name = "WHERE", value_enum, default_value_t = Memory::Gpumem, hide_possible_values = true)]
    gpu_flag: Memory,

    /// Where the CPU polls for the answer: gpumem, hostmem
    #[arg(short = 'C', value_name = "WHERE", value_enum, default_value_t = Memory::Hostmem, hide_possible_values = true)]
    cpu_flag: Memory,

    /// Where the data are: gpumem, hostmem
    #[arg(short = 'D', value_name = "WHERE", value_enum, default_value_t = Memory::Gpumem, hide_possible_values = true)]
    data: Memory,

    /// Keep every SM busy meanwhile, by a kernel of arithmetic and memory reads
    #[arg(long)]
    pub(super) load: bool,

    #[command(flatten)]
    pub(super) outputs: Outputs,

    #[command(flatten)]
    pub(super) plot: PlotFlag,
}

/// Modes as `-m` takes them.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum ModeFlag {
    /// The flag is the message.
    Flag,
    /// Data, then a flag.
    #[value(alias = "data+flag")]
    Data,
    /// A sequence number in every 16 bytes.
    Packets,
    /// Through the library's message channel.
    Channel,
}

/// What to measure.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) rows: Vec<Row>,
    /// Why there are no rows of the channel, or fewer, though nobody asked for fewer.
    pub(super) no_channel: Option<String>,
    pub(super) amount: Amount,
    pub(super) timeout: Option<Duration>,
    /// Bytes for flags, data and answers of the largest row.
    pub(super) areas: [usize; 3],
}

impl Plan {
    /// Puts modes, sizes and places together.
    pub(super) fn new(args: &Args) -> Result<Self, Failure> {
        args.outputs.check_with(&args.plot)?;
        let named = args.size.map(|size| vec![size]).or_else(|| args.sizes.as_ref().map(|sizes| sizes.0.clone()));
        let sizes = named.clone().unwrap_or_else(|| PAYLOADS.to_vec());
        let modes = match args.mode {
            None => vec![Mode::Flag, Mode::Packets, Mode::Data],
            Some(ModeFlag::Flag) => vec![Mode::Flag],
            Some(ModeFlag::Data) => vec![Mode::Data],
            Some(ModeFlag::Packets) => vec![Mode::Packets],
            Some(ModeFlag::Channel) => Vec::new(),
        };
        let at = Where { flag: args.gpu_flag, data: args.data, answer: args.cpu_flag };
        let mut rows = Vec::new();
        let mut areas = [0; 3];
        for mode in modes {
            // A flag has one size.
            let sizes = if mode == Mode::Flag { &[4][..] } else { &sizes };
            for &size in sizes {
                let bytes = match mode {
                    Mode::Packets => size.max(u64_of(PART)),
                    _ => size,
                };
                let shape = Shape {
                    mode,
                    bytes: usize_of(bytes.min(1 << 40)),
                    blocks: usize_of(u64::from(args.blocks)),
                    threads: args.threads,
                };
                for (most, bytes) in areas.iter_mut().zip(bytes_of(&shape)) {
                    *most = bytes.max(*most);
                }
                rows.push(Row::Plain { shape, at });
            }
        }
        if let Some(&most) = areas.iter().find(|&&bytes| bytes > MOST_BYTES) {
            return Err(Failure::usage(format!(
                "-B {} and messages of that size take {}; {} is the most",
                args.blocks,
                size_in_words(u64_of(most)),
                size_in_words(u64_of(MOST_BYTES)),
            )));
        }
        let mut no_channel = None;
        if matches!(args.mode, None | Some(ModeFlag::Channel)) {
            let (letters, refusal) = args.letters(named.as_deref());
            match refusal {
                Some(why) if args.mode.is_some() => return Err(Failure::usage(why)),
                refusal => no_channel = refusal,
            }
            rows.extend(letters.into_iter().map(Row::Channel));
        }
        let rows = rows.into_iter().flat_map(|row| [Some(row), row.rival(args.cpu_flag)]).flatten().collect();
        let amount = match (args.iterations, args.seconds) {
            (Some(n), _) => Amount::Exactly(n),
            (None, Some(seconds)) => Amount::UpTo(u64::MAX, Duration::from_secs(seconds)),
            (None, None) => Amount::UpTo(ROUNDS, ROW),
        };
        let timeout = (args.timeout > 0).then(|| Duration::from_secs(args.timeout));
        Ok(Self { rows, no_channel, amount, timeout, areas })
    }

    /// What a row is made of, in words.
    pub(super) fn in_words(&self) -> String {
        let rounds = match self.amount {
            Amount::Exactly(n) => format!("exactly {n} rounds"),
            Amount::UpTo(u64::MAX, time) => format!("rounds for {} s", time.as_secs()),
            Amount::UpTo(n, time) => format!("up to {n} rounds in {} ms (20 at least)", time.as_millis()),
        };
        let (blocks, threads) = self.rows.first().map_or((0, 0), Row::grid);
        format!("{rounds}; {blocks} x {threads} threads; data compared by the GPU")
    }
}

impl Args {
    /// Messages through a channel, and why they are not all that were asked for.
    fn letters(&self, sizes: Option<&[u64]>) -> (Vec<Letter>, Option<String>) {
        let refused = |why: &str| (Vec::new(), Some(why.to_owned()));
        if (self.blocks, self.threads) != (1, WARP) {
            return refused("one warp receives from a channel; leave out -B and -T");
        }
        if self.cpu_flag == Memory::Gpumem {
            return refused("a channel answers in host memory; leave out -C");
        }
        if self.data == Memory::Hostmem && self.gpu_flag == Memory::Gpumem {
            return refused("a channel's messages are where the GPU polls; leave out -D, or add -G hostmem");
        }
        let ring = self.gpu_flag;
        let Some(sizes) = sizes else {
            let letter = |&(bytes, answer_bytes): &(usize, usize)| Letter { bytes, answer_bytes, ring };
            return (LETTERS.iter().map(letter).collect(), None);
        };
        let fit = sizes.iter().map(|&size| usize_of(size)).filter(|&bytes| bytes <= MOST_LETTER);
        let letters: Vec<_> = fit.map(|bytes| Letter { bytes, answer_bytes: 4, ring }).collect();
        let why = format!("a channel takes messages of {} at most here", size_in_words(u64_of(MOST_LETTER)));
        let is_short = letters.len() < sizes.len();
        (letters, is_short.then_some(why))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::tool::pplat) fn plan(line: &str) -> Result<Plan, String> {
        let args = std::iter::once("pplat").chain(line.split_whitespace());
        let args = Args::try_parse_from(args).map_err(|error| error.to_string())?;
        Plan::new(&args).map_err(|failure| failure.to_string())
    }

    fn rows(line: &str) -> Vec<(&'static str, usize, &'static str)> {
        let plan = plan(line).unwrap();
        plan.rows.iter().map(|row| (row.mode(), row.bytes(), row.method())).collect()
    }

    #[test]
    fn every_row_has_its_rival() {
        let all = rows("");
        assert_eq!(all.len(), 2 * (1 + 4 + 4 + 2));
        for pair in all.chunks(2) {
            assert_eq!((pair[0].0, pair[0].1), (pair[1].0, pair[1].1));
            assert_eq!((pair[0].2, pair[1].2), ("bar1", "host_flag"));
        }
        assert_eq!(all[0], ("flag", 4, "bar1"));
        assert_eq!(all[2], ("packets", 16, "bar1"), "the smallest packet");
    }

    #[test]
    fn upstream_flags() {
        let plan =
            plan("-d 0 -a cuMemAlloc -M wc -t 50 -u 0 -s 100 -B 8 -T 64 -m data -G gpumem -C hostmem -D hostmem");
        let plan = plan.unwrap();
        assert!(matches!(plan.amount, Amount::Exactly(50)) && plan.timeout.is_none());
        let row = plan.rows[0];
        assert_eq!((row.grid(), row.bytes()), ((8, 64), 100));
        assert_eq!((row.method(), plan.rows[1].method()), ("mixed", "host_flag"));
        assert_eq!(plan.areas, [8 * 128, 8 * 128, 8 * 64]);
    }

    #[test]
    fn the_rival_alone_is_one_row() {
        assert_eq!(rows("-m flag -G hostmem"), [("flag", 4, "host_flag")]);
        assert_eq!(rows("-m packets -D hostmem -s 64"), [("packets", 64, "host_flag")]);
        assert_eq!(rows("-m data+flag -s 64").len(), 2);
    }

    #[test]
    fn a_channel_has_sizes_of_its_own_unless_some_are_named() {
        let letters = |line| {
            let letter = |row: &Row| match *row {
                Row::Channel(letter) => (letter.bytes, letter.answer_bytes, letter.ring.name()),
                Row::Plain { .. } => panic!("{row:?}"),
            };
            plan(line).unwrap().rows.iter().map(letter).collect::<Vec<_>>()
        };
        let both = [(48, 48, "gpumem"), (48, 48, "hostmem"), (512, 4, "gpumem"), (512, 4, "hostmem")];
        assert_eq!(letters("-m channel"), both);
        assert_eq!(letters("-m channel -G hostmem"), [(48, 48, "hostmem"), (512, 4, "hostmem")]);
        assert_eq!(letters("-m channel -s 48"), [(48, 4, "gpumem"), (48, 4, "hostmem")]);
        assert_eq!(plan("-m channel").unwrap().areas, [0; 3], "it has memory of its own");
    }

    #[test]
    fn a_channel_that_was_not_asked_for_is_left_out_with_the_reason() {
        for line in ["-B 8", "-T 64", "-C gpumem", "-D hostmem", "-s 64K"] {
            let all = plan(line).unwrap();
            assert!(all.rows.iter().all(|row| row.mode() != "channel") && all.no_channel.is_some(), "{line}");
            let error = plan(&format!("{line} -m channel")).unwrap_err();
            assert_eq!(error, all.no_channel.unwrap(), "{line}");
        }
        let some = plan("--sizes 64,64K").unwrap();
        assert_eq!(some.rows.iter().filter(|row| row.mode() == "channel").count(), 2);
        assert!(some.no_channel.unwrap().contains("16 KiB"));
        assert_eq!(plan("-B 8 -m flag").unwrap().no_channel, None);
    }

    #[test]
    fn nonsense_is_refused() {
        let table = [
            ("-t 0", "1..="),
            ("-t 5 --seconds 5", "cannot be used with"),
            ("-s 0", "at least 1"),
            ("-s 64 --sizes 64", "cannot be used with"),
            ("-B 0", "1..="),
            ("-T 1024", "1..="),
            ("-m both", "flag, data, packets, channel"),
            ("-G bar1", "gpumem, hostmem"),
            ("-u -1", "unexpected"),
            ("-s 1G", "256 MiB is the most"),
            ("-s 17179869183G", "256 MiB is the most"),
            ("-B 65536 -s 64K", "256 MiB is the most"),
            ("--json - --csv -", "mix"),
        ];
        for (line, why) in table {
            let error = plan(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
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
}
