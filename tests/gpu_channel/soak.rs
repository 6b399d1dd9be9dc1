//! Soaks: numbered messages of one line, each checked at the other end.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use gdrcopy::channel::{ChannelBuilder, ChannelError};
use gdrcopy::cuda::{Module, parameter_bytes};
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

#[test]
fn soak_to_the_gpu() {
    let Some(session) = session() else { return };
    // Whole blocks of 32 for each reader.
    let (first, count) = (first(), count().max(1).next_multiple_of(u64::from(READERS) * 32));
    let module = module();
    // Dropped after the channel, which ends the kernel: freeing this waits for it.
    let reports = Reports::new(READERS as usize);
    let (mut sender, _receiver) = numbered(first).readers(READERS).lines_to_gpu(1 << 14).open(&session).unwrap();
    let more = [first, count, u64::MAX, reports.addr()];
    let stream = launch_checked(&module, c"soak", READERS, &sender.device(), &more, || sender.kernel_has_started());
    let mut payloads = vec![[0; 48]; BATCH as usize];
    let (started, mut told_at) = (Instant::now(), Duration::from_secs(60));
    let mut sent = 0;
    while sent < count {
        let now = (count - sent).min(BATCH);
        let batch = &mut payloads[..now as usize];
        fill(batch, first + sent..);
        let mut left = &batch[..];
        while let Some(next) = left.first() {
            let taken = sender.try_send_lines(left).unwrap();
            if taken == 0 {
                // Waits, for a limited time.
                sender.send_line(next, PATIENCE).unwrap();
            }
            left = &left[taken.max(1)..];
        }
        sent += now;
        if sent % (BATCH << 16) == 0 && started.elapsed() > told_at {
            println!("  {}", told(c"so far", first, sent, started.elapsed().as_secs_f64()));
            told_at += Duration::from_secs(60);
        }
    }
    sender.commit();
    stream.finish(PATIENCE).unwrap();
    let seconds = started.elapsed().as_secs_f64();
    let sum = |word| (0..READERS as usize).map(|reader| reports.get(reader, word)).sum::<u64>();
    let [checked, torn, lost, late] = [1, 2, 3, 4].map(sum);
    let first_wrong = (0..READERS as usize).map(|reader| reports.get(reader, 5)).min().unwrap();
    println!(
        "{}; checked by the GPU {checked}: {torn} torn, {lost} in the place of lost ones, {late} doubled or out of order",
        told(c"to the GPU", first, count, seconds)
    );
    assert!((0..READERS as usize).all(|reader| reports.get(reader, 0) == 2), "a warp did not report");
    assert_eq!((checked, torn, lost, late), (count, 0, 0, 0), "the first that was wrong: {first_wrong}");
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
