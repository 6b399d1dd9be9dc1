//! The far end of a channel: the kernels of `tests/ptx/rings.cu`, or threads that play them on an emulated GPU.

#![allow(unsafe_code, reason = "launches kernels and reads what they report")]

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gdrcopy::channel::DeviceChannel;
use gdrcopy::channel::peer::Port;
use gdrcopy::cuda::{Module, PinnedHost, Priority, Stream};
use gdrcopy::tool::cpu;
use gdrcopy::tool::fail::Failure;

const PTX: &str = include_str!("../../../tests/ptx/rings.ptx");
const NAMES: [&CStr; 5] = [c"echo", c"ask", c"soak", c"arrive", c"pour"];
/// How long a kernel may take to start, and to end once it should.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
const LINE: usize = 64;
/// Bytes of `struct Report`.
pub(super) const REPORT: usize = 64;

/// Word `n` of message `number`: as in rings.cu.
fn word_of(number: u64, n: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    let word = u32::from_le_bytes([a, b, c, d]).wrapping_add(n.wrapping_mul(0x9e37_79b9));
    if n == 0 { word ^ u32::from_le_bytes([e, f, g, h]) } else { word }
}

/// The payload of message `number`.
pub(super) fn payload_of(number: u64) -> [u8; 48] {
    let mut payload = [0; 48];
    for (word, n) in payload.as_chunks_mut::<4>().0.iter_mut().zip(0..) {
        *word = word_of(number, n).to_le_bytes();
    }
    payload
}

/// A request of 512 bytes: its first word, and 127 that follow from it.
pub(super) fn request_of(first: u32) -> [u32; 128] {
    let mut n = 0_u32;
    [(); 128].map(|()| {
        n = n.wrapping_add(1);
        first.wrapping_add((n - 1).wrapping_mul(0x9e37_79b9))
    })
}

/// Host memory that both ends reach, zeroed.
#[derive(Debug)]
pub(super) enum Memory {
    Pinned(PinnedHost),
    Plain(Box<[AtomicU64]>),
}

impl Memory {
    /// The word at a multiple of 8 bytes.
    #[inline(always)]
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        match self {
            Self::Pinned(host) => {
                assert!(at.is_multiple_of(8) && at < host.len(), "word at {at}");
                // SAFETY: inside the memory and aligned, as was just checked; shared with the GPU as atomics only.
                unsafe { AtomicU64::from_ptr(host.as_ptr().wrapping_add(at).cast()) }
            }
            Self::Plain(words) => &words[at / 8],
        }
    }

    fn addr(&self) -> Result<u64, Failure> {
        match self {
            Self::Pinned(host) => Ok(host.gpu_addr()?.raw()),
            Self::Plain(words) => Ok(u64::try_from(words.as_ptr().expose_provenance()).unwrap_or(0)),
        }
    }
}

/// What the readers of a channel found: sums of their reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) messages: u64,
    pub(super) torn: u64,
    pub(super) ahead: u64,
    pub(super) behind: u64,
}

impl Found {
    pub(super) fn of(memory: &Memory, readers: u32) -> Self {
        let mut all = Self::default();
        for report in (0..usize::try_from(readers).unwrap_or(0)).map(|reader| reader * REPORT) {
            let get = |word: usize| memory.word(report + 8 * word).load(Ordering::Acquire);
            all.messages += get(1);
            all.torn += get(2);
            all.ahead += get(3);
            all.behind += get(4);
        }
        all
    }

    /// Exactly so many messages, nothing wrong with any.
    pub(super) fn is_clean(self, messages: u64) -> bool {
        self == Self { messages, ..Self::default() }
    }
}

/// A kernel and its arguments.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel<'a> {
    /// Lines come back with every bit turned over.
    Echo,
    /// 512 bytes are answered by 4.
    Ask { report: &'a Memory },
    /// Messages are checked, a block of 32 at a time.
    Soak { count: u64, mask: u64, report: &'a Memory },
    /// Messages are checked as they come, and some answered.
    Arrive { count: u64, mask: u64, every_log2: u32, answers: &'a Memory, slots: u64, report: &'a Memory },
    /// Messages to the host.
    Pour { count: u64 },
}

impl Kernel<'_> {
    fn name(self) -> &'static CStr {
        match self {
            Self::Echo => c"echo",
            Self::Ask { .. } => c"ask",
            Self::Soak { .. } => c"soak",
            Self::Arrive { .. } => c"arrive",
            Self::Pour { .. } => c"pour",
        }
    }

    /// What follows the channel in its parameter.
    fn words(self) -> Result<Vec<u64>, Failure> {
        Ok(match self {
            Self::Echo => vec![],
            Self::Ask { report } => vec![report.addr()?],
            Self::Soak { count, mask, report } => vec![0, count, mask, report.addr()?],
            Self::Arrive { count, mask, every_log2, answers, slots, report } => {
                vec![count, mask, u64::from(every_log2), answers.addr()?, slots, report.addr()?]
            }
            Self::Pour { count } => vec![0, count],
        })
    }
}

/// Where a kernel's blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sm {
    /// Each on an SM of its own.
    Own,
    /// Wherever there is room.
    Shared,
}

/// Who plays the far end.
#[derive(Debug)]
pub(super) struct Far {
    /// Absent on emulated GPUs.
    gpu: Option<(usize, Module)>,
}

impl Far {
    /// Loads every kernel: the first launch of another would wait for one that runs.
    pub(super) fn load(gpu: Option<usize>) -> Result<Self, Failure> {
        let load = |ordinal| -> Result<_, Failure> {
            let module = Module::load(ordinal, PTX)?;
            NAMES.into_iter().try_for_each(|name| module.kernel(name).map(drop))?;
            Ok((ordinal, module))
        };
        Ok(Self { gpu: gpu.map(load).transpose()? })
    }

    pub(super) fn is_emulated(&self) -> bool {
        self.gpu.is_none()
    }

    pub(super) fn memory(&self, bytes: usize) -> Result<Memory, Failure> {
        Ok(match &self.gpu {
            Some((ordinal, _)) => Memory::Pinned(PinnedHost::new(*ordinal, bytes)?),
            None => Memory::Plain(std::iter::repeat_with(|| AtomicU64::new(0)).take(bytes.div_ceil(8)).collect()),
        })
    }

    /// Starts one warp for each reader of the channel, and waits until all run.
    ///
    /// The channel and the memory must outlive what is returned.
    pub(super) fn start(
        &self,
        kernel: Kernel<'_>,
        sm: Sm,
        device: &DeviceChannel,
        has_started: impl Fn() -> bool,
    ) -> Result<Running<'_>, Failure> {
        let more = kernel.words()?;
        let running = match &self.gpu {
            Some((_, module)) => {
                let words = [&device.to_words()[..], &more].concat();
                let stream = module.stream(Priority::High)?;
                let (mut code, warps) = (module.kernel(kernel.name())?, device.readers);
                if sm == Sm::Own {
                    code = code.alone_on_its_sm()?;
                }
                // SAFETY: rings.cu gives each kernel this structure of words, which a test holds to the PTX; the caller
                // keeps what the addresses lead to.
                unsafe { code.launch(&stream, warps.div_ceil(4), 32 * warps.min(4), &words)? };
                Running::Gpu(stream)
            }
            None => Running::Threads((0..device.readers).map(|reader| play(kernel, *device, reader, &more)).collect()),
        };
        let started = Instant::now();
        while !has_started() {
            if started.elapsed() > PATIENCE {
                let name = kernel.name().to_string_lossy();
                return Err(Failure::run(format!("kernel {name} did not start within {} s", PATIENCE.as_secs())));
            }
            thread::yield_now();
        }
        Ok(running)
    }
}

/// A kernel under way.
#[derive(Debug)]
pub(super) enum Running<'a> {
    Gpu(Stream<'a>),
    Threads(Vec<JoinHandle<()>>),
}

impl Running<'_> {
    /// Waits for the end, which has been asked for or comes by itself.
    pub(super) fn finish(mut self) -> Result<(), Failure> {
        match &mut self {
            Self::Gpu(stream) => Ok(stream.finish(PATIENCE)?),
            Self::Threads(threads) => {
                let panicked = threads.drain(..).any(|thread| thread.join().is_err());
                if panicked { Err(Failure::run("the thread that plays the GPU panicked")) } else { Ok(()) }
            }
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Self::Threads(threads) = self {
            // The channel's limit ends them where nobody asked for it.
            threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

/// A word of host memory that a thread reaches as a kernel would, by address.
fn shared(addr: u64) -> &'static AtomicU64 {
    let at = std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0));
    // SAFETY: a word of a `Memory::Plain`, which outlives the thread, as `start` asks; only used as an atomic.
    unsafe { AtomicU64::from_ptr(at) }
}

/// The kernels once more, for one lane.
fn play(kernel: Kernel<'_>, device: DeviceChannel, reader: u32, more: &[u64]) -> JoinHandle<()> {
    let (name, more) = (kernel.name(), more.to_vec());
    thread::spawn(move || {
        // Threads inherit the CPU of the one that measures, and would stand in its way.
        if let (Some(here), Some(all)) = (cpu::current(), super::every_cpu()) {
            let _ = cpu::move_away(&all, here);
        }
        // SAFETY: the channel outlives the thread, as `Far::start` asks.
        let mut port = unsafe { Port::open(&device, reader) };
        let report = |base: u64, word: u64| shared(base + 64 * u64::from(reader) + 8 * word);
        let own = |count: u64| {
            let readers = u64::from(device.readers);
            (0..count).filter(move |number| number / 32 % readers == u64::from(reader))
        };
        match (name.to_str(), more.as_slice()) {
            (Ok("echo"), []) => {
                let mut line = [0; 48];
                while port.recv_lines(&mut line).is_ok() {
                    line.iter_mut().for_each(|byte| *byte = !*byte);
                    if port.send_lines(&line).is_err() {
                        break;
                    }
                }
            }
            (Ok("ask"), &[base]) => {
                let mut request = [0; 11 * 48];
                while port.recv_lines(&mut request).is_ok() {
                    let words = request.as_chunks::<4>().0;
                    let [first, last] = [0, 127].map(|n| u32::from_le_bytes(words[n]));
                    let wanted = request_of(first);
                    let is_wrong = wanted.iter().zip(words).any(|(want, got)| want.to_le_bytes() != *got);
                    report(base, 1).fetch_add(1, Ordering::Relaxed);
                    report(base, 2).fetch_add(u64::from(is_wrong), Ordering::Relaxed);
                    if port.send_lines(&(first ^ last).to_le_bytes()).is_err() {
                        break;
                    }
                }
            }
            (Ok("soak"), &[first, count, mask, base]) => {
                for number in own(count) {
                    let Ok(line) = port.recv_own_line() else { break };
                    report(base, 1).fetch_add(1, Ordering::Relaxed);
                    let is_wrong = line != payload_of((first + number) & mask);
                    report(base, 2).fetch_add(u64::from(is_wrong), Ordering::Relaxed);
                }
            }
            (Ok("arrive"), &[count, mask, every_log2, answers, slots, base]) => {
                let every_mask = (1_u64 << every_log2) - 1;
                for number in own(count) {
                    let Ok(line) = port.recv_own_line() else { break };
                    let (block, sample) = (number / 32, (number / 32) >> every_log2);
                    if block & every_mask == sample & every_mask && number % 32 == sample % 32 {
                        let at = answers + (sample & (slots - 1)) * 64;
                        shared(at).store((sample + 1) & 0xffff_ffff, Ordering::Release);
                    }
                    report(base, 1).fetch_add(1, Ordering::Relaxed);
                    report(base, 2).fetch_add(u64::from(line != payload_of(number & mask)), Ordering::Relaxed);
                }
            }
            (Ok("pour"), &[first, count]) => {
                for number in first..first + count {
                    if port.send_lines(&payload_of(number)).is_err() {
                        break;
                    }
                }
            }
            _ => unreachable!("every kernel has its words"),
        }
    })
}

/// Bytes of so many answers of [`Kernel::Arrive`].
pub(super) fn answer_bytes(slots: u64) -> usize {
    usize::try_from(slots).unwrap_or(0) * LINE
}

/// Where the answer to a sample lies.
#[inline(always)]
pub(super) fn answer_at(sample: u64, slots: u64) -> usize {
    usize::try_from(sample & (slots - 1)).unwrap_or(0) * LINE
}

/// The number of message that is sample `sample` of [`Kernel::Arrive`].
pub(super) fn message_of(sample: u64, every_log2: u32) -> u64 {
    let every = 1 << every_log2;
    (sample * every + sample % every) * 32 + sample % 32
}
