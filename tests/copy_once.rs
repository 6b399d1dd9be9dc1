//! Every byte of a store is stored exactly once, and a naturally aligned 1, 2, 4 or 8 bytes by one instruction.
//!
//! A forked child copies into memory that it shares with its parent, which single-steps it. After each instruction the
//! parent looks for bytes that differ from the sentinel, notes them, and puts the sentinel back; what is stored twice
//! is therefore seen twice, which no look at the result could tell. Two stores that are wrong on purpose show that the
//! harness sees it.

#![allow(unsafe_code, reason = "fork, ptrace and copies on raw pointers are what this test is made of")]

use std::arch::asm;
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

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
    /// Why the child could not be traced.
    errno: AtomicI32,
}

#[derive(Debug, Clone, Copy)]
enum Store {
    Routine(&'static Routine),
    PostLine(&'static Routine),
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

fn child(shared: &Shared, cases: &[Case], src: &[u8; DEVICE_BYTES]) -> ! {
    // SAFETY: asks to be traced by the parent; the other arguments are ignored.
    if unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } != 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EPERM);
        shared.errno.store(errno, Ordering::SeqCst);
        // SAFETY: ends this process without running what belongs to the parent.
        unsafe { libc::_exit(1) }
    }
    let device = ptr::from_ref(&shared.device).cast_mut().cast();
    for (index, case) in cases.iter().enumerate() {
        // SAFETY: a breakpoint: stops this process for the tracer, changes nothing.
        unsafe { asm!("int3") };
        case.perform(device, src);
        shared.done.store(index + 1, Ordering::SeqCst);
    }
    // SAFETY: as above.
    unsafe { libc::_exit(0) }
}

/// A traced child, killed when dropped so that a failing test leaves none behind.
struct Tracee {
    pid: libc::pid_t,
    has_exited: Cell<bool>,
}

impl Tracee {
    /// Lets the child go on by `request` until its next stop, which has to be a trap. False if it has exited.
    fn go_on(&self, request: libc::c_uint, doing: &dyn std::fmt::Debug) -> bool {
        // SAFETY: the child is ours and stopped; no signal is delivered.
        let rc = unsafe { libc::ptrace(request, self.pid, 0, 0) };
        assert_eq!(rc, 0, "ptrace: {}", std::io::Error::last_os_error());
        self.wait(doing)
    }

    fn wait(&self, doing: &dyn std::fmt::Debug) -> bool {
        let mut status = 0;
        // SAFETY: waits for our own child.
        let pid = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        assert_eq!(pid, self.pid, "waitpid: {}", std::io::Error::last_os_error());
        if libc::WIFEXITED(status) {
            self.has_exited.set(true);
            return false;
        }
        assert!(
            libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == libc::SIGTRAP,
            "{doing:?}: wait status {status:#x}"
        );
        true
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        if self.has_exited.get() {
            return;
        }
        // SAFETY: our own child, which has not been reaped, so the number is still its own.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // SAFETY: reaps it.
        unsafe { libc::waitpid(self.pid, ptr::null_mut(), 0) };
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
    // SAFETY: the child only runs `child`, which neither allocates nor takes a lock.
    let pid = unsafe { libc::fork() };
    assert_ne!(pid, -1, "fork: {}", std::io::Error::last_os_error());
    if pid == 0 {
        child(shared, cases, &src);
    }
    let tracee = Tracee { pid, has_exited: Cell::new(false) };
    if !tracee.wait(&"the first breakpoint") {
        let error = std::io::Error::from_raw_os_error(shared.errno.load(Ordering::SeqCst));
        eprintln!("SKIP: \"stored exactly once\" is NOT proven here: ptrace is not permitted: {error}");
        return None;
    }
    let mut all = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let (mut seen, mut steps) = (Seen::new(), 0);
        while shared.done.load(Ordering::SeqCst) == index {
            assert!(tracee.go_on(libc::PTRACE_SINGLESTEP, case), "{case:?}: the child has exited");
            let stored = harvest(shared);
            if !stored.is_empty() {
                seen.push(stored);
            }
            steps += 1;
            assert!(steps < MAX_STEPS, "{case:?}: still storing after {steps} instructions");
        }
        all.push(seen);
        let more = tracee.go_on(libc::PTRACE_CONT, case);
        assert_eq!(more, index + 1 < cases.len(), "{case:?}: a breakpoint per case");
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

/// A posted line is one store where the instruction set has one of that size.
#[test]
fn posted_lines() {
    for (name, stores) in [("scalar", 8), ("sse41", 4), ("avx2", 2), ("avx512", 1), ("movdir64b", 1)] {
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
