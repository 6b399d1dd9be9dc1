//! What is measured beside BAR1 by one thread: made or tried before the thread is kept on its CPU, because all of it
//! starts threads.

use std::cell::RefCell;
use std::time::Duration;

use super::TOOL;
use super::args::{MethodFlag, Plan};
use crate::agent::{AgentOptions, PushAgent};
use crate::auto::{AutoCopier, AutoOptions};
use crate::error::{Error, ErrorKind};
use crate::tool::cpu::{self, CpuList};
use crate::tool::fail::{self, Failure};
use crate::tool::method::Auto;
use crate::tool::rig::Rig;
use crate::{ParallelCopier, ParallelCopierBuilder};

/// The largest size that the automatic path measures for itself.
const AUTO_LARGEST: usize = 64 << 20;

/// For an answer of CPU threads, which may wait long for a CPU.
const PATIENCE: Duration = Duration::from_secs(60);

/// Methods that can be measured here.
#[derive(Debug)]
pub(super) struct Contenders {
    /// BAR1 by one thread.
    pub(super) bar1: bool,
    /// BAR1 by several, once for each number of threads.
    pub(super) copiers: Vec<ParallelCopier>,
    /// How the agent is started, where it is measured.
    pub(super) agent: Option<Starter>,
    /// How the automatic path is made, where it is measured.
    pub(super) auto: Option<AutoStarter>,
    /// `cuMemcpy`.
    pub(super) cuda: bool,
}

/// How a resident agent is started.
///
/// It is *dedicated*: its kernel stays from the start to the stop, so no launch of one that had left is among the
/// figures. A resident kernel polls GPU memory and makes `cudaFree` and the like wait, so it runs only while its own
/// tables are measured, and whatever they need is allocated before.
#[derive(Debug, Clone)]
pub(super) struct Starter {
    options: AgentOptions,
    away: Option<Away>,
}

/// How the automatic path is made, which measures for itself then.
#[derive(Debug, Clone)]
pub(super) struct AutoStarter {
    options: AutoOptions,
    away: Option<Away>,
}

/// Where threads that play a kernel run: not on the CPU of the thread that measures, which is all that they would inherit.
#[derive(Debug, Clone)]
struct Away(CpuList);

impl Away {
    fn start<T>(away: Option<&Self>, start: impl FnOnce() -> Result<T, Error>) -> Result<T, Failure> {
        let Some((Self(cpus), here)) = away.zip(cpu::current()) else { return Ok(start()?) };
        // Where it cannot move, both share a CPU, which is slow, not wrong.
        let _ = cpu::move_away(cpus, here);
        let started = start();
        let _ = cpu::pin_to(here);
        Ok(started?)
    }
}

impl Starter {
    fn new(rig: &Rig) -> Self {
        let options = AgentOptions::default().gpu(rig.gpu.ordinal).dedicated();
        if !rig.is_emulated() {
            return Self { options, away: None };
        }
        Self { options: options.cpu_stand_in().deadline(PATIENCE), away: cpu::allowed().map(Away) }
    }

    /// Starts the agent on the buffer of `rig`.
    pub(super) fn start<'a>(&self, rig: &'a Rig) -> Result<PushAgent<'a>, Failure> {
        Away::start(self.away.as_ref(), || PushAgent::start(&rig.session, [&rig.buffer], self.options.clone()))
    }

    /// The header's line.
    pub(super) fn in_words(&self) -> &'static str {
        match self.away {
            None => "stays on the GPU while its tables are measured: no launch is among the figures",
            Some(_) => "two CPU threads stand in for its kernel",
        }
    }
}

impl Contenders {
    /// Says what cannot be measured here, and why.
    ///
    /// # Errors
    ///
    /// What can be measured in principle fails, or nothing is left.
    pub(super) fn new(plan: &Plan, rig: &Rig) -> Result<Self, Failure> {
        let has = |method| plan.methods.contains(&method);
        let builder = || ParallelCopier::builder().gpu(rig.gpu.pci);
        let copiers = match (has(MethodFlag::Parallel), &plan.threads[..]) {
            (false, _) => Vec::new(),
            (true, []) => vec![builder().build()?],
            (true, numbers) => {
                // As many for writes: what a third one adds is for the figures to show.
                let of = |&threads: &usize| builder().threads(threads).write_threads(threads).build();
                numbers.iter().map(of).collect::<Result<_, _>>()?
            }
        };
        let wants_agent = has(MethodFlag::Agent) || has(MethodFlag::Auto);
        let agent = if wants_agent { agent(plan, rig)? } else { None };
        let auto = if has(MethodFlag::Auto) { Some(AutoStarter::new(plan, builder(), agent.as_ref())?) } else { None };

        let cuda = has(MethodFlag::Cuda) && !rig.is_emulated();
        if has(MethodFlag::Cuda) && !cuda {
            fail::say(TOOL, "-c is passed over: an emulated GPU has no cuMemcpy to compare with");
        }
        if plan.stand_in && !rig.is_emulated() {
            fail::say(TOOL, "--stand-in is passed over: this GPU runs the agent's kernel itself");
        }
        let agent = agent.filter(|_| has(MethodFlag::Agent));
        let contenders = Self { bar1: has(MethodFlag::Bar1), copiers, agent, auto, cuda };
        if contenders.tables_per_direction() == 0 {
            return Err(Failure::run("none of the methods asked for can be measured here; see --methods"));
        }
        Ok(contenders)
    }

    /// Tables of every direction. Writes may have more of BAR1.
    pub(super) fn tables_per_direction(&self) -> usize {
        usize::from(self.bar1)
            + self.copiers.len()
            + 2 * usize::from(self.agent.is_some())
            + usize::from(self.auto.is_some())
            + 2 * usize::from(self.cuda)
    }

    /// Lines of the header.
    pub(super) fn in_words(&self) -> Vec<String> {
        let with_workers = self.copiers.iter().filter(|copier| !copier.cpus().is_empty());
        let threads = with_workers.map(|copier| {
            let cpus: CpuList = copier.cpus().iter().copied().collect();
            format!("Threads   {}: this one and workers on CPUs {cpus}", copier.threads())
        });
        let agent = self.agent.iter().map(|starter| format!("Agent     {}", starter.in_words()));
        threads.chain(agent).collect()
    }
}

/// Starts an agent once and stops it: it works, and CUDA has loaded its kernel before anything is timed. `None` where a
/// kernel may not stay, which is said.
fn agent(plan: &Plan, rig: &Rig) -> Result<Option<Starter>, Failure> {
    if rig.is_emulated() && !plan.stand_in {
        fail::say(TOOL, "the agent is passed over: an emulated GPU runs no kernel; --stand-in has CPU threads play it");
        return Ok(None);
    }
    let starter = Starter::new(rig);
    let tried = PushAgent::start(&rig.session, [&rig.buffer], starter.options.clone()).and_then(PushAgent::stop);
    match tried {
        Ok(()) => Ok(Some(starter)),
        Err(error) if matches!(error.kind(), ErrorKind::UnsupportedFeature(_) | ErrorKind::UnsupportedMemory(_)) => {
            fail::say(TOOL, &format!("the agent is passed over: {error}"));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

impl AutoStarter {
    /// With everything that it may choose from here. The CPUs of its workers are found now, as those of the copiers that
    /// are measured are.
    fn new(plan: &Plan, builder: ParallelCopierBuilder, agent: Option<&Starter>) -> Result<Self, Failure> {
        let largest = plan.terms.largest.next_power_of_two().clamp(64, AUTO_LARGEST);
        let mut options = AutoOptions::default().largest(largest);
        let cpus: CpuList = builder.build()?.cpus().iter().copied().collect();
        if !cpus.is_empty() {
            options = options.parallel(builder.cpus(cpus));
        }
        if let Some(starter) = agent {
            options = options.agent(starter.options.clone());
        }
        Ok(Self { options, away: agent.and_then(|starter| starter.away.clone()) })
    }

    /// Makes it, on the buffer of `rig`.
    pub(super) fn make<'a>(&self, rig: &'a Rig) -> Result<Auto<'a>, Failure> {
        let make = || AutoCopier::new(&rig.session, &rig.buffer, self.options.clone());
        Ok(Auto(RefCell::new(Away::start(self.away.as_ref(), make)?)))
    }
}
