//! `gdrx_agent_t`: push agents, and the host buffers that their kernels write.

#![allow(unsafe_code, reason = "duties of the C caller are handed on")]

use std::ffi::c_void;
use std::time::Duration;

use gdrcopy::agent::{AgentOptions, HostBuffer, PushAgent, Segment, Ticket};
use gdrcopy::{DeviceRange, ErrorKind, GpuAddr};

use crate::failure::{Failure, Kind};
use crate::sessions::{self, Open};
use crate::table::Table;
use crate::types;

static AGENTS: Table<(), Agent> = Table::new("agent");

/// An agent and its buffers.
pub(crate) struct Agent {
    push: PushAgent<'static>,
    /// By address, without gaps in time: a buffer that was freed waits for the next that fits it.
    buffers: Vec<Buffer>,
    /// The pieces of the request that is being made; kept, so that the next needs no memory.
    segments: Vec<Segment>,
}

struct Buffer {
    addr: usize,
    /// As it was asked for.
    size: usize,
    state: State,
}

enum State {
    Free(HostBuffer),
    Ready(HostBuffer),
    InFlight(Ticket),
    /// A request failed, and the GPU may still be writing.
    Lost,
}

/// Which way a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

fn limit(microseconds: i64) -> Result<Option<Duration>, Failure> {
    match microseconds {
        -1 => Ok(None),
        _ => u64::try_from(microseconds)
            .map(|limit| Some(Duration::from_micros(limit)))
            .map_err(|_| Failure::invalid(format!("a time limit of {microseconds} us; -1 is none"))),
    }
}

fn number(name: &str, value: i32) -> Result<u32, Failure> {
    u32::try_from(value).map_err(|_| Failure::invalid(format!("the option {name} is {value}")))
}

/// What C asks for; 0 leaves the default as it is.
pub(crate) fn options(asked: &types::AgentOptions) -> Result<AgentOptions, Failure> {
    let gpu = usize::try_from(asked.gpu).map_err(|_| Failure::invalid(format!("GPU {}", asked.gpu)))?;
    let mut options = AgentOptions::default().gpu(gpu);
    if asked.threads != 0 {
        options = options.threads(number("threads", asked.threads)?);
    }
    if asked.ring != 0 {
        options = options.ring(number("ring", asked.ring)?);
    }
    match asked.packet_bytes {
        0 => {}
        -1 => options = options.packet_bytes(0),
        bytes => options = options.packet_bytes(usize::try_from(number("packet_bytes", bytes)?).unwrap_or(usize::MAX)),
    }
    if asked.idle_us != 0 {
        options = options.idle_timeout(limit(asked.idle_us)?);
    }
    if asked.residency_us != 0 {
        options = options.residency(limit(asked.residency_us)?);
    }
    if asked.deadline_us != 0 {
        let none = || Failure::invalid("the option deadline_us is -1; every request has a deadline");
        options = options.deadline(limit(asked.deadline_us)?.ok_or_else(none)?);
    }
    Ok(if asked.cpu_stand_in == 0 { options } else { options.cpu_stand_in() })
}

fn device_range(open: &Open, asked: &types::Range) -> Result<DeviceRange<'static>, Failure> {
    if let Some((buffer, offset)) = open.buffer_around(asked.addr) {
        let end = offset.checked_add(asked.size).ok_or_else(|| Failure::invalid("a range reaches past all memory"))?;
        return Ok(DeviceRange::from(buffer).slice(offset..end)?);
    }
    // SAFETY: the duty that the memory outlives the agent is passed on to the C caller (gdrapi_ext.h says so).
    Ok(unsafe { DeviceRange::from_raw(GpuAddr::new(asked.addr), asked.size) }?)
}

pub(crate) fn create(session: u64, ranges: &[types::Range], asked: &types::AgentOptions) -> Result<u64, Failure> {
    let open = sessions::find(session)?;
    let options = options(asked)?;
    let ranges = ranges.iter().map(|range| device_range(&open, range)).collect::<Result<Vec<_>, _>>()?;
    let push = PushAgent::start(&open.session, ranges, options)?;
    AGENTS.create(Some(&open), (), Agent { push, buffers: Vec::new(), segments: Vec::new() }, (), destroy)
}

pub(crate) fn destroy(handle: u64) -> Result<(), Failure> {
    // The buffers, which the kernel may be writing, go after it has ended.
    AGENTS.destroy(
        handle,
        |()| (),
        |(), Agent { push, buffers: _buffers, .. }, ()| push.stop().map_err(Failure::of_agent),
    )
}

/// Runs `call` on an agent that no other thread is in a call on.
#[inline]
pub(crate) fn with<R>(handle: u64, call: impl FnOnce(&mut Agent) -> Result<R, Failure>) -> Result<R, Failure> {
    AGENTS.first(handle, call)
}

/// As `with`, in the process that made the agent.
pub(crate) fn with_own<R>(handle: u64, call: impl FnOnce(&mut Agent) -> Result<R, Failure>) -> Result<R, Failure> {
    AGENTS.check_process(handle)?;
    AGENTS.first(handle, call)
}

impl Agent {
    #[inline]
    pub(crate) fn push(&mut self) -> &mut PushAgent<'static> {
        &mut self.push
    }

    /// Lets the kernel reach memory of the caller's.
    ///
    /// # Safety
    ///
    /// As [`PushAgent::register_host`].
    pub(crate) unsafe fn register_host(&mut self, memory: *mut c_void, size: usize) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        Ok(unsafe { self.push.register_host(memory.cast(), size) }?)
    }

    pub(crate) fn unregister_host(&mut self, memory: *mut c_void) -> Result<(), Failure> {
        Ok(self.push.unregister_host(memory.cast_const().cast())?)
    }

    /// Gives zeroed memory, that of a freed buffer where one fits.
    pub(crate) fn alloc(&mut self, size: usize) -> Result<*mut c_void, Failure> {
        let fits = |buffer: &&mut Buffer| match &buffer.state {
            State::Free(memory) => size > 0 && (size..=size.saturating_mul(2)).contains(&memory.len()),
            _ => false,
        };
        if let Some(found) = self.buffers.iter_mut().filter(fits).min_by_key(|buffer| buffer.size) {
            let State::Free(mut memory) = std::mem::replace(&mut found.state, State::Lost) else {
                return Err(Failure::invalid("a freed buffer is in use"));
            };
            let bytes = &mut memory.as_mut_slice()[..size];
            bytes.fill(0);
            let at = bytes.as_mut_ptr().cast();
            (found.size, found.state) = (size, State::Ready(memory));
            return Ok(at);
        }
        let mut memory = self.push.host_buffer(size)?;
        let at = memory.as_mut_slice().as_mut_ptr();
        let place = self.buffers.partition_point(|buffer| buffer.addr < at.addr());
        self.buffers.insert(place, Buffer { addr: at.addr(), size, state: State::Ready(memory) });
        Ok(at.cast())
    }

    #[inline]
    fn place(&self, addr: usize) -> Result<usize, Failure> {
        let found = self.buffers.binary_search_by_key(&addr, |buffer| buffer.addr).ok();
        found.filter(|&at| !matches!(self.buffers[at].state, State::Free(_))).ok_or_else(|| {
            let text = "the pointer is of no live buffer of this agent's; gdrx_agent_alloc makes them";
            Failure::new(libc::EINVAL, Kind::InvalidHandle, text)
        })
    }

    pub(crate) fn free(&mut self, addr: usize) -> Result<(), Failure> {
        let at = self.place(addr)?;
        let buffer = &mut self.buffers[at];
        match std::mem::replace(&mut buffer.state, State::Lost) {
            State::Ready(memory) => {
                buffer.size = memory.len();
                buffer.state = State::Free(memory);
                Ok(())
            }
            State::InFlight(ticket) => {
                buffer.state = State::InFlight(ticket);
                Err(in_flight())
            }
            State::Free(_) | State::Lost => Err(lost()),
        }
    }

    /// Takes a request's pieces down, and checks them against what was asked for of the buffer.
    #[inline]
    fn take_down(&mut self, size: usize, pieces: &[types::Segment]) -> Result<(), Failure> {
        self.segments.clear();
        for &types::Segment { range, offset, size: bytes, at } in pieces {
            if at.checked_add(bytes).is_none_or(|end| end > size) {
                let text = format!("{bytes} bytes at {at} reach past the end of a host buffer of {size} bytes");
                return Err(Failure::new(libc::EINVAL, Kind::OutOfBounds, text));
            }
            self.segments.push(Segment { range, offset, bytes, at });
        }
        Ok(())
    }

    /// Makes a request and waits for it.
    #[inline]
    pub(crate) fn run(&mut self, way: Way, addr: usize, pieces: &[types::Segment]) -> Result<(), Failure> {
        let at = self.place(addr)?;
        self.take_down(self.buffers[at].size, pieces)?;
        let buffer = &mut self.buffers[at];
        let memory = match &mut buffer.state {
            State::Ready(memory) => memory,
            State::InFlight(_) => return Err(in_flight()),
            State::Free(_) | State::Lost => return Err(lost()),
        };
        let done = match way {
            Way::Read => self.push.read_into(memory, &self.segments),
            Way::Write => self.push.write_from(memory, &self.segments),
        };
        if memory.is_empty() {
            buffer.state = State::Lost;
        }
        done.map_err(Failure::of_agent)
    }

    /// Makes a request and returns.
    #[inline]
    pub(crate) fn submit(&mut self, way: Way, addr: usize, pieces: &[types::Segment]) -> Result<(), Failure> {
        let at = self.place(addr)?;
        self.take_down(self.buffers[at].size, pieces)?;
        let buffer = &mut self.buffers[at];
        let memory = match std::mem::replace(&mut buffer.state, State::Lost) {
            State::Ready(memory) => memory,
            State::InFlight(ticket) => {
                buffer.state = State::InFlight(ticket);
                return Err(in_flight());
            }
            State::Free(_) | State::Lost => return Err(lost()),
        };
        let made = match way {
            Way::Read => self.push.submit(memory, &self.segments),
            Way::Write => self.push.submit_write(memory, &self.segments),
        };
        match made {
            Ok(ticket) => {
                buffer.state = State::InFlight(ticket);
                Ok(())
            }
            Err(refused) => {
                let error = refused.error().clone();
                if let Some(memory) = refused.into_buffer() {
                    buffer.state = State::Ready(memory);
                }
                Err(Failure::of_agent(error))
            }
        }
    }

    /// Whether a request is done.
    #[inline]
    pub(crate) fn is_done(&mut self, addr: usize) -> Result<bool, Failure> {
        let at = self.place(addr)?;
        match &self.buffers[at].state {
            State::InFlight(ticket) => self.push.is_done(ticket).map_err(Failure::of_agent),
            State::Lost => Err(lost()),
            State::Free(_) | State::Ready(_) => Err(no_request()),
        }
    }

    /// Waits for a request.
    #[inline]
    pub(crate) fn wait(&mut self, addr: usize) -> Result<(), Failure> {
        let at = self.place(addr)?;
        let buffer = &mut self.buffers[at];
        match std::mem::replace(&mut buffer.state, State::Lost) {
            State::InFlight(ticket) => {
                // A child only asks, and changes nothing.
                if let Err(error) = self.push.is_done(&ticket)
                    && error.kind() == ErrorKind::WrongProcess
                {
                    buffer.state = State::InFlight(ticket);
                    return Err(error.into());
                }
                buffer.state = State::Ready(self.push.wait(ticket).map_err(Failure::of_agent)?);
                Ok(())
            }
            State::Lost => Err(lost()),
            other => {
                buffer.state = other;
                Err(no_request())
            }
        }
    }
}

#[cold]
fn in_flight() -> Failure {
    Failure::new(libc::EBUSY, Kind::Busy, "a request of this buffer is in flight; gdrx_agent_wait ends it")
}

#[cold]
fn no_request() -> Failure {
    Failure::invalid("no request of this buffer is in flight; gdrx_agent_submit_read makes one")
}

#[cold]
fn lost() -> Failure {
    let text = "a request of this buffer failed, and the GPU may still be writing to it; destroy the agent";
    Failure::new(libc::EINVAL, Kind::Stale, text)
}

#[cfg(test)]
mod tests {
    use gdrcopy::agent::Fault;
    use gdrcopy::{BackendKind, Session};

    use super::*;

    fn agent(options: AgentOptions) -> Agent {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let range = DeviceRange::from(std::sync::Arc::new(session.alloc(4096).unwrap()));
        let push = PushAgent::start(&session, [range], options.cpu_stand_in()).unwrap();
        Agent { push, buffers: Vec::new(), segments: Vec::new() }
    }

    const PIECE: [types::Segment; 1] = [types::Segment { range: 0, offset: 0, size: 100, at: 0 }];

    #[test]
    fn after_a_deadline_the_buffer_is_lost_and_the_error_stays() {
        let options = AgentOptions::default().deadline(Duration::from_secs(2)).stand_in_fault(1, Fault::Hangs);
        let mut agent = agent(options);
        let [first, second] = [100, 200].map(|size| agent.alloc(size).unwrap().addr());
        let kind = |result: Result<(), Failure>| result.unwrap_err().kind();
        agent.run(Way::Read, first, &PIECE).unwrap();
        assert_eq!(kind(agent.run(Way::Read, first, &PIECE)), Kind::TimedOut);
        assert_eq!(kind(agent.run(Way::Read, first, &PIECE)), Kind::Stale);
        assert_eq!(kind(agent.free(first)), Kind::Stale);
        assert_eq!(kind(agent.wait(first)), Kind::Stale);
        assert_eq!(kind(agent.run(Way::Write, second, &PIECE)), Kind::TimedOut, "the error stays");
        assert_eq!(kind(agent.push.stop().map_err(Failure::of_agent)), Kind::TimedOut);
    }

    #[test]
    fn freed_memory_is_taken_again_where_it_fits() {
        let mut agent = agent(AgentOptions::default());
        let [large, small] = [10_000, 1000].map(|size| agent.alloc(size).unwrap().addr());
        agent.free(large).unwrap();
        agent.free(small).unwrap();
        assert_ne!(agent.alloc(4999).unwrap().addr(), large, "half of it would lie idle");
        assert_eq!(agent.alloc(900).unwrap().addr(), small);
        assert_eq!(agent.alloc(5000).unwrap().addr(), large);
        assert_ne!(agent.alloc(900).unwrap().addr(), small, "that one is in use");
        assert_eq!(agent.buffers.len(), 4);
        agent.push.stop().unwrap();
    }
}
