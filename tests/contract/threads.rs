//! Many threads on one session, one buffer and one mapping.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use gdrcopy::DeviceRange;

use crate::common::subject::{Subject, assert_same, downloaded, pattern};

const THREADS: usize = 4;
/// Odd, so that neighbours share lines and words.
const SHARE: usize = 5003;
const ROUNDS: usize = 100;

/// Counts a thread as long as it runs, so that one that fails keeps nobody waiting.
struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(crate) fn threads_copy_pin_and_map_at_once(subject: &Subject) {
    subject.for_each_buffer((THREADS + 2) * SHARE, |session, buffer, what| {
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        let (writing, cycles) = (AtomicUsize::new(THREADS), AtomicUsize::new(0));
        let (mapping, buffer) = (&mapping, &buffer);
        thread::scope(|scope| {
            let (writing, cycles) = (&writing, &cycles);
            for share in 0..THREADS {
                scope.spawn(move || {
                    let _running = Running(writing);
                    let mut seen = vec![0; SHARE];
                    for round in 0..ROUNDS {
                        let bytes = pattern(share * ROUNDS + round, SHARE);
                        let step = 1 + round * 61 % 1000;
                        for (at, piece) in bytes.chunks(step).enumerate() {
                            mapping.write(share * SHARE + at * step, piece).unwrap();
                        }
                        mapping.read(share * SHARE, &mut seen).unwrap();
                        assert_same(&seen, &bytes, "a thread's own share");
                    }
                });
            }
            // Two more threads come and go with windows and memory of their own.
            for share in THREADS..THREADS + 2 {
                scope.spawn(move || {
                    let mut number = 0;
                    while writing.load(Ordering::Acquire) > 0 || number < 10 {
                        let range = share * SHARE..(share + 1) * SHARE;
                        let pinned = session.pin(DeviceRange::from(buffer).slice(range).unwrap()).unwrap();
                        let own = pinned.map().unwrap();
                        let bytes = pattern(share + number, SHARE);
                        own.write(0, &bytes).unwrap();
                        let mut seen = vec![0; SHARE];
                        own.read(0, &mut seen).unwrap();
                        assert_same(&seen, &bytes, "a window that comes and goes");
                        let fresh = session.alloc_as(subject.gpu, SHARE, buffer.allocator()).unwrap();
                        session.pin(&fresh).unwrap().map().unwrap().write(0, &bytes).unwrap();
                        assert_same(&downloaded(&fresh), &bytes, "memory that comes and goes");
                        number += 1;
                        cycles.fetch_add(1, Ordering::Relaxed);
                    }
                    let last = pattern(ROUNDS * THREADS + share, SHARE);
                    mapping.write(share * SHARE, &last).unwrap();
                });
            }
        });
        assert!(cycles.load(Ordering::Relaxed) >= 20, "{what}");
        let last = |share| {
            let seed = if share < THREADS { share * ROUNDS + ROUNDS - 1 } else { ROUNDS * THREADS + share };
            pattern(seed, SHARE)
        };
        let wanted: Vec<u8> = (0..THREADS + 2).flat_map(last).collect();
        assert_same(&downloaded(buffer), &wanted, what);
    });
}
