//! What fences cost: nanoseconds per message with a fence for each, for 16, and for none.
//!
//! Sustained, so what is measured is the rate at which messages leave, fence included. `SFENCE` lets the caller go on and
//! holds up a later store, which is why a single call timed by itself would tell less.

mod common;

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_main};

const BYTES: usize = 64 << 10;
/// Messages in one iteration; what criterion prints per element is one message.
const MESSAGES: usize = 64;

fn per_fence(c: &mut Criterion) {
    let target = common::map(&common::session(), BYTES);
    let mapping = &target.mapping;
    let from = common::Pages([0x5a; 4096]);
    for size in [8, 64, 256, 1024, 4096] {
        let mut group = c.benchmark_group(format!("{MESSAGES} messages of {size} B ({})", target.name));
        group.throughput(Throughput::Elements(u64::try_from(MESSAGES).expect("few")));
        let message = black_box(&from.0[..size]);
        let slot = size.next_multiple_of(64);
        let at = |index: usize| index * slot % BYTES;
        group.bench_function("a fence per message", |b| {
            b.iter(|| (0..MESSAGES).try_for_each(|index| mapping.write(at(index), message)).expect("inside"));
        });
        group.bench_function("a fence per 16 messages", |b| {
            b.iter(|| {
                for first in (0..MESSAGES).step_by(16) {
                    let sent = mapping
                        .batch(|batch| (first..first + 16).try_for_each(|index| batch.write(at(index), message)));
                    sent.expect("inside");
                }
            });
        });
        group.bench_function("no fence", |b| {
            b.iter(|| (0..MESSAGES).try_for_each(|index| mapping.write_posted(at(index), message)).expect("inside"));
        });
        if size == 64 {
            let line = message.first_chunk().expect("64 bytes");
            group.bench_function("no fence, post_line", |b| {
                b.iter(|| (0..MESSAGES).try_for_each(|index| mapping.post_line(at(index), line)).expect("inside"));
            });
        }
        group.finish();
    }
}

fn benches() {
    per_fence(&mut common::criterion());
}

criterion_main!(benches);
