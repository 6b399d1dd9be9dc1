//! Stores and loads allocate nothing.

#![allow(unsafe_code, reason = "copies take raw pointers")]

mod common;

use common::counting::{Counting, calls_during};
use gdrcopy::copy;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_counter_counts() {
    assert_eq!(calls_during(|| drop(std::hint::black_box(vec![0_u8; 64]))), 2);
}

#[test]
fn copies_allocate_nothing() {
    const BYTES: usize = 8192;
    // Page-aligned, so that offsets near the end of the first page reach the path for parts at a page boundary.
    #[repr(align(4096))]
    struct Pages([u8; BYTES]);
    let (host, mut device) = (Box::new(Pages([0x5A; BYTES])), Box::new(Pages([0; BYTES])));
    let mut back = Box::new(Pages([0; BYTES]));
    let device = device.0.as_mut_ptr();

    for routine in copy::routines().iter().filter(|routine| routine.is_available()) {
        let calls = calls_during(|| {
            for at in [0, 1, 8, 63, 4033, 4095] {
                for len in (0..300).chain([BYTES - at]) {
                    for host_at in [0, 5, 4070, 4095] {
                        let len = len.min(BYTES - host_at).min(BYTES - at);
                        let there = device.wrapping_add(at);
                        // SAFETY: available; both ranges lie in their buffers, which nothing else borrows.
                        unsafe { routine.store(there, &host.0[host_at..host_at + len]) };
                        // SAFETY: as above; the device buffer is whole pages.
                        unsafe { routine.load(&mut back.0[host_at..host_at + len], there) };
                    }
                }
            }
            // SAFETY: available; the buffer starts on a page.
            unsafe { routine.post_line(device, &[1; 64]) };
        });
        assert_eq!(calls, 0, "{routine:?}");
    }
}
