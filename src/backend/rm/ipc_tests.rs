//! Learning and securing against a driver that lies, fails and changes its mind.

#[path = "ipc_tests/checks.rs"]
mod checks;
#[path = "ipc_tests/hostile.rs"]
mod hostile;
#[path = "ipc_tests/learning.rs"]
mod learning;
#[path = "ipc_tests/model.rs"]
mod model;
#[path = "ipc_tests/races.rs"]
mod races;
#[path = "ipc_tests/words.rs"]
mod words;

use super::{Identity, Layout, World, learn};
use crate::error::Result;
use crate::range::GpuAddr;
use model::{Model, Rng};

/// The scratch blocks that the backend learns from.
fn scratch(model: &Model) -> Vec<Identity> {
    let sizes = super::super::prove::SCRATCH;
    let bases: Vec<u64> = sizes.iter().map(|&bytes| model.alloc(crate::sys::num::u64_of(bytes))).collect();
    bases.into_iter().map(|base| model.identity(GpuAddr::new(base)).unwrap()).collect()
}

fn learnt(model: &Model) -> Result<Layout> {
    learn(model, &scratch(model))
}

/// A size that shares an object, or one that does not; sometimes above 4 GiB.
fn any_size(rng: &mut Rng) -> u64 {
    let range: u64 = *rng.pick(&[600, 40_000, 300_000, 2_090_000, 20 << 20, 9 << 30]);
    1 + rng.next() % range
}

/// Secures `base` and checks that it is the block's own memory.
fn resolves(model: &Model, layout: &Layout, base: u64) {
    let truth = model.block(base);
    let secured = super::secure(model, layout, GpuAddr::new(base + truth.bytes / 2)).unwrap_or_else(|error| {
        panic!("{truth:?} refused: {error}, with {layout:?} for {:?}", model.wording);
    });
    assert_eq!((secured.object, secured.offset), (truth.memory, truth.offset), "{:?}", model.wording);
    assert_eq!((secured.block.base.raw(), secured.block.id), (truth.base, truth.id));
}
