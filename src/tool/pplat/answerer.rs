//! The other side of a channel: a warp that answers, or a thread that plays it on an emulated GPU.

#![allow(unsafe_code, reason = "launches a kernel on a channel, or has a thread play it")]

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::message::{Letter, WARP};
use crate::channel::peer::Port;
use crate::channel::{DeviceChannel, LINE_PAYLOAD, Sender};
use crate::cuda::{Kernel, Module, PinnedHost, Priority, Stream};
use crate::error::{Error, ErrorKind};
use crate::sys::num::u64_of;
use crate::tool::answer::{Totals, WRONG_DATA, word_of};
use crate::tool::cpu::{self, CpuList};

const PTX: &str = include_str!("../../ptx/channel.ptx");

/// How long starting and stopping may take on a busy GPU.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// What the kernel reports: messages, wrong words.
const REPORT_BYTES: usize = 64;

/// What answers: a kernel, made ready before anything runs, or a thread on an emulated GPU.
pub(super) enum Answerer {
    /// The GPU's kernel, and its ordinal.
    Gpu(Module, usize),
    /// Where the thread may run, as it was before the measuring thread settled.
    Cpu(Option<CpuList>),
}

impl Answerer {
    /// Compiles and loads the kernel, so that no launch waits for that; for an emulated GPU, call it before the measuring
    /// thread settles.
    pub(super) fn new(gpu: Option<usize>) -> Result<Self, Error> {
        let Some(ordinal) = gpu else { return Ok(Self::Cpu(cpu::allowed())) };
        let module = Module::load(ordinal, PTX)?;
        module.kernel(c"pong")?;
        Ok(Self::Gpu(module, ordinal))
    }

    /// Starts answering such messages. Keep the channel's ends until the returned value is finished.
    pub(super) fn start(&self, sender: &Sender, letter: Letter) -> Result<Peer<'_>, Error> {
        Ok(match self {
            Self::Gpu(module, ordinal) => Peer::Gpu(Running::launch(module, *ordinal, sender, letter)?),
            Self::Cpu(cpus) => Peer::Cpu(play(cpus.clone(), sender, letter)?),
        })
    }
}

/// Writes the first `bytes` bytes of message or answer `number`; the rest of the last line stays 0.
pub(super) fn fill(number: u32, bytes: usize, into: &mut [[u8; LINE_PAYLOAD]]) {
    for (word, index) in into.as_flattened_mut()[..bytes].chunks_mut(4).zip(0..) {
        word.copy_from_slice(&word_of(number, index).to_le_bytes()[..word.len()]);
    }
}

/// The side that answers.
pub(super) enum Peer<'a> {
    Gpu(Running<'a>),
    Cpu(Option<JoinHandle<Totals>>),
}

impl Peer<'_> {
    pub(super) fn has_ended(&self) -> Result<bool, Error> {
        match self {
            Self::Gpu(running) => running.stream.is_idle(),
            Self::Cpu(thread) => Ok(thread.as_ref().is_none_or(JoinHandle::is_finished)),
        }
    }

    /// Waits for its end, which was asked for.
    pub(super) fn finish(&mut self) -> Result<Totals, Error> {
        match self {
            Self::Gpu(running) => running.finish(),
            Self::Cpu(thread) => Ok(thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()),
        }
    }
}

/// The kernel, and where it reports.
pub(super) struct Running<'a> {
    stream: Stream<'a>,
    /// Present until a kernel that does not end has made it unfit to be freed.
    report: Option<PinnedHost>,
}

/// The kernel's parameter.
fn parameter(channel: &DeviceChannel, letter: Letter, report: u64) -> [u64; 13] {
    let [a, b, c, d, e, f, g, h, i, j] = channel.to_words();
    [a, b, c, d, e, f, g, h, i, j, u64_of(letter.bytes), u64_of(letter.answer_bytes), report]
}

impl<'a> Running<'a> {
    fn launch(module: &'a Module, ordinal: usize, sender: &Sender, letter: Letter) -> Result<Self, Error> {
        // Beside work that fills every SM, a warp that waits would lose its turns to it.
        let kernel: Kernel<'_> = module.kernel(c"pong")?.alone_on_its_sm()?;
        let report = PinnedHost::new(ordinal, REPORT_BYTES)?;
        let words = parameter(&sender.device(), letter, report.gpu_addr()?.raw());
        let stream = module.stream(Priority::High)?;
        // SAFETY: the parameter's layout is held to the kernel's by a test; the channel's ends and `report` are kept until
        // the kernel has ended.
        unsafe { kernel.launch(&stream, 1, WARP, &words)? };
        Ok(Self { stream, report: Some(report) })
    }

    fn finish(&mut self) -> Result<Totals, Error> {
        if let Err(error) = self.stream.finish(PATIENCE) {
            // The kernel may still write there; the memory must outlive it.
            mem::forget(self.report.take());
            return Err(error);
        }
        let Some(report) = &self.report else { return Ok(Totals::default()) };
        let word = |n: usize| {
            let at = report.as_ptr().wrapping_add(8 * n);
            // SAFETY: inside `report`, a multiple of 8; the kernel, which wrote it, has ended.
            unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire)
        };
        Ok(Totals { messages: word(0), wrong_words: word(1) })
    }
}

/// Starts the thread that plays the kernel.
fn play(cpus: Option<CpuList>, sender: &Sender, letter: Letter) -> Result<Option<JoinHandle<Totals>>, Error> {
    let (channel, taken) = (sender.device(), cpu::current());
    let thread = thread::Builder::new().name("emulated GPU".to_owned()).spawn(move || {
        if let Some((cpus, taken)) = cpus.zip(taken) {
            // Sharing one with the other side is slow, not wrong.
            let _ = cpu::move_away(&cpus, taken);
        }
        // SAFETY: the thread is joined before the channel's ends are dropped.
        let port = unsafe { Port::open(&channel, 0) };
        pong(port, letter)
    });
    let none = |error| Error::new("launch", ErrorKind::OutOfMemory, format!("no thread can be started: {error}"));
    thread.map(Some).map_err(none)
}

/// The kernel `pong` of `src/ptx/channel.cu` once more.
fn pong(mut port: Port, letter: Letter) -> Totals {
    let mut totals = Totals::default();
    let lines = letter.bytes.div_ceil(LINE_PAYLOAD);
    let (mut message, mut wanted) = (vec![[0; LINE_PAYLOAD]; lines], vec![[0; LINE_PAYLOAD]; lines]);
    for number in 1_u32.. {
        let mut answer = [[0; LINE_PAYLOAD]];
        fill(number, letter.bytes, &mut wanted);
        fill(number, letter.answer_bytes, &mut answer);
        if port.recv_lines(message.as_flattened_mut()).is_err() {
            break;
        }
        let pairs = message.as_flattened().as_chunks::<4>().0.iter().zip(wanted.as_flattened().as_chunks::<4>().0);
        let wrong = u64_of(pairs.filter(|(found, wanted)| found != wanted).count());
        let first = if wrong > 0 { number | WRONG_DATA } else { number };
        answer[0][..4].copy_from_slice(&first.to_le_bytes());
        if port.send_lines(&answer[0]).is_err() {
            break;
        }
        totals.messages += 1;
        totals.wrong_words += wrong;
    }
    totals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::parameter_bytes;

    #[test]
    fn the_parameter_is_as_long_as_the_kernels() {
        assert_eq!(parameter_bytes(PTX, "pong"), Some(size_of::<DeviceChannel>() + 3 * 8));
    }
}
