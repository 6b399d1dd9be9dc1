//! Host memory that the kernel writes.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, ErrorKind, Result};
use crate::sys::num::u64_of;
use crate::sys::process::Owner;

/// What a stand-in kernel's memory starts at a multiple of.
const ALIGN: usize = 4096;

enum Kind {
    #[cfg(feature = "cuda")]
    PageLocked(std::mem::ManuallyDrop<crate::cuda::PinnedHost>),
    Plain(Layout),
}

/// Zeroed host memory, and where the kernel finds it. Reached through raw pointers and atomics, never a reference while
/// the kernel may write to it.
pub(super) struct HostMemory {
    ptr: NonNull<u8>,
    len: usize,
    addr: u64,
    /// A request failed, and the kernel may still be writing.
    is_abandoned: AtomicBool,
    owner: Owner,
    kind: Kind,
}

// SAFETY: owned memory; who may access it when is up to the agent's protocol, on any thread.
unsafe impl Send for HostMemory {}
// SAFETY: as above: a shared reference only hands out addresses.
unsafe impl Sync for HostMemory {}

/// Where memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A GPU, by its ordinal.
    #[cfg(feature = "cuda")]
    Gpu(usize),
    StandIn,
}

impl HostMemory {
    pub(super) fn new(place: Place, bytes: usize) -> Result<Self> {
        match place {
            #[cfg(feature = "cuda")]
            Place::Gpu(ordinal) => {
                let memory = crate::cuda::PinnedHost::new(ordinal, bytes)?;
                let addr = memory.gpu_addr()?.raw();
                let ptr = NonNull::new(memory.as_ptr())
                    .ok_or_else(|| Error::new("agent", ErrorKind::OutOfMemory, "no page-locked memory"))?;
                let kind = Kind::PageLocked(std::mem::ManuallyDrop::new(memory));
                Ok(Self { ptr, len: bytes, addr, is_abandoned: AtomicBool::new(false), owner: Owner::here(), kind })
            }
            Place::StandIn => {
                let too_big = || Error::new("agent", ErrorKind::OutOfMemory, format!("{bytes} bytes of host memory"));
                // Whole lines, for these are what is read.
                let layout =
                    bytes.checked_next_multiple_of(64).and_then(|whole| Layout::from_size_align(whole, ALIGN).ok());
                let layout = layout.ok_or_else(too_big)?;
                // SAFETY: the size is not 0, for no caller asks for 0 bytes.
                let ptr = unsafe { alloc_zeroed(layout) };
                let ptr = NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout));
                let addr = u64_of(ptr.as_ptr().expose_provenance());
                let (is_abandoned, kind) = (AtomicBool::new(false), Kind::Plain(layout));
                Ok(Self { ptr, len: bytes, addr, is_abandoned, owner: Owner::here(), kind })
            }
        }
    }

    pub(super) fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// By which the kernel reaches byte 0.
    pub(super) fn addr(&self) -> u64 {
        self.addr
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Gives the bytes up: the kernel may write to them at any time.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // CUDA's memory is the parent's; plain memory goes with the child.
            return;
        }
        match &mut self.kind {
            #[cfg(feature = "cuda")]
            Kind::PageLocked(memory) => {
                // SAFETY: this is the value's own drop; the field is not used again.
                unsafe { std::mem::ManuallyDrop::drop(memory) };
            }
            Kind::Plain(layout) => {
                // SAFETY: allocated with this layout and freed once.
                unsafe { dealloc(self.ptr.as_ptr(), *layout) };
            }
        }
    }
}

/// A host buffer has at least a byte.
pub(super) fn some(bytes: usize) -> Result<()> {
    if bytes > 0 {
        return Ok(());
    }
    Err(Error::new("agent", ErrorKind::InvalidArgument, "a host buffer of 0 bytes").remedy("ask for at least 1 byte"))
}

/// Page-locked host memory, which a push agent reads and writes directly:
/// [`PushAgent::host_buffer`](super::PushAgent::host_buffer).
///
/// It is freed when both this value and the agent are gone. (Without an agent,
/// [`AutoCopier::host_buffer`](crate::auto::AutoCopier::host_buffer), with this value.)
pub struct HostBuffer {
    memory: Arc<HostMemory>,
    /// The agent it belongs to.
    agent: Option<u64>,
}

impl HostBuffer {
    pub(super) fn new(memory: Arc<HostMemory>, agent: u64) -> Self {
        Self { memory, agent: Some(agent) }
    }

    /// Nobody's but the caller's. `gpu` is the CUDA ordinal of a GPU that reaches it; without one it is plain memory.
    pub(crate) fn of_no_agent(gpu: Option<usize>, bytes: usize) -> Result<Self> {
        some(bytes)?;
        let place = match gpu {
            #[cfg(feature = "cuda")]
            Some(ordinal) => Place::Gpu(ordinal),
            _ => Place::StandIn,
        };
        Ok(Self { memory: Arc::new(HostMemory::new(place, bytes)?), agent: None })
    }

    /// The length in bytes; 0 after a request into this buffer failed, since the GPU may still be writing to it then.
    #[must_use]
    pub fn len(&self) -> usize {
        if self.memory.is_abandoned.load(Ordering::Relaxed) { 0 } else { self.memory.len() }
    }

    /// Whether a request into this buffer failed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes; the kernel writes to them only during a request, which borrows them or the buffer
        // alone or owns it, or after one that failed, which has made `len` 0; the agent makes no reference of them.
        unsafe { std::slice::from_raw_parts(self.memory.ptr(), self.len()) }
    }

    /// The bytes, to change.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self`, of which there is one for the memory, is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory.ptr(), self.len()) }
    }

    /// Where the kernel finds `bytes` bytes from byte `at` on.
    pub(super) fn addr(&self, agent: u64, at: usize, bytes: usize) -> Result<u64> {
        if self.agent != Some(agent) {
            return Err(Error::new("agent", ErrorKind::InvalidArgument, "the buffer is another agent's")
                .remedy("use one from this agent's host_buffer"));
        }
        if at.checked_add(bytes).is_none_or(|end| end > self.len()) {
            let cause = format!("{bytes} bytes at {at} reach past the end of a host buffer of {} bytes", self.len());
            return Err(Error::new("agent", ErrorKind::OutOfBounds, cause));
        }
        Ok(self.memory.addr() + u64_of(at))
    }

    /// Gives the bytes up: the kernel may write to them at any time.
    pub(super) fn abandon(&mut self) {
        self.memory.abandon();
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("len", &self.len()).finish_non_exhaustive()
    }
}
