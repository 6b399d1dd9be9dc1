//! Opening a backend, and what hangs on it.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::emulated::Emulated;
use crate::backend::{Allocator, Backend, BackendKind, RmLevel, Semantics};
use crate::buffer::DeviceBuffer;
use crate::builder::{ProbeReport, SessionBuilder};
use crate::copy::{LINE_BYTES, Routine};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{GpuInfo, PciAddress};
use crate::pinned::Pinned;
use crate::policy::{Calibration, Policy, Progress, Routines};
use crate::range::DeviceRange;
use crate::sys::process::Owner;

/// An open backend. Cheap to clone, shared between threads, bound to no GPU.
///
/// Opening creates no CUDA context. One session uses one backend: memory that it cannot map is refused with the reason
/// and the way out, never quietly handed to another.
#[derive(Clone)]
pub struct Session {
    inner: Arc<SessionInner>,
}

pub(crate) struct SessionInner {
    /// Present until closed.
    backend: Option<Box<dyn Backend>>,
    owner: Owner,
    routines: Routines,
    policy: Policy,
    report: ProbeReport,
    allow_cuda_flush: bool,
    /// The first failure that a `Drop` could not return.
    noted: Mutex<Option<Error>>,
}

impl SessionInner {
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        (routines, policy): (Routines, Policy),
        report: ProbeReport,
        allow_cuda_flush: bool,
    ) -> Self {
        Self {
            backend: Some(backend),
            owner: Owner::here(),
            routines,
            policy,
            report,
            allow_cuda_flush,
            noted: Mutex::new(None),
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        self.backend.as_deref().expect("only `close` and `drop` take it, and they end the session")
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    pub(crate) fn routines(&self) -> Routines {
        self.routines
    }

    pub(crate) fn allow_cuda_flush(&self) -> bool {
        self.allow_cuda_flush
    }

    /// Keeps a failure for [`Session::close`].
    pub(crate) fn note(&self, error: &Error) {
        tracing::warn!(%error, "a handle was dropped with an error");
        self.noted.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
    }

    fn shut(&mut self) -> Result<()> {
        let Some(backend) = self.backend.take() else { return Ok(()) };
        if !self.owner.is_here() {
            // The child's copies of the descriptors go with it; the parent's objects are none of its business.
            std::mem::forget(backend);
            return Ok(());
        }
        backend.close()
    }
}

impl Drop for SessionInner {
    fn drop(&mut self) {
        if let Err(error) = self.shut() {
            tracing::warn!(%error, "a session was dropped with an error");
        }
    }
}

impl Session {
    pub(crate) fn new(inner: SessionInner) -> Self {
        Self { inner: Arc::new(inner) }
    }

    /// Opens the best backend there is: `builder().open()`.
    ///
    /// # Errors
    ///
    /// See [`SessionBuilder::open`].
    pub fn open() -> Result<Self> {
        Self::builder().open()
    }

    /// Chooses backend, level or copy routine by hand.
    #[must_use]
    pub fn builder() -> SessionBuilder {
        SessionBuilder::default()
    }

    /// The backend in use.
    #[must_use]
    pub fn backend(&self) -> BackendKind {
        self.inner.backend().kind()
    }

    /// The level of the `rm` backend in force; `None` for other backends.
    #[must_use]
    pub fn rm_level(&self) -> Option<RmLevel> {
        self.inner.backend().rm_level()
    }

    /// The version of the kernel module in use, major and minor; `None` for backends without one.
    #[must_use]
    pub fn module_version(&self) -> Option<(u32, u32)> {
        self.inner.backend().module_version()
    }

    /// Which backends were tried, and why each other one was passed over.
    #[must_use]
    pub fn probe_report(&self) -> &ProbeReport {
        &self.inner.report
    }

    /// What a mapping shows after its memory was freed.
    #[must_use]
    pub fn semantics(&self) -> Semantics {
        self.inner.backend().semantics()
    }

    /// The copy routine that mappings of this session store whole lines with, and all else too unless the
    /// [policy](Self::policy) has several. See [`Mapping::routine`](crate::Mapping::routine).
    #[must_use]
    pub fn routine(&self) -> &'static Routine {
        self.inner.routines.store(LINE_BYTES)
    }

    /// The policy that routines follow where none was named, and what it recommends beyond them.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.inner.policy
    }

    /// Measures routines, parallel copies, the GPU's copy engine and `cuMemcpy` on this CPU, GPU, link and backend, and the
    /// agent where [`Calibration::agent`] asks for it, and makes a policy of it. Nothing calls it by itself, and this
    /// session goes on as it was opened: open another with the policy, or write it to a file for `GDRCOPY_POLICY`. It leaves
    /// the GPU's context current on the calling thread.
    ///
    /// `progress` is called before each cell of the table.
    ///
    /// # Errors
    ///
    /// As [`Session::alloc_as`], [`Session::pin`], [`Pinned::map`] and [`ParallelCopierBuilder::build`]; `InvalidArgument`
    /// where the largest size is less than 64 bytes.
    ///
    /// [`ParallelCopierBuilder::build`]: crate::ParallelCopierBuilder::build
    pub fn calibrate(&self, what: &Calibration, progress: impl FnMut(Progress)) -> Result<Policy> {
        what.run(self, progress)
    }

    /// The emulated GPUs, where the backend is `emulated`: their memory seen from the device's side, and faults.
    #[must_use]
    pub fn emulated(&self) -> Option<&Emulated> {
        self.inner.backend().emulated()
    }

    /// The GPUs this session can reach, in CUDA's order.
    ///
    /// # Errors
    ///
    /// `NoDriver`, `NoDevice`, `WrongProcess`.
    pub fn gpus(&self) -> Result<Vec<GpuInfo>> {
        self.inner.owner.check("list GPUs")?;
        self.inner.backend().gpus()
    }

    /// Allocates device memory on the GPU of the calling thread's CUDA context, or on GPU 0.
    ///
    /// # Errors
    ///
    /// See [`Session::alloc_as`].
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        self.allocate(None, bytes, Allocator::Buffer)
    }

    /// Allocates device memory on the GPU with this CUDA ordinal.
    ///
    /// # Errors
    ///
    /// See [`Session::alloc_as`].
    pub fn alloc_on(&self, ordinal: usize, bytes: usize) -> Result<DeviceBuffer> {
        self.allocate(Some(ordinal), bytes, Allocator::Buffer)
    }

    /// Allocates device memory in a given way, as a program around this library may do it.
    ///
    /// The memory belongs to the GPU's primary context, which is retained while the buffer lives.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for 0 bytes, `NoDevice` for an ordinal that does not exist, `OutOfMemory`, `NoDriver`,
    /// `WrongProcess`.
    pub fn alloc_as(&self, ordinal: usize, bytes: usize, how: Allocator) -> Result<DeviceBuffer> {
        self.allocate(Some(ordinal), bytes, how)
    }

    fn allocate(&self, ordinal: Option<usize>, bytes: usize, how: Allocator) -> Result<DeviceBuffer> {
        self.inner.owner.check("alloc")?;
        if bytes == 0 {
            return Err(Error::new("alloc", ErrorKind::InvalidArgument, "a device buffer of 0 bytes")
                .remedy("ask for at least 1 byte"));
        }
        let allocation = self.inner.backend().alloc(ordinal, bytes, how)?;
        DeviceBuffer::new(allocation, bytes, how, Arc::clone(&self.inner))
    }

    /// Takes hold of device memory, at any address and of any length from 1 byte.
    ///
    /// # Errors
    ///
    /// `UnsupportedMemory` if the backend cannot map this kind of memory, `OutOfBounds` if the range reaches past its
    /// allocation, `Busy`, `UnknownLayout`, `PermissionDenied`, `OutOfMemory`, `WrongProcess`.
    pub fn pin<'a>(&self, range: impl Into<DeviceRange<'a>>) -> Result<Pinned<'a>> {
        let range = range.into();
        self.inner.owner.check("pin")?;
        let started = std::time::Instant::now();
        let pin = self.inner.backend().pin(range.span())?;
        Ok(Pinned::new(Arc::clone(&self.inner), pin, &range, started.elapsed()))
    }

    /// Takes hold of the whole 64 KiB GPU pages around `len` bytes at `addr`: for the C interface, whose clients count in
    /// such pages and round up to them on their own. The pin starts at the page's first byte and may show neighbours of
    /// the allocation in the same memory object, though never another process's memory.
    ///
    /// # Errors
    ///
    /// As [`Session::pin`]; `OutOfBounds` if the pages are not inside the memory object.
    ///
    /// # Safety
    ///
    /// As [`DeviceRange::from_raw`], for the allocations in all of these pages.
    #[doc(hidden)]
    #[allow(unsafe_code, reason = "the caller vouches for the allocation; nothing is accessed here")]
    pub unsafe fn pin_pages(
        &self,
        addr: impl Into<crate::GpuAddr>,
        len: usize,
        tokens: crate::backend::P2pTokens,
    ) -> Result<Pinned<'static>> {
        self.inner.owner.check("pin")?;
        let asked = crate::range::Span::new("pin", addr.into(), len)?;
        let pages = asked.gpu_pages("pin")?;
        let started = std::time::Instant::now();
        let pin = self.inner.backend().pin_pages(asked, tokens)?;
        Ok(Pinned::new(Arc::clone(&self.inner), pin, &DeviceRange::borrowed(pages), started.elapsed()))
    }

    /// Takes hold of memory that another process exported with [`DeviceBuffer::export`] and handed over as a file
    /// descriptor. This process needs no CUDA of its own.
    ///
    /// `gpu` is the GPU the memory is on; `bytes` from its start are pinned. The memory stays allocated while the pin
    /// lives, whatever the exporter does.
    ///
    /// # Errors
    ///
    /// `UnsupportedFeature` on other backends than `rm`, `InvalidArgument` for 0 bytes, `NoDevice`, `OutOfBounds` where
    /// the memory is shorter, `PermissionDenied`, `WrongProcess`.
    pub fn pin_export(&self, fd: BorrowedFd<'_>, gpu: PciAddress, bytes: usize) -> Result<Pinned<'static>> {
        self.inner.owner.check("pin")?;
        // The device address is the exporter's business; the offset in the object stands in for it, one page up so
        // that it is not null and keeps its alignment.
        let span = crate::range::Span::new("pin", crate::GpuAddr::new(crate::pinned::EXPORT_BASE), bytes)?;
        let started = std::time::Instant::now();
        let pin = self.inner.backend().pin_export(fd, gpu, bytes)?;
        Ok(Pinned::new(Arc::clone(&self.inner), pin, &DeviceRange::borrowed(span), started.elapsed()))
    }

    /// Closes the session and reports what went wrong, now or in a `Drop` before.
    ///
    /// # Errors
    ///
    /// `Mapped` if clones, pins, mappings or buffers are still alive: the session comes back inside the error.
    /// `WrongProcess`, or the first failure of the teardown, which was carried through all the same.
    pub fn close(self) -> Result<(), CloseError> {
        // In a forked child nothing is closed, whatever else is alive.
        self.inner.owner.check("close").map_err(|error| CloseError { session: None, error })?;
        match Arc::try_unwrap(self.inner) {
            Ok(mut inner) => {
                let shut = inner.shut();
                let noted = inner.noted.lock().unwrap_or_else(PoisonError::into_inner).take();
                match noted.map_or(Ok(()), Err).and(shut) {
                    Ok(()) => Ok(()),
                    Err(error) => Err(CloseError { session: None, error }),
                }
            }
            Err(inner) => Err(CloseError {
                error: Error::new("close", ErrorKind::Mapped, "the session is still in use")
                    .remedy("drop its mappings, pins, buffers and clones first"),
                session: Some(Self { inner }),
            }),
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("backend", &self.backend())
            .field("rm_level", &self.rm_level())
            .field("routine", &self.routine().name())
            .finish_non_exhaustive()
    }
}

/// A session that did not close cleanly.
#[derive(Debug)]
pub struct CloseError {
    session: Option<Session>,
    error: Error,
}

impl CloseError {
    /// The session, if it is still in use and so still open.
    #[must_use]
    pub fn into_session(self) -> Option<Session> {
        self.session
    }

    /// What went wrong.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for CloseError {}

impl From<CloseError> for Error {
    fn from(error: CloseError) -> Self {
        error.error
    }
}
