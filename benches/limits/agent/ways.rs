//! The ways of copying that are compared, and the loop that times them.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use gdrcopy::agent::{AgentOptions, HostBuffer, PushAgent, Segment};
use gdrcopy::cuda::PinnedHost;
use gdrcopy::tool::ab::{Rounds, calls_in, median};
use gdrcopy::tool::clock::Clock;
use gdrcopy::tool::cpu;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::method::Method;
use gdrcopy::tool::pattern;
use gdrcopy::tool::report::Direction;
use gdrcopy::tool::stats::nanoseconds;
use gdrcopy::{BackendKind, ParallelCopier, Result};

use super::times::Times;
use crate::lab::{self, Lab, patterned};
use crate::parallel;

/// The largest copy.
pub(super) const MOST: usize = 1 << 20;

/// A way of copying.
pub(super) enum Way<'a> {
    /// By the agent, with host memory that the GPU reaches.
    Agent,
    /// By the agent, with any host memory.
    AgentAny,
    /// Another one, with the host memory that it needs; a write ends with its arrival.
    Other { name: &'static str, method: Box<dyn Method + 'a>, host: Host, crew: Option<&'a ParallelCopier> },
    /// Nothing at all, for so long.
    Nothing(Duration),
}

/// Host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    /// What the agent's kernel writes.
    Agents,
    /// The process's own.
    Any,
    /// Page-locked.
    Locked,
}

impl Way<'_> {
    pub(super) fn name(&self, direction: Direction) -> &'static str {
        match (self, direction) {
            (Way::Agent, Direction::DeviceToHost) => "agent read_into",
            (Way::AgentAny, Direction::DeviceToHost) => "agent read",
            (Way::Agent, Direction::HostToDevice) => "agent write_from",
            (Way::AgentAny, Direction::HostToDevice) => "agent write",
            (Way::Other { name, .. }, _) => name,
            (Way::Nothing(_), _) => "host alone",
        }
    }

    fn host(&self) -> Host {
        match self {
            Way::Agent => Host::Agents,
            Way::Other { host, .. } => *host,
            Way::AgentAny | Way::Nothing(_) => Host::Any,
        }
    }
}

/// The agent on the buffer under test, and memory for every way. The agent goes first: freeing memory waits for its kernel.
pub(super) struct Stand<'a> {
    lab: &'a Lab<'a>,
    agent: RefCell<PushAgent<'a>>,
    agents: RefCell<HostBuffer>,
    any: RefCell<Vec<u8>>,
    locked: Option<RefCell<PinnedHost>>,
}

impl<'a> Stand<'a> {
    pub(super) fn new(lab: &'a Lab<'a>) -> std::result::Result<Self, Failure> {
        let is_emulated = lab.backend() == BackendKind::Emulated;
        let ordinal = lab.rig.gpu.ordinal;
        let locked = if is_emulated { None } else { Some(RefCell::new(PinnedHost::new(ordinal, MOST)?)) };
        let options = AgentOptions::default().gpu(ordinal).dedicated();
        let options = if is_emulated { options.cpu_stand_in().deadline(Duration::from_secs(20)) } else { options };
        let session = &lab.rig.session;
        // A stand-in has threads.
        let mut agent = lab.elsewhere(|| PushAgent::start(session, [&lab.rig.buffer], options))??;
        let mut agents = agent.host_buffer(MOST)?;
        agents.as_mut_slice().fill(1);
        Ok(Self {
            lab,
            agent: RefCell::new(agent),
            agents: RefCell::new(agents),
            any: RefCell::new(vec![1; MOST]),
            locked,
        })
    }

    /// How often the kernel was launched.
    pub(super) fn launches(&self) -> u64 {
        self.agent.borrow().launches()
    }

    pub(super) fn stop(self) -> Result<()> {
        self.agent.into_inner().stop()
    }

    #[inline(always)]
    fn once(&self, way: &Way<'_>, direction: Direction, bytes: usize) -> Result<()> {
        let whole = [Segment { range: 0, offset: 0, bytes, at: 0 }];
        match (way, direction) {
            (Way::Agent, Direction::DeviceToHost) => {
                self.agent.borrow_mut().read_into(&mut self.agents.borrow_mut(), &whole)
            }
            (Way::Agent, Direction::HostToDevice) => {
                self.agent.borrow_mut().write_from(&mut self.agents.borrow_mut(), &whole)
            }
            (Way::AgentAny, Direction::DeviceToHost) => {
                self.agent.borrow_mut().read(0, 0, &mut self.any.borrow_mut()[..bytes])
            }
            (Way::AgentAny, Direction::HostToDevice) => {
                self.agent.borrow_mut().write(0, 0, &self.any.borrow()[..bytes])
            }
            (Way::Other { method, host, .. }, Direction::DeviceToHost) => {
                self.on_host(*host, |memory| method.read(0, &mut memory[..bytes]))
            }
            (Way::Other { method, host, .. }, Direction::HostToDevice) => {
                self.on_host(*host, |memory| method.write(0, &memory[..bytes]))?;
                // The copy engine has waited by itself.
                if *host == Host::Locked { Ok(()) } else { method.settle() }
            }
            (Way::Nothing(time), _) => {
                let (clock, ps) = (self.lab.clock, time.as_nanos() * 1000);
                let start = clock.start();
                while u128::from(clock.ps(clock.stop().ticks.saturating_sub(start))) < ps {}
                Ok(())
            }
        }
    }

    #[inline(always)]
    fn on_host<T>(&self, host: Host, work: impl FnOnce(&mut [u8]) -> T) -> T {
        match (host, &self.locked) {
            (Host::Agents, _) => work(self.agents.borrow_mut().as_mut_slice()),
            (Host::Locked, Some(locked)) => work(locked.borrow_mut().as_mut_slice()),
            (Host::Any | Host::Locked, _) => work(&mut self.any.borrow_mut()),
        }
    }

    /// A block of calls, one by one; the first does not count.
    fn block(
        &self,
        way: &Way<'_>,
        (direction, bytes): (Direction, usize),
        calls: u32,
        warm: &lab::Load,
        times: &mut Vec<f64>,
    ) -> std::result::Result<(), Failure> {
        let clock: &Clock = self.lab.clock;
        let crew = if let Way::Other { crew, .. } = way { *crew } else { None };
        if let Some(crew) = crew {
            parallel::awake(crew, self.lab, warm)?;
        }
        for call in 0..=calls {
            cpu::mfence();
            let before = clock.stop();
            let start = clock.start();
            let outcome = self.once(way, direction, bytes);
            let stop = clock.stop();
            outcome?;
            if call > 0 && before.cpu == stop.cpu {
                let ps = clock.ps(stop.ticks.saturating_sub(start)).saturating_sub(clock.overhead_ps());
                times.push(nanoseconds(ps));
            }
        }
        // Its workers look for more work for a while.
        crew.map_or(Ok(()), |_| Ok(parallel::rest()?))
    }

    /// How many calls fill a block of this length.
    fn calls(&self, way: &Way<'_>, (direction, bytes): (Direction, usize), block: Duration, most: u32) -> Result<u32> {
        calls_in(block, most, |_| self.once(way, direction, bytes))
    }

    /// Whether a way brings every byte. What it should overwrite is different in each.
    fn verify(&self, way: &Way<'_>, (direction, bytes): (Direction, usize)) -> std::result::Result<bool, Failure> {
        let data = patterned(bytes, 77);
        let mut wrong = vec![0; bytes];
        pattern::fill_complement(&mut wrong, &data);
        let (on_device, on_host) = if direction == Direction::DeviceToHost { (&data, &wrong) } else { (&wrong, &data) };
        self.lab.device_put(0, on_device)?;
        self.on_host(way.host(), |memory| memory[..bytes].copy_from_slice(on_host));
        self.once(way, direction, bytes)?;
        match direction {
            Direction::DeviceToHost => Ok(self.on_host(way.host(), |memory| memory[..bytes] == data)),
            Direction::HostToDevice => self.lab.device_has(0, &data),
        }
    }

    /// Times all ways in interleaved blocks, and then compares what each brings.
    pub(super) fn measure(
        &self,
        ways: &[Way<'_>],
        what: (Direction, usize),
        time: Duration,
    ) -> std::result::Result<Measured, Failure> {
        const BLOCK: Duration = Duration::from_micros(150);
        const MOST_CALLS: u32 = 50;
        const FEWEST: usize = 3;
        let mut calls = Vec::new();
        for way in ways {
            calls.push(self.calls(way, what, BLOCK, MOST_CALLS)?);
        }
        let warm = lab::Load::new(what.0, what.1);
        let limit = self.lab.pace.limit(time);
        let begin = Instant::now();
        let mut times = vec![Vec::new(); ways.len()];
        let mut medians = vec![Vec::new(); ways.len()];
        let mut rounds = 0;
        while rounds < limit.rounds && (rounds < FEWEST || begin.elapsed() < limit.time) {
            // Each is first in its turn.
            for turn in 0..ways.len() {
                let index = (turn + rounds) % ways.len();
                let before = times[index].len();
                self.block(&ways[index], what, calls[index], &warm, &mut times[index])?;
                medians[index].push(median(&mut times[index][before..].to_vec()));
            }
            rounds += 1;
        }
        let verified = ways.iter().map(|way| self.verify(way, what)).collect::<std::result::Result<_, _>>()?;
        let times = times.into_iter().map(Times::new).collect();
        Ok(Measured { times, rounds: Rounds::of(medians), verified })
    }
}

/// What every way took, and whether it is right.
pub(super) struct Measured {
    pub(super) times: Vec<Times>,
    /// Of block medians.
    pub(super) rounds: Rounds,
    pub(super) verified: Vec<bool>,
}
