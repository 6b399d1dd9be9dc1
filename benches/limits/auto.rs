//! The automatic copier beside every method that it chooses from: what a wrong choice, or choosing, costs.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use gdrcopy::agent::{AgentOptions, HostBuffer};
use gdrcopy::auto::{AutoCopier, AutoOptions};
use gdrcopy::tool::ab::{Arm, Estimate, Rounds, calls_in};
use gdrcopy::tool::cpu::CpuList;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::Binary;
use gdrcopy::tool::method::{CudaMemcpy, HostSide, Method};
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{DeviceBuffer, ErrorKind, Mapping, ParallelCopier, Result};

use crate::Pace;
use crate::lab::{Lab, complement, device_has, patterned};
use crate::report::{self, Findings, Place, Target};

const PART: &str = "auto";
/// Powers of two, which a calibration measures, and sizes in between.
const SIZES: [usize; 25] = [
    1,
    4,
    13,
    32,
    64,
    100,
    256,
    512,
    1024,
    1500,
    2048,
    4096,
    6000,
    8192,
    16 << 10,
    32 << 10,
    64 << 10,
    100_000,
    256 << 10,
    512 << 10,
    1 << 20,
    3 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];
/// The largest size of a quick run.
const QUICK: usize = 256 << 10;
/// Where the copier is also judged against single methods, reading.
const JUDGED: usize = 64 << 10;
/// One block of one arm.
const BLOCK: Duration = Duration::from_micros(150);
const MOST_CALLS: u32 = 500;
/// All rounds of one size in one direction.
const SIZE: Duration = Duration::from_millis(200);
/// A method that takes so many times the fastest's time can win no round.
const HOPELESS: f64 = 8.0;
/// What the copiers may take to measure; at full pace.
const CALIBRATION: Duration = Duration::from_millis(1000);
/// How long a stand-in for the agent's kernel may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longer than the workers of the block before look for work, whose CPUs these are, too.
const REST: Duration = Duration::from_micros(80);
/// How long calls go on before a block, so that workers are awake and the agent's kernel is on the GPU.
const WARM_UP: Duration = Duration::from_micros(100);
const WARM_UP_CALLS: usize = 6;

/// Of a way that `Bench::has`.
const THERE: &str = "only ways that there are take part";

/// An arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Bar1,
    Parallel,
    /// With page-locked memory that its kernel reaches, or with any.
    Agent(HostSide),
    Cuda(HostSide),
    Auto(HostSide),
}

/// In the order in which equals are named.
const RIVALS: [Way; 6] = [
    Way::Bar1,
    Way::Parallel,
    Way::Agent(HostSide::Pageable),
    Way::Agent(HostSide::PageLocked),
    Way::Cuda(HostSide::PageLocked),
    Way::Cuda(HostSide::Pageable),
];
const HOSTS: [HostSide; 2] = [HostSide::Pageable, HostSide::PageLocked];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Bar1 => "bar1",
            Self::Parallel => "parallel",
            Self::Agent(HostSide::Pageable) => "agent",
            Self::Agent(HostSide::PageLocked) => "agent_pinned",
            Self::Cuda(HostSide::PageLocked) => CudaMemcpy::PINNED,
            Self::Cuda(HostSide::Pageable) => CudaMemcpy::PAGEABLE,
            Self::Auto(HostSide::Pageable) => "auto",
            Self::Auto(HostSide::PageLocked) => "auto_pinned",
        }
    }

    /// Whether a copy between the device and such memory could have been made so.
    fn rivals(self, host: HostSide) -> bool {
        match self {
            Self::Agent(own) | Self::Cuda(own) => own == host,
            Self::Auto(_) => false,
            _ => true,
        }
    }
}

/// Whether it is a parallel copier's, and it leaves such a copy to the calling thread, as it documents.
fn is_alone(way: Way, direction: Direction, bytes: usize) -> bool {
    way == Way::Parallel
        && match direction {
            Direction::HostToDevice => bytes < 16 << 10,
            Direction::DeviceToHost => bytes <= 1024,
        }
}

fn words(host: HostSide) -> &'static str {
    match host {
        HostSide::Pageable => "ordinary",
        HostSide::PageLocked => "page-locked",
    }
}

/// Everything that copies, on one buffer.
struct Bench<'a> {
    lab: &'a Lab<'a>,
    mapping: Mapping<'a>,
    buffer: &'a DeviceBuffer,
    /// Set up as the copiers' own.
    parallel: Option<ParallelCopier>,
    /// For ordinary memory.
    auto: RefCell<AutoCopier<'a>>,
    memory: RefCell<Vec<u8>>,
    /// For page-locked memory. Its agent is the rival's, too.
    locked: RefCell<AutoCopier<'a>>,
    /// That copier's own.
    locked_memory: RefCell<HostBuffer>,
    /// Where there is CUDA.
    cuda: Option<Cuda<'a>>,
}

struct Cuda<'a> {
    pageable: CudaMemcpy<'a>,
    pinned: CudaMemcpy<'a>,
}

impl<'a> Bench<'a> {
    /// The way's host memory.
    fn with_host<T>(&self, way: Way, bytes: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
        match way {
            Way::Agent(HostSide::PageLocked) | Way::Cuda(HostSide::PageLocked) | Way::Auto(HostSide::PageLocked) => {
                work(&mut self.locked_memory.borrow_mut().as_mut_slice()[..bytes])
            }
            _ => work(&mut self.memory.borrow_mut()[..bytes]),
        }
    }

    fn auto(&self, host: HostSide) -> &RefCell<AutoCopier<'a>> {
        match host {
            HostSide::Pageable => &self.auto,
            HostSide::PageLocked => &self.locked,
        }
    }

    fn has(&self, way: Way) -> bool {
        match way {
            Way::Bar1 | Way::Auto(_) => true,
            Way::Parallel => self.parallel.is_some(),
            Way::Agent(side) => self.auto(side).borrow_mut().agent().is_some(),
            Way::Cuda(_) => self.cuda.is_some(),
        }
    }

    /// A copy between the start of the device memory and so much host memory.
    #[inline(always)]
    fn carry(&self, way: Way, direction: Direction, bytes: usize) -> Result<()> {
        self.with_host(way, bytes, |host| match (way, direction) {
            (Way::Bar1, Direction::HostToDevice) => self.mapping.write(0, host),
            (Way::Bar1, Direction::DeviceToHost) => self.mapping.read(0, host),
            (Way::Parallel, Direction::HostToDevice) => self.crew().write(&self.mapping, 0, host),
            (Way::Parallel, Direction::DeviceToHost) => self.crew().read(&self.mapping, 0, host),
            (Way::Agent(side), Direction::HostToDevice) => {
                self.auto(side).borrow_mut().agent().expect(THERE).write(0, 0, host)
            }
            (Way::Agent(side), Direction::DeviceToHost) => {
                self.auto(side).borrow_mut().agent().expect(THERE).read(0, 0, host)
            }
            (Way::Cuda(side), Direction::HostToDevice) => self.cuda_memcpy(side).write(0, host),
            (Way::Cuda(side), Direction::DeviceToHost) => self.cuda_memcpy(side).read(0, host),
            (Way::Auto(side), Direction::HostToDevice) => self.auto(side).borrow_mut().write(0, host),
            (Way::Auto(side), Direction::DeviceToHost) => self.auto(side).borrow_mut().read(0, host),
        })
    }

    fn crew(&self) -> &ParallelCopier {
        self.parallel.as_ref().expect(THERE)
    }

    fn cuda_memcpy(&self, side: HostSide) -> &CudaMemcpy<'_> {
        let cuda = self.cuda.as_ref().expect(THERE);
        if side == HostSide::PageLocked { &cuda.pinned } else { &cuda.pageable }
    }

    /// Waits until the workers of the block before sleep, and then calls until everything that this way needs is awake.
    fn warm_up(&self, way: Way, direction: Direction, bytes: usize) -> Result<()> {
        self.mapping.flush()?;
        spin(REST);
        let begin = Instant::now();
        for call in 0..WARM_UP_CALLS {
            self.carry(way, direction, bytes)?;
            if begin.elapsed() >= WARM_UP {
                break;
            }
            if call == 1 {
                // Workers that were woken up by the second of a burst.
                spin(WARM_UP / 4);
            }
        }
        Ok(())
    }

    fn arm(&self, way: Way, direction: Direction, bytes: usize, calls: u32) -> Arm<'_> {
        let arm = Arm::sustained(calls, move |_| self.carry(way, direction, bytes));
        arm.after(move || self.warm_up(way, direction, bytes))
    }

    /// Whether every byte comes across. What it should overwrite is different in each.
    fn verify(&self, way: Way, direction: Direction, from: &[u8]) -> Result<bool> {
        let wrong = complement(from);
        match direction {
            Direction::HostToDevice => {
                self.buffer.upload(0, &wrong)?;
                self.with_host(way, from.len(), |host| host.copy_from_slice(from));
                self.carry(way, direction, from.len())?;
                device_has(&self.mapping, self.buffer, 0, from)
            }
            Direction::DeviceToHost => {
                self.buffer.upload(0, from)?;
                self.with_host(way, from.len(), |host| host.copy_from_slice(&wrong));
                self.carry(way, direction, from.len())?;
                Ok(self.with_host(way, from.len(), |host| *host == *from))
            }
        }
    }
}

fn spin(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    let sizes: Vec<usize> = SIZES.into_iter().filter(|&size| !lab.pace.is_quick || size <= QUICK).collect();
    let largest = sizes.last().copied().unwrap_or(QUICK);
    let buffer = lab.rig.session.alloc_on(lab.rig.gpu.ordinal, largest)?;
    let bench = set_up(lab, found, &buffer)?;
    let mut worst: Vec<(HostSide, Estimate, String)> = Vec::new();
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        lab.screen.line("")?;
        lab.screen.line(&format!(
            "{}, back to back: AutoCopier over the best method with the same host memory [us]",
            direction.in_words()
        ))?;
        lab.screen.line(
            "ordinary memory is the program's own; page-locked memory is the copier's host_buffer, which the agent \
             (agent_pinned) and the copy engine reach directly",
        )?;
        lab.screen.line(&format!(
            "{:>8} {:<12}{:<12}{:>10}  {:<30}{:<22}{:<10}far behind",
            "size [B]", "host memory", "auto", "[us]", "best [us]", "auto / best", "verified"
        ))?;
        for &bytes in &sizes {
            for (host, regret) in one_size(&bench, found, direction, bytes)? {
                worst.push((host, regret, format!("{} B, {}", Binary(length(bytes)), direction.name())));
            }
        }
    }
    for (host, target) in [
        (HostSide::Pageable, "auto / best, ordinary memory, worst size"),
        (HostSide::PageLocked, "auto / best, page-locked memory, worst size"),
    ] {
        let those = worst.iter().filter(|(of, ..)| *of == host);
        if let Some((_, regret, detail)) = those.max_by(|a, b| a.1.value.total_cmp(&b.1.value)) {
            found.judge(PART, target, Target::AtMost(1.05), "x", *regret, detail.clone());
        }
    }
    Ok(())
}

fn length(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Calibrates the copiers. What this machine does not have is left out.
fn set_up<'a>(
    lab: &'a Lab<'a>,
    found: &mut Findings,
    buffer: &'a DeviceBuffer,
) -> std::result::Result<Bench<'a>, Failure> {
    let (session, gpu) = (&lab.rig.session, &lab.rig.gpu);
    // This thread is kept on one CPU by now, so that the workers' have to be named: those of the largest crew.
    let cpus = lab.crews.largest().map(|crew| crew.cpus().iter().copied().collect::<CpuList>());
    let builder = match cpus.filter(|cpus| !cpus.is_empty()) {
        Some(cpus) => Some(ParallelCopier::builder().gpu(gpu.pci).cpus(cpus)),
        None => {
            found.skip(lab.screen, PART, "parallel copies: no CPUs for workers".to_owned())?;
            None
        }
    };
    let agent = AgentOptions::default();
    let agent = if lab.rig.is_emulated() { agent.cpu_stand_in().deadline(PATIENCE) } else { agent };
    let mut options = AutoOptions::default().time(CALIBRATION / if lab.pace.is_quick { Pace::SHARE } else { 1 });
    if let Some(builder) = &builder {
        options = options.parallel(builder.clone());
    }
    let begin = Instant::now();
    let auto = match AutoCopier::new(session, buffer, options.clone().agent(agent.clone())) {
        Err(error) if matches!(error.kind(), ErrorKind::UnsupportedFeature(_)) => {
            found.skip(lab.screen, PART, format!("the agent: {error}"))?;
            AutoCopier::new(session, buffer, options.clone())?
        }
        other => {
            options = options.agent(agent);
            other?
        }
    };
    let seconds = begin.elapsed().as_secs_f64();
    let mut locked = AutoCopier::new(session, buffer, options.page_locked())?;
    let locked_memory = locked.host_buffer(buffer.len())?;
    let cuda = if lab.rig.is_emulated() {
        found.skip(lab.screen, PART, "cudaMemcpy: an emulated GPU has none".to_owned())?;
        None
    } else {
        Some(Cuda {
            pageable: CudaMemcpy::new(buffer, HostSide::Pageable)?,
            pinned: CudaMemcpy::new(buffer, HostSide::PageLocked)?,
        })
    };
    lab.screen.line("")?;
    lab.screen.line(&format!("AutoCopier::new took {seconds:.2} s; for example"))?;
    for bytes in [8, JUDGED] {
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            lab.screen.line(&format!("  {}", auto.explain(direction, bytes)))?;
        }
    }
    lab.screen.line("and with page-locked memory")?;
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        lab.screen.line(&format!("  {}", locked.explain(direction, JUDGED)))?;
    }
    Ok(Bench {
        lab,
        mapping: session.pin(buffer)?.map()?,
        buffer,
        parallel: builder.map(|builder| builder.build()).transpose()?,
        auto: RefCell::new(auto),
        memory: RefCell::new(vec![0; buffer.len()]),
        locked: RefCell::new(locked),
        locked_memory: RefCell::new(locked_memory),
        cuda,
    })
}

/// What the copier for each kind of host memory takes over the best method.
fn one_size(
    bench: &Bench<'_>,
    found: &mut Findings,
    direction: Direction,
    bytes: usize,
) -> std::result::Result<Vec<(HostSide, Estimate)>, Failure> {
    let lab = bench.lab;
    let is_judged = bytes == JUDGED && direction == Direction::DeviceToHost;
    // Some blocks each, to leave out who is far behind.
    let mut first = Vec::new();
    for way in RIVALS.into_iter().filter(|&way| bench.has(way) && !is_alone(way, direction, bytes)) {
        bench.warm_up(way, direction, bytes)?;
        let calls = calls_in(BLOCK, MOST_CALLS, |_| bench.carry(way, direction, bytes))?;
        let mut arm = bench.arm(way, direction, bytes, calls);
        // Two, for something may come in between.
        let mut ns = f64::INFINITY;
        for _ in 0..2 {
            ns = ns.min(arm.run(lab.clock)?.unwrap_or(f64::INFINITY));
        }
        first.push((way, calls, ns));
    }
    let fastest = |host: HostSide| {
        let those = first.iter().filter(|(way, ..)| way.rivals(host));
        those.map(|(_, _, ns)| *ns).fold(f64::INFINITY, f64::min)
    };
    let is_near = |way: Way, ns: f64| {
        let must_be_there = is_judged && matches!(way, Way::Bar1 | Way::Cuda(HostSide::PageLocked));
        must_be_there || HOSTS.into_iter().any(|host| way.rivals(host) && ns <= HOPELESS * fastest(host))
    };
    let mut ways: Vec<(Way, u32)> = Vec::new();
    let mut behind = Vec::new();
    for &(way, calls, ns) in &first {
        if is_near(way, ns) {
            ways.push((way, calls));
        } else {
            behind.push(way.name());
        }
    }
    // The copiers; the first of them twice, for the noise floor.
    for way in [HOSTS[0], HOSTS[0], HOSTS[1]].map(Way::Auto) {
        if bench.has(way) {
            bench.warm_up(way, direction, bytes)?;
            ways.push((way, calls_in(BLOCK, MOST_CALLS, |_| bench.carry(way, direction, bytes))?));
        }
    }
    let mut arms: Vec<Arm<'_>> = ways.iter().map(|&(way, calls)| bench.arm(way, direction, bytes, calls)).collect();
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(SIZE))?;
    drop(arms);

    let place = Place { part: PART, direction, metric: Metric::Sustained, bytes: length(bytes) };
    let from = patterned(bytes, place.bytes);
    let mut all_right = true;
    for (index, &(way, calls)) in ways.iter().enumerate() {
        let verified = bench.verify(way, direction, &from)?;
        all_right &= verified;
        found.figure(place, way.name(), &report::Arm { rounds: &rounds, index, calls, per_call: 1.0 }, verified);
    }
    let at = |way: Way| ways.iter().position(|(there, _)| *there == way);
    if let Some(again) = at(Way::Auto(HOSTS[0])) {
        found.compare(place, "auto", "auto", rounds.ratio(again + 1, again));
    }
    let mut regrets = Vec::new();
    for host in HOSTS {
        let Some(own) = at(Way::Auto(host)) else { continue };
        let rivals = ways.iter().enumerate().filter(|(_, (way, _))| way.rivals(host));
        let medians = rivals.map(|(index, (way, _))| (index, *way, rounds.median(index).value));
        let Some((best, best_way, ns)) = medians.min_by(|a, b| a.2.total_cmp(&b.2)) else { continue };
        let regret = rounds.ratio(own, best);
        found.compare(place, Way::Auto(host).name(), &format!("best ({})", best_way.name()), regret);
        lab.screen.line(&format!(
            "{:>8} {:<12}{:<12}{:>10.3}  {:<30}{:<22}{:<10}{}",
            Binary(place.bytes),
            words(host),
            bench.auto(host).borrow().explain(direction, bytes).method(),
            rounds.median(own).value / 1000.0,
            format!("{:.3} {}", ns / 1000.0, best_way.name()),
            format!("{regret:.3}"),
            if all_right { "yes" } else { "WRONG BYTES" },
            behind.join(", "),
        ))?;
        regrets.push((host, regret));
    }
    if is_judged {
        judge(bench, found, place, &|rival, host| {
            let (own, rival) = (at(Way::Auto(host))?, at(rival)?);
            Some(rounds.ratio(own, rival))
        })?;
    }
    Ok(regrets)
}

/// The targets at 64 KiB: with page-locked memory on both sides, for that is what a pinned cudaMemcpy copies to. `ratio` is
/// the automatic copier's time with such memory over a rival's.
fn judge(
    bench: &Bench<'_>,
    found: &mut Findings,
    place: Place,
    ratio: &dyn Fn(Way, HostSide) -> Option<Estimate>,
) -> std::result::Result<(), Failure> {
    let lab = bench.lab;
    for (way, limit, target) in [
        (
            Way::Cuda(HostSide::PageLocked),
            Target::AtMost(0.5),
            "D2H 64 KiB, page-locked memory, auto / pinned cudaMemcpy",
        ),
        (Way::Bar1, Target::AtLeast(15.0), "D2H 64 KiB, page-locked memory, BAR1 on one core / auto"),
    ] {
        let shown = |ratio: Estimate| if way == Way::Bar1 { ratio.map(f64::recip) } else { ratio };
        match ratio(way, HostSide::PageLocked) {
            Some(ratio) => {
                found.compare(place, Way::Auto(HostSide::PageLocked).name(), way.name(), ratio);
                found.judge(PART, target, limit, "x", shown(ratio), String::new());
            }
            None => found.skip(lab.screen, PART, format!("{target}: there is no {}", way.name()))?,
        }
        if let Some(ratio) = ratio(way, HostSide::Pageable) {
            found.compare(place, Way::Auto(HostSide::Pageable).name(), way.name(), ratio);
            lab.screen.line(&format!(
                "{:>8} not judged, with ordinary memory: {} {:.3}",
                "",
                if way == Way::Bar1 { "BAR1 on one core / auto" } else { "auto / pinned cudaMemcpy" },
                shown(ratio)
            ))?;
        }
    }
    Ok(())
}
