//! One error type for the whole library.
//!
//! An [`Error`] says what was being done ([`Error::op`]), what kind of failure it was ([`Error::kind`]), the cause
//! and the way out in words (its `Display`, one line), and what the system said ([`std::error::Error::source`]).

use std::borrow::Cow;
use std::fmt;

/// Result of every fallible call of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, as a value to match on.
///
/// [`ErrorKind::errno`] gives the value the C interface returns for it.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// An argument has no meaning: size 0, a range that wraps, an unknown name.
    InvalidArgument,
    /// An offset or length reaches past the end of the mapping, buffer or allocation.
    OutOfBounds,
    /// The memory behind a pin is no longer the memory that was pinned.
    Stale,
    /// The pin already has a live mapping.
    AlreadyMapped,
    /// The object still has a live mapping, pin or other handle.
    Mapped,
    /// The device did not finish an operation in time; trying again later may work.
    Busy,
    /// The handle was made by another process (the caller is a forked child).
    WrongProcess,
    /// The operating system or the driver refused access.
    PermissionDenied,
    /// The GPU driver or its user-space library is not there or too old.
    NoDriver,
    /// There is no such GPU.
    NoDevice,
    /// The backend cannot map this kind of memory.
    UnsupportedMemory(MemoryKind),
    /// The backend, GPU, CPU or build lacks this feature.
    UnsupportedFeature(Feature),
    /// The GPU's BAR1 aperture has no room for the mapping.
    Bar1Exhausted,
    /// Host or GPU memory is used up.
    OutOfMemory,
    /// The driver describes its memory in a way that this library could not prove it understands.
    UnknownLayout,
    /// Any other failure of the operating system; the value is `errno`.
    Io(i32),
}

/// Kinds of memory that a backend may refuse.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// `cudaMallocManaged` memory: it migrates.
    Managed,
    /// Memory from a stream-ordered pool (`cudaMallocAsync`; every cudarc slice).
    Pool,
    /// Host memory, registered or not.
    Host,
    /// An address that belongs to no live allocation: never allocated, or freed.
    Unallocated,
    /// Memory that another process, or another session's emulated GPU, allocated.
    Foreign,
    /// `cudaMalloc` memory on a backend level that takes only exportable memory.
    CudaMalloc,
    /// `cuMemCreate` memory without a POSIX file descriptor handle type.
    NotExportable,
}

/// Features that a backend, GPU, CPU or build may lack.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Feature {
    /// Multi-Process Service: the memory belongs to the MPS server.
    Mps,
    /// Multi-Instance GPU partitions.
    Mig,
    /// A BAR1 that shows the whole of the GPU's memory (Resizable BAR).
    LargeBar,
    /// Confidential computing: BAR1 does not show GPU memory.
    ConfidentialComputing,
    /// A copy routine whose instructions this CPU or operating system lacks.
    CopyRoutine,
    /// Data-then-flag publication on a GPU that does not order such writes.
    Publish,
    /// A mapping type other than the backend's own.
    MappingType,
    /// An operation this backend does not have.
    Operation,
}

impl ErrorKind {
    /// The `errno` value that stands for this kind in C.
    ///
    /// ```
    /// assert_eq!(gdrcopy::ErrorKind::AlreadyMapped.errno(), libc::EAGAIN);
    /// ```
    #[must_use]
    pub const fn errno(self) -> i32 {
        match self {
            Self::InvalidArgument | Self::OutOfBounds | Self::Stale => libc::EINVAL,
            Self::AlreadyMapped => libc::EAGAIN,
            Self::Mapped | Self::Busy => libc::EBUSY,
            Self::WrongProcess | Self::PermissionDenied => libc::EACCES,
            Self::NoDriver | Self::NoDevice => libc::ENODEV,
            // What clients of the C interface probe with and expect as "bad argument".
            Self::UnsupportedMemory(MemoryKind::Host | MemoryKind::Unallocated) => libc::EINVAL,
            Self::UnsupportedMemory(_) | Self::UnsupportedFeature(_) => libc::EOPNOTSUPP,
            Self::Bar1Exhausted | Self::OutOfMemory => libc::ENOMEM,
            Self::UnknownLayout => libc::EPROTO,
            Self::Io(errno) => errno,
        }
    }
}

/// What the system said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "what only CUDA and its driver say"))]
enum Source {
    Errno(i32),
    Cuda(i32),
    Rm(u32),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Errno(n) => write!(f, "{}", std::io::Error::from_raw_os_error(n)),
            Self::Cuda(n) => write!(f, "CUDA driver error {n}"),
            Self::Rm(n) => write!(f, "resource manager status {n:#x}"),
        }
    }
}

impl std::error::Error for Source {}

/// A failure: operation, kind, cause and remedy in one line, and the system's own word for it.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    op: &'static str,
    kind: ErrorKind,
    cause: Cow<'static, str>,
    remedy: Option<Cow<'static, str>>,
    source: Option<Source>,
}

impl Error {
    #[cold]
    pub(crate) fn new(op: &'static str, kind: ErrorKind, cause: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Inner { op, kind, cause: cause.into(), remedy: None, source: None }))
    }

    /// Adds the way out.
    #[must_use]
    pub(crate) fn remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    #[must_use]
    pub(crate) fn errno(mut self, errno: i32) -> Self {
        self.0.source = Some(Source::Errno(errno));
        self
    }

    #[cfg(feature = "cuda")]
    #[must_use]
    pub(crate) fn cuda(mut self, code: i32) -> Self {
        self.0.source = Some(Source::Cuda(code));
        self
    }

    #[cfg(feature = "cuda")]
    #[must_use]
    pub(crate) fn rm(mut self, status: u32) -> Self {
        self.0.source = Some(Source::Rm(status));
        self
    }

    /// From an `errno`, with the kind that fits it.
    #[cold]
    pub(crate) fn from_errno(op: &'static str, errno: i32, cause: impl Into<Cow<'static, str>>) -> Self {
        let kind = match errno {
            libc::ENOMEM => ErrorKind::OutOfMemory,
            libc::EACCES | libc::EPERM => ErrorKind::PermissionDenied,
            libc::ENODEV | libc::ENXIO => ErrorKind::NoDevice,
            n => ErrorKind::Io(n),
        };
        Self::new(op, kind, cause).errno(errno)
    }

    /// The operation that failed, as a verb of this library: `"pin"`, `"map"`, `"write"`.
    #[must_use]
    pub fn op(&self) -> &'static str {
        self.0.op
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The cause in words, without operation, remedy or system error.
    #[must_use]
    pub fn cause(&self) -> &str {
        &self.0.cause
    }

    /// The way out in words, where there is one.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.op, self.0.cause)?;
        if let Some(source) = &self.0.source {
            write!(f, " ({source})")?;
        }
        if let Some(remedy) = &self.0.remedy {
            write!(f, "; {remedy}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.source {
            Some(source) => Some(source),
            None => None,
        }
    }
}

/// An error and what it came from, in one line: loading errors keep the system's word to themselves.
#[cfg(feature = "cuda")]
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let said = source.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_of_every_kind() {
        let table = [
            (ErrorKind::InvalidArgument, libc::EINVAL),
            (ErrorKind::OutOfBounds, libc::EINVAL),
            (ErrorKind::Stale, libc::EINVAL),
            (ErrorKind::AlreadyMapped, libc::EAGAIN),
            (ErrorKind::Mapped, libc::EBUSY),
            (ErrorKind::Busy, libc::EBUSY),
            (ErrorKind::WrongProcess, libc::EACCES),
            (ErrorKind::PermissionDenied, libc::EACCES),
            (ErrorKind::NoDriver, libc::ENODEV),
            (ErrorKind::NoDevice, libc::ENODEV),
            (ErrorKind::UnsupportedMemory(MemoryKind::Managed), libc::EOPNOTSUPP),
            (ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), libc::EINVAL),
            (ErrorKind::UnsupportedFeature(Feature::Mps), libc::EOPNOTSUPP),
            (ErrorKind::Bar1Exhausted, libc::ENOMEM),
            (ErrorKind::OutOfMemory, libc::ENOMEM),
            (ErrorKind::UnknownLayout, libc::EPROTO),
            (ErrorKind::Io(libc::EIO), libc::EIO),
        ];
        for (kind, errno) in table {
            assert_eq!(kind.errno(), errno, "{kind:?}");
        }
    }

    #[test]
    fn one_line_with_cause_source_and_remedy() {
        let error = Error::from_errno("open", libc::EACCES, "/dev/nvidiactl cannot be opened").remedy("ask for access");
        assert_eq!(
            error.to_string(),
            "open: /dev/nvidiactl cannot be opened (Permission denied (os error 13)); ask for access"
        );
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(std::error::Error::source(&error).is_some());
    }
}
