//! The agent beside what other threads and other processes ask of CUDA.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gdrcopy::agent::{AgentOptions, PushAgent};
use gdrcopy::cuda::PinnedHost;
use gdrcopy::{DeviceBuffer, ErrorKind, Feature};

use crate::hazards::{BOUND, Hazard, hazards};
use crate::support::{self, check, pattern};
use crate::{Alone, alone};

/// Device memory with known bytes, in a context that is current.
fn filled(alone: &Alone, seed: u64) -> (DeviceBuffer, Vec<u8>) {
    let memory = alone.session.alloc(4096).unwrap();
    let data = pattern(seed, 4096);
    memory.upload(0, &data).unwrap();
    memory.make_current().unwrap();
    (memory, data)
}

/// Reads until told otherwise and compares; how often, and the sorted times.
fn read_until(over: &AtomicBool, agent: &mut PushAgent<'_>, data: &[u8]) -> Vec<Duration> {
    let mut times = Vec::new();
    let mut to = [0; 1000];
    while !over.load(Ordering::Relaxed) {
        let started = Instant::now();
        agent.read(0, 13, &mut to).unwrap();
        times.push(started.elapsed());
        assert!(to == data[13..1013]);
    }
    times.sort();
    times
}

fn shown(times: &[Duration]) -> String {
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let [p50, p99, p999, longest] = [0.5, 0.99, 0.999, 1.0].map(at);
    format!("{} reads, p50 {p50:?}, p99 {p99:?}, p99.9 {p999:?}, longest {longest:?}", times.len())
}

/// A call, and its name.
type Call<'a> = (&'static str, Box<dyn FnMut() + 'a>);

// --- what does not wait --------------------------------------------------------------------------------------------------

fn with_stream(work: impl FnOnce(sys::CUstream)) {
    let mut stream = std::ptr::null_mut();
    unsafe { check(sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)) };
    work(stream);
    unsafe { check(sys::cuStreamDestroy_v2(stream)) };
}

fn virtual_memory() {
    const BYTES: usize = 2 << 20;
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    let access = sys::CUmemAccessDesc {
        location: prop.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let (mut handle, mut addr) = (0, 0);
    unsafe {
        check(sys::cuMemCreate(&mut handle, BYTES, &prop, 0));
        check(sys::cuMemAddressReserve(&mut addr, BYTES, 0, 0, 0));
        check(sys::cuMemMap(addr, BYTES, 0, handle, 0));
        check(sys::cuMemSetAccess(addr, BYTES, &access, 1));
        check(sys::cuMemsetD8_v2(addr, 3, BYTES));
        check(sys::cuStreamSynchronize(std::ptr::null_mut()));
        check(sys::cuMemUnmap(addr, BYTES));
        check(sys::cuMemRelease(handle));
        check(sys::cuMemAddressFree(addr, BYTES));
    }
}

/// A dedicated agent holds none of these up: copies, the default stream and all streams but its own, events, allocation.
/// What they allocate is freed by those that wait, when the agent is gone.
#[test]
fn calls_that_do_not_wait_pass_a_dedicated_agent() {
    let Some(alone) = alone() else { return };
    let (memory, data) = filled(&alone, 40);
    let flag = PinnedHost::new(0, 4096).unwrap();
    unsafe { flag.as_ptr().cast::<u32>().write_volatile(1) };
    let spin = support::kernel(c"spin");
    let (addr, at) = (memory.addr().raw() + 2048, flag.as_ptr() as u64);
    let freed_later = std::sync::Mutex::new((Vec::new(), Vec::new()));
    let mut calls: Vec<Call<'_>> = vec![
        (
            "a kernel and a memset on the default stream, synchronised",
            Box::new(|| {
                spin.launch(std::ptr::null_mut(), at);
                unsafe { check(sys::cuMemsetD32Async(addr, 7, 512, std::ptr::null_mut())) };
                unsafe { check(sys::cuStreamSynchronize(std::ptr::null_mut())) };
            }),
        ),
        (
            "a kernel on a stream of its own, synchronised",
            Box::new(|| {
                with_stream(|stream| {
                    spin.launch(stream, at);
                    unsafe { check(sys::cuStreamSynchronize(stream)) };
                });
            }),
        ),
        (
            "an event, synchronised",
            Box::new(|| {
                with_stream(|stream| {
                    let mut event = std::ptr::null_mut();
                    unsafe { check(sys::cuEventCreate(&mut event, 0)) };
                    unsafe { check(sys::cuEventRecord(event, stream)) };
                    unsafe { check(sys::cuEventSynchronize(event)) };
                    unsafe { check(sys::cuEventDestroy_v2(event)) };
                });
            }),
        ),
        (
            "cuMemcpy, both ways",
            Box::new(|| {
                let mut bytes = [9_u8; 1024];
                unsafe { check(sys::cuMemcpyHtoD_v2(addr, bytes.as_ptr().cast(), bytes.len())) };
                bytes.fill(0);
                unsafe { check(sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), addr, bytes.len())) };
                assert_eq!(bytes, [9; 1024]);
            }),
        ),
        (
            "cuMemAllocAsync, cuMemFreeAsync",
            Box::new(|| {
                with_stream(|stream| {
                    let mut addr = 0;
                    unsafe { check(sys::cuMemAllocAsync(&mut addr, 1 << 20, stream)) };
                    unsafe { check(sys::cuMemFreeAsync(addr, stream)) };
                    unsafe { check(sys::cuStreamSynchronize(stream)) };
                });
            }),
        ),
        (
            "cuMemAlloc, cuIpcGetMemHandle",
            Box::new(|| {
                let mut addr = 0;
                unsafe { check(sys::cuMemAlloc_v2(&mut addr, 4 << 20)) };
                freed_later.lock().unwrap().0.push(addr);
                let mut handle: sys::CUipcMemHandle = unsafe { std::mem::zeroed() };
                unsafe { check(sys::cuIpcGetMemHandle(&mut handle, addr)) };
            }),
        ),
        (
            "cuMemHostAlloc",
            Box::new(|| {
                let mut pointer = std::ptr::null_mut();
                unsafe { check(sys::cuMemHostAlloc(&mut pointer, 1 << 20, 0)) };
                freed_later.lock().unwrap().1.push(pointer);
            }),
        ),
        ("cuMemCreate to cuMemRelease", Box::new(virtual_memory)),
        (
            "Session::pin and map",
            Box::new(|| {
                let mapping = alone.session.pin(&memory).unwrap().map().unwrap();
                mapping.read(0, &mut [0; 64]).unwrap();
            }),
        ),
    ];
    // What is put off until a first time happens here.
    calls.iter_mut().for_each(|(_, call)| call());
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
    let mut to = [0; 1000];
    for (name, call) in &mut calls {
        let mut longest = Duration::ZERO;
        for _ in 0..10 {
            agent.read(0, 13, &mut to).unwrap();
            assert!(to == data[13..1013]);
            let started = Instant::now();
            call();
            longest = longest.max(started.elapsed());
        }
        println!("{name}: at most {longest:?} beside a dedicated agent");
        assert!(longest < BOUND, "{name}");
    }
    assert_eq!(agent.launches(), 1, "it was there all the time");
    agent.stop().unwrap();
    drop(calls);
    let (device, host) = freed_later.into_inner().unwrap();
    device.into_iter().for_each(|addr| unsafe { check(sys::cuMemFree_v2(addr)) });
    host.into_iter().for_each(|pointer| unsafe { check(sys::cuMemFreeHost(pointer)) });
}

// --- what waits ----------------------------------------------------------------------------------------------------------

/// Each call that waits for kernels returns once a dedicated agent is stopped by another thread, and the agent serves until
/// then.
#[test]
fn calls_that_wait_for_a_dedicated_agent_end_with_it() {
    let Some(alone) = alone() else { return };
    let (memory, data) = filled(&alone, 41);
    for (name, mut call) in hazards() {
        call();
        let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
        let mut to = [0; 1000];
        agent.read(0, 13, &mut to).unwrap();
        let returned = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                memory.make_current().unwrap();
                call();
                returned.store(true, Ordering::Release);
            });
            let started = Instant::now();
            let mut reads = 0;
            while started.elapsed() < Duration::from_millis(100) {
                agent.read(0, 13, &mut to).unwrap();
                assert!(to == data[13..1013]);
                reads += 1;
            }
            let waits = !returned.load(Ordering::Acquire);
            let stopping = Instant::now();
            agent.stop().unwrap();
            let stopped = stopping.elapsed();
            while !returned.load(Ordering::Acquire) {
                assert!(stopping.elapsed() < Duration::from_secs(5), "{name} waits on");
                thread::yield_now();
            }
            let word = if waits { "waited for the agent" } else { "did not wait" };
            println!(
                "{name}: {word}; {reads} reads meanwhile; stopped in {stopped:?}, over after {:?}",
                stopping.elapsed()
            );
        });
    }
}

/// Several threads synchronise, free and launch what is new, all at once and all the time, beside an agent that serves
/// another.
#[test]
fn a_program_that_synchronises_and_frees_all_the_time() {
    let Some(alone) = alone() else { return };
    let (memory, data) = filled(&alone, 42);
    // All that these threads do waits for each other, too.
    let options = AgentOptions::default().deadline(Duration::from_secs(20));
    let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
    let over = AtomicBool::new(false);
    let calling = |mut list: Vec<Hazard>| {
        memory.make_current().unwrap();
        let (mut calls, mut longest) = (0_u32, (Duration::ZERO, ""));
        while !over.load(Ordering::Relaxed) {
            for (name, call) in &mut list {
                let started = Instant::now();
                call();
                longest = longest.max((started.elapsed(), *name));
                calls += 1;
            }
        }
        println!("{calls} calls, the longest {longest:?}");
        assert!(calls > 0 && longest.0 < 10 * BOUND, "{longest:?}");
    };
    thread::scope(|scope| {
        let callers: Vec<_> = (0..3)
            .map(|n| {
                let list = hazards().into_iter().skip(n).step_by(3).collect();
                scope.spawn(move || calling(list))
            })
            .collect();
        let timer = scope.spawn(|| {
            thread::sleep(Duration::from_secs(3));
            over.store(true, Ordering::Relaxed);
        });
        let times = read_until(&over, &mut agent, &data);
        println!("beside them: {}, {} launches", shown(&times), agent.launches());
        assert!(times.len() > 100);
        timer.join().unwrap();
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

/// Where modules are loaded at once, a kernel's first launch waits for nobody.
#[test]
fn a_first_launch_passes_a_dedicated_agent_where_modules_are_loaded_eagerly() {
    if alone().is_none() {
        return;
    }
    let output =
        support::alone("beside::first_launch", &[("CUDA_MODULE_LOADING", "EAGER"), ("GDRCOPY_TEST_FIRST", "1")]);
    support::assert_success(&output);
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn first_launch() {
    if std::env::var("GDRCOPY_TEST_FIRST").is_err() {
        return;
    }
    let Some(alone) = alone() else { return };
    let (memory, _) = filled(&alone, 43);
    let flag = PinnedHost::new(0, 4096).unwrap();
    unsafe { flag.as_ptr().cast::<u32>().write_volatile(1) };
    let spin = support::kernel(c"spin");
    let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
    agent.read(0, 0, &mut [0; 8]).unwrap();
    let started = Instant::now();
    spin.launch(std::ptr::null_mut(), flag.as_ptr() as u64);
    unsafe { check(sys::cuStreamSynchronize(std::ptr::null_mut())) };
    println!("a first launch beside a dedicated agent: {:?}", started.elapsed());
    assert!(started.elapsed() < BOUND);
    agent.read(0, 0, &mut [0; 8]).unwrap();
    assert_eq!(agent.launches(), 1);
}

// --- other processes -----------------------------------------------------------------------------------------------------

/// Another process keeps the same GPU busy: both get on, in turns.
#[cfg(feature = "tools")]
#[test]
fn the_gpu_is_shared_with_a_process_that_calculates() {
    let Some(alone) = alone() else { return };
    let (memory, data) = filled(&alone, 44);
    for (kind, options) in [("dedicated", AgentOptions::default().dedicated()), ("default", AgentOptions::default())] {
        let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let output = support::alone("beside::products", &[("GDRCOPY_TEST_PRODUCTS", "1")]);
                over.store(true, Ordering::Relaxed);
                output
            });
            let times = read_until(&over, &mut agent, &data);
            println!("{kind} agent beside a process that calculates: {}", shown(&times));
            assert!(times.len() > 100);
            let output = other.join().unwrap();
            support::assert_success(&output);
            for line in String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.contains("products")) {
                println!("  {line}");
            }
        });
        agent.stop().unwrap();
    }
}

#[cfg(feature = "tools")]
#[test]
fn products() {
    use gdrcopy::tool::load::{Load, Product};
    if std::env::var("GDRCOPY_TEST_PRODUCTS").is_err() {
        return;
    }
    let Some(alone) = alone() else { return };
    let load = Load::new(&alone.session, 0).unwrap();
    let loading = load.start(Duration::from_secs(60)).unwrap();
    let (started, before) = (Instant::now(), loading.product().map_or(0, Product::finished));
    thread::sleep(Duration::from_secs(2));
    let done = loading.product().map_or(0, Product::finished) - before;
    println!("the other process: {done} products in {:?}", started.elapsed());
    assert!(loading.still_runs().unwrap() && done >= 2);
}

// --- MPS -----------------------------------------------------------------------------------------------------------------

const MPS_CONTROL: &str = "nvidia-cuda-mps-control";
const MPS_PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// What the daemon in this folder answers to a command.
fn mps(folder: &Path, command: &str) -> String {
    let mut control =
        Command::new(MPS_CONTROL).env(MPS_PIPES, folder).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    writeln!(control.stdin.take().unwrap(), "{command}").unwrap();
    let output = control.wait_with_output().unwrap();
    assert!(output.status.success(), "the MPS daemon in {} may still run: {}", folder.display(), output.status);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A daemon of its own, in a folder of its own, and this program as its client.
#[test]
#[ignore = "starts an MPS control daemon"]
fn a_client_of_mps_is_refused() {
    if alone().is_none() {
        return;
    }
    let folder = std::env::temp_dir().join(format!("gdrcopy-mps-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let places = [(MPS_PIPES, &folder), ("CUDA_MPS_LOG_DIRECTORY", &folder)];
    let started = Command::new(MPS_CONTROL).arg("-d").envs(places).stdin(Stdio::null()).status();
    if !started.as_ref().is_ok_and(ExitStatus::success) {
        println!("SKIPPED: {MPS_CONTROL} does not start: {started:?}");
        return;
    }
    let env = [(MPS_PIPES, folder.to_str().unwrap()), ("GDRCOPY_TEST_MPS", "1"), ("GDRCOPY_TEST_REQUIRE", "")];
    let output = support::alone("beside::under_mps", &env);
    mps(&folder, "quit -t 5");
    fs::remove_dir_all(&folder).unwrap();
    support::assert_success(&output);
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn under_mps() {
    if std::env::var("GDRCOPY_TEST_MPS").is_err() {
        return;
    }
    unsafe { libc::alarm(60) };
    let folder = std::env::var_os(MPS_PIPES).unwrap();
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let outcome = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).map(drop);
    println!("under MPS: {outcome:?}");
    if mps(folder.as_ref(), "get_server_list").is_empty() {
        println!("SKIPPED: the daemon runs, and CUDA does not go by it");
        return;
    }
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::UnsupportedFeature(Feature::Mps));
}
