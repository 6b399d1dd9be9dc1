//! Soaks: numbered messages of one line, each checked at the other end.

use std::ffi::CStr;
use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::Session;
use gdrcopy::channel::{ChannelBuilder, ChannelError, Sender};
use gdrcopy::cuda::{Module, Stream, parameter_bytes};
use zerocopy::IntoBytes;

use crate::env::from_env;
use crate::{PATIENCE, Reports, builder, launch_checked, session, word_of};

const PTX: &str = include_str!("../ptx/rings.ptx");
/// A kernel that nobody stops ends after this.
const LONG: Duration = Duration::from_secs(900);
const READERS: u32 = 32;
/// Messages made at a time: few enough to stay in the first cache.
const BATCH: u64 = 256;

fn module() -> Module {
    let module = Module::load(0, PTX).unwrap();
    for (name, words) in [(c"soak", 14), (c"pour", 12)] {
        assert_eq!(parameter_bytes(PTX, name.to_str().unwrap()), Some(words * 8), "{name:?}");
        module.kernel(name).unwrap();
    }
    module
}

/// Number of the first message; the lines begin with its lower half, so that a part begins as the one before it ended.
fn first() -> u64 {
    from_env("GDRCOPY_SOAK_FIRST", 0)
}

fn count() -> u64 {
    from_env("GDRCOPY_SOAK_MESSAGES", 100_000_000)
}

fn numbered(first: u64) -> ChannelBuilder {
    builder().kernel_limit(LONG).first_lines(first as u32, first as u32)
}

/// The words of message `number`.
fn words_of(number: u64) -> [u32; 12] {
    std::array::from_fn(|n| word_of(number, n as u32))
}

/// Each line as it is stored by `Sender::try_send_lines`.
fn fill(payloads: &mut [[u8; 48]], numbers: impl Iterator<Item = u64>) {
    for (payload, number) in payloads.iter_mut().zip(numbers) {
        payload.copy_from_slice(words_of(number).as_bytes());
    }
}

fn told(way: &CStr, first: u64, count: u64, seconds: f64) -> String {
    format!(
        "{}: {count} messages from {first} on in {seconds:.1} s, {:.1} million a second; line numbers passed 2^32 {} times",
        way.to_str().unwrap(),
        count as f64 / seconds / 1e6,
        ((first + count - 1) >> 32) - (first >> 32),
    )
}

/// A channel, and the kernel that checks its messages.
struct Soak<'m> {
    // Dropped before the reports, which the kernel that this ends writes: freeing those waits for it.
    sender: Sender,
    stream: Stream<'m>,
    reports: Reports,
    first: u64,
    count: u64,
}

impl<'m> Soak<'m> {
    fn start(session: &Session, module: &'m Module, first: u64, count: u64) -> Self {
        let reports = Reports::new(READERS as usize);
        let (sender, _) = numbered(first).readers(READERS).lines_to_gpu(1 << 14).open(session).unwrap();
        let more = [first, count, u64::MAX, reports.addr()];
        let stream = launch_checked(module, c"soak", READERS, &sender.device(), &more, || sender.kernel_has_started());
        Self { sender, stream, reports, first, count }
    }

    fn send(&mut self) {
        let mut payloads = vec![[0; 48]; BATCH as usize];
        let (started, mut told_at) = (Instant::now(), Duration::from_secs(60));
        let mut sent = 0;
        while sent < self.count {
            let now = (self.count - sent).min(BATCH);
            let batch = &mut payloads[..now as usize];
            fill(batch, self.first + sent..);
            let mut left = &batch[..];
            while let Some(next) = left.first() {
                let taken = self.sender.try_send_lines(left).unwrap();
                if taken == 0 {
                    // Waits, for a limited time.
                    self.sender.send_line(next, PATIENCE).unwrap();
                }
                left = &left[taken.max(1)..];
            }
            sent += now;
            if sent % (BATCH << 16) == 0 && started.elapsed() > told_at {
                println!("  {}", told(c"so far", self.first, sent, started.elapsed().as_secs_f64()));
                told_at += Duration::from_secs(60);
            }
        }
        self.sender.commit();
    }

    /// What the GPU counted: checked, torn, lost, late.
    fn finish(&self) -> [u64; 4] {
        self.stream.finish(PATIENCE).unwrap();
        let of = |word| (0..READERS as usize).map(move |reader| self.reports.get(reader, word));
        assert!(of(0).all(|state| state == 2), "a warp did not report");
        let counts = [1, 2, 3, 4].map(|word| of(word).sum::<u64>());
        if counts != [self.count, 0, 0, 0] {
            println!("  the first that was wrong: {}", of(5).min().unwrap());
        }
        counts
    }
}

#[test]
fn soak_to_the_gpu() {
    let Some(session) = session() else { return };
    let channels: u64 = from_env("GDRCOPY_SOAK_CHANNELS", 1);
    // Whole blocks of 32 for each reader.
    let (first, each) = (first(), (count() / channels).max(1).next_multiple_of(u64::from(READERS) * 32));
    let module = module();
    let start = |channel: u64| Soak::start(&session, &module, first + channel * each, each);
    let mut soaks: Vec<Soak<'_>> = (0..channels).map(start).collect();
    let started = Instant::now();
    thread::scope(|scope| {
        for soak in &mut soaks {
            scope.spawn(|| soak.send());
        }
    });
    let counted: Vec<[u64; 4]> = soaks.iter().map(Soak::finish).collect();
    let seconds = started.elapsed().as_secs_f64();
    let [checked, torn, lost, late] = [0, 1, 2, 3].map(|what| counted.iter().map(|counts| counts[what]).sum::<u64>());
    println!(
        "{} by {channels} channels; checked by the GPU {checked}: {torn} torn, {lost} in the place of lost ones, {late} doubled \
         or out of order",
        told(c"to the GPU", first, channels * each, seconds)
    );
    assert_eq!((checked, torn, lost, late), (channels * each, 0, 0, 0));
}

#[test]
fn soak_to_the_host() {
    let Some(session) = session() else { return };
    let (first, count) = (first(), (count() / 20).next_multiple_of(8).max(8));
    let module = module();
    let (sender, mut receiver) = numbered(first).lines_to_host(1 << 14).open(&session).unwrap();
    let more = [first, count];
    let stream = launch_checked(&module, c"pour", 1, &sender.device(), &more, || sender.kernel_has_started());
    let started = Instant::now();
    for number in first..first + count {
        let found = receiver.recv_line(PATIENCE).unwrap();
        assert!(found == words_of(number).as_bytes(), "message {number}: {found:x?}");
    }
    let seconds = started.elapsed().as_secs_f64();
    assert!(matches!(receiver.recv_line(PATIENCE), Err(ChannelError::KernelGone)), "one too many");
    stream.finish(PATIENCE).unwrap();
    println!("{}; checked by the CPU, each the one that was due", told(c"to the host", first, count, seconds));
}
