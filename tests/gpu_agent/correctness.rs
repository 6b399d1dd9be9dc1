//! What a read returns.

use std::time::{Duration, Instant};

use gdrcopy::agent::{AgentOptions, PushAgent, Segment};

use crate::support::pattern;
use crate::{alone, from_env};

fn segment(offset: usize, bytes: usize, at: usize) -> Segment {
    Segment { range: 0, offset, bytes, at }
}

#[test]
fn every_size_and_alignment_arrives() {
    let Some(alone) = alone() else { return };
    const BYTES: usize = 5 << 20;
    let memory = alone.session.alloc(BYTES).unwrap();
    let data = pattern(1, BYTES);
    memory.upload(0, &data).unwrap();
    for threads in [64, 512, 1024] {
        let options = AgentOptions::default().threads(threads);
        let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        let mut buffer = agent.host_buffer(BYTES).unwrap();
        let started = Instant::now();
        let mut reads = 0;
        let small = (0..=300).flat_map(|bytes| (0..16).map(move |n| (bytes, n, (n * 7 + bytes) % 16)));
        let medium = (301..=4096).map(|bytes| (bytes, bytes * 5 % 64, bytes * 11 % 64));
        let large = [8191, 16384, 65535, 65536, 131_071, 131_073, 262_144, 1 << 20, (1 << 20) + 7, 4_000_001];
        let large =
            large.into_iter().flat_map(|bytes| [(0, 0), (16, 0), (3, 0), (0, 5), (9, 14)].map(|(o, a)| (bytes, o, a)));
        for (bytes, offset, at) in small.chain(medium).chain(large) {
            let expected = &data[offset..offset + bytes];
            let mut to = vec![0xa5; bytes + 2];
            agent.read(0, offset, &mut to[1..=bytes]).unwrap();
            assert!(to[1..=bytes] == *expected, "{bytes} bytes at {offset}, {threads} threads");
            assert_eq!((to[0], to[bytes + 1]), (0xa5, 0xa5));
            buffer.as_mut_slice()[..at + bytes + 64].fill(0x5a);
            agent.read_into(&mut buffer, &[segment(offset, bytes, at)]).unwrap();
            let seen = buffer.as_slice();
            assert!(seen[at..at + bytes] == *expected, "{bytes} bytes at {offset} to {at}, {threads} threads");
            let around = seen[..at].iter().chain(&seen[at + bytes..at + bytes + 64]);
            assert!(around.copied().all(|byte| byte == 0x5a), "{bytes} bytes at {offset} to {at}, {threads} threads");
            reads += 2;
        }
        println!("{threads} threads: {reads} reads in {:?}, {} launches", started.elapsed(), agent.launches());
        agent.stop().unwrap();
    }
}

/// The source is written through BAR1 between requests, and no request brings what was there before.
#[test]
fn no_read_is_stale() {
    let Some(alone) = alone() else { return };
    const WORDS: usize = 512;
    let rounds = from_env("GDRCOPY_AGENT_ROUNDS", 100_000) as u64;
    let memory = alone.session.alloc(8 * WORDS).unwrap();
    let mapping = alone.session.pin(&memory).unwrap().map().unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().idle_timeout(None)).unwrap();
    let mut buffer = agent.host_buffer(8 * WORDS).unwrap();
    let started = Instant::now();
    let mut data = vec![0_u8; 8 * WORDS];
    let mut to = vec![0_u8; 1024];
    for round in 1..=rounds {
        for (n, word) in data.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(round << 16 | n as u64).to_le_bytes());
        }
        mapping.write_posted(0, &data).unwrap();
        if round % 2 == 0 {
            agent.read_into(&mut buffer, &[segment(0, 8 * WORDS, 0)]).unwrap();
            assert!(buffer.as_slice() == data, "round {round}");
        } else {
            let bytes = 8 + (round % 1017) as usize;
            agent.read(0, 8 * WORDS - bytes, &mut to[..bytes]).unwrap();
            assert!(to[..bytes] == data[8 * WORDS - bytes..], "round {round}, {bytes} bytes");
        }
    }
    println!("{rounds} rounds in {:?}, {} launches, none stale", started.elapsed(), agent.launches());
}

#[test]
fn many_requests_are_in_flight() {
    let Some(alone) = alone() else { return };
    const BYTES: usize = 1 << 20;
    let memory = alone.session.alloc(BYTES).unwrap();
    let data = pattern(2, BYTES);
    memory.upload(0, &data).unwrap();
    for ring in [16, 64] {
        let options = AgentOptions::default().ring(ring).idle_timeout(Some(Duration::from_micros(50)));
        let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        let mut free: Vec<_> = (0..48).map(|_| agent.host_buffer(1 << 16).unwrap()).collect();
        for round in 0..200_usize {
            let flying: Vec<_> = free
                .drain(..)
                .enumerate()
                .map(|(n, buffer)| {
                    let pieces =
                        [0, 1, 2].map(|k| segment((round * 37 + n * 1001 + k * 5) % 65536, 500 * n + k, 30_000 * k));
                    let pieces = &pieces[..1 + (round + n) % 2];
                    (pieces.to_vec(), agent.submit(buffer, pieces).unwrap())
                })
                .collect();
            for (pieces, ticket) in flying.into_iter().rev() {
                let buffer = agent.wait(ticket).unwrap();
                for piece in pieces {
                    let expected = &data[piece.offset..piece.offset + piece.bytes];
                    let seen = &buffer.as_slice()[piece.at..piece.at + piece.bytes];
                    assert!(seen == expected, "round {round}, {piece:?}");
                }
                free.push(buffer);
            }
            if round % 10 == 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        println!("ring of {ring}: 200 rounds of 48 requests, {} launches", agent.launches());
    }
}

/// Numbers that wrap, kernels that leave at any moment.
#[test]
fn a_request_that_meets_a_leaving_kernel_is_served() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(16384).unwrap();
    let data = pattern(3, 16384);
    memory.upload(0, &data).unwrap();
    let options = AgentOptions::default().idle_timeout(Some(Duration::from_micros(20))).first_number(u32::MAX - 10_000);
    let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
    let mut buffer = agent.host_buffer(8192).unwrap();
    let started = Instant::now();
    for request in 0..20_000_usize {
        // Around the time-out, in steps of 10 ns.
        let pause = Instant::now();
        while request % 2 == 0 && pause.elapsed() < Duration::from_nanos((request * 10 % 50_000) as u64) {}
        let (offset, bytes) = (request % 4096, 1 + request * 7 % 3000);
        if request % 3 == 0 {
            agent.read_into(&mut buffer, &[segment(offset, bytes, request % 16)]).unwrap();
            assert!(buffer.as_slice()[request % 16..][..bytes] == data[offset..offset + bytes], "request {request}");
        } else {
            let mut to = vec![0; bytes.min(1024)];
            agent.read(0, offset, &mut to).unwrap();
            assert!(to == data[offset..offset + to.len()], "request {request}");
        }
    }
    println!("20000 requests, {} launches, in {:?}", agent.launches(), started.elapsed());
    assert!(agent.launches() > 100);
}
