//! Device memory that is held for mapping.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::backend::{MappingType, Pin, PinFacts};
use crate::buffer::DeviceBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;
use crate::range::{DeviceRange, GpuAddr, Span};
use crate::session::SessionInner;

/// Stands for the start of imported memory, whose device address this process does not know. Page-aligned, not null.
pub(crate) const EXPORT_BASE: u64 = 1 << 21;

/// A pin: the device memory of a [`DeviceRange`], held so that it can be mapped.
///
/// Dropping it while its [`Mapping`] lives is fine: the memory stays pinned until the mapping is gone.
pub struct Pinned<'a> {
    core: Arc<PinCore>,
    span: Span,
    range: PhantomData<&'a ()>,
}

/// What a pin and its mapping share.
pub(crate) struct PinCore {
    /// Released in the opener's process only.
    pin: ManuallyDrop<Box<dyn Pin>>,
    released: AtomicBool,
    mapped: AtomicBool,
    pin_time: Duration,
    pub(crate) session: Arc<SessionInner>,
    /// Keeps a shared buffer allocated. Declared after `pin`, which goes first.
    _buffer: Option<Arc<DeviceBuffer>>,
}

impl PinCore {
    pub(crate) fn facts(&self) -> PinFacts {
        self.pin.facts()
    }

    pub(crate) fn cuda_flush(&self) -> Result<()> {
        self.pin.cuda_flush()
    }

    pub(crate) fn pin_time(&self) -> Duration {
        self.pin_time
    }

    /// Called by a mapping that is gone.
    pub(crate) fn unmapped(&self) {
        self.mapped.store(false, Ordering::Release);
    }

    fn release(&mut self) -> Result<()> {
        if self.released.swap(true, Ordering::AcqRel) { Ok(()) } else { self.pin.release() }
    }
}

impl Drop for PinCore {
    #[allow(unsafe_code, reason = "the pin must not be dropped at all in a forked child")]
    fn drop(&mut self) {
        if !self.session.owner().is_here() {
            return;
        }
        if let Err(error) = self.release() {
            self.session.note(&error);
        }
        // SAFETY: this is the value's own drop; the field is not used again.
        unsafe { ManuallyDrop::drop(&mut self.pin) };
    }
}

impl<'a> Pinned<'a> {
    pub(crate) fn new(
        session: Arc<SessionInner>,
        pin: Box<dyn Pin>,
        range: &DeviceRange<'a>,
        pin_time: Duration,
    ) -> Self {
        let core = PinCore {
            pin: ManuallyDrop::new(pin),
            released: AtomicBool::new(false),
            mapped: AtomicBool::new(false),
            pin_time,
            session,
            _buffer: range.keeper(),
        };
        Self { core: Arc::new(core), span: range.span(), range: PhantomData }
    }

    /// Makes the whole range appear in this process, starting at exactly its first byte.
    ///
    /// # Errors
    ///
    /// `AlreadyMapped` while an earlier mapping lives, `Stale` if the memory was freed or replaced since it was pinned,
    /// `Bar1Exhausted`, `OutOfMemory`, `WrongProcess`.
    pub fn map(&self) -> Result<Mapping<'a>> {
        self.map_type(None)
    }

    /// [`Pinned::map`], cached by the CPU in this way and no other.
    ///
    /// # Errors
    ///
    /// `UnsupportedFeature(MappingType)` where the backend or the memory has another type only; otherwise as
    /// [`Pinned::map`].
    pub fn map_as(&self, want: MappingType) -> Result<Mapping<'a>> {
        self.map_type(Some(want))
    }

    fn map_type(&self, want: Option<MappingType>) -> Result<Mapping<'a>> {
        self.core.session.owner().check("map")?;
        if self.core.mapped.swap(true, Ordering::AcqRel) {
            return Err(Error::new("map", ErrorKind::AlreadyMapped, "the pin already has a live mapping")
                .remedy("use that mapping from every thread, or drop it first"));
        }
        let started = Instant::now();
        match self.core.pin.map(want) {
            Ok(view) => Ok(Mapping::new(Arc::clone(&self.core), view, self.span, started.elapsed())),
            Err(error) => {
                self.core.unmapped();
                Err(error)
            }
        }
    }

    /// Lets go of the memory and reports failure, which dropping cannot.
    ///
    /// # Errors
    ///
    /// `Mapped` while a mapping lives: the pin comes back inside the error. `WrongProcess`, or what the system reports,
    /// without the pin.
    pub fn unpin(self) -> Result<(), UnpinError<'a>> {
        let span = self.span;
        if let Err(error) = self.core.session.owner().check("unpin") {
            return Err(UnpinError { pinned: None, error });
        }
        match Arc::try_unwrap(self.core) {
            Ok(mut core) => core.release().map_err(|error| UnpinError { pinned: None, error }),
            Err(core) => Err(UnpinError {
                error: Error::new("unpin", ErrorKind::Mapped, "the pin still has a live mapping")
                    .remedy("unmap it first"),
                pinned: Some(Self { core, span, range: PhantomData }),
            }),
        }
    }

    /// Whether the memory was freed and so taken away from this pin, where the backend is told of it: mappings of it
    /// raise SIGBUS then. Always false where pins keep memory alive ([`AfterFree::Persistent`](crate::AfterFree)).
    ///
    /// # Errors
    ///
    /// `WrongProcess`, or what the system reports.
    pub fn is_revoked(&self) -> Result<bool> {
        self.core.session.owner().check("query")?;
        self.core.pin.is_revoked()
    }

    /// The device address of the first byte.
    #[must_use]
    pub fn addr(&self) -> GpuAddr {
        self.span.addr
    }

    /// The length in bytes; never 0.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a pin is never empty")]
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// Whether a mapping of this pin is alive.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.core.mapped.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Pinned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned")
            .field("addr", &self.span.addr)
            .field("len", &self.span.len)
            .field("mapped", &self.is_mapped())
            .finish_non_exhaustive()
    }
}

/// A pin that could not be let go.
#[derive(Debug)]
pub struct UnpinError<'a> {
    pinned: Option<Pinned<'a>>,
    error: Error,
}

impl<'a> UnpinError<'a> {
    /// The pin, if it is still good.
    #[must_use]
    pub fn into_pinned(self) -> Option<Pinned<'a>> {
        self.pinned
    }

    /// What went wrong.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }
}

impl fmt::Display for UnpinError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for UnpinError<'_> {}

impl From<UnpinError<'_>> for Error {
    fn from(error: UnpinError<'_>) -> Self {
        error.error
    }
}
