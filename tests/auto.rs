//! The automatic copier, on emulated GPUs: that every method that it may use copies right, and that it uses the one which
//! it measured to be quickest.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]

mod common;

use std::time::Duration;

use common::subject::{emulated, pattern};
use gdrcopy::agent::AgentOptions;
use gdrcopy::auto::{AutoCopier, AutoMethod, AutoOptions};
use gdrcopy::emulated::EmulatedConfig;
use gdrcopy::policy::CopyDirection;
use gdrcopy::{ErrorKind, ParallelCopier, Session};

const DIRECTIONS: [CopyDirection; 2] = [CopyDirection::HostToDevice, CopyDirection::DeviceToHost];

fn session() -> Session {
    emulated(EmulatedConfig::default()).open().unwrap()
}

fn with_everything() -> AutoOptions {
    AutoOptions::default()
        .agent(AgentOptions::default().cpu_stand_in().deadline(Duration::from_secs(20)))
        .parallel(ParallelCopier::builder())
        .largest(64 << 10)
        .time(Duration::from_millis(50))
}

#[test]
fn it_copies_right_at_every_size() {
    let session = session();
    let buffer = session.alloc(300_000).unwrap();
    for options in [with_everything(), AutoOptions::default().largest(4096).time(Duration::ZERO)] {
        let mut copier = AutoCopier::new(&session, &buffer, options).unwrap();
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
}

#[test]
fn it_uses_what_it_measured_to_be_quickest() {
    let session = session();
    let buffer = session.alloc(1 << 20).unwrap();
    let copier = AutoCopier::new(&session, &buffer, with_everything()).unwrap();
    for direction in DIRECTIONS {
        for bytes in (0..=20).map(|power| 1 << power).chain([0, 3, usize::MAX]) {
            let choice = copier.explain(direction, bytes);
            let candidates = choice.candidates();
            let ns = |method| candidates.iter().find(|(candidate, _)| *candidate == method).unwrap().1;
            let least = candidates.iter().map(|(_, ns)| *ns).fold(f64::INFINITY, f64::min);
            assert!(ns(choice.method()) <= 1.02 * least, "{choice}");
            let measured = choice.measured();
            assert!((64..=64 << 10).contains(&measured) && measured.is_power_of_two());
            let near = bytes.clamp(64, 64 << 10);
            assert!(measured < 2 * near && near < 2 * measured, "{bytes}: {measured}");
            let text = choice.to_string();
            assert!(text.contains(direction.name()) && text.contains(choice.method().name()), "{text}");
            assert!(!text.contains('\n'));
        }
    }
}

/// Without being asked for, no block takes an SM and no thread a core.
#[test]
fn agents_and_threads_are_opt_in() {
    let session = session();
    let buffer = session.alloc(4096).unwrap();
    let options = AutoOptions::default().largest(4096).time(Duration::ZERO);
    let copier = AutoCopier::new(&session, &buffer, options).unwrap();
    for direction in DIRECTIONS {
        for bytes in [64, 512, 4096] {
            for (method, _) in copier.explain(direction, bytes).candidates() {
                assert!(matches!(method, AutoMethod::Bar1 | AutoMethod::CopyEngine), "{method}");
            }
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let session = session();
    let buffer = session.alloc(4096).unwrap();
    let error = AutoCopier::new(&session, &buffer, AutoOptions::default().largest(63)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = AutoCopier::new(&session, &buffer, AutoOptions::default().agent(AgentOptions::default())).unwrap_err();
    assert!(error.to_string().contains("cpu_stand_in()"), "{error}");
    let mut copier = AutoCopier::new(&session, &buffer, with_everything()).unwrap();
    for (offset, bytes) in [(4096, 1), (0, 4097), (usize::MAX, 2), (4000, 300_000)] {
        assert_eq!(copier.read(offset, &mut vec![0; bytes]).unwrap_err().kind(), ErrorKind::OutOfBounds);
        assert_eq!(copier.write(offset, &vec![0; bytes]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
    copier.read(0, &mut [0; 4096]).unwrap();
}
