//! Backend vulkan against backend rm: two sessions in one process that map the same memory at the same time.
//!
//! The same memory, because the place of a buffer in the GPU's memory moves a figure by more than the limit leaves: two
//! buffers would be compared rather than two backends. How much the place does is shown beside, by two buffers of rm, and
//! the noise floor by one mapping of rm twice.

use std::time::Duration;

use gdrcopy::tool::ab::{Arm, Estimate, Rounds, calls_in};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::Binary;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{Allocator, BackendKind, DeviceBuffer, Mapping, Result, Session};

use crate::lab::{Lab, Load};
use crate::report::{self, Findings, Place, Target};

const PART: &str = "backends";
const LARGEST: usize = 1 << 20;
const BLOCK: Duration = Duration::from_micros(150);
const MOST_CALLS: u32 = 200;
/// All rounds of one size, in one direction, by one metric.
const SIZE: Duration = Duration::from_millis(220);
const LIMIT: f64 = 1.03;

/// One way to a buffer: a backend's mapping of it.
struct Way<'a> {
    name: &'static str,
    mapping: &'a Mapping<'a>,
    buffer: &'a DeviceBuffer,
}

/// A memory object of the buffer's own, whichever backend makes it; both can map it.
fn alloc(session: &Session, ordinal: usize) -> Result<DeviceBuffer> {
    session.alloc_as(ordinal, LARGEST, Allocator::CuMemCreate)
}

/// A session and a buffer of its own that it has mapped once: vulkan looks for its device when something is pinned.
fn open(kind: BackendKind, ordinal: usize) -> Result<(Session, DeviceBuffer)> {
    let session = Session::builder().ignore_env().backend(kind).open()?;
    let buffer = alloc(&session, ordinal)?;
    map(&session, &buffer)?.unmap()?;
    Ok((session, buffer))
}

fn map<'a>(session: &Session, buffer: &'a DeviceBuffer) -> Result<Mapping<'a>> {
    session.pin(buffer)?.map()
}

fn arm<'a>(load: &'a Load, mapping: &'a Mapping<'_>, metric: Metric, calls: u32) -> Arm<'a> {
    match metric {
        Metric::Sustained => Arm::sustained(calls, move |_| load.carry(mapping)),
        _ => Arm::single(calls, move |_| load.carry(mapping)),
    }
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    let ordinal = lab.rig.gpu.ordinal;
    let side = |kind| open(kind, ordinal).map_err(|error| format!("backend {kind} is not to be had here: {error}"));
    let both = side(BackendKind::Vulkan).and_then(|vulkan| Ok((vulkan, side(BackendKind::Rm)?)));
    let ((vulkan, shared), (rm, own)) = match both {
        Ok(both) => both,
        Err(why) => return found.skip(lab.screen, PART, why),
    };
    let second = alloc(&rm, ordinal)?;
    let (by_vulkan, by_rm) = (map(&vulkan, &shared)?, map(&rm, &shared)?);
    let (of_own, of_second) = (map(&rm, &own)?, map(&rm, &second)?);
    let ways = [
        Way { name: "vulkan", mapping: &by_vulkan, buffer: &shared },
        Way { name: "rm", mapping: &by_rm, buffer: &shared },
        Way { name: "rm", mapping: &by_rm, buffer: &shared },
        Way { name: "rm, own buffer", mapping: &of_own, buffer: &own },
        Way { name: "rm, second buffer", mapping: &of_second, buffer: &second },
    ];

    let mut worst: Option<(Estimate, String)> = None;
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        lab.screen.line("")?;
        lab.screen.line(&format!("{}: vulkan over rm on the same memory [ns]", direction.in_words()))?;
        lab.screen.line(&format!(
            "{:>8}  {:<10}{:>12}{:>12}  {:<24}{:<24}{:<24}verified",
            "size [B]", "metric", "vulkan", "rm", "vulkan / rm", "rm again", "rm / rm, two buffers"
        ))?;
        for size in (0..=LARGEST.ilog2()).map(|power| 1_usize << power) {
            let load = Load::new(direction, size);
            for metric in [Metric::Sustained, Metric::Single] {
                let ratio = one_size(lab, found, &load, metric, &ways)?;
                if worst.as_ref().is_none_or(|(so_far, _)| ratio.value > so_far.value) {
                    worst = Some((ratio, format!("{size} B, {}, {}", direction.name(), metric.name())));
                }
            }
        }
    }
    if let Some((ratio, detail)) = worst {
        found.judge(PART, "vulkan / rm, same memory, worst size, both ways", Target::AtMost(LIMIT), "x", ratio, detail);
    }
    Ok(())
}

fn one_size(
    lab: &Lab<'_>,
    found: &mut Findings,
    load: &Load,
    metric: Metric,
    ways: &[Way<'_>; 5],
) -> std::result::Result<Estimate, Failure> {
    let calls = calls_in(BLOCK, MOST_CALLS, |_| load.carry(ways[1].mapping))?;
    let mut arms: Vec<Arm<'_>> = ways.iter().map(|way| arm(load, way.mapping, metric, calls)).collect();
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(SIZE))?;
    drop(arms);
    let bytes = load.bytes();
    let place = Place { part: PART, direction: load.direction, metric, bytes };
    let mut all_right = true;
    for (index, way) in ways.iter().enumerate() {
        let verified = load.verify(way.mapping, way.buffer, || load.carry(way.mapping))?;
        all_right &= verified;
        found.figure(place, way.name, &report::Arm { rounds: &rounds, index, calls, per_call: 1.0 }, verified);
    }
    let mut over = |one: usize, other: usize| {
        let ratio = rounds.ratio(one, other);
        found.compare(place, ways[one].name, ways[other].name, ratio);
        ratio
    };
    let (ratio, noise, placement) = (over(0, 1), over(2, 1), over(4, 3));
    lab.screen.line(&format!(
        "{:>8}  {:<10}{:>12.1}{:>12.1}  {:<24}{:<24}{:<24}{}",
        Binary(bytes),
        metric.name(),
        rounds.median(0).value,
        rounds.median(1).value,
        format!("{ratio:.3}"),
        format!("{noise:.3}"),
        format!("{placement:.3}"),
        if all_right { "yes" } else { "WRONG BYTES" },
    ))?;
    Ok(ratio)
}
