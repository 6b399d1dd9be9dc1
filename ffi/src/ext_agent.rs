//! The functions of `gdrapi_ext.h` for agents and automatic copiers.

#![allow(unsafe_code, reason = "exported by name, and called with C's pointers")]

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use gdrcopy::ParallelCopier;
use gdrcopy::policy::CopyDirection;

use crate::abi::number;
use crate::agents::{self, Way};
use crate::autos;
use crate::failure::{Failure, entry};
use crate::pointers::{Options, array, destination, options, output, source, string, write_text};
use crate::types::{AgentHandle, AgentOptions, AutoHandle, AutoOptions, Gdr, Range, Segment};

// SAFETY: integers, after one that is the size.
unsafe impl Options for AgentOptions {}
// SAFETY: integers and raw pointers, after an integer that is the size.
unsafe impl Options for AutoOptions {}

/// Launches a kernel that reads and writes these ranges.
///
/// # Safety
///
/// `ranges` is readable for `count` structures, `options` is null or as its size says, `agent` is null or writable. The
/// ranges stay allocated until the agent is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_create(
    g: *mut Gdr,
    ranges: *const Range,
    count: usize,
    options: *const AgentOptions,
    agent: *mut AgentHandle,
) -> c_int {
    entry("gdrx_agent_create", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(agent, "agent") }?;
        // SAFETY: the caller's duty.
        let ranges = unsafe { array(ranges, count, "ranges") }?;
        // SAFETY: the caller's duty.
        let asked = unsafe { self::options(options, "options") }?;
        out.h = agents::create(number(g), ranges, &asked)?;
        Ok(())
    })
}

/// Reads into any host memory.
///
/// # Safety
///
/// `to` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_read(
    agent: AgentHandle,
    range: usize,
    offset: usize,
    to: *mut c_void,
    size: usize,
) -> c_int {
    entry("gdrx_agent_read", || {
        // SAFETY: the caller's duty.
        let to = unsafe { destination(to, size) }?;
        agents::with(agent.h, |agent| agent.push().read(range, offset, to).map_err(Failure::of_agent))
    })
}

/// Writes from any host memory.
///
/// # Safety
///
/// `from` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_write(
    agent: AgentHandle,
    range: usize,
    offset: usize,
    from: *const c_void,
    size: usize,
) -> c_int {
    entry("gdrx_agent_write", || {
        // SAFETY: the caller's duty.
        let from = unsafe { source(from, size) }?;
        agents::with(agent.h, |agent| agent.push().write(range, offset, from).map_err(Failure::of_agent))
    })
}

/// Allocates host memory that the kernel reaches.
///
/// # Safety
///
/// `buffer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_alloc(agent: AgentHandle, size: usize, buffer: *mut *mut c_void) -> c_int {
    entry("gdrx_agent_alloc", || {
        if buffer.is_null() {
            return Err(Failure::invalid("buffer is NULL"));
        }
        // SAFETY: not null, and the caller's to write.
        unsafe { buffer.write(std::ptr::null_mut()) };
        let at = agents::with_own(agent.h, |agent| agent.alloc(size))?;
        // SAFETY: as above.
        unsafe { buffer.write(at) };
        Ok(())
    })
}

/// Gives such memory up.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_agent_free(agent: AgentHandle, buffer: *mut c_void) -> c_int {
    entry("gdrx_agent_free", || agents::with_own(agent.h, |agent| agent.free(buffer.addr())))
}

/// Lets the kernel reach page-locked memory of the caller's.
///
/// # Safety
///
/// The memory stays allocated and page-locked until it is taken back or the agent is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_register_host(agent: AgentHandle, memory: *mut c_void, size: usize) -> c_int {
    entry("gdrx_agent_register_host", || {
        // SAFETY: the caller's duty.
        agents::with_own(agent.h, |agent| unsafe { agent.register_host(memory, size) })
    })
}

/// Takes it back.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_agent_unregister_host(agent: AgentHandle, memory: *mut c_void) -> c_int {
    entry("gdrx_agent_unregister_host", || agents::with_own(agent.h, |agent| agent.unregister_host(memory)))
}

/// Reads pieces into a buffer of `gdrx_agent_alloc`.
///
/// # Safety
///
/// `segments` is readable for `count` structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_read_into(
    agent: AgentHandle,
    buffer: *mut c_void,
    segments: *const Segment,
    count: usize,
) -> c_int {
    entry("gdrx_agent_read_into", || {
        // SAFETY: the caller's duty.
        let pieces = unsafe { array(segments, count, "segments") }?;
        agents::with(agent.h, |agent| agent.run(Way::Read, buffer.addr(), pieces))
    })
}

/// Writes pieces from such memory.
///
/// # Safety
///
/// `segments` is readable for `count` structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_write_from(
    agent: AgentHandle,
    buffer: *mut c_void,
    segments: *const Segment,
    count: usize,
) -> c_int {
    entry("gdrx_agent_write_from", || {
        // SAFETY: the caller's duty.
        let pieces = unsafe { array(segments, count, "segments") }?;
        agents::with(agent.h, |agent| agent.run(Way::Write, buffer.addr(), pieces))
    })
}

/// As `gdrx_agent_read_into`, without waiting.
///
/// # Safety
///
/// As `gdrx_agent_read_into`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_submit_read(
    agent: AgentHandle,
    buffer: *mut c_void,
    segments: *const Segment,
    count: usize,
) -> c_int {
    entry("gdrx_agent_submit_read", || {
        // SAFETY: the caller's duty.
        let pieces = unsafe { array(segments, count, "segments") }?;
        agents::with(agent.h, |agent| agent.submit(Way::Read, buffer.addr(), pieces))
    })
}

/// As `gdrx_agent_write_from`, without waiting.
///
/// # Safety
///
/// As `gdrx_agent_write_from`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_submit_write(
    agent: AgentHandle,
    buffer: *mut c_void,
    segments: *const Segment,
    count: usize,
) -> c_int {
    entry("gdrx_agent_submit_write", || {
        // SAFETY: the caller's duty.
        let pieces = unsafe { array(segments, count, "segments") }?;
        agents::with(agent.h, |agent| agent.submit(Way::Write, buffer.addr(), pieces))
    })
}

/// Whether the request of a buffer is done.
///
/// # Safety
///
/// `done` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_is_done(agent: AgentHandle, buffer: *mut c_void, done: *mut c_int) -> c_int {
    entry("gdrx_agent_is_done", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(done, "done") }?;
        *out = c_int::from(agents::with(agent.h, |agent| agent.is_done(buffer.addr()))?);
        Ok(())
    })
}

/// Waits for the request of a buffer.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_agent_wait(agent: AgentHandle, buffer: *mut c_void) -> c_int {
    entry("gdrx_agent_wait", || agents::with(agent.h, |agent| agent.wait(buffer.addr())))
}

/// Whether the kernel is on the GPU, and how often it was launched.
///
/// # Safety
///
/// Each pointer is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_agent_state(agent: AgentHandle, resident: *mut c_int, launches: *mut u64) -> c_int {
    entry("gdrx_agent_state", || {
        // SAFETY: the caller's duty.
        let resident = unsafe { output(resident, "resident") }?;
        // SAFETY: the caller's duty.
        let launches = unsafe { output(launches, "launches") }?;
        agents::with_own(agent.h, |agent| {
            let push = agent.push();
            (*resident, *launches) = (c_int::from(push.is_resident()), push.launches());
            Ok(())
        })
    })
}

/// Ends the kernel.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_agent_destroy(agent: AgentHandle) -> c_int {
    entry("gdrx_agent_destroy", || agents::destroy(agent.h))
}

/// # Safety
///
/// As `gdrx_auto_create`.
unsafe fn auto_options(asked: &AutoOptions) -> Result<gdrcopy::auto::AutoOptions, Failure> {
    let mut made = gdrcopy::auto::AutoOptions::default();
    if !asked.agent.is_null() {
        // SAFETY: the caller's duty.
        let agent = unsafe { options(asked.agent, "options.agent") }?;
        made = made.agent(agents::options(&agent)?);
    }
    if asked.threads != 0 {
        let mut parallel = ParallelCopier::builder();
        if asked.threads != -1 {
            let negative = |_| Failure::invalid(format!("{} threads; -1 is as many as gain something", asked.threads));
            parallel = parallel.threads(usize::try_from(asked.threads).map_err(negative)?);
        }
        // SAFETY: the caller's duty.
        if let Some(list) = unsafe { string(asked.cpus, "the list of CPUs") }? {
            parallel = parallel.cpus(list.parse()?);
        }
        made = made.parallel(parallel);
    }
    if asked.page_locked != 0 {
        made = made.page_locked();
    }
    if asked.largest != 0 {
        made = made.largest(asked.largest);
    }
    if asked.milliseconds != 0 {
        made = made.time(Duration::from_millis(asked.milliseconds));
    }
    Ok(made)
}

/// Measures what is quickest at each size.
///
/// # Safety
///
/// `options` is null or as its size says, and so is what it points to; `copier` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_auto_create(
    g: *mut Gdr,
    addr: u64,
    options: *const AutoOptions,
    copier: *mut AutoHandle,
) -> c_int {
    entry("gdrx_auto_create", || {
        // SAFETY: the caller's duty.
        let out = unsafe { output(copier, "copier") }?;
        // SAFETY: the caller's duty.
        let asked = unsafe { self::options(options, "options") }?;
        // SAFETY: the caller's duty.
        let made = unsafe { auto_options(&asked) }?;
        out.h = autos::create(number(g), addr, made)?;
        Ok(())
    })
}

/// Reads in the quickest way.
///
/// # Safety
///
/// `to` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_auto_read(copier: AutoHandle, offset: usize, to: *mut c_void, size: usize) -> c_int {
    entry("gdrx_auto_read", || {
        // SAFETY: the caller's duty.
        let to = unsafe { destination(to, size) }?;
        autos::read(copier.h, offset, to)
    })
}

/// Writes in the quickest way.
///
/// # Safety
///
/// `from` is readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_auto_write(copier: AutoHandle, offset: usize, from: *const c_void, size: usize) -> c_int {
    entry("gdrx_auto_write", || {
        // SAFETY: the caller's duty.
        let from = unsafe { source(from, size) }?;
        autos::write(copier.h, offset, from)
    })
}

/// Lets the copier's agent reach page-locked memory of the caller's.
///
/// # Safety
///
/// The memory stays allocated and page-locked until it is taken back or the copier is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_auto_register_host(copier: AutoHandle, memory: *mut c_void, size: usize) -> c_int {
    entry("gdrx_auto_register_host", || {
        // SAFETY: the caller's duty.
        unsafe { autos::register_host(copier.h, memory, size) }
    })
}

/// Takes it back.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_auto_unregister_host(copier: AutoHandle, memory: *mut c_void) -> c_int {
    entry("gdrx_auto_unregister_host", || autos::unregister_host(copier.h, memory))
}

/// What it does with so many bytes, and why.
///
/// # Safety
///
/// `text` is null, or writable for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdrx_auto_explain(
    copier: AutoHandle,
    direction: c_int,
    size: usize,
    text: *mut c_char,
    room: usize,
) -> c_int {
    entry("gdrx_auto_explain", || {
        let explain = || {
            let direction = match direction {
                0 => CopyDirection::HostToDevice,
                1 => CopyDirection::DeviceToHost,
                other => return Err(Failure::invalid(format!("{other} is no direction"))),
            };
            autos::explain(copier.h, direction, size)
        };
        // SAFETY: the caller's duty.
        unsafe { write_text(text, room, explain) }
    })
}

/// Gives the copier up.
#[unsafe(no_mangle)]
pub extern "C" fn gdrx_auto_destroy(copier: AutoHandle) -> c_int {
    entry("gdrx_auto_destroy", || autos::destroy(copier.h))
}
