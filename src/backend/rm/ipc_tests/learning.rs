//! What can be learnt must be, and must be right; what cannot must be refused.

use super::super::learn;
use super::model::{CLIENT, Content, Model, PID, Rng};
use super::words::{MEANINGFUL, Word, Wording};
use super::{any_size, learnt, resolves, scratch};
use crate::error::ErrorKind;

fn refused(model: &Model, why: &str) {
    let error = learnt(model).expect_err(why);
    assert_eq!(error.kind(), ErrorKind::UnknownLayout);
    assert!(error.cause().contains(why), "{:?} does not say {why:?}", error.cause());
}

fn stock(content: Content) -> Model {
    Model::new(Wording::branch_580(), content)
}

/// Blocks come and go before the scratch blocks do.
fn worn(wording: Wording, rng: &mut Rng) -> Model {
    let model = Model::new(wording, *rng.pick(&[Content::Distinct, Content::Twins, Content::Zero]));
    let mut live: Vec<u64> = Vec::new();
    for _ in 0..rng.below(40) {
        live.push(model.alloc(any_size(rng)));
        if rng.below(3) == 0 {
            model.free(live.swap_remove(rng.below(live.len())));
        }
    }
    // Other clients, whose handles have the numbers of CUDA's.
    let mut state = model.state.borrow_mut();
    let names: Vec<_> = state.objects.iter().map(|(&name, &memory)| (name, memory)).collect();
    for ((_, handle), memory) in names {
        for client in [PID, CLIENT + 1, 1, 512] {
            state.named(client, handle, memory.bytes);
        }
    }
    drop(state);
    model
}

#[test]
fn driver_580_is_learnt() {
    for content in [Content::Distinct, Content::Twins, Content::Zero] {
        let model = stock(content);
        let layout = learnt(&model).unwrap();
        assert_eq!(
            [&layout.pid, &layout.size, &layout.pages, &layout.offset, &layout.client, &layout.object]
                .map(|f| &f.0[..]),
            [&[2][..], &[4], &[6], &[7], &[12], &[13]]
        );
        assert_eq!(layout.cuda, CLIENT);
        let mut rng = Rng(580);
        for _ in 0..200 {
            resolves(&model, &layout, model.alloc(any_size(&mut rng)));
        }
    }
}

#[test]
fn any_order_of_words_is_learnt() {
    let (mut known, mut apart_or_together) = (0, 0);
    for seed in 0..2500 {
        let mut rng = Rng(seed);
        let wording = Wording::permuted(&mut rng);
        let model = worn(wording, &mut rng);
        let samples = scratch(&model);
        let truth: Vec<_> = samples.iter().map(|sample| model.block(sample.base.raw()).memory).collect();
        let shared = truth.iter().enumerate().any(|(n, memory)| truth[n + 1..].contains(memory));
        if !shared {
            // Each in an object's gap of its own: nothing to learn from.
            assert_eq!(learn(&model, &samples).unwrap_err().kind(), ErrorKind::UnknownLayout);
            apart_or_together += 1;
            continue;
        }
        let layout = learn(&model, &samples).unwrap_or_else(|error| panic!("{error}: {:?}, {seed}", model.wording));
        for (field, word) in [
            (&layout.pid, Word::Pid),
            (&layout.size, Word::SizeLow),
            (&layout.pages, Word::Pages),
            (&layout.offset, Word::Offset),
            (&layout.client, Word::Client),
            (&layout.object, Word::Object),
        ] {
            assert!(field.0.contains(&model.wording.at(word)), "{word:?} of {:?} in {layout:?}", model.wording);
        }
        known += 1;
        for _ in 0..16 {
            resolves(&model, &layout, model.alloc(any_size(&mut rng)));
        }
    }
    println!("{known} layouts learnt, {apart_or_together} without shared scratch memory refused");
    assert!(known > 2000 && apart_or_together > 0);
}

/// Over a long life, in which every number is used again.
#[test]
fn true_handles_are_always_taken() {
    for content in [Content::Distinct, Content::Zero] {
        let model = stock(content);
        let layout = learnt(&model).unwrap();
        let mut rng = Rng(7);
        let mut live: Vec<u64> = Vec::new();
        for _ in 0..60_000 {
            match rng.below(8) {
                0..3 if live.len() < 300 => live.push(model.alloc(any_size(&mut rng))),
                // Whole objects change places at once now and then.
                3 if rng.below(50) == 0 => live.drain(..).for_each(|base| model.free(base)),
                3 | 4 if !live.is_empty() => model.free(live.swap_remove(rng.below(live.len()))),
                _ if !live.is_empty() => resolves(&model, &layout, *rng.pick(&live)),
                _ => {}
            }
        }
    }
}

#[test]
fn a_namespace_hides_the_process() {
    let mut model = stock(Content::Distinct);
    model.stated_pid = 7;
    refused(&model, "PID namespace");
}

#[test]
fn every_meaningful_word_is_needed() {
    let (placeless, nameless) = ("place in its object", "names an object");
    let whys = ["this process's id", "block's size", "block's size", placeless, placeless, nameless, nameless];
    for (word, why) in MEANINGFUL.into_iter().zip(whys) {
        refused(&Model::new(Wording::branch_580().without(word), Content::Distinct), why);
    }
}

#[test]
fn scratch_blocks_must_share_and_not_share() {
    let model = stock(Content::Distinct);
    let samples = scratch(&model);
    let big = samples.last().unwrap();
    let apart = [samples[0], *big];
    let together = &samples[..4];
    for some in [&apart[..], together, &samples[..1], &[]] {
        let error = learn(&model, some).expect_err("cannot be told apart");
        assert_eq!(error.kind(), ErrorKind::UnknownLayout);
        assert!(error.cause().contains("told apart"), "{error}");
    }
    learn(&model, &samples).unwrap();
}

#[test]
fn another_owner_of_the_memory_is_refused() {
    let mut model = stock(Content::Distinct);
    model.sharing_forbidden = true;
    refused(&model, "MPS");
}

#[test]
fn memory_that_does_not_show_is_refused() {
    let mut model = stock(Content::Distinct);
    model.window_blind = true;
    refused(&model, "shows the memory");
}

/// The same memory under two names: which one to take is nobody's to guess.
#[test]
fn two_names_for_the_memory_are_refused() {
    let other = CLIENT + 1;
    let model = Model::new(Wording::branch_580().replace(9, Word::Constant(other)), Content::Distinct);
    let samples = scratch(&model);
    learn(&model, &samples).unwrap();
    for sample in &samples {
        let block = model.block(sample.base.raw());
        model.state.borrow_mut().objects.insert((other, block.name.1), block.memory);
    }
    let error = learn(&model, &samples).expect_err("two names");
    assert!(error.cause().contains("two pairs"), "{error}");
}
