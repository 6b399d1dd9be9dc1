//! The tables, in the order in which they disturb each other least.

use std::cell::RefCell;

use super::args::Plan;
use super::contenders::{AutoStarter, Contenders, Starter};
use super::visible::{self, Listener};
use crate::cuda::PinnedHost;
use crate::mapping::Mapping;
use crate::sys::num::u64_of;
use crate::tool::bench::{Bench, arena_bytes, host_memory};
use crate::tool::fail::Failure;
use crate::tool::method::{Agent, AgentPinned, Bar1, CudaMemcpy, HostSide, Method, Parallel, Posted};
use crate::tool::quickest;
use crate::tool::report::{Direction, Entry};
use crate::tool::rig::Rig;
use crate::tool::series::Series;

/// What is measured, and on what.
pub(super) struct Subject<'a> {
    pub(super) plan: &'a Plan,
    pub(super) rig: &'a Rig,
    pub(super) mapping: &'a Mapping<'a>,
    pub(super) listener: Option<&'a Listener>,
    pub(super) contenders: &'a Contenders,
}

/// Where rows go.
struct Sheet<'a, 's, 'b> {
    plan: &'a Plan,
    series: Series<'s>,
    bench: &'a mut Bench<'b>,
    results: &'a mut Vec<Entry>,
}

impl Sheet<'_, '_, '_> {
    fn table<M: Method>(&mut self, method: &M, direction: Direction, arena: &mut [u8]) -> Result<(), Failure> {
        let layout = self.plan.table(method, direction);
        self.series.table(self.bench, (method, direction), &layout, arena, self.results)
    }
}

/// All tables.
///
/// Methods that leave nothing behind on the GPU come first. The agent and the automatic path have a kernel there as long as
/// they exist, so each is made when all the tables before are done, and ended before the next is made. Between making
/// and ending nothing is freed, which would wait for that kernel, and no kernel is launched for the first time.
pub(super) fn measure(
    subject: &Subject<'_>,
    series: Series<'_>,
    bench: &mut Bench<'_>,
    results: &mut Vec<Entry>,
) -> Result<(), Failure> {
    let Contenders { agent, auto, .. } = subject.contenders;
    let plan = subject.plan;
    let mut arena = host_memory(arena_bytes(plan.terms.largest))?;
    let mut sheet = Sheet { plan, series, bench, results };
    transient(subject, &mut sheet, &mut arena)?;
    if let Some(starter) = agent {
        by_agent(subject, starter, &mut sheet, &mut arena)?;
    }
    if let Some(starter) = auto {
        by_auto(subject, starter, &mut sheet, &mut arena)?;
    }
    Ok(())
}

/// BAR1, by one thread and by several, and `cuMemcpy`.
fn transient(subject: &Subject<'_>, sheet: &mut Sheet<'_, '_, '_>, arena: &mut [u8]) -> Result<(), Failure> {
    let Subject { plan, rig, mapping, listener, contenders } = *subject;
    let locked = contenders.cuda.then(|| PinnedHost::new(rig.gpu.ordinal, arena_bytes(plan.terms.largest)));
    let mut locked = locked.transpose()?;
    for direction in plan.terms.directions() {
        if contenders.bar1 {
            sheet.table(&Bar1(mapping), direction, arena)?;
            if direction == Direction::HostToDevice {
                sheet.table(&Posted(mapping), direction, arena)?;
                if let Some(listener) = listener {
                    let Sheet { series, bench, results, .. } = sheet;
                    visible::table((plan, rig, listener), mapping, series, bench, arena, results)?;
                }
            }
        }
        for copier in &contenders.copiers {
            // Awake from the first copies of a row on, which are not timed.
            sheet.table(&Parallel(mapping, copier), direction, arena)?;
        }
        let Some(locked) = &mut locked else { continue };
        for (host, arena) in [(HostSide::PageLocked, locked.as_mut_slice()), (HostSide::Pageable, &mut *arena)] {
            sheet.table(&CudaMemcpy::new(&rig.buffer, host)?, direction, arena)?;
        }
    }
    Ok(())
}

/// The agent, with any memory and with page-locked memory, and then its end.
fn by_agent(
    subject: &Subject<'_>,
    starter: &Starter,
    sheet: &mut Sheet<'_, '_, '_>,
    arena: &mut [u8],
) -> Result<(), Failure> {
    let agent = RefCell::new(starter.start(subject.rig)?);
    {
        let pinned = AgentPinned::new(&agent, arena.len())?;
        for direction in subject.plan.terms.directions() {
            sheet.table(&Agent(&agent), direction, arena)?;
            sheet.table(&pinned, direction, arena)?;
        }
    }
    Ok(agent.into_inner().stop()?)
}

/// The automatic path, what it chose, and its end.
fn by_auto(
    subject: &Subject<'_>,
    starter: &AutoStarter,
    sheet: &mut Sheet<'_, '_, '_>,
    arena: &mut [u8],
) -> Result<(), Failure> {
    let auto = starter.make(subject.rig)?;
    for direction in subject.plan.terms.directions() {
        sheet.table(&auto, direction, arena)?;
        let copier = auto.0.borrow();
        let mut sizes: Vec<usize> = subject.plan.places.iter().map(|&(_, bytes)| bytes).collect();
        sizes.sort_unstable();
        let used: Vec<_> = sizes.iter().map(|&n| (u64_of(n), copier.explain(direction, n).method().name())).collect();
        sheet.series.screen.line(&format!("It used {}.", quickest::choices(&used)))?;
    }
    Ok(())
}
