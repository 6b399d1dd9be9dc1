//! Another thread frees and allocates between any two calls of the driver.

use super::super::{Secured, learn, secure};
use super::model::{Content, Memory, Model, State};
use super::words::Wording;
use super::{resolves, scratch};
use crate::error::{ErrorKind, MemoryKind, Result};
use crate::range::GpuAddr;

const MIB: u64 = 1 << 20;
/// As many calls as two attempts and the readings around them make.
const STEPS: usize = 24;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Act {
    Free,
    /// The same size again: the same address, and the same handle number.
    Again,
    /// The handle number goes to a block elsewhere; the address gets another object.
    Stolen,
    /// The address becomes the inside of a larger block.
    Swallowed,
    /// The address's block becomes smaller, and what follows is another block.
    Shrunk,
}

use Act::{Again, Free, Shrunk, Stolen, Swallowed};

const ACTS: [Act; 5] = [Free, Again, Stolen, Swallowed, Shrunk];

/// Does nothing where the address leads to no block any more.
fn act(state: &mut State, act: Act, addr: u64) {
    let Some(block) = state.block(addr) else { return };
    state.free(block.base);
    match act {
        Free => {}
        Again => {
            state.alloc(block.bytes);
        }
        Stolen => {
            let thief = state.alloc_elsewhere(block.memory.bytes);
            assert!(thief != block.base);
            state.alloc(block.bytes);
        }
        Swallowed => {
            state.free_before(block.base);
            state.alloc(block.bytes + 40_000);
        }
        Shrunk => {
            state.alloc(block.bytes / 3);
            state.alloc(block.bytes / 2);
        }
    }
}

struct Scene {
    model: Model,
    layout: super::super::Layout,
    victim: u64,
}

impl Scene {
    /// A victim of `bytes`, with neighbours or alone in its object.
    fn new(content: Content, bytes: u64, neighbours: bool, known: bool) -> Self {
        let model = Model::new(Wording::branch_580(), content);
        let layout = learn(&model, &scratch(&model)).unwrap();
        // Fills the objects that the scratch blocks left room in.
        while model.block(model.alloc(2 * MIB - 512)).offset != 0 {}
        let before = neighbours.then(|| model.alloc(9000));
        let victim = model.alloc(bytes);
        let after = neighbours.then(|| model.alloc(bytes));
        if known {
            before.into_iter().chain([victim]).chain(after).for_each(|base| resolves(&model, &layout, base));
        }
        Self { model, layout, victim }
    }

    fn secure(&self) -> Result<Secured<Memory>> {
        self.model.steps.set(0);
        secure(&self.model, &self.layout, GpuAddr::new(self.victim + 64))
    }

    /// Whether memory was had; panics if it is not what the address leads to.
    fn run(&self, events: &[(usize, Act)]) -> bool {
        let addr = self.victim + 64;
        let wanted = events.iter().map(|&(step, what)| {
            let event: super::model::Event = Box::new(move |state: &mut State| act(state, what, addr));
            (step, event)
        });
        *self.model.events.borrow_mut() = wanted.collect();
        let result = self.secure();
        let now = self.model.state.borrow().block(addr);
        match result {
            Ok(secured) => {
                let now = now.unwrap_or_else(|| panic!("{events:?}: memory that is gone"));
                assert_eq!((secured.object, secured.offset), (now.memory, now.offset), "{events:?}");
                assert_eq!((secured.block.base.raw(), secured.block.id), (now.base, now.id), "{events:?}");
                assert_eq!(secured.block.bytes, now.bytes, "{events:?}");
                true
            }
            Err(error) if error.kind() == ErrorKind::UnsupportedMemory(MemoryKind::Unallocated) => {
                assert!(now.is_none() && events[0].0 < 2, "{events:?}: {error}");
                false
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Stale, "{events:?}: {error}");
                false
            }
        }
    }
}

fn scenes() -> impl Iterator<Item = impl Fn() -> Scene> {
    let contents = [Content::Distinct, Content::Zero];
    let victims = [(5000, true), (300_000, false), (3 * MIB, false)];
    contents.into_iter().flat_map(move |content| {
        victims.into_iter().flat_map(move |(bytes, neighbours)| {
            [false, true].map(|known| move || Scene::new(content, bytes, neighbours, known))
        })
    })
}

/// One change is survived: what is there afterwards is what one gets.
#[test]
fn one_change_between_any_two_calls() {
    for scene in scenes() {
        let calm = scene();
        assert!(calm.run(&[]));
        let calls = calm.model.steps.get();
        assert!(2 * calls <= STEPS, "{calls} calls");
        for step in 0..calls {
            for what in ACTS {
                let scene = scene();
                let had = scene.run(&[(step, what)]);
                let there = scene.model.state.borrow().block(scene.victim + 64).is_some();
                assert_eq!(had, there, "{what:?} before call {step}");
                assert!(there || !matches!(what, Again | Stolen));
            }
        }
    }
}

#[test]
fn two_changes_between_any_calls() {
    let (mut had, mut refused) = (0, 0);
    for scene in scenes() {
        for first in 0..STEPS {
            for second in first..STEPS {
                for (one, other) in ACTS.into_iter().flat_map(|one| ACTS.map(|other| (one, other))) {
                    let done = scene().run(&[(first, one), (second, other)]);
                    *(if done { &mut had } else { &mut refused }) += 1;
                }
            }
        }
    }
    println!("{had} secured, {refused} refused");
    assert!(had > 0 && refused > 0);
}

/// The address, the object's number and everything the handle says are the same again; only the id tells.
#[test]
fn everything_but_the_id_comes_back() {
    let scene = Scene::new(Content::Zero, 3 * MIB, false, false);
    let addr = scene.victim;
    let before = scene.model.block(addr);
    let away: super::model::Event = Box::new(move |state| {
        state.free(addr);
        // The number, while the address is free, is somebody else's.
        let thief = state.alloc_elsewhere(before.memory.bytes);
        assert_eq!(state.block(thief).unwrap().name, before.name);
    });
    let back: super::model::Event = Box::new(move |state| {
        let thief = *state.blocks.iter().find(|(_, block)| block.name == before.name).unwrap().0;
        state.free(thief);
        state.take_back(addr, before.bytes);
        assert_eq!(state.block(addr).unwrap().name, before.name);
    });
    // Away before the object is duplicated, back before the identity is read again.
    *scene.model.events.borrow_mut() = vec![(2, away), (3, back)];
    let secured = scene.secure().unwrap();
    assert_eq!(secured.object, scene.model.block(addr).memory);
}
