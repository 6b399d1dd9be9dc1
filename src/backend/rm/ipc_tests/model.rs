//! A driver that can lie, fail, and change its mind between any two calls.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};

use super::super::{Identity, PAGE, Verdict, World};
use super::words::{Facts, Wording};
use crate::error::{Error, ErrorKind, MemoryKind, Result};
use crate::range::GpuAddr;
use crate::sys::num::u64_of;
use crate::sys::rm::RmFailure;

pub(super) const PID: u32 = 0x0001_2f8d;
/// CUDA's client of the resource manager.
pub(super) const CLIENT: u32 = 0xc1d0_0a31;
/// Objects are whole numbers of these, and lie at multiples of them.
const FRAME: u64 = 2 << 20;
/// Granularity of blocks inside a shared object.
const GRAIN: u64 = 512;
const LINE: u64 = 64;
const NOT_FOUND: RmFailure = RmFailure::Status(0x57);

/// A small, deterministic generator (splitmix64).
#[derive(Clone)]
pub(super) struct Rng(pub(super) u64);

pub(super) fn mix(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(super) fn word(&mut self) -> u32 {
        u32::try_from(self.next() >> 32).unwrap()
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % u64_of(n)).unwrap()
    }

    pub(super) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// What memory holds that nobody wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Content {
    /// No two places alike.
    Distinct,
    /// Every object holds the same bytes, as replicas of one tensor do.
    Twins,
    Zero,
}

/// Video memory behind an object's name; it outlives the name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Memory {
    pub(super) serial: u64,
    pub(super) bytes: u64,
}

/// An allocation as it truly is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) id: u64,
    pub(super) name: (u32, u32),
    pub(super) memory: Memory,
    pub(super) offset: u64,
}

#[derive(Default)]
pub(super) struct State {
    /// Every client's objects.
    pub(super) objects: HashMap<(u32, u32), Memory>,
    pub(super) blocks: BTreeMap<u64, Block>,
    /// Shared objects by their address.
    shared: BTreeMap<u64, (u32, Memory)>,
    /// Freed handle numbers and addresses, the last freed used first.
    spare_handles: Vec<u32>,
    spare_places: HashMap<u64, Vec<u64>>,
    handles: u32,
    places: u64,
    serials: u64,
    ids: u64,
    /// Lines written by address in the object; they never overlap.
    written: HashMap<u64, BTreeMap<u64, [u8; 64]>>,
}

impl State {
    fn object(&mut self, client: u32, bytes: u64) -> (u32, Memory) {
        let handle = self.spare_handles.pop().unwrap_or_else(|| {
            self.handles += 1;
            0x5c00_0010 + self.handles
        });
        (handle, self.named(client, handle, bytes))
    }

    /// Puts an object behind a name of anybody's.
    pub(super) fn named(&mut self, client: u32, handle: u32, bytes: u64) -> Memory {
        self.serials += 1;
        let memory = Memory { serial: self.serials, bytes };
        assert!(self.objects.insert((client, handle), memory).is_none(), "a handle names one object");
        memory
    }

    fn place(&mut self, bytes: u64) -> u64 {
        let spare = self.spare_places.get_mut(&bytes).and_then(Vec::pop);
        spare.unwrap_or_else(|| {
            let place = 0x7f3a_4000_0000 + self.places;
            self.places += bytes + if self.serials.is_multiple_of(3) { FRAME } else { 0 };
            place
        })
    }

    fn gap(&self, start: u64, memory: &Memory, bytes: u64) -> Option<u64> {
        let mut at = start;
        for block in self.blocks.range(start..start + memory.bytes).map(|(_, block)| block) {
            if block.base - at >= bytes {
                return Some(at);
            }
            at = (block.base + block.bytes).next_multiple_of(GRAIN);
        }
        (start + memory.bytes - at >= bytes).then_some(at)
    }

    /// Small blocks share objects, first fit; others get their own.
    pub(super) fn alloc(&mut self, bytes: u64) -> u64 {
        self.ids += 1;
        let rounded = if bytes < FRAME { bytes.next_multiple_of(GRAIN) } else { bytes.next_multiple_of(FRAME) };
        let fit = self.shared.iter().find_map(|(&start, &(handle, memory))| {
            let base = self.gap(start, &memory, rounded).filter(|_| bytes < FRAME)?;
            Some((start, base, handle, memory))
        });
        let (start, base, handle, memory) = fit.unwrap_or_else(|| {
            let place = self.place(rounded.max(FRAME));
            let (handle, memory) = self.object(CLIENT, rounded.max(FRAME));
            if bytes < FRAME {
                self.shared.insert(place, (handle, memory));
            }
            (place, place, handle, memory)
        });
        let block = Block { base, bytes, id: self.ids, name: (CLIENT, handle), memory, offset: base - start };
        self.blocks.insert(base, block);
        base
    }

    /// An object of its own where none was before, with the number freed last.
    pub(super) fn alloc_elsewhere(&mut self, bytes: u64) -> u64 {
        let places = std::mem::take(&mut self.spare_places);
        let base = self.alloc(bytes.next_multiple_of(FRAME));
        self.spare_places = places;
        base
    }

    /// An object of its own at an address that was freed, with the number freed last.
    pub(super) fn take_back(&mut self, base: u64, bytes: u64) {
        let places = self.spare_places.entry(bytes.next_multiple_of(FRAME)).or_default();
        places.retain(|&place| place != base);
        places.push(base);
        assert_eq!(self.alloc(bytes), base);
    }

    /// Frees the block that ends where another may begin.
    pub(super) fn free_before(&mut self, base: u64) {
        let before = self.block(base - 1).map(|block| block.base);
        let before = before.or_else(|| self.blocks.range(base - GRAIN..base).next_back().map(|(&base, _)| base));
        if let Some(before) = before.or_else(|| self.block(base - GRAIN).map(|block| block.base)) {
            self.free(before);
        }
    }

    pub(super) fn free(&mut self, base: u64) {
        let block = self.blocks.remove(&base).expect("a live block");
        let start = base - block.offset;
        let empty = self.blocks.range(start..start + block.memory.bytes).next().is_none();
        if empty {
            self.shared.remove(&start);
            self.objects.remove(&block.name);
            self.spare_handles.push(block.name.1);
            self.spare_places.entry(block.memory.bytes).or_default().push(start);
        }
    }

    pub(super) fn block(&self, addr: u64) -> Option<Block> {
        let (_, block) = self.blocks.range(..=addr).next_back()?;
        (addr < block.base + block.bytes).then_some(*block)
    }
}

/// Something another thread does before a step.
pub(super) type Event = Box<dyn Fn(&mut State)>;

pub(super) struct Model {
    pub(super) wording: Wording,
    pub(super) content: Content,
    /// The process id that handles state.
    pub(super) stated_pid: u32,
    pub(super) sharing_forbidden: bool,
    pub(super) window_blind: bool,
    pub(super) state: RefCell<State>,
    /// What handles say instead, by the block's address.
    pub(super) lies: RefCell<HashMap<u64, [u32; 16]>>,
    pub(super) steps: Cell<usize>,
    pub(super) events: RefCell<Vec<(usize, Event)>>,
}

impl Model {
    pub(super) fn new(wording: Wording, content: Content) -> Self {
        Self {
            wording,
            content,
            stated_pid: PID,
            sharing_forbidden: false,
            window_blind: false,
            state: RefCell::default(),
            lies: RefCell::default(),
            steps: Cell::new(0),
            events: RefCell::default(),
        }
    }

    pub(super) fn alloc(&self, bytes: u64) -> u64 {
        self.state.borrow_mut().alloc(bytes)
    }

    pub(super) fn free(&self, base: u64) {
        self.state.borrow_mut().free(base);
    }

    pub(super) fn block(&self, addr: u64) -> Block {
        self.state.borrow().block(addr).expect("an allocated address")
    }

    pub(super) fn words(&self, block: &Block) -> [u32; 16] {
        self.wording.write(&Facts { pid: self.stated_pid, block })
    }

    /// A point between two calls of the driver.
    fn step(&self) {
        let step = self.steps.get();
        self.steps.set(step + 1);
        for (at, event) in self.events.borrow().iter() {
            if *at == step {
                event(&mut self.state.borrow_mut());
            }
        }
    }

    fn line(&self, memory: &Memory, offset: u64) -> [u8; 64] {
        let mut line = [0; 64];
        let serial = match self.content {
            Content::Distinct => memory.serial,
            Content::Twins | Content::Zero => 0,
        };
        if self.content != Content::Zero {
            let (mut word, mut bytes) = (u64::MAX, [0; 8]);
            for (at, byte) in (offset..).zip(&mut line) {
                if at / 8 != word {
                    word = at / 8;
                    bytes = mix(serial << 40 ^ word).to_le_bytes();
                }
                *byte = bytes[usize::try_from(at % 8).unwrap()];
            }
        }
        let state = self.state.borrow();
        if let Some(written) = state.written.get(&memory.serial) {
            for (&start, bytes) in written.range(offset.saturating_sub(63)..offset + 64) {
                for (at, byte) in (start..).zip(bytes) {
                    if let Some(to) = at.checked_sub(offset).and_then(|n| line.get_mut(usize::try_from(n).ok()?)) {
                        *to = *byte;
                    }
                }
            }
        }
        line
    }

    fn write(&self, memory: &Memory, offset: u64, line: [u8; 64]) {
        self.state.borrow_mut().written.entry(memory.serial).or_default().insert(offset, line);
    }

    /// Where CUDA's copies to and from an address go.
    fn through_cuda(&self, addr: u64) -> Result<(Memory, u64)> {
        let block = self.state.borrow().block(addr);
        let block = block.ok_or_else(|| Error::new("pin", ErrorKind::Io(libc::EIO), "the copy failed"))?;
        Ok((block.memory, block.offset + (addr - block.base)))
    }

    fn window(&self, object: &Memory, offset: u64, bytes: u64) -> Result<u64> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= object.bytes);
        inside.then_some(offset).ok_or_else(|| Error::new("map", ErrorKind::OutOfBounds, "past the object's end"))
    }
}

impl World for Model {
    type Object = Memory;

    fn pid(&self) -> u32 {
        PID
    }

    fn identity(&self, addr: GpuAddr) -> Result<Identity> {
        self.step();
        let found = self.state.borrow().block(addr.raw());
        let gone = || Error::new("pin", ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), "not allocated");
        let found = found.ok_or_else(gone)?;
        // The handle is another call, to which the address is all that matters.
        self.step();
        let named = self.state.borrow().block(found.base);
        let failed = || Error::new("pin", ErrorKind::Io(libc::EIO), "cuIpcGetMemHandle failed");
        let named = named.ok_or_else(failed)?;
        let lie = self.lies.borrow().get(&named.base).copied();
        let words = lie.unwrap_or_else(|| self.words(&named));
        Ok(Identity {
            words,
            base: GpuAddr::new(found.base),
            bytes: found.bytes,
            object_base: GpuAddr::new(found.base - found.offset),
            object_bytes: found.memory.bytes,
            id: found.id,
        })
    }

    fn duplicate(&self, client: u32, object: u32) -> std::result::Result<Memory, RmFailure> {
        self.step();
        if self.sharing_forbidden {
            return Err(RmFailure::Status(crate::sys::rm::STATUS_NO_PERMISSION));
        }
        self.state.borrow().objects.get(&(client, object)).copied().ok_or(NOT_FOUND)
    }

    fn object_bytes(&self, object: &Memory) -> u64 {
        object.bytes
    }

    fn proves(&self, object: &Memory, offset: u64, sample: &Identity) -> Result<bool> {
        for at in [0, sample.bytes - LINE] {
            let (memory, inside) = self.through_cuda(sample.base.raw() + at)?;
            let shown = self.window(object, offset + at, LINE)?;
            let mut line = [0; 64];
            line[..8].copy_from_slice(&mix(inside ^ memory.serial << 32).to_le_bytes());
            self.write(&memory, inside, line);
            if self.window_blind || self.line(object, shown) != line {
                return Ok(false);
            }
            line[8..16].copy_from_slice(&mix(shown).to_le_bytes());
            self.write(object, shown, line);
            if self.line(&memory, inside) != line {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn compare(&self, object: &Memory, offset: u64, block: &Identity) -> Result<Verdict> {
        let bytes = block.bytes.min(LINE);
        let many = usize::try_from(bytes).unwrap();
        let mut uniform = true;
        let tail = block.bytes - bytes;
        for at in [0, (tail / 2) & !63, tail] {
            self.step();
            let shown = self.line(object, self.window(object, offset + at, bytes)?);
            self.step();
            let (memory, inside) = self.through_cuda(block.base.raw() + at)?;
            let device = self.line(&memory, inside);
            uniform &= device[..many].iter().all(|byte| *byte == device[0]);
            if shown[..many] != device[..many] {
                return Ok(Verdict::Different);
            }
        }
        Ok(if uniform { Verdict::Inconclusive } else { Verdict::Same })
    }
}

/// Pages as handles state them: all of a shared object's, and as many as a block needs of one of its own.
pub(super) fn pages(block: &Block) -> u32 {
    let bytes = if block.bytes < FRAME { block.memory.bytes } else { block.bytes };
    u32::try_from(bytes.div_ceil(PAGE)).unwrap()
}
