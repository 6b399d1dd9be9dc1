//! Nothing is left behind.

use gdrcopy::{Allocator, RmLevel, Session};

use crate::support;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn windows() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

fn bar1(session: &Session) -> Option<u64> {
    session.gpus().unwrap()[0].bar1.map(|bar1| bar1.used_bytes)
}

#[test]
fn a_thousand_cycles_leave_nothing() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    for how in [Allocator::Buffer, Allocator::CuMemAlloc] {
        let buffer = session.alloc_as(0, 5 << 20, how).unwrap();
        let cycle = |count: usize| {
            for _ in 0..count {
                let pinned = session.pin(&buffer).unwrap();
                let mapping = pinned.map().unwrap();
                mapping.store_u32(0, 1).unwrap();
                mapping.unmap().unwrap();
                pinned.unpin().unwrap();
            }
        };
        cycle(50);
        let before = (descriptors(), resident_kib(), windows(), bar1(&session));
        cycle(1000);
        let after = (descriptors(), resident_kib(), windows(), bar1(&session));
        println!("{how}: fds, KiB resident, maps, BAR1 bytes: {before:?}, after 1000 cycles {after:?}");
        assert_eq!(before.0, after.0);
        assert!(after.1 < before.1 + 1024);
        assert_eq!(before.2, after.2);
        assert_eq!(before.3, after.3);
    }
}

#[test]
fn sessions_and_buffers_come_and_go() {
    let Some(first) = support::session(RmLevel::Vmm) else { return };
    let cycle = |count: usize| {
        for _ in 0..count {
            let session = support::session(RmLevel::Vmm).unwrap();
            let buffer = session.alloc(100).unwrap();
            let mapping = session.pin(&buffer).unwrap().map().unwrap();
            mapping.store_u32(0, 1).unwrap();
            drop(mapping);
            buffer.upload(0, &[1; 100]).unwrap();
            buffer.free().unwrap();
            session.close().unwrap();
        }
    };
    cycle(10);
    let before = (descriptors(), resident_kib(), windows(), bar1(&first));
    cycle(100);
    let after = (descriptors(), resident_kib(), windows(), bar1(&first));
    println!("fds, KiB resident, maps, BAR1 bytes: {before:?}, after 100 sessions {after:?}");
    assert_eq!(before.0, after.0);
    assert!(after.1 < before.1 + 4096);
    assert_eq!(before.3, after.3);
}
