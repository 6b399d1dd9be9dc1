//! What the agent fetches, with bulk copies and without.

use cudarc::driver::sys;
use gdrcopy::agent::{AgentOptions, PushAgent};

use crate::alone;
use crate::common::env::from_env;
use crate::common::pulls::{self, CHUNK, STAGES, segment};
use crate::support::check;

/// Threads of the block and stages asked for; none of these leaves all fetching to the threads.
const KINDS: [(u32, u32); 6] = [(256, 10), (256, 0), (512, 10), (1024, 10), (256, 5), (256, 14)];

/// Such an agent has its stages from the second launch on, a dedicated one from the first.
fn options((threads, stages): (u32, u32)) -> AgentOptions {
    AgentOptions::default().threads(threads).bulk_stages(stages)
}

/// Or all else here would test the threads' own loads.
#[test]
fn bulk_copies_are_there_where_the_gpu_has_them() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(64 << 10).unwrap();
    let mut major = 0;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    unsafe { check(sys::cuDeviceGetAttribute(&mut major, attribute, 0)) };
    println!("compute capability {major}.x");
    let bytes = |stages: usize| if major < 9 || stages == 0 { 0 } else { stages * CHUNK + 128 };
    for (threads, stages) in KINDS {
        let options = options((threads, stages)).dedicated();
        let agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        let given = agent.bulk_bytes() as usize;
        // GPUs of the 12.x line have room for fewer.
        let fits = if major < 12 { given == bytes(stages as usize) } else { given <= bytes(stages as usize) };
        assert!(fits && (given > 0) == (major >= 9 && stages > 0), "{given} bytes for {stages} stages");
    }
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    let mut buffer = agent.host_buffer(64 << 10).unwrap();
    for (length, takes_any) in [(32 << 10, false), (64 << 10, major >= 9), (16, major >= 9)] {
        agent.write_from(&mut buffer, &[segment(0, length, 0)]).unwrap();
        assert_eq!(agent.bulk_bytes() > 0, takes_any, "after {length} bytes");
    }
}

#[test]
fn every_length_from_and_to_every_place() {
    let Some(alone) = alone() else { return };
    let all: Vec<_> = (0..=17).flat_map(|at| (0..=17).map(move |offset| (at, offset))).collect();
    let some: Vec<_> = all.iter().copied().filter(|(at, offset)| (at + 5 * offset) % 23 == 0 || at == offset).collect();
    let few = [(0, 0), (16, 0), (0, 16), (5, 5), (1, 17), (15, 15), (0, 1)];
    for kind in KINDS {
        // The default in full, the others thinned.
        let places = if kind == KINDS[0] { &all } else { &some };
        let lengths = pulls::lengths(256, STAGES);
        pulls::every_place(&alone.session, options(kind).dedicated(), &lengths, places);
        let lengths = pulls::lengths(kind.0 as usize, kind.1.max(5) as usize);
        pulls::every_place(&alone.session, options(kind).dedicated(), &lengths, &few);
        let long = [64 << 10, 128 << 10, 256 << 10, (1 << 20) - 1, 1 << 20, 2_000_003, 3 << 20, (4 << 20) + 9];
        pulls::every_place(&alone.session, options(kind), &long, &few);
        println!("{} threads, {} stages: all bytes are right", kind.0, kind.1);
    }
}

#[test]
fn nothing_fetched_in_bulk_is_stale() {
    let Some(alone) = alone() else { return };
    let rounds = from_env("GDRCOPY_AGENT_ROUNDS", 100_000) / 10;
    for kind in KINDS {
        let rounds = if kind == KINDS[0] { rounds } else { rounds / 10 };
        // In stages that are used once, and in turn.
        for bytes in [96 << 10, 256 << 10] {
            pulls::none_stale(&alone.session, options(kind), bytes, rounds);
            pulls::none_stale(&alone.session, options(kind).dedicated(), bytes, rounds / 10);
            pulls::in_flight(&alone.session, options(kind), bytes, rounds / 2);
            pulls::none_stale(&alone.session, options(kind), bytes, rounds / 10);
            pulls::in_flight(&alone.session, options(kind).dedicated(), bytes, rounds / 10);
        }
        println!("{} threads, {} stages: {rounds} rounds, none stale", kind.0, kind.1);
    }
}

#[test]
fn the_later_of_two_overlapping_pieces_stays() {
    let Some(alone) = alone() else { return };
    for kind in KINDS {
        pulls::overlapping(&alone.session, options(kind).dedicated(), 1000);
        pulls::overlapping(&alone.session, options(kind), 200);
    }
}

#[test]
fn a_write_that_meets_a_leaving_kernel_is_served() {
    let Some(alone) = alone() else { return };
    for kind in [(1024, 16), (256, 16), (256, 0)] {
        let launches = pulls::meeting_a_leaving_kernel(&alone.session, options(kind), 5000);
        println!("{} threads, {} stages: 5000 writes, {launches} launches", kind.0, kind.1);
        assert!(launches > 100);
        pulls::meeting_a_leaving_kernel(&alone.session, options(kind), 1000);
    }
}
