//! What set-up costs.

use std::time::{Duration, Instant};

use gdrcopy::{Allocator, RmLevel};

use crate::support::{self, median};

#[test]
fn pin_and_map_costs() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    println!("median of 21: allocator, bytes, pin, map, unmap+unpin");
    for how in [Allocator::Buffer, Allocator::CuMemAlloc] {
        for bytes in [4096, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            let buffer = session.alloc_as(0, bytes, how).unwrap();
            buffer.upload(0, &support::pattern(1, 4096)).unwrap();
            let pin = median(21, || drop(session.pin(&buffer).unwrap()));
            let pinned = session.pin(&buffer).unwrap();
            let (mut maps, mut unmaps) = (Vec::new(), Vec::new());
            for _ in 0..21 {
                let started = Instant::now();
                let mapping = pinned.map().unwrap();
                maps.push(started.elapsed());
                let started = Instant::now();
                mapping.unmap().unwrap();
                unmaps.push(started.elapsed());
            }
            maps.sort();
            unmaps.sort();
            println!("{how:>10} {bytes:>9} {pin:>10.1?} {:>10.1?} {:>10.1?}", maps[10], unmaps[10]);
            if bytes == 64 << 20 {
                assert!(maps[10] <= Duration::from_micros(200), "mapping 64 MiB takes {:?}", maps[10]);
            }
        }
    }
}

/// In a process of its own: from a session to the first byte, beyond CUDA's own start.
#[test]
fn from_open_to_first_byte() {
    if support::session(RmLevel::Vmm).is_none() {
        return;
    }
    for how in ["buffer", "cuMemAlloc"] {
        let output = support::alone("costs::first_byte", &[("GDRCOPY_TEST_FIRST", how)]);
        support::assert_success(&output);
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn first_byte() {
    let Ok(how) = std::env::var("GDRCOPY_TEST_FIRST") else { return };
    let how: Allocator = how.parse().unwrap();
    // CUDA's own start: driver, primary context, an allocation.
    let started = Instant::now();
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let cuda = started.elapsed();
    let started = Instant::now();
    let session = support::session(RmLevel::Ipc).unwrap();
    let open = started.elapsed();
    let buffer = session.alloc_as(0, 4096, how).unwrap();
    let alloc = started.elapsed();
    let pinned = session.pin(&buffer).unwrap();
    let pin = started.elapsed();
    let mapping = pinned.map().unwrap();
    mapping.store_u32(0, 1).unwrap();
    let all = started.elapsed();
    println!(
        "{how}: CUDA's start {cuda:.1?}; open {open:.1?}, +alloc {alloc:.1?}, +pin {pin:.1?}, first byte {all:.1?}"
    );
    assert!(all <= Duration::from_millis(20), "{all:?}");
}
