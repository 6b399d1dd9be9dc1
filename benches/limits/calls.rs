//! What a call costs beside the bare stores it is made of: on the mapping under test, and on an emulated GPU, where the
//! memory is so near that the call is most of it.

#![allow(unsafe_code, reason = "the bare stores are the measure")]

use std::time::Duration;

use gdrcopy::copy::fence;
use gdrcopy::tool::ab::{Arm, Rounds};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::report::{Direction, Metric};
use gdrcopy::{BackendKind, DeviceBuffer, Mapping, Result, Session};

use crate::lab::{Lab, device_has, patterned};
use crate::report::{self, Findings, Place};

const PART: &str = "calls";
const CALLS: u32 = 2048;
/// Bytes that the writes go round in. One line over and over would be a measure of its own: each store waits for the
/// one before.
const WINDOW: usize = 4096;
const TIME: Duration = Duration::from_millis(400);

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> std::result::Result<(), Failure> {
    one_mapping(lab, found, lab.mapping, &lab.rig.buffer, lab.backend())?;
    if lab.backend() != BackendKind::Emulated {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open()?;
        let buffer = session.alloc(WINDOW)?;
        let mapping = session.pin(&buffer)?.map()?;
        one_mapping(lab, found, &mapping, &buffer, BackendKind::Emulated)?;
    }
    Ok(())
}

fn one_mapping(
    lab: &Lab<'_>,
    found: &mut Findings,
    mapping: &Mapping<'_>,
    buffer: &DeviceBuffer,
    backend: BackendKind,
) -> std::result::Result<(), Failure> {
    lab.screen.line("")?;
    lab.screen.line(&format!("Writes all over {WINDOW} B of backend {backend}, back to back [ns per call]"))?;
    lab.screen.line(&format!("{:>8}  {:<32}{:<24}over bare stores", "size [B]", "call", "time"))?;
    sized::<8>(lab, found, mapping, buffer, backend)?;
    sized::<64>(lab, found, mapping, buffer, backend)
}

/// Where a call of `N` bytes writes.
#[inline(always)]
fn place_of<const N: usize>(call: u32) -> usize {
    usize::try_from(call).unwrap_or(0) * N % WINDOW
}

/// Stores of 8 bytes each, as a program would make them by itself.
#[inline(always)]
fn bare<const N: usize>(mapping: &Mapping<'_>, offset: usize, from: &[u8; N]) -> Result<()> {
    let at = mapping.as_ptr().wrapping_add(offset).cast::<u64>();
    for (index, word) in from.as_chunks::<8>().0.iter().enumerate() {
        // SAFETY: the mapping starts with a page and has at least that; `offset` is a multiple of `N` below it, so that
        // word `index` of the `N` bytes is inside and aligned; no reference to the window exists.
        unsafe { at.wrapping_add(index).write_volatile(u64::from_le_bytes(*word)) };
    }
    Ok(())
}

fn sized<const N: usize>(
    lab: &Lab<'_>,
    found: &mut Findings,
    mapping: &Mapping<'_>,
    buffer: &DeviceBuffer,
    backend: BackendKind,
) -> std::result::Result<(), Failure> {
    let from: [u8; N] = patterned(N, 3).try_into().map_err(|_| Failure::run("as many bytes as asked for"))?;
    let from = &from;
    // Not a constant to the compiler, as a caller's data is none.
    let source = || std::hint::black_box(from);
    let names = [
        "bare stores",
        "write_posted",
        "write_value_posted",
        "bare stores, fence",
        "write",
        "write_value",
        "bare stores",
    ];
    let mut arms = vec![
        Arm::sustained(CALLS, |call| bare(mapping, place_of::<N>(call), source())),
        Arm::sustained(CALLS, |call| mapping.write_posted(place_of::<N>(call), source())),
        Arm::sustained(CALLS, |call| mapping.write_value_posted(place_of::<N>(call), source())),
        Arm::sustained(CALLS, |call| {
            bare(mapping, place_of::<N>(call), source())?;
            fence::store();
            Ok(())
        }),
        Arm::sustained(CALLS, |call| mapping.write(place_of::<N>(call), source())),
        Arm::sustained(CALLS, |call| mapping.write_value(place_of::<N>(call), source())),
        Arm::sustained(CALLS, |call| bare(mapping, place_of::<N>(call), source())),
    ];
    let rounds = Rounds::run(lab.clock, &mut arms, lab.pace.limit(TIME))?;
    let bytes = u64::try_from(N).unwrap_or(0);
    let place = Place { part: PART, direction: Direction::HostToDevice, metric: Metric::Sustained, bytes };
    // What each is compared with: the same stores by hand.
    for (index, over) in [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3), (5, 3), (6, 0)] {
        buffer.upload(0, &[0; WINDOW])?;
        arms[index].run(lab.clock)?;
        let verified = device_has(mapping, buffer, 0, &from.repeat(WINDOW / N))?;
        let (name, base) = (format!("{}, {backend}", names[index]), format!("{}, {backend}", names[over]));
        let taken = report::Arm { rounds: &rounds, index, calls: CALLS, per_call: 1.0 };
        let median = found.figure(place, &name, &taken, verified);
        let mut line = format!("{N:>8}  {:<32}{:<24}", names[index], median.to_string());
        if index != over {
            found.compare(place, &name, &base, rounds.ratio(index, over));
            let more = rounds.bootstrap(|median| median(index) - median(over));
            line += &format!("{more:+.2} ns");
        }
        if !verified {
            line += "  WRONG BYTES";
        }
        lab.screen.line(&line)?;
    }
    Ok(())
}
