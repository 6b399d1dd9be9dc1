//! The automatic copier, on emulated GPUs: that every method that it may use copies right, that it does what its policy says
//! as far as it can, and that copies allocate nothing.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]
#![allow(unsafe_code, reason = "host memory is registered, which is a promise to keep it")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::counting::{Counting, calls_during};
use common::engine;
use common::subject::{emulated, pattern};
use gdrcopy::agent::{AgentOptions, Segment};
use gdrcopy::auto::{AutoCopier, AutoMethod, AutoOptions};
use gdrcopy::emulated::EmulatedConfig;
use gdrcopy::policy::{CopyDirection, CopyMethod};
use gdrcopy::{ErrorKind, ParallelCopier, Policy, Session};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DIRECTIONS: [CopyDirection; 2] = [CopyDirection::HostToDevice, CopyDirection::DeviceToHost];

fn session() -> Session {
    emulated(EmulatedConfig::default()).open().unwrap()
}

fn stand_in() -> AgentOptions {
    AgentOptions::default().cpu_stand_in().deadline(Duration::from_secs(20))
}

fn with_everything() -> AutoOptions {
    AutoOptions::default()
        .agent(stand_in())
        .parallel(ParallelCopier::builder().threads(2).write_threads(2))
        .largest(64 << 10)
        .time(Duration::from_millis(50))
}

/// Rows for both directions, through a file.
fn policy(name: &str, rows: &[&str]) -> Policy {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("gdrcopy-{}-{number}-auto-{name}", std::process::id()));
    let lines = |direction: &str| rows.iter().map(|row| format!("{direction} {row}\n")).collect::<String>();
    std::fs::write(&path, format!("schema = 1\n{}{}", lines("h2d"), lines("d2h"))).unwrap();
    let policy = Policy::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    policy
}

/// Each method has some of the sizes.
fn of_every_method() -> Policy {
    policy(
        "every-method",
        &[
            "1-100 routine=scalar best=scalar",
            "101-3000 routine=scalar best=agent",
            "3001-9000 routine=scalar best=copy_engine",
            "9001-40000 routine=scalar best=parallel-2",
            "40001- routine=scalar best=agent",
        ],
    )
}

fn copies_right(copier: &mut AutoCopier<'_>) {
    let data = pattern(30, 300_000);
    for bytes in [0, 1, 63, 64, 65, 1000, 4096, 10_001, 65_536, 200_000] {
        for offset in [0, 1, 63, 4097] {
            copier.write(offset, &data[offset / 3..][..bytes]).unwrap();
            let mut seen = vec![0; bytes];
            copier.read(offset, &mut seen).unwrap();
            assert!(seen == data[offset / 3..][..bytes], "{bytes} bytes at {offset}");
        }
    }
    copier.mapping().store_u64(8, 77).unwrap();
    let mut seen = [0; 8];
    copier.read(8, &mut seen).unwrap();
    assert_eq!(u64::from_le_bytes(seen), 77, "what was stored in between");
}

#[test]
fn it_copies_right_at_every_size() {
    let session = session();
    let buffer = session.alloc(300_000).unwrap();
    let small = AutoOptions::default().largest(4096).time(Duration::ZERO);
    for options in [with_everything(), with_everything().page_locked(), small] {
        copies_right(&mut AutoCopier::new(&session, &buffer, options).unwrap());
    }
    for options in [with_everything(), AutoOptions::default()] {
        copies_right(&mut AutoCopier::with_policy(&session, &buffer, of_every_method(), options).unwrap());
    }
}

/// What is stored is read back by another method, and neither sees older bytes: the sizes of a policy's rows decide.
#[test]
fn methods_see_each_other_s_writes() {
    let session = session();
    let buffer = session.alloc(64 << 10).unwrap();
    let mut copier = AutoCopier::with_policy(&session, &buffer, of_every_method(), with_everything()).unwrap();
    for round in 0..40 {
        for written in [80, 2000, 8000, 20_000, 50_000] {
            let data = pattern(round + written, written);
            copier.write(7, &data).unwrap();
            for read in [80, 2000, 8000, 20_000, 50_000] {
                let bytes = read.min(written);
                let mut seen = vec![0; read];
                copier.read(7, &mut seen).unwrap();
                assert!(seen[..bytes] == data[..bytes], "{written} bytes written, {read} read, round {round}");
            }
        }
    }
}

#[test]
fn it_uses_what_it_measured_to_be_quickest() {
    let session = session();
    let buffer = session.alloc(50_000).unwrap();
    let options = with_everything().largest(1 << 30);
    let copier = AutoCopier::new(&session, &buffer, options).unwrap();
    for direction in DIRECTIONS {
        for bytes in (0..=20).map(|power| 1 << power).chain([0, 3, usize::MAX]) {
            let choice = copier.explain(direction, bytes);
            let ns = |wanted| choice.candidates().iter().find(|(method, _)| *method == wanted).map(|(_, ns)| *ns);
            let least = choice.candidates().iter().map(|(_, ns)| *ns).fold(f64::INFINITY, f64::min);
            assert!(ns(choice.best()).unwrap() <= 1.03 * least, "{choice}");
            let is_used = match choice.method() {
                AutoMethod::Bar1 => matches!(choice.best(), CopyMethod::Routine(_)),
                AutoMethod::Parallel => choice.best() == CopyMethod::Parallel(2),
                AutoMethod::Agent => choice.best() == CopyMethod::Agent,
                other => other == AutoMethod::CopyEngine && choice.best() == CopyMethod::CopyEngine,
            };
            assert!(is_used, "{choice}");
            // No further than the buffer is long, and near by.
            let (measured, near) = (choice.measured().unwrap(), bytes.clamp(1, 64 << 10));
            let is_measured = measured.is_power_of_two() || (measured % 3 == 0 && (measured / 3).is_power_of_two());
            assert!(is_measured && measured <= 2 * near && near <= 2 * measured, "{bytes}: {measured}");
            let text = choice.to_string();
            for part in [direction.name(), choice.method().name(), "measured now", choice.ordering()] {
                assert!(text.contains(part), "no '{part}' in: {text}");
            }
            assert!(!text.contains('\n') && !text.contains("  "), "{text}");
        }
    }
    // Frozen, it does the same.
    let frozen = AutoCopier::with_policy(&session, &buffer, copier.policy().clone(), with_everything()).unwrap();
    for direction in DIRECTIONS {
        for bytes in (0..300).chain((8..17).map(|power| 1 << power)) {
            assert_eq!(frozen.explain(direction, bytes).method(), copier.explain(direction, bytes).method());
        }
    }
}

#[test]
fn with_page_locked_memory_agent_and_copy_engine_are_measured_so() {
    let session = session();
    let buffer = session.alloc(4096).unwrap();
    for has_agent in [false, true] {
        let options = AutoOptions::default().page_locked().time(Duration::ZERO);
        let options = if has_agent { options.agent(stand_in()) } else { options };
        let copier = AutoCopier::new(&session, &buffer, options).unwrap();
        let choice = copier.explain(CopyDirection::DeviceToHost, 1);
        let has = |wanted| choice.candidates().iter().any(|(method, _)| *method == wanted);
        assert!(has(CopyMethod::CopyEnginePinned) && !has(CopyMethod::CopyEngine), "{choice}");
        assert_eq!((has(CopyMethod::AgentPinned), has(CopyMethod::Agent)), (has_agent, has_agent), "{choice}");
        assert_eq!(choice.is_reached(), has_agent);
    }
}

/// Without being asked for, no block takes an SM and no thread a core.
#[test]
fn agents_and_threads_are_opt_in() {
    let session = session();
    let buffer = session.alloc(4096).unwrap();
    let options = AutoOptions::default().largest(4096).time(Duration::ZERO);
    let mut copier = AutoCopier::new(&session, &buffer, options).unwrap();
    for direction in DIRECTIONS {
        for bytes in [64, 512, 4096] {
            for (method, _) in copier.explain(direction, bytes).candidates() {
                assert!(matches!(method, CopyMethod::Routine(_) | CopyMethod::CopyEngine), "{method}");
            }
        }
    }
    assert!(copier.agent().is_none());
}

#[test]
fn a_method_that_is_not_set_up_is_passed_over_and_that_is_said() {
    let session = session();
    let buffer = session.alloc(64 << 10).unwrap();
    let row =
        "1- measured=65536 routine=scalar best=agent | scalar=79000 parallel-2=40000 agent=3900 copy_engine=12000";
    let policy = policy("passed-over", &[row]);
    let method = |options: AutoOptions| {
        let copier = AutoCopier::with_policy(&session, &buffer, policy.clone(), options).unwrap();
        let choice = copier.explain(CopyDirection::DeviceToHost, 65_536);
        assert_eq!(choice.best(), CopyMethod::Agent);
        (choice.method(), choice.to_string())
    };
    let (used, text) = method(AutoOptions::default().agent(stand_in()));
    assert_eq!(used, AutoMethod::Agent);
    let start = "d2h of 65536 bytes: agent (at 65536 bytes: scalar=79000.0 parallel-2=40000.0 agent=3900.0 \
                 copy_engine=12000.0; ";
    assert!(text.starts_with(start), "{text}");
    assert!(text.ends_with("auto-passed-over); SFENCE and a request to a kernel, which reads after this thread's earlier \
                            writes arrived: the call returns with the kernel's answer, and every byte is fetched after it \
                            began"), "{text}");
    let (used, text) = method(AutoOptions::default());
    assert_eq!(used, AutoMethod::CopyEngine);
    let start = "d2h of 65536 bytes: copy_engine in place of agent, which is best but not set up (at 65536 bytes: ";
    assert!(text.starts_with(start), "{text}");
}

#[test]
fn a_method_for_page_locked_memory_is_passed_over_with_other_memory() {
    let session = session();
    let buffer = session.alloc(4096).unwrap();
    let row =
        "1- measured=65536 routine=scalar best=copy_engine_pinned | scalar=900 copy_engine=2000 copy_engine_pinned=90";
    let explained = |options: AutoOptions| {
        let policy = policy("page-locked", &[row]);
        let copier = AutoCopier::with_policy(&session, &buffer, policy, options).unwrap();
        copier.explain(CopyDirection::HostToDevice, 7).to_string()
    };
    let text = explained(AutoOptions::default());
    let start =
        "h2d of 7 bytes: bar1 in place of copy_engine_pinned, which is best with page-locked memory (at 65536 bytes";
    assert!(text.starts_with(start), "{text}");
    let text = explained(AutoOptions::default().page_locked());
    assert!(text.starts_with("h2d of 7 bytes: copy_engine (at 65536 bytes"), "{text}");
}

/// The built-in table, and files from before the agent was a method.
#[test]
fn policies_without_the_newer_methods_are_followed() {
    let session = session();
    let buffer = session.alloc(1 << 20).unwrap();
    let row = "1-4096 measured=1024 routine=scalar best=scalar | scalar=1000 cuda_memcpy_pinned=7500";
    let next = "4097- measured=65536 routine=scalar best=cuda_memcpy_pinned | scalar=79000 cuda_memcpy_pinned=8800";
    for options in [AutoOptions::default(), with_everything(), AutoOptions::default().page_locked()] {
        let old = policy("old", &[row, next]);
        let mut copier = AutoCopier::with_policy(&session, &buffer, old, options).unwrap();
        let method = |bytes| copier.explain(CopyDirection::DeviceToHost, bytes).method();
        assert_eq!(
            (method(0), method(4096), method(4097)),
            (AutoMethod::Bar1, AutoMethod::Bar1, AutoMethod::CopyEngine)
        );
        copies_right(&mut copier);
    }
    let built_in = Policy::built_in().clone();
    copies_right(&mut AutoCopier::with_policy(&session, &buffer, built_in, AutoOptions::default()).unwrap());
}

#[test]
fn copies_and_their_choice_allocate_nothing() {
    let session = session();
    let buffer = session.alloc(64 << 10).unwrap();
    let options = AutoOptions::default().agent(stand_in().dedicated()).parallel(ParallelCopier::builder().threads(2));
    let mut copier = AutoCopier::with_policy(&session, &buffer, of_every_method(), options).unwrap();
    let mut host = vec![3; 64 << 10];
    let mut reached = copier.host_buffer(64 << 10).unwrap();
    let mut used = Vec::with_capacity(100);
    let calls = calls_during(|| {
        for bytes in [0, 1, 8, 64, 100, 101, 2000, 3000, 3001, 9000, 9001, 20_000, 40_000, 40_001, 60_000] {
            copier.write(3, &host[..bytes]).unwrap();
            copier.read(5, &mut host[..bytes]).unwrap();
            copier.write(3, &reached.as_slice()[..bytes]).unwrap();
            copier.read(5, &mut reached.as_mut_slice()[..bytes]).unwrap();
            used.push(copier.explain(CopyDirection::DeviceToHost, bytes).method());
        }
    });
    assert_eq!(calls, 0);
    for method in [AutoMethod::Bar1, AutoMethod::Parallel, AutoMethod::Agent, AutoMethod::CopyEngine] {
        // On one CPU there is no parallel copier.
        assert!(used.contains(&method) || method == AutoMethod::Parallel, "{method}");
    }
}

/// The agent's own memory, without a copy on the CPU's side.
#[test]
fn the_agent_can_be_used_by_itself() {
    let session = session();
    let buffer = session.alloc(8192).unwrap();
    let data = pattern(5, 8192);
    buffer.upload(0, &data).unwrap();
    let mut copier = AutoCopier::with_policy(&session, &buffer, of_every_method(), with_everything()).unwrap();
    let agent = copier.agent().unwrap();
    let mut host = agent.host_buffer(8192).unwrap();
    agent.read_into(&mut host, &[Segment { range: 0, offset: 100, bytes: 8000, at: 64 }]).unwrap();
    assert!(host.as_slice()[64..8064] == data[100..8100]);
}

/// On a GPU `gpu_soak` does the same.
#[test]
fn the_copy_engine_finds_what_was_written_before() {
    let session = session();
    let buffer = session.alloc(engine::BYTES).unwrap();
    let (mut copier, mut host) = engine::copier(&session, &buffer);
    let rounds = 20_000;
    let seen = engine::rounds(&mut copier, host.as_mut_slice(), rounds, false);
    assert_eq!(seen, engine::Seen { rounds, ..engine::Seen::default() });
    let late = engine::rounds(&mut copier, host.as_mut_slice(), 1000, true);
    // One byte can be what it was by chance.
    assert!(late.stale_reads > 900 && late.lost_writes == 1000, "{late:?}");
}

const REACHED: &str = "1025- measured=65536 routine=scalar best=agent_pinned | scalar=79000 agent=8100 agent_pinned=3900 \
                       copy_engine_pinned=8800";

/// Memory that the agent reaches has the figures of such memory, and other memory the best of the rest.
#[test]
fn memory_that_the_agent_reaches_has_its_own_method() {
    let session = session();
    let buffer = session.alloc(200_000).unwrap();
    let policy = policy("reached", &["1-1024 routine=scalar best=scalar", REACHED]);
    let options = AutoOptions::default().agent(stand_in()).page_locked();
    let mut copier = AutoCopier::with_policy(&session, &buffer, policy.clone(), options).unwrap();
    let mut locked = copier.host_buffer(150_000).unwrap();
    let mut own = vec![0; 150_000];
    let mut other = vec![0; 150_000];
    // SAFETY: the vector outlives the copier, and is not touched after an error.
    unsafe { copier.register_host(own.as_mut_ptr(), own.len()) }.unwrap();
    let method = |copier: &AutoCopier<'_>, host: &[u8]| {
        let choice = copier.explain_with(CopyDirection::DeviceToHost, host);
        (choice.method(), choice.is_reached(), choice.to_string())
    };
    for host in [&own[10..100_000], &locked.as_slice()[7..9000]] {
        let (used, is_reached, text) = method(&copier, host);
        assert!(is_reached && used == AutoMethod::Agent, "{text}");
        assert!(text.contains(": agent (at 65536 bytes: scalar=79000.0 agent=8100.0 agent_pinned=3900.0"), "{text}");
    }
    let (used, is_reached, text) = method(&copier, &other);
    assert!(!is_reached && used == AutoMethod::Agent, "{text}");
    let says =
        ": agent in place of agent_pinned, which is best with page-locked memory that the agent reaches (at 65536";
    assert!(text.contains(says), "{text}");
    assert!(copier.explain(CopyDirection::DeviceToHost, 65_536).is_reached(), "as the options say");
    let small = copier.explain_with(CopyDirection::HostToDevice, &own[..1000]);
    assert_eq!(small.method(), AutoMethod::Bar1);

    let data = pattern(44, 150_000);
    for bytes in [1, 1000, 1025, 65_536, 149_000] {
        for host in [&mut own[..], locked.as_mut_slice(), &mut other[..]] {
            host[13..13 + bytes].copy_from_slice(&data[bytes % 100..][..bytes]);
            copier.write(77, &host[13..13 + bytes]).unwrap();
            host.fill(0);
            copier.read(77, &mut host[13..13 + bytes]).unwrap();
            assert!(host[13..13 + bytes] == data[bytes % 100..][..bytes], "{bytes} bytes");
            assert!(host[..13].iter().chain(&host[13 + bytes..]).all(|&byte| byte == 0));
        }
    }
    copier.unregister_host(own.as_ptr()).unwrap();
    assert!(!copier.explain_with(CopyDirection::DeviceToHost, &own).is_reached());
    assert_eq!(copier.unregister_host(own.as_ptr()).unwrap_err().kind(), ErrorKind::InvalidArgument);

    // Without an agent the best for such memory is the copy engine, and registering is nothing.
    let mut copier = AutoCopier::with_policy(&session, &buffer, policy, AutoOptions::default().page_locked()).unwrap();
    // SAFETY: as above.
    unsafe { copier.register_host(own.as_mut_ptr(), own.len()) }.unwrap();
    copier.unregister_host(own.as_ptr()).unwrap();
    let locked = copier.host_buffer(10_000).unwrap();
    let (used, is_reached, text) = method(&copier, locked.as_slice());
    assert!(!is_reached && used == AutoMethod::CopyEngine, "{text}");
    assert!(text.contains("copy_engine in place of agent_pinned, which is best but not set up"), "{text}");
    assert_eq!(copier.host_buffer(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn what_cannot_be_is_refused() {
    let session = session();
    let buffer = session.alloc(4096).unwrap();
    let error = AutoCopier::new(&session, &buffer, AutoOptions::default().largest(63)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = AutoCopier::new(&session, &buffer, AutoOptions::default().agent(AgentOptions::default())).unwrap_err();
    assert!(error.to_string().contains("cpu_stand_in()"), "{error}");
    for policy in [None, Some(of_every_method())] {
        let mut copier = match policy {
            None => AutoCopier::new(&session, &buffer, with_everything()).unwrap(),
            Some(policy) => AutoCopier::with_policy(&session, &buffer, policy, with_everything()).unwrap(),
        };
        for (offset, bytes) in [(4096, 1), (0, 4097), (usize::MAX, 2), (4000, 300_000)] {
            assert_eq!(copier.read(offset, &mut vec![0; bytes]).unwrap_err().kind(), ErrorKind::OutOfBounds);
            assert_eq!(copier.write(offset, &vec![0; bytes]).unwrap_err().kind(), ErrorKind::OutOfBounds);
        }
        copier.read(0, &mut [0; 4096]).unwrap();
    }
}
