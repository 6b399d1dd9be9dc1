//! A block of threads that stays on the GPU and copies when asked.

use std::cell::RefCell;

use super::Method;
use crate::agent::{HostBuffer, PushAgent, Segment};
use crate::error::Result;
use crate::tool::bench::DATA_AT;
use crate::tool::cpu;
use crate::tool::report::{Direction, Metric};

/// What a row of either kind consists of: the call returns when the GPU has answered.
const SINGLES: &[Metric] = &[Metric::Single];

/// Copies from and into any host memory. The buffer is the agent's first range.
#[derive(Debug)]
pub struct Agent<'r, 'a>(pub &'r RefCell<PushAgent<'a>>);

impl Agent<'_, '_> {
    /// As in the report.
    pub const NAME: &'static str = "agent";
}

impl Method for Agent<'_, '_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn describe(&self, direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "PushAgent::write (from any memory; until the GPU has fetched it)",
            Direction::DeviceToHost => "PushAgent::read (into any memory)",
        }
    }

    fn sustains(&self) -> bool {
        false
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        SINGLES
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.0.borrow_mut().write(0, offset, from)
    }

    #[inline(always)]
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.0.borrow_mut().read(0, offset, to)
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

/// Copies from and into page-locked memory that the GPU reaches by itself.
#[derive(Debug)]
pub struct AgentPinned<'r, 'a> {
    agent: &'r RefCell<PushAgent<'a>>,
    host: RefCell<HostBuffer>,
}

impl<'r, 'a> AgentPinned<'r, 'a> {
    /// As in the report.
    pub const NAME: &'static str = "agent_pinned";

    /// Allocates `bytes` of such memory, which take the place of the host memory that each call names.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub fn new(agent: &'r RefCell<PushAgent<'a>>, bytes: usize) -> Result<Self> {
        let host = RefCell::new(agent.borrow_mut().host_buffer(bytes)?);
        Ok(Self { agent, host })
    }
}

impl Method for AgentPinned<'_, '_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn describe(&self, direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "PushAgent::write_from page-locked memory (until the GPU has fetched it)",
            Direction::DeviceToHost => "PushAgent::read_into page-locked memory",
        }
    }

    fn sustains(&self) -> bool {
        false
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        SINGLES
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let whole = Segment { range: 0, offset, bytes: from.len(), at: DATA_AT };
        self.agent.borrow_mut().write_from(&mut self.host.borrow_mut(), &[whole])
    }

    #[inline(always)]
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let whole = Segment { range: 0, offset, bytes: to.len(), at: DATA_AT };
        self.agent.borrow_mut().read_into(&mut self.host.borrow_mut(), &[whole])
    }

    fn lend(&self, host: &[u8]) {
        self.host.borrow_mut().as_mut_slice()[..host.len()].copy_from_slice(host);
    }

    fn give_back(&self, host: &mut [u8]) {
        host.copy_from_slice(&self.host.borrow().as_slice()[..host.len()]);
    }

    fn chill(&self, host: &[u8]) {
        cpu::flush_lines(&self.host.borrow().as_slice()[DATA_AT..][..host.len()]);
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}
