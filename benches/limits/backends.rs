//! Backend vulkan against backend rm: two sessions in one process, a buffer each, and a second buffer on rm for the noise
//! that placement makes.

use std::time::Duration;

use gdrcopy::tool::ab::{Arm, Estimate, Rounds, calls_in};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::Binary;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{Allocator, BackendKind, DeviceBuffer, Mapping, Pinned, Result, Session};

use crate::lab::{Lab, Load};
use crate::report::{self, Findings, Place, Target};

const PART: &str = "backends";
const LARGEST: usize = 1 << 20;
const BLOCK: Duration = Duration::from_micros(150);
const MOST_CALLS: u32 = 200;
/// All rounds of one size, in one direction, by one metric.
const SIZE: Duration = Duration::from_millis(130);
const NAMES: [&str; 3] = ["vulkan", "rm", "rm, second buffer"];
const LIMIT: f64 = 1.03;

/// A session with a buffer of its own.
struct Side {
    session: Session,
    buffer: DeviceBuffer,
}

impl Side {
    fn new(kind: BackendKind, ordinal: usize) -> Result<Self> {
        let session = Session::builder().ignore_env().backend(kind).open()?;
        // A whole memory object on either backend.
        let buffer = session.alloc_as(ordinal, LARGEST, Allocator::CuMemCreate)?;
        Ok(Self { session, buffer })
    }

    fn pin(&self) -> Result<Pinned<'_>> {
        self.session.pin(&self.buffer)
    }
}

fn arm<'a>(load: &'a Load, mapping: &'a Mapping<'_>, metric: Metric, calls: u32) -> Arm<'a> {
    match metric {
        Metric::Sustained => Arm::sustained(calls, move |_| load.carry(mapping)),
        _ => Arm::single(calls, move |_| load.carry(mapping)),
    }
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    let ordinal = lab.rig.gpu.ordinal;
    let mut sides = Vec::with_capacity(NAMES.len());
    for kind in [BackendKind::Vulkan, BackendKind::Rm, BackendKind::Rm] {
        let side = Side::new(kind, ordinal).and_then(|side| {
            // Vulkan looks for its device when something is pinned.
            side.pin()?.unpin()?;
            Ok(side)
        });
        match side {
            Ok(side) => sides.push(side),
            Err(error) => {
                return found.skip(lab.screen, PART, format!("backend {kind} is not to be had here: {error}"));
            }
        }
    }
    let pins = sides.iter().map(Side::pin).collect::<Result<Vec<_>>>()?;
    let mappings = pins.iter().map(Pinned::map).collect::<Result<Vec<_>>>()?;

    let mut worst: Option<(Estimate, String)> = None;
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        lab.screen.line("")?;
        lab.screen.line(&format!("{}: vulkan over rm, two buffers in one process [ns]", direction.in_words()))?;
        let titles = ["size [B]", "metric", "vulkan", "rm", "vulkan / rm", "rm / rm, two buffers"];
        let [size, metric, vulkan, rm, ratio, noise] = titles;
        lab.screen.line(&format!("{size:>8}  {metric:<10}{vulkan:>12}{rm:>12}  {ratio:<24}{noise:<24}verified"))?;
        for size in (0..=LARGEST.ilog2()).map(|power| 1_usize << power) {
            let load = Load::new(direction, size);
            for metric in [Metric::Sustained, Metric::Single] {
                let ratio = one_size(lab, found, &load, metric, &mappings, &sides)?;
                if worst.as_ref().is_none_or(|(so_far, _)| ratio.value > so_far.value) {
                    worst = Some((ratio, format!("{size} B, {}, {}", direction.name(), metric.name())));
                }
            }
        }
    }
    if let Some((ratio, detail)) = worst {
        found.judge(PART, "vulkan / rm, worst of all sizes, both ways", Target::AtMost(LIMIT), "x", ratio, detail);
    }
    Ok(())
}

fn one_size(
    lab: &Lab<'_>,
    found: &mut Findings,
    load: &Load,
    metric: Metric,
    mappings: &[Mapping<'_>],
    sides: &[Side],
) -> std::result::Result<Estimate, Failure> {
    let calls = calls_in(BLOCK, MOST_CALLS, |_| load.carry(&mappings[1]))?;
    let mut arms: Vec<Arm<'_>> = mappings.iter().map(|mapping| arm(load, mapping, metric, calls)).collect();
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(SIZE))?;
    drop(arms);
    let bytes = load.bytes();
    let place = Place { part: PART, direction: load.direction, metric, bytes };
    let mut all_right = true;
    for (index, (mapping, side)) in mappings.iter().zip(sides).enumerate() {
        let verified = load.verify(mapping, &side.buffer, || load.carry(mapping))?;
        all_right &= verified;
        found.figure(place, NAMES[index], &report::Arm { rounds: &rounds, index, calls, per_call: 1.0 }, verified);
    }
    let (ratio, noise) = (rounds.ratio(0, 1), rounds.ratio(2, 1));
    found.compare(place, NAMES[0], NAMES[1], ratio);
    found.compare(place, NAMES[2], NAMES[1], noise);
    lab.screen.line(&format!(
        "{:>8}  {:<10}{:>12.1}{:>12.1}  {:<24}{:<24}{}",
        Binary(bytes),
        metric.name(),
        rounds.median(0).value,
        rounds.median(1).value,
        format!("{ratio:.3}"),
        format!("{noise:.3}"),
        if all_right { "yes" } else { "WRONG BYTES" },
    ))?;
    Ok(ratio)
}
