//! Copies by several cores beside the least that any program could do with these cores: reads by up to 16, writes by up to
//! 4, and how soon idle workers sleep.
//!
//! What is timed is the steady state: before a block all workers of its copier spin, and have done copies. How long waking
//! takes is not in these figures.

use std::cell::Cell;
use std::time::{Duration, Instant};

use gdrcopy::tool::ab::{Arm, Estimate, Rounds, calls_in};
use gdrcopy::tool::cpu::{self, CpuList};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::size_in_words;
use gdrcopy::tool::host;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{Error, ParallelCopier, PciAddress, Result};

use crate::bare::Bare;
use crate::lab::{Lab, Load};
use crate::report::{self, Findings, Place, Target};

const PART: &str = "parallel";
/// Cores that share a copy, the calling one among them.
const CREWS: [usize; 6] = [2, 3, 4, 8, 12, 16];
/// The most that a copier has unless it is told otherwise; larger ones are for this part alone.
const USUAL: usize = 8;
const BLOCK: Duration = Duration::from_micros(300);
const MOST_CALLS: u32 = 60;
/// Longer than workers look for work: those of the last block are asleep, and their CPUs free.
const REST: Duration = Duration::from_micros(80);
/// Copies before a block: what they use is in its cores' caches, and its cores are at their speed.
const WARM: Duration = Duration::from_micros(100);
/// Workers that are woken run within this, on a busy machine too.
const PATIENCE: Duration = Duration::from_millis(50);
const TIME: Duration = Duration::from_millis(4000);
/// A copier against the bare loop.
const NEAR: Target = Target::AtMost(1.05);

/// What is copied, by how many, and what it should take.
struct Case {
    direction: Direction,
    bytes: usize,
    crews: &'static [usize],
    /// The crew that is judged.
    judged: usize,
    target: &'static str,
    limit: Target,
    unit: &'static str,
    /// Where it is judged against the bare loop.
    near: Option<&'static str>,
}

const CASES: [Case; 3] = [
    Case {
        direction: Direction::DeviceToHost,
        bytes: 64 << 10,
        crews: &[2, 4, 8, 12, 16],
        judged: 8,
        target: "D2H 64 KiB on 8 cores",
        limit: Target::AtMost(11.0),
        unit: "us",
        near: Some("D2H 64 KiB on 8 cores, copier / bare loop"),
    },
    Case {
        direction: Direction::DeviceToHost,
        bytes: 16 << 10,
        crews: &[2, 4],
        judged: 4,
        target: "D2H 16 KiB on 4 cores",
        limit: Target::AtMost(5.5),
        unit: "us",
        near: Some("D2H 16 KiB on 4 cores, copier / bare loop"),
    },
    Case {
        direction: Direction::HostToDevice,
        bytes: 1 << 20,
        crews: &[2, 3, 4],
        judged: 2,
        target: "H2D 1 MiB on 2 cores",
        limit: Target::AtLeast(31.0),
        unit: "GB/s",
        near: None,
    },
];

/// The copiers, one for each number of cores. All sleep until they are used.
#[derive(Debug, Default)]
pub(crate) struct Crews(Vec<(usize, Result<ParallelCopier>)>);

impl Crews {
    /// Starts them where the library puts them, but on the CPU that the calling thread is to have; to be called before
    /// that is kept there.
    pub(crate) fn hire(gpu: Option<PciAddress>, wanted: Option<u32>) -> Self {
        // All CPUs, best first: each crew has the first of them.
        let best = best_first(gpu, wanted);
        let build = |cores: usize| {
            let copier = ParallelCopier::builder().gpu(gpu).threads(cores).write_threads(cores);
            match &best {
                Ok(best) => copier.cpus(best.iter().copied().take(cores - 1).collect()).build(),
                Err(_) => copier.build(),
            }
        };
        Self(CREWS.into_iter().map(|cores| (cores, build(cores))).collect())
    }

    pub(crate) fn of(&self, cores: usize) -> Result<&ParallelCopier, &Error> {
        let found = self.0.iter().find(|(n, _)| *n == cores);
        found.map(|(_, crew)| crew.as_ref()).expect("every case asks for crews in the list")
    }

    /// The copier of the most cores that one usually has.
    pub(crate) fn largest(&self) -> Option<&ParallelCopier> {
        self.0.iter().rev().filter(|(cores, _)| *cores <= USUAL).find_map(|(_, crew)| crew.as_ref().ok())
    }

    fn works_on(&self, cpu: u32) -> bool {
        self.0.iter().flat_map(|(_, crew)| crew).any(|crew| crew.cpus().contains(&cpu))
    }

    /// The CPU for the calling thread: the one asked for, or one beside the GPU, on which no worker is.
    pub(crate) fn keep_off(&self, wanted: Option<u32>, gpu: Option<PciAddress>) -> Result<Option<u32>, Failure> {
        if let Some(cpu) = wanted.filter(|&cpu| self.works_on(cpu)) {
            let line = format!(
                "--cpu {cpu} is where a worker of parts 'parallel', 'agent' and 'auto' is kept; name another CPU or other parts"
            );
            return Err(Failure::usage(line));
        }
        if wanted.is_some() || self.0.iter().all(|(_, crew)| crew.is_err()) {
            return Ok(wanted);
        }
        let local = gpu.and_then(|gpu| host::local_cpus(&gpu.to_string()));
        let is_near = |cpu: &u32| local.as_ref().is_none_or(|local| local.contains(*cpu));
        let free: Vec<u32> = cpu::allowed().iter().flat_map(CpuList::iter).filter(|&cpu| !self.works_on(cpu)).collect();
        let here = cpu::current().filter(|cpu| free.contains(cpu) && is_near(cpu));
        Ok(here.or_else(|| free.iter().copied().find(is_near)).or_else(|| free.first().copied()))
    }
}

/// The CPUs for workers, in the order in which the library takes them.
fn best_first(gpu: Option<PciAddress>, wanted: Option<u32>) -> Result<Vec<u32>> {
    if let Some(cpu) = wanted {
        // Where it may not go there, it cannot be kept there either, which is found out later on.
        let _ = cpu::visit(cpu);
    }
    let all = cpu::allowed().map_or(1, |cpus| cpus.len()).min(*CREWS.last().unwrap_or(&1));
    let copier = ParallelCopier::builder().gpu(gpu).threads(all).build()?;
    Ok(copier.cpus().iter().copied().filter(|cpu| Some(*cpu) != wanted).collect())
}

fn carry(crew: &ParallelCopier, lab: &Lab<'_>, load: &Load) -> Result<()> {
    match load.direction {
        Direction::HostToDevice => crew.write(lab.mapping, 0, &load.from),
        Direction::DeviceToHost => crew.read(lab.mapping, 0, &mut load.to.borrow_mut()),
    }
}

/// Wakes a copier's workers and makes copies until all have taken part in some: the steady state of copies back to back.
/// Whether they are all awake.
///
/// Copies are made from the start, or those that wake first would sleep again before the last is awake.
fn all_awake(crew: &ParallelCopier, lab: &Lab<'_>, load: &Load) -> Result<bool> {
    let are_all = || crew.awake() == crew.cpus().len();
    let begin = Instant::now();
    loop {
        crew.wake();
        let were_all = are_all();
        let warm = Instant::now();
        while warm.elapsed() < WARM {
            carry(crew, lab, load)?;
        }
        let are_all = were_all && are_all();
        if are_all || begin.elapsed() >= PATIENCE {
            return Ok(are_all);
        }
    }
}

/// Some copies, the last of them with all workers, unless the machine is too busy to run them.
pub(crate) fn awake(crew: &ParallelCopier, lab: &Lab<'_>, load: &Load) -> Result<()> {
    all_awake(crew, lab, load).map(|_| ())
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    for case in &CASES {
        one_case(lab, found, case)?;
    }
    lab.crews.largest().map_or(Ok(()), |crew| falling_asleep(lab, found, crew))
}

/// Who makes copies.
enum Who<'a> {
    Alone,
    Copier(&'a ParallelCopier),
    Bare(Bare),
}

struct Entry<'a> {
    name: String,
    who: Who<'a>,
    /// Blocks that began with a worker asleep.
    short: Cell<u32>,
}

impl<'a> Entry<'a> {
    fn new(name: impl Into<String>, who: Who<'a>) -> Self {
        Self { name: name.into(), who, short: Cell::new(0) }
    }

    fn threads(&self) -> u32 {
        let threads = match &self.who {
            Who::Alone => 1,
            Who::Copier(crew) => crew.threads(),
            Who::Bare(bare) => bare.threads(),
        };
        u32::try_from(threads).unwrap_or(1)
    }

    #[inline(always)]
    fn carry(&self, lab: &Lab<'_>, load: &Load) -> Result<()> {
        match &self.who {
            Who::Alone => load.carry(lab.mapping),
            Who::Copier(crew) => carry(crew, lab, load),
            Who::Bare(bare) => {
                bare.carry(lab.mapping, load);
                Ok(())
            }
        }
    }

    /// Everybody takes part from now on.
    fn wake(&self, lab: &Lab<'_>, load: &Load) -> Result<()> {
        if let Who::Bare(bare) = &self.who {
            bare.wake();
        }
        if let Who::Copier(crew) = &self.who {
            if !all_awake(crew, lab, load)? {
                self.short.set(self.short.get() + 1);
            }
            return Ok(());
        }
        let warm = Instant::now();
        while warm.elapsed() < WARM {
            self.carry(lab, load)?;
        }
        Ok(())
    }

    /// Nobody spins from now on.
    fn settle(&self) {
        match &self.who {
            Who::Alone => {}
            Who::Bare(bare) => bare.rest(),
            Who::Copier(crew) => {
                let begin = Instant::now();
                while crew.awake() > 0 && begin.elapsed() < PATIENCE {
                    std::hint::spin_loop();
                }
            }
        }
    }
}

/// What a field of entries took.
struct Taken {
    rounds: Rounds,
    /// Calls in a block, by entry.
    calls: Vec<u32>,
}

/// Runs them in turn. While one is timed the others' threads sleep.
fn compete(lab: &Lab<'_>, load: &Load, field: &[Entry<'_>], time: Duration) -> Result<Taken> {
    // As many copies as one core makes in a block, times the cores.
    let alone = calls_in(BLOCK, MOST_CALLS, |_| load.carry(lab.mapping))?;
    let calls: Vec<u32> = field.iter().map(|entry| alone * entry.threads()).collect();
    let arm = |(entry, &calls)| {
        let entry: &Entry<'_> = entry;
        Arm::sustained(calls, move |_| entry.carry(lab, load)).after(move || {
            field.iter().for_each(Entry::settle);
            entry.wake(lab, load)
        })
    };
    let mut arms: Vec<Arm<'_>> = field.iter().zip(&calls).map(arm).collect();
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(time))?;
    drop(arms);
    field.iter().for_each(Entry::settle);
    Ok(Taken { rounds, calls })
}

fn bare(cores: usize) -> String {
    format!("{}, bare loop", by(cores))
}

fn one_case(lab: &Lab<'_>, found: &mut Findings, case: &Case) -> std::result::Result<(), Failure> {
    let load = Load::new(case.direction, case.bytes);
    let size = size_in_words(load.bytes());
    lab.screen.line("")?;
    let what = "fenced, back to back, workers awake, by cores; beside each a bare loop on its CPUs";
    lab.screen.line(&format!("{}, {size}, {what}", case.direction.in_words()))?;
    // The copiers, and behind each its bare loop.
    let mut field = vec![Entry::new(by(1), Who::Alone)];
    for &cores in case.crews {
        match lab.crews.of(cores) {
            Ok(crew) => {
                field.push(Entry::new(by(cores), Who::Copier(crew)));
                let loops = Bare::start(crew.cpus(), case.direction, case.bytes)?;
                field.push(Entry::new(bare(cores), Who::Bare(loops)));
            }
            Err(error) => found.skip(lab.screen, PART, format!("{size} on {}: {error}", by(cores)))?,
        }
    }
    // The judged one again is the noise floor.
    let judged = field.iter().position(|entry| entry.name == by(case.judged));
    if let Ok(crew) = lab.crews.of(case.judged) {
        field.push(Entry::new(by(case.judged), Who::Copier(crew)));
    }
    let taken = compete(lab, &load, &field, TIME)?;
    let rounds = &taken.rounds;

    let place = Place { part: PART, direction: case.direction, metric: Metric::Sustained, bytes: load.bytes() };
    let medians = tabulate(lab, found, place, &load, &field, &taken)?;
    for (index, entry) in field.iter().enumerate().skip(1) {
        found.compare(place, &entry.name, &by(1), rounds.ratio(index, 0));
        if let (Who::Copier(crew), Some(rival)) = (&entry.who, field.get(index + 1)) {
            let ratio = rounds.ratio(index, index + 1);
            found.compare(place, &entry.name, &rival.name, ratio);
            let detail = format!("workers on CPUs {:?}", crew.cpus());
            lab.screen.line(&format!("  {:<20}copier / bare loop  {ratio:.3}, {detail}", entry.name))?;
        }
    }
    if let Some(at) = judged {
        let (name, last) = (&field[at].name, field.len() - 1);
        let noise = rounds.ratio(last, at);
        found.compare(place, name, name, noise);
        lab.screen.line(&format!("  {name} twice  {noise:.3}"))?;
        let measured = if case.unit == "us" { us(medians[at]) } else { rate(&load, medians[at]) };
        found.judge(PART, case.target, case.limit, case.unit, measured, awake_in(&field[at]));
        if let Some(target) = case.near {
            let detail = format!("bare {} us", us(medians[at + 1]));
            found.judge(PART, target, NEAR, "x", rounds.ratio(at, at + 1), detail);
        }
    }
    Ok(())
}

/// A row for each entry; their medians.
fn tabulate(
    lab: &Lab<'_>,
    found: &mut Findings,
    place: Place,
    load: &Load,
    field: &[Entry<'_>],
    taken: &Taken,
) -> std::result::Result<Vec<Estimate>, Failure> {
    let mut medians = Vec::with_capacity(field.len());
    for (index, entry) in field.iter().enumerate() {
        let verified = load.verify(lab.mapping, &lab.rig.buffer, || {
            entry.wake(lab, load)?;
            entry.carry(lab, load)
        })?;
        entry.settle();
        let arm = report::Arm { rounds: &taken.rounds, index, calls: taken.calls[index], per_call: 1.0 };
        let median = found.figure(place, &entry.name, &arm, verified);
        let short = if entry.short.get() > 0 { format!("  {}", awake_in(entry)) } else { String::new() };
        let is_all = |cpus: &CpuList| cpus.len() <= usize::try_from(entry.threads()).unwrap_or(usize::MAX);
        // Whatever else the system runs takes one of them away for a while.
        let crowd = if lab.cpus.is_some_and(is_all) { "  on every CPU" } else { "" };
        let note = if verified { "" } else { "  WRONG BYTES" };
        let (time, rate) = (format!("{} us", us(median)), rate(load, median));
        lab.screen.line(&format!("  {:<20}{time:<28}{rate:.1} GB/s{crowd}{short}{note}", entry.name))?;
        medians.push(median);
    }
    Ok(medians)
}

/// Whether an entry was in the steady state whenever it was timed.
fn awake_in(entry: &Entry<'_>) -> String {
    match entry.short.get() {
        0 => "workers awake".to_owned(),
        blocks => format!("not all workers awake in {blocks} blocks"),
    }
}

fn us(ns: Estimate) -> Estimate {
    ns.map(|ns| ns / 1000.0)
}

fn rate(load: &Load, ns: Estimate) -> Estimate {
    ns.map(|ns| f64::from(u32::try_from(load.bytes()).unwrap_or(u32::MAX)) / ns)
}

fn by(cores: usize) -> String {
    format!("{cores} core{}", if cores == 1 { "" } else { "s" })
}

/// Until workers that have nothing to do sleep.
pub(crate) fn rest() -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < REST {
        std::hint::spin_loop();
    }
    Ok(())
}

/// From the end of a copy until no worker spins; and from a call that wakes them until all do.
fn falling_asleep(lab: &Lab<'_>, found: &mut Findings, crew: &ParallelCopier) -> std::result::Result<(), Failure> {
    const PATIENCE: Duration = Duration::from_millis(100);
    let load = Load::new(Direction::DeviceToHost, 64 << 10);
    let workers = crew.cpus().len();
    let until = |awake: usize| {
        let start = lab.clock.start();
        let begin = Instant::now();
        while crew.awake() != awake {
            if begin.elapsed() > PATIENCE {
                return None;
            }
            std::hint::spin_loop();
        }
        let ps = lab.clock.ps(lab.clock.stop().ticks.saturating_sub(start));
        Some(f64::from(u32::try_from(ps / 1000).unwrap_or(u32::MAX)))
    };
    let (mut sleeping, mut waking) = (Vec::new(), Vec::new());
    for _ in 0..lab.pace.times(2000) {
        // Of workers that are still waking up the time would be none at all.
        if !all_awake(crew, lab, &load)? {
            continue;
        }
        let asleep = until(0).ok_or_else(|| Failure::run("workers are awake 100 ms after the last copy"))?;
        // For the system to put their threads aside, which comes behind what they say.
        rest()?;
        let begin = lab.clock.start();
        crew.wake();
        // Where the system takes longer to run the last than the first looks for work this round has none.
        let awake = until(workers).map(|_| lab.clock.ps(lab.clock.stop().ticks.saturating_sub(begin)) / 1000);
        sleeping.push(asleep);
        waking.extend(awake.map(|ns| f64::from(u32::try_from(ns).unwrap_or(u32::MAX))));
    }
    if sleeping.is_empty() {
        return found.skip(lab.screen, PART, "sleep: the workers were never all awake at once".to_owned());
    }
    let median = |times: Vec<f64>| us(Rounds::of(vec![times]).median(0));
    sleeping.sort_unstable_by(f64::total_cmp);
    let p99 = sleeping[(sleeping.len() * 99 / 100).min(sleeping.len() - 1)] / 1000.0;
    let (asleep, awake) = (median(sleeping), median(waking));
    let name = format!("{workers} worker{}", if workers == 1 { "" } else { "s" });
    lab.screen
        .line(&format!("  {name} asleep after {asleep} us, p99 {p99:.1} us; all awake {awake} us after a wake"))?;
    let detail = format!("{name}, p99 {p99:.1} us; all awake {awake} us after a wake");
    found.judge(PART, "workers asleep after the last copy", Target::AtMost(50.0), "us", asleep, detail);
    Ok(())
}
