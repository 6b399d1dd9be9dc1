//! Every available routine against a byte loop, between pages that must not be touched.
//!
//! Source and destination each end in inaccessible pages, and the ranges are laid flush against them, so an access
//! that leaves the pages of its range is a `SIGSEGV`. Neither direction of a copy knows which side is the device, so
//! one harness serves both.

use std::cell::RefCell;
use std::ptr;

use proptest::prelude::*;

use super::kernel::hidden;
use super::{Routine, routines};

const PAGE: usize = 4096;
/// What the destination holds before each copy; the source never has it.
const SENTINEL: u8 = 0xA5;
/// How far around a range every single copy is checked; the whole buffer is checked now and then.
const MARGIN: usize = 160;

/// Accessible pages between two that are not.
struct Guarded {
    map: *mut u8,
    bytes: usize,
}

impl Guarded {
    fn new(pages: usize) -> Self {
        let bytes = pages * PAGE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let map = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes + 2 * PAGE,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(map, libc::MAP_FAILED);
        let map = map.cast::<u8>();
        // SAFETY: inside the mapping just made, page by page.
        let rc = unsafe { libc::mprotect(map.wrapping_add(PAGE).cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(rc, 0);
        Self { map, bytes }
    }

    fn start(&self) -> *mut u8 {
        self.map.wrapping_add(PAGE)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the accessible pages, initialised by the kernel, exclusively borrowed through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: as above, shared.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, which nothing borrows any more.
        unsafe { libc::munmap(self.map.cast(), self.bytes + 2 * PAGE) };
    }
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    Store,
    Load,
}

/// Which guard page a range lies against; offsets count from there.
#[derive(Debug, Clone, Copy)]
enum Against {
    Start,
    End,
}

impl Against {
    fn place(self, bytes: usize, offset: usize, len: usize) -> usize {
        match self {
            Self::Start => offset,
            Self::End => bytes - offset - len,
        }
    }
}

struct Bench {
    routine: &'static Routine,
    direction: Direction,
    from: Guarded,
    to: Guarded,
}

impl Bench {
    fn new(routine: &'static Routine, direction: Direction, pages: usize) -> Self {
        let (mut from, mut to) = (Guarded::new(pages), Guarded::new(pages));
        let mut state = 0x9E37_79B9_u32;
        for byte in from.bytes_mut() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let [_, _, _, high] = state.to_le_bytes();
            *byte = if high == SENTINEL { !SENTINEL } else { high };
        }
        to.bytes_mut().fill(SENTINEL);
        Self { routine, direction, from, to }
    }

    /// One copy, checked against a byte loop, with what lies around it.
    fn check(&mut self, from_at: usize, to_at: usize, len: usize) {
        let (routine, direction) = (self.routine, self.direction);
        self.check_by(from_at, to_at, len, |to, from| match direction {
            Direction::Store => {
                // SAFETY: the caller keeps `from_at + len` inside the accessible pages.
                let src = unsafe { std::slice::from_raw_parts(from, len) };
                // SAFETY: the routine is available, `to` has `len` bytes, and no reference to them is live.
                unsafe { routine.store(to, src) };
            }
            Direction::Load => {
                // SAFETY: the caller keeps `to_at + len` inside the accessible pages; nothing else borrows them.
                let dst = unsafe { std::slice::from_raw_parts_mut(to, len) };
                // SAFETY: the routine is available, and whole pages around `from` are accessible.
                unsafe { routine.load(dst, from) };
            }
        });
    }

    /// The same for any way of copying, which gets the destination first.
    fn check_by(&mut self, from_at: usize, to_at: usize, len: usize, copy: impl FnOnce(*mut u8, *const u8)) {
        let (from, to) = (self.from.start().wrapping_add(from_at), self.to.start().wrapping_add(to_at));
        copy(to, from);
        let first = to_at.saturating_sub(MARGIN);
        let last = (to_at + len + MARGIN).min(self.to.bytes);
        let wanted = &self.from.bytes()[from_at..from_at + len];
        let around = &mut self.to.bytes_mut()[first..last];
        let (before, rest) = around.split_at_mut(to_at - first);
        let (copied, after) = rest.split_at_mut(len);
        let outside_is_unchanged = before.iter().chain(&*after).all(|&byte| byte == SENTINEL);
        let mut inside_is_equal = true;
        for (byte, wanted) in copied.iter().zip(wanted) {
            inside_is_equal &= byte == wanted;
        }
        assert!(
            inside_is_equal && outside_is_unchanged,
            "{:?} {:?}: {len} bytes from {from:p} to {to:p}: inside equal {inside_is_equal}, outside unchanged \
             {outside_is_unchanged}",
            self.routine,
            self.direction,
        );
        copied.fill(SENTINEL);
    }

    fn check_all_unchanged(&self) {
        let changed = self.to.bytes().iter().position(|&byte| byte != SENTINEL);
        assert_eq!(changed, None, "{:?} {:?} wrote far outside its ranges", self.routine, self.direction);
    }

    fn grid(&mut self, lens: impl Iterator<Item = usize>, offsets: &[usize], against: [Against; 2]) {
        let [from_against, to_against] = against;
        for len in lens {
            for &from in offsets {
                for &to in offsets {
                    let from_at = from_against.place(self.from.bytes, from, len);
                    self.check(from_at, to_against.place(self.to.bytes, to, len), len);
                }
            }
            self.check_all_unchanged();
        }
    }
}

fn routine(name: &str) -> Option<&'static Routine> {
    let public = routines().iter().map(|&routine| (routine.name(), routine));
    let (_, routine) = public.chain(hidden()).find(|(is, _)| *is == name).expect("a routine of this name");
    if !routine.is_available() {
        eprintln!("SKIP: this machine cannot run {name}");
        return None;
    }
    Some(routine)
}

/// Every size up to 512, every offset of both sides in a line, against the guard pages at the start and at the end.
fn small(name: &str, direction: Direction) {
    let Some(routine) = routine(name) else { return };
    let offsets: Vec<_> = (0..64).collect();
    let mut bench = Bench::new(routine, direction, 1);
    bench.grid(0..=512, &offsets, [Against::Start, Against::Start]);
    bench.grid(0..=512, &offsets, [Against::End, Against::End]);
    let few = [0, 1, 7, 8, 31, 32, 63];
    bench.grid(0..=512, &few, [Against::Start, Against::End]);
    bench.grid(0..=512, &few, [Against::End, Against::Start]);
}

/// Sizes around every multiple of 64 up to 2 KiB and around the powers of two up to 64 KiB.
fn large(name: &str, direction: Direction) {
    let Some(routine) = routine(name) else { return };
    let mut bench = Bench::new(routine, direction, 17);
    let around = |middle: usize| [middle - 63, middle - 1, middle, middle + 1, middle + 63];
    let lines = (9..=32).map(|lines| lines * 64);
    let lens = lines.chain((12..=16).map(|shift| 1 << shift)).flat_map(around);
    bench.grid(lens.clone(), &[0, 1, 8, 33, 63], [Against::Start, Against::Start]);
    bench.grid(lens, &[0, 1, 8, 33, 63], [Against::End, Against::End]);
}

/// Any ranges, not only those near a guard page.
fn random(name: &str, direction: Direction) {
    let Some(routine) = routine(name) else { return };
    const PAGES: usize = 4;
    let bench = RefCell::new(Bench::new(routine, direction, PAGES));
    let ranges = (0..=PAGES * PAGE).prop_flat_map(|len| (0..=PAGES * PAGE - len, 0..=PAGES * PAGE - len, Just(len)));
    let mut runner =
        proptest::test_runner::TestRunner::new(ProptestConfig { cases: 2000, ..ProptestConfig::default() });
    runner
        .run(&ranges, |(from, to, len)| {
            bench.borrow_mut().check(from, to, len);
            Ok(())
        })
        .expect("every copy is right");
    bench.borrow().check_all_unchanged();
}

macro_rules! suite {
    ($($name:ident)+) => { $(
        mod $name {
            use super::Direction::{Load, Store};

            #[test]
            fn small_stores() {
                super::small(stringify!($name), Store);
            }

            #[test]
            fn small_loads() {
                super::small(stringify!($name), Load);
            }

            #[test]
            fn large_stores() {
                super::large(stringify!($name), Store);
            }

            #[test]
            fn large_loads() {
                super::large(stringify!($name), Load);
            }

            #[test]
            fn random_stores() {
                super::random(stringify!($name), Store);
            }

            #[test]
            fn random_loads() {
                super::random(stringify!($name), Load);
            }

            #[test]
            fn posted_lines() {
                super::posted_lines(stringify!($name));
            }

            #[test]
            fn values() {
                super::values(stringify!($name));
            }

            #[test]
            fn nothing_is_touched_for_nothing() {
                super::nothing_is_touched_for_nothing(stringify!($name));
            }
        }
    )+ };
}

suite! { scalar sse41 avx2 avx512 movdir64b movdir64b_avx2 movdir64b_sse41 movdir64b_scalar }

fn posted_lines(name: &str) {
    let Some(routine) = routine(name) else { return };
    let mut buffer = Guarded::new(1);
    for at in (0..PAGE).step_by(64) {
        let line: [u8; 64] = std::array::from_fn(|lane| u8::try_from((at / 64 + lane) % 251).expect("below 251"));
        buffer.bytes_mut().fill(SENTINEL);
        // SAFETY: the routine is available and the line lies in the page.
        unsafe { routine.post_line(buffer.start().wrapping_add(at), &line) };
        let (before, rest) = buffer.bytes().split_at(at);
        let (stored, after) = rest.split_at(64);
        assert_eq!(stored, line);
        assert!(before.iter().chain(after).all(|&byte| byte == SENTINEL));
    }
}

/// Values of every size that is inlined and of some that are not, at every offset in a line, flush against the guard
/// pages on both sides of both ranges.
fn values(name: &str) {
    let Some(routine) = routine(name) else { return };
    let mut bench = Bench::new(routine, Direction::Store, 1);
    macro_rules! sizes {
        ($($size:literal)+) => { $( values_of::<$size>(&mut bench); )+ };
    }
    sizes!(
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40
        41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 80 96 128 192
    );
    bench.check_all_unchanged();
}

fn values_of<const N: usize>(bench: &mut Bench) {
    let routine = bench.routine;
    let store = |to, from: *const u8| {
        // SAFETY: `check_by` keeps `N` bytes at `from` inside the accessible pages; an array of bytes has no alignment.
        let value = unsafe { &*from.cast::<[u8; N]>() };
        // SAFETY: the routine is available, `to` has `N` bytes, and no reference to them is live.
        unsafe { routine.store_value(to, value) };
    };
    for offset in 0..64 {
        let far = PAGE - N - offset;
        for (from_at, to_at) in [(0, offset), (PAGE - N, offset), (0, far), (PAGE - N, far)] {
            bench.check_by(from_at, to_at, N, store);
        }
    }
}

fn nothing_is_touched_for_nothing(name: &str) {
    let Some(routine) = routine(name) else { return };
    let nowhere = ptr::without_provenance_mut(0xDEAD_0000_0001);
    // SAFETY: the routine is available, and no byte is asked for.
    unsafe { routine.store(nowhere, &[]) };
    // SAFETY: as above.
    unsafe { routine.load(&mut [], nowhere) };
}

#[test]
fn single_accesses() {
    let mut buffer = Guarded::new(1);
    macro_rules! check {
        ($int:ident, $store:ident, $load:ident, $value:literal) => {
            let bytes = size_of::<$int>();
            for at in [0, bytes, 64, PAGE - bytes] {
                buffer.bytes_mut().fill(SENTINEL);
                let place = buffer.start().wrapping_add(at).cast();
                // SAFETY: aligned and inside the page.
                unsafe { super::$store(place, $value) };
                let (before, rest) = buffer.bytes().split_at(at);
                let (stored, after) = rest.split_at(bytes);
                assert_eq!(stored, $int::to_ne_bytes($value));
                assert!(before.iter().chain(after).all(|&byte| byte == SENTINEL));
                // SAFETY: aligned and inside the page.
                assert_eq!(unsafe { super::$load(place) }, $value);
            }
        };
    }
    check!(u8, store_u8, load_u8, 0x12);
    check!(u16, store_u16, load_u16, 0x1234);
    check!(u32, store_u32, load_u32, 0x1234_5678);
    check!(u64, store_u64, load_u64, 0x1234_5678_9ABC_DEF0);
}
