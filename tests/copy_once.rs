//! Every byte of a store is stored exactly once, and a naturally aligned 1, 2, 4 or 8 bytes by one instruction.
//!
//! A forked child copies into memory that it shares with its parent, which single-steps it. After each instruction the
//! parent looks for bytes that differ from the sentinel, notes them, and puts the sentinel back; what is stored twice
//! is therefore seen twice, which no look at the result could tell. Two stores that are wrong on purpose show that the
//! harness sees it.

#![allow(unsafe_code, reason = "copies on raw pointers, in memory that two processes share")]

mod common;

use std::arch::asm;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use common::step::{Tracee, breakpoint};
use gdrcopy::copy::{self, Routine};

/// What the parent puts back; the source has none of it.
const SENTINEL: u8 = 0;
const DEVICE_BYTES: usize = 512;
/// The cases' ranges start here and 0 to 63 bytes further on.
const FIRST_BYTE: usize = 64;
/// Far above what one store needs: a store past it runs away.
const MAX_STEPS: usize = 100_000;

/// What parent and child share.
#[repr(C, align(4096))]
struct Shared {
    device: [AtomicU64; DEVICE_BYTES / 8],
    /// How many cases the child has done.
    done: AtomicUsize,
}

#[derive(Debug, Clone, Copy)]
enum Store {
    Routine(&'static Routine),
    PostLine(&'static Routine),
    /// `store_value` of an array of this length: 1 to 64 are inlined where the address is aligned.
    Value(&'static Routine),
    /// One of `store_u8` to `store_u64`, by length.
    Single,
    /// Wrong on purpose: the usual trick of two overlapping 8-byte stores.
    OverlappingTail,
    /// Wrong on purpose: rounds the length up to 8.
    PastTheEnd,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    store: Store,
    offset: usize,
    len: usize,
}

impl Case {
    /// Runs in the child: no allocation, no lock.
    #[inline(never)]
    fn perform(&self, device: *mut u8, src: &[u8; DEVICE_BYTES]) {
        let dst = device.wrapping_add(FIRST_BYTE + self.offset);
        match self.store {
            Store::Routine(routine) => {
                // SAFETY: the routine is available, the range lies in the shared memory, atomics aside nothing borrows it.
                unsafe { routine.store(dst, &src[..self.len]) };
            }
            Store::PostLine(routine) => {
                // SAFETY: as above, and the case is aligned.
                unsafe { routine.post_line(dst, &first(src)) };
            }
            Store::Value(routine) => store_value(routine, dst, src, self.len),
            Store::Single => match self.len {
                // SAFETY: as above.
                1 => unsafe { copy::store_u8(dst, src[0]) },
                // SAFETY: as above.
                2 => unsafe { copy::store_u16(dst.cast(), u16::from_ne_bytes(first(src))) },
                // SAFETY: as above.
                4 => unsafe { copy::store_u32(dst.cast(), u32::from_ne_bytes(first(src))) },
                // SAFETY: as above.
                _ => unsafe { copy::store_u64(dst.cast(), u64::from_ne_bytes(first(src))) },
            },
            Store::OverlappingTail => {
                mov8(dst, first(src));
                mov8(dst.wrapping_add(self.len - 8), first(&src[self.len - 8..]));
            }
            Store::PastTheEnd => {
                for at in (0..self.len).step_by(8) {
                    mov8(dst.wrapping_add(at), first(&src[at..]));
                }
            }
        }
    }
}

/// [`Routine::store_value`] of an array whose length is a constant in each arm.
fn store_value(routine: &Routine, dst: *mut u8, src: &[u8; DEVICE_BYTES], len: usize) {
    macro_rules! lengths {
        ($($len:literal)+) => {
            match len {
                $($len => {
                    let value: &[u8; $len] = src.first_chunk().expect("the source is longer than any case");
                    // SAFETY: the routine is available, the range lies in the shared memory, nothing borrows it.
                    unsafe { routine.store_value(dst, value) };
                })+
                _ => panic!("no case of {len} bytes"),
            }
        };
    }
    lengths!(
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40
        41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 80 128
    )
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    *bytes.first_chunk().expect("the source is longer than any case")
}

/// One 8-byte store of any alignment, for the stores that are wrong on purpose.
fn mov8(dst: *mut u8, bytes: [u8; 8]) {
    // SAFETY: the cases leave room in the shared memory.
    unsafe { asm!("mov [{}], {}", in(reg) dst, in(reg) u64::from_ne_bytes(bytes), options(nostack, preserves_flags)) };
}

/// What the parent saw of one case: for each instruction that stored, the bytes that it stored.
type Seen = Vec<Vec<(usize, u8)>>;

fn shared() -> &'static Shared {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let map = unsafe {
        libc::mmap(ptr::null_mut(), size_of::<Shared>(), protection, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(map, libc::MAP_FAILED);
    // SAFETY: page-aligned, large enough, zeroed, which is a value of this type of atomics, and never unmapped.
    unsafe { &*map.cast::<Shared>() }
}

/// Runs in the child.
fn perform_all(shared: &Shared, cases: &[Case], src: &[u8; DEVICE_BYTES]) {
    let device = ptr::from_ref(&shared.device).cast_mut().cast();
    for (index, case) in cases.iter().enumerate() {
        breakpoint();
        case.perform(device, src);
        shared.done.store(index + 1, Ordering::SeqCst);
    }
}

/// Notes what differs from the sentinel and puts the sentinel back.
fn harvest(shared: &Shared) -> Vec<(usize, u8)> {
    let mut stored = Vec::new();
    for (index, word) in shared.device.iter().enumerate() {
        let value = word.load(Ordering::Relaxed);
        if value != 0 {
            let bytes = value.to_ne_bytes().into_iter().enumerate();
            stored.extend(bytes.filter(|&(_, byte)| byte != SENTINEL).map(|(at, byte)| (index * 8 + at, byte)));
            word.store(0, Ordering::Relaxed);
        }
    }
    stored
}

fn source() -> [u8; DEVICE_BYTES] {
    std::array::from_fn(|at| u8::try_from(at % 251 + 1).expect("1 to 251"))
}

/// What each case stored, instruction by instruction; `None` where tracing is not permitted.
fn trace(cases: &[Case]) -> Option<Vec<Seen>> {
    let (shared, src) = (shared(), source());
    let tracee = Tracee::start("\"stored exactly once\"", || perform_all(shared, cases, &src))?;
    let mut all = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let (mut seen, mut steps) = (Seen::new(), 0);
        while shared.done.load(Ordering::SeqCst) == index {
            tracee.step(case);
            let stored = harvest(shared);
            if !stored.is_empty() {
                seen.push(stored);
            }
            steps += 1;
            assert!(steps < MAX_STEPS, "{case:?}: still storing after {steps} instructions");
        }
        all.push(seen);
        assert_eq!(tracee.resume(case), index + 1 < cases.len(), "{case:?}: a breakpoint per case");
    }
    Some(all)
}

/// Whether a case's stores cover its range, each byte once, right, and nothing else.
fn verdict(case: &Case, seen: &Seen) -> Result<(), String> {
    let src = source();
    let mut times = [0; DEVICE_BYTES];
    for &(at, byte) in seen.iter().flatten() {
        times[at] += 1;
        let right = at.checked_sub(FIRST_BYTE + case.offset).map(|from| src[from]);
        if right != Some(byte) {
            return Err(format!("byte {at} was stored as {byte}, not {right:?}"));
        }
    }
    for (at, &times) in times.iter().enumerate() {
        let range = FIRST_BYTE + case.offset..FIRST_BYTE + case.offset + case.len;
        let wanted = usize::from(range.contains(&at));
        if times != wanted {
            return Err(format!("byte {at} was stored {times} times, not {wanted}"));
        }
    }
    let at_once = matches!(case.len, 1 | 2 | 4 | 8) && case.offset.is_multiple_of(case.len);
    if at_once && seen.len() != 1 {
        return Err(format!("a naturally aligned {} bytes took {} stores", case.len, seen.len()));
    }
    Ok(())
}

/// `None` where tracing is not permitted.
fn verdicts(cases: &[Case]) -> Option<Vec<Result<(), String>>> {
    Some(cases.iter().zip(trace(cases)?).map(|(case, seen)| verdict(case, &seen)).collect())
}

fn assert_right(cases: &[Case]) {
    for (case, verdict) in cases.iter().zip(verdicts(cases).unwrap_or_default()) {
        assert_eq!(verdict, Ok(()), "{case:?}");
    }
}

fn available(name: &str) -> Option<&'static Routine> {
    copy::by_name(name).inspect_err(|error| eprintln!("SKIP: {error}")).ok()
}

fn routine_stores_once(name: &str) {
    let Some(routine) = available(name) else { return };
    let store = Store::Routine(routine);
    let case = |offset, len| Case { store, offset, len };
    let single = (0..64).flat_map(|offset| [1, 2, 4, 8].map(|len| case(offset, len)));
    let small = [0, 1, 6, 52, 60, 63].into_iter().flat_map(|offset| (0..=16).map(move |len| case(offset, len)));
    let sizes = (17..=200).flat_map(|len| [case(0, len), case(len * 7 % 64, len)]);
    assert_right(&single.chain(small).chain(sizes).collect::<Vec<_>>());
}

#[test]
fn scalar() {
    routine_stores_once("scalar");
}

#[test]
fn sse41() {
    routine_stores_once("sse41");
}

#[test]
fn avx2() {
    routine_stores_once("avx2");
}

#[test]
fn avx512() {
    routine_stores_once("avx512");
}

#[test]
fn movdir64b() {
    routine_stores_once("movdir64b");
}

#[test]
fn single_stores() {
    let aligned = |len: usize| (0..64).step_by(len).map(move |offset| Case { store: Store::Single, offset, len });
    assert_right(&[1, 2, 4, 8].into_iter().flat_map(aligned).collect::<Vec<_>>());
}

/// Every size of an inlined store, and some that are not inlined, where they are aligned and where they are not.
#[test]
fn values() {
    let case = |routine, offset, len| Case { store: Store::Value(routine), offset, len };
    let any = (0..=65).chain([80, 128]).flat_map(|len| {
        // Aligned for every size, for 8 bytes, for 4, and for whatever it comes to.
        [0, 8, 52, len * 7 % 64].map(|offset| case(copy::preferred(), offset, len))
    });
    assert_right(&any.collect::<Vec<_>>());
    // What these do depends on the routine too.
    for routine in ["scalar", "sse41", "avx2", "avx512", "movdir64b"].into_iter().filter_map(available) {
        let wide =
            [16, 32, 48, 64].into_iter().flat_map(|len| [0, 16, 40, 44].map(|offset| case(routine, offset, len)));
        assert_right(&wide.collect::<Vec<_>>());
    }
}

/// An aligned value is stored in the pieces that its size is promised to take.
#[test]
fn values_are_as_few_stores_as_promised() {
    let any =
        [(1, 1), (2, 1), (3, 2), (4, 1), (5, 2), (7, 3), (8, 1), (12, 2), (15, 4), (20, 3), (24, 3), (40, 5), (63, 10)];
    let by_line = |line| [(16, 1), (32, 2), (48, 3), (64, line)];
    let wanted = [("sse41", 4), ("avx2", 4), ("avx512", 1), ("movdir64b", 1)];
    let wanted = wanted.map(|(name, line)| (name, by_line(line)));
    for (name, wide) in wanted.into_iter().chain([("scalar", [(16, 2), (32, 4), (48, 6), (64, 8)])]) {
        let Some(routine) = available(name) else { continue };
        let cases = any.into_iter().chain(wide);
        let cases: Vec<_> =
            cases.map(|(len, stores)| (Case { store: Store::Value(routine), offset: 0, len }, stores)).collect();
        let Some(seen) = trace(&cases.iter().map(|&(case, _)| case).collect::<Vec<_>>()) else { return };
        for ((case, stores), seen) in cases.iter().zip(seen) {
            assert_eq!(verdict(case, &seen), Ok(()), "{case:?}");
            assert_eq!(seen.len(), *stores, "{case:?}");
        }
    }
}

/// A posted line is one store where the instruction set has one of that size.
#[test]
fn posted_lines() {
    for (name, stores) in [("scalar", 8), ("sse41", 4), ("avx2", 4), ("avx512", 1), ("movdir64b", 1)] {
        let Some(routine) = available(name) else { continue };
        let case = Case { store: Store::PostLine(routine), offset: 0, len: 64 };
        let Some(seen) = trace(&[case]) else { return };
        assert_eq!(verdict(&case, &seen[0]), Ok(()), "{case:?}");
        assert_eq!(seen[0].len(), stores, "{case:?}");
    }
}

/// Parts and lines are as few stores as the instruction set can do them in.
#[test]
fn as_few_stores_as_there_can_be() {
    // Bytes 5 to 134 of three lines: a part of 59 bytes, a line, a part of 7 bytes.
    let (head_by_8, head_by_16, tail) = (1 + 1 + 7, 1 + 1 + 1 + 3, 3);
    let wanted = [
        ("scalar", head_by_8 + 8 + tail),
        ("sse41", head_by_16 + 4 + tail),
        ("avx2", head_by_16 + 2 + tail),
        ("avx512", 1 + 1 + 1),
    ];
    for (name, stores) in wanted {
        let Some(routine) = available(name) else { continue };
        let case = Case { store: Store::Routine(routine), offset: 5, len: 130 };
        let Some(seen) = trace(&[case]) else { return };
        assert_eq!(verdict(&case, &seen[0]), Ok(()), "{case:?}");
        assert_eq!(seen[0].len(), stores, "{case:?}");
    }
}

/// The harness has to see what it is there to see.
#[test]
fn wrong_stores_are_caught() {
    let cases = [
        Case { store: Store::OverlappingTail, offset: 0, len: 12 },
        Case { store: Store::PastTheEnd, offset: 0, len: 12 },
        Case { store: Store::OverlappingTail, offset: 0, len: 16 },
    ];
    let Some(verdicts) = verdicts(&cases) else { return };
    assert_eq!(verdicts[0], Err(format!("byte {} was stored 2 times, not 1", FIRST_BYTE + 4)));
    assert_eq!(verdicts[1], Err(format!("byte {} was stored 1 times, not 0", FIRST_BYTE + 12)));
    assert_eq!(verdicts[2], Ok(()), "two stores that do not overlap");
}
