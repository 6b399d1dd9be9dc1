//! Measuring ways of copying against each other, size by size.
//!
//! A fenced store by itself takes 48 or 138 ns, for the drain of the one before falls into the timed span or not. So calls
//! are timed back to back, in blocks of many, with what is between two blocks drained. Blocks of all ways take turns, in a
//! random order, so that whatever changes meanwhile changes for all of them; and of each the median counts.

use std::time::{Duration, Instant};

use super::arm::{Arm, close, is_decided};
use super::choose::Cell;
use super::{CopyDirection, CopyMethod};
use crate::copy::{ParallelCopier, largest_alone};
use crate::error::{Error, ErrorKind, Result};

/// The least that the largest size can be: a table that ends below a line says nothing about what is above.
const LEAST_LARGEST: usize = 64;
/// Blocks of each way, at each size, the first one among them: at least so many when time is up, so many before the figures
/// can be sure, and at most.
const FEWEST_ROUNDS: usize = 4;
const FEW_ROUNDS: usize = 6;
pub(super) const MAX_ROUNDS: usize = 101;
/// A way that takes so many times as long as the best is given up.
const HOPELESS: f64 = 4.0;
/// A time that grows by more than this when the size doubles will do so again.
const DOUBLES: f64 = 1.6;
/// What two ways must differ by to differ, however well they are known: least and most.
const MARGINS: (f64, f64) = (1.01, 1.03);
/// How long a block waits for workers to wake up, or to fall asleep.
const PATIENCE: Duration = Duration::from_millis(1);

/// What is measured: ways of copying between the start of some device memory and host memory.
pub(crate) trait Subject {
    /// The ways there are for copies of so many bytes.
    fn methods(&self, direction: CopyDirection, bytes: usize) -> Vec<CopyMethod>;

    /// How long a block of copies takes, [timed](Block::time) when everything is ready for it. Afterwards nothing of it is
    /// under way.
    fn block(&mut self, method: CopyMethod, direction: CopyDirection, bytes: usize, block: Block) -> Result<Duration>;
}

/// Copies that are timed together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(super) calls: u32,
}

impl Block {
    /// Makes the calls back to back. Where there are several, another one comes first, untimed, so that all of them find
    /// caches and buffers as they leave them themselves.
    #[inline]
    pub(crate) fn time(self, mut copy: impl FnMut() -> Result<()>) -> Result<Duration> {
        if self.calls > 1 {
            copy()?;
        }
        let begun = Instant::now();
        for _ in 0..self.calls {
            copy()?;
        }
        Ok(begun.elapsed())
    }
}

/// Wakes the workers and waits for them.
pub(crate) fn rouse(copier: &ParallelCopier) {
    copier.wake();
    wait_until(|| copier.awake() + 1 == copier.threads());
}

/// Waits until the workers sleep: those of another copier are on the same CPUs.
pub(crate) fn rest(copier: &ParallelCopier) {
    wait_until(|| copier.awake() == 0);
}

fn wait_until(is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() && started.elapsed() < PATIENCE {
        std::hint::spin_loop();
    }
}

/// Whether a parallel copier shares such a copy. Where it does not, it is no other way than one core.
pub(crate) fn are_shared(direction: CopyDirection, bytes: usize) -> bool {
    bytes > largest_alone(direction)
}

/// The sizes that are measured: from 1 byte in steps of 2.
pub(crate) fn sizes(op: &'static str, largest: usize) -> Result<Vec<usize>> {
    if largest < LEAST_LARGEST {
        let cause = format!("the largest size to measure is {largest} bytes, of at least {LEAST_LARGEST}");
        return Err(Error::new(op, ErrorKind::InvalidArgument, cause).remedy("ask for a larger size"));
    }
    let doubled = std::iter::successors(Some(1_usize), |size| size.checked_mul(2));
    Ok(doubled.take_while(|&size| size <= largest).collect())
}

/// The time that all cells have together.
#[derive(Debug)]
pub(crate) struct Budget {
    end: Instant,
    cells: u32,
}

impl Budget {
    pub(crate) fn new(time: Duration, cells: usize) -> Self {
        Self { end: Instant::now() + time, cells: u32::try_from(cells).unwrap_or(u32::MAX) }
    }

    /// For the next cell: half as much again as its share of what is left, since most need less.
    fn share(&mut self) -> Duration {
        let left = self.end.saturating_duration_since(Instant::now());
        let share = left * 3 / 2 / self.cells.max(1);
        self.cells = self.cells.saturating_sub(1);
        share.min(left)
    }
}

/// The cells of one direction, for sizes that double. `begin` is told the size before each.
pub(crate) fn cells(
    subject: &mut impl Subject,
    direction: CopyDirection,
    sizes: &[usize],
    budget: &mut Budget,
    mut begin: impl FnMut(usize),
) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::with_capacity(sizes.len());
    let mut before: Option<Cell> = None;
    let mut given_up = Vec::new();
    let mut order = Order(1);
    for &bytes in sizes {
        begin(bytes);
        let time = budget.share();
        let mut methods = subject.methods(direction, bytes);
        methods.retain(|method| !given_up.contains(method));
        let arms = arms(subject, direction, bytes, &methods, time, &mut order)?;
        // By the least that each took, in which nothing came in between.
        let least = of(bytes, &arms, Arm::least);
        given_up.extend(hopeless(&least, before.as_ref(), time));
        before = Some(least);
        cells.push(of(bytes, &arms, Arm::median));
    }
    Ok(cells)
}

/// A cell of a figure of each arm.
fn of(bytes: usize, arms: &[Arm], figure: fn(&Arm) -> f64) -> Cell {
    let margin = 1.0 + close(arms).map(Arm::doubt).fold(0.0, f64::max);
    Cell {
        bytes,
        candidates: arms.iter().map(|arm| (arm.method, figure(arm))).collect(),
        margin: margin.clamp(MARGINS.0, MARGINS.1),
    }
}

fn is_routine(method: CopyMethod) -> bool {
    matches!(method, CopyMethod::Routine(_))
}

/// What is not worth trying at larger sizes: what is far behind for the second time, doubles with the size, and takes a good part of the time
/// there is. It cannot catch up, for the best never takes more than twice as long for twice as much. Routines also compete
/// among themselves, and so go together.
fn hopeless(cell: &Cell, before: Option<&Cell>, time: Duration) -> Vec<CopyMethod> {
    let best = cell.fastest(|_| true);
    let best_before = before.map_or(0.0, |before| before.fastest(|_| true));
    let is_doomed = |(method, ns): (CopyMethod, f64)| {
        let earlier = before.and_then(|before| before.ns(method));
        ns > HOPELESS * best
            && earlier.is_some_and(|earlier| ns > DOUBLES * earlier && earlier > HOPELESS * best_before)
    };
    // Next time, with the first calls and the fewest rounds.
    let costs = |ns: f64| 2.0 * ns * 6.0 > time.as_secs_f64() * 1e9 / 4.0;
    let candidates = || cell.candidates.iter().copied();
    let mut routines = candidates().filter(|(method, _)| is_routine(*method));
    let together = costs(routines.clone().map(|(_, ns)| ns).sum()) && routines.all(is_doomed);
    let gone = |&(method, ns): &(CopyMethod, f64)| {
        if is_routine(method) { together } else { is_doomed((method, ns)) && costs(ns) }
    };
    candidates().filter(gone).map(|(method, _)| method).collect()
}

/// Measures the ways of one size.
fn arms(
    subject: &mut impl Subject,
    direction: CopyDirection,
    bytes: usize,
    methods: &[CopyMethod],
    time: Duration,
    order: &mut Order,
) -> Result<Vec<Arm>> {
    let started = Instant::now();
    let mut arms = Vec::with_capacity(methods.len());
    for &method in methods {
        arms.push(Arm::new(subject, method, direction, bytes)?);
    }
    // Another look at those that seem far behind, for something may have come in between.
    let seem = contenders(&arms);
    for at in (0..arms.len()).filter(|at| !seem.contains(at)) {
        if arms[at].calls > 1 {
            arms[at].run(subject, direction, bytes)?;
        }
    }
    let mut left = contenders(&arms);
    for round in 1..MAX_ROUNDS {
        let is_late = started.elapsed() >= time;
        if (round >= FEWEST_ROUNDS && is_late) || (round >= FEW_ROUNDS && is_decided(&arms)) {
            break;
        }
        order.shuffle(&mut left);
        for &at in &left {
            arms[at].run(subject, direction, bytes)?;
        }
    }
    Ok(arms)
}

/// Those that are not far behind the best; of several routines, which compete among themselves, the best routine.
fn contenders(arms: &[Arm]) -> Vec<usize> {
    let fastest = |is_rival: fn(CopyMethod) -> bool| {
        let rivals = arms.iter().filter(|arm| is_rival(arm.method));
        rivals.map(Arm::least).fold(f64::INFINITY, f64::min)
    };
    let (best, best_routine) = (fastest(|_| true), fastest(is_routine));
    let routines = arms.iter().filter(|arm| is_routine(arm.method)).count();
    let is_left = |arm: &Arm| {
        let rival = if is_routine(arm.method) && routines > 1 { best_routine } else { best };
        arm.least() <= HOPELESS * rival
    };
    (0..arms.len()).filter(|&at| is_left(&arms[at])).collect()
}

/// Random orders, the same in every run: Knuth's linear congruential generator, by its upper half.
struct Order(u64);

impl Order {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or(0) % n.max(1)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackendKind;
    use crate::session::Session;
    use CopyDirection::{DeviceToHost, HostToDevice};

    const MS: Duration = Duration::from_millis(1);

    /// Copies that take what a function says, in nanoseconds; 3 of 100 take ten times as long.
    struct Model<F> {
        methods: Vec<CopyMethod>,
        ns: F,
        order: Order,
        /// Blocks so far: by which way, at which size.
        blocks: Vec<(CopyMethod, usize)>,
    }

    impl<F: Fn(CopyMethod, usize) -> f64> Model<F> {
        fn new(methods: &[&str], ns: F) -> Self {
            let methods = methods.iter().map(|name| name.parse().unwrap()).collect();
            Self { methods, ns, order: Order(7), blocks: Vec::new() }
        }

        fn blocks_of(&self, name: &str, bytes: usize) -> usize {
            self.blocks.iter().filter(|(method, size)| method.to_string() == name && *size == bytes).count()
        }
    }

    impl<F: Fn(CopyMethod, usize) -> f64> Subject for Model<F> {
        fn methods(&self, _: CopyDirection, _: usize) -> Vec<CopyMethod> {
            self.methods.clone()
        }

        fn block(&mut self, method: CopyMethod, _: CopyDirection, bytes: usize, block: Block) -> Result<Duration> {
            self.blocks.push((method, bytes));
            let noise = f64::from(u32::try_from(self.order.below(200)).unwrap()) / 10_000.0;
            let hiccup = if self.order.below(100) < 3 { 10.0 } else { 1.0 };
            let ns = (self.ns)(method, bytes) * (0.99 + noise) * hiccup * f64::from(block.calls);
            Ok(Duration::from_secs_f64(ns / 1e9))
        }
    }

    /// Latency and rate of four ways: nanoseconds, and nanoseconds per byte.
    fn typical(method: CopyMethod, bytes: usize) -> f64 {
        let bytes = f64::from(u32::try_from(bytes).unwrap());
        let (latency, per_byte) = match method {
            CopyMethod::Routine(_) => (1020.0, 1.0),
            CopyMethod::Parallel(_) => (1200.0, 0.13),
            CopyMethod::Agent => (2100.0, 0.025),
            _ => (8000.0, 0.02),
        };
        latency + per_byte * bytes
    }

    #[test]
    fn the_best_is_found_at_every_size_and_what_cannot_win_is_left_alone() {
        let mut model = Model::new(&["avx2", "parallel-8", "agent", "copy_engine"], typical);
        let sizes = sizes("test", 64 << 20).unwrap();
        assert_eq!((sizes.len(), sizes[0], sizes[26]), (27, 1, 64 << 20));
        let mut begun = Vec::new();
        let mut budget = Budget::new(500 * MS, sizes.len());
        let cells = cells(&mut model, DeviceToHost, &sizes, &mut budget, |bytes| begun.push(bytes)).unwrap();
        assert_eq!(begun, sizes);
        for cell in &cells {
            let bytes = cell.bytes;
            let least = model.methods.iter().map(|&m| typical(m, bytes)).fold(f64::INFINITY, f64::min);
            let best = cell.best("avx2");
            assert!(typical(best, bytes) <= 1.03 * least, "{cell:?}: {best}");
            assert!(cell.ns(best).is_some_and(|ns| (ns / typical(best, bytes) - 1.0).abs() < 0.02), "{cell:?}");
            assert!((1.01..=1.03).contains(&cell.margin), "{cell:?}");
        }
        // 67 ms each.
        assert_eq!(model.blocks_of("avx2", 64 << 20), 0);
        // Far behind, but not growing: the engine is there when its time comes.
        assert!(model.blocks_of("copy_engine", 1) > 0 && cells[26].best("avx2") == CopyMethod::CopyEngine);
    }

    #[test]
    fn equals_are_told_apart_as_well_as_they_can_be() {
        let mut model = Model::new(&["avx2", "agent", "copy_engine"], |method, _| match method {
            CopyMethod::Routine(_) => 1000.0,
            CopyMethod::Agent => 965.0,
            _ => 9000.0,
        });
        let cells = cells(&mut model, DeviceToHost, &[64], &mut Budget::new(1000 * MS, 1), |_| ()).unwrap();
        assert_eq!(cells[0].best("avx2"), CopyMethod::Agent, "{cells:?}");
        assert!(model.blocks_of("avx2", 64) > model.blocks_of("copy_engine", 64));
        assert_eq!(model.blocks_of("copy_engine", 64), 4, "the first ones only");
    }

    #[test]
    fn routines_compete_among_themselves_where_another_way_is_best() {
        let mut model = Model::new(&["avx2", "sse41", "copy_engine"], |method, bytes| match method {
            CopyMethod::Routine("avx2") => 1000.0 * f64::from(u32::try_from(bytes).unwrap()),
            CopyMethod::Routine(_) => 1100.0 * f64::from(u32::try_from(bytes).unwrap()),
            _ => 100.0,
        });
        let cells = cells(&mut model, DeviceToHost, &[1, 2], &mut Budget::new(1000 * MS, 2), |_| ()).unwrap();
        assert!(model.blocks_of("avx2", 2) > 4 && model.blocks_of("sse41", 2) > 4, "{cells:?}");
        assert_eq!(cells[1].best("avx2"), CopyMethod::CopyEngine);
    }

    /// A copy of which a parallel copier documents that it makes it alone wakes nobody, and the next larger one does.
    #[test]
    fn a_parallel_copier_shares_what_it_is_said_to_share() {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = session.alloc(64 << 10).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        let spin = 100 * MS;
        let copier = ParallelCopier::builder().spin(spin).threads(2).write_threads(2).build();
        // Too few CPUs.
        let Ok(copier) = copier else { return };
        let carry = |direction, host: &mut [u8]| match direction {
            HostToDevice => copier.write(&mapping, 0, host).unwrap(),
            DeviceToHost => copier.read(&mapping, 0, host).unwrap(),
        };
        let mut host = vec![0; 64 << 10];
        wait_for(|| copier.awake() == 0);
        for direction in CopyDirection::ALL {
            let alone = largest_alone(direction);
            assert!(!are_shared(direction, alone) && are_shared(direction, alone + 1));
            (0..10).for_each(|_| carry(direction, &mut host[..alone]));
            std::thread::sleep(5 * MS);
            assert_eq!(copier.awake(), 0, "{direction}: {alone} bytes");
            wait_for(|| {
                carry(direction, &mut host[..alone + 1]);
                copier.awake() > 0
            });
            wait_for(|| copier.awake() == 0);
        }
    }

    fn wait_for(mut is_so: impl FnMut() -> bool) {
        let started = Instant::now();
        while !is_so() {
            assert!(started.elapsed() < Duration::from_secs(20), "not within 20 s");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_budget_is_shared() {
        let mut budget = Budget::new(1000 * MS, 10);
        assert!((140 * MS..=150 * MS).contains(&budget.share()));
        let mut none = Budget::new(Duration::ZERO, 3);
        assert_eq!(none.share(), Duration::ZERO);
    }

    #[test]
    fn too_small_a_largest_size_is_refused() {
        let error = sizes("calibrate", 63).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("63 bytes, of at least 64"), "{error}");
    }
}
