//! What every part works with.

use std::cell::RefCell;

use gdrcopy::tool::clock::Clock;
use gdrcopy::tool::cpu::{self, CpuList};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::output::Screen;
use gdrcopy::tool::pattern;
use gdrcopy::tool::report::Direction;
use gdrcopy::tool::rig::Rig;
use gdrcopy::{BackendKind, DeviceBuffer, Mapping};

use crate::Pace;
use crate::parallel::Crews;

/// Bytes of device memory: the largest copy is half of it.
pub(crate) const BUFFER: usize = 2 << 20;

/// What every part works with.
#[derive(Debug)]
pub(crate) struct Lab<'a> {
    pub(crate) clock: &'a Clock,
    pub(crate) mapping: &'a Mapping<'a>,
    pub(crate) rig: &'a Rig,
    pub(crate) pace: Pace,
    pub(crate) screen: &'a Screen,
    pub(crate) crews: &'a Crews,
    /// Where the process may run; this thread is kept on one of these.
    pub(crate) cpus: Option<&'a CpuList>,
}

impl Lab<'_> {
    pub(crate) fn backend(&self) -> BackendKind {
        self.rig.session.backend()
    }

    /// Does something on a thread that stays away from this one's CPU, as do the threads that it starts.
    pub(crate) fn elsewhere<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Failure> {
        let place = self.cpus.zip(cpu::current());
        let moved = move || {
            if let Some((all, here)) = place {
                // Where that is not permitted the figures are worse, and no less true.
                let _ = cpu::move_away(all, here);
            }
            work()
        };
        let outcome = std::thread::scope(|scope| scope.spawn(moved).join());
        outcome.map_err(|_| Failure::run("a thread of this program panicked"))
    }

    /// Whether the device has exactly `want` at `offset`, asked by its own copy engine.
    pub(crate) fn device_has(&self, offset: usize, want: &[u8]) -> Result<bool, Failure> {
        Ok(device_has(self.mapping, &self.rig.buffer, offset, want)?)
    }

    /// Fills the device's memory by its own copy engine.
    pub(crate) fn device_put(&self, offset: usize, bytes: &[u8]) -> Result<(), Failure> {
        Ok(self.rig.buffer.upload(offset, bytes)?)
    }
}

/// Whether a buffer has exactly `want` at `offset` once what was written through its mapping has arrived.
pub(crate) fn device_has(
    mapping: &Mapping<'_>,
    buffer: &DeviceBuffer,
    offset: usize,
    want: &[u8],
) -> gdrcopy::Result<bool> {
    let mut got = complement(want);
    mapping.flush()?;
    buffer.download(offset, &mut got)?;
    Ok(got == want)
}

/// So many bytes to carry in one direction, at the start of a mapping unless told otherwise.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) direction: Direction,
    pub(crate) from: Vec<u8>,
    pub(crate) to: RefCell<Vec<u8>>,
}

impl Load {
    pub(crate) fn new(direction: Direction, bytes: usize) -> Self {
        let from = patterned(bytes, u64::try_from(bytes).unwrap_or(0));
        Self { direction, from, to: RefCell::new(vec![0; bytes]) }
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::try_from(self.from.len()).unwrap_or(u64::MAX)
    }

    /// As [`Mapping::write`] and [`Mapping::read`] do it.
    #[inline(always)]
    pub(crate) fn carry(&self, mapping: &Mapping<'_>) -> gdrcopy::Result<()> {
        self.carry_at(mapping, 0)
    }

    /// As `carry`, at another place in the mapping.
    #[inline(always)]
    pub(crate) fn carry_at(&self, mapping: &Mapping<'_>, offset: usize) -> gdrcopy::Result<()> {
        match self.direction {
            Direction::HostToDevice => mapping.write(offset, &self.from),
            Direction::DeviceToHost => mapping.read(offset, &mut self.to.borrow_mut()),
        }
    }

    /// Whether `carry` brings every byte. What it should overwrite is different in each.
    pub(crate) fn verify(
        &self,
        mapping: &Mapping<'_>,
        buffer: &DeviceBuffer,
        carry: impl FnOnce() -> gdrcopy::Result<()>,
    ) -> gdrcopy::Result<bool> {
        let wrong = complement(&self.from);
        match self.direction {
            Direction::HostToDevice => {
                buffer.upload(0, &wrong)?;
                carry()?;
                device_has(mapping, buffer, 0, &self.from)
            }
            Direction::DeviceToHost => {
                buffer.upload(0, &self.from)?;
                self.to.replace(wrong);
                carry()?;
                Ok(*self.to.borrow() == self.from)
            }
        }
    }
}

/// The pattern of a seed.
pub(crate) fn patterned(bytes: usize, seed: u64) -> Vec<u8> {
    let mut data = vec![0; bytes];
    pattern::fill(&mut data, seed);
    data
}

/// The complement: different in every byte.
pub(crate) fn complement(of: &[u8]) -> Vec<u8> {
    of.iter().map(|byte| !byte).collect()
}
