//! The push agent's protocol, with threads of the CPU in the kernel's place: what is tested is everything but the kernel
//! itself, which `gpu_agent` tests.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]
#![allow(unsafe_code, reason = "host memory is registered, which is a promise to keep it")]

mod common;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use common::counting::{Counting, calls_during};
use common::fork::in_child;
use common::pulls;
use common::pulls::segment;
use common::subject::{emulated, pattern};
use gdrcopy::agent::{AgentOptions, Bounce, Fault, HostBuffer, PushAgent, Segment, Ticket};
use gdrcopy::emulated::EmulatedConfig;
use gdrcopy::{DeviceBuffer, ErrorKind, Feature, Session};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BYTES: usize = 3 << 20;

fn session() -> Session {
    emulated(EmulatedConfig::default()).open().unwrap()
}

fn stand_in() -> AgentOptions {
    AgentOptions::default().cpu_stand_in().deadline(Duration::from_secs(20))
}

/// Device memory with known bytes in it.
fn filled(session: &Session, bytes: usize) -> (DeviceBuffer, Vec<u8>) {
    let buffer = session.alloc(bytes).unwrap();
    let data = pattern(9, bytes);
    buffer.upload(0, &data).unwrap();
    (buffer, data)
}

/// Numbers without a pattern, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

#[test]
fn every_size_and_alignment_arrives() {
    let session = session();
    let (memory, data) = filled(&session, BYTES);
    let mut agent = PushAgent::start(&session, [&memory], stand_in().dedicated()).unwrap();
    let mut buffer = agent.host_buffer(BYTES).unwrap();
    let mut dice = Dice(1);
    let edges = [131_071, 131_072, 131_073, 1 << 20, (1 << 20) + 131_072 * 3 + 1];
    for bytes in (0..=4096).chain(edges) {
        let (offset, at) = (dice.below(100), dice.below(100));
        let mut to = vec![0xa5; bytes + 2];
        agent.read(0, offset, &mut to[1..=bytes]).unwrap();
        assert!(to[1..=bytes] == data[offset..offset + bytes], "{bytes} bytes at {offset}");
        assert_eq!((to[0], to[bytes + 1]), (0xa5, 0xa5));

        buffer.as_mut_slice()[..at + bytes + 1].fill(0x5a);
        agent.read_into(&mut buffer, &[segment(offset, bytes, at)]).unwrap();
        let seen = buffer.as_slice();
        assert!(seen[at..at + bytes] == data[offset..offset + bytes], "{bytes} bytes at {offset} to {at}");
        assert!(seen[..at].iter().chain(&seen[at + bytes..=at + bytes]).all(|&byte| byte == 0x5a));
    }
    assert_eq!(agent.launches(), 1, "a dedicated agent stays");
    agent.stop().unwrap();
}

#[test]
fn every_size_and_alignment_is_fetched() {
    let session = session();
    let memory = session.alloc(BYTES).unwrap();
    let mut agent = PushAgent::start(&session, [&memory], stand_in()).unwrap();
    let mut buffer = agent.host_buffer(BYTES).unwrap();
    let data = pattern(10, BYTES);
    buffer.as_mut_slice().copy_from_slice(&data);
    let mut dice = Dice(5);
    for bytes in (0..=4096).step_by(3).chain([131_073, 1 << 20]) {
        let (offset, at) = (1 + dice.below(100), dice.below(100));
        memory.upload(0, &vec![0x5a; offset + bytes + 1]).unwrap();
        agent.write_from(&mut buffer, &[segment(offset, bytes, at)]).unwrap();
        let mut seen = vec![0; offset + bytes + 1];
        memory.download(0, &mut seen).unwrap();
        assert!(seen[offset..offset + bytes] == data[at..at + bytes], "{bytes} bytes at {at} to {offset}");
        assert!(seen[..offset].iter().chain(&seen[offset + bytes..]).all(|&byte| byte == 0x5a));

        agent.write(0, offset, &data[at + 1..][..bytes]).unwrap();
        memory.download(0, &mut seen).unwrap();
        assert!(seen[offset..offset + bytes] == data[at + 1..][..bytes], "{bytes} bytes of any memory to {offset}");
        assert!(seen[..offset].iter().chain(&seen[offset + bytes..]).all(|&byte| byte == 0x5a));
    }
    // Both ways in flight, one after the other.
    let ticket = agent.submit_write(buffer, &[segment(0, 3000, 17), segment(5000, 100, 4)]).unwrap();
    let back = agent.host_buffer(6000).unwrap();
    let other = agent.submit(back, &[segment(0, 5100, 0)]).unwrap();
    let back = agent.wait(other).unwrap();
    assert!(agent.is_done(&ticket).unwrap());
    agent.wait(ticket).unwrap();
    assert!(back.as_slice()[..3000] == data[17..3017] && back.as_slice()[5000..5100] == data[4..104]);
}

#[test]
fn what_is_fetched_is_as_new_as_it_should_be() {
    let session = session();
    let lengths = pulls::lengths(256, pulls::STAGES);
    pulls::every_place(&session, stand_in(), &lengths, &[(0, 0), (3, 3), (16, 5), (0, 17)]);
    pulls::none_stale(&session, stand_in(), 100_000, 200);
    pulls::in_flight(&session, stand_in(), 100_000, 200);
    pulls::overlapping(&session, stand_in(), 100);
    assert!(pulls::meeting_a_leaving_kernel(&session, stand_in().threads(1024), 300) > 10);
}

#[test]
fn packets_and_answers_bring_the_same() {
    let session = session();
    let (memory, data) = filled(&session, 4096);
    for limit in [0, 1, 7, 8, 100, 1024] {
        let mut agent = PushAgent::start(&session, [&memory], stand_in().packet_bytes(limit)).unwrap();
        for bytes in [1, 7, 8, 9, 99, 100, 101, 1023, 1024, 1025] {
            let mut to = vec![0; bytes];
            agent.read(0, 3, &mut to).unwrap();
            assert!(to == data[3..3 + bytes], "{bytes} bytes, packets up to {limit}");
        }
    }
}

#[test]
fn a_thousand_starts_and_stops() {
    let session = session();
    let (memory, data) = filled(&session, 4096);
    let mut dice = Dice(2);
    for cycle in 0..1000 {
        let mut agent = PushAgent::start(&session, [&memory], stand_in().ring(16)).unwrap();
        for _ in 0..dice.below(4) {
            let (offset, bytes) = (dice.below(2000), dice.below(2000));
            let mut to = vec![0; bytes];
            agent.read(0, offset, &mut to).unwrap();
            assert!(to == data[offset..offset + bytes], "cycle {cycle}");
        }
        if cycle % 2 == 0 {
            agent.stop().unwrap();
        }
    }
    drop(memory);
    assert_eq!(session.emulated().unwrap().live(), gdrcopy::emulated::Live::default(), "nothing is left");
}

/// Requests at about the moment at which the kernel leaves: none is lost, none is answered with another's data.
#[test]
fn a_request_that_meets_a_leaving_kernel_is_served() {
    let session = session();
    let (memory, data) = filled(&session, 8192);
    let options = stand_in().ring(16).idle_timeout(Some(Duration::from_micros(10)));
    let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
    let mut buffer = agent.host_buffer(4096).unwrap();
    let mut dice = Dice(3);
    let mut requests = 0;
    while agent.launches() < 500 {
        assert!(requests < 1_000_000, "{} launches", agent.launches());
        let pause = Instant::now();
        let length = Duration::from_nanos(u64::try_from(dice.below(60_000)).unwrap());
        while requests % 3 != 0 && pause.elapsed() < length {
            std::thread::yield_now();
        }
        let (offset, bytes) = (dice.below(4096), 1 + dice.below(1500));
        if requests % 2 == 0 {
            let mut to = vec![0; bytes];
            agent.read(0, offset, &mut to).unwrap();
            assert!(to == data[offset..offset + bytes], "request {requests}");
        } else {
            agent.read_into(&mut buffer, &[segment(offset, bytes, 0)]).unwrap();
            assert!(buffer.as_slice()[..bytes] == data[offset..offset + bytes], "request {requests}");
        }
        requests += 1;
    }
}

#[test]
fn a_busy_kernel_leaves_when_its_time_is_up() {
    let session = session();
    let (memory, data) = filled(&session, 4096);
    let options = stand_in().idle_timeout(None).residency(Some(Duration::from_micros(500)));
    let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
    let mut requests = 0_usize;
    while agent.launches() < 6 {
        assert!(requests < 10_000_000, "{} launches", agent.launches());
        let mut to = [0; 64];
        agent.read(0, requests % 4000, &mut to).unwrap();
        assert!(to == data[requests % 4000..][..64]);
        requests += 1;
    }
}

#[test]
fn an_idle_kernel_leaves_and_comes_back() {
    let session = session();
    let (memory, data) = filled(&session, 4096);
    let mut agent = PushAgent::start(&session, [&memory], stand_in()).unwrap();
    let started = Instant::now();
    while agent.is_resident() {
        assert!(started.elapsed() < Duration::from_secs(10), "200 us of idling have passed");
        std::thread::yield_now();
    }
    let mut to = [0; 100];
    agent.read(0, 1, &mut to).unwrap();
    assert!(to == data[1..101]);
    assert_eq!(agent.launches(), 2);
}

/// Many in flight, waited for in any order, over many turns of a small ring, while kernels come and go.
#[test]
fn several_requests_are_in_flight() {
    let session = session();
    let (memory, data) = filled(&session, 1 << 16);
    let options = stand_in().ring(16).idle_timeout(Some(Duration::from_micros(100)));
    let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
    let mut free: Vec<HostBuffer> = (0..24).map(|_| agent.host_buffer(4096).unwrap()).collect();
    let mut flying: VecDeque<(Ticket, usize, usize)> = VecDeque::new();
    let mut dice = Dice(4);
    let (mut made, mut served) = (0, 0);
    while served < 5000 {
        if made < 5000 && !free.is_empty() && dice.below(3) > 0 {
            let (offset, bytes) = (dice.below(1 << 15), dice.below(4097));
            let ticket = agent.submit(free.pop().unwrap(), &[segment(offset, bytes, 4096 - bytes)]).unwrap();
            flying.push_back((ticket, offset, bytes));
            made += 1;
        } else if !flying.is_empty() {
            let (ticket, offset, bytes) = flying.remove(dice.below(flying.len())).unwrap();
            if dice.below(2) == 0 {
                while !agent.is_done(&ticket).unwrap() {
                    std::thread::yield_now();
                }
            }
            let buffer = agent.wait(ticket).unwrap();
            assert!(buffer.as_slice()[4096 - bytes..] == data[offset..offset + bytes], "request {served}");
            free.push(buffer);
            served += 1;
            // A read of another form in between.
            let mut to = [0; 40];
            agent.read(0, offset, &mut to).unwrap();
            assert!(to == data[offset..offset + 40]);
        }
    }
}

#[test]
fn a_request_of_many_pieces_is_answered_once() {
    let session = session();
    let (memory, data) = filled(&session, 1 << 16);
    let (other, more) = filled(&session, 5000);
    let mut agent = PushAgent::start(&session, [&memory, &other], stand_in().ring(16)).unwrap();
    let mut buffer = agent.host_buffer(1 << 16).unwrap();
    for pieces in [0, 1, 3, 4, 5, 40, 200] {
        let segments: Vec<Segment> = (0..pieces)
            .map(|n| Segment { range: n % 2, offset: n * 7, bytes: (n * 13) % 90, at: n * 100 + n % 3 })
            .collect();
        buffer.as_mut_slice().fill(0);
        agent.read_into(&mut buffer, &segments).unwrap();
        let mut expected = vec![0; 1 << 16];
        for s in &segments {
            let from = if s.range == 0 { &data } else { &more };
            expected[s.at..s.at + s.bytes].copy_from_slice(&from[s.offset..s.offset + s.bytes]);
        }
        assert!(buffer.as_slice() == expected, "{pieces} pieces");
    }
}

#[test]
fn numbers_wrap() {
    let session = session();
    let (memory, data) = filled(&session, 4096);
    for first in [u32::MAX - 40, u32::MAX - 1, u32::MAX, 0] {
        let options = stand_in().ring(16).first_number(first).idle_timeout(Some(Duration::from_micros(100)));
        let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
        let mut buffer = agent.host_buffer(4096).unwrap();
        for request in 0..200 {
            let mut to = vec![0; 1 + request % 1024];
            agent.read(0, request, &mut to).unwrap();
            assert!(to == data[request..][..to.len()], "{first} {request}");
            let pieces: Vec<Segment> = (0..request % 7).map(|n| segment(request + n, 100, n * 100)).collect();
            agent.read_into(&mut buffer, &pieces).unwrap();
            for piece in pieces {
                assert!(buffer.as_slice()[piece.at..][..100] == data[piece.offset..][..100], "{first} {request}");
            }
        }
    }
}

/// What this thread wrote through a mapping before is what it reads.
#[test]
fn a_read_sees_earlier_writes() {
    let session = session();
    let memory = session.alloc(4096).unwrap();
    let mapping = session.pin(&memory).unwrap().map().unwrap();
    let mut agent = PushAgent::start(&session, [&memory], stand_in()).unwrap();
    let mut buffer = agent.host_buffer(2048).unwrap();
    for round in 0..3000 {
        let data = pattern(round, 2048);
        mapping.write_posted(64, &data).unwrap();
        let mut to = [0; 300];
        agent.read(0, 64, &mut to).unwrap();
        assert!(to == data[..300], "round {round}");
        agent.read_into(&mut buffer, &[segment(64, 2048, 0)]).unwrap();
        assert!(buffer.as_slice() == data, "round {round}");
    }
}

#[test]
fn an_agent_may_go_with_requests_in_flight() {
    let session = session();
    let (memory, data) = filled(&session, 1 << 16);
    for cycle in 0..100_usize {
        let mut agent = PushAgent::start(&session, [&memory], stand_in().ring(16)).unwrap();
        let mut tickets: Vec<Ticket> = (0..6)
            .map(|_| {
                let buffer = agent.host_buffer(1 << 12).unwrap();
                agent.submit(buffer, &[segment(cycle, 1 << 12, 0)]).unwrap()
            })
            .collect();
        tickets.truncate(cycle % 7);
        let kept = tickets.pop().map(|ticket| agent.wait(ticket).unwrap());
        drop(agent);
        // A buffer that came back outlives the agent.
        assert!(kept.is_none_or(|buffer| buffer.as_slice() == &data[cycle..cycle + (1 << 12)]));
    }
}

#[test]
fn a_kernel_that_died_is_an_error_and_no_hang() {
    let session = session();
    let (memory, _) = filled(&session, 1 << 16);
    for in_packets in [true, false] {
        let mut agent = PushAgent::start(&session, [&memory], stand_in().stand_in_fault(3, Fault::Dies)).unwrap();
        let mut buffer = agent.host_buffer(1 << 16).unwrap();
        let one = |agent: &mut PushAgent<'_>, buffer: &mut HostBuffer| {
            if in_packets { agent.read(0, 0, &mut [0; 8]) } else { agent.read_into(buffer, &[segment(0, 5000, 0)]) }
        };
        for _ in 0..3 {
            one(&mut agent, &mut buffer).unwrap();
        }
        let started = Instant::now();
        let error = one(&mut agent, &mut buffer).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io(libc::EIO), "{error}");
        assert!(error.to_string().contains("ended without a word"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(5), "sooner than the deadline");
        assert_eq!(agent.read(0, 0, &mut [0; 2000]).unwrap_err().kind(), error.kind(), "for good");
        assert_eq!(buffer.is_empty(), !in_packets);
        drop(agent);
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn a_kernel_that_hangs_is_an_error_and_no_hang() {
    let session = session();
    let (memory, _) = filled(&session, 1 << 16);
    let limit = Duration::from_millis(200);
    let options = stand_in().dedicated().deadline(limit).stand_in_fault(1, Fault::Hangs);
    let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
    let mut buffer = agent.host_buffer(4096).unwrap();
    agent.read_into(&mut buffer, &[segment(0, 4096, 0)]).unwrap();
    let started = Instant::now();
    let error = agent.read_into(&mut buffer, &[segment(0, 4096, 0)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("did not answer within 200 ms"), "{error}");
    assert!(buffer.as_slice().is_empty(), "the kernel may still write to it");
    assert_eq!(agent.stop().unwrap_err().kind(), ErrorKind::Busy);
    assert!((2 * limit..20 * limit).contains(&started.elapsed()), "{:?}", started.elapsed());
    assert!(session.emulated().unwrap().live().pins > 0, "what the kernel uses stays");
}

#[test]
fn what_cannot_be_is_refused() {
    let session = session();
    let (memory, _) = filled(&session, 4096);
    let refused = |options: AgentOptions| PushAgent::start(&session, [&memory], options).unwrap_err();
    let error = refused(AgentOptions::default());
    assert_eq!(error.kind(), ErrorKind::UnsupportedFeature(Feature::Operation));
    assert!(error.to_string().contains("has no GPU") && error.to_string().contains("cpu_stand_in()"), "{error}");
    for options in [
        stand_in().threads(0),
        stand_in().threads(32),
        stand_in().threads(100),
        stand_in().threads(1056),
        stand_in().ring(8),
        stand_in().ring(24),
        stand_in().packet_bytes(1025),
        stand_in().idle_timeout(Some(Duration::ZERO)),
        stand_in().residency(Some(Duration::ZERO)),
    ] {
        let error = refused(options);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.hint().is_some() && !error.to_string().contains('\n'), "{error}");
    }
    let none: [&DeviceBuffer; 0] = [];
    assert_eq!(PushAgent::start(&session, none, stand_in()).unwrap_err().kind(), ErrorKind::InvalidArgument);

    let mut agent = PushAgent::start(&session, [&memory], stand_in()).unwrap();
    for (range, offset, bytes) in [(0, 0, 4097), (0, 4097, 0), (0, 4000, 97), (0, usize::MAX, 2), (1, 0, 1)] {
        let mut to = vec![7; bytes];
        assert_eq!(agent.read(range, offset, &mut to).unwrap_err().kind(), ErrorKind::OutOfBounds);
        assert!(to.iter().all(|&byte| byte == 7));
    }
    assert_eq!(agent.host_buffer(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let mut buffer = agent.host_buffer(100).unwrap();
    for bad in [segment(0, 101, 0), segment(0, 1, 100), segment(0, 2, usize::MAX), segment(4096, 1, 0)] {
        assert_eq!(agent.read_into(&mut buffer, &[bad]).unwrap_err().kind(), ErrorKind::OutOfBounds);
        let error = agent.submit(buffer, &[segment(0, 1, 0), bad]).unwrap_err();
        assert_eq!(error.error().kind(), ErrorKind::OutOfBounds);
        buffer = error.into_buffer().unwrap();
        assert_eq!(buffer.len(), 100);
    }

    let mut other = PushAgent::start(&session, [&memory], stand_in()).unwrap();
    let error = other.read_into(&mut buffer, &[segment(0, 1, 0)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "another agent's buffer");
    let ticket = agent.submit(buffer, &[segment(0, 1, 0)]).unwrap();
    assert_eq!(other.is_done(&ticket).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(other.wait(ticket).unwrap_err().kind(), ErrorKind::InvalidArgument);
    agent.read(0, 0, &mut [0; 2000]).unwrap();
}

#[test]
fn a_forked_child_is_told_and_harms_nothing() {
    let session = session();
    let (memory, data) = filled(&session, 4096);
    let mut kept = Some(PushAgent::start(&session, [&memory], stand_in()).unwrap());
    let mut buffer = kept.as_mut().map(|agent| agent.host_buffer(64).unwrap());
    in_child(|| {
        let (mut agent, mut buffer) = (kept.take().unwrap(), buffer.take().unwrap());
        assert_eq!(agent.read(0, 0, &mut [0; 8]).unwrap_err().kind(), ErrorKind::WrongProcess);
        let error = agent.read_into(&mut buffer, &[segment(0, 8, 0)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongProcess);
        assert_eq!(agent.host_buffer(8).unwrap_err().kind(), ErrorKind::WrongProcess);
        drop(buffer);
        drop(agent);
    });
    let agent = kept.as_mut().unwrap();
    let mut to = [0; 64];
    agent.read(0, 0, &mut to).unwrap();
    assert!(to == data[..64]);
    agent.read_into(buffer.as_mut().unwrap(), &[segment(0, 64, 0)]).unwrap();
}

/// What drivers say, from one that stands in for them: this program again, over it.
#[cfg(feature = "cuda")]
mod refusals {
    use std::fs;
    use std::path::Path;

    use gdrcopy::agent::{AgentOptions, PushAgent};
    use gdrcopy::{BackendKind, ErrorKind, Feature, Session};

    use crate::common::standin::{MODULES, MPS, Module, WATCHDOG, command, counted, text};

    /// What is to be refused, for the program over the stand-in.
    const EXPECTED: &str = "GDRCOPY_TEST_EXPECTED";
    const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

    #[test]
    fn a_kernel_is_launched_only_where_it_may_stay() {
        if Module::here().is_some() {
            return;
        }
        if !Path::new(env!("CARGO_TARGET_TMPDIR")).exists() {
            eprintln!("SKIPPED the stand-in: this is not the machine that the tests were built on");
            return;
        }
        let pipes = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mps-{}", std::process::id()));
        let (with, without) = (pipes.join("with"), pipes.join("without"));
        for folder in [&with, &without] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(with.join("control"), "").unwrap();
        let cases: [(&str, &[(&str, &Path)]); 6] = [
            ("watchdog", &[(WATCHDOG, Path::new("1"))]),
            ("mps", &[(MPS, Path::new("1"))]),
            ("mps", &[(MPS, Path::new("unknown")), (PIPES, &with)]),
            // A driver that knows better than the pipe of a daemon which has gone.
            ("nothing", &[(PIPES, &with)]),
            ("nothing", &[(MPS, Path::new("unknown")), (PIPES, &without)]),
            ("nothing", &[]),
        ];
        for (expected, settings) in cases {
            let mut program = command(MODULES[7]);
            program.env_remove(PIPES).env(EXPECTED, expected).envs(settings.iter().copied());
            let output = program.args(["--exact", "refusals::over_the_stand_in", "--nocapture"]).output().unwrap();
            let said = text(&output);
            assert!(output.status.success() && counted(&said, "passed") == 1, "{expected}, {settings:?}: {said}");
        }
        fs::remove_dir_all(&pipes).unwrap();
    }

    #[test]
    fn over_the_stand_in() {
        let (Some(_), Ok(expected)) = (Module::here(), std::env::var(EXPECTED)) else { return };
        let session = Session::builder().ignore_env().backend(BackendKind::Gdrdrv).open().unwrap();
        let memory = session.alloc(4096).unwrap();
        let error = PushAgent::start(&session, [&memory], AgentOptions::default()).unwrap_err();
        let (kind, says) = match expected.as_str() {
            "watchdog" => (ErrorKind::UnsupportedFeature(Feature::Operation), "whose watchdog ends kernels that stay"),
            "mps" => (ErrorKind::UnsupportedFeature(Feature::Mps), "runs under MPS"),
            // Nothing is against it but that the stand-in has no memory that a kernel would reach, and runs none.
            _ => (error.kind(), "CUDA_ERROR_NOT_SUPPORTED"),
        };
        assert!(error.kind() == kind && error.to_string().contains(says), "{expected}: {error:?}");
        assert!(expected == "nothing" || error.hint().is_some(), "{error:?}");
        assert!(expected != "nothing" || matches!(kind, ErrorKind::Io(_)), "{error:?}");
    }
}

/// However reads are cut up.
#[test]
fn pieces_of_every_size_arrive() {
    let session = session();
    let (memory, data) = filled(&session, BYTES);
    for (first, growth) in [(4096, 100), (16 << 10, 150), (128 << 10, 100)] {
        let options = stand_in().ring(16).bounce(Bounce { first, growth });
        let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
        for (bytes, offset) in [(1025, 63), (4096, 0), (6144, 1), (65_536, 9), (100_000, 64), (2_500_001, 17)] {
            let mut to = vec![0xa5; bytes + 2];
            agent.read(0, offset, &mut to[1..=bytes]).unwrap();
            assert!(to[1..=bytes] == data[offset..offset + bytes], "{first} {growth}: {bytes} at {offset}");
            assert_eq!((to[0], to[bytes + 1]), (0xa5, 0xa5));
        }
    }
}

#[test]
fn reads_allocate_nothing() {
    let session = session();
    let (memory, _) = filled(&session, 1 << 20);
    let mut agent = PushAgent::start(&session, [&memory], stand_in().dedicated()).unwrap();
    let mut buffer = Some(agent.host_buffer(4096).unwrap());
    let mut reached = agent.host_buffer(300_000).unwrap();
    let mut to = vec![0; 300_000];
    let calls = calls_during(|| {
        for bytes in [1, 64, 1024, 4096, 300_000] {
            agent.read(0, 5, &mut to[..bytes]).unwrap();
            agent.write(0, 5, &to[..bytes]).unwrap();
            agent.read(0, 5, &mut reached.as_mut_slice()[..bytes]).unwrap();
            agent.write(0, 5, &reached.as_slice()[..bytes]).unwrap();
            let ticket = agent.submit(buffer.take().unwrap(), &[segment(1, 4000, 2), segment(9, 90, 4002)]).unwrap();
            buffer = Some(agent.wait(ticket).unwrap());
        }
    });
    assert_eq!(calls, 0);
}

/// Host buffers, and registered memory, are what the kernel itself reads and writes; any other memory goes by the bounce.
#[test]
fn memory_that_the_kernel_reaches_is_found_by_its_address() {
    let session = session();
    let (memory, data) = filled(&session, 300_000);
    let mut agent = PushAgent::start(&session, [&memory], stand_in().dedicated()).unwrap();
    let mut buffer = agent.host_buffer(200_000).unwrap();
    let mut own = vec![0; 200_000];
    let mut other = vec![0; 200_000];
    let middle = &mut own[1003..180_000];
    // SAFETY: the vector outlives the agent, and is not touched after an error.
    unsafe { agent.register_host(middle.as_mut_ptr(), middle.len()) }.unwrap();
    assert!(agent.reaches(&own[1003..180_000]) && agent.reaches(&own[5000..5001]) && agent.reaches(buffer.as_slice()));
    assert!(!agent.reaches(&own[1002..1004]) && !agent.reaches(&own[179_999..180_001]) && !agent.reaches(&other));
    let mut dice = Dice(11);
    for bytes in (0..2000).step_by(7).chain([1024, 1025, 4096, 65_536, 131_073, 170_000]) {
        let (offset, at) = (dice.below(300), 1003 + dice.below(300));
        let expected = &data[offset..offset + bytes];
        for host in [&mut own[..], buffer.as_mut_slice(), &mut other[..]] {
            host.fill(0x5a);
            agent.read(0, offset, &mut host[at..at + bytes]).unwrap();
            assert!(host[at..at + bytes] == *expected, "{bytes} bytes at {offset} to {at}");
            assert!(host[..at].iter().chain(&host[at + bytes..]).all(|&byte| byte == 0x5a));
        }
        // Half in, half out.
        let (before, after) = (1003 - 1003.min(bytes / 2), 1003 + bytes.div_ceil(2));
        agent.read(0, offset, &mut own[before..after]).unwrap();
        assert!(own[before..after] == data[offset..][..after - before]);
    }
    for bytes in [0, 1, 64, 1000, 5000, 40_000, 170_000] {
        let (offset, at) = (dice.below(300), 1003 + dice.below(300));
        for (n, host) in [&mut own[..], buffer.as_mut_slice(), &mut other[..]].into_iter().enumerate() {
            let written = pattern(bytes + n, bytes);
            host[at..at + bytes].copy_from_slice(&written);
            memory.upload(0, &vec![0x5a; 200_000]).unwrap();
            agent.write(0, offset, &host[at..at + bytes]).unwrap();
            let mut seen = vec![0; 200_000];
            memory.download(0, &mut seen).unwrap();
            assert!(seen[offset..offset + bytes] == written, "{bytes} bytes at {at} to {offset}");
            assert!(seen[..offset].iter().chain(&seen[offset + bytes..]).all(|&byte| byte == 0x5a));
        }
    }
    agent.unregister_host(own[1003..].as_ptr()).unwrap();
    assert!(!agent.reaches(&own[1003..1004]));
    agent.read(0, 9, &mut own).unwrap();
    memory.download(9, &mut other).unwrap();
    assert!(own == other);
}

#[test]
fn what_cannot_be_registered_is_refused() {
    let session = session();
    let (memory, _) = filled(&session, 4096);
    let mut agent = PushAgent::start(&session, [&memory], stand_in()).unwrap();
    let mut buffer = agent.host_buffer(1000).unwrap();
    let mut own = vec![0; 4096];
    let start = own.as_mut_ptr();
    // SAFETY: of none of it a request is made.
    let mut register = |at: *mut u8, bytes| unsafe { agent.register_host(at, bytes) };
    register(start.wrapping_add(1000), 1000).unwrap();
    let places = [
        (std::ptr::null_mut(), 10, "at least 1 byte"),
        (start, 0, "at least 1 byte"),
        (start, 1001, "register memory once"),
        (start.wrapping_add(1999), 1, "register memory once"),
        (buffer.as_mut_slice().as_mut_ptr(), 10, "a host buffer is reached without that"),
        (start, usize::MAX, "past the end of all memory"),
    ];
    for (at, bytes, says) in places {
        let error = register(at, bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
    register(start, 1000).unwrap();
    for at in [start.wrapping_add(1), start.wrapping_add(2000), buffer.as_mut_slice().as_mut_ptr()] {
        assert_eq!(agent.unregister_host(at).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    agent.unregister_host(start).unwrap();
    in_child(|| {
        // SAFETY: it is refused.
        let refused = unsafe { agent.register_host(start, 1000) };
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::WrongProcess);
        assert_eq!(agent.unregister_host(start).unwrap_err().kind(), ErrorKind::WrongProcess);
    });
}

/// After an error the kernel is not at work on the memory, or it is given up.
#[test]
fn a_failed_read_leaves_no_memory_that_may_change() {
    let session = session();
    let (memory, _) = filled(&session, 1 << 16);
    for (fault, remains) in [(Fault::Dies, true), (Fault::Hangs, false)] {
        let options = stand_in().deadline(Duration::from_secs(2)).stand_in_fault(2, fault);
        let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
        let mut buffer = agent.host_buffer(1 << 16).unwrap();
        agent.read(0, 0, buffer.as_mut_slice()).unwrap();
        agent.write(0, 0, buffer.as_slice()).unwrap();
        let error = agent.read(0, 0, buffer.as_mut_slice()).unwrap_err();
        assert_eq!(buffer.is_empty(), !remains, "{fault:?}");
        let started = Instant::now();
        let again = agent.write(0, 0, &[0; 5000]).unwrap_err();
        assert_eq!(again.kind(), error.kind(), "for good");
        if remains {
            assert_eq!(agent.read(0, 0, buffer.as_mut_slice()).unwrap_err().kind(), error.kind());
            assert_eq!(buffer.len(), 1 << 16);
        }
        assert!(started.elapsed() < Duration::from_secs(1), "nothing is waited for any more");
    }
}

/// What a kernel has yet to look at when the deadline passes, it never does.
#[test]
fn what_was_asked_for_is_taken_back() {
    let session = session();
    let (memory, data) = filled(&session, 1 << 16);
    let fault = Fault::Sleeps(Duration::from_secs(3));
    let options = stand_in().deadline(Duration::from_secs(2)).stand_in_fault(1, fault);
    let mut agent = PushAgent::start(&session, [&memory], options).unwrap();
    let mut buffer = agent.host_buffer(1 << 16).unwrap();
    agent.read(0, 0, buffer.as_mut_slice()).unwrap();
    assert!(buffer.as_slice() == data);
    buffer.as_mut_slice().fill(0x5a);
    let error = agent.read(0, 0, buffer.as_mut_slice()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(buffer.len(), 1 << 16, "the kernel woke up, found that it should stop, and left");
    assert!(buffer.as_slice().iter().all(|&byte| byte == 0x5a));
    agent.stop().unwrap();
}

#[test]
fn agents_move_between_threads() {
    fn is_send<T: Send>(_: &T) {}
    let session = session();
    let (memory, data) = filled(&session, 4096);
    let mut agent = PushAgent::start(&session, [&memory], stand_in()).unwrap();
    is_send(&agent);
    for turn in 0..4 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut to = [0; 2000];
                agent.read(0, turn, &mut to).unwrap();
                assert!(to == data[turn..turn + 2000]);
            });
        });
    }
}
