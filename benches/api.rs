//! Pin, map, unmap and unpin on every backend that opens here: time per call, by size.
//!
//! `GDRCOPY_BACKEND` restricts it to that backend; without it all are tried and the emulated one is always there.

mod common;

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_main};
use gdrcopy::{BackendKind, DeviceBuffer, Session};

const SIZES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];

/// The sessions to measure. A backend that does not open is named with its reason.
fn sessions() -> Vec<Session> {
    if std::env::var_os("GDRCOPY_BACKEND").is_some_and(|name| !name.is_empty()) {
        return vec![common::session()];
    }
    let kinds = [BackendKind::Emulated, BackendKind::Gdrdrv, BackendKind::Rm, BackendKind::Vulkan];
    let opened = kinds.into_iter().filter_map(|kind| match Session::builder().backend(kind).open() {
        Ok(session) => {
            common::warn(kind);
            Some(session)
        }
        Err(error) => {
            eprintln!("SKIP {kind}: {error}");
            None
        }
    });
    opened.collect()
}

/// What one round of pin, map, unmap, unpin spends in each.
#[derive(Default)]
struct Round {
    pin: Duration,
    map: Duration,
    unmap: Duration,
    unpin: Duration,
}

impl Round {
    fn of(session: &Session, buffer: &DeviceBuffer) -> Self {
        let started = Instant::now();
        let pinned = session.pin(buffer).expect("a pin");
        let pin = started.elapsed();
        let started = Instant::now();
        let mapping = pinned.map().expect("a mapping");
        let map = started.elapsed();
        let started = Instant::now();
        mapping.unmap().expect("unmapped");
        let unmap = started.elapsed();
        let started = Instant::now();
        pinned.unpin().expect("unpinned");
        Self { pin, map, unmap, unpin: started.elapsed() }
    }
}

type Part = (&'static str, fn(&Round) -> Duration);

const PARTS: [Part; 4] = [
    ("pin", |round| round.pin),
    ("map", |round| round.map),
    ("unmap", |round| round.unmap),
    ("unpin", |round| round.unpin),
];

fn calls(c: &mut Criterion) {
    for session in sessions() {
        let mut group = c.benchmark_group(format!("time per call ({})", session.backend()));
        for bytes in SIZES {
            let buffer = match session.alloc(bytes) {
                Ok(buffer) => buffer,
                Err(error) => {
                    eprintln!("SKIP {bytes} B on {}: {error}", session.backend());
                    continue;
                }
            };
            for (name, part) in PARTS {
                group.bench_function(BenchmarkId::new(name, format!("{} KiB", bytes >> 10)), |b| {
                    b.iter_custom(|rounds| (0..rounds).map(|_| part(&Round::of(&session, &buffer))).sum());
                });
            }
        }
        group.finish();
    }
}

fn benches() {
    calls(&mut common::criterion());
}

criterion_main!(benches);
