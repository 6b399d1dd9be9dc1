//! Device memory that the library allocates and owns.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::backend::{Allocation, Allocator};
use crate::error::{Error, ErrorKind, Result};
use crate::range::{GpuAddr, Span};
use crate::session::SessionInner;
use crate::sys::process::Owner;

/// Device memory from [`Session::alloc`](crate::Session::alloc), freed on drop.
///
/// It starts on a 64-byte line and, made by the library's own allocator, owns its whole memory object: a mapping never
/// shares a page with somebody else's data, and every backend can pin it. (Backend `vulkan` puts buffers of less than
/// 64 KiB into shared objects; [`Allocator::CuMemCreate`] makes a whole one there too.) It lends itself to kernels through
/// [`DeviceBuffer::addr`], or (feature `cuda`) [`DeviceBuffer::as_cuda`].
///
/// Freeing GPU memory synchronises with running kernels (CUDA driver API, `cuMemFree`), and so may dropping this.
pub struct DeviceBuffer {
    /// Present until freed.
    allocation: Option<Box<dyn Allocation>>,
    span: Span,
    how: Allocator,
    owner: Owner,
    session: Arc<SessionInner>,
}

impl DeviceBuffer {
    pub(crate) fn new(
        allocation: Box<dyn Allocation>,
        bytes: usize,
        how: Allocator,
        session: Arc<SessionInner>,
    ) -> Result<Self> {
        let span = Span::new("alloc", allocation.addr(), bytes)?;
        Ok(Self { allocation: Some(allocation), span, how, owner: Owner::here(), session })
    }

    fn allocation(&self) -> &dyn Allocation {
        self.allocation.as_deref().expect("only `free` and `drop` take it, and they end the buffer")
    }

    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// The device address of the first byte.
    #[must_use]
    pub fn addr(&self) -> GpuAddr {
        self.span.addr
    }

    /// The length in bytes, as asked for; never 0.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// The GPU it is on: its CUDA ordinal in this process, or the emulated GPU's number.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.allocation().ordinal()
    }

    /// How it was allocated.
    #[must_use]
    pub fn allocator(&self) -> Allocator {
        self.how
    }

    /// Whether no other allocation can share its memory object.
    #[must_use]
    pub fn owns_object(&self) -> bool {
        self.allocation().owns_object()
    }

    fn check(&self, op: &'static str, offset: usize, len: usize) -> Result<()> {
        self.owner.check(op)?;
        if offset.checked_add(len).is_some_and(|end| end <= self.span.len) {
            return Ok(());
        }
        Err(Error::new(
            op,
            ErrorKind::OutOfBounds,
            format!("{len} bytes at offset {offset} reach past the end of a buffer of {} bytes", self.span.len),
        ))
    }

    /// Copies `from` to byte `offset` through the GPU's own copy engine; the bytes are in device memory on return.
    ///
    /// For set-up and for checking: it takes microseconds and calls CUDA.
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`, or what CUDA reports.
    pub fn upload(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check("upload", offset, from.len())?;
        self.allocation().upload(offset, from)
    }

    /// Copies from byte `offset` to `to` through the GPU's own copy engine.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::upload`].
    pub fn download(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.check("download", offset, to.len())?;
        self.allocation().download(offset, to)
    }

    /// Makes the CUDA context that the memory belongs to current on the calling thread, and leaves it so.
    ///
    /// # Errors
    ///
    /// `WrongProcess`, or what CUDA reports.
    pub fn make_current(&self) -> Result<()> {
        self.owner.check("make current")?;
        self.allocation().make_current()
    }

    /// A file descriptor with which another process of any user it is handed to can pin this memory
    /// ([`Session::pin_export`](crate::Session::pin_export)), without CUDA of its own.
    ///
    /// # Errors
    ///
    /// `UnsupportedFeature` where the memory cannot be exported: `cuMemAlloc` memory, emulated memory.
    pub fn export(&self) -> Result<OwnedFd> {
        self.owner.check("export")?;
        self.allocation().export()
    }

    /// Frees the memory and reports failure, which dropping cannot.
    ///
    /// # Errors
    ///
    /// `WrongProcess`, or what CUDA reports.
    pub fn free(mut self) -> Result<()> {
        self.owner.check("free")?;
        self.allocation.take().map_or(Ok(()), |mut allocation| allocation.free())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let Some(mut allocation) = self.allocation.take() else { return };
        if !self.owner.is_here() {
            // A forked child has no business with the parent's device memory.
            std::mem::forget(allocation);
        } else if let Err(error) = allocation.free() {
            self.session.note(&error);
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("addr", &self.span.addr)
            .field("len", &self.span.len)
            .field("allocator", &self.how)
            .finish_non_exhaustive()
    }
}
