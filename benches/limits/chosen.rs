//! The routine that the library chose against every routine that this CPU has, by size, fenced as `write` and `read` are.

#![allow(unsafe_code, reason = "routines are called on the window directly, so that all of them share one mapping")]

use std::time::Duration;

use gdrcopy::copy::{self, Routine, fence};
use gdrcopy::tool::ab::{Arm, Estimate, Rounds, calls_in};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::Binary;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{Mapping, Result};

use crate::lab::{Lab, Load};
use crate::report::{self, Findings, Place, Target};

const PART: &str = "chosen";
/// Powers of two, and sizes with a head or a tail.
const SIZES: [u32; 31] = [
    1, 2, 3, 4, 7, 8, 13, 16, 24, 32, 63, 64, 65, 100, 128, 200, 256, 512, 1000, 1024, 2048, 4096, 8192, 10_000,
    16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576,
];
/// One block of one arm.
const BLOCK: Duration = Duration::from_micros(150);
const MOST_CALLS: u32 = 500;
/// All rounds of one size in one direction.
const SIZE: Duration = Duration::from_millis(220);
/// A routine that takes so many times the fastest's time can win no round; to time it again and again would take all of it.
const HOPELESS: f64 = 4.0;

/// One size in one direction.
#[derive(Debug)]
struct Copy<'a> {
    mapping: &'a Mapping<'a>,
    load: Load,
}

impl<'a> Copy<'a> {
    #[inline(always)]
    fn once(&self, routine: &Routine) -> Result<()> {
        let device = self.mapping.as_ptr();
        match self.load.direction {
            Direction::HostToDevice => {
                // SAFETY: the mapping has 2 MiB from here, the largest size is half of that; only available routines
                // come here; no reference to the window exists.
                unsafe { routine.store(device, &self.load.from) };
                fence::store();
            }
            Direction::DeviceToHost => {
                let mut to = self.load.to.borrow_mut();
                fence::full();
                // SAFETY: as above; the window is whole pages and so whole lines.
                unsafe { routine.load(&mut to, device) };
                fence::load();
            }
        }
        Ok(())
    }

    /// What a program calls, and so what the library chose.
    fn chosen(&'a self, calls: u32) -> Arm<'a> {
        Arm::sustained(calls, move |_| self.load.carry(self.mapping))
    }

    fn arm(&'a self, routine: &'static Routine, calls: u32) -> Arm<'a> {
        Arm::sustained(calls, move |_| self.once(routine))
    }
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    let rivals: Vec<&'static Routine> = copy::routines().iter().copied().filter(|rival| rival.is_available()).collect();
    let mut worst: Vec<(Direction, u32, Estimate)> = Vec::new();
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        lab.screen.line("")?;
        lab.screen.line(&format!(
            "{}, fenced, back to back: {}, over the best routine called directly [ns]",
            direction.in_words(),
            call(direction)
        ))?;
        lab.screen.line(&format!(
            "{:>8}{:>12}{:>22}  {:<24}{:<24}verified",
            "size [B]", "chosen", "best", "chosen / best", "chosen again"
        ))?;
        for size in SIZES {
            let ratio = one_size(lab, found, direction, size, &rivals)?;
            worst.push((direction, size, ratio));
        }
    }
    let worst_of = |direction: Option<Direction>| {
        let those = worst.iter().filter(|(d, ..)| direction.is_none_or(|wanted| *d == wanted));
        those.max_by(|a, b| a.2.value.total_cmp(&b.2.value)).copied()
    };
    if let Some((_, size, ratio)) = worst_of(Some(Direction::HostToDevice)) {
        let detail = format!("{size} B");
        found.judge(PART, "fenced H2D, chosen / best routine, worst size", Target::AtMost(1.03), "x", ratio, detail);
    }
    if let Some((direction, size, ratio)) = worst_of(None) {
        let detail = format!("{size} B, {}", direction.name());
        found.judge(PART, "both ways, chosen / best routine, worst size", Target::AtMost(1.05), "x", ratio, detail);
    }
    Ok(())
}

/// The ratio of the chosen routine to the best.
fn one_size(
    lab: &Lab<'_>,
    found: &mut Findings,
    direction: Direction,
    size: u32,
    rivals: &[&'static Routine],
) -> std::result::Result<Estimate, Failure> {
    let copy = Copy { mapping: lab.mapping, load: Load::new(direction, usize::try_from(size).unwrap_or(0)) };
    let calls = calls_in(BLOCK, MOST_CALLS, |_| copy.load.carry(lab.mapping))?;
    // One block each, to leave out who is far behind.
    let mut first = Vec::with_capacity(rivals.len());
    for rival in rivals {
        let few = if calls > 1 { calls.div_ceil(10) } else { 1 };
        first.push(copy.arm(rival, few).run(lab.clock)?.unwrap_or(0.0));
    }
    let fastest = first.iter().copied().fold(f64::INFINITY, f64::min);
    let near = rivals.iter().zip(&first).filter(|&(_, &ns)| ns <= HOPELESS * fastest);
    let near: Vec<&'static Routine> = near.map(|(&rival, _)| rival).collect();

    // The call, the call again for the noise floor, and everybody.
    let mut arms = vec![copy.chosen(calls), copy.chosen(calls)];
    arms.extend(near.iter().map(|rival| copy.arm(rival, calls)));
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(SIZE))?;
    drop(arms);

    let place = Place { part: PART, direction, metric: Metric::Sustained, bytes: u64::from(size) };
    let own = call(direction);
    let mut all_right = true;
    let mut best = (0, f64::INFINITY);
    for index in 0..near.len() + 2 {
        let rival = index.checked_sub(2).map(|at| near[at]);
        let verified = copy.load.verify(lab.mapping, &lab.rig.buffer, || match rival {
            Some(rival) => copy.once(rival),
            None => copy.load.carry(lab.mapping),
        })?;
        all_right &= verified;
        let name = rival.map_or(own, Routine::name);
        let taken = report::Arm { rounds: &rounds, index, calls, per_call: 1.0 };
        let median = found.figure(place, name, &taken, verified).value;
        if rival.is_some() && median < best.1 {
            best = (index, median);
        }
    }
    let (ratio, noise) = (rounds.ratio(0, best.0), rounds.ratio(0, 1));
    let best_name = best.0.checked_sub(2).map_or(own, |at| near[at].name());
    found.compare(place, own, &format!("best ({best_name})"), ratio);
    found.compare(place, own, own, noise);
    lab.screen.line(&format!(
        "{:>8}{:>12.1}{:>22}  {:<24}{:<24}{}",
        Binary(u64::from(size)),
        rounds.median(0).value,
        format!("{:.1} {best_name}", best.1),
        format!("{ratio:.3}"),
        format!("{noise:.3}"),
        if all_right { "yes" } else { "WRONG BYTES" },
    ))?;
    Ok(ratio)
}

/// The call that does it.
fn call(direction: Direction) -> &'static str {
    match direction {
        Direction::HostToDevice => "write",
        Direction::DeviceToHost => "read",
    }
}
