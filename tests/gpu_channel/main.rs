//! Channels to a kernel on a real GPU: round trips beside the rival that polls host memory, and soaks. Rates and the limits
//! of latency are measured by `benches/limits`, part `channel`.
//!
//! `GDRCOPY_SOAK_MESSAGES` sets how many lines the soak to the GPU sends, 100 million by default, and `GDRCOPY_SOAK_FIRST` the
//! number of the first, so that a long soak can be made in parts: 100000000000 take some seven minutes, or four by two channels
//! (`GDRCOPY_SOAK_CHANNELS`, of one thread each). The soak to the host receives a twentieth of that. Every figure is printed; run with `--nocapture`. Without a GPU every test prints `SKIPPED`
//! with the reason and passes. Kernels occupy the device: run them one at a time (`RUST_TEST_THREADS=1`).
#![cfg(feature = "tools")]
#![allow(unsafe_code, missing_docs, reason = "tests launch kernels beside the library")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    reason = "memory shared with a kernel"
)]
#![allow(clippy::as_conversions, clippy::unwrap_used, reason = "tests may panic and convert freely")]

#[path = "../common/env.rs"]
mod env;
mod latest;
mod soak;
#[allow(dead_code, reason = "shared with the binary `gpu`, which uses all of it")]
#[path = "../gpu/support.rs"]
mod support;

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdrcopy::channel::{ChannelBuilder, ChannelError, DeviceChannel, Mailbox, Receiver, Sender};
use gdrcopy::cuda::{Module, PinnedHost, Priority, Stream, parameter_bytes};
use gdrcopy::tool::clock::Clock;
use gdrcopy::tool::load::Load;
use gdrcopy::tool::stats::Samples;
use gdrcopy::{RmLevel, Session};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const PTX: &str = include_str!("../ptx/channel.ptx");

/// No kernel outlives a test that died by much.
const LIMIT: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(5);

fn session() -> Option<Session> {
    support::session(RmLevel::Vmm)
}

fn builder() -> ChannelBuilder {
    ChannelBuilder::new().gpu(0).kernel_limit(LIMIT)
}

/// Launches `warps` warps of a kernel that takes a channel and `more` words, and waits until they run.
fn launch<'m>(
    module: &'m Module,
    name: &CStr,
    warps: u32,
    channel: &DeviceChannel,
    more: &[u64],
    has_started: impl Fn() -> bool,
) -> Stream<'m> {
    assert_eq!(parameter_bytes(PTX, name.to_str().unwrap()), Some((10 + more.len()) * 8), "{name:?}");
    launch_checked(module, name, warps, channel, more, has_started)
}

/// The same for a kernel whose parameter has been compared. One warp has its SM to itself.
fn launch_checked<'m>(
    module: &'m Module,
    name: &CStr,
    warps: u32,
    channel: &DeviceChannel,
    more: &[u64],
    has_started: impl Fn() -> bool,
) -> Stream<'m> {
    let words = [&channel.to_words()[..], more].concat();
    let threads = 32 * warps.min(4);
    let mut kernel = module.kernel(name).unwrap();
    if warps == 1 {
        kernel = kernel.alone_on_its_sm().unwrap();
    }
    let stream = module.stream(Priority::High).unwrap();
    unsafe { kernel.launch(&stream, warps.div_ceil(4), threads, &words) }.unwrap();
    let started = Instant::now();
    while !has_started() {
        assert!(started.elapsed() < PATIENCE, "{name:?} does not start");
    }
    stream
}

/// The module with every kernel loaded: a first launch would wait for a kernel that stays.
fn module() -> Module {
    let module = Module::load(0, PTX).unwrap();
    for name in [c"answer", c"mirror", c"watch"] {
        module.kernel(name).unwrap();
    }
    module
}

fn word_of(number: u64, n: u32) -> u32 {
    let word = (number as u32).wrapping_add(n.wrapping_mul(0x9e37_79b9));
    if n == 0 { word ^ (number >> 32) as u32 } else { word }
}

/// What kernels report: 8 words each.
struct Reports(PinnedHost);

impl Reports {
    fn new(count: usize) -> Self {
        Self(PinnedHost::new(0, 64 * count).unwrap())
    }

    fn addr(&self) -> u64 {
        self.0.gpu_addr().unwrap().raw()
    }

    fn get(&self, which: usize, word: usize) -> u64 {
        let at = self.0.as_ptr().wrapping_add(64 * which + 8 * word);
        unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire)
    }
}

// --- Round trips ---------------------------------------------------------------------------------------------------------

/// A mailbox, and the kernel behind it once it is started.
struct Asked<'m, Req, Resp> {
    mailbox: Mailbox<Req, Resp>,
    stream: Option<Stream<'m>>,
    samples: Samples,
}

impl<'m, Req: IntoBytes + Immutable, Resp: FromBytes + IntoBytes> Asked<'m, Req, Resp> {
    /// Allocates, which is done before any kernel runs.
    fn open(session: &Session, builder: ChannelBuilder) -> Self {
        let (sender, receiver) = builder.open(session).unwrap();
        Self { mailbox: Mailbox::new(sender, receiver).unwrap(), stream: None, samples: Samples::new() }
    }

    fn start(&mut self, module: &'m Module, delay_ns: u64) {
        let mailbox = &self.mailbox;
        let more = [u64::from(mailbox.response_lines()) << 32 | u64::from(mailbox.request_lines()), delay_ns];
        let stream = launch(module, c"answer", 1, &mailbox.device(), &more, || mailbox.kernel_has_started());
        self.stream = Some(stream);
    }

    fn calls(&mut self, clock: &Clock, count: u32, request: impl Fn(u32) -> Req, check: impl Fn(u32, &Resp)) {
        for n in 0..count {
            let request = request(n);
            let start = clock.start();
            let answer = self.mailbox.call(&request, PATIENCE).unwrap();
            let stop = clock.stop();
            check(n, &answer);
            self.samples.record(clock.ps(stop.ticks.saturating_sub(start)).saturating_sub(clock.overhead_ps()));
        }
    }

    /// Ends the kernel. Nothing is freed: that would wait for every other kernel.
    fn end(&mut self) {
        self.mailbox.stop();
        self.finish();
    }

    fn finish(&mut self) {
        self.stream.take().unwrap().finish(PATIENCE).unwrap();
    }
}

fn print(what: &str, samples: &Samples) {
    let d = samples.distribution();
    println!(
        "{what:<44} ns: min {:.0}, p50 {:.0}, p99 {:.0}, p99.9 {:.0}, max {:.0} ({} samples)",
        d.min,
        d.p50,
        d.p99,
        d.p999,
        d.max,
        samples.len()
    );
}

/// The host's own hiccups: a wait of as long as a round trip takes, for nobody.
fn hiccups(clock: &Clock, count: u32) -> Samples {
    let mut samples = Samples::new();
    for _ in 0..count {
        let start = clock.start();
        let stop = loop {
            let stop = clock.stop();
            let ps = clock.ps(stop.ticks.saturating_sub(start));
            if ps > 1_600_000 {
                break ps;
            }
        };
        samples.record(stop.saturating_sub(clock.overhead_ps()));
    }
    samples
}

fn round_trips<Req, Resp>(what: &str, load: Option<&Load>, request: fn(u32) -> Req, check: fn(u32, &Resp))
where
    Req: IntoBytes + Immutable,
    Resp: FromBytes + IntoBytes,
{
    const BLOCKS: u32 = 40;
    const CALLS: u32 = 1000;
    let Some(session) = session() else { return };
    let clock = Clock::calibrate();
    let module = module();
    let mut ours = Asked::<Req, Resp>::open(&session, builder().lines_to_gpu(32));
    let mut rival = Asked::<Req, Resp>::open(&session, builder().lines_to_gpu(32).ring_in_host_memory());
    ours.start(&module, 0);
    rival.start(&module, 0);
    let busy = load.map(|load| load.start(LIMIT).unwrap());
    ours.calls(&clock, CALLS, request, check);
    rival.calls(&clock, CALLS, request, check);
    (ours.samples, rival.samples) = (Samples::new(), Samples::new());
    for _ in 0..BLOCKS {
        ours.calls(&clock, CALLS, request, check);
        rival.calls(&clock, CALLS, request, check);
    }
    if let Some(busy) = &busy {
        assert!(busy.still_runs().unwrap(), "the load ended before the measurement");
    }
    let beside = if busy.is_some() { ", every SM busy" } else { "" };
    ours.end();
    rival.end();
    drop(busy);
    print(&format!("{what}, ring in GPU memory{beside}"), &ours.samples);
    print(&format!("{what}, ring in host memory{beside}"), &rival.samples);
    print("host alone, a wait of 1.6 us", &hiccups(&clock, BLOCKS * CALLS));
}

/// Twelve words whose answer is their sum with their mirror image, by xor.
fn line(n: u32) -> [u32; 12] {
    std::array::from_fn(|at| n.wrapping_mul(0x0101_0101).wrapping_add((at as u32) << 7))
}

fn check_line(n: u32, answer: &[u32; 12]) {
    let asked = line(n);
    assert_eq!(*answer, std::array::from_fn(|at| asked[at] ^ asked[11 - at]), "call {n}");
}

fn words<const N: usize>(n: u32) -> [u32; N] {
    std::array::from_fn(|at| n.wrapping_mul(31).wrapping_add(at as u32))
}

#[test]
fn round_trip_of_a_line_each_way() {
    round_trips("48 B in, 48 B out", None, line, check_line);
}

#[test]
fn round_trip_of_384_bytes_in_and_4_out() {
    // Eight lines, full: the last word takes part.
    round_trips("384 B in, 4 B out", None, words::<96>, |n, answer: &u32| {
        let asked = words::<96>(n);
        assert_eq!(*answer, asked[0] ^ asked[95], "call {n}");
    });
}

#[test]
fn round_trip_of_512_bytes_in_and_4_out() {
    // Eleven lines, of which the last ends in zeros.
    round_trips("512 B in, 4 B out", None, words::<128>, |n, answer: &u32| assert_eq!(*answer, words::<128>(n)[0]));
}

#[test]
fn round_trip_with_every_sm_busy() {
    let Some(session) = session() else { return };
    let load = Load::new(&session, 0).unwrap();
    round_trips("48 B in, 48 B out", Some(&load), line, check_line);
    round_trips("512 B in, 4 B out", Some(&load), words::<128>, |n, answer: &u32| {
        assert_eq!(*answer, words::<128>(n)[0]);
    });
}

// --- Messages ------------------------------------------------------------------------------------------------------------

/// Messages of all lengths, many under way, over the end of the numbers' 32 bits, through small rings.
#[test]
fn messages_of_every_length_come_back() {
    const ROUNDS: usize = 20_000;
    let Some(session) = session() else { return };
    let module = module();
    let small = builder().lines_to_gpu(256).lines_to_host(128).first_lines(u32::MAX - 5000, u32::MAX - 3000);
    let (mut sender, mut receiver): (Sender, Receiver) = small.open(&session).unwrap();
    let stream = launch(&module, c"mirror", 1, &sender.device(), &[], || sender.kernel_has_started());
    let message = |n: usize| support::pattern(n as u64, n * 37 % 3000);
    let (mut sent, mut answer) = (0, vec![0; 3000]);
    for n in 0..ROUNDS {
        while sent < ROUNDS && sender.try_send(&message(sent)).is_ok() {
            sent += 1;
        }
        let bytes = receiver.recv(&mut answer, PATIENCE).unwrap();
        let wanted: Vec<u8> = message(n).iter().map(|byte| !byte).collect();
        assert!(answer[..bytes] == wanted, "message {n} of {} bytes", wanted.len());
    }
    sender.stop();
    stream.finish(PATIENCE).unwrap();
}

/// What was sent before the kernel started waits in the first place, whichever the kernel takes.
#[test]
fn a_kernel_finds_what_was_sent_before_it_started() {
    let Some(session) = session() else { return };
    let module = module();
    for round in 0..8 {
        let (mut sender, mut receiver) = builder().lines_to_gpu(32).lines_to_host(32).open(&session).unwrap();
        let is_early = round % 2 == 0;
        if is_early {
            sender.send(&support::pattern(0, 40), PATIENCE).unwrap();
            sender.commit();
        }
        let stream = launch(&module, c"mirror", 1, &sender.device(), &[], || sender.kernel_has_started());
        if !is_early {
            sender.send(&support::pattern(0, 40), PATIENCE).unwrap();
        }
        let mut answer = vec![0; 300];
        for n in 0..1000 {
            let bytes = receiver.recv(&mut answer, PATIENCE).unwrap();
            let wanted: Vec<u8> = support::pattern(n, 40 + n as usize % 200).iter().map(|byte| !byte).collect();
            assert!(answer[..bytes] == wanted, "round {round}, message {n}");
            sender.send(&support::pattern(n + 1, 40 + (n + 1) as usize % 200), PATIENCE).unwrap();
            sender.commit();
        }
        sender.stop();
        stream.finish(PATIENCE).unwrap();
    }
}

// --- Ends -------------------------------------------------------------------------------------------

#[test]
fn a_call_never_hangs() {
    let Some(session) = session() else { return };
    let module = module();
    // Answers that take a millisecond, asked for within 100 us: they are dropped, and every second call gets its own.
    let mut asked = Asked::<[u32; 12], [u32; 12]>::open(&session, builder());
    asked.start(&module, 1_000_000);
    for n in 0..100 {
        match asked.mailbox.call(&line(2 * n), Duration::from_micros(100)) {
            Err(ChannelError::TimedOut) => {}
            other => panic!("{other:?}"),
        }
        check_line(2 * n + 1, &asked.mailbox.call(&line(2 * n + 1), PATIENCE).unwrap());
    }
    asked.end();
    assert!(matches!(asked.mailbox.call(&line(0), PATIENCE), Err(ChannelError::KernelGone)));

    // No kernel at all.
    let (sender, receiver) = builder().open(&session).unwrap();
    let mut alone = Mailbox::<u64, u64>::new(sender, receiver).unwrap();
    assert!(matches!(alone.call(&1, Duration::from_millis(5)), Err(ChannelError::TimedOut)));

    // A kernel that nobody stops.
    let short = builder().kernel_limit(Duration::from_millis(50));
    let mut forgotten = Asked::<u64, u64>::open(&session, short);
    forgotten.start(&module, 0);
    forgotten.finish();
    assert!(matches!(forgotten.mailbox.call(&1, PATIENCE), Err(ChannelError::KernelGone)));
}
