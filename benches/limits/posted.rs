//! Messages of one line: what a message costs posted, in batches of 16, and fenced one by one.

#![allow(unsafe_code, reason = "lines are posted by routines other than the mapping's, too")]

use std::time::Duration;

use gdrcopy::copy::{self, Routine};
use gdrcopy::tool::ab::{Arm, Rounds};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{Mapping, Result};

use crate::lab::{Lab, patterned};
use crate::report::{self, Findings, Place, Target};

const PART: &str = "posted";
const LINE: usize = 64;
/// Messages go round in so many lines.
const LINES: u32 = 1024;
const BATCH: u32 = 16;

/// A way of sending one message, or a batch of them.
#[derive(Debug, Clone, Copy)]
enum Way {
    PostLine,
    WritePosted,
    WriteValuePosted,
    Batch,
    Write,
    /// `post_line` of a routine that is not the mapping's.
    Other(&'static Routine),
}

impl Way {
    fn name(self) -> String {
        match self {
            Self::PostLine => "post_line".to_owned(),
            Self::WritePosted => "write_posted".to_owned(),
            Self::WriteValuePosted => "write_value_posted".to_owned(),
            Self::Batch => format!("batch of {BATCH} post_line"),
            Self::Write => "write (fence per call)".to_owned(),
            Self::Other(routine) => format!("post_line, {}", routine.name()),
        }
    }

    /// Messages in one call.
    fn per_call(self) -> u32 {
        if matches!(self, Self::Batch) { BATCH } else { 1 }
    }

    /// Calls in a block: at least once round.
    fn calls(self) -> u32 {
        match self {
            Self::Batch => LINES / BATCH,
            Self::Write => LINES,
            _ => 2 * LINES,
        }
    }

    /// The loop is instantiated for each way, so that what it times is the call alone.
    fn arm<'a>(self, mapping: &'a Mapping<'_>, line: &'a [u8; LINE]) -> Arm<'a> {
        let calls = self.calls();
        match self {
            Self::PostLine => Arm::sustained(calls, move |call| mapping.post_line(offset(call), line)),
            Self::WritePosted => Arm::sustained(calls, move |call| mapping.write_posted(offset(call), line)),
            Self::WriteValuePosted => Arm::sustained(calls, move |call| mapping.write_value_posted(offset(call), line)),
            Self::Write => Arm::sustained(calls, move |call| mapping.write(offset(call), line)),
            Self::Batch => Arm::sustained(calls, move |call| {
                mapping.batch(|batch| {
                    (0..BATCH).try_for_each(|message| batch.post_line(offset(call * BATCH + message), line))
                })
            }),
            Self::Other(routine) => Arm::sustained(calls, move |call| post(routine, mapping, offset(call), line)),
        }
    }
}

/// Where a message goes.
#[inline(always)]
fn offset(message: u32) -> usize {
    usize::try_from(message % LINES).unwrap_or(0) * LINE
}

#[inline(always)]
fn post(routine: &Routine, mapping: &Mapping<'_>, offset: usize, line: &[u8; LINE]) -> Result<()> {
    let at = mapping.as_ptr().wrapping_add(offset);
    // SAFETY: `offset` is a multiple of 64 below 64 KiB, inside the mapping of 2 MiB that starts on a page; `run` takes
    // available routines only; no reference to the window exists.
    unsafe { routine.post_line(at, line) };
    Ok(())
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    let own = lab.mapping.routine().name();
    let mut ways = vec![Way::PostLine, Way::Batch, Way::Write];
    // The first once more is the noise floor.
    ways.extend([Way::PostLine, Way::WritePosted, Way::WriteValuePosted]);
    let others = copy::routines().iter().copied().filter(|other| other.is_available() && other.name() != own);
    ways.extend(others.map(Way::Other));

    let line: [u8; LINE] = patterned(LINE, 5).try_into().map_err(|_| Failure::run("a line has 64 bytes"))?;
    let mut arms: Vec<Arm<'_>> = ways.iter().map(|way| way.arm(lab.mapping, &line)).collect();
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(Duration::from_secs(3)))?;

    let place = Place { part: PART, direction: Direction::HostToDevice, metric: Metric::Sustained, bytes: 64 };
    lab.screen.line("")?;
    lab.screen.line(&format!(
        "Messages of 64 B over {LINES} lines, back to back, {} rounds [ns per message]",
        rounds.len()
    ))?;
    let (clean, sent) = (vec![0; line.len() * offset_count()], line.repeat(offset_count()));
    let mut medians = Vec::with_capacity(ways.len());
    for (index, way) in ways.iter().enumerate() {
        lab.device_put(0, &clean)?;
        arms[index].run(lab.clock)?;
        let verified = lab.device_has(0, &sent)?;
        let taken = report::Arm { rounds: &rounds, index, calls: way.calls(), per_call: f64::from(way.per_call()) };
        let median = found.figure(place, &way.name(), &taken, verified);
        let note = if verified { "" } else { "  WRONG BYTES" };
        lab.screen.line(&format!("  {:<28}{median}{note}", way.name()))?;
        medians.push(median);
    }
    let (posted, batch, fenced, again) = (0, 1, 2, 3);
    let noise = rounds.ratio(again, posted);
    found.compare(place, &ways[again].name(), &ways[posted].name(), noise);
    let rate = rounds.ratio(fenced, posted);
    found.compare(place, &ways[fenced].name(), &ways[posted].name(), rate);
    lab.screen.line(&format!("  fence per call / post_line  {rate:.1}; the same arm twice {noise:.3}"))?;

    found.judge(PART, "64 B posted, sustained", Target::AtMost(3.6), "ns", medians[posted], String::new());
    found.judge(PART, "rate of posted over fence per call, 64 B", Target::AtLeast(35.0), "x", rate, String::new());
    found.judge(PART, "batch of 16 x 64 B, per message", Target::AtMost(16.0), "ns", medians[batch], String::new());
    Ok(())
}

/// [`LINES`] as a length.
fn offset_count() -> usize {
    usize::try_from(LINES).unwrap_or(0)
}
