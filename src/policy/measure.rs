//! Measuring ways of copying against each other, size by size.
//!
//! A fenced store by itself takes 48 or 138 ns, for the drain of the one before falls into the timed span or not. So calls
//! are timed back to back, in blocks of many, with what is between two blocks drained. Blocks of all ways take turns, in a
//! random order, so that whatever changes meanwhile changes for all of them; and of each the median counts.
//!
//! First every size has a few rounds. Between two neighbours with different best ways another size is measured. What is left
//! of the time goes to the sizes at which it is open which way is best, a round at a time and wherever least time was spent
//! so far: so a disturbance that lasts for some milliseconds, which would decide a size alone, is in few of its rounds.

use std::time::{Duration, Instant};

use super::arm::{Arm, close, is_decided};
use super::choose::Cell;
use super::subject::Subject;
use super::{CopyDirection, CopyMethod};
use crate::error::Result;

/// Blocks of each way, at each size, the first one among them: at first, when the figures can be sure, and at most.
const FEWEST_ROUNDS: usize = 4;
const FEW_ROUNDS: usize = 8;
pub(super) const MAX_ROUNDS: usize = 101;
/// A way that takes so many times as long as the best is given up.
const HOPELESS: f64 = 4.0;
/// A time that grows by more than this when the size doubles will do so again.
const DOUBLES: f64 = 1.6;
/// What two ways must differ by to differ, however well they are known: least and most.
const MARGINS: (f64, f64) = (1.01, 1.03);
/// Nanoseconds of a call that is not made again to see whether it was slow by chance.
const LONG: f64 = 2e6;
/// The smallest size above which one in between is measured. Below it a step is a few bytes.
const LEAST_BETWEEN: usize = 64;

/// One direction and size.
struct Site {
    direction: CopyDirection,
    bytes: usize,
    arms: Vec<Arm>,
    /// Rounds of all contenders.
    rounds: usize,
    /// Since the first rounds.
    spent: Duration,
}

impl Site {
    fn is_open(&self) -> bool {
        self.rounds < MAX_ROUNDS && (self.rounds < FEW_ROUNDS || !is_decided(&self.arms))
    }

    fn round(&mut self, subject: &mut impl Subject, mut who: Vec<usize>, order: &mut Order) -> Result<()> {
        order.shuffle(&mut who);
        for at in who {
            self.arms[at].run(subject, self.direction, self.bytes)?;
        }
        self.rounds += 1;
        Ok(())
    }

    /// By a figure of each arm.
    fn cell(&self, figure: fn(&Arm) -> f64) -> Cell {
        let margin = 1.0 + close(&self.arms).map(Arm::doubt).fold(0.0, f64::max);
        Cell {
            bytes: self.bytes,
            candidates: self.arms.iter().map(|arm| (arm.method, figure(arm))).collect(),
            margin: margin.clamp(MARGINS.0, MARGINS.1),
        }
    }
}

/// The cells of both directions, to the device and from it, for sizes that double and some in between, in about so much time.
/// `begin` is told each of the sizes that double before it is measured.
pub(crate) fn tables(
    subject: &mut impl Subject,
    sizes: &[usize],
    time: Duration,
    mut begin: impl FnMut(CopyDirection, usize),
) -> Result<[Vec<Cell>; 2]> {
    let end = Instant::now() + time;
    let mut order = Order(1);
    let cells = u32::try_from(CopyDirection::ALL.len() * sizes.len()).unwrap_or(u32::MAX);
    let share = time / cells.max(1);
    let mut sites = Vec::new();
    for direction in CopyDirection::ALL {
        let surveyed = survey(subject, direction, sizes, share, &mut order, &mut begin)?;
        sites.extend(with_sizes_between(subject, surveyed, &mut order)?);
    }
    settle(subject, &mut sites, end, &mut order)?;
    let of = |direction| sites.iter().filter(move |site| site.direction == direction);
    Ok(CopyDirection::ALL.map(|direction| of(direction).map(|site| site.cell(Arm::median)).collect()))
}

/// The first rounds of each size.
fn survey(
    subject: &mut impl Subject,
    direction: CopyDirection,
    sizes: &[usize],
    share: Duration,
    order: &mut Order,
    begin: &mut impl FnMut(CopyDirection, usize),
) -> Result<Vec<Site>> {
    let mut sites: Vec<Site> = Vec::with_capacity(sizes.len());
    let mut given_up = Vec::new();
    for &bytes in sizes {
        begin(direction, bytes);
        let mut methods = subject.methods(direction, bytes);
        methods.retain(|method| !given_up.contains(method));
        let site = site(subject, direction, bytes, &methods, order)?;
        // By the least that each took, in which nothing came in between.
        let before = sites.last().map(|site| site.cell(Arm::least));
        given_up.extend(hopeless(&site.cell(Arm::least), before.as_ref(), share));
        sites.push(site);
    }
    Ok(sites)
}

/// Adds a size between neighbours with different best ways, for in between a third may be best, and times are on no straight
/// line.
fn with_sizes_between(subject: &mut impl Subject, sites: Vec<Site>, order: &mut Order) -> Result<Vec<Site>> {
    let mut all: Vec<Site> = Vec::with_capacity(2 * sites.len());
    for above in sites {
        if let Some(below) = all.last()
            && below.bytes >= LEAST_BETWEEN
            && differ(&below.cell(Arm::median), &above.cell(Arm::median))
        {
            let bytes = usize::midpoint(below.bytes, above.bytes);
            let mut methods = subject.methods(above.direction, bytes);
            methods.retain(|method| below.arms.iter().chain(&above.arms).any(|arm| arm.method == *method));
            let between = site(subject, above.direction, bytes, &methods, order)?;
            all.push(between);
        }
        all.push(above);
    }
    Ok(all)
}

/// Whether what is best in one is clearly not in the other, with any of the kinds of host memory.
fn differ(below: &Cell, above: &Cell) -> bool {
    let kinds: [fn(CopyMethod) -> bool; 3] = [
        |_| true,
        |method| method != CopyMethod::AgentPinned,
        |method| !matches!(method, CopyMethod::AgentPinned | CopyMethod::CopyEnginePinned | CopyMethod::CudaMemcpy),
    ];
    // Which routine is best is no question of one size.
    let is_same = |a: CopyMethod, b: CopyMethod| a == b || (is_routine(a) && is_routine(b));
    let loses = |own: &Cell, other: &Cell, is_one: fn(CopyMethod) -> bool| {
        let those = own.candidates.iter().filter(|(method, _)| is_one(*method));
        let best = those.min_by(|a, b| a.1.total_cmp(&b.1));
        best.is_some_and(|(best, _)| other.fastest(|method| is_same(method, *best)) > MARGINS.1 * other.fastest(is_one))
    };
    kinds.into_iter().any(|is_one| loses(below, above, is_one) || loses(above, below, is_one))
}

/// Spends the time that is left where it is open which way is best.
fn settle(subject: &mut impl Subject, sites: &mut [Site], end: Instant, order: &mut Order) -> Result<()> {
    loop {
        let started = Instant::now();
        if started >= end {
            return Ok(());
        }
        let open = sites.iter_mut().filter(|site| site.is_open());
        // Of equals not always the first.
        let Some(site) = open.min_by_key(|site| (site.spent, site.rounds)) else { return Ok(()) };
        let who = if site.rounds < FEW_ROUNDS { contenders(&site.arms) } else { close_ones(&site.arms) };
        site.round(subject, who, order)?;
        site.spent += started.elapsed();
    }
}

fn is_routine(method: CopyMethod) -> bool {
    matches!(method, CopyMethod::Routine(_))
}

/// What is not worth trying at larger sizes: what is far behind for the second time, doubles with the size, and takes a good
/// part of the time there is. It cannot catch up, for the best never takes more than twice as long for twice as much. Routines also compete
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
    let costs = |ns: f64| 2.0 * ns * 6.0 > time.as_secs_f64() * 1e9 * 3.0 / 8.0;
    let candidates = || cell.candidates.iter().copied();
    let mut routines = candidates().filter(|(method, _)| is_routine(*method));
    let together = costs(routines.clone().map(|(_, ns)| ns).sum()) && routines.all(is_doomed);
    let gone = |&(method, ns): &(CopyMethod, f64)| {
        if is_routine(method) { together } else { is_doomed((method, ns)) && costs(ns) }
    };
    candidates().filter(gone).map(|(method, _)| method).collect()
}

/// The first rounds of one size.
fn site(
    subject: &mut impl Subject,
    direction: CopyDirection,
    bytes: usize,
    methods: &[CopyMethod],
    order: &mut Order,
) -> Result<Site> {
    let mut arms = Vec::with_capacity(methods.len());
    for &method in methods {
        arms.push(Arm::new(subject, method, direction, bytes)?);
    }
    // Another look at those that seem far behind, for something may have come in between; but for what takes longest.
    let seem = contenders(&arms);
    for at in (0..arms.len()).filter(|at| !seem.contains(at)) {
        if arms[at].least() < LONG {
            arms[at].run(subject, direction, bytes)?;
        }
    }
    let left = contenders(&arms);
    let mut site = Site { direction, bytes, arms, rounds: 1, spent: Duration::ZERO };
    while site.rounds < FEWEST_ROUNDS {
        site.round(subject, left.clone(), order)?;
    }
    Ok(site)
}

/// Those whose order has to be found out.
fn close_ones(arms: &[Arm]) -> Vec<usize> {
    let near: Vec<CopyMethod> = close(arms).map(|arm| arm.method).collect();
    (0..arms.len()).filter(|&at| near.contains(&arms[at].method)).collect()
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
    use crate::policy::{Block, sizes};
    use CopyDirection::DeviceToHost;

    const MS: Duration = Duration::from_millis(1);

    /// Copies that take what a function says, in nanoseconds; 3 of 100 take ten times as long.
    struct Model<F> {
        methods: Vec<CopyMethod>,
        ns: F,
        /// How far a block's time is from that, to either side.
        noise: f64,
        order: Order,
        /// Blocks so far: by which way, at which size.
        blocks: Vec<(CopyMethod, usize)>,
    }

    impl<F: Fn(CopyMethod, usize) -> f64> Model<F> {
        fn new(methods: &[&str], ns: F) -> Self {
            let methods = methods.iter().map(|name| name.parse().unwrap()).collect();
            Self { methods, ns, noise: 0.01, order: Order(7), blocks: Vec::new() }
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
            let noise = self.noise * (f64::from(u32::try_from(self.order.below(201)).unwrap()) / 100.0 - 1.0);
            let hiccup = if self.order.below(100) < 3 { 10.0 } else { 1.0 };
            let ns = (self.ns)(method, bytes) * (1.0 + noise) * hiccup * f64::from(block.calls);
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
        let [_, cells] =
            tables(&mut model, &sizes, 500 * MS, |direction, bytes| begun.push((direction, bytes))).unwrap();
        let wanted =
            CopyDirection::ALL.into_iter().flat_map(|direction| sizes.iter().map(move |&size| (direction, size)));
        assert_eq!(begun, wanted.collect::<Vec<_>>());
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
        assert!(model.blocks_of("copy_engine", 1) > 0);
        assert_eq!(cells.last().unwrap().best("avx2"), CopyMethod::CopyEngine);
    }

    #[test]
    fn equals_are_told_apart_as_well_as_they_can_be() {
        let mut model = Model::new(&["avx2", "agent", "copy_engine"], |method, _| match method {
            CopyMethod::Routine(_) => 1000.0,
            CopyMethod::Agent => 965.0,
            _ => 9000.0,
        });
        let [_, cells] = tables(&mut model, &[64], 1000 * MS, |_, _| ()).unwrap();
        assert_eq!(cells[0].best("avx2"), CopyMethod::Agent, "{cells:?}");
        assert!(model.blocks_of("avx2", 64) > model.blocks_of("copy_engine", 64));
        assert_eq!(model.blocks_of("copy_engine", 64), 8, "the first ones only, in both directions");
    }

    #[test]
    fn routines_compete_among_themselves_where_another_way_is_best() {
        let mut model = Model::new(&["avx2", "sse41", "copy_engine"], |method, bytes| match method {
            CopyMethod::Routine("avx2") => 1000.0 * f64::from(u32::try_from(bytes).unwrap()),
            CopyMethod::Routine(_) => 1100.0 * f64::from(u32::try_from(bytes).unwrap()),
            _ => 100.0,
        });
        let [_, cells] = tables(&mut model, &[1, 2], 1000 * MS, |_, _| ()).unwrap();
        assert!(model.blocks_of("avx2", 2) > 4 && model.blocks_of("sse41", 2) > 4, "{cells:?}");
        assert_eq!(cells[1].best("avx2"), CopyMethod::CopyEngine);
    }

    /// What a policy's row for a size costs more than the best way, in the worst case over many sizes.
    fn worst<F: Fn(CopyMethod, usize) -> f64>(model: &mut Model<F>) -> (f64, String) {
        let sizes = sizes("test", 1 << 20).unwrap();
        let [_, cells] = tables(model, &sizes, 2000 * MS, |_, _| ()).unwrap();
        let rows = crate::policy::choose::rows(DeviceToHost, cells);
        let mut worst = (1.0, String::new());
        // In steps of 5 %.
        for bytes in
            std::iter::successors(Some(64), |bytes| Some(bytes * 21 / 20)).take_while(|&bytes| bytes <= 1 << 20)
        {
            let row = rows.iter().find(|row| bytes <= row.last).unwrap();
            let least = model.methods.iter().map(|&method| (model.ns)(method, bytes)).fold(f64::INFINITY, f64::min);
            let regret = (model.ns)(row.best, bytes) / least;
            if regret > worst.0 {
                worst = (regret, format!("{bytes} bytes: {} of {row:?}", row.best));
            }
        }
        worst
    }

    /// Noise of 6 % to either side, and ways whose times cross between two powers of two.
    #[test]
    fn noise_does_not_decide() {
        let mut model = Model::new(&["avx2", "parallel-8", "agent", "copy_engine"], typical);
        model.noise = 0.06;
        let (regret, what) = worst(&mut model);
        assert!(regret <= 1.05, "{regret}: {what}");
    }

    /// Near as in reads of an H200, where a parallel copy and the agent's cross between 4 and 8 KiB; for some sizes in between
    /// a third way is best.
    #[test]
    fn what_is_best_between_two_measured_sizes_is_found() {
        let crossing = |method: CopyMethod, bytes: usize| {
            let kib = f64::from(u32::try_from(bytes).unwrap()) / 1024.0;
            match method {
                CopyMethod::Routine(_) => 1050.0 + 1000.0 * kib,
                CopyMethod::Parallel(_) => 1900.0 + 230.0 * kib,
                CopyMethod::Agent => 2980.0 + 2.0 * kib,
                // Dear below and above.
                _ => 2400.0 + 500.0 * (kib - 6.0).abs(),
            }
        };
        let mut model = Model::new(&["avx2", "parallel-8", "agent", "copy_engine"], crossing);
        let (regret, what) = worst(&mut model);
        assert!(regret <= 1.05, "{regret}: {what}");
        assert!(model.blocks_of("agent", 6 << 10) >= 2 * FEWEST_ROUNDS, "between 4 and 8 KiB");
        assert_eq!(model.blocks_of("agent", 384 << 10), 0, "where nothing changes, nothing in between is measured");
    }

    /// For as long as all first rounds of some size one way is slowed down: what came in between is outvoted later.
    #[test]
    fn a_disturbance_of_one_size_s_first_rounds_is_outvoted() {
        let count = std::cell::Cell::new(0);
        let disturbed = |method: CopyMethod, bytes: usize| {
            let is_disturbed = bytes == 64 << 10 && method == CopyMethod::Agent && {
                count.set(count.get() + 1);
                count.get() <= 2 * (FEWEST_ROUNDS + 3)
            };
            let ns = match method {
                CopyMethod::Agent => 4000.0,
                _ => 4600.0,
            };
            if is_disturbed { ns * 1.25 } else { ns }
        };
        let mut model = Model::new(&["avx2", "agent"], disturbed);
        let [_, cells] = tables(&mut model, &[32 << 10, 64 << 10], 1000 * MS, |_, _| ()).unwrap();
        for cell in &cells {
            assert_eq!(cell.best("avx2"), CopyMethod::Agent, "{cell:?}");
        }
    }

    /// Without any time every size still has its first rounds, and nothing more.
    #[test]
    fn without_time_there_are_the_first_rounds() {
        let mut model = Model::new(&["avx2", "agent"], |_, _| 1000.0);
        let [h2d, d2h] = tables(&mut model, &[64, 128], Duration::ZERO, |_, _| ()).unwrap();
        assert_eq!((h2d.len(), d2h.len()), (2, 2));
        // Two single calls, and the blocks.
        assert_eq!(model.blocks_of("agent", 128), 2 * (2 + FEWEST_ROUNDS));
    }
}
