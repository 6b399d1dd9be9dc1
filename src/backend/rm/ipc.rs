//! What the 64 bytes of `cuIpcGetMemHandle` mean: learnt on scratch memory, proven, and checked for every block.
//!
//! The layout is documented nowhere, so nothing about it is assumed. [`learn`] looks for words that behave like the
//! process id, the size, the object's page count, the block's offset in its object, and the pair of numbers under which
//! the object can be duplicated; whatever survives must show, in both directions, the bytes of every scratch block.
//! [`secure`] then treats each handle as untrusted: everything that can be checked is, before and after the object is
//! taken. Two of the checks do not rest on the handle at all: where CUDA says that the object around the block starts
//! and ends (documented pointer attributes), and how large the resource manager says that the object is. All of it runs
//! against [`World`], so that tests can lie to it.

use std::sync::{Mutex, PoisonError};

use crate::error::{Error, ErrorKind, MemoryKind, Result};
use crate::range::{GpuAddr, Span};
use crate::sys::num::u64_of;
use crate::sys::rm::RmFailure;

use super::atlas::{Atlas, Place, Witness};
use super::node::explain;

const PAGE: u64 = 4096;

/// Everything that tells one block from another at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Identity {
    pub(super) words: [u32; 16],
    pub(super) base: GpuAddr,
    pub(super) bytes: u64,
    /// What CUDA states (`CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR`, `_SIZE`) of the object around the block.
    pub(super) object_base: GpuAddr,
    pub(super) object_bytes: u64,
    /// CUDA's allocation id, another after free and allocation at the same address.
    pub(super) id: u64,
}

/// What a comparison of bytes through both ways said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Same,
    Different,
    /// Nothing to tell memory apart by: all sampled bytes alike, or changing all the time.
    Inconclusive,
}

/// The driver, as seen from here.
pub(super) trait World {
    type Object;

    fn pid(&self) -> u32;

    fn identity(&self, addr: GpuAddr) -> Result<Identity>;

    fn duplicate(&self, client: u32, object: u32) -> std::result::Result<Self::Object, RmFailure>;

    /// The object's size in bytes, as the resource manager states it.
    fn object_bytes(&self, object: &Self::Object) -> u64;

    /// Whether the object at `offset` is the scratch block `sample`: written one way and read the other, both ways.
    fn proves(&self, object: &Self::Object, offset: u64, sample: &Identity) -> Result<bool>;

    /// Compares a few lines without changing them.
    fn compare(&self, object: &Self::Object, offset: u64, block: &Identity) -> Result<Verdict>;
}

/// The words that hold one number. Where several did on every scratch block, they must agree ever after.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Field(Vec<usize>);

impl Field {
    fn find(holds: impl Fn(usize) -> bool) -> Self {
        Self((0..16).filter(|&index| holds(index)).collect())
    }

    fn read(&self, words: &[u32; 16]) -> Option<u32> {
        let (first, rest) = self.0.split_first()?;
        rest.iter().all(|&index| words[index] == words[*first]).then_some(words[*first])
    }
}

/// Where in a handle the numbers lie, and what was learnt with it.
#[derive(Debug)]
pub(super) struct Layout {
    pid: Field,
    /// Low words of 64-bit numbers.
    size: Field,
    pages: Field,
    offset: Field,
    client: Field,
    object: Field,
    /// CUDA's own client: one for the process, whatever a handle says.
    cuda: u32,
    atlas: Mutex<Atlas>,
}

fn wide(words: &[u32; 16], low: usize) -> Option<u64> {
    let high = *words.get(low + 1)?;
    Some(u64::from(words[low]) | u64::from(high) << 32)
}

fn unknown(cause: &'static str) -> Error {
    Error::new("pin", ErrorKind::UnknownLayout, cause)
        .remedy("allocate with Session::alloc instead, and report the driver's version")
}

/// Finds the layout with scratch blocks of different sizes, some of which share an object.
pub(super) fn learn<W: World>(world: &W, samples: &[Identity]) -> Result<Layout> {
    let pairs = || samples.iter().enumerate().flat_map(|(n, a)| samples[n + 1..].iter().map(move |b| (a, b)));
    let sharing = pairs().any(|(a, b)| a.object_base == b.object_base);
    let apart = pairs().any(|(a, b)| a.object_base != b.object_base);
    if !(sharing && apart) {
        return Err(unknown("scratch blocks do not lie as expected, so that handles cannot be told apart"));
    }
    let every = |holds: &dyn Fn(&Identity) -> bool| samples.iter().all(holds);
    let pid = Field::find(|i| every(&|sample| sample.words[i] == world.pid()));
    if pid.0.is_empty() {
        return Err(unknown(
            "no word of a memory handle holds this process's id: it runs in a PID namespace or under MPS, or the driver \
             is unknown",
        ));
    }
    let size = Field::find(|i| every(&|sample| wide(&sample.words, i) == Some(sample.bytes)));
    if size.0.is_empty() {
        return Err(unknown("no word of a memory handle holds the block's size"));
    }
    let clients = Field::find(|i| samples[0].words[i] != 0 && every(&|sample| sample.words[i] == samples[0].words[i]));
    let objects = Field::find(|i| pairs().all(|(a, b)| (a.words[i] == b.words[i]) == (a.object_base == b.object_base)));
    let offset = Field::find(|i| every(&|sample| u64::from(sample.words[i]) == in_object(sample)));
    let pages = Field::find(|i| every(&|sample| fits(sample, sample.words[i])));
    if offset.0.is_empty() || pages.0.is_empty() {
        return Err(unknown("no word of a memory handle holds the block's place in its object, or the object's size"));
    }
    let mut found: Option<Layout> = None;
    for &client in &clients.0 {
        for &object in &objects.0 {
            let taken: std::result::Result<Vec<_>, _> =
                samples.iter().map(|sample| world.duplicate(sample.words[client], sample.words[object])).collect();
            let Ok(taken) = taken else { continue };
            let mut proven = true;
            for (sample, object) in samples.iter().zip(&taken) {
                proven = proven
                    && world.object_bytes(object) == sample.object_bytes
                    && world.proves(object, in_object(sample), sample)?;
            }
            if !proven {
                continue;
            }
            let layout = Layout {
                pid: pid.clone(),
                size: size.clone(),
                pages: pages.clone(),
                offset: offset.clone(),
                client: Field(vec![client]),
                object: Field(vec![object]),
                cuda: samples[0].words[client],
                atlas: Mutex::default(),
            };
            match &mut found {
                None => found = Some(layout),
                Some(same) if samples.iter().all(|sample| same.names(&sample.words) == layout.names(&sample.words)) => {
                    same.client.merge(client);
                    same.object.merge(object);
                }
                Some(_) => return Err(unknown("two pairs of words of a memory handle name the same memory")),
            }
        }
    }
    let layout = found.ok_or_else(|| {
        unknown(
            "no pair of words of a memory handle names an object that shows the memory: the driver is unknown, or MPS \
                 owns the memory",
        )
    })?;
    for sample in samples {
        layout.record(&layout.claim(world.pid(), sample)?, sample);
    }
    Ok(layout)
}

impl Field {
    fn merge(&mut self, index: usize) {
        if !self.0.contains(&index) {
            self.0.push(index);
        }
    }
}

/// What a handle says once its own consistency was checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Claim {
    place: Place,
    offset: u64,
}

fn refuse(cause: &'static str) -> Error {
    Error::new("pin", ErrorKind::UnsupportedMemory(MemoryKind::Foreign), cause)
        .remedy("allocate with Session::alloc instead")
}

impl Layout {
    fn names(&self, words: &[u32; 16]) -> Option<(u32, u32)> {
        Some((self.client.read(words)?, self.object.read(words)?))
    }

    fn claim(&self, pid: u32, block: &Identity) -> Result<Claim> {
        let words = &block.words;
        if self.pid.read(words) != Some(pid) {
            return Err(refuse("the memory handle names another process: the memory was not allocated here"));
        }
        // A word may hold the low half alone, which scratch blocks, all below 4 GiB, do not show.
        let low = |&low: &usize| u64::from(words[low]) == block.bytes & u64::from(u32::MAX);
        let whole = |&low: &usize| wide(words, low) == Some(block.bytes);
        if !(self.size.0.iter().all(low) && self.size.0.iter().any(whole)) {
            return Err(refuse("the memory handle states another size than the allocation has"));
        }
        let contradictory = || refuse("the memory handle contradicts itself");
        let name = self.names(words).ok_or_else(contradictory)?;
        if name.0 != self.cuda {
            return Err(refuse("the memory handle names another client of the driver than CUDA's"));
        }
        if !self.pages.read(words).is_some_and(|pages| fits(block, pages)) {
            return Err(refuse("the memory handle states another object than CUDA"));
        }
        // A word made of the address can look like the offset on every scratch block, and not on every block.
        let offset = in_object(block);
        if !self.offset.0.iter().any(|&index| u64::from(words[index]) == offset) {
            return Err(refuse("the memory handle's offset does not fit the allocation's address"));
        }
        Ok(Claim { place: Place { name, start: block.object_base.raw(), bytes: block.object_bytes }, offset })
    }

    fn record(&self, claim: &Claim, block: &Identity) {
        let witness = Witness { base: block.base, id: block.id };
        self.atlas.lock().unwrap_or_else(PoisonError::into_inner).record(claim.place, witness);
    }

    /// Whether a live allocation speaks against the claim. CUDA is asked without the lock.
    fn contradicted<W: World>(&self, world: &W, claim: &Claim) -> bool {
        let against = self.atlas.lock().unwrap_or_else(PoisonError::into_inner).against(&claim.place);
        against.iter().any(|witness| world.identity(witness.base).is_ok_and(|now| now.id == witness.id))
    }

    /// Takes the object that `block`'s handle names, unless anything at all speaks against it.
    fn take<W: World>(&self, world: &W, block: &Identity) -> Result<(Claim, W::Object)> {
        let claim = self.claim(world.pid(), block)?;
        if self.contradicted(world, &claim) {
            return Err(refuse("the memory handle places an object where another allocation shows that it is not"));
        }
        let (client, object) = claim.place.name;
        let object =
            world.duplicate(client, object).map_err(|failure| explain(failure, "share CUDA's memory object"))?;
        if world.object_bytes(&object) != claim.place.bytes {
            return Err(refuse("the memory handle leads to an object of another size than CUDA states"));
        }
        match world.compare(&object, claim.offset, block)? {
            Verdict::Same => {}
            Verdict::Inconclusive => {
                tracing::debug!(addr = %block.base, bytes = block.bytes, "the bytes themselves prove nothing");
            }
            Verdict::Different => return Err(refuse("the memory object does not show the allocation's bytes")),
        }
        Ok((claim, object))
    }
}

/// An object that was checked to be the memory of one block.
#[derive(Debug)]
pub(super) struct Secured<O> {
    pub(super) object: O,
    /// Of the block, in the object.
    pub(super) offset: u64,
    pub(super) block: Identity,
}

/// Takes hold of the memory object around `addr`.
///
/// Handle numbers are used again, so another thread's free and allocation could put a different object behind the same
/// number half-way: the block's identity is read before and after, and must not have changed. A failure in between
/// counts only if it has not, for such a thread can cause any.
pub(super) fn secure<W: World>(world: &W, layout: &Layout, addr: GpuAddr) -> Result<Secured<W::Object>> {
    // Reading takes several calls, between which the block can go: only a failure that repeats itself is one.
    let read = || world.identity(addr).or_else(|_| world.identity(addr));
    let mut block = read()?;
    // A change can show in two readings, by halves in the first: three attempts survive any single one.
    for _ in 0..3 {
        let taken = layout.take(world, &block);
        let now = read().map_err(|error| match error.kind() {
            ErrorKind::UnsupportedMemory(MemoryKind::Unallocated) => changed(addr),
            _ => error,
        })?;
        if now == block {
            let (claim, object) = taken?;
            layout.record(&claim, &block);
            return Ok(Secured { object, offset: claim.offset, block });
        }
        block = now;
    }
    Err(changed(addr))
}

/// The block behind an address is another one than it was.
pub(super) fn changed(addr: GpuAddr) -> Error {
    Error::new("pin", ErrorKind::Stale, format!("the allocation at {addr} was freed or replaced meanwhile"))
        .remedy("keep the allocation alive while it is pinned, and pin the new one")
}

/// Bytes from the object's start to the block; past any object where CUDA states nonsense.
fn in_object(block: &Identity) -> u64 {
    block.base.offset_from(block.object_base).map_or(u64::MAX, u64_of)
}

/// Whether an object of so many pages is the block's: all of what CUDA states, or what a block alone in it needs.
fn fits(block: &Identity, pages: u32) -> bool {
    let alone = in_object(block) == 0 && u64::from(pages) == block.bytes.div_ceil(PAGE);
    let inside = in_object(block).checked_add(block.bytes).is_some_and(|end| end <= block.object_bytes);
    inside && (alone || u64::from(pages) * PAGE == block.object_bytes)
}

/// Bytes from the block's start to `span`, which was inside the block that was there before.
pub(super) fn inside(block: &Identity, span: Span) -> Result<u64> {
    let skipped = span.addr.offset_from(block.base).map(u64_of);
    skipped
        .filter(|skipped| skipped.checked_add(u64_of(span.len)).is_some_and(|end| end <= block.bytes))
        .ok_or_else(|| changed(span.addr))
}

#[cfg(test)]
#[path = "ipc_tests.rs"]
mod tests;
