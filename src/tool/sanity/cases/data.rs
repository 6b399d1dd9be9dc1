//! What is written is what the device has, and the other way round.

use crate::copy;
use crate::sys::num::u64_of;
use crate::tool::sanity::bench::{Bench, Mapped, Step, Stop, downloaded, ensure, filled, same, waived};
use crate::tool::sanity::voice;

const BYTES: usize = 70_000;
const OFFSETS: [usize; 12] = [0, 1, 3, 7, 8, 63, 64, 65, 1000, 4095, 4096, 60_000];
const SIZES: [usize; 20] = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 129, 4096, 4097, 9001];

/// A mapped buffer, and what should be in it.
struct Mirror {
    mapped: Mapped,
    wanted: Vec<u8>,
    seed: u64,
}

impl Mirror {
    fn new(bench: &Bench, session: &crate::Session, bytes: usize) -> Step<Self> {
        let mapped = bench.mapped(session, bytes, 1)?;
        Ok(Self { mapped, wanted: filled(bytes, 1), seed: 1 })
    }

    /// Fresh data, unlike any before.
    fn fresh(&mut self, len: usize) -> Vec<u8> {
        self.seed += 1;
        filled(len, self.seed)
    }

    /// `bytes` were stored at `offset`: the device has them there, and all else as before.
    fn has(&mut self, offset: usize, bytes: &[u8], how: &str) -> Step {
        self.wanted[offset..offset + bytes.len()].copy_from_slice(bytes);
        let seen = downloaded(&self.mapped.buffer)?;
        same(&seen, &self.wanted, &format!("the device after {how} of {} bytes at offset {offset}", bytes.len()))
    }

    /// Writes, compares on the device's side, then the other way round.
    fn both_ways(&mut self, offset: usize, len: usize) -> Step {
        let bytes = self.fresh(len);
        self.mapped.mapping.write(offset, &bytes)?;
        self.has(offset, &bytes, "a write")?;
        let bytes = self.fresh(len);
        self.mapped.buffer.upload(offset, &bytes)?;
        self.wanted[offset..offset + len].copy_from_slice(&bytes);
        // A byte on either side shows a read that does too much.
        let mut seen = vec![0xa5; len + 2];
        self.mapped.mapping.read(offset, &mut seen[1..=len])?;
        same(&seen[1..=len], &bytes, &format!("a read of {len} bytes at offset {offset}"))?;
        ensure!(
            seen[0] == 0xa5 && seen[len + 1] == 0xa5,
            "a read of {len} bytes at offset {offset} wrote beside its target"
        );
        Ok(())
    }
}

pub(crate) fn data_validation(bench: &Bench) -> Step {
    let session = bench.open()?;
    let mut mirror = Mirror::new(bench, &session, BYTES)?;
    let mut back = vec![0; BYTES];
    mirror.mapped.mapping.read(0, &mut back)?;
    same(&back, &mirror.wanted, "the first read")?;
    for offset in OFFSETS {
        for len in SIZES {
            mirror.both_ways(offset, len)?;
        }
        mirror.both_ways(offset, BYTES - offset)?;
    }
    Ok(())
}

pub(crate) fn data_every_routine(bench: &Bench) -> Step {
    for routine in copy::routines() {
        if !routine.is_available() {
            voice::note(format!("routine {}: not on this CPU", routine.name()));
            continue;
        }
        let session = bench.open_as(Some(routine.name()))?;
        let mut mirror = Mirror::new(bench, &session, 8192)?;
        for offset in [0, 1, 8, 33, 63, 64, 100] {
            for len in SIZES.into_iter().filter(|&len| len <= 4097) {
                mirror.both_ways(offset, len).map_err(|stop| match stop {
                    Stop::Failed(reason) => Stop::Failed(format!("routine {}: {reason}", routine.name())),
                    waived @ Stop::Waived(_) => waived,
                })?;
            }
        }
        voice::note(format!("routine {}: fine", routine.name()));
    }
    Ok(())
}

pub(crate) fn data_single_accesses(bench: &Bench) -> Step {
    let session = bench.open()?;
    let mut mirror = Mirror::new(bench, &session, BYTES)?;
    for at in [0, 4, 60, 4092, BYTES - 4] {
        let value = 0x0102_0304 + u32::try_from(at).unwrap_or(0);
        mirror.mapped.mapping.store_u32(at, value)?;
        let seen = mirror.mapped.mapping.load_u32(at)?;
        ensure!(seen == value, "load_u32 at offset {at} gives {seen:#x}, not {value:#x}");
        mirror.has(at, &value.to_ne_bytes(), "store_u32")?;
    }
    for at in [0, 8, 56, 4088, BYTES - 8] {
        let value = 0x0102_0304_0506_0708 + u64::try_from(at).unwrap_or(0);
        mirror.mapped.mapping.store_u64(at, value)?;
        let seen = mirror.mapped.mapping.load_u64(at)?;
        ensure!(seen == value, "load_u64 at offset {at} gives {seen:#x}, not {value:#x}");
        mirror.has(at, &value.to_ne_bytes(), "store_u64")?;
    }
    for at in [0, 64, 4032] {
        let bytes = mirror.fresh(64);
        let mut line = [0; 64];
        line.copy_from_slice(&bytes);
        mirror.mapped.mapping.post_line(at, &line)?;
        mirror.mapped.mapping.flush()?;
        mirror.has(at, &line, "post_line")?;
    }
    Ok(())
}

pub(crate) fn data_posted_writes(bench: &Bench) -> Step {
    let session = bench.open()?;
    let mut mirror = Mirror::new(bench, &session, BYTES)?;
    for (number, len) in SIZES.into_iter().enumerate() {
        let bytes = mirror.fresh(len);
        mirror.mapped.mapping.write_posted(number * 31, &bytes)?;
        mirror.mapped.mapping.flush()?;
        mirror.has(number * 31, &bytes, "a posted write")?;
    }
    let pieces: Vec<_> = (0..64).map(|number| (number * 1000 + 3, mirror.fresh(100 + number))).collect();
    mirror.mapped.mapping.batch(|batch| pieces.iter().try_for_each(|(at, bytes)| batch.write(*at, bytes)))?;
    mirror.mapped.mapping.flush()?;
    for (at, bytes) in &pieces {
        mirror.wanted[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    mirror.has(0, &[], "a batch")
}

pub(crate) fn data_publish(bench: &Bench) -> Step {
    let session = bench.open()?;
    let mut mirror = Mirror::new(bench, &session, BYTES)?;
    if !mirror.mapped.mapping.publish_is_ordered() {
        return Err(Stop::Waived(format!(
            "backend {}: the GPU does not order data before flag by itself, so publish is refused",
            session.backend()
        )));
    }
    for (data_at, len, flag_at) in [(0, 64, 64), (1, 6, 4096), (101, 5000, BYTES - 8)] {
        let data = mirror.fresh(len);
        let flag = 0x1234_5678_9abc_def0_u64 + u64::try_from(len).unwrap_or(0);
        mirror.mapped.mapping.publish(data_at, &data, flag_at, flag)?;
        mirror.mapped.mapping.flush()?;
        mirror.wanted[data_at..data_at + len].copy_from_slice(&data);
        mirror.has(flag_at, &flag.to_ne_bytes(), "publish")?;
    }
    Ok(())
}

pub(crate) fn data_every_offset(bench: &Bench) -> Step {
    let session = bench.open()?;
    let mut mirror = Mirror::new(bench, &session, 512)?;
    for offset in 0..64 {
        for len in 1..=320 {
            mirror.both_ways(offset, len)?;
        }
    }
    Ok(())
}

pub(crate) fn data_large(bench: &Bench) -> Step {
    const LARGE: usize = 256 << 20;
    const PIECE: usize = 4 << 20;

    let session = bench.open()?;
    if let Some(bar1) = bench.info(&session)?.bar1.filter(|bar1| bar1.total_bytes < 2 * u64_of(LARGE)) {
        return waived(session.backend(), &format!("a BAR1 of {} bytes has no room for 256 MiB", bar1.total_bytes));
    }
    let Mapped { mapping, pinned, buffer } = bench.mapped(&session, LARGE, 1)?;
    let out = filled(LARGE, 2);
    for (number, piece) in out.chunks(PIECE).enumerate() {
        mapping.write(number * PIECE, piece)?;
    }
    same(&downloaded(&buffer)?, &out, "256 MiB written")?;
    // Reads take a second for each gigabyte; the ends and a part in between show a window that is put together wrongly.
    for at in [0, LARGE / 2 - PIECE / 2, LARGE - PIECE] {
        let mut seen = vec![0; PIECE];
        mapping.read(at, &mut seen)?;
        same(&seen, &out[at..at + PIECE], &format!("4 MiB read at offset {at}"))?;
    }
    mapping.unmap()?;
    pinned.unpin()?;
    Ok(())
}
