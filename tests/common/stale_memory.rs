//! Device memory in which every word says whose it is, and how processes without CUDA come by it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gdrcopy::{BackendKind, DeviceBuffer, DeviceRange, Mapping, PciAddress, Pinned, RmLevel, Session};

use crate::common::stale_process::Shared;
use crate::common::stale_socket::{pair, receive, send, writable};

/// Bytes of every exported buffer: what `cuMemCreate` gives at least.
pub(crate) const BUFFER: usize = 2 << 20;
/// Host memory is made and filled in every round; more of it would prove no more.
const EMULATED: usize = 64 << 10;
/// Buffers that each neighbour keeps mapping.
pub(crate) const PER_NEIGHBOUR: usize = 4;
/// Numbers of memory made to be given up start here.
const FIRST_FRESH: u32 = 1 << 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Victim,
    Neighbour,
}

/// Whose a buffer is. Every word of it names this and its own place, so that no word fits anywhere else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    pub(crate) kind: Kind,
    /// Less than 2^24.
    pub(crate) number: u32,
}

impl Tag {
    fn high(self) -> u64 {
        let kind = match self.kind {
            Kind::Victim => u64::from(b'V'),
            Kind::Neighbour => u64::from(b'N'),
        };
        kind << 56 | u64::from(self.number) << 32
    }

    /// The word at a byte offset, a multiple of 8.
    pub(crate) fn word(self, offset: usize) -> u64 {
        self.high() | u64::try_from(offset / 8).expect("usize has 64 bits")
    }

    pub(crate) fn owns(self, word: u64) -> bool {
        word >> 32 == self.high() >> 32
    }

    pub(crate) fn bytes(self, offset: usize, len: usize) -> Vec<u8> {
        (offset..offset + len).step_by(8).flat_map(|offset| self.word(offset).to_le_bytes()).collect()
    }

    /// Reads words all over a live window, which must be the tag's, each in its place.
    pub(crate) fn check(self, mapping: &Mapping<'_>) -> Result<(), String> {
        for offset in samples(mapping.len()) {
            let (found, wanted) = (mapping.load_u64(offset).map_err(text)?, self.word(offset));
            if found != wanted {
                return Err(format!("a live window of {self:?} shows {found:#x} at {offset}, not {wanted:#x}"));
            }
        }
        Ok(())
    }

    /// Writes the same words again, in single stores and as a block, and reads them back.
    pub(crate) fn rewrite(self, mapping: &Mapping<'_>) -> Result<(), String> {
        for offset in samples(mapping.len()) {
            mapping.store_u64(offset, self.word(offset)).map_err(text)?;
        }
        let (at, len) = (mapping.len() / 2, 512);
        mapping.write(at, &self.bytes(at, len)).map_err(text)?;
        self.check(mapping)
    }
}

/// Byte offsets at which windows of a length are read: both ends, the middle, and one in between.
pub(crate) fn samples(len: usize) -> [usize; 4] {
    [0, len / 8 * 3 / 8 * 8, len / 2, len - 8]
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Where windows come from.
pub(crate) enum Memory {
    /// Each process allocates its own on this backend.
    Own(BackendKind),
    Exported(Exports),
}

/// Memory that the owner exported.
pub(crate) struct Exports {
    gpu: PciAddress,
    /// By the number in the tag.
    victims: Vec<OwnedFd>,
    neighbours: Vec<OwnedFd>,
    /// Where memory comes from that its owner has given up already.
    fresh_victims: OwnedFd,
    fresh_neighbours: OwnedFd,
}

/// Memory in the hands of a process.
pub(crate) struct Pin {
    pub(crate) pinned: Pinned<'static>,
    pub(crate) tag: Tag,
    /// Whether nobody else holds the memory, so that it gets another owner once let go.
    pub(crate) sole: bool,
}

impl Memory {
    /// Whether sessions use what does not survive a fork: CUDA. A process that forks then has none.
    pub(crate) fn has_cuda(&self) -> bool {
        matches!(self, Self::Own(backend) if *backend != BackendKind::Emulated)
    }

    pub(crate) fn open(&self) -> Result<Session, String> {
        let builder = match self {
            Self::Own(backend) => Session::builder().backend(*backend),
            Self::Exported(_) => Session::builder().backend(BackendKind::Rm).rm(RmLevel::Vmm),
        };
        builder.open().map_err(text)
    }

    /// Pins `bytes` of the buffer of this tag, or, if `fresh` and to be had, of one that nobody else holds.
    pub(crate) fn pin(&self, session: &Session, tag: Tag, bytes: usize, fresh: bool) -> Result<Pin, String> {
        let exports = match self {
            Self::Own(backend) => return own(session, *backend, tag, bytes).map_err(text),
            Self::Exported(exports) => exports,
        };
        let (source, kept) = match tag.kind {
            Kind::Victim => (&exports.fresh_victims, &exports.victims),
            Kind::Neighbour => (&exports.fresh_neighbours, &exports.neighbours),
        };
        if fresh && let Some((number, Some(fd))) = receive(source.as_fd(), false)? {
            let number = number.parse().map_err(text)?;
            let pinned = session.pin_export(fd.as_fd(), exports.gpu, bytes).map_err(text)?;
            return Ok(Pin { pinned, tag: Tag { number, ..tag }, sole: true });
        }
        let fd = kept.get(usize::try_from(tag.number).map_err(text)?).ok_or("no such buffer")?;
        Ok(Pin { pinned: session.pin_export(fd.as_fd(), exports.gpu, bytes).map_err(text)?, tag, sole: false })
    }
}

/// Memory that this process allocates and that goes with the pin. On a GPU it is a whole object, so that what is let go is
/// somebody else's at once.
fn own(session: &Session, backend: BackendKind, tag: Tag, bytes: usize) -> gdrcopy::Result<Pin> {
    let bytes = if backend == BackendKind::Emulated { bytes.min(EMULATED) } else { bytes };
    let whole = if backend == BackendKind::Emulated { bytes } else { BUFFER };
    let buffer = Arc::new(session.alloc_on(0, whole)?);
    buffer.upload(0, &tag.bytes(0, whole))?;
    let pinned = session.pin(DeviceRange::from(&buffer).slice(..bytes)?)?;
    Ok(Pin { pinned, tag, sole: true })
}

/// One side of the sockets between the owner and everybody else.
pub(crate) struct Ends {
    hello: OwnedFd,
    fresh_victims: OwnedFd,
    fresh_neighbours: OwnedFd,
}

/// The owner's side, and the other.
pub(crate) fn sockets() -> Result<(Ends, Ends), String> {
    let ((a, x), (b, y), (c, z)) = (pair()?, pair()?, pair()?);
    Ok((
        Ends { hello: a, fresh_victims: b, fresh_neighbours: c },
        Ends { hello: x, fresh_victims: y, fresh_neighbours: z },
    ))
}

impl Ends {
    /// Takes what the owner made; `Err` says why there is no GPU to make it on.
    pub(crate) fn receive(self, victims: usize, neighbours: usize) -> Result<Exports, String> {
        let next = || receive(self.hello.as_fd(), true)?.ok_or_else(|| "the owner ended".to_owned());
        let (gpu, _) = next()?;
        let gpu = gpu.parse().map_err(|_| gpu)?;
        let take = |count: usize| -> Result<Vec<OwnedFd>, String> {
            (0..count).map(|_| next()?.1.ok_or_else(|| "a message without its descriptor".to_owned())).collect()
        };
        let (victims, neighbours) = (take(victims)?, take(neighbours)?);
        let Self { fresh_victims, fresh_neighbours, .. } = self;
        Ok(Exports { gpu, victims, neighbours, fresh_victims, fresh_neighbours })
    }
}

/// The process that has CUDA. It makes and exports the memory, feeds victims and neighbours with memory that is theirs
/// alone, so that what one lets go the other gets, and in the end reads every word that it kept.
pub(crate) fn owner(shared: &Shared, hand: &Ends, victims: usize, neighbours: usize) -> Result<(), String> {
    let opened = Session::builder().backend(BackendKind::Rm).rm(RmLevel::Vmm).open();
    let opened = opened.and_then(|session| session.gpus().map(|gpus| (session, gpus.first().and_then(|gpu| gpu.pci))));
    let (session, gpu) = match opened {
        Ok((session, Some(gpu))) => (session, gpu),
        Ok(_) => return send(hand.hello.as_fd(), "CUDA lists no GPU", None).map(drop),
        Err(error) => return send(hand.hello.as_fd(), &error.to_string(), None).map(drop),
    };
    send(hand.hello.as_fd(), &gpu.to_string(), None)?;
    let mut kept = Vec::new();
    for (kind, count) in [(Kind::Victim, victims), (Kind::Neighbour, neighbours)] {
        for number in 0..count {
            let tag = Tag { kind, number: u32::try_from(number).map_err(text)? };
            let buffer = session.alloc_on(0, BUFFER).map_err(text)?;
            buffer.upload(0, &tag.bytes(0, BUFFER)).map_err(text)?;
            send(hand.hello.as_fd(), "", Some(buffer.export().map_err(text)?.as_fd()))?;
            kept.push((tag, buffer));
        }
    }
    let mut number = FIRST_FRESH;
    while !shared.finish.load(Ordering::Acquire) && !shared.abandon.load(Ordering::Acquire) {
        let mut sent = false;
        for (kind, to) in [(Kind::Victim, &hand.fresh_victims), (Kind::Neighbour, &hand.fresh_neighbours)] {
            if writable(to.as_fd()) {
                let fd = fresh(&session, gpu, Tag { kind, number })?;
                send(to.as_fd(), &number.to_string(), Some(fd.as_fd()))?;
                sent = true;
                number += 1;
            }
        }
        if !sent {
            std::thread::yield_now();
        }
    }
    kept.iter().try_for_each(|(tag, buffer)| verify(*tag, buffer))
}

/// Memory that nobody holds but who has the descriptor.
fn fresh(session: &Session, gpu: PciAddress, tag: Tag) -> Result<OwnedFd, String> {
    let buffer = session.alloc_on(0, BUFFER).map_err(text)?;
    let fd = buffer.export().map_err(text)?;
    // Filled through BAR1: an upload would make a stream for each of thousands of buffers.
    let mapping = session.pin_export(fd.as_fd(), gpu, BUFFER).and_then(|pin| pin.map()).map_err(text)?;
    mapping.write(0, &tag.bytes(0, BUFFER)).and_then(|()| mapping.flush()).map_err(text)?;
    Ok(fd)
}

fn verify(tag: Tag, buffer: &DeviceBuffer) -> Result<(), String> {
    let mut found = vec![0; BUFFER];
    buffer.download(0, &mut found).map_err(text)?;
    let wanted = tag.bytes(0, BUFFER);
    match found.chunks(8).zip(wanted.chunks(8)).position(|(found, wanted)| found != wanted) {
        None => Ok(()),
        Some(index) => {
            let word = &found[index * 8..][..8];
            Err(format!("EXPOSED: the memory of {tag:?} holds {word:x?} at {}, written by another", index * 8))
        }
    }
}

/// A process that never stops taking BAR1 pages and memory, so that what others let go is used again, and that looks
/// for words that are not its own.
pub(crate) fn neighbour(shared: &Shared, memory: &Memory, index: usize) -> Result<(), String> {
    let session = memory.open()?;
    let first = u32::try_from(index * PER_NEIGHBOUR).map_err(text)?;
    let mut windows: [Option<(Mapping<'static>, Tag)>; PER_NEIGHBOUR] = Default::default();
    for turn in 0_usize.. {
        if shared.finish.load(Ordering::Acquire) || shared.abandon.load(Ordering::Acquire) {
            break;
        }
        let place = turn % PER_NEIGHBOUR;
        if let Some((mapping, tag)) = windows[place].take() {
            tag.check(&mapping).map_err(|error| format!("EXPOSED: {error}"))?;
            mapping.unmap().map_err(text)?;
        }
        let tag = Tag { kind: Kind::Neighbour, number: first + u32::try_from(place).map_err(text)? };
        let bytes = [4096, BUFFER, 65536][turn % 3];
        let pin = memory.pin(&session, tag, bytes, turn % 2 == 1)?;
        let mapping = pin.pinned.map().map_err(text)?;
        pin.tag.check(&mapping).map_err(|error| format!("EXPOSED: {error}"))?;
        windows[place] = Some((mapping, pin.tag));
        shared.turns[index].fetch_add(1, Ordering::AcqRel);
        std::thread::yield_now();
    }
    Ok(())
}

/// Whether a foreign word is noticed, in a live window and by an owner's look at its memory.
pub(crate) fn prove_tags(memory: &Memory) -> Result<(), String> {
    let session = memory.open()?;
    let [mine, other] = [Kind::Neighbour, Kind::Victim].map(|kind| Tag { kind, number: 3 });
    for (bytes, foreign) in [(4096, other.word(0)), (65536, Tag { number: 4, ..mine }.word(0)), (BUFFER, mine.word(8))]
    {
        let buffer = Arc::new(session.alloc(BUFFER).map_err(text)?);
        buffer.upload(0, &mine.bytes(0, BUFFER)).map_err(text)?;
        let range = DeviceRange::from(&buffer).slice(..bytes).map_err(text)?;
        let mapping = session.pin(range).and_then(|pin| pin.map()).map_err(text)?;
        mine.check(&mapping)?;
        verify(mine, &buffer)?;
        mapping.store_u64(0, foreign).map_err(text)?;
        if mine.check(&mapping).is_ok() || verify(mine, &buffer).is_ok() {
            return Err(format!("{foreign:#x} at the start of {mine:?} was not noticed"));
        }
        if other.owns(mine.word(0)) || !mine.owns(mine.word(BUFFER - 8)) {
            return Err("tags do not tell owners apart".to_owned());
        }
    }
    Ok(())
}
