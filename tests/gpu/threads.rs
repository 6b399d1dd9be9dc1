//! Kernels that occupy the device, threads without a context, and copies that ask nobody.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gdrcopy::{Allocator, RmLevel};

use crate::support::{self, Spinning, pattern};

/// In a process of its own, so that everything that is done once is done while the kernel spins.
#[test]
fn pin_map_and_copy_beside_a_spinning_kernel() {
    if support::session(RmLevel::Ipc).is_none() {
        return;
    }
    for how in ["cuMemAlloc", "cuMemCreate", "buffer"] {
        let output = support::alone("threads::beside_a_spinning_kernel", &[("GDRCOPY_TEST_SPIN", how)]);
        support::assert_success(&output);
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn beside_a_spinning_kernel() {
    let Ok(how) = std::env::var("GDRCOPY_TEST_SPIN") else { return };
    let how: Allocator = how.parse().unwrap();
    let session = support::session(RmLevel::Ipc).unwrap();
    let buffer = session.alloc_as(0, 70000, how).unwrap();
    buffer.make_current().unwrap();
    let spinning = Spinning::start();
    let started = Instant::now();
    let pinned = session.pin(&buffer).unwrap();
    let pin = started.elapsed();
    let mapping = pinned.map().unwrap();
    let map = started.elapsed() - pin;
    let data = pattern(5, 70000);
    mapping.write(0, &data).unwrap();
    let mut seen = vec![0; 70000];
    mapping.read(0, &mut seen).unwrap();
    assert!(seen == data);
    mapping.unmap().unwrap();
    pinned.unpin().unwrap();
    assert!(spinning.still(), "the kernel held the default stream all the time");
    println!("{how}: first pin {pin:?}, map {map:?}, all in {:?}, beside a spinning kernel", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(5));
    drop(spinning);
}

#[test]
fn a_thread_without_a_context_keeps_none() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    let current = || {
        let mut context = std::ptr::null_mut();
        unsafe { support::check(sys::cuCtxGetCurrent(&mut context)) };
        context
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for how in [Allocator::Buffer, Allocator::CuMemAlloc] {
                let buffer = session.alloc_as(0, 4096, how).unwrap();
                assert!(current().is_null(), "after alloc");
                let pinned = session.pin(&buffer).unwrap();
                assert!(current().is_null(), "after pin");
                let mapping = pinned.map().unwrap();
                assert!(current().is_null(), "after map");
                mapping.write(0, b"bytes").unwrap();
                drop(mapping);
                drop(pinned);
                buffer.upload(0, b"bytes").unwrap();
                buffer.free().unwrap();
                assert!(current().is_null(), "after free");
            }
        });
    });
}

#[test]
fn many_threads_copy_through_one_mapping() {
    let Some(session) = support::session(RmLevel::Vmm) else { return };
    let buffer = session.alloc(1 << 20).unwrap();
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_usize {
            let (mapping, session) = (&mapping, &session);
            scope.spawn(move || {
                let start = thread * (1 << 17);
                for round in 0..300_usize {
                    let len = 1 + (round * 37 + thread) % 1000;
                    let data = pattern((thread * 1000 + round) as u64, len);
                    mapping.write(start + round, &data).unwrap();
                    let mut seen = vec![0; len];
                    mapping.read(start + round, &mut seen).unwrap();
                    assert_eq!(seen, data);
                    if round % 50 == 0 {
                        let other = session.alloc(100).unwrap();
                        let window = session.pin(&other).unwrap().map().unwrap();
                        window.write(0, &data[..1]).unwrap();
                    }
                }
            });
        }
    });
}
