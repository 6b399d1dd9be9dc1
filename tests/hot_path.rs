//! The copy path allocates nothing and makes no system call, hence no call into a driver either.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]
#![allow(unsafe_code, reason = "the negative control makes a system call by hand")]

mod common;

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use common::counting::{Counting, calls_during};
use common::seccomp::{calls_trapped, without_system_calls};
use common::subject::{self, Subject, assert_same, downloaded, pattern};
use gdrcopy::{DeviceBuffer, Mapping, ParallelCopier, Result, copy};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZES: [usize; 9] = [0, 1, 3, 8, 63, 64, 65, 4096, 70_001];
const OFFSETS: [usize; 4] = [0, 1, 63, 4095];
const BYTES: usize = 70_001 + 4095 + 128;

/// Calls that `exercise` makes.
const CALLS: usize = SIZES.len() * OFFSETS.len() * 7 + 11;

/// Every verb, every size. Counts its calls; stops at the first that fails or reads something else than was written.
fn exercise(mapping: &Mapping<'_>, source: &[u8], back: &mut [u8]) -> Result<usize> {
    let mut calls = 0;
    let mut did = |()| calls += 1;
    let flag_at = BYTES - 8;
    for len in SIZES {
        for offset in OFFSETS {
            let from = &source[offset..offset + len];
            let to = &mut back[..len];
            mapping.write(offset, from).map(&mut did)?;
            mapping.read(offset, to).map(&mut did)?;
            assert!(to == from, "{len} bytes at {offset}");
            mapping.write_posted(offset, &source[..len]).map(&mut did)?;
            mapping.flush().map(&mut did)?;
            mapping
                .batch(|batch| {
                    batch.write(offset, from)?;
                    batch.store_u32(flag_at, 1)?;
                    batch.store_u64(flag_at, 2)?;
                    batch.post_line(0, source.first_chunk().expect("longer"))
                })
                .map(&mut did)?;
            mapping.publish(offset, from, flag_at, 3_u32).map(&mut did)?;
            mapping.publish(offset, from, flag_at, 4_u64).map(&mut did)?;
        }
    }
    mapping.store_u32(4, 5).map(&mut did)?;
    mapping.store_u32_posted(4, 6).map(&mut did)?;
    assert_eq!(mapping.load_u32(4)?, 6);
    did(());
    mapping.store_u64(8, 7).map(&mut did)?;
    mapping.store_u64_posted(8, 8).map(&mut did)?;
    assert_eq!(mapping.load_u64(8)?, 8);
    did(());
    mapping.write_value(1, &9_u64).map(&mut did)?;
    assert_eq!(mapping.read_value::<u64>(1)?, 9);
    did(());
    mapping.post_line(64, source.first_chunk().expect("longer")).map(&mut did)?;
    mapping.flush().map(&mut did)?;
    mapping.write(0, source).map(&mut did)?;
    Ok(calls)
}

/// A mapping with each copy routine that this processor has.
fn for_each_mapping(subject: &Subject, check: impl Fn(&Arc<DeviceBuffer>, Mapping<'static>)) {
    for routine in copy::routines().iter().filter(|routine| routine.is_available()) {
        let session = subject.builder().copy_routine(routine.name()).open().unwrap();
        for &how in subject.allocators {
            let buffer = Arc::new(session.alloc_as(subject.gpu, BYTES, how).unwrap());
            let mapping = session.pin(&buffer).unwrap().map().unwrap();
            assert_eq!(mapping.routine().name(), routine.name());
            check(&buffer, mapping);
        }
    }
}

#[test]
fn copies_allocate_nothing() {
    subject::each(|subject| {
        for_each_mapping(subject, |buffer, mapping| {
            let (source, mut back) = (pattern(1, BYTES), vec![0; BYTES]);
            let mut done = Ok(0);
            let allocations = calls_during(|| done = exercise(&mapping, &source, &mut back));
            assert_eq!(done.unwrap(), CALLS);
            assert_eq!(allocations, 0, "{}, {mapping:?}", subject.name);
            assert_same(&downloaded(buffer), &source, subject.name);
        });
    });
}

#[test]
fn copies_make_no_system_call() {
    subject::each(|subject| {
        for_each_mapping(subject, |buffer, mapping| {
            let source = Arc::new(pattern(2, BYTES));
            let mapping = Arc::new(mapping);
            let (theirs, from, mut back) = (Arc::clone(&mapping), Arc::clone(&source), vec![0; BYTES]);
            // The buffer goes back with the result: giving its memory back may take a system call.
            let ((done, _back), trapped) = without_system_calls(move || {
                let done = exercise(&theirs, &from, &mut back);
                (done, back)
            });
            assert_eq!(done.unwrap(), CALLS);
            assert_eq!((trapped.calls, trapped.last), (0, None), "{}, {mapping:?}", subject.name);
            assert_same(&downloaded(buffer), &source, subject.name);
        });
    });
}

/// A copier with a worker on each CPU of this thread, which spins or sleeps.
fn copier(spin: Duration) -> ParallelCopier {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().parse().unwrap();
    ParallelCopier::builder().cpus(cpus).write_threads(8).spin(spin).build().unwrap()
}

/// Sizes that are shared out, and some that are not.
fn exercise_together(copier: &ParallelCopier, mapping: &Mapping<'_>, source: &[u8], back: &mut [u8]) -> Result<usize> {
    let mut calls = 0;
    for len in [64, 2000, 16 << 10, 70_001] {
        for offset in OFFSETS {
            copier.write(mapping, offset, &source[offset..offset + len])?;
            copier.read(mapping, offset, &mut back[..len])?;
            assert!(back[..len] == source[offset..offset + len], "{len} bytes at {offset}");
            calls += 2;
        }
    }
    copier.write(mapping, 0, source)?;
    Ok(calls + 1)
}

#[test]
fn copies_by_several_threads_allocate_nothing_and_make_no_system_call() {
    subject::each(|subject| {
        for_each_mapping(subject, |buffer, mapping| {
            let (source, mut back) = (Arc::new(pattern(3, BYTES)), vec![0; BYTES]);
            let copier = Arc::new(copier(Duration::from_secs(3600)));
            let mut done = Ok(0);
            let allocations = calls_during(|| done = exercise_together(&copier, &mapping, &source, &mut back));
            assert_eq!((done.unwrap(), allocations), (33, 0), "{}, {mapping:?}", subject.name);

            let mapping = Arc::new(mapping);
            let (theirs, through, from) = (Arc::clone(&copier), Arc::clone(&mapping), Arc::clone(&source));
            let ((done, _back), trapped) = without_system_calls(move || {
                let done = exercise_together(&theirs, &through, &from, &mut back);
                (done, back)
            });
            assert_eq!(done.unwrap(), 33);
            assert_eq!((trapped.calls, trapped.last), (0, None), "{}, {mapping:?}", subject.name);
            assert_same(&downloaded(buffer), &source, subject.name);
        });
    });
}

/// Where workers sleep a long copy wakes them with one call, and does not depend on them.
#[test]
fn a_long_copy_that_finds_its_workers_asleep_makes_one_system_call() {
    subject::each(|subject| {
        let session = subject.session();
        let buffer = Arc::new(session.alloc_as(subject.gpu, BYTES, subject.allocators[0]).unwrap());
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        let source = pattern(4, BYTES);
        mapping.write(0, &source).unwrap();
        mapping.flush().unwrap();
        let copier = copier(Duration::ZERO);
        while copier.awake() > 0 {
            std::thread::yield_now();
        }
        let ((back, _mapping), trapped) = without_system_calls(move || {
            // A short one is done alone.
            let mut back = vec![0; 64 << 10];
            let short = copier.read(&mapping, 64, &mut back[..4096]);
            let before = calls_trapped();
            let done = short.and_then(|()| copier.read(&mapping, 64, &mut back));
            std::mem::forget(copier);
            (done.map(|()| (back, before)), mapping)
        });
        let (back, before) = back.unwrap();
        assert_same(&back, &source[64..][..64 << 10], subject.name);
        // None, where the worker had said so but was not asleep yet.
        assert!(before == 0 && trapped.calls <= 1, "{before} and {} calls", trapped.calls);
        assert!([Some(libc::SYS_futex), None].contains(&trapped.last), "{trapped:?}");
    });
}

/// The counter has to count.
#[test]
fn an_allocation_is_counted() {
    assert_eq!(calls_during(|| drop(black_box(vec![0_u8; 64]))), 2);
}

/// The filter has to see what it is there to see.
#[test]
fn a_system_call_is_trapped() {
    let (pid, trapped) = without_system_calls(|| {
        // SAFETY: takes no argument and cannot fail.
        unsafe { libc::syscall(libc::SYS_getpid) }
    });
    assert_eq!((trapped.calls, trapped.last), (1, Some(libc::SYS_getpid)));
    assert_eq!(pid, -1, "the call is not made");
    let (_, trapped) = without_system_calls(std::thread::yield_now);
    assert_eq!(trapped.last, Some(libc::SYS_sched_yield));
    let ((), trapped) = without_system_calls(|| ());
    assert_eq!((trapped.calls, trapped.last), (0, None));
}
