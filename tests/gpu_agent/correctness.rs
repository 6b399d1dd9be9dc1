//! What a read returns.

use std::time::{Duration, Instant};

use gdrcopy::agent::{AgentOptions, PushAgent, Segment};

use crate::alone;
use crate::common::env::from_env;
use crate::support::pattern;

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

#[test]
fn every_size_and_alignment_is_fetched() {
    let Some(alone) = alone() else { return };
    const BYTES: usize = 5 << 20;
    let memory = alone.session.alloc(BYTES).unwrap();
    let mapping = alone.session.pin(&memory).unwrap().map().unwrap();
    let data = pattern(20, BYTES);
    for threads in [512, 1024] {
        let options = AgentOptions::default().threads(threads);
        let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        let mut buffer = agent.host_buffer(BYTES).unwrap();
        buffer.as_mut_slice().copy_from_slice(&data);
        let small = (0..=100).flat_map(|bytes| (0..16).map(move |n| (bytes, 1 + n, (n * 7 + bytes) % 16)));
        let medium = (101..=2000).map(|bytes| (bytes, 1 + bytes * 5 % 64, bytes * 11 % 64));
        for (bytes, offset, at) in small.chain(medium) {
            mapping.write(0, &[0x5a; 3000][..offset + bytes + 64]).unwrap();
            agent.write_from(&mut buffer, &[segment(offset, bytes, at)]).unwrap();
            let mut seen = vec![0; offset + bytes + 64];
            mapping.read(0, &mut seen).unwrap();
            assert!(seen[offset..offset + bytes] == data[at..at + bytes], "{bytes} bytes at {at} to {offset}");
            let around = seen[..offset].iter().chain(&seen[offset + bytes..]);
            assert!(around.copied().all(|byte| byte == 0x5a), "{bytes} bytes at {at} to {offset}");
        }
        for (bytes, offset, at) in [(65536, 0, 0), (262_144, 16, 48), (1 << 20, 3, 8), (4_000_001, 7, 7)] {
            agent.write_from(&mut buffer, &[segment(offset, bytes, at)]).unwrap();
            let mut seen = vec![0; bytes];
            memory.download(offset, &mut seen).unwrap();
            assert!(seen == data[at..at + bytes], "{bytes} bytes at {at} to {offset}");
            agent.write(0, offset, &data[at + 5..][..bytes]).unwrap();
            memory.download(offset, &mut seen).unwrap();
            assert!(seen == data[at + 5..][..bytes], "{bytes} bytes of any memory to {offset}");
        }
    }
}

/// What the CPU has just put into host memory is what the GPU fetches.
#[test]
fn no_write_is_stale() {
    let Some(alone) = alone() else { return };
    let rounds = from_env("GDRCOPY_AGENT_ROUNDS", 100_000) / 10;
    let memory = alone.session.alloc(4096).unwrap();
    let mapping = alone.session.pin(&memory).unwrap().map().unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    let mut buffer = agent.host_buffer(4096).unwrap();
    let mut seen = [0; 1024];
    for round in 1..=rounds {
        for (n, word) in buffer.as_mut_slice().chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&((round << 16 | n) as u64).to_le_bytes());
        }
        agent.write_from(&mut buffer, &[segment(0, 4096, 0)]).unwrap();
        let at = round % 4 * 1024;
        mapping.read(at, &mut seen).unwrap();
        assert!(seen == buffer.as_slice()[at..at + 1024], "round {round}");
    }
    println!("{rounds} rounds, none stale");
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
