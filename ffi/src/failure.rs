//! What a call returns when it fails, and the thread's memory of it.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gdrcopy::channel::ChannelError;
use gdrcopy::{Error, ErrorKind};

/// `gdrx_error_kind_t`: what a program can act on. The values are part of the ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum Kind {
    /// No call of this thread has failed.
    None = 0,
    /// An argument has no meaning.
    InvalidArgument = 1,
    /// A range reaches past its end.
    OutOfBounds = 2,
    /// A handle was never made, or was given up.
    InvalidHandle = 3,
    /// The memory behind the pin was freed or replaced.
    Stale = 4,
    /// The pin is mapped already.
    AlreadyMapped = 5,
    /// The pin is not mapped.
    NotMapped = 6,
    /// Still in use, or not finished in time.
    Busy = 7,
    /// The handle belongs to another process.
    WrongProcess = 8,
    /// The system or the driver refused access.
    PermissionDenied = 9,
    /// There is no driver.
    NoDriver = 10,
    /// There is no such GPU.
    NoDevice = 11,
    /// This kind of memory cannot be mapped.
    UnsupportedMemory = 12,
    /// This backend, GPU, CPU or build lacks the feature.
    UnsupportedFeature = 13,
    /// BAR1 is full.
    Bar1Exhausted = 14,
    /// Host or GPU memory is used up.
    OutOfMemory = 15,
    /// The driver is not understood.
    UnknownLayout = 16,
    /// Any other error of the system.
    System = 17,
    /// A bug in this library.
    Internal = 18,
    /// Nothing could be sent or received now.
    WouldBlock = 19,
    /// The timeout has passed.
    TimedOut = 20,
    /// The kernel at the other end has ended.
    KernelGone = 21,
}

impl From<ErrorKind> for Kind {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => Self::InvalidArgument,
            ErrorKind::OutOfBounds => Self::OutOfBounds,
            ErrorKind::Stale => Self::Stale,
            ErrorKind::AlreadyMapped => Self::AlreadyMapped,
            ErrorKind::Mapped | ErrorKind::Busy => Self::Busy,
            ErrorKind::WrongProcess => Self::WrongProcess,
            ErrorKind::PermissionDenied => Self::PermissionDenied,
            ErrorKind::NoDriver => Self::NoDriver,
            ErrorKind::NoDevice => Self::NoDevice,
            ErrorKind::UnsupportedMemory(_) => Self::UnsupportedMemory,
            ErrorKind::UnsupportedFeature(_) => Self::UnsupportedFeature,
            ErrorKind::Bar1Exhausted => Self::Bar1Exhausted,
            ErrorKind::OutOfMemory => Self::OutOfMemory,
            ErrorKind::UnknownLayout => Self::UnknownLayout,
            _ => Self::System,
        }
    }
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure(Repr);

#[derive(Debug)]
enum Repr {
    Told(Box<Inner>),
    /// What happens in the course of things, many times a microsecond: it costs neither an allocation nor a message.
    Usual(&'static Usual),
}

#[derive(Debug)]
struct Inner {
    errno: c_int,
    kind: Kind,
    text: String,
}

#[derive(Debug)]
struct Usual {
    errno: c_int,
    kind: Kind,
    text: &'static str,
}

static FULL: Usual = Usual {
    errno: libc::EAGAIN,
    kind: Kind::WouldBlock,
    text: "the ring to the GPU has no room now; wait for the kernel, or make it larger",
};
static EMPTY: Usual =
    Usual { errno: libc::EAGAIN, kind: Kind::WouldBlock, text: "no whole message from the kernel is there now" };
static TIMED_OUT: Usual =
    Usual { errno: libc::ETIMEDOUT, kind: Kind::TimedOut, text: "the kernel did not act in time; is it running?" };
static KERNEL_GONE: Usual = Usual {
    errno: libc::EPIPE,
    kind: Kind::KernelGone,
    text: "the kernel has ended; destroy this and launch it on a new one",
};

impl Failure {
    #[cold]
    pub(crate) fn new(errno: c_int, kind: Kind, text: impl Into<String>) -> Self {
        Self(Repr::Told(Box::new(Inner { errno, kind, text: text.into() })))
    }

    pub(crate) fn kind(&self) -> Kind {
        match &self.0 {
            Repr::Told(inner) => inner.kind,
            Repr::Usual(usual) => usual.kind,
        }
    }

    /// What a request of an agent's failed of. Its deadline is told apart from another thread's call, which is `EBUSY`.
    #[cold]
    pub(crate) fn of_agent(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Busy => Self::new(libc::ETIMEDOUT, Kind::TimedOut, error.to_string()),
            _ => error.into(),
        }
    }

    /// There is no room to send.
    pub(crate) fn full() -> Self {
        Self(Repr::Usual(&FULL))
    }

    /// There is nothing to receive.
    pub(crate) fn empty() -> Self {
        Self(Repr::Usual(&EMPTY))
    }

    #[cold]
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, Kind::InvalidArgument, text)
    }

    #[cold]
    pub(crate) fn unknown_handle() -> Self {
        Self::new(libc::EINVAL, Kind::InvalidHandle, "the handle was never made, or was given up")
    }

    #[cold]
    pub(crate) fn wrong_process() -> Self {
        let text = "the handle was made by another process; call gdr_open in this one";
        Self::new(libc::EACCES, Kind::WrongProcess, text)
    }

    #[cold]
    pub(crate) fn not_mapped() -> Self {
        Self::new(libc::EINVAL, Kind::NotMapped, "the pin is not mapped")
    }

    /// Remembers it for `gdrx_last_error` and gives the number to return, which is positive.
    #[cold]
    fn remember(self, call: &'static str) -> c_int {
        let (errno, kind, text) = match self.0 {
            Repr::Told(inner) => {
                let Inner { errno, kind, text } = *inner;
                tracing::error!(call, errno, "{text}");
                (errno, kind, Text::Whole(c_text(call, &text)))
            }
            Repr::Usual(Usual { errno, kind, text }) => (*errno, *kind, Text::Parts(call, text)),
        };
        // A thread that is ending remembers nothing.
        let _ = LAST.try_with(|last| {
            if let Ok(mut last) = last.try_borrow_mut() {
                *last = Some((kind, text));
            }
        });
        if errno > 0 { errno } else { libc::EIO }
    }
}

impl From<Error> for Failure {
    #[cold]
    fn from(error: Error) -> Self {
        Self::new(error.kind().errno(), error.kind().into(), error.to_string())
    }
}

impl From<ChannelError> for Failure {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Full => Self(Repr::Usual(&FULL)),
            ChannelError::TimedOut => Self(Repr::Usual(&TIMED_OUT)),
            ChannelError::KernelGone => Self(Repr::Usual(&KERNEL_GONE)),
            ChannelError::Failed(error) => error.into(),
            other => Self::new(libc::EIO, Kind::System, other.to_string()),
        }
    }
}

/// What `gdrx_last_error` gives, put together when it is asked for.
enum Text {
    Whole(CString),
    /// The call, and what happened.
    Parts(&'static str, &'static str),
}

impl Text {
    fn whole(&mut self) -> *const c_char {
        if let Self::Parts(call, text) = *self {
            *self = Self::Whole(c_text(call, text));
        }
        match self {
            Self::Whole(text) => text.as_ptr(),
            Self::Parts(..) => NOTHING.as_ptr(),
        }
    }
}

fn c_text(call: &str, text: &str) -> CString {
    let mut text = format!("{call}: {text}");
    text.retain(|c| c != '\0');
    CString::new(text).unwrap_or_default()
}

const NOTHING: &CStr = c"";

thread_local! {
    static LAST: RefCell<Option<(Kind, Text)>> = const { RefCell::new(None) };
}

/// The kind of this thread's last failure.
pub(crate) fn last_kind() -> Kind {
    LAST.try_with(|last| last.try_borrow().ok().and_then(|last| last.as_ref().map(|(kind, _)| *kind)))
        .ok()
        .flatten()
        .unwrap_or(Kind::None)
}

/// The text of this thread's last failure: valid until its next failure.
pub(crate) fn last_text() -> *const c_char {
    let whole = |last: &RefCell<Option<(Kind, Text)>>| Some(last.try_borrow_mut().ok()?.as_mut()?.1.whole());
    LAST.try_with(whole).ok().flatten().unwrap_or(NOTHING.as_ptr())
}

#[inline]
fn caught<R>(call: &'static str, body: impl FnOnce() -> Result<R, Failure>) -> Result<R, c_int> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(failure)) => Err(failure.remember(call)),
        Err(_) => {
            let text = "a bug in this library was caught; GDRCOPY_ENABLE_LOGGING=1 prints where";
            Err(Failure::new(libc::EIO, Kind::Internal, text).remember(call))
        }
    }
}

/// Runs a call of the C interface: 0, or a positive `errno`. Nothing unwinds out of it.
#[inline]
pub(crate) fn entry(call: &'static str, body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    match caught(call, body) {
        Ok(()) => 0,
        Err(errno) => errno,
    }
}

/// As `entry`, for calls that return something else.
pub(crate) fn entry_or<R>(call: &'static str, otherwise: R, body: impl FnOnce() -> Result<R, Failure>) -> R {
    caught(call, body).unwrap_or(otherwise)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(unsafe_code, reason = "reads the text as C does")]
    fn text() -> String {
        // SAFETY: the text lives until this thread's next failure.
        unsafe { CStr::from_ptr(last_text()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn failures_are_positive_and_remembered_by_thread() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!((last_kind(), text().as_str()), (Kind::None, ""));
                assert_eq!(entry("gdr_map", || Err(Failure::not_mapped())), libc::EINVAL);
                assert_eq!((last_kind(), text().as_str()), (Kind::NotMapped, "gdr_map: the pin is not mapped"));
                assert_eq!(entry("gdr_map", || Ok(())), 0);
                assert_eq!(last_kind(), Kind::NotMapped, "success changes nothing");
                assert_eq!(entry("gdr_x", || Err(Failure::new(0, Kind::System, "a\0b"))), libc::EIO);
                assert_eq!(text(), "gdr_x: ab");
                assert_eq!(entry("gdrx_y", || Err(ChannelError::TimedOut.into())), libc::ETIMEDOUT);
                assert_eq!(last_kind(), Kind::TimedOut);
                let first = last_text();
                assert!(text().starts_with("gdrx_y: the kernel did not act in time"), "{}", text());
                assert_eq!(last_text(), first, "it stays where it is until the next failure");
                assert_eq!(entry("gdrx_z", || Err(Failure::empty())), libc::EAGAIN);
                assert_eq!((last_kind(), text().split(':').next()), (Kind::WouldBlock, Some("gdrx_z")));
            });
        });
        assert_eq!(last_kind(), Kind::None);
    }

    #[test]
    fn a_panic_stops_here() {
        assert_eq!(entry("gdr_map", || panic!("a bug")), libc::EIO);
        assert_eq!(last_kind(), Kind::Internal);
        assert_eq!(entry_or("gdr_open", 7, || panic!("another")), 7);
    }
}
