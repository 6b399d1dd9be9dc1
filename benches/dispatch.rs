//! What a call costs beside the stores that it makes: nanoseconds per call of each verb and of bare volatile stores.
//!
//! On the emulated backend this is the overhead alone, since the memory is the processor's own; one thing to know there:
//! a whole line is stored past the caches (that is right for a device), so compare it with the bare non-temporal line.
//! Instructions per call are counted by `cargo xtask instructions`.

#![allow(unsafe_code, reason = "bare stores into the window, to compare with")]

mod common;

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
use std::hint::black_box;

use criterion::{BenchmarkGroup, Criterion, criterion_main, measurement::WallTime};
use gdrcopy::copy::fence;
use gdrcopy::{Mapping, Result};

/// Bytes of the window; calls go round its lines, as messages go round a ring.
const BYTES: usize = 4096;

/// Times one call, at the next line of the window each time.
fn each_line(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut call: impl FnMut(usize) -> Result<()>) {
    let mut offset = 0;
    group.bench_function(name, |b| {
        b.iter(|| {
            offset = (offset + 64) % BYTES;
            call(black_box(offset)).expect("inside the mapping");
        });
    });
}

/// Stores one line with four non-temporal stores, as a program without this library would.
fn bare_line_non_temporal(at: *mut u8, from: &[u8; 64]) {
    for quarter in [0, 16, 32, 48] {
        let src: *const __m128i = from.as_ptr().wrapping_add(quarter).cast();
        // SAFETY: 16 bytes of the 64.
        let value = unsafe { _mm_loadu_si128(src) };
        // SAFETY: the caller's line is 64-byte aligned and mapped.
        unsafe { _mm_stream_si128(at.wrapping_add(quarter).cast(), value) };
    }
}

fn stores(c: &mut Criterion) {
    let target = common::map(&common::session(), BYTES);
    let mapping: &Mapping<'_> = &target.mapping;
    let base = mapping.as_ptr();
    let from = black_box([0x5a_u8; 64]);
    let line = &from;
    let eight: &[u8; 8] = line.first_chunk().expect("64 bytes");
    let word = u64::from_ne_bytes(*eight);

    let mut group = c.benchmark_group(format!("posted store, ns per call ({})", target.name));
    each_line(&mut group, "8 B bare volatile store", |offset| {
        // SAFETY: the window has this line.
        unsafe { base.wrapping_add(offset).cast::<u64>().write_volatile(black_box(word)) };
        Ok(())
    });
    each_line(&mut group, "8 B store_u64_posted", |offset| mapping.store_u64_posted(offset, black_box(word)));
    each_line(&mut group, "8 B write_value_posted", |offset| mapping.write_value_posted(offset, black_box(eight)));
    each_line(&mut group, "8 B write_posted", |offset| mapping.write_posted(offset, black_box(&line[..8])));
    each_line(&mut group, "24 B write_value_posted", |offset| {
        mapping.write_value_posted(offset, black_box(line).first_chunk::<24>().expect("64 bytes"))
    });
    each_line(&mut group, "48 B write_value_posted", |offset| {
        mapping.write_value_posted(offset, black_box(line).first_chunk::<48>().expect("64 bytes"))
    });
    each_line(&mut group, "64 B bare volatile store", |offset| {
        // SAFETY: the window has this line.
        unsafe { base.wrapping_add(offset).cast::<[u8; 64]>().write_volatile(*black_box(line)) };
        Ok(())
    });
    each_line(&mut group, "64 B bare non-temporal store", |offset| {
        bare_line_non_temporal(base.wrapping_add(offset), black_box(line));
        Ok(())
    });
    each_line(&mut group, "64 B post_line", |offset| mapping.post_line(offset, black_box(line)));
    each_line(&mut group, "64 B write_value_posted", |offset| mapping.write_value_posted(offset, black_box(line)));
    each_line(&mut group, "64 B write_posted", |offset| mapping.write_posted(offset, black_box(&line[..])));
    group.finish();

    let mut group = c.benchmark_group(format!("store and SFENCE, ns per call ({})", target.name));
    each_line(&mut group, "8 B bare volatile store", |offset| {
        // SAFETY: the window has this line.
        unsafe { base.wrapping_add(offset).cast::<u64>().write_volatile(black_box(word)) };
        fence::store();
        Ok(())
    });
    each_line(&mut group, "8 B store_u64", |offset| mapping.store_u64(offset, black_box(word)));
    each_line(&mut group, "8 B write_value", |offset| mapping.write_value(offset, black_box(eight)));
    each_line(&mut group, "8 B write", |offset| mapping.write(offset, black_box(&line[..8])));
    each_line(&mut group, "64 B bare non-temporal store", |offset| {
        bare_line_non_temporal(base.wrapping_add(offset), black_box(line));
        fence::store();
        Ok(())
    });
    each_line(&mut group, "64 B write_value", |offset| mapping.write_value(offset, black_box(line)));
    each_line(&mut group, "64 B write", |offset| mapping.write(offset, black_box(&line[..])));
    group.finish();
}

fn benches() {
    stores(&mut common::criterion());
}

criterion_main!(benches);
