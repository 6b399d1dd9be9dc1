//! When the GPU sees what was written: a kernel polls a flag behind the data and answers; half of the round trip is the
//! time until the GPU had seen the flag, and with it, as [`Mapping::publish`] promises, the data before it.
//!
//! [`Mapping::publish`]: crate::Mapping::publish

use std::fmt;
use std::time::Duration;

use super::answer::{CpuSide, GpuSide, Mode, Shape, Side};
use super::exchange::{Area, Exchange, Places, SharedHost};
use super::fail::Failure;
use crate::mapping::Mapping;

/// Bytes of the mapping that the flag takes, from a multiple of 64 on.
pub const FLAG_BYTES: usize = super::answer::FLAG_STRIDE;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);
const SHAPE: Shape = Shape { mode: Mode::Flag, bytes: 4, blocks: 1, threads: 32 };

/// What an [`Echo`] needs before it is opened: kernels loaded, memory for answers allocated. Nothing runs yet.
pub struct EchoSide {
    side: Box<dyn Side>,
    answers: SharedHost,
    is_emulated: bool,
}

impl fmt::Debug for EchoSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EchoSide").field("is_emulated", &self.is_emulated).finish_non_exhaustive()
    }
}

impl EchoSide {
    /// For the GPU with this ordinal, or for an emulated one. Call it before the measuring thread settles on a CPU: the
    /// thread that plays an emulated GPU's part takes another.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn new(gpu: Option<usize>) -> Result<Self, Failure> {
        let side: Box<dyn Side> = match gpu {
            Some(ordinal) => Box::new(GpuSide::load(ordinal)?),
            None => Box::new(CpuSide::new()),
        };
        Ok(Self { side, answers: SharedHost::new(gpu, 4096)?, is_emulated: gpu.is_none() })
    }

    /// Starts the kernel, with its flag at [`FLAG_BYTES`] bytes of the mapping from `flag_offset` on, a multiple of 64.
    ///
    /// While it runs, CUDA calls that synchronise the device or free memory wait: drop it before those.
    ///
    /// # Errors
    ///
    /// The bytes are not there, or the kernel does not start.
    pub fn open<'a>(&'a self, mapping: &'a Mapping<'a>, flag_offset: usize) -> Result<Echo<'a>, Failure> {
        let flags = Area::Device(mapping, flag_offset);
        let answers = Area::Host(&self.answers, 0);
        let places = Places { flags, data: answers, answers };
        let exchange = Exchange::start(&*self.side, self.is_emulated, SHAPE, places, Some(TIMEOUT))?;
        Ok(Echo { exchange })
    }
}

/// A kernel that answers. Dropping it ends the kernel.
#[derive(Debug)]
pub struct Echo<'a> {
    exchange: Exchange<'a>,
}

impl Echo<'_> {
    /// Stores the flag, with an SFENCE behind it, and waits until the answer is in host memory. To time the visibility of
    /// data, write them with an SFENCE in the same timed region before this.
    ///
    /// # Errors
    ///
    /// No answer, or Ctrl-C.
    #[inline]
    pub fn round_trip(&mut self) -> Result<(), Failure> {
        self.exchange.round()
    }

    /// Ends the kernel and reports what dropping cannot.
    ///
    /// # Errors
    ///
    /// It failed, or answered more or less often than asked.
    pub fn close(self) -> Result<(), Failure> {
        self.exchange.stop().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;
    use crate::session::Session;

    #[test]
    fn an_emulated_gpu_echoes() {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = session.alloc(4096).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        let side = EchoSide::new(None).unwrap();
        // The second starts from a flag that the first has left.
        for _ in 0..2 {
            let mut echo = side.open(&mapping, 64).unwrap();
            (0..100).for_each(|_| echo.round_trip().unwrap());
            echo.close().unwrap();
        }
        assert!(side.open(&mapping, 4096 - 64).unwrap_err().to_string().contains("no room"));
        assert!(side.open(&mapping, 4).unwrap_err().to_string().contains("no room"));
    }
}
