//! What only emulated GPUs can show: faults on request, exhaustion, several GPUs, and the death by SIGBUS.

#![allow(unsafe_code, reason = "raw memory that is freed under its mappings")]

use gdrcopy::emulated::{Emulated, EmulatedConfig, FaultAt, Live};
use gdrcopy::{Allocator, DeviceRange, ErrorKind, GpuAddr, MemoryKind, Session};

use crate::common::fork::{Ended, fork};
use crate::common::subject::{alone, emulated, pattern, shared};

const BYTES: usize = 70_000;

fn open(config: EmulatedConfig) -> Session {
    emulated(config).open().unwrap()
}

fn gpus(session: &Session) -> &Emulated {
    session.emulated().expect("the backend asked for")
}

/// A raw block as a range. The tests account for what freeing it does.
fn range(addr: GpuAddr, bytes: usize) -> DeviceRange<'static> {
    // SAFETY: the mappings of it are gone before it is freed, or the test is about that.
    unsafe { DeviceRange::from_raw(addr, bytes).unwrap() }
}

#[test]
fn an_injected_fault_is_reported_once_and_leaves_nothing_behind() {
    shared(|| {
        let session = open(EmulatedConfig::default());
        let gpus = gpus(&session);
        let buffer = session.alloc(BYTES).unwrap();
        let live = || gpus.live();
        let one = Live { allocations: 1, ..Live::default() };
        for kind in [ErrorKind::Busy, ErrorKind::OutOfMemory, ErrorKind::Io(libc::EIO)] {
            gpus.fail_next(FaultAt::Alloc, kind);
            assert_eq!(session.alloc(BYTES).unwrap_err().kind(), kind);
            assert_eq!(live(), one);
            gpus.fail_next(FaultAt::Alloc, kind);
            assert_eq!(gpus.alloc_raw(0, BYTES).unwrap_err().kind(), kind);
            assert_eq!(live(), one);

            gpus.fail_next(FaultAt::Pin, kind);
            assert_eq!(session.pin(&buffer).unwrap_err().kind(), kind);
            assert_eq!(live(), one);

            let pinned = session.pin(&buffer).unwrap();
            gpus.fail_next(FaultAt::Map, kind);
            assert_eq!(pinned.map().unwrap_err().kind(), kind);
            assert!(!pinned.is_mapped(), "so that it can be tried again");
            assert_eq!(live(), Live { pins: 1, ..one });

            let mapping = pinned.map().unwrap();
            assert_eq!(live().windows, 1);
            gpus.fail_next(FaultAt::Unmap, kind);
            assert_eq!(mapping.unmap().unwrap_err().kind(), kind);
            assert!(!pinned.is_mapped());
            assert_eq!(live(), Live { pins: 1, ..one });

            gpus.fail_next(FaultAt::Unpin, kind);
            let failed = pinned.unpin().unwrap_err();
            assert_eq!(failed.error().kind(), kind);
            assert!(failed.into_pinned().is_none(), "it is gone");
            assert_eq!(live(), one);

            // A block that could not be freed is still there, and can be.
            let block = gpus.alloc_raw(0, BYTES).unwrap();
            gpus.fail_next(FaultAt::Free, kind);
            assert_eq!(gpus.free_raw(block).unwrap_err().kind(), kind);
            assert_eq!(live(), Live { allocations: 2, ..one });
            gpus.free_raw(block).unwrap();
            assert_eq!(live(), one);
        }
    });
}

#[test]
fn what_a_drop_could_not_return_is_returned_by_close() {
    shared(|| {
        let at = |at: FaultAt, kind: ErrorKind| {
            let session = open(EmulatedConfig::default());
            let buffer = session.alloc(BYTES).unwrap();
            let pinned = session.pin(&buffer).unwrap();
            let mapping = pinned.map().unwrap();
            gpus(&session).fail_next(at, kind);
            drop(mapping);
            drop(pinned);
            drop(buffer);
            let failed = session.close().unwrap_err();
            assert_eq!(failed.error().kind(), kind);
            assert!(failed.into_session().is_none(), "it is closed all the same");
        };
        at(FaultAt::Unmap, ErrorKind::Busy);
        at(FaultAt::Unpin, ErrorKind::Io(libc::EIO));
        at(FaultAt::Free, ErrorKind::PermissionDenied);
    });
}

#[test]
fn a_full_bar1_says_how_full() {
    shared(|| {
        let session = open(EmulatedConfig::default().bar1_bytes(1 << 20));
        let buffer = session.alloc(2 << 20).unwrap();
        let part =
            |start: usize, end: usize| session.pin(DeviceRange::from(&buffer).slice(start..end).unwrap()).unwrap();
        let first = part(0, 700_416).map().unwrap();
        let bar1 = session.gpus().unwrap()[0].bar1.unwrap();
        assert_eq!((bar1.used_bytes, bar1.total_bytes), (700_416, 1 << 20));

        let second = part(0, 400_000);
        let full = second.map().unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Bar1Exhausted);
        assert!(full.to_string().contains("BAR1: 700416 of 1048576 bytes are in use; unmap other windows"), "{full}");
        assert_eq!(gpus(&session).live().bar1_bytes, 700_416, "a refusal takes nothing");
        drop(first);
        assert_eq!(gpus(&session).live().bar1_bytes, 0);
        second.map().unwrap().write(399_999, &[1]).unwrap();
        // Exactly full is not too full.
        let whole = part(0, 1 << 20).map().unwrap();
        assert_eq!(part(0, 1).map().unwrap_err().kind(), ErrorKind::Bar1Exhausted);
        drop(whole);
    });
}

#[test]
fn bar1_is_each_gpu_s_own() {
    shared(|| {
        let session = open(EmulatedConfig::default().gpus(2).bar1_bytes(1 << 20));
        let buffers = [0, 1].map(|gpu| session.alloc_on(gpu, 1 << 20).unwrap());
        let _windows = buffers.each_ref().map(|buffer| session.pin(buffer).unwrap().map().unwrap());
        assert_eq!(gpus(&session).live().bar1_bytes, 2 << 20);
    });
}

#[test]
fn gpus_are_isolated() {
    shared(|| {
        const GPUS: usize = 5;
        let session = open(EmulatedConfig::default().gpus(GPUS));
        let found = session.gpus().unwrap();
        assert_eq!(found.iter().map(|gpu| gpu.ordinal).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        for how in [Allocator::Buffer, Allocator::CuMemAlloc] {
            let buffers: Vec<_> = (0..GPUS).map(|gpu| session.alloc_as(gpu, BYTES, how).unwrap()).collect();
            let maps: Vec<_> = buffers.iter().map(|buffer| session.pin(buffer).unwrap().map().unwrap()).collect();
            let used = session.gpus().unwrap().into_iter().map(|gpu| gpu.bar1.unwrap().used_bytes);
            assert_eq!(used.collect::<Vec<_>>(), [u64::try_from(maps[0].facts().window_bytes).unwrap(); GPUS], "{how}");
            for (gpu, mapping) in maps.iter().enumerate() {
                mapping.write(0, &pattern(gpu, BYTES)).unwrap();
            }
            for (gpu, buffer) in buffers.iter().enumerate() {
                let mut seen = vec![0; BYTES];
                buffer.download(0, &mut seen).unwrap();
                assert!(seen == pattern(gpu, BYTES), "GPU {gpu}, {how}");
                assert_eq!(buffer.ordinal(), gpu);
                assert!(buffers.iter().filter(|other| other.addr() == buffer.addr()).count() == 1, "{buffers:?}");
            }
        }
        let absent = session.alloc_on(GPUS, 64).unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::NoDevice);
        assert!(absent.to_string().contains("no emulated GPU 5; choose 0 to 4"), "{absent}");
        assert_eq!(gpus(&session).alloc_raw(usize::MAX, 64).unwrap_err().kind(), ErrorKind::NoDevice);
    });
}

#[test]
fn each_session_has_gpus_of_its_own() {
    shared(|| {
        let (mine, theirs) = (open(EmulatedConfig::default()), open(EmulatedConfig::default()));
        let foreign = ErrorKind::UnsupportedMemory(MemoryKind::Foreign);
        for how in [Allocator::Buffer, Allocator::CuMemAlloc] {
            let (buffer, other) = (mine.alloc_as(0, BYTES, how).unwrap(), theirs.alloc_as(0, BYTES, how).unwrap());
            let error = theirs.pin(&buffer).unwrap_err();
            assert_eq!(error.kind(), foreign, "{error}");
            assert!(error.to_string().contains("; use the session that allocated it"), "{error}");
            let mut byte = [0];
            assert_eq!(gpus(&theirs).device_read(buffer.addr(), &mut byte).unwrap_err().kind(), foreign);
            assert_eq!(gpus(&theirs).device_write(buffer.addr(), &byte).unwrap_err().kind(), foreign);
            assert_eq!(gpus(&theirs).free_raw(buffer.addr()).unwrap_err().kind(), foreign);
            mine.pin(&buffer).unwrap().map().unwrap();
            drop(other);
        }
        // Addresses that no emulated GPU has are nobody's.
        for addr in [1, 1 << 40, 1 << 63] {
            let error = mine.pin(range(GpuAddr::new(addr), 1)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), "{error}");
        }
    });
}

#[test]
fn device_memory_runs_out_and_comes_back() {
    shared(|| {
        let session = open(EmulatedConfig::default().gpus(2).memory_bytes(1 << 20));
        let half = session.alloc(512 << 10).unwrap();
        let full = session.alloc((512 << 10) + 1).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::OutOfMemory);
        assert!(full.to_string().contains("GPU 0 of 1048576 bytes has no room for 524289 bytes"), "{full}");
        let other = session.alloc(512 << 10).unwrap();
        assert_eq!(session.alloc(1).unwrap_err().kind(), ErrorKind::OutOfMemory);
        session.alloc_on(1, 1 << 20).unwrap();
        drop(half);
        session.alloc(512 << 10).unwrap();
        drop(other);
        for bytes in [1 << 40, usize::MAX / 2] {
            assert_eq!(session.alloc(bytes).unwrap_err().kind(), ErrorKind::OutOfMemory);
        }
        assert_eq!(gpus(&session).live(), Live::default());
    });
}

/// Freed memory stays in use while it is pinned, unless the backend takes it away from its mappings.
#[test]
fn pinned_memory_is_used_until_it_is_unpinned() {
    shared(|| {
        let config = EmulatedConfig::default().memory_bytes(1 << 20);
        for (config, is_kept) in [(config.clone(), true), (config.sigbus_after_free(), false)] {
            let session = open(config);
            let buffer = session.alloc(1 << 20).unwrap();
            let mapping = session.pin(range(buffer.addr(), 1)).unwrap().map().unwrap();
            buffer.free().unwrap();
            let next = session.alloc(1 << 20).map_err(|error| error.kind());
            assert_eq!(next.err(), is_kept.then_some(ErrorKind::OutOfMemory));
            drop(mapping);
            session.alloc(1 << 20).unwrap();
        }
    });
}

#[test]
fn raw_blocks_are_checked_to_the_byte() {
    shared(|| {
        let session = open(EmulatedConfig::default());
        let gpus = gpus(&session);
        let (first, second) = (gpus.alloc_raw(0, 1000).unwrap(), gpus.alloc_raw(0, 1000).unwrap());
        assert_eq!(second.offset_from(first), Some(1024), "small blocks lie side by side");
        let pin = |addr: GpuAddr, len| session.pin(range(addr, len)).map(drop).map_err(|error| error.kind());
        let after = |bytes| first.checked_add(bytes).unwrap();
        assert_eq!(pin(first, 1000), Ok(()));
        assert_eq!(pin(after(999), 1), Ok(()));
        assert_eq!(pin(first, 1001), Err(ErrorKind::OutOfBounds));
        let unallocated = Err(ErrorKind::UnsupportedMemory(MemoryKind::Unallocated));
        assert_eq!(pin(after(1000), 1), unallocated, "between two blocks");
        assert_eq!(pin(after(1024 + 1000), 1), unallocated, "after the last one");

        // Neighbours share pages, and a mapping writes its own bytes alone.
        gpus.device_write(second, &pattern(1, 1000)).unwrap();
        let mapping = session.pin(range(first, 1000)).unwrap().map().unwrap();
        mapping.write(0, &pattern(2, 1000)).unwrap();
        let mut seen = vec![0; 1000];
        gpus.device_read(second, &mut seen).unwrap();
        assert!(seen == pattern(1, 1000), "the neighbour's bytes");
        gpus.device_read(first, &mut seen).unwrap();
        assert!(seen == pattern(2, 1000), "its own bytes");
        drop(mapping);
        gpus.free_raw(first).unwrap();
        assert_eq!(gpus.free_raw(first).map_err(|error| error.kind()), unallocated, "freed twice");
        assert_eq!(gpus.free_raw(after(1024 + 8)).map_err(|error| error.kind()), unallocated, "not its start");
        gpus.free_raw(second).unwrap();
        assert_eq!(gpus.live(), Live::default());
    });
}

/// Loads and stores through a mapping of freed memory end the process, by that signal and no other.
#[test]
fn touching_revoked_memory_is_sigbus() {
    alone(|| {
        let touch = |how: fn(&gdrcopy::Mapping<'_>)| {
            fork(|| {
                let session = open(EmulatedConfig::default().sigbus_after_free());
                let block = gpus(&session).alloc_raw(0, BYTES).unwrap();
                let mapping = session.pin(range(block, BYTES)).unwrap().map().unwrap();
                how(&mapping);
                gpus(&session).free_raw(block).unwrap();
                how(&mapping);
            })
        };
        assert_eq!(touch(|mapping| mapping.write(0, b"store").unwrap()), Ended::Killed(libc::SIGBUS));
        assert_eq!(touch(|mapping| mapping.read(BYTES - 9, &mut [0; 9]).unwrap()), Ended::Killed(libc::SIGBUS));
        assert_eq!(touch(|mapping| assert_eq!(mapping.len(), BYTES)), Ended::Well);
    });
}

/// A window that was unmapped before its memory is freed must not be revoked: its addresses are somebody else's.
#[test]
fn only_live_windows_are_revoked() {
    shared(|| {
        let session = open(EmulatedConfig::default().sigbus_after_free());
        let (block, kept) = (gpus(&session).alloc_raw(0, BYTES).unwrap(), gpus(&session).alloc_raw(0, BYTES).unwrap());
        let gone = session.pin(range(block, BYTES)).unwrap().map().unwrap();
        let place = gone.as_ptr();
        gone.unmap().unwrap();
        // As often as not the kernel hands out the same addresses again.
        let next = session.pin(range(kept, BYTES)).unwrap().map().unwrap();
        let reused = next.as_ptr().addr().abs_diff(place.addr()) < BYTES;
        gpus(&session).free_raw(block).unwrap();
        next.write(0, &pattern(1, BYTES)).unwrap();
        let mut seen = vec![0; BYTES];
        next.read(0, &mut seen).unwrap();
        assert!(seen == pattern(1, BYTES), "reused addresses: {reused}");
    });
}
