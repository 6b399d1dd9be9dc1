//! Memory that both sides of a ping-pong reach, as this side writes, reads and addresses it.

#![allow(unsafe_code, reason = "reads and writes page-locked memory that a kernel shares")]

use std::arch::asm;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::MmapMut;

use crate::cuda::PinnedHost;
use crate::error::Error;
use crate::mapping::Mapping;
use crate::sys::num::u64_of;
use crate::tool::answer::PART;
use crate::tool::fail::Failure;

const LINE: usize = 64;

/// Host memory that both sides reach, zeroed.
#[derive(Debug)]
pub enum SharedHost {
    /// Page-locked, for a GPU.
    Pinned(PinnedHost),
    /// Of the process, for an emulated one.
    Plain(MmapMut),
}

impl SharedHost {
    /// `bytes` of it for the GPU with this ordinal, or for an emulated one.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub fn new(gpu: Option<usize>, bytes: usize) -> Result<Self, Failure> {
        match gpu {
            Some(ordinal) => Ok(Self::Pinned(PinnedHost::new(ordinal, bytes)?)),
            None => MmapMut::map_anon(bytes)
                .map(Self::Plain)
                .map_err(|error| Failure::run(format!("no host memory for the messages ({error}); name a smaller -s"))),
        }
    }

    fn base(&self) -> *mut u8 {
        match self {
            Self::Pinned(memory) => memory.as_ptr(),
            Self::Plain(memory) => memory.as_ptr().cast_mut(),
        }
    }

    fn peer_address(&self) -> Result<u64, Error> {
        match self {
            Self::Pinned(memory) => Ok(memory.gpu_addr()?.raw()),
            Self::Plain(memory) => Ok(u64_of(memory.as_ptr().expose_provenance())),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Pinned(memory) => memory.len(),
            Self::Plain(memory) => memory.len(),
        }
    }
}

/// A stretch of memory that both sides reach.
#[derive(Clone, Copy, Debug)]
pub enum Area<'a> {
    /// GPU memory, through its window, from an offset that is a multiple of 64 on.
    Device(&'a Mapping<'a>, usize),
    /// Host memory, from an offset that is a multiple of 64 on.
    Host(&'a SharedHost, usize),
}

impl Area<'_> {
    /// The address of its first byte for the answering side.
    pub(super) fn peer_address(&self, is_emulated: bool) -> Result<u64, Error> {
        match *self {
            Self::Device(mapping, offset) if is_emulated => {
                Ok(u64_of(mapping.as_ptr().wrapping_add(offset).expose_provenance()))
            }
            Self::Device(mapping, offset) => Ok(mapping.gpu_addr().raw() + u64_of(offset)),
            Self::Host(memory, offset) => Ok(memory.peer_address()? + u64_of(offset)),
        }
    }

    pub(super) fn is_device(&self) -> bool {
        matches!(self, Self::Device(..))
    }

    pub(super) fn has(&self, bytes: usize) -> bool {
        let (len, offset) = match *self {
            Self::Device(mapping, offset) => (mapping.len(), offset),
            Self::Host(memory, offset) => (memory.len(), offset),
        };
        offset % LINE == 0 && offset.checked_add(bytes).is_some_and(|end| end <= len)
    }

    /// Zeroes what the last exchange left, so that nothing there looks like a message.
    pub(super) fn clear(&self, bytes: usize) -> Result<(), Error> {
        let zeros = vec![0; bytes];
        match *self {
            Self::Device(mapping, offset) => {
                mapping.write(offset, &zeros)?;
                mapping.flush()
            }
            Self::Host(memory, offset) => {
                // SAFETY: `has` was checked; nobody answers yet.
                unsafe { store_parts(memory.base().wrapping_add(offset), &zeros) };
                Ok(())
            }
        }
    }

    /// Stores without a fence, in host memory whole parts in order.
    #[inline(always)]
    pub(super) fn post(&self, at: usize, lines: &[u8]) -> Result<(), Error> {
        match *self {
            Self::Device(mapping, offset) => mapping.write_posted(offset + at, lines),
            Self::Host(memory, offset) => {
                // SAFETY: `has` was checked for all that is ever posted.
                unsafe { store_parts(memory.base().wrapping_add(offset + at), lines) };
                Ok(())
            }
        }
    }

    /// Stores a number, after all that was posted before, and sees it off.
    #[inline(always)]
    pub(super) fn store(&self, at: usize, number: u32) -> Result<(), Error> {
        match *self {
            Self::Device(mapping, offset) => mapping.store_u32(offset + at, number),
            Self::Host(memory, offset) => {
                // SAFETY: `has` was checked; a multiple of 4.
                let word = unsafe { AtomicU32::from_ptr(memory.base().wrapping_add(offset + at).cast()) };
                word.store(number, Ordering::Release);
                Ok(())
            }
        }
    }

    #[inline(always)]
    pub(super) fn load(&self, at: usize) -> Result<u32, Error> {
        match *self {
            Self::Device(mapping, offset) => mapping.load_u32(offset + at),
            Self::Host(memory, offset) => {
                // SAFETY: `has` was checked; a multiple of 4.
                let word = unsafe { AtomicU32::from_ptr(memory.base().wrapping_add(offset + at).cast()) };
                Ok(word.load(Ordering::Acquire))
            }
        }
    }
}

/// Ordinary 16-byte stores in ascending order: a part is whole for whoever reads 16 bytes, its last word not older than
/// the rest.
///
/// # Safety
///
/// `to` is a multiple of 16 and valid for a store of `from.len()` bytes, a multiple of 16.
#[inline(always)]
unsafe fn store_parts(to: *mut u8, from: &[u8]) {
    for (n, part) in from.chunks_exact(PART).enumerate() {
        // SAFETY: 16 readable bytes, and 16 aligned writable ones by the caller's duty; no flag and no stack is touched.
        unsafe {
            asm!(
                "movups {part}, [{from}]",
                "movaps [{to}], {part}",
                part = out(xmm_reg) _,
                from = in(reg) part.as_ptr(),
                to = in(reg) to.wrapping_add(n * PART),
                options(nostack, preserves_flags),
            );
        }
    }
}
