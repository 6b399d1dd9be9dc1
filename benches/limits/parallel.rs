//! Copies by several cores: reads by up to 8, writes by up to 4, and how soon idle workers sleep.

use std::time::{Duration, Instant};

use gdrcopy::tool::ab::{Arm, Rounds, calls_in};
use gdrcopy::tool::cpu::{self, CpuList};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::size_in_words;
use gdrcopy::tool::host;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{Error, ParallelCopier, PciAddress, Result};

use crate::lab::{Lab, Load};
use crate::report::{self, Findings, Place, Target};

const PART: &str = "parallel";
/// Cores that share a copy, the calling one among them.
const CREWS: [usize; 4] = [2, 3, 4, 8];
const BLOCK: Duration = Duration::from_micros(300);
const MOST_CALLS: u32 = 60;
/// Longer than workers look for work: those of the last block are asleep, and their CPUs free.
const REST: Duration = Duration::from_micros(80);
const TIME: Duration = Duration::from_millis(1500);

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
}

const CASES: [Case; 3] = [
    Case {
        direction: Direction::DeviceToHost,
        bytes: 64 << 10,
        crews: &[2, 4, 8],
        judged: 8,
        target: "D2H 64 KiB on 8 cores",
        limit: Target::AtMost(11.0),
        unit: "us",
    },
    Case {
        direction: Direction::DeviceToHost,
        bytes: 16 << 10,
        crews: &[2, 4],
        judged: 4,
        target: "D2H 16 KiB on 4 cores",
        limit: Target::AtMost(5.5),
        unit: "us",
    },
    Case {
        direction: Direction::HostToDevice,
        bytes: 1 << 20,
        crews: &[2, 3, 4],
        judged: 2,
        target: "H2D 1 MiB on 2 cores",
        limit: Target::AtLeast(31.0),
        unit: "GB/s",
    },
];

/// The copiers, one for each number of cores. All sleep until they are used.
#[derive(Debug, Default)]
pub(crate) struct Crews(Vec<(usize, Result<ParallelCopier>)>);

impl Crews {
    /// Starts them where the library puts them; to be called before the calling thread is kept on a CPU.
    pub(crate) fn hire(gpu: Option<PciAddress>) -> Self {
        let build = |cores| ParallelCopier::builder().gpu(gpu).threads(cores).write_threads(cores).build();
        Self(CREWS.into_iter().map(|cores| (cores, build(cores))).collect())
    }

    pub(crate) fn of(&self, cores: usize) -> Result<&ParallelCopier, &Error> {
        let found = self.0.iter().find(|(n, _)| *n == cores);
        found.map(|(_, crew)| crew.as_ref()).expect("every case asks for crews in the list")
    }

    /// The copier of the most cores.
    pub(crate) fn largest(&self) -> Option<&ParallelCopier> {
        self.0.iter().rev().find_map(|(_, crew)| crew.as_ref().ok())
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

fn carry(crew: &ParallelCopier, lab: &Lab<'_>, load: &Load) -> Result<()> {
    match load.direction {
        Direction::HostToDevice => crew.write(lab.mapping, 0, &load.from),
        Direction::DeviceToHost => crew.read(lab.mapping, 0, &mut load.to.borrow_mut()),
    }
}

/// Some copies, the last of them with all workers: whoever sleeps is not waited for, but is awake for the next.
pub(crate) fn awake(crew: &ParallelCopier, lab: &Lab<'_>, load: &Load) -> Result<()> {
    crew.wake();
    let begin = Instant::now();
    while crew.awake() < crew.cpus().len() && begin.elapsed() < REST {
        std::hint::spin_loop();
    }
    (0..4).try_for_each(|_| carry(crew, lab, load))
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    for case in &CASES {
        one_case(lab, found, case)?;
    }
    lab.crews.largest().map_or(Ok(()), |crew| falling_asleep(lab, found, crew))
}

fn one_case(lab: &Lab<'_>, found: &mut Findings, case: &Case) -> std::result::Result<(), Failure> {
    let load = Load::new(case.direction, case.bytes);
    let bytes = load.bytes();
    let size = size_in_words(bytes);
    lab.screen.line("")?;
    lab.screen.line(&format!("{}, {size}, fenced, back to back, by cores", case.direction.in_words()))?;
    let mut crews: Vec<&ParallelCopier> = Vec::new();
    for &cores in case.crews {
        match lab.crews.of(cores) {
            Ok(crew) => crews.push(crew),
            Err(error) => found.skip(lab.screen, PART, format!("{size} on {}: {error}", by(cores)))?,
        }
    }
    // The judged one again is the noise floor.
    let judged = crews.iter().position(|crew| crew.threads() == case.judged);
    crews.extend(judged.map(|at| crews[at]));

    let calls = calls_in(BLOCK, MOST_CALLS, |_| load.carry(lab.mapping))?;
    // As many copies as one core makes in a block, times the cores.
    let calls_of = |crew: &ParallelCopier| calls * u32::try_from(crew.threads()).unwrap_or(1);
    let mut arms = vec![Arm::sustained(calls, |_| load.carry(lab.mapping)).after(rest)];
    arms.extend(crews.iter().map(|crew| {
        Arm::sustained(calls_of(crew), |_| carry(crew, lab, &load)).after(|| {
            rest()?;
            awake(crew, lab, &load)
        })
    }));
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(TIME))?;
    drop(arms);

    let place = Place { part: PART, direction: case.direction, metric: Metric::Sustained, bytes };
    let rate = |ns: f64| f64::from(u32::try_from(bytes).unwrap_or(u32::MAX)) / ns;
    let everybody = std::iter::once(None).chain(crews.iter().copied().map(Some));
    for (index, crew) in everybody.enumerate() {
        let verified = load.verify(lab.mapping, &lab.rig.buffer, || match crew {
            Some(crew) => awake(crew, lab, &load),
            None => load.carry(lab.mapping),
        })?;
        let name = by(crew.map_or(1, ParallelCopier::threads));
        let calls = crew.map_or(calls, calls_of);
        let median =
            found.figure(place, &name, &report::Arm { rounds: &rounds, index, calls, per_call: 1.0 }, verified);
        let workers = crew.map_or_else(String::new, |crew| format!(", workers on CPUs {:?}", crew.cpus()));
        let note = if verified { "" } else { "  WRONG BYTES" };
        let us = format!("{} us", median.map(|ns| ns / 1000.0));
        lab.screen.line(&format!("  {name:<8}{us:<28}{:.1} GB/s{workers}{note}", median.map(rate)))?;
        if index > 0 {
            found.compare(place, &name, &by(1), rounds.ratio(index, 0));
        }
    }
    if let Some(at) = judged {
        let name = by(case.judged);
        let noise = rounds.ratio(crews.len(), at + 1);
        found.compare(place, &name, &name, noise);
        lab.screen.line(&format!("  {name} twice  {noise:.3}"))?;
        let median = rounds.median(at + 1);
        let measured = if case.unit == "us" { median.map(|ns| ns / 1000.0) } else { median.map(rate) };
        found.judge(PART, case.target, case.limit, case.unit, measured, String::new());
    }
    Ok(())
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

/// From the end of a copy until no worker spins.
fn falling_asleep(lab: &Lab<'_>, found: &mut Findings, crew: &ParallelCopier) -> std::result::Result<(), Failure> {
    const PATIENCE: Duration = Duration::from_millis(100);
    let load = Load::new(Direction::DeviceToHost, 64 << 10);
    let mut times = Vec::new();
    for _ in 0..lab.pace.times(2000) {
        // Of workers that are still waking up the time would be none at all.
        awake(crew, lab, &load)?;
        if crew.awake() < crew.cpus().len() {
            continue;
        }
        let start = lab.clock.start();
        let begin = Instant::now();
        while crew.awake() > 0 {
            if begin.elapsed() > PATIENCE {
                return Err(Failure::run("workers are awake 100 ms after the last copy"));
            }
            std::hint::spin_loop();
        }
        let ticks = lab.clock.stop().ticks.saturating_sub(start);
        let ps = u32::try_from(lab.clock.ps(ticks) / 1000).unwrap_or(u32::MAX);
        times.push(f64::from(ps));
    }
    if times.is_empty() {
        return found.skip(lab.screen, PART, "sleep: the workers were never all awake at once".to_owned());
    }
    times.sort_unstable_by(f64::total_cmp);
    let p99 = times[(times.len() * 99 / 100).min(times.len() - 1)] / 1000.0;
    let median = Rounds::of(vec![times]).median(0).map(|ns| ns / 1000.0);
    lab.screen.line(&format!("  {} workers sleep after {median} us, p99 {p99:.1} us", crew.cpus().len()))?;
    let detail = format!("{} workers, p99 {p99:.1} us", crew.cpus().len());
    found.judge(PART, "workers asleep after the last copy", Target::AtMost(50.0), "us", median, detail);
    Ok(())
}
