//! Pins, mappings, buffers and sessions end in any order and leave nothing behind.

use std::sync::Arc;
use std::time::Instant;

use gdrcopy::{AfterFree, DeviceBuffer, DeviceRange, Error, ErrorKind, Mapping, Pinned, Session};

use crate::common::subject::{Subject, downloaded};

const BYTES: usize = 70_000;

const fn assert_shared<T: Send + Sync>() {}
const _: () = assert_shared::<Mapping<'static>>();
const _: () = assert_shared::<Pinned<'static>>();
const _: () = assert_shared::<DeviceBuffer>();
const _: () = assert_shared::<DeviceRange<'static>>();
const _: () = assert_shared::<Session>();
const _: () = assert_shared::<Error>();

pub(crate) fn a_pin_has_one_mapping_at_a_time(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let pinned = session.pin(&buffer).unwrap();
        assert!(!pinned.is_mapped(), "{what}");
        let first = pinned.map().unwrap();
        assert!(pinned.is_mapped(), "{what}");
        for _ in 0..2 {
            assert_eq!(pinned.map().unwrap_err().kind(), ErrorKind::AlreadyMapped, "{what}");
        }
        first.write(0, b"first").unwrap();
        drop(first);
        assert!(!pinned.is_mapped(), "{what}");
        let second = pinned.map().unwrap();
        let mut seen = [0; 5];
        second.read(0, &mut seen).unwrap();
        assert_eq!(&seen, b"first", "{what}");
        second.unmap().unwrap();
        pinned.map().unwrap().write(0, b"third").unwrap();
        assert_eq!(&downloaded(&buffer)[..5], b"third", "{what}");
        pinned.unpin().unwrap();
    });
}

pub(crate) fn a_mapped_pin_comes_back_from_unpin(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let pinned = session.pin(&buffer).unwrap();
        let mapping = pinned.map().unwrap();
        let refused = pinned.unpin().unwrap_err();
        assert_eq!(refused.error().kind(), ErrorKind::Mapped, "{what}");
        let pinned = refused.into_pinned().expect("the pin comes back");
        assert_eq!((pinned.addr(), pinned.len()), (buffer.addr(), BYTES), "{what}");
        assert!(pinned.is_mapped(), "{what}");
        mapping.write(0, b"on").unwrap();
        assert_eq!(&downloaded(&buffer)[..2], b"on", "{what}");
        drop(mapping);
        pinned.unpin().unwrap();
    });
}

pub(crate) fn handles_drop_in_any_order(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        // All orders of giving up pin, buffer and session before the mapping.
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut session = Some(subject.session());
            let mut owner =
                Some(Arc::new(session.as_ref().unwrap().alloc_as(subject.gpu, BYTES, buffer.allocator()).unwrap()));
            let watch = Arc::downgrade(owner.as_ref().unwrap());
            let mut pinned = Some(session.as_ref().unwrap().pin(owner.as_ref().unwrap()).unwrap());
            let mapping = pinned.as_ref().unwrap().map().unwrap();
            for what in order {
                match what {
                    0 => drop(pinned.take()),
                    1 => drop(owner.take()),
                    _ => drop(session.take()),
                }
                mapping.write(BYTES - 4, b"here").unwrap();
                let mut seen = [0; 4];
                mapping.read(BYTES - 4, &mut seen).unwrap();
                assert_eq!(&seen, b"here");
            }
            let kept = watch.upgrade().expect("the mapping keeps the buffer allocated");
            assert_eq!(&downloaded(&kept)[BYTES - 4..], b"here", "{what}");
            drop(kept);
            drop(mapping);
            assert!(watch.upgrade().is_none(), "{what}: nothing else keeps it");
        }
        // A borrowed buffer, and the mapping given up first.
        let pinned = session.pin(&buffer).unwrap();
        let mapping = pinned.map().unwrap();
        drop(mapping);
        drop(pinned);
        drop(buffer);
        if let Some(gpus) = session.emulated() {
            assert_eq!(gpus.live(), gdrcopy::emulated::Live::default(), "{what}");
        }
    });
}

/// `close` fails, gives the session back, and the session works.
#[track_caller]
fn still_in_use(session: Session, what: &str) -> Session {
    let refused = session.close().unwrap_err();
    assert_eq!(refused.error().kind(), ErrorKind::Mapped, "{what}: {refused}");
    let session = refused.into_session().expect("the session comes back");
    session.gpus().unwrap();
    session
}

pub(crate) fn a_session_in_use_comes_back_from_close(subject: &Subject) {
    for &how in subject.allocators {
        let session = subject.session();
        let clone = session.clone();
        let session = still_in_use(session, "a clone");
        drop(clone);
        let buffer = Arc::new(session.alloc_as(subject.gpu, BYTES, how).unwrap());
        let session = still_in_use(session, "a buffer");
        let pinned = session.pin(&buffer).unwrap();
        drop(buffer);
        let session = still_in_use(session, "a pin");
        let mapping = pinned.map().unwrap();
        drop(pinned);
        let session = still_in_use(session, "a mapping");
        mapping.write(0, b"open").unwrap();
        drop(mapping);
        session.close().unwrap_or_else(|error| panic!("{}, {how}: {error}", subject.name));
    }
}

pub(crate) fn facts_are_the_backend_s_own(subject: &Subject) {
    let session = subject.session();
    assert_eq!((session.backend(), session.rm_level()), (subject.kind, subject.level));
    assert_eq!(session.semantics(), subject.semantics, "{}", subject.name);
    assert_eq!(session.emulated().is_some(), subject.is_emulated());
    let report = session.probe_report().to_string();
    assert!(report.contains(&format!("{}: chosen by the program", subject.kind)), "{report}");
    let gpus = session.gpus().unwrap();
    for (number, gpu) in gpus.iter().enumerate() {
        assert_eq!(gpu.ordinal, number);
        assert!(!gpu.name.is_empty() && gpu.total_bytes > 0, "{gpu:?}");
        assert_eq!(gpu.pci.is_none(), subject.is_emulated(), "{gpu:?}");
    }

    for bytes in [1, 4096, BYTES, 5 << 20] {
        subject.for_each_buffer(bytes, |session, buffer, what| {
            assert_eq!((buffer.len(), buffer.ordinal()), (bytes, subject.gpu), "{what}");
            assert!(buffer.addr().raw().is_multiple_of(64), "{what}: buffers start on a line");
            let shares = subject.shares(buffer.allocator(), bytes);
            assert_eq!(buffer.owns_object(), !shares, "{what}");
            let started = Instant::now();
            let pinned = session.pin(&buffer).unwrap();
            let mapping = pinned.map().unwrap();
            let took = started.elapsed();
            let facts = mapping.facts();
            let row = subject.semantics;
            assert_eq!(facts.after_free, if shares { row.shared_object } else { row.whole_object }, "{what}");
            assert_eq!(facts.after_free == AfterFree::Aliased, shares && row.shared_object == AfterFree::Aliased);
            assert_eq!(facts.pci, gpus[subject.gpu].pci, "{what}");
            assert!(facts.window_bytes >= bytes && facts.window_bytes.is_multiple_of(4096), "{what}: {facts:?}");
            assert!(facts.window_bytes < bytes + (4 << 20), "{what}: {facts:?}");
            assert!(!facts.map_time.is_zero() && facts.pin_time + facts.map_time <= took, "{what}: {facts:?}");
            assert_eq!(mapping.mapping_type(), subject.mapping_type, "{what}");
            assert_eq!(mapping.routine().name(), session.routine().name(), "{what}");
            assert_eq!(mapping.post_line_is_atomic(), session.routine().post_line_is_atomic(), "{what}");
        });
    }
}

/// Open files of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Pieces of this process's address space.
fn areas() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

pub(crate) fn cycles_leave_nothing_behind(subject: &Subject) {
    const CYCLES: usize = 1000;
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let cycle = |by_drop: bool| {
            let pinned = session.pin(DeviceRange::from(&buffer).slice(1..).unwrap()).unwrap();
            let mapping = pinned.map().unwrap();
            mapping.write(0, &[1]).unwrap();
            if by_drop {
                return;
            }
            mapping.unmap().unwrap();
            pinned.unpin().unwrap();
        };
        // What is opened once, and kept, is opened here.
        cycle(true);
        let (open, mapped) = (descriptors(), areas());
        for number in 0..CYCLES {
            cycle(number % 2 == 0);
        }
        assert_eq!(descriptors(), open, "{what}: open files");
        // The heap may grow by a piece or two for other reasons.
        assert!(areas() <= mapped + 4, "{what}: {mapped} pieces of address space became {}", areas());
        if let Some(gpus) = session.emulated() {
            let live = gpus.live();
            assert_eq!((live.allocations, live.pins, live.windows, live.bar1_bytes), (1, 0, 0, 0), "{what}");
        }
    });
}
