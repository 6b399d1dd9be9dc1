//! Copy policies: made by measuring, kept in a file, and followed.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::subject::{self, assert_same, downloaded, pattern};
use gdrcopy::agent::AgentOptions;
use gdrcopy::emulated::EmulatedConfig;
use gdrcopy::policy::{CopyDirection, CopyMethod, Progress};
use gdrcopy::{BackendKind, Calibration, ErrorKind, ParallelCopier, Policy, Session, copy};

const DIRECTIONS: [CopyDirection; 2] = [CopyDirection::HostToDevice, CopyDirection::DeviceToHost];

fn emulated() -> Session {
    subject::emulated(EmulatedConfig::default()).open().unwrap()
}

fn temporary(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("gdrcopy-{}-{name}", std::process::id()))
}

#[test]
fn a_calibration_makes_a_policy_that_can_be_kept_and_followed() {
    let session = emulated();
    let mut seen = Vec::new();
    let what = Calibration::new().time(Duration::from_millis(300)).largest(16 << 10).threads([2, 60]);
    let started = Instant::now();
    let policy = session.calibrate(&what, |progress| seen.push(progress)).unwrap();
    assert!(started.elapsed() < Duration::from_secs(60));

    // 1 byte to 16 KiB, in both directions.
    assert_eq!(seen.len(), 30);
    for (n, progress) in seen.iter().enumerate() {
        let (direction, bytes) = (DIRECTIONS[n / 15], 1 << (n % 15));
        assert_eq!(*progress, Progress { done: n, of: 30, direction, bytes });
    }
    assert_eq!(policy.measured_on().backend.as_deref(), Some("emulated"));
    assert_eq!(policy.measured_on().mapping.as_deref(), Some("cached"));
    assert!(policy.measured_on().cpu.is_some() && policy.measured_on().date.is_some());
    assert!(policy.mismatches(&session, 0).unwrap().is_empty());
    for direction in DIRECTIONS {
        for bytes in [1, 64, 5000, 16 << 10, 1 << 30] {
            let choice = policy.explain(direction, bytes);
            assert!(copy::by_name(choice.routine()).unwrap().is_available());
            let candidates = choice.candidates();
            assert!(candidates.iter().all(|(_, ns)| *ns > 0.0 && ns.is_finite()), "{choice}");
            assert!(candidates.iter().any(|(method, _)| *method == CopyMethod::Routine(choice.routine())), "{choice}");
            let has_engine = candidates.iter().any(|(method, _)| *method == CopyMethod::CopyEngine);
            assert!(has_engine || bytes > 1, "{choice}");
            assert!(
                candidates.iter().all(|(method, _)| !matches!(method, CopyMethod::Parallel(60) | CopyMethod::Agent))
            );
            // Never worse than what is not told apart from the best.
            let best = candidates.iter().find(|(method, _)| *method == choice.best()).unwrap().1;
            let routine =
                candidates.iter().find(|(method, _)| *method == CopyMethod::Routine(choice.routine())).unwrap().1;
            assert!(best <= routine * 1.03, "{choice}");
        }
    }

    let path = temporary("calibrated");
    policy.write(&path).unwrap();
    let read = Policy::read(&path).unwrap();
    assert_eq!((read.to_string(), read.source()), (policy.to_string(), path.to_str().unwrap()));
    std::fs::remove_file(&path).unwrap();

    let follows = subject::emulated(EmulatedConfig::default()).policy(read).open().unwrap();
    assert_eq!(follows.policy().to_string(), policy.to_string());
    let routine = policy.explain(CopyDirection::HostToDevice, 64).routine();
    assert_eq!(follows.routine().name(), routine);
    let buffer = follows.alloc(4096).unwrap();
    assert_eq!(follows.pin(&buffer).unwrap().map().unwrap().routine().name(), routine);
}

/// An agent is a candidate where one is asked for; parallel copies are where a copier would share them: 16 KiB to write,
/// more than 1 KiB to read.
#[test]
fn every_method_is_a_candidate_where_it_is_one() {
    let session = emulated();
    let agent = AgentOptions::default().cpu_stand_in().deadline(Duration::from_secs(20));
    let what = Calibration::new().time(Duration::from_millis(200)).largest(32 << 10).threads([2]).agent(agent);
    let policy = session.calibrate(&what, |_| ()).unwrap();
    for direction in DIRECTIONS {
        for power in 0..=15 {
            let choice = policy.explain(direction, 1 << power);
            let is_candidate = |wanted| choice.candidates().iter().any(|(method, _)| *method == wanted);
            assert_eq!(choice.measured(), Some(1 << power));
            // Nothing is given up without having been tried.
            for method in [CopyMethod::Routine(choice.routine()), CopyMethod::CopyEngine, CopyMethod::Agent] {
                assert!(power > 0 || is_candidate(method), "{method}: {choice}");
            }
            // The first size that a copier shares.
            let shared = if direction == CopyDirection::HostToDevice { 14 } else { 11 };
            assert!(power >= shared || !is_candidate(CopyMethod::Parallel(2)), "{choice}");
            if power == shared && ParallelCopier::builder().threads(2).build().is_ok() {
                assert!(is_candidate(CopyMethod::Parallel(2)), "{choice}");
            }
        }
    }
    let path = temporary("with-an-agent");
    policy.write(&path).unwrap();
    assert_eq!(Policy::read(&path).unwrap().to_string(), policy.to_string());
    std::fs::remove_file(&path).unwrap();
    let error = session.calibrate(&what.agent(AgentOptions::default()), |_| ()).unwrap_err();
    assert!(error.to_string().contains("cpu_stand_in()"), "{error}");
}

/// On every backend there is, for it copies with each routine and method of the machine.
#[test]
fn every_backend_can_be_calibrated() {
    subject::each(|subject| {
        let session = subject.session();
        let what = Calibration::new().gpu(subject.gpu).time(Duration::from_millis(200)).largest(4096).threads([2]);
        let policy = session.calibrate(&what, |_| ()).unwrap_or_else(|error| panic!("{}: {error}", subject.name));
        assert!(policy.mismatches(&session, subject.gpu).unwrap().is_empty(), "{}", subject.name);
        for direction in DIRECTIONS {
            let choice = policy.explain(direction, 4096);
            for method in [CopyMethod::CudaMemcpy, CopyMethod::CopyEnginePinned] {
                let is_there = choice.candidates().iter().any(|(candidate, _)| *candidate == method);
                assert_eq!(is_there, cfg!(feature = "cuda") && !subject.is_emulated(), "{}: {choice}", subject.name);
            }
        }
    });
}

#[test]
fn copies_are_right_on_both_sides_of_a_change_of_routine() {
    let usable: Vec<_> = copy::routines().iter().filter(|routine| routine.is_available()).collect();
    let (a, b) = (usable[0].name(), usable[usable.len() - 1].name());
    let rows = |direction: &str| {
        format!(
            "{direction} 1-64 routine={a}\n{direction} 65-100 routine={b}\n{direction} 101-4096 routine={a}\n\
             {direction} 4097- routine={b}\n"
        )
    };
    let path = temporary("classes");
    std::fs::write(&path, format!("schema = 1\n{}{}", rows("h2d"), rows("d2h"))).unwrap();
    let policy = Policy::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let session = subject::emulated(EmulatedConfig::default()).policy(policy).open().unwrap();
    let buffer = Arc::new(session.alloc(20_000).unwrap());
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    let mut device = vec![0; 20_000];
    mapping.write(0, &device).unwrap();
    for len in (0..200).chain(4000..4200).chain([9999]) {
        let offset = len % 67;
        let source = pattern(len, len);
        mapping.write(offset, &source).unwrap();
        device[offset..offset + len].copy_from_slice(&source);
        let mut back = vec![0; len];
        mapping.read(offset, &mut back).unwrap();
        assert_same(&back, &source, "what was written");
    }
    assert_same(&downloaded(&buffer), &device, "the device's memory");
}

#[test]
fn a_routine_that_was_named_wins_at_every_size() {
    let text = Policy::built_in().to_string();
    let session = subject::emulated(EmulatedConfig::default())
        .policy(Policy::built_in().clone())
        .copy_routine("scalar")
        .open()
        .unwrap();
    assert_eq!((session.routine().name(), session.policy().to_string()), ("scalar", text));
    assert_eq!(emulated().routine().name(), copy::preferred().name());
}

#[test]
fn a_policy_of_another_machine_says_so() {
    let path = temporary("foreign");
    let rows = "h2d 1- routine=scalar\nd2h 1- routine=scalar\n";
    std::fs::write(&path, format!("schema = 1\ncpu = Abacus\nbackend = rm\ngpu = H200\n{rows}")).unwrap();
    let policy = Policy::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let session = emulated();
    assert_eq!(session.backend(), BackendKind::Emulated);
    let lines = policy.mismatches(&session, 0).unwrap();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines[0].starts_with("cpu: measured on 'Abacus', and this is '"), "{lines:?}");
    assert_eq!(lines[2], "backend: measured on 'rm', and this is 'emulated'");
}

#[test]
fn too_small_a_calibration_is_refused() {
    let error = emulated().calibrate(&Calibration::new().largest(63), |_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = emulated().calibrate(&Calibration::new().gpu(7).largest(64), |_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoDevice);
}
