//! Many threads on one session, one buffer and one mapping.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crate::range::DeviceRange;
use crate::tool::sanity::bench::{Bench, Step, Stop, downloaded, ensure, filled, same};

const THREADS: usize = 4;
/// Odd, so that neighbours share lines and words.
const SHARE: usize = 5003;

fn joined(handles: Vec<ScopedJoinHandle<'_, Step>>) -> Step {
    let mut outcome = Ok(());
    for handle in handles {
        let ended = handle.join().unwrap_or_else(|_| Err(Stop::Failed("a thread panicked".to_owned())));
        outcome = outcome.and(ended);
    }
    outcome
}

fn seed(share: usize, round: usize) -> u64 {
    u64::try_from(share * 1_000_003 + round).unwrap_or(0)
}

pub(crate) fn thread_copies(bench: &Bench) -> Step {
    const ROUNDS: usize = 100;

    let session = bench.open()?;
    let mapped = bench.mapped(&session, THREADS * SHARE, 1)?;
    let mapping = &mapped.mapping;
    thread::scope(|scope| {
        let work = |share: usize| {
            scope.spawn(move || -> Step {
                let mut seen = vec![0; SHARE];
                for round in 0..ROUNDS {
                    let bytes = filled(SHARE, seed(share, round));
                    let step = 1 + round * 61 % 1000;
                    for (number, piece) in bytes.chunks(step).enumerate() {
                        mapping.write(share * SHARE + number * step, piece)?;
                    }
                    mapping.read(share * SHARE, &mut seen)?;
                    same(&seen, &bytes, &format!("thread {share}, round {round}"))?;
                }
                Ok(())
            })
        };
        joined((0..THREADS).map(work).collect())
    })?;
    let wanted: Vec<u8> = (0..THREADS).flat_map(|share| filled(SHARE, seed(share, ROUNDS - 1))).collect();
    same(&downloaded(&mapped.buffer)?, &wanted, "the device after all threads")
}

pub(crate) fn thread_pins(bench: &Bench) -> Step {
    pins(bench, Duration::ZERO)
}

pub(crate) fn thread_soak(bench: &Bench) -> Step {
    pins(bench, Duration::from_secs(10))
}

/// At least twenty rounds of each thread, and as many as fit in the time.
fn pins(bench: &Bench, time: Duration) -> Step {
    const ROUNDS: usize = 20;

    let session = bench.open()?;
    let buffer = bench.buffer(&session, THREADS * SHARE)?;
    let (session, buffer, rounds) = (&session, &buffer, AtomicUsize::new(0));
    let (begin, rounds) = (Instant::now(), &rounds);
    thread::scope(|scope| {
        let work = |share: usize| {
            scope.spawn(move || -> Step {
                let mut round = 0;
                while round < ROUNDS || begin.elapsed() < time {
                    let bytes = filled(SHARE, seed(share, round));
                    let part = DeviceRange::from(buffer).slice(share * SHARE..(share + 1) * SHARE)?;
                    let pinned = session.pin(part)?;
                    let mapping = pinned.map()?;
                    mapping.write(0, &bytes)?;
                    let mut seen = vec![0; SHARE];
                    mapping.read(0, &mut seen)?;
                    same(&seen, &bytes, &format!("a window of thread {share}, round {round}"))?;
                    mapping.unmap()?;
                    pinned.unpin()?;
                    let own = session.alloc_as(bench.gpu(), SHARE, bench.how)?;
                    session.pin(&own)?.map()?.write(0, &bytes)?;
                    same(&downloaded(&own)?, &bytes, &format!("a buffer of thread {share}, round {round}"))?;
                    round += 1;
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        joined((0..THREADS).map(work).collect())
    })?;
    let done = rounds.load(Ordering::Relaxed);
    ensure!(done >= THREADS * ROUNDS, "only {done} rounds were made");
    Ok(())
}
