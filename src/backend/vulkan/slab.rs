//! Small buffers, many to one memory object: a thousand of them are one import, not a thousand.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{Allocation, Allocator};
use crate::cuda::context::Device;
use crate::cuda::memory::CudaAllocation;
use crate::error::{Error, ErrorKind, Feature, MemoryKind, Result};
use crate::range::{GpuAddr, Span};

/// A whole memory object from here on.
pub(super) const SMALL_BELOW: usize = 64 << 10;

/// What `cuMemCreate` gives at least.
const SLAB: usize = 2 << 20;

/// A line: blocks share none.
const LINE: usize = 64;

/// What tells a block from another one at the same place, later.
pub(super) type Serial = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Live {
    /// As asked for.
    bytes: usize,
    serial: Serial,
}

/// Which parts of a slab are in use.
#[derive(Debug)]
struct Blocks {
    /// By offset.
    live: BTreeMap<usize, Live>,
    /// Lengths by offset; no two touch.
    free: BTreeMap<usize, usize>,
}

impl Blocks {
    fn new(bytes: usize) -> Self {
        Self { live: BTreeMap::new(), free: BTreeMap::from([(0, bytes)]) }
    }

    /// The first place that is large enough.
    fn take(&mut self, bytes: usize, serial: Serial) -> Option<usize> {
        let need = bytes.checked_next_multiple_of(LINE)?;
        let (at, len) = self.free.iter().map(|(&at, &len)| (at, len)).find(|&(_, len)| len >= need)?;
        self.free.remove(&at);
        if len > need {
            self.free.insert(at + need, len - need);
        }
        self.live.insert(at, Live { bytes, serial });
        Some(at)
    }

    fn give_back(&mut self, at: usize) {
        let Some(live) = self.live.remove(&at) else { return };
        let (mut start, mut end) = (at, at + live.bytes.next_multiple_of(LINE));
        if let Some((&before, &len)) = self.free.range(..at).next_back()
            && before + len == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(len) = self.free.remove(&end) {
            end += len;
        }
        self.free.insert(start, end - start);
    }

    /// The block that has the byte at `offset`.
    fn at(&self, offset: usize) -> Option<(usize, Live)> {
        let (&at, &live) = self.live.range(..=offset).next_back()?;
        (offset - at < live.bytes).then_some((at, live))
    }

    /// The first block that reaches into `len` bytes from `offset`.
    fn within(&self, offset: usize, len: usize) -> Option<(usize, Live)> {
        self.at(offset).or_else(|| self.live.range(offset..offset + len).next().map(|(&at, &live)| (at, live)))
    }
}

#[derive(Debug)]
struct Slab {
    memory: CudaAllocation,
}

#[derive(Debug)]
struct Entry {
    slab: Arc<Slab>,
    blocks: Blocks,
}

#[derive(Debug, Default)]
struct Table {
    entries: Vec<Entry>,
    serial: Serial,
}

/// The slabs of a session.
#[derive(Debug, Default)]
pub(super) struct Slabs {
    table: Mutex<Table>,
}

/// A block, by an address in it and its serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    anchor: GpuAddr,
    serial: Serial,
}

/// How far a range may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Not past its block.
    Block,
    /// Not past the memory object.
    Object,
}

impl Slabs {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alloc(self: &Arc<Self>, device: Device, bytes: usize) -> Result<Box<dyn Allocation>> {
        let mut table = self.table();
        table.serial += 1;
        let serial = table.serial;
        let mut there = table.entries.iter_mut().filter(|entry| entry.slab.memory.ordinal() == device.ordinal);
        let found = there.find_map(|entry| Some((entry.blocks.take(bytes, serial)?, Arc::clone(&entry.slab))));
        let (at, slab) = match found {
            Some(found) => found,
            None => {
                let slab = Arc::new(Slab { memory: CudaAllocation::new(device, SLAB, Allocator::Buffer)? });
                let mut blocks = Blocks::new(SLAB);
                let at = blocks.take(bytes, serial).ok_or_else(|| {
                    Error::new("alloc", ErrorKind::InvalidArgument, format!("{bytes} bytes are no small buffer"))
                })?;
                table.entries.push(Entry { slab: Arc::clone(&slab), blocks });
                (at, slab)
            }
        };
        drop(table);
        Ok(Box::new(SlabBuffer { slabs: Arc::clone(self), slab: Some(slab), at }))
    }

    /// The block that `span` is in, or, reaching for the object, that is in `span`. `None` outside slabs.
    pub(super) fn find(&self, span: Span, reach: Reach) -> Result<Option<Block>> {
        let table = self.table();
        let inside = |entry: &Entry| span.addr.offset_from(entry.slab.memory.addr()).filter(|&offset| offset < SLAB);
        let Some((offset, entry)) = table.entries.iter().find_map(|entry| Some((inside(entry)?, entry))) else {
            return Ok(None);
        };
        let (found, end) = match reach {
            Reach::Block => {
                let found = entry.blocks.at(offset);
                (found, found.map_or(SLAB, |(at, live)| at + live.bytes))
            }
            Reach::Object => (entry.blocks.within(offset, span.len), SLAB),
        };
        let Some((at, live)) = found else {
            let cause = format!("{} is not in any live buffer of this session", span.addr);
            return Err(Error::new("pin", ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), cause)
                .remedy("pass a device pointer that was allocated here and not freed"));
        };
        if offset.checked_add(span.len).is_none_or(|reached| reached > end) {
            let cause = format!("{} bytes from {} reach past the end of a small buffer", span.len, span.addr);
            return Err(Error::new("pin", ErrorKind::OutOfBounds, cause).remedy("pin only what was allocated"));
        }
        let anchor = entry.slab.memory.addr().checked_add(at).unwrap_or(span.addr);
        Ok(Some(Block { anchor, serial: live.serial }))
    }

    /// Whether it has been neither freed nor replaced.
    pub(super) fn still(&self, block: Block) -> bool {
        let table = self.table();
        table.entries.iter().any(|entry| {
            let offset = block.anchor.offset_from(entry.slab.memory.addr());
            offset.and_then(|offset| entry.blocks.live.get(&offset)).is_some_and(|live| live.serial == block.serial)
        })
    }
}

/// A small buffer.
#[derive(Debug)]
struct SlabBuffer {
    slabs: Arc<Slabs>,
    /// Present until freed.
    slab: Option<Arc<Slab>>,
    at: usize,
}

impl SlabBuffer {
    fn memory(&self) -> Result<&CudaAllocation> {
        let freed = || Error::new("use", ErrorKind::Stale, "the memory was freed");
        self.slab.as_ref().map(|slab| &slab.memory).ok_or_else(freed)
    }
}

impl Allocation for SlabBuffer {
    fn addr(&self) -> GpuAddr {
        let base = self.slab.as_ref().map(|slab| slab.memory.addr());
        base.and_then(|base| base.checked_add(self.at)).unwrap_or(GpuAddr::new(0))
    }

    fn ordinal(&self) -> usize {
        self.slab.as_ref().map_or(0, |slab| slab.memory.ordinal())
    }

    fn owns_object(&self) -> bool {
        false
    }

    // DeviceBuffer checked each offset against the length, which is inside the slab.
    fn upload(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.memory()?.upload(self.at + offset, from)
    }

    fn download(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.memory()?.download(self.at + offset, to)
    }

    fn make_current(&self) -> Result<()> {
        self.memory()?.make_current()
    }

    fn export(&self) -> Result<OwnedFd> {
        Err(Error::new(
            "export",
            ErrorKind::UnsupportedFeature(Feature::Operation),
            "the buffer shares its memory object with others, which a descriptor would hand over too",
        )
        .remedy("allocate it with Session::alloc_as and Allocator::CuMemCreate"))
    }

    fn free(&mut self) -> Result<()> {
        let Some(slab) = self.slab.take() else { return Ok(()) };
        let mut table = self.slabs.table();
        if let Some(at) = table.entries.iter().position(|entry| Arc::ptr_eq(&entry.slab, &slab)) {
            let blocks = &mut table.entries[at].blocks;
            blocks.give_back(self.at);
            if blocks.live.is_empty() {
                table.entries.swap_remove(at);
            }
        }
        drop(table);
        // Several may end at once; one of them is the last.
        Arc::into_inner(slab).map_or(Ok(()), |mut slab| slab.memory.free())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_fit_is_the_block_just_freed() {
        let mut blocks = Blocks::new(SLAB);
        let first = blocks.take(100, 1).unwrap();
        let second = blocks.take(1, 2).unwrap();
        assert_eq!((first, second), (0, 128));
        blocks.give_back(first);
        assert!(blocks.at(0).is_none());
        assert_eq!(blocks.take(128, 3), Some(0));
        assert_eq!(blocks.take(SMALL_BELOW, 4), Some(192));
        assert_eq!(blocks.at(0).unwrap().1.serial, 3);
    }

    #[test]
    fn blocks_end_where_they_were_asked_to() {
        let mut blocks = Blocks::new(SLAB);
        blocks.take(100, 1).unwrap();
        blocks.take(10, 2).unwrap();
        assert_eq!(blocks.at(99).unwrap().1.serial, 1);
        assert!(blocks.at(100).is_none() && blocks.at(127).is_none());
        assert_eq!(blocks.at(128).unwrap().1.serial, 2);
        assert_eq!(blocks.within(100, 28), None);
        assert_eq!(blocks.within(100, 29).unwrap().0, 128);
        assert_eq!(blocks.within(50, 1).unwrap().0, 0);
    }

    #[test]
    fn a_thousand_small_buffers_fit_one_slab() {
        let mut blocks = Blocks::new(SLAB);
        assert!((0..1000).all(|serial| blocks.take(2000, serial).is_some()));
        assert_eq!(blocks.take(SMALL_BELOW, 1000), None);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_of_it_comes_back(
            steps in proptest::collection::vec((1_usize..SMALL_BELOW, any::<prop::sample::Index>(), any::<bool>()), 1..300),
        ) {
            let mut blocks = Blocks::new(SLAB);
            for (serial, (bytes, which, free)) in (0..).zip(&steps) {
                let held: Vec<usize> = blocks.live.keys().copied().collect();
                if *free && !held.is_empty() {
                    blocks.give_back(*which.get(&held));
                } else {
                    blocks.take(*bytes, serial);
                }
                let lines = |len: usize| len.next_multiple_of(LINE);
                let mut parts: Vec<(usize, usize)> =
                    blocks.live.iter().map(|(&at, live)| (at, lines(live.bytes))).collect();
                parts.extend(blocks.free.iter().map(|(&at, &len)| (at, len)));
                parts.sort_unstable();
                let end = parts.iter().try_fold(0, |end, &(at, len)| (at == end).then_some(at + len));
                prop_assert_eq!(end, Some(SLAB), "the parts are the whole, once");
                prop_assert!(parts.iter().all(|&(at, _)| at.is_multiple_of(LINE)));
            }
            for at in blocks.live.keys().copied().collect::<Vec<_>>() {
                blocks.give_back(at);
            }
            prop_assert_eq!(&blocks.free, &BTreeMap::from([(0, SLAB)]));
        }
    }
}
