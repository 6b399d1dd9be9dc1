//! The candidates with page-locked memory: a synchronous `cuMemcpy`, and what an automatic copier calls.

#![allow(unsafe_code, reason = "plain cuMemcpy on device addresses")]

use super::CopyDirection;
use crate::backend::BackendKind;
use crate::buffer::DeviceBuffer;
use crate::cuda::{self, PinnedHost};
use crate::error::Result;
use crate::session::Session;

/// Device memory, and page-locked memory of the same length.
pub(super) struct PageLocked<'a> {
    buffer: &'a DeviceBuffer,
    host: PinnedHost,
}

impl<'a> PageLocked<'a> {
    /// `None` where the memory is not CUDA's. Makes the buffer's context current on this thread.
    pub(super) fn new(session: &Session, buffer: &'a DeviceBuffer) -> Result<Option<Self>> {
        if session.backend() == BackendKind::Emulated {
            return Ok(None);
        }
        buffer.make_current()?;
        let host = PinnedHost::new(buffer.ordinal(), buffer.len())?;
        Ok(Some(Self { buffer, host }))
    }

    /// The first `bytes` bytes of the memory.
    pub(super) fn host(&mut self, bytes: usize) -> &mut [u8] {
        &mut self.host.as_mut_slice()[..bytes]
    }

    /// Copies so many bytes with `cuMemcpy` itself.
    pub(super) fn cuda_memcpy(&mut self, direction: CopyDirection, bytes: usize) -> Result<()> {
        let device = self.buffer.addr();
        let host = self.host(bytes);
        match direction {
            // SAFETY: the buffer lives as long as `self` and is as long as the host memory, which slicing checked.
            CopyDirection::HostToDevice => unsafe { cuda::memcpy_to_device(device, host) },
            // SAFETY: as above.
            CopyDirection::DeviceToHost => unsafe { cuda::memcpy_to_host(host, device) },
        }
    }
}
