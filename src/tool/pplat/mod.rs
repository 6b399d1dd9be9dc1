//! `gdrcopy_pplat`: how long a message to a running kernel and its answer take.
//!
//! `args` turns the command line into rows, each of which is a `message` of some kind, plain or through a `channel`;
//! `timing` times one, `row` is what is told of it. Here memory and kernels are made ready before the first and
//! the rows are run one after the other. A row's kernel runs during that row only.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use self::answerer::Answerer;
use self::args::{Args, Plan};
use self::channel::Line;
use self::message::{Letter, Memory, Row, Where};
use self::row::Ping;
use self::timing::{Rounds, Timed};
use super::answer::{CpuSide, GpuSide, PAGE, PAGES, Shape, Side};
use super::clock::Clock;
use super::exchange::{Area, Exchange, Outcome, Places, SharedHost};
use super::fail::{self, Failure};
use super::load::Load;
use super::measure::Amount;
use super::num::u64_of_f64;
use super::output::Screen;
use super::report::Report;
use super::rig::{self, Rig};
use crate::error::ErrorKind;
use crate::mapping::Mapping;

mod answerer;
mod args;
mod channel;
mod message;
mod picture;
mod row;
mod timing;

const TOOL: &str = "gdrcopy_pplat";

/// Areas start on pages of their own, so that none is in another's cache line or prefetch.
const AREA: usize = PAGE;
/// Pages to choose from for what the GPU polls.
const POLLED: usize = PAGE * PAGES;

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    rig::program(TOOL, args, run)
}

fn run(args: &Args) -> Result<(), Failure> {
    let mut plan = Plan::new(args)?;
    let sinks = args.outputs.open_with(&args.plot)?;
    let [flags, data, answers] = plan.areas.map(|bytes| bytes.max(1).next_multiple_of(AREA));
    let bytes = POLLED + flags + data + answers;

    let rig = Rig::new(TOOL, &args.common, bytes)?;
    let pinned = rig.session.pin(&rig.buffer)?;
    let mapping = rig::map(&pinned, args.common.mapping_type)?;
    let gpu = (!rig.is_emulated()).then_some(rig.gpu.ordinal);
    // Everything that waits for running kernels, or makes them wait, comes before the first of them.
    let side: Box<dyn Side> = match gpu {
        Some(ordinal) => Box::new(GpuSide::load(ordinal)?),
        None => Box::new(CpuSide::new()),
    };
    find_channel(&mut plan, &rig)?;
    let answerer = Answerer::new(gpu)?;
    let load = match gpu {
        Some(ordinal) if args.load => Some(Load::new(&rig.session, ordinal)?),
        None if args.load => {
            fail::say(TOOL, "--load is passed over: an emulated GPU has no SM to keep busy");
            None
        }
        _ => None,
    };
    let host_memory = SharedHost::new(gpu, bytes)?;
    let [near, next, ..] = side.pages_by_distance(rig.buffer.addr())?;
    let (host, clock) = rig.settle(&args.common, &mapping)?;

    let mut report: Report<Ping> = Report::new(TOOL, host, &mapping, rig.session.backend(), &clock);
    let bench = Bench {
        plan: &plan,
        rig: &rig,
        side: &*side,
        answerer: &answerer,
        load: load.as_ref(),
        mapping: &mapping,
        host: &host_memory,
        // What fits into a page lies where the GPU sees it soonest.
        starts: [
            if flags <= PAGE { near } else { POLLED },
            if data <= PAGE { next } else { POLLED + flags },
            POLLED + flags + data,
        ],
        clock: &clock,
    };
    // One step more: the host alone.
    sinks.begin(plan.rows.len() + 1);
    let outcome = bench.run(&sinks.screen, &mut report);
    report.settle(outcome)?;
    sinks.finish(&report, || picture::draw(&report))?;
    let wrong: u64 = report.results.iter().map(|ping| ping.wrong_messages).sum();
    if wrong > 0 {
        return Err(Failure::run(format!("wrong data: {wrong} messages were not as sent; the figures are void")));
    }
    mapping.unmap()?;
    Ok(())
}

/// Leaves rows of the channel out where nobody asked for just these and there is none, and says why.
fn find_channel(plan: &mut Plan, rig: &Rig) -> Result<(), Failure> {
    let letter = plan.rows.iter().find_map(|row| match row {
        Row::Channel(letter) => Some(*letter),
        Row::Plain { .. } => None,
    });
    let has_others = plan.rows.iter().any(|row| matches!(row, Row::Plain { .. }));
    match letter.map(|letter| channel::open(&rig.session, rig.gpu.ordinal, letter, plan)) {
        Some(Err(error)) if has_others && matches!(error.kind(), ErrorKind::UnsupportedFeature(_)) => {
            plan.rows.retain(|row| matches!(row, Row::Plain { .. }));
            plan.no_channel = Some(error.to_string());
        }
        Some(Err(error)) => return Err(error.into()),
        Some(Ok(_)) | None => {}
    }
    if let Some(why) = &plan.no_channel {
        fail::say(TOOL, &format!("some messages do not go through a channel: {why}"));
    }
    Ok(())
}

/// What every row is run with.
struct Bench<'a> {
    plan: &'a Plan,
    rig: &'a Rig,
    side: &'a dyn Side,
    answerer: &'a Answerer,
    load: Option<&'a Load>,
    mapping: &'a Mapping<'a>,
    host: &'a SharedHost,
    /// Where flags, data and answers start, in GPU memory and in host memory.
    starts: [usize; 3],
    clock: &'a Clock,
}

impl Bench<'_> {
    fn run(&self, screen: &Screen, report: &mut Report<Ping>) -> Result<(), Failure> {
        let mut header = report.header();
        header.push(format!("Rows      {}", self.plan.in_words()));
        if self.load.is_some() {
            header.push(format!("Load      {}", Load::describe()));
        }
        header.push(String::new());
        header.iter().try_for_each(|line| screen.line(line))?;
        screen.banner(self.rig.is_emulated())?;
        screen.line("Round trips: a message from CPU to GPU, 4 bytes back (through a channel: sizes of both)")?;
        row::titles().iter().try_for_each(|line| screen.line(line))?;
        for row in &self.plan.rows {
            screen.doing(&format!("{} {} {} B", row.method(), row.mode(), row.bytes()));
            let ping = self.row(row)?;
            screen.line(&row::line(&ping))?;
            screen.done();
            report.results.push(ping);
        }
        if let Some(first) = report.results.first() {
            screen.doing("the host alone");
            let alone = timing::host_alone(self.clock, self.plan.amount, first.figures.p50_ns)?;
            screen.line(&row::host_line(&alone))?;
            report.hiccups = Some(alone);
            screen.done();
        }
        closing(&report.results, self.rig.is_emulated()).iter().try_for_each(|line| screen.line(line))
    }

    fn area(&self, memory: Memory, start: usize) -> Area<'_> {
        match memory {
            Memory::Gpumem => Area::Device(self.mapping, start),
            Memory::Hostmem => Area::Host(self.host, start),
        }
    }

    fn row(&self, row: &Row) -> Result<Ping, Failure> {
        let (timed, outcome) = match *row {
            Row::Plain { shape, at } => self.plain(shape, at)?,
            Row::Channel(letter) => self.channel(letter)?,
        };
        Ok(Ping::new(row, self.load.is_some(), &timed, outcome))
    }

    fn plain(&self, shape: Shape, at: Where) -> Result<(Timed, Outcome), Failure> {
        let [flags, data, answers] = self.starts;
        let places = Places {
            flags: self.area(at.flag, flags),
            data: self.area(at.data, data),
            answers: self.area(at.answer, answers),
        };
        let mut exchange = Exchange::start(self.side, self.rig.is_emulated(), shape, places, self.plan.timeout)?;
        let timed = self.time(&mut exchange)?;
        Ok((timed, exchange.stop()?))
    }

    fn channel(&self, letter: Letter) -> Result<(Timed, Outcome), Failure> {
        let ends = channel::open(&self.rig.session, self.rig.gpu.ordinal, letter, self.plan)?;
        let mut line = Line::start(self.answerer, ends, letter, self.plan.timeout)?;
        let timed = self.time(&mut line)?;
        Ok((timed, line.stop()?))
    }

    /// The load, if there is one, starts behind the kernel that answers, which would else find no SM free, and ends
    /// before that side frees its memory, which would wait for it.
    fn time(&self, rounds: &mut impl Rounds) -> Result<Timed, Failure> {
        let amount = self.plan.amount;
        timing::warm_up(rounds, amount)?;
        let loading = self.load.map(|load| load.start(load_limit(amount))).transpose()?;
        let timed = timing::time(self.clock, amount, rounds, Rounds::prepare, Rounds::round)?;
        if let Some(loading) = &loading
            && !loading.still_runs()?
        {
            return Err(Failure::run("the load ended before the row did; name fewer rounds with -t, or --seconds"));
        }
        Ok(timed)
    }
}

/// Past the end of the row, but not for ever.
fn load_limit(amount: Amount) -> Duration {
    let row = match amount {
        Amount::Exactly(_) => Duration::from_secs(600),
        Amount::UpTo(_, time) => time,
    };
    row + Duration::from_secs(30)
}

/// Each row beside its rival, in words, and what the table does not say by itself.
fn closing(results: &[Ping], is_emulated: bool) -> Vec<String> {
    let mut lines = vec![String::new()];
    for ping in results.iter().filter(|ping| !ping.is_rival() && !is_emulated) {
        let Some(rival) = results.iter().find(|other| other.is_rival() && other.is_rival_of(ping)) else { continue };
        let (ours, theirs) = (ping.figures.p50_ns, rival.figures.p50_ns);
        let share = u64_of_f64(100.0 * (theirs - ours).abs() / theirs.max(0.1));
        let verdict = if ours <= theirs { "less" } else { "more" };
        lines.push(format!(
            "{}: {} ns with the GPU polling its own memory, {} ns polling host memory: {share} % {verdict}",
            ping.message(),
            u64_of_f64(ours),
            u64_of_f64(theirs)
        ));
    }
    if results.iter().any(|ping| ping.figures.iterations < 1000) {
        lines.push("-: too few rounds for that percentile (p99 takes 100, p99.9 takes 1000: see -t).".to_owned());
    }
    if results.iter().any(Ping::is_of_channel) {
        lines.push(
            "channel: bytes of message/answer, in lines of 64 that carry 48; polled in: the ring to the GPU."
                .to_owned(),
        );
    }
    lines.push(
        "(host alone): the same loop, waiting as long by the clock only: tails below that are the host's.".to_owned(),
    );
    lines.push(
        "bkt.min, bkt.med: of the means of about 100 buckets of rounds, as GDRCopy's own program has it.".to_owned(),
    );
    lines
}
