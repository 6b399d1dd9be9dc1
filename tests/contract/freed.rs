//! Memory that is freed under a pin or a mapping.

#![allow(unsafe_code, reason = "freeing memory under its mapping is what safe ranges do not allow")]

use gdrcopy::{AfterFree, Allocator, DeviceBuffer, DeviceRange, ErrorKind, Mapping, MemoryKind, Pinned, Session};

use crate::common::fork::{is_readable, is_writable};
use crate::common::subject::{Subject, assert_same, downloaded, pattern};

const SMALL: usize = 4096;
/// From here on `cudaMalloc` memory has an object of its own.
const LARGE: usize = 4 << 20;
/// How often to allocate until an address comes back.
const TRIES: usize = 64;

/// The whole of a buffer that can be freed nevertheless.
fn unguarded(buffer: &DeviceBuffer) -> DeviceRange<'static> {
    // SAFETY: what freed memory does to its mappings is what these checks are about; they account for it.
    unsafe { DeviceRange::from_raw(buffer.addr(), buffer.len()).unwrap() }
}

fn pin_unguarded(session: &Session, buffer: &DeviceBuffer) -> Pinned<'static> {
    session.pin(unguarded(buffer)).unwrap()
}

/// A buffer where another one was, and the others that were tried; `None` if the address does not come back.
fn at_the_same_address(session: &Session, like: &Like) -> (Option<DeviceBuffer>, Vec<DeviceBuffer>) {
    let mut others = Vec::new();
    for _ in 0..TRIES {
        let buffer = match session.alloc_as(like.gpu, like.bytes, like.how) {
            // A small device that gives no address out twice.
            Err(error) if error.kind() == ErrorKind::OutOfMemory => return (None, others),
            allocated => allocated.unwrap(),
        };
        if buffer.addr() == like.addr {
            return (Some(buffer), others);
        }
        others.push(buffer);
    }
    (None, others)
}

struct Like {
    gpu: usize,
    bytes: usize,
    how: Allocator,
    addr: gdrcopy::GpuAddr,
}

impl Like {
    fn of(buffer: &DeviceBuffer) -> Self {
        Self { gpu: buffer.ordinal(), bytes: buffer.len(), how: buffer.allocator(), addr: buffer.addr() }
    }
}

pub(crate) fn mapping_freed_memory_is_stale(subject: &Subject) {
    for bytes in [SMALL, LARGE] {
        subject.for_each_buffer(bytes, |session, buffer, what| {
            // Keeps a shared object from going with its last block.
            let _sibling = session.alloc_as(subject.gpu, bytes, buffer.allocator()).unwrap();
            let like = Like::of(&buffer);
            let pinned = pin_unguarded(session, &buffer);
            let range = unguarded(&buffer);
            pinned.map().unwrap().write(0, b"alive").unwrap();
            buffer.free().unwrap();
            for _ in 0..2 {
                let error = pinned.map().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Stale, "{what}: {error}");
            }
            assert!(!pinned.is_mapped(), "{what}");
            let error = session.pin(range.clone()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), "{what}: {error}");

            let (again, _others) = at_the_same_address(session, &like);
            assert!(again.is_some() || !subject.is_emulated(), "{what}: the first fit is the block just freed");
            let Some(again) = again else { return };
            again.upload(0, b"owner").unwrap();
            let error = pinned.map().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Stale, "{what}, allocated again: {error}");
            pinned.unpin().unwrap();
            session.pin(range).unwrap().map().unwrap().write(5, b"ship").unwrap();
            assert_eq!(&downloaded(&again)[..9], b"ownership", "{what}");
        });
    }
}

pub(crate) fn freed_memory_behaves_as_the_backend_says(subject: &Subject) {
    for bytes in [SMALL, LARGE] {
        subject.for_each_buffer(bytes, |session, buffer, what| {
            let row =
                if buffer.owns_object() { subject.semantics.whole_object } else { subject.semantics.shared_object };
            let sibling = session.alloc_as(subject.gpu, bytes, buffer.allocator()).unwrap();
            sibling.upload(0, &pattern(3, bytes)).unwrap();
            let mapping = pin_unguarded(session, &buffer).map().unwrap();
            let like = Like::of(&buffer);
            mapping.write(0, &pattern(4, bytes)).unwrap();
            assert_eq!(mapping.facts().after_free, row, "{what}");
            buffer.free().unwrap();
            match row {
                AfterFree::Persistent => persistent(session, &mapping, &like, what),
                AfterFree::Aliased => aliased(session, &mapping, &like, subject, what),
                AfterFree::Sigbus => faults(session, &mapping, &like, subject, what),
                _ => panic!("{what}: no check for {row:?}"),
            }
            assert_same(&downloaded(&sibling), &pattern(3, bytes), &format!("{what}, the sibling"));
        });
    }
}

/// The old bytes stay, and are nobody else's.
fn persistent(session: &Session, mapping: &Mapping<'_>, like: &Like, what: &str) {
    let mut seen = vec![0; like.bytes];
    mapping.read(0, &mut seen).unwrap();
    assert_same(&seen, &pattern(4, like.bytes), what);

    let (again, mut owners) = at_the_same_address(session, like);
    owners.extend(again);
    for owner in &owners {
        owner.upload(0, &pattern(5, like.bytes)).unwrap();
    }
    mapping.read(0, &mut seen).unwrap();
    assert_same(&seen, &pattern(4, like.bytes), &format!("{what}, others allocated"));
    mapping.write(0, &pattern(6, like.bytes)).unwrap();
    mapping.flush().unwrap();
    for owner in &owners {
        assert_same(&downloaded(owner), &pattern(5, like.bytes), &format!("{what}, another's memory"));
    }
    mapping.read(0, &mut seen).unwrap();
    assert_same(&seen, &pattern(6, like.bytes), what);
}

/// The next owner's bytes show, in both directions.
fn aliased(session: &Session, mapping: &Mapping<'_>, like: &Like, subject: &Subject, what: &str) {
    let (again, _others) = at_the_same_address(session, like);
    assert!(again.is_some() || !subject.is_emulated(), "{what}: the first fit is the block just freed");
    let Some(owner) = again else { return };
    owner.upload(0, &pattern(7, like.bytes)).unwrap();
    let mut seen = vec![0; like.bytes];
    mapping.read(0, &mut seen).unwrap();
    assert_same(&seen, &pattern(7, like.bytes), &format!("{what}, the next owner's bytes"));
    mapping.write(1, &pattern(8, like.bytes - 1)).unwrap();
    mapping.flush().unwrap();
    assert_same(&downloaded(&owner)[1..], &pattern(8, like.bytes - 1), &format!("{what}, written over"));
}

/// Every access faults, whoever has the memory now.
fn faults(session: &Session, mapping: &Mapping<'_>, like: &Like, subject: &Subject, what: &str) {
    let (again, mut owners) = at_the_same_address(session, like);
    assert!(again.is_some() || !subject.is_emulated(), "{what}: the first fit is the block just freed");
    owners.extend(again);
    for owner in &owners {
        owner.upload(0, &pattern(9, like.bytes)).unwrap();
    }
    for at in [0, 1, like.bytes / 2, like.bytes - 1] {
        let place = mapping.as_ptr().wrapping_add(at);
        assert!(!is_readable(place), "{what}: byte {at} is readable");
        assert!(!is_writable(place, 0xee), "{what}: byte {at} is writable");
    }
    for owner in &owners {
        assert_same(&downloaded(owner), &pattern(9, like.bytes), &format!("{what}, another's memory"));
    }
}
