//! What a push agent fetches from host memory, on a GPU and by the stand-in alike.
//!
//! On a GPU that has bulk copies long stretches come in chunks, through a ring of stages; lengths here lie around the edges of
//! both.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]

use std::time::{Duration, Instant};

use gdrcopy::agent::{AgentOptions, HostBuffer, PushAgent, Segment};
use gdrcopy::{DeviceBuffer, Session};

use super::subject::pattern;

/// Bytes of a chunk.
pub const CHUNK: usize = 16 << 10;
/// Stages of an agent that was not asked for others.
pub const STAGES: usize = 10;
/// Loads of 16 bytes that a thread has under way at most; what all have is fetched without bulk copies.
const BURST: usize = 8;

pub fn segment(offset: usize, bytes: usize, at: usize) -> Segment {
    Segment { range: 0, offset, bytes, at }
}

/// Around what `threads` threads load at once, around multiples of a chunk, around one round and several of all stages.
pub fn lengths(threads: usize, stages: usize) -> Vec<usize> {
    let around =
        |bytes: usize, by: &[isize]| by.iter().map(|by| bytes.checked_add_signed(*by).unwrap()).collect::<Vec<_>>();
    let mut all = around(threads * BURST * 16, &[-16, 0, 1, 15, 16, 17, 40]);
    for chunks in [5, 6, stages - 1, stages, stages + 1, stages + 4, stages + 5, stages + 6, 2 * stages, 3 * stages + 2]
    {
        all.extend(around(chunks * CHUNK, &[-17, -16, -1, 0, 1, 16, 31]));
    }
    all
}

/// A host buffer with these bytes.
fn buffer_with(agent: &mut PushAgent<'_>, data: &[u8]) -> HostBuffer {
    let mut buffer = agent.host_buffer(data.len()).unwrap();
    buffer.as_mut_slice().copy_from_slice(data);
    buffer
}

/// Fetches every length from and to each of the places, given as offsets in the buffer and in the memory; compares all of the
/// memory around, too.
pub fn every_place(session: &Session, options: AgentOptions, lengths: &[usize], places: &[(usize, usize)]) {
    const AROUND: usize = 64;
    let longest = *lengths.iter().max().unwrap();
    let furthest = places.iter().map(|(at, offset)| *at.max(offset)).max().unwrap();
    let memory = session.alloc(longest + furthest + AROUND).unwrap();
    let mut expected = pattern(50, longest + furthest + AROUND);
    memory.upload(0, &expected).unwrap();
    let mut agent = PushAgent::start(session, [&memory], options).unwrap();
    let mut data = pattern(51, longest + furthest);
    let mut buffers = Vec::new();
    for _ in 0..2 {
        buffers.push((buffer_with(&mut agent, &data), data.clone()));
        data.iter_mut().for_each(|byte| *byte = !*byte);
    }
    let mut seen = vec![0; expected.len()];
    for &bytes in lengths {
        for &(at, offset) in places {
            // What one brings differs from what the other left.
            buffers.swap(0, 1);
            let (buffer, data) = &mut buffers[0];
            agent.write_from(buffer, &[segment(offset, bytes, at)]).unwrap();
            expected[offset..offset + bytes].copy_from_slice(&data[at..at + bytes]);
            let end = offset + bytes + AROUND;
            memory.download(0, &mut seen[..end]).unwrap();
            if seen[..end] != expected[..end] {
                let wrong: Vec<_> = (0..end).filter(|&n| seen[n] != expected[n]).collect();
                let (count, first, last) = (wrong.len(), wrong[0], wrong[wrong.len() - 1]);
                panic!("{bytes} bytes from {at} to {offset}: {count} are wrong, between {first} and {last}");
            }
        }
    }
    agent.stop().unwrap();
}

/// Every 8 bytes different, and different in every round.
fn fill(buffer: &mut [u8], round: usize) {
    for (n, word) in buffer.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(u64::try_from(round << 32 | n).unwrap()).to_le_bytes());
    }
}

/// What the CPU has just put into host memory is what is fetched; a mapping sees it once the call returns, and so does the
/// agent.
pub fn none_stale(session: &Session, options: AgentOptions, bytes: usize, rounds: usize) {
    const LOOK: usize = 512;
    let memory = session.alloc(bytes).unwrap();
    let mapping = session.pin(&memory).unwrap().map().unwrap();
    let mut agent = PushAgent::start(session, [&memory], options).unwrap();
    let [mut buffer, mut back] = [0; 2].map(|_| agent.host_buffer(bytes).unwrap());
    let mut seen = [0; LOOK];
    for round in 1..=rounds {
        fill(buffer.as_mut_slice(), round);
        agent.write_from(&mut buffer, &[segment(0, bytes, 0)]).unwrap();
        // The end is what was stored last.
        let places = [bytes - LOOK, round * LOOK % (bytes - LOOK)];
        let at = places[round % 2];
        mapping.read(at, &mut seen).unwrap();
        assert!(seen == buffer.as_slice()[at..at + LOOK], "round {round}, by the mapping at {at}");
        agent.read_into(&mut back, &[segment(0, bytes, 0)]).unwrap();
        assert!(back.as_slice() == buffer.as_slice(), "round {round}, by the agent");
    }
    agent.stop().unwrap();
}

/// A read that is asked for while a write is in flight brings what that writes; so does one of packets.
pub fn in_flight(session: &Session, options: AgentOptions, bytes: usize, rounds: usize) {
    let memory = session.alloc(bytes).unwrap();
    let mut agent = PushAgent::start(session, [&memory], options).unwrap();
    let [mut buffer, mut back] = [0; 2].map(|_| agent.host_buffer(bytes).unwrap());
    let mut end = [0; 256];
    for round in 1..=rounds {
        fill(buffer.as_mut_slice(), round);
        let expected = buffer.as_slice()[bytes - end.len()..].to_vec();
        // As a whole, or in two pieces that are not answered one by one.
        let half = bytes / 2 + round % 17;
        let pieces = [segment(0, half, 0), segment(half, bytes - half, half)];
        let writing = match round % 2 {
            0 => agent.submit_write(buffer, &pieces),
            _ => agent.submit_write(buffer, &[segment(0, bytes, 0)]),
        };
        let writing = writing.unwrap();
        if round % 3 == 0 {
            agent.read(0, bytes - end.len(), &mut end).unwrap();
            assert!(end == expected[..], "round {round}, packets");
        }
        let reading = agent.submit(back, &[segment(0, bytes, 0)]).unwrap();
        back = agent.wait(reading).unwrap();
        assert!(agent.is_done(&writing).unwrap(), "round {round}");
        buffer = agent.wait(writing).unwrap();
        assert!(back.as_slice() == buffer.as_slice(), "round {round}");
    }
    agent.stop().unwrap();
}

/// Where pieces of one request overlap, long or short, the later one's bytes stay.
pub fn overlapping(session: &Session, options: AgentOptions, rounds: usize) {
    const BYTES: usize = 200 << 10;
    let memory = session.alloc(BYTES).unwrap();
    let mut agent = PushAgent::start(session, [&memory], options).unwrap();
    let mut expected = vec![0; BYTES];
    memory.upload(0, &expected).unwrap();
    let mut seen = vec![0; BYTES];
    let mut buffer = agent.host_buffer(BYTES).unwrap();
    for round in 1..=rounds {
        fill(buffer.as_mut_slice(), round);
        let at = 16 * (round % 100);
        let pieces = [
            segment(0, BYTES - 2048, 1024),
            segment(48 + at, 1000, 7 + at),
            segment(8192, 100 << 10, 4096),
            // Another place in 16 bytes.
            segment(70_001, 70_000, 20_000 + at),
            segment(64 << 10, 64 << 10, 0),
            segment(BYTES - 3000 - at, 3000, 16),
        ];
        agent.write_from(&mut buffer, &pieces).unwrap();
        for piece in pieces {
            let from = &buffer.as_slice()[piece.at..piece.at + piece.bytes];
            expected[piece.offset..piece.offset + piece.bytes].copy_from_slice(from);
        }
        memory.download(0, &mut seen).unwrap();
        assert!(seen == expected, "round {round}, from {:?} on", (0..BYTES).find(|&n| seen[n] != expected[n]));
    }
    agent.stop().unwrap();
}

/// Writes at about the moment at which the kernel leaves, 20 us after the last: none is lost, and each launch starts afresh.
/// How many launches there were.
pub fn meeting_a_leaving_kernel(session: &Session, options: AgentOptions, rounds: usize) -> u64 {
    const BYTES: usize = 300 << 10;
    let memory: DeviceBuffer = session.alloc(BYTES).unwrap();
    let options = options.idle_timeout(Some(Duration::from_micros(20)));
    let mut agent = PushAgent::start(session, [&memory], options).unwrap();
    let [mut buffer, mut back] = [0; 2].map(|_| agent.host_buffer(BYTES).unwrap());
    for round in 1..=rounds {
        let bytes = BYTES - 16 * (round * 37 % 16_000);
        fill(&mut buffer.as_mut_slice()[..bytes], round);
        let (pause, length) = (Instant::now(), Duration::from_nanos(u64::try_from(round * 10 % 50_000).unwrap()));
        while round % 2 == 0 && pause.elapsed() < length {
            std::thread::yield_now();
        }
        agent.write_from(&mut buffer, &[segment(0, bytes, 0)]).unwrap();
        agent.read_into(&mut back, &[segment(0, bytes, 0)]).unwrap();
        assert!(back.as_slice()[..bytes] == buffer.as_slice()[..bytes], "round {round}, {bytes} bytes");
    }
    let launches = agent.launches();
    agent.stop().unwrap();
    launches
}
