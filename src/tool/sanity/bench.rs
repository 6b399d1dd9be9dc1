//! What a test works with: sessions as the command line wants them, memory, and the two ways of not passing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::args::Args;
use super::voice;
use crate::backend::emulated::EmulatedConfig;
use crate::backend::{AfterFree, Allocator, BackendKind, RmLevel};
use crate::buffer::DeviceBuffer;
use crate::builder::SessionBuilder;
use crate::error::{Error, ErrorKind, MemoryKind};
use crate::gpu::{Bar1, GpuInfo};
use crate::mapping::Mapping;
use crate::pinned::{Pinned, UnpinError};
use crate::range::DeviceRange;
use crate::session::{CloseError, Session};
use crate::tool::pattern;

/// Why a test did not pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stop {
    /// Something is not as it should be.
    Failed(String),
    /// It does not apply here, and why.
    Waived(String),
}

/// What a step of a test comes to.
pub(super) type Step<T = ()> = Result<T, Stop>;

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Failed(reason) | Self::Waived(reason)) = self;
        f.write_str(reason)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        let line = error.to_string();
        // In exclusive compute mode a second process, or this one while another runs, gets no context.
        if line.contains("CUDA_ERROR_DEVICE_UNAVAILABLE") {
            return Self::Waived(format!("the GPU takes no further process (exclusive compute mode?): {line}"));
        }
        Self::Failed(line)
    }
}

impl From<UnpinError<'_>> for Stop {
    fn from(error: UnpinError<'_>) -> Self {
        Error::from(error).into()
    }
}

impl From<CloseError> for Stop {
    fn from(error: CloseError) -> Self {
        Error::from(error).into()
    }
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<String> for Stop {
    fn from(line: String) -> Self {
        Self::Failed(line)
    }
}

/// Ends the test as failed, with a reason, unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($reason:tt)+) => {
        if !$condition {
            return Err($crate::tool::sanity::bench::Stop::Failed(format!($($reason)+)));
        }
    };
}
pub(super) use ensure;

/// One test's surroundings.
#[derive(Debug)]
pub(super) struct Bench {
    args: Args,
    pub(super) how: Allocator,
    introduced: AtomicBool,
}

impl Bench {
    pub(super) fn new(args: Args, how: Allocator) -> Self {
        Self { args, how, introduced: AtomicBool::new(false) }
    }

    /// The command line that the program was started with.
    pub(super) fn args(&self) -> &Args {
        &self.args
    }

    /// The GPU under test.
    pub(super) fn gpu(&self) -> usize {
        self.args.device
    }

    fn builder(&self) -> Result<SessionBuilder, Error> {
        let mut builder = Session::builder();
        if let Some(kind) = self.args.backend {
            builder = builder.backend(kind);
        }
        if let Some(name) = &self.args.copy {
            builder = builder.copy_routine(name.as_str());
        }
        if self.args.sigbus {
            let gpus = std::env::var("GDRCOPY_EMULATED_GPUS").ok().filter(|text| !text.is_empty());
            builder = builder.emulated(EmulatedConfig::from_env(gpus.as_deref())?.sigbus_after_free());
        }
        // A level from the environment is the user's word.
        if std::env::var_os("GDRCOPY_RM").is_none_or(|value| value.is_empty()) {
            builder = builder.rm(RmLevel::Ipc);
        }
        Ok(builder)
    }

    /// A session of its own, without a word about it, for which more of CUDA would be opened.
    pub(super) fn open_quietly(&self) -> Result<Session, Error> {
        self.builder()?.open()
    }

    /// A session of its own. The first one is introduced to whoever started this process.
    pub(super) fn open(&self) -> Step<Session> {
        self.open_as(None)
    }

    /// A session of its own that copies with this routine.
    pub(super) fn open_as(&self, routine: Option<&str>) -> Step<Session> {
        let mut builder = self.builder()?;
        if let Some(name) = routine {
            builder = builder.copy_routine(name);
        }
        let session = builder.open()?;
        self.introduce(&session);
        Ok(session)
    }

    /// Says what the test runs on, once.
    pub(super) fn introduce(&self, session: &Session) {
        if !self.introduced.swap(true, Ordering::Relaxed) {
            voice::introduce(session);
        }
    }

    /// What is known of the GPU under test.
    pub(super) fn info(&self, session: &Session) -> Step<GpuInfo> {
        let gpus = session.gpus()?;
        let count = gpus.len();
        gpus.into_iter()
            .find(|gpu| gpu.ordinal == self.gpu())
            .ok_or_else(|| Stop::Failed(format!("-d {}: there is no such GPU, only {count}", self.gpu())))
    }

    /// Use of the BAR1 aperture.
    pub(super) fn bar1(&self, session: &Session) -> Step<Bar1> {
        self.info(session)?.bar1.ok_or_else(|| {
            Stop::Waived(format!("backend {}: the driver does not tell how much BAR1 is in use", session.backend()))
        })
    }

    /// Device memory of the test's kind that the backend maps.
    pub(super) fn buffer(&self, session: &Session, bytes: usize) -> Step<DeviceBuffer> {
        let buffer = session.alloc_as(self.gpu(), bytes, self.how)?;
        match session.pin(&buffer).map(drop) {
            Ok(()) => Ok(buffer),
            Err(error) => Err(self.refusal(session, error)),
        }
    }

    /// A backend's word that it does not map this kind of memory at all, or not here: under MPS, on a MIG partition, ..
    fn refusal(&self, session: &Session, error: Error) -> Stop {
        let backend = match session.rm_level() {
            Some(level) => format!("rm at level {level}"),
            None => session.backend().to_string(),
        };
        match error.kind() {
            ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc | MemoryKind::NotExportable)
            | ErrorKind::UnknownLayout => {
                Stop::Waived(format!("backend {backend} does not map {} memory: {error}", self.how))
            }
            ErrorKind::UnsupportedFeature(_) => Stop::Waived(format!("backend {backend} does not work here: {error}")),
            _ => error.into(),
        }
    }

    /// A buffer with a pattern in it, mapped.
    pub(super) fn mapped(&self, session: &Session, bytes: usize, seed: u64) -> Step<Mapped> {
        let buffer = Arc::new(self.buffer(session, bytes)?);
        buffer.upload(0, &filled(bytes, seed))?;
        let pinned = session.pin(&buffer)?;
        let mapping = pinned.map()?;
        Ok(Mapped { mapping, pinned, buffer })
    }
}

/// A buffer with its pin and its mapping. Dropped in that order: mapping, pin, buffer.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) mapping: Mapping<'static>,
    pub(super) pinned: Pinned<'static>,
    pub(super) buffer: Arc<DeviceBuffer>,
}

/// A range of a buffer that may be freed under it: the test accounts for what that does.
pub(super) fn unguarded(buffer: &DeviceBuffer) -> DeviceRange<'static> {
    DeviceRange::borrowed(buffer.span())
}

/// Test data.
pub(super) fn filled(bytes: usize, seed: u64) -> Vec<u8> {
    let mut data = vec![0; bytes];
    pattern::fill(&mut data, seed);
    data
}

/// Fails where two buffers differ.
pub(super) fn same(found: &[u8], wanted: &[u8], what: &str) -> Step {
    match pattern::first_difference(found, wanted) {
        None => Ok(()),
        Some((at, got, want)) => {
            Err(Stop::Failed(format!("{what}: byte {at} of {} is {got:#04x} and should be {want:#04x}", wanted.len())))
        }
    }
}

/// The whole of a buffer as the device's own copy engine shows it.
pub(super) fn downloaded(buffer: &DeviceBuffer) -> Step<Vec<u8>> {
    let mut bytes = vec![0; buffer.len()];
    buffer.download(0, &mut bytes)?;
    Ok(bytes)
}

/// Fails unless a call was refused so.
pub(super) fn refused<T>(result: Result<T, Error>, kind: ErrorKind, what: &str) -> Step {
    match result {
        Ok(_) => Err(Stop::Failed(format!("{what} is not refused"))),
        Err(error) if error.kind() == kind => Ok(()),
        Err(error) => Err(Stop::Failed(format!("{what} is refused as {:?}, not {kind:?}: {error}", error.kind()))),
    }
}

/// How a mapping behaves after its memory was freed, in words.
pub(super) fn after_free_in_words(row: AfterFree) -> &'static str {
    match row {
        AfterFree::Persistent => "the old bytes stay",
        AfterFree::Aliased => "the next owner's bytes show",
        AfterFree::Sigbus => "access raises SIGBUS",
    }
}

/// Waives a test that needs what this backend does not have.
pub(super) fn waived<T>(kind: BackendKind, why: &str) -> Step<T> {
    Err(Stop::Waived(format!("backend {kind}: {why}")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::error::Feature;

    #[test]
    fn what_is_refused_by_kind_is_waived_and_what_fails_is_not() {
        let bench = Bench::new(Args::parse_from(["gdrcopy_sanity", "--backend", "emulated"]), Allocator::CuMemAlloc);
        let session = bench.open_quietly().unwrap();
        let stop = |kind, cause: &'static str| bench.refusal(&session, Error::new("pin", kind, cause));
        let waived = [
            ErrorKind::UnsupportedFeature(Feature::Mps),
            ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc),
            ErrorKind::UnknownLayout,
        ];
        for kind in waived {
            assert!(
                matches!(stop(kind, "x"), Stop::Waived(reason) if reason.starts_with("backend emulated ")),
                "{kind:?}"
            );
        }
        for kind in [ErrorKind::OutOfMemory, ErrorKind::Stale, ErrorKind::UnsupportedMemory(MemoryKind::Host)] {
            assert!(matches!(stop(kind, "x"), Stop::Failed(_)), "{kind:?}");
        }
        let exclusive = "cuDevicePrimaryCtxRetain returned CUDA_ERROR_DEVICE_UNAVAILABLE";
        assert!(matches!(stop(ErrorKind::Io(libc::EIO), exclusive), Stop::Waived(_)));
    }
}
