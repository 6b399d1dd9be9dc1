//! What is refused changes nothing.

#![allow(unsafe_code, reason = "ranges of memory that is not there can only be made by hand")]

use gdrcopy::{Allocator, DeviceRange, ErrorKind, MemoryKind, Result};

use crate::common::subject::{Subject, assert_same, downloaded, pattern};

const BYTES: usize = 70_000;

#[track_caller]
fn refused<T>(result: Result<T>, kind: ErrorKind, what: &str) {
    match result {
        Ok(_) => panic!("{what}: not refused"),
        Err(error) => {
            assert_eq!(error.kind(), kind, "{what}: {error}");
            assert!(!error.to_string().contains('\n'), "one line: {error}");
        }
    }
}

pub(crate) fn out_of_bounds_changes_nothing(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let wanted = pattern(1, BYTES);
        buffer.upload(0, &wanted).unwrap();
        // The mapping ends before the memory does, and not on a page: a byte too far would land in the buffer.
        let len = BYTES - 4096 - 1;
        let mapping = session.pin(DeviceRange::from(&buffer).slice(..len).unwrap()).unwrap().map().unwrap();
        let oob = |result, verb: &str| refused(result, ErrorKind::OutOfBounds, &format!("{what}, {verb}"));
        for (offset, size) in
            [(len, 1), (len - 1, 2), (0, len + 1), (len + 1, 1), (usize::MAX, 1), (usize::MAX - 1, 64), (1 << 40, 8)]
        {
            let (from, mut to) = (vec![0xee; size], vec![0xa5; size]);
            oob(mapping.write(offset, &from), "write");
            oob(mapping.write_posted(offset, &from), "write_posted");
            oob(mapping.batch(|batch| batch.write(offset, &from)), "batch");
            oob(mapping.publish(offset, &from, 0, 1_u32), "publish, data");
            oob(mapping.read(offset, &mut to), "read");
            assert!(to.iter().all(|&byte| byte == 0xa5), "{what}: the destination is untouched");
        }
        for offset in [len - 3, len, usize::MAX - 3, usize::MAX] {
            oob(mapping.store_u32(offset, 1), "store_u32");
            oob(mapping.store_u32_posted(offset, 1), "store_u32_posted");
            oob(mapping.load_u32(offset).map(drop), "load_u32");
            oob(mapping.publish(0, b"data", offset, 1_u32), "publish, flag");
        }
        for offset in [len - 7, len, usize::MAX - 7] {
            oob(mapping.store_u64(offset, 1), "store_u64");
            oob(mapping.store_u64_posted(offset, 1), "store_u64_posted");
            oob(mapping.load_u64(offset).map(drop), "load_u64");
            oob(mapping.publish(0, b"data", offset, 1_u64), "publish, wide flag");
        }
        oob(mapping.post_line(len - 63, &[1; 64]), "post_line");
        oob(mapping.write_value(len - 1, &1_u16), "write_value");
        oob(mapping.read_value::<u16>(len - 1).map(drop), "read_value");
        // Every size whose bounds are checked by one comparison until the end is near: to the last byte, and no further.
        macro_rules! values_to_the_end {
            ($($size:literal)+) => { $(
                for past in (1..=$size).chain([4096, usize::MAX - len]) {
                    let (at, value) = (len - $size + past, [0xee_u8; $size]);
                    oob(mapping.write_value(at, &value), "write_value");
                    oob(mapping.write_value_posted(at, &value), "write_value_posted");
                    oob(mapping.batch(|batch| batch.write_value(at, &value)), "batch of a value");
                    oob(mapping.write(at, &value), "write of a value's bytes");
                }
                let last = mapping.read_value::<[u8; $size]>(len - $size).unwrap();
                assert_eq!(last[..], wanted[len - $size..len], "{what}");
                mapping.write_value(len - $size, &last).unwrap();
            )+ };
        }
        values_to_the_end!(1 2 3 4 8 16 24 48 63 64 65 128);

        let mut to = [0xa5; 2];
        oob(buffer.upload(BYTES - 1, &[1, 2]), "upload");
        oob(buffer.upload(usize::MAX, &[1, 2]), "upload");
        oob(buffer.download(BYTES - 1, &mut to), "download");
        assert_eq!(to, [0xa5; 2], "{what}");
        mapping.flush().unwrap();
        assert_same(&downloaded(&buffer), &wanted, what);
    });
}

pub(crate) fn misaligned_accesses_change_nothing(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let wanted = pattern(2, BYTES);
        buffer.upload(0, &wanted).unwrap();
        // It is the device address that counts, not the offset.
        let mapping = session.pin(DeviceRange::from(&buffer).slice(1..).unwrap()).unwrap().map().unwrap();
        let bad = |result, verb: &str| refused(result, ErrorKind::InvalidArgument, &format!("{what}, {verb}"));
        for offset in [0, 1, 2, 4, 8, 64, 4096] {
            bad(mapping.store_u32(offset, 1), "store_u32");
            bad(mapping.store_u32_posted(offset, 1), "store_u32_posted");
            bad(mapping.load_u32(offset).map(drop), "load_u32");
            bad(mapping.publish(100, b"data", offset, 1_u32), "publish");
        }
        for offset in [0, 1, 3, 5, 8, 64, 4096 + 3] {
            bad(mapping.store_u64(offset, 1), "store_u64");
            bad(mapping.store_u64_posted(offset, 1), "store_u64_posted");
            bad(mapping.load_u64(offset).map(drop), "load_u64");
            bad(mapping.publish(100, b"data", offset, 1_u64), "publish");
        }
        for offset in [0, 1, 7, 31, 47, 64] {
            bad(mapping.post_line(offset, &[1; 64]), "post_line");
        }
        mapping.flush().unwrap();
        assert_same(&downloaded(&buffer), &wanted, what);

        mapping.store_u32(3, 1).unwrap();
        mapping.store_u64(7, 2).unwrap();
        mapping.post_line(63, &[3; 64]).unwrap();
        mapping.flush().unwrap();
        let seen = downloaded(&buffer);
        assert_eq!((&seen[4..8], &seen[8..16]), (&1_u32.to_ne_bytes()[..], &2_u64.to_ne_bytes()[..]), "{what}");
        assert_eq!(seen[64..128], [3; 64], "{what}");
    });
}

pub(crate) fn nothing_to_copy_is_fine_inside_only(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let wanted = pattern(3, BYTES);
        buffer.upload(0, &wanted).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        for offset in [0, 1, BYTES - 1, BYTES] {
            mapping.write(offset, &[]).unwrap();
            mapping.write_posted(offset, &[]).unwrap();
            mapping.read(offset, &mut []).unwrap();
            buffer.upload(offset, &[]).unwrap();
            buffer.download(offset, &mut []).unwrap();
        }
        for offset in [BYTES + 1, usize::MAX] {
            refused(mapping.write(offset, &[]), ErrorKind::OutOfBounds, what);
            refused(mapping.read(offset, &mut []), ErrorKind::OutOfBounds, what);
            refused(buffer.upload(offset, &[]), ErrorKind::OutOfBounds, what);
        }
        mapping.publish(BYTES, &[], 0, 1_u32).unwrap_or_else(|error| {
            assert!(!mapping.publish_is_ordered(), "{what}: {error}");
            mapping.store_u32(0, 1).unwrap();
        });
        let seen = downloaded(&buffer);
        assert_eq!(seen[..4], 1_u32.to_ne_bytes(), "{what}: the flag alone");
        assert_same(&seen[4..], &wanted[4..], what);
    });
}

pub(crate) fn impossible_ranges_are_refused(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        refused(DeviceRange::from(&buffer).slice(5..5), ErrorKind::InvalidArgument, what);
        refused(DeviceRange::from(&buffer).slice(..=BYTES), ErrorKind::OutOfBounds, what);
        refused(session.alloc_as(subject.gpu, 0, buffer.allocator()), ErrorKind::InvalidArgument, what);
        // SAFETY: for this and the next three: nothing maps the range.
        let null = unsafe { DeviceRange::from_raw(0, 1) };
        refused(null, ErrorKind::InvalidArgument, what);
        // SAFETY: as above.
        let empty = unsafe { DeviceRange::from_raw(buffer.addr(), 0) };
        refused(empty, ErrorKind::InvalidArgument, what);
        // SAFETY: as above.
        let wrapping = unsafe { DeviceRange::from_raw(u64::MAX - 1, 3) };
        refused(wrapping, ErrorKind::InvalidArgument, what);
        // SAFETY: as above.
        let too_long = unsafe { DeviceRange::from_raw(buffer.addr(), 1 << 42).unwrap() };
        refused(session.pin(too_long), ErrorKind::OutOfBounds, what);
        let absent = session.gpus().unwrap().len();
        refused(session.alloc_as(absent, 64, buffer.allocator()), ErrorKind::NoDevice, what);
        refused(session.alloc_on(usize::MAX, 64), ErrorKind::NoDevice, what);
    });
}

pub(crate) fn memory_that_the_backend_cannot_map_is_refused(subject: &Subject) {
    let session = subject.session();
    let on_stack = [0_u8; 64];
    let addr = u64::try_from(on_stack.as_ptr().addr()).unwrap();
    // SAFETY: never mapped.
    let host = unsafe { DeviceRange::from_raw(addr, 64).unwrap() };
    let error = session.pin(host).unwrap_err();
    let kinds = [MemoryKind::Host, MemoryKind::Unallocated].map(ErrorKind::UnsupportedMemory);
    assert!(kinds.contains(&error.kind()), "{}: {error}", subject.name);
    assert_eq!(error.kind().errno(), libc::EINVAL);

    if !subject.allocators.contains(&Allocator::CuMemAlloc) {
        let buffer = session.alloc_as(subject.gpu, BYTES, Allocator::CuMemAlloc).unwrap();
        let error = session.pin(&buffer).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc), "{error}");
        assert!(error.to_string().contains("GDRCOPY_RM=ipc"), "the way out is named: {error}");
    }
}
