use std::cell::RefCell;

use super::super::clock::Clock;
use super::super::method::{Agent, AgentPinned, Auto, Bar1, CudaMemcpy, Parallel, Posted};
use super::*;
use crate::backend::BackendKind;
use crate::session::Session;

/// What a broken copy routine may do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The last byte is not copied.
    Short,
    /// One byte too many.
    Long,
    /// One byte too early.
    Early,
    /// Nothing is copied at all.
    Nothing,
    /// A bit flips in the middle.
    Flip,
}

/// Copies through the buffer itself, with a fault.
struct Faulty<'a>(&'a DeviceBuffer, Fault);

impl Method for Faulty<'_> {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn describe(&self, _: Direction) -> &'static str {
        "a copy with a fault"
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        &[Metric::Single]
    }

    fn write(&self, offset: usize, from: &[u8]) -> LibraryResult<()> {
        let mut bytes = from.to_vec();
        match self.1 {
            Fault::None => self.0.upload(offset, from),
            Fault::Short => self.0.upload(offset, &from[..from.len() - 1]),
            Fault::Long => {
                bytes.push(0xa5);
                self.0.upload(offset, &bytes)
            }
            Fault::Early => {
                bytes.insert(0, 0xa5);
                self.0.upload(offset - 1, &bytes)
            }
            Fault::Nothing => Ok(()),
            Fault::Flip => {
                bytes[from.len() / 2] ^= 0x10;
                self.0.upload(offset, &bytes)
            }
        }
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> LibraryResult<()> {
        let last = to.len() - 1;
        match self.1 {
            Fault::Short => return self.0.download(offset, &mut to[..last]),
            Fault::Nothing => return Ok(()),
            _ => self.0.download(offset, to)?,
        }
        if self.1 == Fault::Flip {
            to[last / 2] ^= 0x10;
        }
        Ok(())
    }

    fn settle(&self) -> LibraryResult<()> {
        Ok(())
    }
}

/// Copies between the buffer and host memory of its own, and keeps that from whoever asks if it is `mute`.
struct Own<'a> {
    buffer: &'a DeviceBuffer,
    memory: RefCell<Vec<u8>>,
    mute: bool,
}

impl Method for Own<'_> {
    fn name(&self) -> &'static str {
        "own"
    }

    fn describe(&self, _: Direction) -> &'static str {
        "a copy with memory of its own"
    }

    fn sustains(&self) -> bool {
        false
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        &[Metric::Single]
    }

    fn write(&self, offset: usize, from: &[u8]) -> LibraryResult<()> {
        self.buffer.upload(offset, &self.memory.borrow()[DATA_AT..][..from.len()])
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> LibraryResult<()> {
        self.buffer.download(offset, &mut self.memory.borrow_mut()[DATA_AT..][..to.len()])
    }

    fn lend(&self, host: &[u8]) {
        self.memory.borrow_mut()[..host.len()].copy_from_slice(host);
    }

    fn give_back(&self, host: &mut [u8]) {
        if !self.mute {
            host.copy_from_slice(&self.memory.borrow()[..host.len()]);
        }
    }

    fn settle(&self) -> LibraryResult<()> {
        Ok(())
    }
}

const TERMS: Terms = Terms { writes: Some(3), reads: Some(3), loops: Loops::All, verify: true, largest: 100 };

fn buffer() -> DeviceBuffer {
    let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
    session.alloc(4096).unwrap()
}

/// What a cell of 100 bytes at offset 1000 comes to.
fn outcome<M: Method>(
    direction: Direction,
    terms: Terms,
    buffer: &DeviceBuffer,
    method: &M,
) -> Result<Vec<Entry>, String> {
    let clock = Clock::calibrate();
    let mut bench = Bench::new(terms, buffer, Sampler::new(&clock, Duration::from_secs(1))).unwrap();
    let mut arena = vec![0; arena_bytes(terms.largest)];
    let cell = Cell { offset: 1000, bytes: 100, time: Duration::ZERO };
    bench.cell(method, direction, cell, &mut arena).map_err(|failure| failure.to_string())
}

/// What it says about a fault.
fn verdict(direction: Direction, fault: Fault, terms: Terms) -> Result<Vec<Entry>, String> {
    let buffer = buffer();
    outcome(direction, terms, &buffer, &Faulty(&buffer, fault))
}

#[test]
fn memory_of_a_methods_own_takes_the_arenas_place() {
    let own = |direction, mute| {
        let (buffer, memory) = (buffer(), RefCell::new(vec![0; arena_bytes(TERMS.largest)]));
        outcome(direction, TERMS, &buffer, &Own { buffer: &buffer, memory, mute })
    };
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        let entries = own(direction, false).unwrap();
        assert!(entries.len() == 1 && entries[0].verified && entries[0].metric == Metric::Single, "nothing sustained");
    }
    let line = own(Direction::DeviceToHost, true).unwrap_err();
    assert!(line.contains("byte 0 of the copy is"), "{line}");
}

#[test]
fn right_data_passes_and_counts_as_verified() {
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        for (loops, count) in [(Loops::All, 2), (Loops::Cold, 1), (Loops::Sustained, 1)] {
            let entries = verdict(direction, Fault::None, Terms { loops, ..TERMS }).unwrap();
            assert_eq!(entries.len(), count);
            assert!(entries.iter().all(|entry| entry.verified && entry.bytes == 100 && entry.offset == 1000));
        }
    }
}

#[test]
fn wrong_data_is_named_by_size_and_place() {
    use Direction::{DeviceToHost, HostToDevice};
    let table = [
        (HostToDevice, Fault::Short, "byte 99 of the copy is"),
        (HostToDevice, Fault::Long, "the byte 1 past the end of the copy was overwritten with 0xa5"),
        (HostToDevice, Fault::Early, "the byte 1 before the copy was overwritten with 0xa5"),
        (HostToDevice, Fault::Nothing, "byte 0 of the copy is"),
        (HostToDevice, Fault::Flip, "byte 50 of the copy is"),
        (DeviceToHost, Fault::Short, "byte 99 of the copy is"),
        (DeviceToHost, Fault::Nothing, "byte 0 of the copy is"),
        (DeviceToHost, Fault::Flip, "byte 49 of the copy is"),
    ];
    for (direction, fault, what) in table {
        let line = verdict(direction, fault, TERMS).unwrap_err();
        assert!(line.starts_with("wrong data: ") && line.contains(what), "{fault:?}: {line}");
        assert!(line.contains("100 bytes at offset 1000"), "{line}");
        let unchecked = verdict(direction, fault, Terms { verify: false, ..TERMS }).unwrap();
        assert!(unchecked.iter().all(|entry| !entry.verified));
    }
}

const METHODS: [&str; 8] = [
    Bar1::NAME,
    Posted::NAME,
    Parallel::NAME,
    Agent::NAME,
    AgentPinned::NAME,
    Auto::NAME,
    CudaMemcpy::PINNED,
    CudaMemcpy::PAGEABLE,
];

#[test]
fn cells_do_not_share_patterns() {
    let mut seeds = std::collections::HashSet::new();
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        for method in METHODS {
            for size in 0..=24 {
                for offset in 0..64 {
                    let place = Place { direction, method, bytes: 1 << size, offset, threads: None };
                    assert!(seeds.insert(seed(place)), "{place:?}");
                }
            }
        }
    }
}
