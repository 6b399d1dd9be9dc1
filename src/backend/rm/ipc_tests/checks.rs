//! Each check by itself, and by the name its refusal gives it.

use super::super::super::atlas::{Atlas, OBJECTS, Place, Witness};
use super::super::{Layout, secure};
use super::model::{Content, Model, PID, Rng};
use super::words::{Facts, Word, Wording};
use super::{learnt, resolves, scratch};
use crate::error::{ErrorKind, MemoryKind};
use crate::range::GpuAddr;

/// Driver 580 with a second copy of every number.
fn doubled() -> Wording {
    let copies = [(0, Word::Pid), (8, Word::SizeLow), (9, Word::SizeHigh), (10, Word::Pages), (11, Word::Offset)];
    let copies = copies.into_iter().chain([(14, Word::Client), (15, Word::Object)]);
    copies.fold(Wording::branch_580(), |wording, (at, word)| wording.replace(at, word))
}

fn refusal(model: &Model, layout: &Layout, base: u64, change: impl FnOnce(&mut [u32; 16])) -> String {
    let mut words = model.words(&model.block(base));
    change(&mut words);
    model.lies.borrow_mut().insert(base, words);
    let error = secure(model, layout, GpuAddr::new(base)).expect_err("a lie");
    model.lies.borrow_mut().clear();
    assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Foreign), "{error}");
    resolves(model, layout, base);
    error.cause().to_owned()
}

#[test]
fn every_check_speaks_for_itself() {
    let model = Model::new(Wording::branch_580(), Content::Distinct);
    let layout = learnt(&model).unwrap();
    let (small, big) = (model.alloc(5000), model.alloc(6 << 20));
    let other = model.block(model.alloc(6 << 20)).name.1;
    let says = |base: u64, why: &str, change: fn(&mut [u32; 16])| {
        let cause = refusal(&model, &layout, base, change);
        assert!(cause.contains(why), "{cause:?} does not say {why:?}");
    };
    says(small, "another process", |words| words[2] += 1);
    says(small, "another size", |words| words[4] -= 1);
    says(small, "another size", |words| words[5] += 1);
    says(small, "another client", |words| words[12] += 1);
    says(small, "states another object", |words| words[6] -= 1);
    says(big, "states another object", |words| words[6] += 512);
    says(small, "does not fit", |words| words[7] += 2 << 20);
    says(big, "does not fit", |words| words[7] += 2 << 20);
    says(small, "does not fit", |words| words[7] -= 512);
    says(small, "does not fit", |words| words[7] -= 4096);
    // What was secured before would speak up first.
    let larger = model.block(model.alloc(8 << 20)).name.1;
    let stranger = model.alloc(6 << 20);
    let cause = refusal(&model, &layout, stranger, |words| words[13] = larger);
    assert!(cause.contains("of another size than CUDA states"), "{cause}");
    let stranger = model.alloc(6 << 20);
    let cause = refusal(&model, &layout, stranger, |words| words[13] = other);
    assert!(cause.contains("the allocation's bytes"), "{cause}");
}

/// A number that is stated twice must be the same twice.
#[test]
fn copies_must_agree() {
    let model = Model::new(doubled(), Content::Distinct);
    let layout = learnt(&model).unwrap();
    let base = model.alloc(5000);
    resolves(&model, &layout, base);
    let whys = ["another process", "another size", "states another object", "contradicts", "contradicts"];
    for (at, why) in [0, 8, 10, 14, 15].into_iter().zip(whys) {
        let cause = refusal(&model, &layout, base, |words| words[at] ^= 1);
        assert!(cause.contains(why), "{cause:?} does not say {why:?} for word {at}");
    }
}

/// Nothing but words that behave like an object's number is tried as one.
#[test]
fn few_names_are_tried() {
    let model = Model::new(Wording::branch_580(), Content::Distinct);
    let samples = scratch(&model);
    model.steps.set(0);
    super::super::learn(&model, &samples).unwrap();
    // Six words are the same on every block, three (the pages too) differ as objects do; the first failure of a pair is its last.
    assert_eq!(model.steps.get(), 6 * 3 - 1 + samples.len());
}

/// No bytes to tell by, and a scratch block's object: learning has met it.
#[test]
fn scratch_memory_is_known() {
    let model = Model::new(Wording::branch_580(), Content::Zero);
    let samples = scratch(&model);
    let layout = super::super::learn(&model, &samples).unwrap();
    let theirs = model.block(samples[4].base.raw());
    let base = model.alloc(theirs.bytes);
    let cause = refusal(&model, &layout, base, |words| words[13] = theirs.name.1);
    assert!(cause.contains("another allocation shows"), "{cause}");
}

/// One freed block does not take what the others of its object showed with it.
#[test]
fn any_living_witness_will_do() {
    let model = Model::new(Wording::branch_580(), Content::Zero);
    let layout = learnt(&model).unwrap();
    while model.block(model.alloc((2 << 20) - 512)).offset != 0 {}
    let shared: Vec<u64> = (0..5).map(|_| model.alloc(9000)).collect();
    let object = model.block(shared[0]).name.1;
    shared.iter().for_each(|&base| resolves(&model, &layout, base));
    let victim = model.alloc(2 << 20);
    for &base in shared[1..].iter().rev() {
        model.free(base);
        let cause = refusal_of_unknown(&model, &layout, victim, object);
        assert!(cause.contains("another allocation shows"), "{cause}");
    }
}

fn refusal_of_unknown(model: &Model, layout: &Layout, victim: u64, object: u32) -> String {
    let mut words = model.words(&model.block(victim));
    words[13] = object;
    model.lies.borrow_mut().insert(victim, words);
    secure(model, layout, GpuAddr::new(victim)).expect_err("a lie").cause().to_owned()
}

#[test]
fn the_atlas_stays_small() {
    let mut atlas = Atlas::default();
    let place = |n: u32| Place { name: (1, n), start: u64::from(n) << 21, bytes: 2 << 20 };
    let witness = |n: u32| Witness { base: GpuAddr::new(u64::from(n) << 21), id: u64::from(n) };
    let full = u32::try_from(OBJECTS).unwrap();
    let elsewhere = |n: u32| Place { start: 1 << 40, ..place(n) };
    for n in 0..full {
        atlas.record(place(n), witness(n));
    }
    atlas.record(place(0), witness(0));
    atlas.record(place(full), witness(full));
    // The one not seen for longest is gone, and all others are there.
    assert_eq!(atlas.against(&elsewhere(1)), []);
    assert!((0..=full).filter(|&n| n != 1).all(|n| atlas.against(&elsewhere(n)) == [witness(n)]));
}

/// A block whose handle is laid out in another way is no block of the layout learnt.
#[test]
fn blocks_of_another_layout_are_refused() {
    let model = Model::new(Wording::branch_580(), Content::Distinct);
    let layout = learnt(&model).unwrap();
    let base = model.alloc(5000);
    let words = Wording::permuted(&mut Rng(1)).write(&Facts { pid: PID, block: &model.block(base) });
    refusal(&model, &layout, base, |told| *told = words);
}
