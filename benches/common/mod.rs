//! What the benches share: the backend, and what its figures are worth.

#![allow(dead_code, unreachable_pub, reason = "each bench uses its own part of this")]

use std::sync::Once;
use std::time::Duration;

use criterion::Criterion;
use gdrcopy::{BackendKind, Mapping, Session};

/// Device memory that a bench has mapped.
pub struct Target {
    pub mapping: Mapping<'static>,
    /// The backend and the copy routine, for the groups' names.
    pub name: String,
}

/// The backend in `GDRCOPY_BACKEND`, the emulated one without it.
pub fn session() -> Session {
    let chosen = std::env::var_os("GDRCOPY_BACKEND").is_some_and(|name| !name.is_empty());
    let builder = Session::builder();
    let builder = if chosen { builder } else { builder.backend(BackendKind::Emulated) };
    let session = builder.open().expect("the backend in GDRCOPY_BACKEND opens");
    warn(session.backend());
    session
}

/// Says once what the emulated backend's figures are worth.
pub fn warn(backend: BackendKind) {
    static ONCE: Once = Once::new();
    if backend == BackendKind::Emulated {
        ONCE.call_once(|| {
            eprintln!("Backend emulated: these are copies within host memory. They say nothing about a GPU.")
        });
    }
}

pub fn map(session: &Session, bytes: usize) -> Target {
    let buffer = std::sync::Arc::new(session.alloc(bytes).expect("device memory"));
    let mapping = session.pin(&buffer).expect("a pin").map().expect("a mapping");
    let name = format!("{}, {}", session.backend(), mapping.routine().name());
    Target { mapping, name }
}

/// Short measurements: there are many, and each is of a tight loop. What is given on the command line wins.
pub fn criterion() -> Criterion {
    Criterion::default()
        .without_plots()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args()
}

/// A source whose lines and pages are aligned, so that its own misalignment is chosen and not found.
#[repr(align(4096))]
pub struct Pages<const BYTES: usize>(pub [u8; BYTES]);
