//! The candidate that is no CPU copy: a synchronous `cuMemcpy` with page-locked memory.

#![allow(unsafe_code, reason = "plain cuMemcpy on device addresses")]

use super::calibrate::Arm;
use super::{CopyDirection, CopyMethod};
use crate::backend::BackendKind;
use crate::buffer::DeviceBuffer;
use crate::cuda::{self, PinnedHost};
use crate::error::Result;
use crate::session::Session;

pub(super) struct CudaMemcpy<'a> {
    buffer: &'a DeviceBuffer,
    host: PinnedHost,
}

impl<'a> CudaMemcpy<'a> {
    /// `None` where the memory is not CUDA's. Makes the buffer's context current on this thread.
    pub(super) fn new(session: &Session, buffer: &'a DeviceBuffer) -> Result<Option<Self>> {
        if session.backend() == BackendKind::Emulated {
            return Ok(None);
        }
        buffer.make_current()?;
        let host = PinnedHost::new(buffer.ordinal(), buffer.len())?;
        Ok(Some(Self { buffer, host }))
    }
}

impl Arm for &mut CudaMemcpy<'_> {
    fn method(&self) -> CopyMethod {
        CopyMethod::CudaMemcpy
    }

    fn copy(&mut self, direction: CopyDirection, host: &mut [u8]) -> Result<()> {
        let device = self.buffer.addr();
        // Of its own host memory, for that is page-locked; as long as the buffer, which no copy is longer than.
        match direction {
            CopyDirection::HostToDevice => {
                // SAFETY: the buffer lives as long as `self` and is as long as the host memory.
                unsafe { cuda::memcpy_to_device(device, &self.host.as_slice()[..host.len()]) }
            }
            CopyDirection::DeviceToHost => {
                // SAFETY: as above.
                unsafe { cuda::memcpy_to_host(&mut self.host.as_mut_slice()[..host.len()], device) }
            }
        }
    }
}
