//! Copies by the copy engine between stores and loads of the CPU, with nothing but the automatic copier's promise of order
//! between them.

#![allow(clippy::as_conversions, clippy::unwrap_used, reason = "tests may panic and convert freely")]

use std::sync::atomic::{AtomicUsize, Ordering};

use gdrcopy::agent::HostBuffer;
use gdrcopy::auto::{AutoCopier, AutoMethod, AutoOptions};
use gdrcopy::policy::CopyDirection;
use gdrcopy::{DeviceBuffer, Policy, Session};

/// Sizes of the copies: parts of a line, lines, and more than a write-combining buffer.
const SIZES: [usize; 10] = [1, 3, 8, 16, 63, 64, 100, 256, 1000, 4096];
/// First bytes: the device memory is longer than the last of them and the largest size.
const OFFSETS: usize = 3001;
/// What buffer and host memory have to have room for.
pub const BYTES: usize = OFFSETS + 4096 + 64;

/// A copier that has the copy engine do everything, and page-locked memory for it: [`BYTES`] of the one for [`BYTES`] of the
/// buffer.
pub fn copier<'a>(session: &Session, buffer: &'a DeviceBuffer) -> (AutoCopier<'a>, HostBuffer) {
    let policy = everything_by_the_copy_engine();
    let mut copier = AutoCopier::with_policy(session, buffer, policy, AutoOptions::default().page_locked()).unwrap();
    for bytes in [0, 1, 4096] {
        assert_eq!(copier.explain(CopyDirection::DeviceToHost, bytes).method(), AutoMethod::CopyEngine);
    }
    let host = copier.host_buffer(BYTES).unwrap();
    (copier, host)
}

/// A policy that has the copy engine do everything.
fn everything_by_the_copy_engine() -> Policy {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("gdrcopy-{}-{number}-copy-engine", std::process::id()));
    let row = "1- routine=scalar best=copy_engine_pinned";
    std::fs::write(&path, format!("schema = 1\nh2d {row}\nd2h {row}\n")).unwrap();
    let policy = Policy::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    policy
}

/// Bytes that count up, from another value in each round: none is what it was in the round before.
fn window(table: &[u8], round: usize, offset: usize, bytes: usize) -> &[u8] {
    let start = (round.wrapping_mul(0x9d).wrapping_add(round >> 7) + offset) % 256;
    &table[start..start + bytes]
}

/// Rounds, and those in which something was not as it should be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub rounds: usize,
    /// A read did not bring what was stored through BAR1 right before it.
    pub stale_reads: usize,
    /// After a write, loads through BAR1 brought something else: what was there before, or what was stored before.
    pub lost_writes: usize,
}

/// In each round: posted stores, then a read of those bytes; posted stores of other bytes, then a write to the same place, then
/// loads. Every byte is compared. `is_late` breaks the rule, for a control: the stores come after the read, and after the
/// write.
pub fn rounds(copier: &mut AutoCopier<'_>, host: &mut [u8], rounds: usize, is_late: bool) -> Seen {
    let table: Vec<u8> = (0..256 + BYTES).map(|n| n as u8).collect();
    let mut back = vec![0; 4096];
    let mut seen = Seen::default();
    for round in 0..rounds {
        let bytes = SIZES[round % SIZES.len()];
        let offset = round * 37 % OFFSETS;
        // No byte of one is in the same place of another.
        let [first, second, third] = [0, 1, 2].map(|n| window(&table, 3 * round + n, offset, bytes));
        let to = &mut host[round % 64..][..bytes];
        if is_late {
            copier.read(offset, to).unwrap();
            copier.mapping().write_posted(offset, first).unwrap();
        } else {
            copier.mapping().write_posted(offset, first).unwrap();
            copier.read(offset, to).unwrap();
        }
        seen.stale_reads += usize::from(to != first);
        to.copy_from_slice(third);
        if is_late {
            copier.write(offset, to).unwrap();
            copier.mapping().write_posted(offset, second).unwrap();
        } else {
            copier.mapping().write_posted(offset, second).unwrap();
            copier.write(offset, to).unwrap();
        }
        copier.mapping().read(offset, &mut back[..bytes]).unwrap();
        seen.lost_writes += usize::from(back[..bytes] != *third);
        seen.rounds += 1;
    }
    seen
}
