//! Backend vulkan against backend rm: two sessions in one process, every piece of memory mapped by both at the same time.
//!
//! The same memory, because its place in the GPU's memory counts. And many pieces of it, because the address of the window
//! counts, too, for small writes with a fence by more than the limit: one mapping of each backend would be compared as two
//! addresses rather than as two backends. A backend's figure is the mean over its windows, and the interval of the ratio
//! comes from drawing windows again, pairs on the same memory together. In each window the copies go to many places in
//! turn, since the bits of the address below the window's own count as well. How far apart the windows of one backend are is
//! shown beside, with two controls: one window twice, and one half of rm's windows over the other. A single call of a few
//! nanoseconds, of which the limit allows less than the clock resolves, is shown and not judged.

use std::cell::Cell;
use std::time::Duration;

use gdrcopy::tool::ab::{Arm, Estimate, Rounds, calls_in, median, shortest_resolved};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::{Binary, size_in_words};
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{Allocator, BackendKind, DeviceBuffer, Mapping, Result, Session};

use crate::lab::{self, Lab, Load};
use crate::report::{self, Findings, Place, Target, Windows};

const PART: &str = "backends";
const LARGEST: usize = 1 << 20;
/// Memory objects, of which each backend has a window.
const WINDOWS: u32 = 32;
/// Where in a window a round copies: at another of these each time. Whole pages from one another, so that lines are cut
/// alike; the last and largest copy ends inside the window.
const PLACES: usize = 16;
const STEP: usize = 17 << 12;
const _: () = assert!((PLACES - 1) * STEP + LARGEST <= lab::BUFFER);
const BLOCK: Duration = Duration::from_micros(40);
const MOST_CALLS: u32 = 200;
/// All rounds of one size, in one direction, by one metric.
const SIZE: Duration = Duration::from_millis(200);
const LIMIT: f64 = 1.03;

/// The same memory by each backend.
struct Pair<'a> {
    vulkan: Mapping<'a>,
    rm: Mapping<'a>,
    buffer: &'a DeviceBuffer,
}

/// A session of each backend.
struct Sessions {
    vulkan: Session,
    rm: Session,
}

impl Sessions {
    fn open(ordinal: usize) -> std::result::Result<Self, String> {
        let open = |kind| {
            // Vulkan looks for its device when something is pinned.
            let session = Session::builder().ignore_env().backend(kind).open()?;
            map(&session, &alloc(&session, ordinal)?)?.unmap()?;
            Ok::<_, gdrcopy::Error>(session)
        };
        let side = |kind| open(kind).map_err(|error| format!("backend {kind} is not to be had here: {error}"));
        Ok(Self { vulkan: side(BackendKind::Vulkan)?, rm: side(BackendKind::Rm)? })
    }

    /// Both backends' windows onto the buffer.
    fn pair<'a>(&self, buffer: &'a DeviceBuffer, vulkan_first: bool) -> Result<Pair<'a>> {
        let early = if vulkan_first { Some(map(&self.vulkan, buffer)?) } else { None };
        let rm = map(&self.rm, buffer)?;
        let vulkan = early.map_or_else(|| map(&self.vulkan, buffer), Ok)?;
        Ok(Pair { vulkan, rm, buffer })
    }

    /// Bytes of BAR1 in use, by whomever.
    fn bar1_used(&self, ordinal: usize) -> Option<u64> {
        let gpus = self.rm.gpus().ok()?;
        gpus.into_iter().find(|gpu| gpu.ordinal == ordinal)?.bar1.map(|bar1| bar1.used_bytes)
    }
}

/// A memory object of the buffer's own, which both can map.
fn alloc(session: &Session, ordinal: usize) -> Result<DeviceBuffer> {
    session.alloc_as(ordinal, lab::BUFFER, Allocator::CuMemCreate)
}

fn map<'a>(session: &Session, buffer: &'a DeviceBuffer) -> Result<Mapping<'a>> {
    session.pin(buffer)?.map()
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    let ordinal = lab.rig.gpu.ordinal;
    let sessions = match Sessions::open(ordinal) {
        Ok(sessions) => sessions,
        Err(why) => return found.skip(lab.screen, PART, why),
    };
    let count = lab.pace.times(WINDOWS);
    let no_room = |error| format!("{count} windows of each backend are not to be had here: {error}");
    let buffers: Result<Vec<DeviceBuffer>> = (0..count).map(|_| alloc(&sessions.rm, ordinal)).collect();
    let buffers = match buffers {
        Ok(buffers) => buffers,
        Err(error) => return found.skip(lab.screen, PART, no_room(error)),
    };
    let before = sessions.bar1_used(ordinal);
    // Who is first to map must not decide who gets which addresses.
    let pairs: Result<Vec<Pair<'_>>> =
        buffers.iter().enumerate().map(|(n, buffer)| sessions.pair(buffer, n / 2 % 2 == 0)).collect();
    let pairs = match pairs {
        Ok(pairs) => pairs,
        Err(error) => return found.skip(lab.screen, PART, no_room(error)),
    };
    lab.screen.line("")?;
    lab.screen.line(&windows_in_words(&pairs, before.zip(sessions.bar1_used(ordinal))))?;

    let mut whole = Whole::default();
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        lab.screen.line("")?;
        lab.screen.line(&format!("{}: vulkan over rm, means over windows [ns]", direction.in_words()))?;
        lab.screen.line(&format!(
            "{:>8}  {:<10}{:<30}{:<30}{:<22}{:<22}{:<22}verified",
            "size [B]",
            "metric",
            "vulkan (min, median, max)",
            "rm (min, median, max)",
            "vulkan / rm",
            "rm / rm, halves",
            "rm, one window twice"
        ))?;
        for size in (0..=LARGEST.ilog2()).map(|power| 1_usize << power) {
            let load = Load::new(direction, size);
            for metric in [Metric::Sustained, Metric::Single] {
                let outcome = one_size(lab, found, &load, metric, &pairs)?;
                whole.add(outcome, || format!("{size} B, {}, {}", direction.name(), metric.name()));
            }
        }
    }
    whole.judge(lab, found, count)
}

/// How many windows there are, and what the GPU says that they take.
fn windows_in_words(pairs: &[Pair<'_>], bar1: Option<(u64, u64)>) -> String {
    let each = u64::try_from(lab::BUFFER).unwrap_or(u64::MAX);
    let wanted = u64::try_from(2 * pairs.len()).unwrap_or(u64::MAX).saturating_mul(each);
    let in_use = match bar1 {
        None => "the driver does not tell how much BAR1 is in use".to_owned(),
        Some((before, after)) => {
            let grown = after.saturating_sub(before);
            let verdict =
                if grown < wanted { "LESS than a window of its own for each" } else { "a window of its own for each" };
            format!("BAR1 in use grew by {}: {verdict}", size_in_words(grown))
        }
    };
    format!("{} windows of each backend, {} each, both on the same memory; {in_use}", pairs.len(), size_in_words(each))
}

/// The figures of one backend at one size: a median for each window, in nanoseconds.
struct Backend {
    medians: Vec<f64>,
}

impl Backend {
    fn of(rounds: &Rounds, arms: impl Iterator<Item = usize>) -> Self {
        Self { medians: arms.map(|arm| median(&mut rounds.times(arm).to_vec())).collect() }
    }

    /// Over the windows, as in the ratio.
    fn mean(&self) -> f64 {
        self.medians.iter().sum::<f64>() / f64::from(u32::try_from(self.medians.len()).unwrap_or(u32::MAX))
    }

    /// Smallest, median, largest.
    fn range(&self) -> [f64; 3] {
        let mut sorted = self.medians.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let end = |at: Option<&f64>| at.copied().unwrap_or(f64::NAN);
        [end(sorted.first()), median(&mut sorted.clone()), end(sorted.last())]
    }

    /// The slowest window over the fastest.
    fn spread(&self) -> f64 {
        let [min, _, max] = self.range();
        max / min
    }

    fn part(&self, which: impl Fn(usize) -> bool) -> Vec<f64> {
        self.medians.iter().enumerate().filter(|&(n, _)| which(n)).map(|(_, &ns)| ns).collect()
    }
}

/// What one size came to.
struct Outcome {
    ratio: Estimate,
    /// The clock tells the limit from 1 at such times.
    is_judged: bool,
    /// Of either backend, the larger one.
    spread: f64,
}

fn one_size(
    lab: &Lab<'_>,
    found: &mut Findings,
    load: &Load,
    metric: Metric,
    pairs: &[Pair<'_>],
) -> std::result::Result<Outcome, Failure> {
    // One of vulkan, one of rm, .., and the first of rm once more. Windows onto the same memory are far apart in either
    // direction: what one leaves in a cache must not always be found by the other.
    let turned = pairs.iter().cycle().skip(pairs.len() / 2);
    let mappings: Vec<&Mapping<'_>> = pairs
        .iter()
        .zip(turned.clone())
        .flat_map(|(pair, other)| [&pair.vulkan, &other.rm])
        .chain(turned.map(|pair| &pair.rm).take(1))
        .collect();
    let places: Vec<Cell<usize>> = mappings.iter().map(|_| Cell::new(0)).collect();
    let calls = match pairs {
        [first, ..] => calls_in(BLOCK, MOST_CALLS, |_| load.carry(&first.rm))?,
        [] => 1,
    };
    let mut arms: Vec<Arm<'_>> =
        mappings.iter().zip(&places).map(|(mapping, place)| arm(load, mapping, place, metric, calls)).collect();
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(SIZE))?;
    drop(arms);

    let place = Place { part: PART, direction: load.direction, metric, bytes: load.bytes() };
    let again = 2 * pairs.len();
    let by_vulkan = Backend::of(&rounds, (0..again).step_by(2));
    let mut by_rm = Backend::of(&rounds, (1..again).step_by(2));
    by_rm.medians.rotate_right(pairs.len() / 2);
    let total = calls.saturating_mul(u32::try_from(rounds.len()).unwrap_or(u32::MAX));
    let mut all_right = true;
    for (name, backend) in [("vulkan", &by_vulkan), ("rm", &by_rm)] {
        let mut verified = true;
        for pair in pairs {
            let mapping = if name == "rm" { &pair.rm } else { &pair.vulkan };
            verified &= load.verify(mapping, pair.buffer, || load.carry(mapping))?;
        }
        all_right &= verified;
        let windows = Rounds::of(vec![backend.medians.clone()]);
        found.figure(place, name, &report::Arm { rounds: &windows, index: 0, calls: total, per_call: 1.0 }, verified);
        let medians_ns = backend.medians.clone();
        found.windows.push(Windows { place, method: name, medians_ns, rounds: rounds.len() });
    }
    let ratio = Rounds::of(vec![by_vulkan.medians.clone(), by_rm.medians.clone()]).ratio_of_means(0, 1);
    let halves = Rounds::of(vec![by_rm.part(|n| n % 2 == 0), by_rm.part(|n| n % 2 == 1)]).ratio_of_means(0, 1);
    let noise = rounds.ratio(again, 1);
    found.compare(place, "vulkan", "rm", ratio);
    found.compare(place, "rm, even windows", "rm, odd windows", halves);
    found.compare(place, "rm", "rm", noise);
    let range = |backend: &Backend| backend.range().map(|ns| format!("{ns:.1}")).join("  ");
    lab.screen.line(&format!(
        "{:>8}  {:<10}{:<30}{:<30}{:<22}{:<22}{:<22}{}",
        Binary(load.bytes()),
        metric.name(),
        range(&by_vulkan),
        range(&by_rm),
        format!("{ratio:.3}"),
        format!("{halves:.3}"),
        format!("{noise:.3}"),
        if all_right { "yes" } else { "WRONG BYTES" },
    ))?;
    // Of one call at a time; what many calls take together is long.
    let is_judged = metric != Metric::Single || ratio.is_resolved(LIMIT, by_rm.mean(), lab.clock.resolution_ns());
    Ok(Outcome { ratio, is_judged, spread: by_vulkan.spread().max(by_rm.spread()) })
}

/// Copies through one window, each block at the next place, which a copy before it has warmed.
fn arm<'a>(load: &'a Load, mapping: &'a Mapping<'_>, place: &'a Cell<usize>, metric: Metric, calls: u32) -> Arm<'a> {
    let op = move |_| load.carry_at(mapping, place.get() * STEP);
    let arm = match metric {
        Metric::Sustained => Arm::sustained(calls, op),
        _ => Arm::single(calls, op),
    };
    arm.after(move || {
        place.set((place.get() + 1) % PLACES);
        load.carry_at(mapping, place.get() * STEP)
    })
}

/// The part as a whole: the size whose ratio can least be said to keep the limit, and the one whose windows differ most.
#[derive(Default)]
struct Whole {
    worst: Option<(Estimate, String)>,
    widest: Option<(f64, String)>,
    sizes: u32,
    kept: u32,
    /// Too short for the clock, and not among the sizes.
    unresolved: u32,
}

impl Whole {
    fn add(&mut self, outcome: Outcome, name: impl Fn() -> String) {
        let Outcome { ratio, spread, is_judged } = outcome;
        if !is_judged {
            self.unresolved += 1;
            return;
        }
        self.sizes += 1;
        self.kept += u32::from(ratio.high <= LIMIT);
        if self.worst.as_ref().is_none_or(|(so_far, _)| ratio.high > so_far.high) {
            self.worst = Some((ratio, name()));
        }
        if self.widest.as_ref().is_none_or(|&(so_far, _)| spread > so_far) {
            self.widest = Some((spread, name()));
        }
    }

    fn judge(self, lab: &Lab<'_>, found: &mut Findings, windows: u32) -> std::result::Result<(), Failure> {
        let (Some((ratio, at)), Some((spread, widest_at))) = (self.worst, self.widest) else { return Ok(()) };
        let Self { kept, sizes, unresolved, .. } = self;
        let apart = format!("windows of one backend differ by up to {:.1} % ({widest_at})", 100.0 * (spread - 1.0));
        lab.screen.line("")?;
        lab.screen.line(&apart)?;
        let mut detail = format!("{at}; {kept} of {sizes} sizes within it; {apart}");
        if unresolved > 0 {
            let shortest = shortest_resolved(LIMIT, lab.clock.resolution_ns());
            let share = 100.0 * (LIMIT - 1.0);
            detail = format!(
                "{detail}; {unresolved} figures below {shortest:.0} ns, of which the clock does not resolve {share:.0} %, \
                 are not judged"
            );
        }
        if let Some(why) = not_shown(ratio, windows) {
            detail = format!("{detail}; {why}");
        }
        let target = "vulkan / rm, same memory, whole interval, every size";
        found.judge(PART, target, Target::SurelyAtMost(LIMIT), "x", ratio, detail);
        Ok(())
    }
}

/// Why an interval that reaches past the limit does: the windows are too few for how they differ, or the ratio itself.
fn not_shown(ratio: Estimate, windows: u32) -> Option<String> {
    let (room, reach) = (LIMIT - 1.0, ratio.high - ratio.value);
    match ratio {
        Estimate { high, .. } if high <= LIMIT => None,
        Estimate { low, .. } if low > LIMIT => Some("slower by more than windows differ".to_owned()),
        // The interval shrinks with the root of their number.
        _ if reach > room => Some(format!(
            "{windows} windows cannot show {:.0} % where they differ so much: about {:.0} would",
            100.0 * room,
            f64::from(windows) * (reach / room).powi(2)
        )),
        _ => Some(format!("{windows} windows leave it open")),
    }
}
