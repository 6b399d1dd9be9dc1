//! The fences of each verb, instruction by instruction: what [`Mapping`] promises about ordering.
//!
//! A forked child uses a mapping of emulated memory while its parent single-steps it. The parent sees each fence as it comes
//! up and each store as it lands. For loads it changes the memory under the child's hands, at every fence: what a verb
//! returns then tells between which fences it was fetched.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]
#![allow(unsafe_code, reason = "memory shared between two processes, and the wrong verbs that the harness has to see")]

mod common;

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::step::{Tracee, breakpoint};
use gdrcopy::{BackendKind, Error, ErrorKind, Mapping, Session, copy};

/// Bytes of the window that are watched; everything happens here.
const BYTES: usize = 512;
/// A store or a load that takes longer than this runs away.
const MAX_STEPS: usize = 100_000;

/// What the memory holds when a load begins, after its first fence, its second, and its third.
const BEFORE: u8 = 0x11;
const BETWEEN: u8 = 0x22;
const AFTER: u8 = 0x33;
const LAST: u8 = 0x44;

/// What parent and child share.
#[repr(C, align(4096))]
struct Shared {
    /// Where the child's window is.
    window: AtomicUsize,
    /// How many verbs the child has done.
    done: AtomicUsize,
    /// What its loads returned, 0 where they returned nothing.
    loaded: [AtomicU8; BYTES],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fence {
    Store,
    Full,
    Load,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Event {
    Fence(Fence),
    /// All that was stored since the last fence: these bytes and none in between is missing.
    Stores(Range<usize>),
}

use Event::Stores;
const SFENCE: Event = Event::Fence(Fence::Store);
const MFENCE: Event = Event::Fence(Fence::Full);
const LFENCE: Event = Event::Fence(Fence::Load);

impl Fence {
    /// Intel SDM volume 2: SFENCE is NP 0F AE F8, MFENCE NP 0F AE F0, LFENCE NP 0F AE E8.
    fn decode(instruction: [u8; 8]) -> Option<Self> {
        match instruction {
            [0x0f, 0xae, 0xf8, ..] => Some(Self::Store),
            [0x0f, 0xae, 0xf0, ..] => Some(Self::Full),
            [0x0f, 0xae, 0xe8, ..] => Some(Self::Load),
            _ => None,
        }
    }
}

/// What a verb did and what it should have done.
struct Case {
    name: &'static str,
    /// Runs in the child. Loads put what they fetched into the buffer and say how many bytes.
    perform: fn(&Mapping<'_>, &mut [u8; BYTES]) -> usize,
    wanted: &'static [Event],
    /// What the loaded bytes have to be, each different byte once.
    fetched: &'static [u8],
}

const fn store(
    name: &'static str,
    perform: fn(&Mapping<'_>, &mut [u8; BYTES]) -> usize,
    wanted: &'static [Event],
) -> Case {
    Case { name, perform, wanted, fetched: &[] }
}

const fn load(name: &'static str, perform: fn(&Mapping<'_>, &mut [u8; BYTES]) -> usize) -> Case {
    Case { name, perform, wanted: &[MFENCE, LFENCE], fetched: &[BETWEEN] }
}

/// A load by a routine, which has a fence of its own before the memory is asked: every branch is decided by then.
const fn routine(name: &'static str, perform: fn(&Mapping<'_>, &mut [u8; BYTES]) -> usize) -> Case {
    Case { name, perform, wanted: &[MFENCE, LFENCE, LFENCE], fetched: &[AFTER] }
}

/// A verb that fences like a load and returns nothing.
const fn load_of_nothing(name: &'static str, perform: fn(&Mapping<'_>, &mut [u8; BYTES]) -> usize) -> Case {
    Case { fetched: &[], ..load(name, perform) }
}

/// What the stores store: no zero, which is what the parent puts back.
static DATA: [u8; BYTES] = [0xd7; BYTES];
const LINE: [u8; 64] = [0xd7; 64];

macro_rules! done {
    ($verb:expr) => {{
        $verb.unwrap();
        0
    }};
}

const CASES: &[Case] = &[
    store("write 1", |m, _| done!(m.write(3, &DATA[..1])), &[Stores(3..4), SFENCE]),
    store("write 8", |m, _| done!(m.write(8, &DATA[..8])), &[Stores(8..16), SFENCE]),
    store("write 64", |m, _| done!(m.write(64, &DATA[..64])), &[Stores(64..128), SFENCE]),
    store("write 300 odd", |m, _| done!(m.write(5, &DATA[..300])), &[Stores(5..305), SFENCE]),
    store("write nothing", |m, _| done!(m.write(5, &[])), &[SFENCE]),
    store("write_posted 8", |m, _| done!(m.write_posted(8, &DATA[..8])), &[Stores(8..16)]),
    store("write_posted 300 odd", |m, _| done!(m.write_posted(5, &DATA[..300])), &[Stores(5..305)]),
    store("write_value 8", |m, _| done!(m.write_value(8, &[0xd7_u8; 8])), &[Stores(8..16), SFENCE]),
    store("write_value 24", |m, _| done!(m.write_value(8, &[0xd7_u8; 24])), &[Stores(8..32), SFENCE]),
    store("write_value 48", |m, _| done!(m.write_value(16, &[0xd7_u8; 48])), &[Stores(16..64), SFENCE]),
    store("write_value 64", |m, _| done!(m.write_value(64, &LINE)), &[Stores(64..128), SFENCE]),
    store("write_value 64 misaligned", |m, _| done!(m.write_value(7, &LINE)), &[Stores(7..71), SFENCE]),
    store("write_value 100", |m, _| done!(m.write_value(64, &[0xd7_u8; 100])), &[Stores(64..164), SFENCE]),
    store("write_value_posted 8", |m, _| done!(m.write_value_posted(8, &[0xd7_u8; 8])), &[Stores(8..16)]),
    store("write_value_posted 64", |m, _| done!(m.write_value_posted(64, &LINE)), &[Stores(64..128)]),
    store("write_value_posted misaligned", |m, _| done!(m.write_value_posted(7, &LINE)), &[Stores(7..71)]),
    store("store_u32", |m, _| done!(m.store_u32(4, u32::MAX)), &[Stores(4..8), SFENCE]),
    store("store_u64", |m, _| done!(m.store_u64(8, u64::MAX)), &[Stores(8..16), SFENCE]),
    store("store_u32_posted", |m, _| done!(m.store_u32_posted(4, u32::MAX)), &[Stores(4..8)]),
    store("store_u64_posted", |m, _| done!(m.store_u64_posted(8, u64::MAX)), &[Stores(8..16)]),
    store("post_line", |m, _| done!(m.post_line(64, &LINE)), &[Stores(64..128)]),
    store(
        "batch",
        |m, _| {
            done!(m.batch(|batch| {
                batch.write(0, &DATA[..17])?;
                batch.store_u32(20, u32::MAX)?;
                batch.store_u64(24, u64::MAX)?;
                batch.write_value(32, &[0xd7_u8; 32])?;
                batch.write_value(17, &[0xd7_u8; 3])?;
                batch.post_line(64, &LINE)
            }))
        },
        &[Stores(0..128), SFENCE],
    ),
    store(
        "batch that fails",
        |m, _| {
            let end = m.len();
            let failed = m.batch(|batch| {
                batch.write(0, &DATA[..17])?;
                batch.write(end, &DATA[..1])
            });
            assert_eq!(failed.map_err(|error| error.kind()), Err(ErrorKind::OutOfBounds));
            0
        },
        &[Stores(0..17), SFENCE],
    ),
    store(
        "publish u32",
        |m, _| done!(m.publish(9, &DATA[..100], 256, u32::MAX)),
        &[Stores(9..109), SFENCE, Stores(256..260), SFENCE],
    ),
    store(
        "publish u64",
        |m, _| done!(m.publish(64, &DATA[..64], 8, u64::MAX)),
        &[Stores(64..128), SFENCE, Stores(8..16), SFENCE],
    ),
    load("load_u32", |m, to| filled(to, &m.load_u32(4).unwrap().to_ne_bytes())),
    load("load_u64", |m, to| filled(to, &m.load_u64(8).unwrap().to_ne_bytes())),
    routine("read 1", |m, to| read(m, 3, &mut to[..1])),
    routine("read 8", |m, to| read(m, 8, &mut to[..8])),
    routine("read 64", |m, to| read(m, 64, &mut to[..64])),
    routine("read 300 odd", |m, to| read(m, 5, &mut to[..300])),
    load_of_nothing("read nothing", |m, to| read(m, 5, &mut to[..0])),
    routine("read_value 8", |m, to| filled(to, &m.read_value::<[u8; 8]>(8).unwrap())),
    routine("read_value 24", |m, to| filled(to, &m.read_value::<[u8; 24]>(9).unwrap())),
    load_of_nothing("flush", |m, _| done!(m.flush())),
];

fn filled(to: &mut [u8; BYTES], value: &[u8]) -> usize {
    to[..value.len()].copy_from_slice(value);
    value.len()
}

fn read(mapping: &Mapping<'_>, offset: usize, to: &mut [u8]) -> usize {
    mapping.read(offset, to).unwrap();
    to.len()
}

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

/// Runs in the child. A session of its own: what a parent opened, a child cannot use.
fn perform_all(shared: &Shared, cases: &[Case], routine: &str) -> Result<(), Error> {
    let builder = Session::builder().ignore_env().backend(BackendKind::Emulated).copy_routine(routine);
    let session = builder.open()?;
    let buffer = session.alloc(4096)?;
    let mapping = session.pin(&buffer)?.map()?;
    mapping.write(0, &[0; BYTES])?;
    shared.window.store(mapping.as_ptr().addr(), Ordering::SeqCst);
    let mut to = [0; BYTES];
    for (index, case) in cases.iter().enumerate() {
        breakpoint();
        let loaded = (case.perform)(&mapping, &mut to);
        shared.done.store(index + 1, Ordering::SeqCst);
        for (at, shared) in shared.loaded.iter().enumerate() {
            shared.store(if at < loaded { to[at] } else { 0 }, Ordering::SeqCst);
        }
    }
    breakpoint();
    Ok(())
}

/// What one verb did.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    events: Vec<Event>,
    /// What it loaded, each different byte once.
    fetched: Vec<u8>,
}

/// One verb under the parent's eyes.
struct Watch<'a> {
    tracee: &'a Tracee,
    window: usize,
    /// Loads are watched by what the memory holds, stores by what they change.
    is_load: bool,
    events: Vec<Event>,
    /// Stored since the last fence.
    stored: [bool; BYTES],
}

impl Watch<'_> {
    fn fill(&self, with: u8) {
        self.tracee.write(self.window, &[with; BYTES]);
    }

    fn end_stores(&mut self) {
        let stored: Vec<_> = (0..BYTES).filter(|&at| self.stored[at]).collect();
        if let (Some(&first), Some(&last)) = (stored.first(), stored.last()) {
            assert_eq!(stored.len(), last + 1 - first, "{:?} and then a gap: {stored:?}", self.events);
            self.events.push(Stores(first..last + 1));
        }
        self.stored = [false; BYTES];
    }

    fn step(&mut self, doing: &dyn std::fmt::Debug) {
        let fence = Fence::decode(self.tracee.next_instruction());
        self.tracee.step(doing);
        if !self.is_load {
            let mut now = [0; BYTES];
            self.tracee.read(self.window, &mut now);
            if now != [0; BYTES] {
                now.iter().enumerate().filter(|&(_, &byte)| byte != 0).for_each(|(at, _)| self.stored[at] = true);
                self.fill(0);
            }
        }
        if let Some(fence) = fence {
            self.end_stores();
            self.events.push(Event::Fence(fence));
            if self.is_load {
                // Of a load all events are fences.
                self.fill([BEFORE, BETWEEN, AFTER].get(self.events.len()).copied().unwrap_or(LAST));
            }
        }
    }
}

/// `None` where tracing is not permitted.
fn trace(cases: &[Case], routine: &str) -> Option<Vec<Seen>> {
    let shared = shared();
    let tracee = Tracee::start("the order of fences and accesses", || perform_all(shared, cases, routine).unwrap())?;
    let window = shared.window.load(Ordering::SeqCst);
    let mut all = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let is_load = case.wanted.first() == Some(&MFENCE);
        let mut watch = Watch { tracee: &tracee, window, is_load, events: Vec::new(), stored: [false; BYTES] };
        watch.fill(if is_load { BEFORE } else { 0 });
        let mut steps = 0;
        while shared.done.load(Ordering::SeqCst) == index {
            watch.step(&case.name);
            steps += 1;
            assert!(steps < MAX_STEPS, "{}: not done after {steps} instructions", case.name);
        }
        watch.end_stores();
        let events = watch.events;
        assert!(tracee.resume(&case.name), "{}: a breakpoint after each verb", case.name);
        let mut fetched: Vec<_> = shared.loaded.iter().map(|byte| byte.load(Ordering::SeqCst)).collect();
        fetched.retain(|&byte| byte != 0);
        fetched.dedup();
        all.push(Seen { events, fetched });
    }
    Some(all)
}

/// A forked child inherits what other tests' threads hold at the time, and waits for ever for what they are about to set up. So
/// whole tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn every_verb_fences_as_promised() {
    let _alone = alone();
    for routine in copy::routines().iter().filter(|routine| routine.is_available()) {
        let Some(seen) = trace(CASES, routine.name()) else { return };
        for (case, seen) in CASES.iter().zip(seen) {
            assert_eq!(seen.events, case.wanted, "{}, {}", case.name, routine.name());
            assert_eq!(seen.fetched, case.fetched, "{}, {}", case.name, routine.name());
        }
    }
}

/// The harness has to see what it is there to see.
#[test]
fn wrong_verbs_are_caught() {
    let _alone = alone();
    let wrong = [
        store("data and flag without a fence", |m, _| done!(m.write_posted(0, &DATA[..4])), &[]),
        store(
            "flag before data",
            |m, _| {
                m.store_u32(256, 1).unwrap();
                done!(m.write(9, &DATA[..100]))
            },
            &[],
        ),
        load("a load without fences", |m, to| {
            // SAFETY: aligned and inside the mapping.
            let value = unsafe { copy::load_u32(m.as_ptr().cast()) };
            filled(to, &value.to_ne_bytes())
        }),
        load("a load before its fences", |m, to| {
            // SAFETY: as above.
            let value = unsafe { copy::load_u32(m.as_ptr().cast()) };
            copy::fence::full();
            copy::fence::load();
            filled(to, &value.to_ne_bytes())
        }),
        load("a load behind its fences", |m, to| {
            copy::fence::full();
            copy::fence::load();
            // SAFETY: as above.
            let value = unsafe { copy::load_u32(m.as_ptr().cast()) };
            filled(to, &value.to_ne_bytes())
        }),
        load("a load behind all fences of a routine's", |m, to| {
            copy::fence::full();
            copy::fence::load();
            copy::fence::load();
            // SAFETY: as above.
            let value = unsafe { copy::load_u32(m.as_ptr().cast()) };
            filled(to, &value.to_ne_bytes())
        }),
    ];
    let Some(seen) = trace(&wrong, "scalar") else { return };
    let fences = [MFENCE, LFENCE];
    let wanted = [
        (&[Stores(0..4)][..], None),
        (&[Stores(256..257), SFENCE, Stores(9..109), SFENCE], None),
        (&[], Some(BEFORE)),
        (&fences, Some(BEFORE)),
        (&fences, Some(AFTER)),
        (&[MFENCE, LFENCE, LFENCE], Some(LAST)),
    ];
    for ((case, seen), (events, fetched)) in wrong.iter().zip(seen).zip(wanted) {
        assert_eq!((&seen.events[..], seen.fetched), (events, Vec::from_iter(fetched)), "{}", case.name);
    }
}
