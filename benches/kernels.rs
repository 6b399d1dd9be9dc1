//! Every copy routine of this processor by size and misalignment, in both directions.
//!
//! Both directions are timed to their end: stores are followed by `SFENCE`, loads are between `MFENCE` and `LFENCE`, as
//! `Mapping::write` and `Mapping::read` do it. An offset is the device's in its 64-byte line; the host side is aligned.

#![allow(unsafe_code, reason = "routines copy by pointer")]

mod common;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_main};
use gdrcopy::copy::{self, fence};

/// The largest copy and an offset.
const BYTES: usize = (64 << 10) + 4096;

const SIZES: [usize; 8] = [4, 64, 100, 256, 1024, 4096, 16 << 10, 64 << 10];
const OFFSETS: [usize; 3] = [0, 4, 61];

fn routines(c: &mut Criterion) {
    let target = common::map(&common::session(), BYTES);
    let base = target.mapping.as_ptr();
    let from = common::Pages([0x5a; BYTES]);
    let mut to = common::Pages([0; BYTES]);
    for size in SIZES {
        let bytes = Throughput::Bytes(u64::try_from(size).expect("small"));
        let backend = target.name.split(',').next().unwrap_or_default();
        let available = || copy::routines().iter().filter(|routine| routine.is_available());

        let mut group = c.benchmark_group(format!("store {size} B ({backend})"));
        group.throughput(bytes.clone());
        for (routine, offset) in available().flat_map(|&routine| OFFSETS.map(|offset| (routine, offset))) {
            let (at, from) = (base.wrapping_add(offset), &from.0[..size]);
            group.bench_function(BenchmarkId::new(routine.name(), format!("offset {offset}")), |b| {
                b.iter(|| {
                    // SAFETY: the routine is available and the window has these bytes.
                    unsafe { routine.store(black_box(at), black_box(from)) };
                    fence::store();
                });
            });
        }
        group.finish();

        let mut group = c.benchmark_group(format!("load {size} B ({backend})"));
        group.throughput(bytes);
        for (routine, offset) in available().flat_map(|&routine| OFFSETS.map(|offset| (routine, offset))) {
            let (at, to) = (base.wrapping_add(offset), &mut to.0[..size]);
            group.bench_function(BenchmarkId::new(routine.name(), format!("offset {offset}")), |b| {
                b.iter(|| {
                    fence::full();
                    // SAFETY: the routine is available and the window, which is whole pages, has these bytes.
                    unsafe { routine.load(black_box(&mut *to), black_box(at)) };
                    fence::load();
                });
            });
        }
        group.finish();
    }
}

fn benches() {
    routines(&mut common::criterion());
}

criterion_main!(benches);
