//! What a kernel that stays can hold up, and what can befall it.

use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gdrcopy::ErrorKind;
use gdrcopy::agent::{AgentOptions, PushAgent};
use gdrcopy::cuda::{Module, PinnedHost, Priority};

use crate::alone;
use crate::common::env::from_env;
use crate::common::fork;
use crate::resources::InUse;
use crate::support::{self, check, pattern};

const LOAD: &str = include_str!("../../src/ptx/load.ptx");

/// The longest that a call may take beside an agent with default settings. Most of it is room for a busy host.
pub(crate) const BOUND: Duration = Duration::from_millis(250);

/// A call that waits for kernels, and its name.
pub(crate) type Hazard = (&'static str, Box<dyn FnMut() + Send>);

pub(crate) fn hazards() -> Vec<Hazard> {
    vec![
        ("cuCtxSynchronize", Box::new(|| unsafe { check(sys::cuCtxSynchronize()) })),
        (
            "cuMemAlloc, cuMemFree",
            Box::new(|| {
                let mut addr = 0;
                unsafe { check(sys::cuMemAlloc_v2(&mut addr, 4 << 20)) };
                unsafe { check(sys::cuMemFree_v2(addr)) };
            }),
        ),
        (
            "cuMemHostAlloc, cuMemFreeHost",
            Box::new(|| {
                let mut pointer = std::ptr::null_mut();
                unsafe { check(sys::cuMemHostAlloc(&mut pointer, 1 << 20, 0)) };
                unsafe { check(sys::cuMemFreeHost(pointer)) };
            }),
        ),
        (
            "cuMemHostRegister, cuMemHostUnregister",
            Box::new(|| {
                let mut pages = vec![0_u8; 3 << 12];
                let start = pages.as_mut_ptr().wrapping_add(pages.as_ptr().align_offset(4096)).cast::<c_void>();
                unsafe { check(sys::cuMemHostRegister_v2(start, 4096, 0)) };
                unsafe { check(sys::cuMemHostUnregister(start)) };
            }),
        ),
        (
            "memset and synchronise, default stream",
            Box::new(|| {
                let mut addr = 0;
                unsafe { check(sys::cuMemAlloc_v2(&mut addr, 4096)) };
                unsafe { check(sys::cuMemsetD32_v2(addr, 7, 1024)) };
                unsafe { check(sys::cuStreamSynchronize(std::ptr::null_mut())) };
                unsafe { check(sys::cuMemFree_v2(addr)) };
            }),
        ),
        (
            "first launch of a new kernel, default stream",
            Box::new(|| {
                let flag = PinnedHost::new(0, 4096).unwrap();
                unsafe { flag.as_ptr().cast::<u32>().write_volatile(1) };
                support::kernel(c"spin").launch(std::ptr::null_mut(), flag.as_ptr() as u64);
                unsafe { check(sys::cuStreamSynchronize(std::ptr::null_mut())) };
            }),
        ),
    ]
}

/// Each call ends soon, beside an agent that has just served a request and then idles.
#[test]
fn calls_that_wait_for_an_idle_agent_end() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let data = pattern(4, 4096);
    memory.upload(0, &data).unwrap();
    memory.make_current().unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    for (name, mut call) in hazards() {
        call();
        let mut longest = Duration::ZERO;
        for _ in 0..10 {
            let mut to = [0; 64];
            agent.read(0, 1, &mut to).unwrap();
            assert!(to == data[1..65]);
            let started = Instant::now();
            call();
            longest = longest.max(started.elapsed());
        }
        println!("{name}: at most {longest:?} beside an idle agent");
        assert!(longest < BOUND, "{name}");
    }
}

/// Each call ends, beside an agent that another thread keeps busy all the time.
#[test]
fn calls_that_wait_for_a_busy_agent_end() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let data = pattern(5, 4096);
    memory.upload(0, &data).unwrap();
    memory.make_current().unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut reads, mut longest) = (0_u64, Duration::ZERO);
            while !over.load(Ordering::Relaxed) {
                let mut to = [0; 256];
                let started = Instant::now();
                agent.read(0, 3, &mut to).unwrap();
                longest = longest.max(started.elapsed());
                assert!(to == data[3..259]);
                reads += 1;
            }
            println!("{reads} reads meanwhile, the longest {longest:?}, {} launches", agent.launches());
        });
        let mut slow = Vec::new();
        for (name, mut call) in hazards() {
            let mut longest = Duration::ZERO;
            for _ in 0..10 {
                let started = Instant::now();
                call();
                longest = longest.max(started.elapsed());
            }
            println!("{name}: at most {longest:?} beside a busy agent");
            if longest > BOUND {
                slow.push(name);
            }
        }
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        assert!(slow.is_empty(), "{slow:?}");
    });
}

#[test]
fn starting_and_stopping() {
    let Some(alone) = alone() else { return };
    let cycles = from_env("GDRCOPY_AGENT_CYCLES", 100_usize);
    // A cycle compiles and loads the kernel, which takes some tens of milliseconds.
    unsafe { libc::alarm(crate::PATIENCE + u32::try_from(cycles).unwrap() / 5) };
    let memory = alone.session.alloc(4096).unwrap();
    let data = pattern(6, 4096);
    memory.upload(0, &data).unwrap();
    memory.make_current().unwrap();
    let mut longest = Duration::ZERO;
    let mut cycle = |cycle: usize| {
        let options = AgentOptions::default();
        let options = if cycle.is_multiple_of(2) { options.dedicated() } else { options };
        let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        for bytes in [0, 100, 4000][..cycle % 4 % 3 + 1].iter().copied() {
            let mut to = vec![0; bytes];
            agent.read(0, 5, &mut to).unwrap();
            assert!(to == data[5..5 + bytes], "cycle {cycle}");
        }
        let stopping = Instant::now();
        // Dropping ends it as well.
        if cycle.is_multiple_of(3) {
            drop(agent)
        } else {
            agent.stop().unwrap()
        }
        longest = longest.max(stopping.elapsed());
    };
    // What is allocated once, and kept, is allocated here.
    (0..20).for_each(&mut cycle);
    let (before, started) = (InUse::now(), Instant::now());
    (0..cycles).for_each(&mut cycle);
    InUse::now().assert_no_more_than(&before);
    let each = started.elapsed() / u32::try_from(cycles.max(1)).unwrap();
    println!("{cycles} cycles, {each:?} each, the longest stop {longest:?}");
}

/// Every SM is full of blocks that do not end: the agent says so, and works again when they have.
#[test]
fn a_full_gpu_is_an_error_and_no_hang() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(64 << 20).unwrap();
    let data = pattern(7, 4096);
    memory.upload(0, &data).unwrap();
    let module = Module::load(0, LOAD).unwrap();
    let kernel = module.kernel(c"load").unwrap();
    let stream = module.stream(Priority::Low).unwrap();
    let words = PinnedHost::new(0, 4096).unwrap();
    let start_load = || {
        unsafe { words.as_ptr().cast::<u64>().write_volatile(0) };
        unsafe { words.as_ptr().add(64).cast::<u64>().write_volatile(0) };
        let at = words.gpu_addr().unwrap().raw();
        let argument = [memory.addr().raw(), 64 << 20, at, at + 64, 20_000_000_000];
        let blocks = kernel.resident_blocks(256).unwrap();
        unsafe { kernel.launch(&stream, blocks, 256, &argument) }.unwrap();
        let started = Instant::now();
        while unsafe { words.as_ptr().add(64).cast::<u64>().read_volatile() } == 0 {
            assert!(started.elapsed() < Duration::from_secs(5), "the load starts");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let end_load = || {
        unsafe { words.as_ptr().cast::<u32>().write_volatile(1) };
        stream.finish(Duration::from_secs(5)).unwrap();
    };

    // One that was there first is not disturbed.
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
    let mut to = [0; 4096];
    agent.read(0, 0, &mut to).unwrap();
    start_load();
    let started = Instant::now();
    for _ in 0..1000 {
        agent.read(0, 0, &mut to).unwrap();
        assert!(to == *data);
    }
    println!("4096 bytes beside a full GPU: {:?} on average", started.elapsed() / 1000);
    end_load();
    agent.stop().unwrap();

    // One that has to be launched again finds no room.
    let limit = Duration::from_millis(300);
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().deadline(limit)).unwrap();
    agent.read(0, 0, &mut to).unwrap();
    while agent.is_resident() {}
    start_load();
    let started = Instant::now();
    let outcome = agent.read(0, 0, &mut to);
    println!("a launch on a full GPU: {outcome:?} after {:?}", started.elapsed());
    assert!(started.elapsed() < 10 * limit);
    end_load();
    match outcome {
        Ok(()) => assert!(to == *data, "there was room"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            assert!(error.to_string().contains("did not start within 300 ms"), "{error}");
        }
    }
    agent.stop().unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    agent.read(0, 0, &mut to).unwrap();
    assert!(to == *data);
}

/// A process may end, or be killed, with an agent that stays.
#[test]
fn a_process_may_end_with_an_agent_that_stays() {
    if alone().is_none() {
        return;
    }
    for (how, signal) in [("return", None), ("exit", None), ("leak", None), ("kill", Some(libc::SIGKILL))] {
        let started = Instant::now();
        let output = support::alone("hazards::with_an_agent_that_stays", &[("GDRCOPY_TEST_END", how)]);
        match signal {
            None => support::assert_success(&output),
            Some(_) => assert_eq!(output.status.signal(), signal, "{}", String::from_utf8_lossy(&output.stderr)),
        }
        println!("{how}: the process ended after {:?}", started.elapsed());
        assert!(started.elapsed() < Duration::from_secs(30));
    }
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap().read(0, 0, &mut [0; 8]).unwrap();
}

#[test]
fn with_an_agent_that_stays() {
    let Ok(how) = std::env::var("GDRCOPY_TEST_END") else { return };
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
    agent.read(0, 0, &mut [0; 8]).unwrap();
    match how.as_str() {
        "exit" => std::process::exit(0),
        "kill" => unsafe {
            libc::raise(libc::SIGKILL);
        },
        "leak" => {
            std::mem::forget(agent);
            std::mem::forget(memory);
            std::mem::forget(alone);
        }
        _ => {}
    }
}

#[test]
fn a_forked_child_is_told_and_harms_nothing() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let data = pattern(8, 4096);
    memory.upload(0, &data).unwrap();
    let mut kept = Some(PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap());
    fork::in_child(|| {
        let mut agent = kept.take().unwrap();
        assert_eq!(agent.read(0, 0, &mut [0; 8]).unwrap_err().kind(), ErrorKind::WrongProcess);
        drop(agent);
    });
    let mut to = [0; 2000];
    kept.as_mut().unwrap().read(0, 7, &mut to).unwrap();
    assert!(to == data[7..2007]);
}

/// Two processes with an agent each take turns on the GPU.
#[test]
fn two_processes_share_a_gpu() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let data = pattern(10, 4096);
    memory.upload(0, &data).unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut reads, mut longest) = (0_u64, Duration::ZERO);
            while !over.load(Ordering::Relaxed) {
                let mut to = [0; 300];
                let started = Instant::now();
                agent.read(0, 9, &mut to).unwrap();
                longest = longest.max(started.elapsed());
                assert!(to == data[9..309]);
                reads += 1;
            }
            println!("first process: {reads} reads, the longest {longest:?}");
        });
        let output = support::alone("hazards::beside_another_process", &[("GDRCOPY_TEST_BESIDE", "1")]);
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        support::assert_success(&output);
        print!("{}", String::from_utf8_lossy(&output.stdout));
    });
}

#[test]
fn beside_another_process() {
    if std::env::var("GDRCOPY_TEST_BESIDE").is_err() {
        return;
    }
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let data = pattern(11, 4096);
    memory.upload(0, &data).unwrap();
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
    let started = Instant::now();
    let (mut reads, mut longest) = (0_u64, Duration::ZERO);
    while started.elapsed() < Duration::from_millis(500) {
        let mut to = [0; 2000];
        let one = Instant::now();
        agent.read(0, 13, &mut to).unwrap();
        longest = longest.max(one.elapsed());
        assert!(to == data[13..2013]);
        reads += 1;
    }
    println!("second process: {reads} reads, the longest {longest:?}, {} launches", agent.launches());
}
