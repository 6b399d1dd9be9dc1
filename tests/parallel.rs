//! Copies by several threads: the same bytes and the same errors as by one, workers that sleep, and CPUs that are honoured.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]
#![allow(unsafe_code, reason = "sets the affinity of a process before it starts")]

mod common;

use std::cell::{Cell, RefCell};
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::fork::in_child;
use common::subject::{self, Subject, assert_same, downloaded, pattern};
use gdrcopy::{CpuList, DeviceBuffer, ErrorKind, Mapping, ParallelCopier, Session};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const BYTES: usize = 300_000;
/// Whatever is waited for comes within this, on the busiest of machines.
const PATIENCE: Duration = Duration::from_secs(180);

/// The CPUs in a file of `/proc`.
fn cpus_in(status: &str) -> CpuList {
    let text = fs::read_to_string(status).unwrap();
    text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().parse().unwrap()
}

/// A copier with a worker on every CPU of this thread, so that there are workers however few CPUs there are.
fn copier() -> ParallelCopier {
    let copier = ParallelCopier::builder().cpus(cpus_in("/proc/thread-self/status")).write_threads(3).build().unwrap();
    assert!(copier.threads() >= 2);
    copier
}

fn mapping(subject: &Subject, bytes: usize) -> (Session, Arc<DeviceBuffer>, Mapping<'static>) {
    let session = subject.session();
    let buffer = Arc::new(session.alloc_as(subject.gpu, bytes, subject.allocators[0]).unwrap());
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    (session, buffer, mapping)
}

fn emulated(bytes: usize) -> (Session, Arc<DeviceBuffer>, Mapping<'static>) {
    let session = subject::emulated(gdrcopy::emulated::EmulatedConfig::default()).open().unwrap();
    let buffer = Arc::new(session.alloc(bytes).unwrap());
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    (session, buffer, mapping)
}

#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::yield_now();
    }
}

#[test]
fn any_size_at_any_offset() {
    subject::each(|subject| {
        let (_session, buffer, mapping) = mapping(subject, BYTES);
        let copier = copier();
        let device = RefCell::new(vec![0; BYTES]);
        mapping.write(0, &device.borrow()).unwrap();
        let near_a_granule = (0_usize..70, 0_usize..200).prop_map(|(n, more)| (n * 1024 + more).saturating_sub(100));
        let len = prop_oneof![0_usize..4096, near_a_granule, 0_usize..BYTES];
        let seed = Cell::new(0);
        let mut runner = TestRunner::new(Config { cases: 400, failure_persistence: None, ..Config::default() });
        runner
            .run(&(len, 0_usize..BYTES, 0_usize..64), |(len, offset, skew)| {
                let len = len.min(BYTES - offset);
                seed.set(seed.get() + 1);
                let source = pattern(seed.get(), len + skew);
                copier.write(&mapping, offset, &source[skew..]).unwrap();
                device.borrow_mut()[offset..offset + len].copy_from_slice(&source[skew..]);
                // A frame around what may be written.
                let mut back = vec![0xa5; len + skew + 64];
                copier.read(&mapping, offset, &mut back[skew..skew + len]).unwrap();
                prop_assert!(back[skew..skew + len] == source[skew..], "{len} bytes at {offset}");
                prop_assert!(back[..skew].iter().chain(&back[skew + len..]).all(|&byte| byte == 0xa5));
                Ok(())
            })
            .unwrap();
        mapping.flush().unwrap();
        assert_same(&downloaded(&buffer), &device.borrow(), subject.name);
    });
}

#[test]
fn what_one_thread_writes_before_and_after_stays_in_order() {
    subject::each(|subject| {
        let (_session, _buffer, mapping) = mapping(subject, 64 << 10);
        let copier = copier();
        let mut back = vec![0; 64 << 10];
        for round in 1..=200_u8 {
            // Posted, and then overwritten by workers; written by workers, and then overwritten; read by workers.
            mapping.write_posted(0, &[255; 64 << 10]).unwrap();
            copier.write(&mapping, 0, &[round; 64 << 10]).unwrap();
            mapping.write_posted(32 << 10, &[round / 2; 7]).unwrap();
            copier.read(&mapping, 0, &mut back).unwrap();
            assert!(back[..32 << 10].iter().all(|&byte| byte == round), "{}, round {round}", subject.name);
            assert!(back[32 << 10..][..7].iter().all(|&byte| byte == round / 2), "{}, round {round}", subject.name);
            assert!(back[(32 << 10) + 7..].iter().all(|&byte| byte == round), "{}, round {round}", subject.name);
        }
    });
}

#[test]
fn ranges_are_checked_as_in_a_plain_copy() {
    subject::shared(|| {
        let (_session, buffer, mapping) = emulated(64 << 10);
        let copier = copier();
        let mut bytes = pattern(1, 32 << 10);
        copier.write(&mapping, 32 << 10, &bytes).unwrap();
        let before = bytes.clone();
        for offset in [(32 << 10) + 1, 64 << 10, usize::MAX] {
            let write = copier.write(&mapping, offset, &bytes).unwrap_err();
            let read = copier.read(&mapping, offset, &mut bytes).unwrap_err();
            assert_eq!((write.kind(), read.kind()), (ErrorKind::OutOfBounds, ErrorKind::OutOfBounds));
            assert_eq!(write.to_string(), mapping.write(offset, &bytes).unwrap_err().to_string());
            assert_eq!(read.to_string(), mapping.read(offset, &mut bytes).unwrap_err().to_string());
        }
        assert!(bytes == before);
        copier.read(&mapping, 64 << 10, &mut []).unwrap();
        assert_same(&downloaded(&buffer)[32 << 10..], &before, "untouched");
    });
}

#[test]
fn many_threads_use_one_copier() {
    const EACH: usize = 40_000;
    const THREADS: usize = 4;
    subject::each(|subject| {
        let (_session, buffer, mapping) = mapping(subject, EACH * THREADS);
        let copier = copier();
        let mut last = vec![Vec::new(); THREADS];
        thread::scope(|scope| {
            for (n, last) in last.iter_mut().enumerate() {
                let (copier, mapping) = (&copier, &mapping);
                scope.spawn(move || {
                    let mut back = vec![0; EACH];
                    for round in 0..100 {
                        *last = pattern(n * 1000 + round, EACH);
                        copier.write(mapping, n * EACH, last).unwrap();
                        copier.read(mapping, n * EACH, &mut back).unwrap();
                        assert_same(&back, last, "own bytes");
                    }
                });
            }
        });
        mapping.flush().unwrap();
        assert_same(&downloaded(&buffer), &last.concat(), subject.name);
    });
}

/// `/proc` of worker `n` of the one copier of this process. A thread takes its name when it first runs, which a busy
/// machine puts off.
fn worker(n: usize) -> String {
    let name = format!("gdrcopy-{n}");
    let mut found = Vec::new();
    until("the worker has its name", || {
        let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path().display().to_string());
        found = tasks
            .filter(|task| fs::read_to_string(format!("{task}/comm")).is_ok_and(|comm| comm.trim() == name))
            .collect();
        !found.is_empty()
    });
    assert_eq!(found.len(), 1, "{name} of another copier");
    found.remove(0)
}

/// State and processor time of a thread: the 3rd, 14th and 15th fields of `stat`, proc_pid_stat(5).
fn state(task: &str) -> (String, String) {
    let text = fs::read_to_string(format!("{task}/stat")).unwrap();
    let fields: Vec<_> = text.rsplit_once(") ").unwrap().1.split(' ').collect();
    (fields[0].to_owned(), [fields[11], fields[12]].join(" "))
}

#[test]
fn workers_sleep_50_us_after_the_last_copy() {
    subject::alone(|| {
        let (_session, _buffer, mapping) = emulated(64 << 10);
        let copier = ParallelCopier::builder().cpus(cpus_in("/proc/thread-self/status")).threads(2).build().unwrap();
        let worker = worker(0);
        let mut bytes = vec![0; 64 << 10];
        // How soon depends on who else uses this machine: the best of many.
        let mut best = Duration::MAX;
        let started = Instant::now();
        while best > Duration::from_micros(50) {
            assert!(started.elapsed() < PATIENCE, "the worker slept {best:?} after a copy at best");
            until("awake", || {
                copier.wake();
                copier.read(&mapping, 0, &mut bytes).unwrap();
                copier.awake() == 1
            });
            let copied = Instant::now();
            while copier.awake() > 0 {
                assert!(copied.elapsed() < PATIENCE, "the worker does not sleep");
            }
            best = best.min(copied.elapsed());
        }
        // It says that it sleeps, and so does the system.
        until("asleep for the system", || state(&worker).0 == "S");
        let (_, time) = state(&worker);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(state(&worker), ("S".to_owned(), time), "no time is used in sleep");
        // And the next copy works, whoever does it, and wakes the worker.
        until("awake again", || {
            copier.read(&mapping, 0, &mut bytes).unwrap();
            copier.awake() == 1
        });
    });
}

#[test]
fn copies_are_right_while_workers_fall_asleep() {
    subject::shared(|| {
        let (_session, _buffer, mapping) = emulated(32 << 10);
        let cpus = cpus_in("/proc/thread-self/status");
        let copier = ParallelCopier::builder().cpus(cpus).write_threads(8).spin(Duration::ZERO).build().unwrap();
        let mut back = vec![0; 32 << 10];
        for round in 0..3000 {
            let len = if round % 2 == 0 { 32 << 10 } else { 8 << 10 };
            let source = pattern(round, 32 << 10);
            copier.write(&mapping, 0, &source).unwrap();
            copier.read(&mapping, 0, &mut back[..len]).unwrap();
            assert_same(&back[..len], &source[..len], "what was written");
            if round % 5 == 0 {
                copier.wake();
            }
        }
    });
}

#[test]
fn the_second_of_a_burst_wakes_workers_and_a_lone_copy_does_not() {
    subject::alone(|| {
        let (_session, _buffer, mapping) = emulated(4096);
        let cpus = cpus_in("/proc/thread-self/status");
        let spin = Duration::from_millis(20);
        let copier = ParallelCopier::builder().cpus(cpus).threads(2).spin(spin).build().unwrap();
        let mut bytes = [0; 4096];
        until("a pause was a pause, and a burst one", || {
            until("asleep", || copier.awake() == 0);
            thread::sleep(2 * spin);
            let begun = Instant::now();
            copier.read(&mapping, 0, &mut bytes).unwrap();
            assert_eq!(copier.awake(), 0, "alone");
            copier.read(&mapping, 0, &mut bytes).unwrap();
            let is_burst = begun.elapsed() < spin;
            // The system takes its time to run what was woken, and this thread may miss all of the time that it spins.
            let woken = Instant::now();
            while copier.awake() == 0 && woken.elapsed() < 5 * spin {
                thread::yield_now();
            }
            is_burst && copier.awake() == 1
        });
    });
}

#[test]
fn everything_is_dropped_in_any_order() {
    subject::shared(|| {
        for round in 0..30 {
            let (session, buffer, mapping) = emulated(64 << 10);
            let copier = copier();
            if round % 3 > 0 {
                copier.write(&mapping, 0, &[1; 64 << 10]).unwrap();
            }
            if round % 3 > 1 {
                until("asleep", || copier.awake() == 0);
            }
            if round % 2 == 0 {
                drop((copier, mapping, buffer, session));
            } else {
                drop((session, buffer, mapping, copier));
            }
        }
    });
}

#[test]
fn a_copier_outlives_its_first_mapping_and_serves_others() {
    subject::shared(|| {
        let (_session, _buffer, first) = emulated(64 << 10);
        let copier = ParallelCopier::new(&first).unwrap();
        drop(first);
        let (_session, buffer, second) = emulated(64 << 10);
        let source = pattern(1, 64 << 10);
        copier.write(&second, 0, &source).unwrap();
        assert_same(&downloaded(&buffer), &source, "the second");
    });
}

#[test]
fn a_forked_child_has_no_workers_and_does_not_hang() {
    subject::alone(|| {
        let (_session, _buffer, mapping) = emulated(64 << 10);
        let copier = copier();
        let mut bytes = vec![0; 64 << 10];
        copier.read(&mapping, 0, &mut bytes).unwrap();
        // Moved into the child's copy of this stack only: what is dropped there is the child's.
        let inherited = std::mem::ManuallyDrop::new(copier);
        in_child(|| {
            let read = inherited.read(&mapping, 0, &mut vec![0; 64 << 10]).unwrap_err();
            let write = inherited.write(&mapping, 0, &[0; 64]).unwrap_err();
            assert_eq!((read.kind(), write.kind()), (ErrorKind::WrongProcess, ErrorKind::WrongProcess));
            assert!(read.to_string().ends_with("make a copier of its own in this process"), "{read}");
            inherited.wake();
            // SAFETY: the child's own copy, which it leaves without using or dropping it again.
            drop(unsafe { std::ptr::read(&*inherited) });
        });
        let copier = std::mem::ManuallyDrop::into_inner(inherited);
        copier.write(&mapping, 0, &[7; 64 << 10]).unwrap();
        copier.read(&mapping, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 7));
    });
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    subject::shared(|| {
        let error = |threads| ParallelCopier::builder().threads(threads).build().unwrap_err();
        for threads in [0, 65, usize::MAX] {
            let error = error(threads);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains("of 1 to 64; ask for a number in between"), "{error}");
        }
        let one = ParallelCopier::builder().cpus("0".parse().unwrap()).threads(3).build().unwrap_err().to_string();
        assert_eq!(
            one,
            "parallel copier: 3 threads need 2 CPUs beside the caller's, and CPUs 0 were named; \
         ask for at most 2 threads, or name the CPUs of the workers"
        );
        let alone = ParallelCopier::builder().threads(1).build().unwrap();
        assert_eq!((alone.threads(), alone.cpus().len(), alone.awake()), (1, 0, 0));
        let (_session, _buffer, mapping) = emulated(64 << 10);
        alone.write(&mapping, 0, &[1; 64 << 10]).unwrap();
    });
}

/// A CPU that no cpuset has here, if the numbers leave one.
#[test]
fn a_cpu_that_is_not_there_is_named() {
    subject::shared(|| {
        let error = ParallelCopier::builder().cpus("1023".parse().unwrap()).build().unwrap_err();
        assert!(error.to_string().contains("a worker cannot be kept on CPU 1023"), "{error}");
        assert!(error.to_string().contains("name CPUs that the cpuset of this process has"), "{error}");
    });
}

const ASK: &str = "GDRCOPY_TEST_PLACE";

/// A process that may use one CPU or two, if this one was started as such.
#[test]
fn in_a_process_of_its_own() {
    if std::env::var_os(ASK).is_none() {
        return;
    }
    let allowed = cpus_in("/proc/self/status");
    let copier = ParallelCopier::builder().build().unwrap();
    assert_eq!(copier.threads(), allowed.len().min(8), "one for the caller, and for each worker one");
    let (_session, _buffer, mapping) = emulated(64 << 10);
    copier.write(&mapping, 0, &[1; 64 << 10]).unwrap();
    for (n, &cpu) in copier.cpus().iter().enumerate() {
        assert!(allowed.contains(cpu));
        assert_eq!(cpus_in(&format!("{}/status", worker(n))), CpuList::from_iter([cpu]), "kept on its CPU");
    }
    let more = ParallelCopier::builder().threads(allowed.len() + 1).build().unwrap_err();
    let text = format!("the calling thread may use CPUs {allowed} and keeps one for itself");
    assert!(more.to_string().contains(&text), "{more}");
    println!("placed {} of {allowed}", copier.threads());
}

#[test]
fn workers_stay_within_the_affinity_of_the_process() {
    let here = cpus_in("/proc/self/status");
    for count in [1, 2].into_iter().filter(|&count| count <= here.len()) {
        let cpus: Vec<_> = here.iter().take(count).collect();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "in_a_process_of_its_own", "--nocapture"]).env(ASK, "1");
        let wanted: CpuList = cpus.iter().copied().collect();
        // SAFETY: between fork and exec only bits are set and one system call is made.
        unsafe { command.pre_exec(move || limit_to(&cpus)) };
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        assert!(text.contains(&format!("placed {count} of {wanted}")), "{text}");
    }
}

fn limit_to(cpus: &[u32]) -> std::io::Result<()> {
    // SAFETY: a bit array; all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus {
        // SAFETY: `set` is live and the kernel has named the CPU.
        unsafe { libc::CPU_SET(usize::try_from(cpu).unwrap_or(0), &mut set) };
    }
    // SAFETY: `set` is live and of the size given.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[test]
fn signals_go_to_the_program_s_own_threads() {
    static HEARD: AtomicBool = AtomicBool::new(false);
    extern "C" fn on_signal(_: libc::c_int) {
        HEARD.store(true, Ordering::SeqCst);
    }
    subject::alone(|| {
        let _copier = copier();
        let status = fs::read_to_string(format!("{}/status", worker(0))).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        let blocked = u64::from_str_radix(blocked, 16).unwrap();
        let is_blocked = |signal: i32| blocked & (1 << (signal - 1)) != 0;
        assert!([libc::SIGUSR1, libc::SIGALRM, libc::SIGINT].into_iter().all(is_blocked), "{blocked:x}");
        assert!(![libc::SIGBUS, libc::SIGSEGV].into_iter().any(is_blocked), "{blocked:x}");
        // The thread that made the copier takes them as before.
        let handler: extern "C" fn(libc::c_int) = on_signal;
        // SAFETY: a function pointer and an address have the same size and representation.
        let handler: libc::sighandler_t = unsafe { std::mem::transmute_copy(&handler) };
        // SAFETY: the handler stores to an atomic and nothing else.
        unsafe { libc::signal(libc::SIGUSR1, handler) };
        // SAFETY: sends a signal that has a handler to the calling thread.
        unsafe { libc::raise(libc::SIGUSR1) };
        assert!(HEARD.load(Ordering::SeqCst));
    });
}
