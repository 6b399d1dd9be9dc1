//! The kernels of `tests/ptx/channel.cu`, twice, and those of `tests/ptx/rings.cu` as C++.

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use gdrcopy::channel::peer::{LatestReader, Port};
use gdrcopy::channel::{DeviceChannel, DeviceLatest};

/// Who plays the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peer {
    Rust,
    Header(&'static Library),
}

/// The Rust peer, and the header's where there is a compiler for it.
pub(crate) fn peers() -> Vec<Peer> {
    let header = channel_kernels().map(Peer::Header);
    [Peer::Rust].into_iter().chain(header).collect()
}

#[derive(Debug)]
pub(crate) struct Library(*mut c_void);

// SAFETY: a handle of dlopen may be used from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

fn build(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.so", std::process::id()));
    let mut job = Command::new("g++");
    job.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-x", "c++"]);
    let output = match job.arg(root.join("tests/ptx").join(name).with_extension("cu")).arg("-o").arg(&to).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("SKIPPED the header as C++: g++: {error}");
            return None;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(to)
}

fn open(name: &str) -> Option<Library> {
    let path = build(name)?;
    let file = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path to a library without initialisers.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "{}", path.display());
    std::fs::remove_file(path).unwrap();
    Some(Library(handle))
}

fn channel_kernels() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| open("channel")).as_ref()
}

/// The kernels of `rings.cu`, where there is a compiler.
pub(crate) fn ring_kernels() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| open("rings")).as_ref()
}

/// A kernel's one parameter, by value.
#[repr(C)]
struct Words<const N: usize>([u64; N]);

impl Library {
    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a live handle and a NUL-terminated name.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        found
    }

    /// Runs a kernel to its end.
    pub(crate) fn run<const N: usize>(&self, name: &CStr, warp: u32, words: [u64; N]) {
        // SAFETY: the function's type in channel.cu.
        let be_warp = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(u32)>(self.symbol(c"be_warp")) };
        // SAFETY: a structure of so many bytes, aligned to 8, by value, as the kernel of this name takes it.
        let kernel = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(Words<N>)>(self.symbol(name)) };
        be_warp(warp);
        kernel(Words(words));
    }
}

pub(crate) fn joined<const A: usize, const B: usize, const N: usize>(a: [u64; A], b: [u64; B]) -> [u64; N] {
    let mut both = [0; N];
    both[..A].copy_from_slice(&a);
    both[A..].copy_from_slice(&b);
    both
}

/// `SinkReport`, `WatchReport` and `Report`: 8 words.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Report([AtomicU64; 8]);

/// Word `n` of message `number`.
pub(crate) fn word_of(number: u64, n: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    let word = u32::from_le_bytes([a, b, c, d]).wrapping_add(n.wrapping_mul(0x9e37_79b9));
    if n == 0 { word ^ u32::from_le_bytes([e, f, g, h]) } else { word }
}

/// The payload of message `number`.
pub(crate) fn payload_of(number: u64) -> [u8; 48] {
    let mut payload = [0; 48];
    for (word, n) in payload.chunks_exact_mut(4).zip(0..) {
        word.copy_from_slice(&word_of(number, n).to_le_bytes());
    }
    payload
}

impl Peer {
    pub(crate) fn answer(self, channel: &DeviceChannel, request_lines: u32, response_lines: u32, delay_ns: u64) {
        if let Self::Header(library) = self {
            let lines = u64::from(response_lines) << 32 | u64::from(request_lines);
            return library.run::<12>(c"answer", 0, joined(channel.to_words(), [lines, delay_ns]));
        }
        let bytes = |lines| usize::try_from(lines).unwrap() * 48;
        // SAFETY: tests keep the channel until the thread has ended.
        let mut port = unsafe { Port::open(channel, 0) };
        let mut request = vec![0; bytes(request_lines)];
        while port.recv_lines(&mut request).is_ok() {
            let back = request.rchunks_exact(4).flatten();
            let response: Vec<u8> = request.iter().zip(back).map(|(a, b)| a ^ b).take(bytes(response_lines)).collect();
            std::thread::sleep(std::time::Duration::from_nanos(delay_ns));
            if port.send_lines(&response).is_err() {
                break;
            }
        }
    }

    pub(crate) fn mirror(self, channel: &DeviceChannel) {
        if let Self::Header(library) = self {
            return library.run(c"mirror", 0, channel.to_words());
        }
        // SAFETY: tests keep the channel until the thread has ended.
        let mut port = unsafe { Port::open(channel, 0) };
        while let Ok(message) = port.recv() {
            let back: Vec<u8> = message.iter().map(|byte| !byte).collect();
            if port.send(&back).is_err() {
                break;
            }
        }
    }

    pub(crate) fn sink(self, channel: &DeviceChannel, reader: u32, count: u64, reports: &[Report]) {
        let report = &reports[usize::try_from(reader).unwrap()];
        let at = std::ptr::from_ref(&reports[0]).expose_provenance();
        if let Self::Header(library) = self {
            let at = u64::try_from(at).unwrap();
            return library.run::<13>(c"sink", reader, joined(channel.to_words(), [count, at, u64::MAX]));
        }
        // SAFETY: tests keep the channel until the thread has ended.
        let mut port = unsafe { Port::open(channel, reader) };
        let (mut messages, mut wrong) = (0, 0);
        let own = (0..count).filter(|number| number / 32 % u64::from(channel.readers) == u64::from(reader));
        for due in own {
            let Ok(payload) = port.recv_own_line() else { break };
            messages += 1;
            wrong += u64::from(payload != payload_of(due));
        }
        report.set(1, messages);
        report.set(2, wrong);
        report.set(0, 2);
    }

    pub(crate) fn source(self, channel: &DeviceChannel, count: u64) {
        if let Self::Header(library) = self {
            return library.run::<11>(c"source", 0, joined(channel.to_words(), [count]));
        }
        // SAFETY: tests keep the channel until the thread has ended.
        let mut port = unsafe { Port::open(channel, 0) };
        for number in 0..count {
            if port.send_lines(&payload_of(number)).is_err() {
                break;
            }
        }
    }

    pub(crate) fn watch<const WORDS: usize>(
        self,
        channel: &DeviceChannel,
        latest: &DeviceLatest,
        last: u64,
        report: &Report,
    ) {
        let at = std::ptr::from_ref(report).expose_provenance();
        if let Self::Header(library) = self {
            let at = u64::try_from(at).unwrap();
            let rest: [u64; 4] = joined(latest.to_words(), [last, at]);
            return library.run::<14>(c"watch", 0, joined(channel.to_words(), rest));
        }
        // SAFETY: tests keep the memory until the thread has ended.
        let mut reader = unsafe { LatestReader::new(latest) };
        let (mut value, mut seen, mut mixed, mut backward, mut newest) = ([0_u32; WORDS], 0, 0, 0, 0);
        let started = std::time::Instant::now();
        while newest < last && started.elapsed() < std::time::Duration::from_nanos(channel.limit_ns) {
            if reader.read(&mut value) {
                let number = u64::from(value[1].wrapping_sub(0x9e37_79b9));
                seen += 1;
                mixed += u64::from(value.iter().zip(0..).any(|(&word, n)| word != word_of(number, n)));
                backward += u64::from(number < newest);
                newest = number;
            }
            std::thread::yield_now();
        }
        for (at, value) in [(1, seen), (2, mixed), (3, backward), (4, newest), (0, 2)] {
            report.set(at, value);
        }
    }
}

impl Report {
    fn set(&self, at: usize, value: u64) {
        self.0[at].store(value, Ordering::Release);
    }

    pub(crate) fn get(&self, at: usize) -> u64 {
        self.0[at].load(Ordering::Acquire)
    }
}
