//! Handles: numbers that name a slot and say which of its lives is meant.
//!
//! A handle is never an address, so a made-up or stale one is found out without reading what it points to. Slots live in
//! chunks that are never freed; looking one up takes two loads and no lock. The generation makes a slot's next handle
//! differ from all before (2^43 of them), so a handle that was given up never names a later object.
//!
//! The free list takes no lock either: a child that was forked while another thread held one could never get it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::failure::Failure;

const INDEX_BITS: u32 = 20;
const FIRST_CHUNK: u32 = 64;
const CHUNKS: usize = 14;
/// What fits the chunks: 64, 128, 256, ... slots.
const CAPACITY: u32 = FIRST_CHUNK * ((1 << CHUNKS) - 1);

/// All objects of one kind.
pub(crate) struct Slab<T: 'static> {
    chunks: [OnceLock<Box<[Slot<T>]>>; CHUNKS],
    /// Slots handed out at least once.
    used: AtomicU32,
    /// The first free slot as index + 1, and above it a count that makes every state of the list another.
    free: AtomicU64,
}

#[derive(Default)]
struct Slot<T> {
    /// 0 while free.
    handle: AtomicU64,
    generation: AtomicU64,
    /// The process that made the handle.
    process: AtomicU32,
    /// Index + 1 of the next free slot.
    next: AtomicU32,
    value: T,
}

fn place(index: u32) -> (usize, usize) {
    let chunk = (index / FIRST_CHUNK + 1).ilog2();
    let first = FIRST_CHUNK * ((1 << chunk) - 1);
    (to_usize(chunk), to_usize(index - first))
}

fn to_usize(n: u32) -> usize {
    // The crate underneath refuses targets with narrower pointers.
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn low_half(n: u64) -> u32 {
    u32::try_from(n & u64::from(u32::MAX)).unwrap_or(0)
}

fn index_of(handle: u64) -> u32 {
    low_half(handle & ((1 << INDEX_BITS) - 1))
}

impl<T: Default> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { chunks: [const { OnceLock::new() }; CHUNKS], used: AtomicU32::new(0), free: AtomicU64::new(0) }
    }

    fn slot(&self, index: u32) -> Option<&Slot<T>> {
        let (chunk, at) = place(index);
        self.chunks.get(chunk)?.get()?.get(at)
    }

    fn pop(&self) -> Option<u32> {
        let mut head = self.free.load(Ordering::Acquire);
        loop {
            let index = low_half(head).checked_sub(1)?;
            let next = self.slot(index)?.next.load(Ordering::Relaxed);
            let after = ((head >> 32).wrapping_add(1) << 32) | u64::from(next);
            match self.free.compare_exchange_weak(head, after, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(index),
                Err(now) => head = now,
            }
        }
    }

    fn push(&self, index: u32, slot: &Slot<T>) {
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            slot.next.store(low_half(head), Ordering::Relaxed);
            let after = ((head >> 32).wrapping_add(1) << 32) | u64::from(index + 1);
            match self.free.compare_exchange_weak(head, after, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    fn fresh(&self) -> Option<u32> {
        let below = |used: u32| (used < CAPACITY).then_some(used + 1);
        let index = self.used.fetch_update(Ordering::AcqRel, Ordering::Relaxed, below).ok()?;
        let (chunk, _) = place(index);
        let slots = || (0..to_usize(FIRST_CHUNK) << chunk).map(|_| Slot::default()).collect();
        self.chunks.get(chunk)?.get_or_init(slots);
        Some(index)
    }

    /// A new handle and its slot's value, as the slot's last user left it; `None` when a million are alive.
    pub(crate) fn claim(&self) -> Option<(u64, &T)> {
        let index = self.pop().or_else(|| self.fresh())?;
        let slot = self.slot(index)?;
        let generation = slot.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let handle = (generation << INDEX_BITS) | u64::from(index);
        slot.process.store(std::process::id(), Ordering::Relaxed);
        slot.handle.store(handle, Ordering::Release);
        Some((handle, &slot.value))
    }

    /// The value behind a live handle.
    pub(crate) fn find(&self, handle: u64) -> Option<&T> {
        let slot = self.slot(index_of(handle))?;
        (handle != 0 && slot.handle.load(Ordering::Acquire) == handle).then_some(&slot.value)
    }

    /// The value behind a live handle of this process. It may take locks; `find` is for callers that do not.
    pub(crate) fn find_own(&self, handle: u64) -> Result<&T, Failure> {
        let value = self.find(handle).ok_or_else(Failure::unknown_handle)?;
        let process = self.slot(index_of(handle)).map(|slot| slot.process.load(Ordering::Relaxed));
        if process == Some(std::process::id()) { Ok(value) } else { Err(Failure::wrong_process()) }
    }

    /// Ends a handle of this process. Of several callers one gets the value, to clear it and then `recycle` the handle.
    pub(crate) fn retire(&self, handle: u64) -> Result<&T, Failure> {
        let value = self.find_own(handle)?;
        let slot = self.slot(index_of(handle)).ok_or_else(Failure::unknown_handle)?;
        let won = slot.handle.compare_exchange(handle, 0, Ordering::AcqRel, Ordering::Relaxed);
        won.map(|_| value).map_err(|_| Failure::unknown_handle())
    }

    /// Makes a retired handle live again, before it was recycled.
    pub(crate) fn restore(&self, handle: u64) {
        if let Some(slot) = self.slot(index_of(handle)) {
            slot.handle.store(handle, Ordering::Release);
        }
    }

    /// The values of all slots, those of free ones too.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        (0..self.used.load(Ordering::Acquire)).filter_map(|index| self.slot(index)).map(|slot| &slot.value)
    }

    /// Makes a retired handle's slot free.
    pub(crate) fn recycle(&self, handle: u64) {
        let index = index_of(handle);
        if let Some(slot) = self.slot(index) {
            self.push(index, slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn every_index_has_a_place_of_its_own() {
        let mut expected = (0, 0);
        for index in 0..100_000 {
            assert_eq!(place(index), expected, "{index}");
            expected.1 += 1;
            if expected.1 == 64 << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        assert_eq!(place(CAPACITY - 1), (CHUNKS - 1, (64 << (CHUNKS - 1)) - 1));
        const { assert!(CAPACITY < 1 << INDEX_BITS) };
    }

    #[test]
    fn a_handle_is_never_0_and_never_comes_again() {
        let slab = Slab::<AtomicU32>::new();
        let mut seen = HashSet::new();
        for _ in 0..1000 {
            let (handle, _) = slab.claim().unwrap();
            assert!(handle != 0 && seen.insert(handle));
            assert!(slab.find(handle).is_some());
            slab.retire(handle).unwrap();
            assert!(slab.find(handle).is_none());
            slab.restore(handle);
            assert!(slab.find(handle).is_some());
            slab.retire(handle).unwrap();
            assert!(slab.find(handle).is_none() && slab.retire(handle).is_err());
            slab.recycle(handle);
        }
        assert_eq!(slab.used.load(Ordering::Relaxed), 1, "slots are used again");
        for stranger in [0, 1, 7 << INDEX_BITS, u64::MAX, 0x7fff_0000_1000] {
            assert!(slab.find(stranger).is_none(), "{stranger:#x}");
        }
    }

    #[test]
    fn of_many_threads_one_retires_a_handle() {
        let slab = Slab::<AtomicU32>::new();
        for _ in 0..200 {
            let (handle, _) = slab.claim().unwrap();
            let start = Barrier::new(4);
            let wins: usize = thread::scope(|scope| {
                let race = || {
                    start.wait();
                    usize::from(slab.retire(handle).is_ok())
                };
                let racers: Vec<_> = (0..4).map(|_| scope.spawn(race)).collect();
                racers.into_iter().map(|racer| racer.join().unwrap()).sum()
            });
            assert_eq!(wins, 1);
            slab.recycle(handle);
        }
    }

    #[test]
    fn threads_never_share_a_slot() {
        let slab = Slab::<AtomicU32>::new();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let (handle, owners) = slab.claim().unwrap();
                        assert_eq!(owners.fetch_add(1, Ordering::SeqCst), 0);
                        owners.fetch_sub(1, Ordering::SeqCst);
                        slab.retire(handle).unwrap();
                        slab.recycle(handle);
                    }
                });
            }
        });
        assert!(slab.used.load(Ordering::Relaxed) <= 4);
    }
}
