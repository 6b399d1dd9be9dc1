//! Pinning and mapping, and what is refused.

use std::sync::Arc;
use std::thread;

use crate::backend::Allocator;
use crate::error::{ErrorKind, MemoryKind};
use crate::range::{DeviceRange, GpuAddr, Span};
use crate::tool::sanity::bench::{Bench, Mapped, Step, Stop, downloaded, ensure, filled, refused, same, unguarded};
use crate::tool::sanity::voice;

const BYTES: usize = 70_000;

pub(crate) fn basic(bench: &Bench) -> Step {
    let session = bench.open()?;
    let buffer = bench.buffer(&session, BYTES)?;
    ensure!(buffer.len() == BYTES, "the buffer has {} bytes, not {BYTES}", buffer.len());
    let pinned = session.pin(&buffer)?;
    let mapping = pinned.map()?;
    let facts = mapping.facts();
    voice::note(format!(
        "{} at {}, mapped as {}, routine {}, window of {} bytes, pinned in {:?}, mapped in {:?}",
        bench.how,
        mapping.gpu_addr(),
        mapping.mapping_type(),
        mapping.routine().name(),
        facts.window_bytes,
        facts.pin_time,
        facts.map_time
    ));
    ensure!(mapping.len() == BYTES, "the mapping has {} bytes, not {BYTES}", mapping.len());
    ensure!(mapping.gpu_addr() == buffer.addr(), "the mapping starts at {}", mapping.gpu_addr());
    let (out, mut back) = (filled(BYTES, 1), vec![0; BYTES]);
    mapping.write(0, &out)?;
    mapping.read(0, &mut back)?;
    same(&back, &out, "read after write")?;
    same(&downloaded(&buffer)?, &out, "the device's copy after a write")?;
    mapping.unmap()?;
    pinned.unpin()?;
    buffer.free()?;
    session.close()?;
    Ok(())
}

pub(crate) fn basic_unaligned_mapping(bench: &Bench) -> Step {
    let session = bench.open()?;
    let buffer = bench.buffer(&session, 3 << 16)?;
    let mut wanted = filled(buffer.len(), 2);
    buffer.upload(0, &wanted)?;
    let parts = [(0, 1), (1, 7), (4, 4096), (63, 66), (4095, 2), (65_535, 2), (65_536, 65_536), (100, 150_001)];
    for (number, (start, len)) in (0..).zip(parts) {
        let part = DeviceRange::from(&buffer).slice(start..start + len)?;
        let pinned = session.pin(part)?;
        let mapping = pinned.map()?;
        ensure!(mapping.len() == len, "{len} bytes at offset {start} became {} bytes", mapping.len());
        let at = mapping.gpu_addr().offset_from(buffer.addr());
        ensure!(at == Some(start), "the mapping of offset {start} starts at {at:?}");
        let mut seen = vec![0; len];
        mapping.read(0, &mut seen)?;
        same(&seen, &wanted[start..start + len], &format!("{len} bytes at offset {start}, read"))?;
        let fresh = filled(len, 100 + number);
        mapping.write(0, &fresh)?;
        mapping.flush()?;
        wanted[start..start + len].copy_from_slice(&fresh);
        same(&downloaded(&buffer)?, &wanted, &format!("the buffer after {len} bytes at offset {start}"))?;
    }
    Ok(())
}

pub(crate) fn basic_small_buffers_mapping(bench: &Bench) -> Step {
    // Blocks of cuMemAlloc lie side by side in one page; where they cannot be mapped, parts of a buffer do as well.
    let session = bench.open()?;
    let sizes = [40, 512, 1, 300, 4096, 64, 7, 1000];
    let own = match bench.buffer(&session, 64) {
        Ok(_) => bench.how,
        Err(Stop::Waived(reason)) => {
            voice::note(reason);
            Allocator::Buffer
        }
        Err(failed) => return Err(failed),
    };
    let whole = session.alloc_as(bench.gpu(), 64 << 10, Allocator::Buffer)?;
    let mut windows = Vec::new();
    for (number, bytes) in sizes.into_iter().enumerate() {
        let (block, range) = if own == Allocator::Buffer {
            let range = Span::new(
                "range",
                GpuAddr::new(whole.addr().raw() + 8192 * u64::try_from(number).unwrap_or(0)),
                bytes,
            )?;
            (None, DeviceRange::borrowed(range))
        } else {
            let block = session.alloc_as(bench.gpu(), bytes, own)?;
            let range = unguarded(&block);
            (Some(block), range)
        };
        let pinned = session.pin(range)?;
        let mapping = pinned.map()?;
        mapping.write(0, &filled(bytes, 10 + u64::try_from(number).unwrap_or(0)))?;
        windows.push((number, mapping, pinned, block));
    }
    // Given up from the middle outwards: the others go on.
    for gone in [3, 0, 7, 5] {
        windows.retain(|(number, ..)| *number != gone);
        for (number, mapping, ..) in &windows {
            let bytes = sizes[*number];
            let mut seen = vec![0; bytes];
            mapping.read(0, &mut seen)?;
            let wanted = filled(bytes, 10 + u64::try_from(*number).unwrap_or(0));
            same(&seen, &wanted, &format!("buffer {number} of {bytes} bytes after buffer {gone} was given up"))?;
            mapping.write(0, &wanted)?;
        }
    }
    // Mappings go before the memory does.
    for (_, mapping, pinned, block) in windows {
        mapping.unmap()?;
        pinned.unpin()?;
        drop(block);
    }
    Ok(())
}

/// What a thread found, in this one. A panic is a failure, too.
fn joined<T>(handle: thread::JoinHandle<Step<T>>) -> Step<T> {
    handle.join().unwrap_or_else(|_| Err(Stop::Failed("a thread panicked".to_owned())))
}

pub(crate) fn basic_child_thread_pins_buffer(bench: &Bench) -> Step {
    let session = bench.open()?;
    let buffer = Arc::new(bench.buffer(&session, BYTES)?);
    let (opener, shared) = (session.clone(), Arc::clone(&buffer));
    let pinned = joined(thread::spawn(move || Ok(opener.pin(&shared)?)))?;
    let (pinned, mapping) = joined(thread::spawn(move || {
        let mapping = pinned.map()?;
        Ok((pinned, mapping))
    }))?;
    let mapping = joined(thread::spawn(move || {
        mapping.write(0, &filled(BYTES, 3))?;
        Ok(mapping)
    }))?;
    same(&downloaded(&buffer)?, &filled(BYTES, 3), "written by a third thread")?;
    joined(thread::spawn(move || {
        mapping.unmap()?;
        pinned.unpin()?;
        Ok(())
    }))
}

pub(crate) fn basic_one_mapping_at_a_time(bench: &Bench) -> Step {
    let session = bench.open()?;
    let Mapped { mapping, pinned, buffer } = bench.mapped(&session, BYTES, 4)?;
    refused(pinned.map(), ErrorKind::AlreadyMapped, "a second mapping")?;
    let Err(refusal) = pinned.unpin() else {
        return Err(Stop::Failed("a mapped pin was unpinned".to_owned()));
    };
    ensure!(refusal.error().kind() == ErrorKind::Mapped, "unpin of a mapped pin: {refusal}");
    let Some(pinned) = refusal.into_pinned() else {
        return Err(Stop::Failed("a refused unpin lost the pin".to_owned()));
    };
    mapping.write(0, b"still there")?;
    mapping.unmap()?;
    let again = pinned.map()?;
    let mut seen = [0; 11];
    again.read(0, &mut seen)?;
    same(&seen, b"still there", "read through a second mapping, after the first")?;
    again.unmap()?;
    pinned.unpin()?;
    drop(buffer);
    Ok(())
}

pub(crate) fn basic_overlapping_pins(bench: &Bench) -> Step {
    let session = bench.open()?;
    let Mapped { mapping, pinned, buffer } = bench.mapped(&session, 3 << 16, 5)?;
    let part = session.pin(DeviceRange::from(&buffer).slice(4099..4099 + 70_000)?)?.map()?;
    for at in [0, 1, 61_437, 69_999] {
        part.write(at, &[0x5a])?;
        part.flush()?;
        let mut seen = [0];
        mapping.read(4099 + at, &mut seen)?;
        ensure!(seen == [0x5a], "byte {at}, written through one pin, is {:#04x} through the other", seen[0]);
    }
    mapping.unmap()?;
    pinned.unpin()?;
    part.write(2, b"on its own")?;
    let seen = downloaded(&buffer)?;
    same(&seen[4101..4111], b"on its own", "after the wider pin is gone")
}

pub(crate) fn basic_bounds(bench: &Bench) -> Step {
    let session = bench.open()?;
    let buffer = bench.buffer(&session, BYTES)?;
    let wanted = filled(BYTES, 6);
    buffer.upload(0, &wanted)?;
    // It ends before the buffer, and off a page: a byte too far would land in the buffer.
    let len = BYTES - 4097;
    let mapping = session.pin(DeviceRange::from(&buffer).slice(..len)?)?.map()?;
    for (offset, size) in [(len, 1), (len - 1, 2), (0, len + 1), (usize::MAX, 1), (usize::MAX - 1, 64)] {
        let what = format!("{size} bytes at offset {offset} of {len}");
        refused(mapping.write(offset, &vec![0; size]), ErrorKind::OutOfBounds, &format!("a write of {what}"))?;
        refused(
            mapping.write_posted(offset, &vec![0; size]),
            ErrorKind::OutOfBounds,
            &format!("a posted write of {what}"),
        )?;
        refused(mapping.read(offset, &mut vec![0; size]), ErrorKind::OutOfBounds, &format!("a read of {what}"))?;
    }
    refused(mapping.store_u32(2, 1), ErrorKind::InvalidArgument, "a 4-byte store at offset 2")?;
    refused(mapping.store_u64(4, 1), ErrorKind::InvalidArgument, "an 8-byte store at offset 4")?;
    refused(mapping.load_u64(1), ErrorKind::InvalidArgument, "an 8-byte load at offset 1")?;
    refused(mapping.post_line(32, &[0; 64]), ErrorKind::InvalidArgument, "a line at offset 32")?;
    for offset in [0, len] {
        mapping.write(offset, &[])?;
        mapping.read(offset, &mut [])?;
    }
    mapping.flush()?;
    same(&downloaded(&buffer)?, &wanted, "the buffer after refused accesses")
}

pub(crate) fn basic_refused_memory(bench: &Bench) -> Step {
    let session = bench.open()?;
    let on_stack = [0_u8; 64];
    let host = GpuAddr::new(u64::try_from(on_stack.as_ptr().addr()).unwrap_or(0));
    let pin = |addr, len| -> Step<crate::Result<()>> {
        Ok(session.pin(DeviceRange::borrowed(Span::new("range", addr, len)?)).map(drop))
    };
    let Err(error) = pin(host, 64)? else { return Err(Stop::Failed("host memory was pinned".to_owned())) };
    let kinds = [MemoryKind::Host, MemoryKind::Unallocated].map(ErrorKind::UnsupportedMemory);
    ensure!(kinds.contains(&error.kind()), "host memory is refused as {:?}: {error}", error.kind());

    let buffer = bench.buffer(&session, BYTES)?;
    refused(pin(buffer.addr(), 1 << 42)?, ErrorKind::OutOfBounds, "a pin of 4 TiB")?;
    let freed = buffer.addr();
    buffer.free()?;
    refused(pin(freed, 64)?, ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), "a pin of freed memory")?;
    refused(session.alloc(0), ErrorKind::InvalidArgument, "an allocation of 0 bytes")?;
    refused(session.alloc_on(usize::MAX, 64), ErrorKind::NoDevice, "an allocation on a GPU that is not there")
}
