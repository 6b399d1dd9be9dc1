//! Memory that is freed, and windows that are closed, under somebody's eyes.

use super::super::bench::{
    Bench, Mapped, Step, Stop, after_free_in_words, downloaded, ensure, filled, refused, same, unguarded,
};
use super::super::fork::{self, is_readable, is_writable};
use super::super::voice;
use crate::backend::{AfterFree, BackendKind};
use crate::buffer::DeviceBuffer;
use crate::error::{ErrorKind, MemoryKind};
use crate::mapping::Mapping;
use crate::pinned::Pinned;
use crate::range::GpuAddr;
use crate::session::Session;

const SMALL: usize = 4096;
/// From here on `cudaMalloc` memory has an object of its own.
const LARGE: usize = 4 << 20;
/// How often to allocate until an address comes back.
const TRIES: usize = 64;

/// A mapping that outlives its memory.
struct Orphan {
    session: Session,
    mapping: Mapping<'static>,
    _pinned: Pinned<'static>,
    addr: GpuAddr,
    bytes: usize,
    row: AfterFree,
    /// Keeps a shared object from going with its last block.
    sibling: DeviceBuffer,
}

impl Orphan {
    /// Maps a buffer, and frees it.
    fn new(bench: &Bench, bytes: usize) -> Step<Self> {
        let session = bench.open()?;
        let sibling = bench.buffer(&session, bytes)?;
        sibling.upload(0, &filled(bytes, 9))?;
        let buffer = bench.buffer(&session, bytes)?;
        let addr = buffer.addr();
        let pinned = session.pin(unguarded(&buffer))?;
        let mapping = pinned.map()?;
        mapping.write(0, &filled(bytes, 1))?;
        mapping.flush()?;
        let row = mapping.facts().after_free;
        let stated = session.semantics();
        ensure!(
            row == stated.whole_object || row == stated.shared_object,
            "the mapping says {row:?}, the backend says {stated:?}"
        );
        voice::note(format!("backend {}, {}: after free {}", session.backend(), bench.how, after_free_in_words(row)));
        buffer.free()?;
        Ok(Self { session, mapping, _pinned: pinned, addr, bytes, row, sibling })
    }

    /// New owners of device memory, one of them perhaps at the old address.
    fn owners(&self, bench: &Bench) -> Step<Vec<DeviceBuffer>> {
        let mut owners = Vec::new();
        for _ in 0..TRIES {
            match self.session.alloc_as(bench.gpu(), self.bytes, bench.how) {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => break,
                allocated => owners.push(allocated?),
            }
            if owners.last().is_some_and(|owner| owner.addr() == self.addr) {
                break;
            }
        }
        for owner in &owners {
            owner.upload(0, &filled(self.bytes, 5))?;
        }
        Ok(owners)
    }

    fn has_new_owner(&self, owners: &[DeviceBuffer]) -> bool {
        owners.last().is_some_and(|owner| owner.addr() == self.addr)
    }

    /// No access goes through, as the kernel finds out without dying of it.
    fn is_out_of_reach(&self) -> Step {
        for at in [0, 1, self.bytes / 2, self.bytes - 1] {
            let place = self.mapping.as_ptr().wrapping_add(at);
            ensure!(!is_readable(place), "byte {at} of freed memory is readable");
            ensure!(!is_writable(place, 0xee), "byte {at} of freed memory is writable");
        }
        Ok(())
    }

    fn sibling_is_unharmed(&self) -> Step {
        same(&downloaded(&self.sibling)?, &filled(self.bytes, 9), "a neighbour that was not freed")
    }
}

pub(crate) fn invalidation_access_after_free(bench: &Bench) -> Step {
    access_after_free(bench, SMALL)
}

pub(crate) fn invalidation_access_after_free_large(bench: &Bench) -> Step {
    access_after_free(bench, LARGE)
}

fn access_after_free(bench: &Bench, bytes: usize) -> Step {
    let orphan = Orphan::new(bench, bytes)?;
    let mut seen = vec![0; bytes];
    match orphan.row {
        AfterFree::Persistent => {
            orphan.mapping.read(0, &mut seen)?;
            same(&seen, &filled(bytes, 1), "the old bytes, which stay on this backend")?;
            orphan.mapping.write(0, &filled(bytes, 2))?;
            orphan.mapping.read(0, &mut seen)?;
            same(&seen, &filled(bytes, 2), "bytes written after the free")?;
            orphan.sibling_is_unharmed()
        }
        AfterFree::Aliased => {
            // Whose bytes these are now is not promised; that access is no fault is.
            orphan.mapping.read(0, &mut seen)?;
            orphan.sibling_is_unharmed()
        }
        AfterFree::Sigbus => {
            orphan.is_out_of_reach()?;
            orphan.sibling_is_unharmed()?;
            voice::dying_of(libc::SIGBUS, "a read of freed memory");
            orphan.mapping.read(0, &mut seen)?;
            Ok(())
        }
    }
}

pub(crate) fn invalidation_next_owner(bench: &Bench) -> Step {
    let orphan = Orphan::new(bench, SMALL)?;
    let owners = orphan.owners(bench)?;
    let came_back = orphan.has_new_owner(&owners);
    match orphan.row {
        AfterFree::Aliased => {
            if !came_back {
                return Err(Stop::Waived(format!(
                    "backend {}: the address of the freed block did not come back in {TRIES} allocations",
                    orphan.session.backend()
                )));
            }
            let mut seen = vec![0; SMALL];
            orphan.mapping.read(0, &mut seen)?;
            let reason = format!(
                "backend {}: small {} blocks share an object, so the old mapping shows the next owner's bytes{}; mappings \
                 must not outlive their memory",
                orphan.session.backend(),
                bench.how,
                if seen == filled(SMALL, 5) { ", as it does here" } else { "" }
            );
            return Err(Stop::Waived(reason));
        }
        AfterFree::Persistent => {
            let mut seen = vec![0; SMALL];
            orphan.mapping.read(0, &mut seen)?;
            same(&seen, &filled(SMALL, 1), "the old mapping, others having allocated")?;
            orphan.mapping.write(0, &filled(SMALL, 6))?;
            orphan.mapping.flush()?;
        }
        AfterFree::Sigbus => orphan.is_out_of_reach()?,
    }
    voice::note(format!("{} new owners, the address came back: {came_back}", owners.len()));
    for owner in &owners {
        same(&downloaded(owner)?, &filled(SMALL, 5), "the memory of a new owner")?;
    }
    orphan.sibling_is_unharmed()
}

pub(crate) fn invalidation_map_after_free(bench: &Bench) -> Step {
    let session = bench.open()?;
    let _sibling = bench.buffer(&session, SMALL)?;
    let buffer = bench.buffer(&session, SMALL)?;
    let pinned = session.pin(unguarded(&buffer))?;
    let range = unguarded(&buffer);
    pinned.map()?.write(0, b"alive")?;
    buffer.free()?;
    for _ in 0..2 {
        refused(pinned.map(), ErrorKind::Stale, "a mapping of a pin whose memory was freed")?;
    }
    ensure!(!pinned.is_mapped(), "a refused mapping counts as one");
    let unallocated = ErrorKind::UnsupportedMemory(MemoryKind::Unallocated);
    refused(session.pin(range), unallocated, "a pin of freed memory")?;
    pinned.unpin()?;
    Ok(())
}

pub(crate) fn invalidation_two_mappings(bench: &Bench) -> Step {
    let session = bench.open()?;
    let _sibling = bench.buffer(&session, SMALL)?;
    let buffer = bench.buffer(&session, SMALL)?;
    let pins = [session.pin(unguarded(&buffer))?, session.pin(unguarded(&buffer))?, session.pin(unguarded(&buffer))?];
    let [first, second, third] = [pins[0].map()?, pins[1].map()?, pins[2].map()?];
    first.write(0, &filled(SMALL, 1))?;
    first.flush()?;
    let mut seen = vec![0; SMALL];
    second.read(0, &mut seen)?;
    same(&seen, &filled(SMALL, 1), "written through one mapping, read through another")?;
    first.unmap()?;
    second.read(0, &mut seen)?;
    same(&seen, &filled(SMALL, 1), "the second mapping after the first is gone")?;
    buffer.free()?;
    let rows = [second.facts().after_free, third.facts().after_free];
    ensure!(rows[0] == rows[1], "two mappings of one buffer differ: {rows:?}");
    for mapping in [&second, &third] {
        let (at, wanted) = (mapping.as_ptr(), rows[0] != AfterFree::Sigbus);
        ensure!(is_readable(at) == wanted, "after free a mapping is readable: {}, not {wanted}", !wanted);
        if rows[0] == AfterFree::Persistent {
            mapping.read(0, &mut seen)?;
            same(&seen, &filled(SMALL, 1), "the old bytes, which stay on this backend")?;
        }
    }
    second.unmap()?;
    third.unmap()?;
    for pin in pins {
        pin.unpin()?;
    }
    Ok(())
}

/// Whether a place in a window that is gone is out of reach. Threads that CUDA started may map something there before
/// we look, hence more than one look, each at another window.
fn out_of_reach(mut gone: impl FnMut() -> Step<*mut u8>, what: &str) -> Step {
    const LOOKS: usize = 3;

    for look in 1.. {
        let at = gone()?;
        if is_readable(at) || is_writable(at, 0xee) {
            ensure!(look < LOOKS, "memory is in reach {what}");
            continue;
        }
        voice::dying_of(libc::SIGSEGV, format!("a load {what}"));
        let _ = fork::load(at);
        break;
    }
    Ok(())
}

/// Where addresses lead after `unmap` on a backend whose driver keeps pages mapped for others is not the library's.
fn own_window(kind: BackendKind, mapping: &Mapping<'_>) -> Step {
    if kind == BackendKind::Vulkan {
        return Err(Stop::Waived(format!(
            "backend vulkan: the driver's own window of {} bytes may stay mapped for other pins",
            mapping.facts().window_bytes
        )));
    }
    Ok(())
}

pub(crate) fn invalidation_access_after_unmap(bench: &Bench) -> Step {
    let session = bench.open()?;
    // Memory and pin stay; the window alone goes.
    let mut kept = Vec::new();
    let gone = || {
        let Mapped { mapping, pinned, buffer } = bench.mapped(&session, 1 << 20, 1)?;
        own_window(session.backend(), &mapping)?;
        let at = mapping.as_ptr().wrapping_add(70_000);
        ensure!(is_readable(at), "a live window is not readable");
        kept.push((pinned, buffer));
        mapping.unmap()?;
        Ok(at)
    };
    out_of_reach(gone, "after unmap")
}

pub(crate) fn invalidation_access_after_close(bench: &Bench) -> Step {
    let gone = || {
        let session = bench.open()?;
        let Mapped { mapping, pinned, buffer } = bench.mapped(&session, 1 << 20, 1)?;
        own_window(session.backend(), &mapping)?;
        let at = mapping.as_ptr().wrapping_add(70_000);
        drop(mapping);
        drop(pinned);
        drop(buffer);
        session.close()?;
        Ok(at)
    };
    out_of_reach(gone, "after the session was closed")
}
