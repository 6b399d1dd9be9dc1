//! Page-locked memory that the kernel reaches itself: host buffers, and what a program registers.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gdrcopy::agent::{AgentOptions, PushAgent};
use gdrcopy::auto::{AutoCopier, AutoMethod, AutoOptions};
use gdrcopy::policy::{CopyDirection, CopyMethod};
use gdrcopy::{DeviceBuffer, ErrorKind};

use crate::alone;
use crate::support::{check, pattern};

const BYTES: usize = 1 << 20;

/// What `cuMemHostAlloc` gave.
struct Allocated(*mut u8);

impl Allocated {
    fn new(bytes: usize, flags: u32) -> Self {
        let mut pointer = std::ptr::null_mut();
        unsafe { check(sys::cuMemHostAlloc(&mut pointer, bytes, flags)) };
        Self(pointer.cast())
    }

    fn as_mut(&mut self) -> &mut [u8] {
        unsafe { std::slice::from_raw_parts_mut(self.0, BYTES) }
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        let _ = unsafe { sys::cuMemFreeHost(self.0.cast()) };
    }
}

/// A program's own memory, page-locked by `cuMemHostRegister`. It begins on no page's boundary.
struct Locked(Vec<u8>);

impl Locked {
    const SKIP: usize = 1001;

    fn new() -> Self {
        let mut own = vec![0; BYTES + Self::SKIP];
        let start = own[Self::SKIP..].as_mut_ptr().cast::<c_void>();
        unsafe { check(sys::cuMemHostRegister_v2(start, BYTES, 0)) };
        Self(own)
    }

    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0[Self::SKIP..]
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = unsafe { sys::cuMemHostUnregister(self.as_mut().as_mut_ptr().cast()) };
    }
}

/// Reads and writes at odd places and of odd sizes, up to both ends.
fn copies_right(agent: &mut PushAgent<'_>, memory: &DeviceBuffer, data: &[u8], host: &mut [u8], what: &str) {
    let small = (1..300).map(|bytes| (bytes, bytes * 5 % 64, bytes * 11 % 64));
    let large = [1024, 1025, 4096, 65_535, 65_536, 131_073, 1 << 19];
    let large =
        large.into_iter().flat_map(|bytes| [(0, 0), (16, 48), (3, 0), (0, 5), (9, 14)].map(|(o, a)| (bytes, o, a)));
    let ends = [(BYTES, 0, 0), (1, BYTES - 1, BYTES - 1), (5000, 7, BYTES - 5000), (5000, BYTES - 5000, 0)];
    for (bytes, offset, at) in small.chain(large).chain(ends) {
        memory.upload(0, data).unwrap();
        host.fill(0x5a);
        assert!(agent.reaches(&host[at..at + bytes]), "{what}");
        agent.read(0, offset, &mut host[at..at + bytes]).unwrap();
        assert!(host[at..at + bytes] == data[offset..offset + bytes], "{what}: {bytes} bytes at {offset} to {at}");
        let around = host[..at].iter().chain(&host[at + bytes..]);
        assert!(around.copied().all(|byte| byte == 0x5a), "{what}: {bytes} bytes at {offset} to {at}");

        host[at..at + bytes].copy_from_slice(&pattern(bytes as u64, bytes));
        agent.write(0, offset, &host[at..at + bytes]).unwrap();
        let mut seen = vec![0; BYTES];
        memory.download(0, &mut seen).unwrap();
        assert!(seen[offset..offset + bytes] == host[at..at + bytes], "{what}: {bytes} bytes at {at} to {offset}");
        assert!(seen[..offset] == data[..offset] && seen[offset + bytes..] == data[offset + bytes..], "{what}");
    }
}

#[test]
fn the_kernel_reaches_what_is_page_locked() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(BYTES).unwrap();
    memory.make_current().unwrap();
    let data = pattern(61, BYTES);
    let mut plain = Allocated::new(BYTES, 0);
    let mut portable = Allocated::new(BYTES, sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP);
    let mut locked = Locked::new();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    let mut buffer = agent.host_buffer(BYTES).unwrap();
    for host in [plain.as_mut(), portable.as_mut(), locked.as_mut()] {
        assert!(!agent.reaches(host));
        unsafe { agent.register_host(host.as_mut_ptr(), host.len()) }.unwrap();
    }
    copies_right(&mut agent, &memory, &data, plain.as_mut(), "cuMemHostAlloc");
    copies_right(&mut agent, &memory, &data, portable.as_mut(), "cuMemHostAlloc, portable");
    copies_right(&mut agent, &memory, &data, locked.as_mut(), "cuMemHostRegister");
    copies_right(&mut agent, &memory, &data, buffer.as_mut_slice(), "a host buffer");
    // A part of an allocation.
    agent.unregister_host(plain.0).unwrap();
    let part = &mut plain.as_mut()[12_345..700_000];
    unsafe { agent.register_host(part.as_mut_ptr(), part.len()) }.unwrap();
    memory.upload(0, &data).unwrap();
    agent.read(0, 1, &mut part[3..600_000]).unwrap();
    assert!(part[3..600_000] == data[1..599_998]);
    agent.stop().unwrap();
}

#[test]
fn what_is_not_page_locked_is_refused() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(BYTES).unwrap();
    memory.make_current().unwrap();
    let mut own = vec![0_u8; BYTES];
    let page = own.as_ptr().align_offset(4096);
    let (first, second) = (own[page..].as_mut_ptr(), own[page + 8192..].as_mut_ptr());
    unsafe { check(sys::cuMemHostRegister_v2(first.cast(), 4096, 0)) };
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    let mut refused = |at: *mut u8, bytes, says: &str| {
        let error = unsafe { agent.register_host(at, bytes) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(says) && error.to_string().contains("cuMemHostRegister"), "{error}");
        println!("{error}");
    };
    refused(second, 4096, "are not page-locked by CUDA");
    refused(first, 3 * 4096, "only the first part of");
    refused(std::ptr::with_exposed_provenance_mut(memory.addr().raw() as usize), 4096, "are not page-locked by CUDA");
    let mut agent = agent;
    let mut to = vec![0; 5000];
    agent.read(0, 0, &mut to).unwrap();
    agent.stop().unwrap();
    unsafe { check(sys::cuMemHostUnregister(first.cast())) };
}

/// What the CPU wrote through BAR1 before is what arrives, and what the CPU has just put into registered memory is fetched.
#[test]
fn neither_way_is_stale() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(8192).unwrap();
    memory.make_current().unwrap();
    let mapping = alone.session.pin(&memory).unwrap().map().unwrap();
    let mut locked = Locked::new();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    let host = locked.as_mut();
    unsafe { agent.register_host(host.as_mut_ptr(), host.len()) }.unwrap();
    let rounds = crate::common::env::from_env("GDRCOPY_AGENT_ROUNDS", 100_000) / 10;
    let mut data = vec![0_u8; 4096];
    for round in 1..=rounds {
        for (n, word) in data.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&((round << 16 | n) as u64).to_le_bytes());
        }
        mapping.write_posted(round % 64, &data).unwrap();
        let at = round % 100;
        agent.read(0, round % 64, &mut host[at..at + 4096]).unwrap();
        assert!(host[at..at + 4096] == data, "round {round}");
        host[at..at + 4096].iter_mut().for_each(|byte| *byte = !*byte);
        agent.write(0, 4096 - round % 64, &host[at..at + 4096]).unwrap();
        let mut seen = [0; 256];
        mapping.read(4096 - round % 64 + round % 3840, &mut seen).unwrap();
        assert!(seen == host[at + round % 3840..][..256], "round {round}");
    }
    println!("{rounds} rounds, none stale");
}

/// With page-locked memory the automatic copier has the agent's own figure, and at 64 KiB nothing reads quicker.
#[test]
fn an_automatic_copier_uses_it() {
    let Some(alone) = alone() else { return };
    let buffer = alone.session.alloc(BYTES).unwrap();
    buffer.make_current().unwrap();
    let data = pattern(62, BYTES);
    buffer.upload(0, &data).unwrap();
    let mut own = Allocated::new(BYTES, 0);
    let options = AutoOptions::default().agent(AgentOptions::default()).page_locked();
    let begun = Instant::now();
    let mut copier = AutoCopier::new(&alone.session, &buffer, options).unwrap();
    println!("AutoCopier::new took {:?}", begun.elapsed());
    unsafe { copier.register_host(own.0, BYTES) }.unwrap();
    let mut given = copier.host_buffer(BYTES).unwrap();
    for bytes in [4096, 16 << 10, 64 << 10, 256 << 10, BYTES] {
        for host in [&mut own.as_mut()[..bytes], &mut given.as_mut_slice()[..bytes]] {
            host.fill(0);
            copier.read(0, host).unwrap();
            assert!(*host == data[..bytes], "{bytes} bytes");
            copier.write(0, host).unwrap();
            assert!(copier.explain_with(CopyDirection::DeviceToHost, host).is_reached());
        }
        println!("{}", copier.explain(CopyDirection::DeviceToHost, bytes));
        println!("{}", copier.explain(CopyDirection::HostToDevice, bytes));
    }
    let choice = copier.explain(CopyDirection::DeviceToHost, 64 << 10);
    assert_eq!((choice.method(), choice.best()), (AutoMethod::Agent, CopyMethod::AgentPinned), "{choice}");
    let mut times: Vec<Duration> = (0..2000)
        .map(|_| {
            let one = Instant::now();
            copier.read(0, &mut own.as_mut()[..64 << 10]).unwrap();
            one.elapsed()
        })
        .collect();
    times.sort();
    println!("64 KiB into registered memory: p50 {:?}, p99 {:?}", times[1000], times[1980]);
}
