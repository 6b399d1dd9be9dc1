//! Handles that lie about one block, the same lie each time they are asked for.

use std::collections::BTreeMap;

use super::super::{Atlas, Layout, secure};
use super::model::{Block, CLIENT, Content, Model, PID, Rng};
use super::words::{Facts, Word, Wording};
use super::{learnt, resolves};
use crate::error::ErrorKind;
use crate::range::GpuAddr;
use crate::sys::num::u64_of;

type Words = [u32; 16];

/// What was secured before the lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    Nothing,
    /// Every live block but the victim.
    Others,
    Everything,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Lie {
    BitFlips,
    SwappedWords,
    RandomWords,
    OtherBlock,
    /// Client and object of another live block.
    OtherObject,
    /// Client, object, pages of another live block, and an offset that fits the victim's address.
    FittingObject,
    /// Everything but the size of another live block.
    OtherPlace,
    FreedBlock,
    FreedObject,
    /// What the handle said before free and allocation at the same address.
    Replay,
    ReplayedObject,
    /// As it is, and with our pid.
    OtherProcess,
    /// The same handle number of another client.
    OtherClient,
    TwinSameObject,
    TwinOtherObject,
    ShiftedOffset,
    /// Size and pages, or pages and offset, changed together.
    Consistent,
    /// Only words that mean nothing.
    Idle,
}

use Lie::{
    BitFlips, Consistent, FittingObject, FreedBlock, FreedObject, Idle, OtherBlock, OtherClient, OtherObject,
    OtherPlace, OtherProcess, RandomWords, Replay, ReplayedObject, ShiftedOffset, SwappedWords, TwinOtherObject,
    TwinSameObject,
};

const LIES: [Lie; 18] = [
    BitFlips,
    SwappedWords,
    RandomWords,
    OtherBlock,
    OtherObject,
    FittingObject,
    OtherPlace,
    FreedBlock,
    FreedObject,
    Replay,
    ReplayedObject,
    OtherProcess,
    OtherClient,
    TwinSameObject,
    TwinOtherObject,
    ShiftedOffset,
    Consistent,
    Idle,
];

struct Scene {
    model: Model,
    layout: Layout,
    scratch: Vec<Block>,
    live: Vec<Block>,
    /// What handles of dead blocks said.
    freed: Vec<Words>,
    /// What handles said of blocks that were at a live block's address before.
    earlier: BTreeMap<u64, Words>,
    foreign: Vec<Words>,
}

const MIB: u64 = 1 << 20;
const SIZES: [u64; 12] =
    [100, 4096, 4096, 4096, 70_000, 70_000, MIB, 3 * MIB, 3 * MIB, 2 * MIB + 1, 2 * MIB + 1, 64 * MIB];

impl Scene {
    fn new(wording: Wording, content: Content) -> Self {
        let model = Model::new(wording, content);
        let layout = learnt(&model).unwrap();
        let scratch = model.state.borrow().blocks.values().copied().collect();
        let mut rng = Rng(99);
        let sizes: Vec<u64> = SIZES.iter().copied().cycle().take(60).collect();
        // A first generation, whose addresses and numbers the second gets, the other way round.
        let first: Vec<u64> = sizes.iter().map(|&bytes| model.alloc(bytes)).collect();
        let said = |base: u64| (base, model.words(&model.block(base)));
        let past: Vec<(u64, Words)> = first.iter().map(|&base| said(base)).collect();
        first.iter().for_each(|&base| model.free(base));
        let bases: Vec<u64> = sizes.iter().rev().map(|&bytes| model.alloc(bytes)).collect();
        let mut freed: Vec<Words> = past.iter().map(|(_, words)| *words).collect();
        for _ in 0..20 {
            let base = model.alloc(*rng.pick(&SIZES));
            freed.push(said(base).1);
            model.free(base);
        }
        let live: Vec<Block> = bases.iter().map(|&base| model.block(base)).collect();
        let earlier = past.into_iter().filter(|(base, _)| live.iter().any(|block| block.base == *base)).collect();
        // The objects of other clients, one of them of this process, under the numbers that CUDA's client uses.
        let mut foreign = Vec::new();
        for block in &live {
            for client in [CLIENT + 1, CLIENT + 2] {
                let mut state = model.state.borrow_mut();
                let name = (client, block.name.1);
                let known = state.objects.get(&name).copied();
                let memory = known.unwrap_or_else(|| state.named(client, block.name.1, block.memory.bytes));
                let block = Block { name, memory, ..*block };
                foreign.push(model.wording.write(&Facts { pid: PID + 1, block: &block }));
            }
        }
        Self { model, layout, scratch, live, freed, earlier, foreign }
    }

    fn set(&self, words: &mut Words, from: &Words, what: &[Word]) {
        for word in what {
            let at = self.model.wording.at(*word);
            words[at] = from[at];
        }
    }

    fn tell(&self, lie: Lie, victim: &Block, rng: &mut Rng) -> Words {
        let at = |word| self.model.wording.at(word);
        let mut words = self.model.words(victim);
        let other = rng.pick(&self.live);
        let theirs = self.model.words(other);
        let twins = |same: bool| {
            let twins = self.live.iter().filter(|block| block.bytes == victim.bytes && block.base != victim.base);
            let twins: Vec<_> = twins.filter(|block| (block.memory == victim.memory) == same).collect();
            (!twins.is_empty()).then(|| self.model.words(twins[rng.clone().below(twins.len())]))
        };
        let name = [Word::Client, Word::Object];
        match lie {
            BitFlips => (0..=rng.below(3)).for_each(|_| words[rng.below(16)] ^= 1 << rng.below(32)),
            SwappedWords => (0..=rng.below(2)).for_each(|_| words.swap(rng.below(16), rng.below(16))),
            RandomWords => {
                for _ in 0..=rng.below(4) {
                    let near = rng.pick(&theirs).wrapping_add(rng.word() % 5).wrapping_sub(2);
                    words[rng.below(16)] = *rng.pick(&[rng.clone().word(), rng.clone().word() % 4096, near]);
                    rng.next();
                }
            }
            OtherBlock => words = theirs,
            OtherObject => self.set(&mut words, &theirs, &name),
            FittingObject => {
                self.set(&mut words, &theirs, &[Word::Client, Word::Object, Word::Pages]);
                let frames = other.memory.bytes / (2 * MIB);
                let shift = u32::try_from(rng.next() % frames * 2 * MIB).unwrap();
                words[at(Word::Offset)] = words[at(Word::Offset)].wrapping_add(shift);
            }
            OtherPlace => self.set(&mut words, &theirs, &[Word::Client, Word::Object, Word::Pages, Word::Offset]),
            FreedBlock => words = *rng.pick(&self.freed),
            FreedObject => self.set(&mut words, rng.pick(&self.freed), &name),
            Replay => words = *self.earlier.get(&victim.base).unwrap_or(&words),
            ReplayedObject => {
                if let Some(earlier) = self.earlier.get(&victim.base) {
                    self.set(&mut words, earlier, &[Word::Client, Word::Object, Word::Pages, Word::Offset]);
                }
            }
            OtherProcess => {
                words = *rng.pick(&self.foreign);
                if rng.below(2) == 0 {
                    words[at(Word::Pid)] = PID;
                }
            }
            OtherClient => words[at(Word::Client)] = *rng.pick(&[CLIENT + 1, CLIENT + 2]),
            TwinSameObject => words = twins(true).unwrap_or(words),
            TwinOtherObject => words = twins(false).unwrap_or(words),
            ShiftedOffset => {
                let unit = *rng.pick(&[512, 4096, 2 << 20]);
                let by = (rng.word() % 64).wrapping_sub(32).wrapping_mul(unit);
                words[at(Word::Offset)] = words[at(Word::Offset)].wrapping_add(by);
            }
            Consistent => {
                let frames = rng.word() % 3 + 1;
                words[at(Word::Pages)] = words[at(Word::Pages)].wrapping_add(frames * 512);
                let moved = *rng.pick(&[Word::Offset, Word::SizeLow]);
                words[at(moved)] = words[at(moved)].wrapping_add(frames << 21);
            }
            Idle => self.model.wording.idle().into_iter().for_each(|at| words[at] = rng.word()),
        }
        words
    }

    /// What is known when only so much was secured.
    fn knowing(&self, known: Known, victim: &Block) -> Atlas {
        *self.layout.atlas.lock().unwrap() = Atlas::default();
        for block in self.scratch.iter().chain(&self.live) {
            if known == Known::Everything || known == Known::Others && block.base != victim.base {
                resolves(&self.model, &self.layout, block.base);
            }
        }
        self.layout.atlas.lock().unwrap().clone()
    }
}

#[derive(Default)]
struct Tally {
    truth: u64,
    /// Leads to the victim's own memory, and says nothing else that has a meaning.
    harmless: u64,
    wrong: u64,
    /// Wrong as well, and an object of another client than CUDA's.
    strange: u64,
    /// Right memory in spite of a lie that should have been noticed.
    unnoticed: u64,
    refused: BTreeMap<String, u64>,
}

/// Tells `count` lies and counts what became of them, by kind.
fn run(wording: Wording, content: Content, known: Known, count: usize) -> BTreeMap<Lie, Tally> {
    let scene = Scene::new(wording, content);
    let mut rng = Rng(u64_of(count) ^ 0xb1ab);
    let mut tallies: BTreeMap<Lie, Tally> = BTreeMap::new();
    let rounds = count.div_ceil(500);
    for round in 0..rounds {
        let victim = scene.live[round % scene.live.len()];
        let knowledge = scene.knowing(known, &victim);
        let truth = scene.model.words(&victim);
        for n in 0..500 {
            let lie = LIES[n % LIES.len()];
            let words = scene.tell(lie, &victim, &mut rng);
            scene.model.lies.borrow_mut().insert(victim.base, words);
            let tally = tallies.entry(lie).or_default();
            match secure(&scene.model, &scene.layout, GpuAddr::new(victim.base)) {
                Ok(secured) => {
                    if (secured.object, secured.offset) != (victim.memory, victim.offset) {
                        let own = words[scene.model.wording.at(Word::Client)] == CLIENT;
                        *(if own { &mut tally.wrong } else { &mut tally.strange }) += 1;
                    } else if words == truth {
                        tally.truth += 1;
                    } else if scene.model.wording.differs(&words, &truth) {
                        tally.unnoticed += 1;
                    } else {
                        tally.harmless += 1;
                    }
                    // The victim is known from now on, and should not be.
                    scene.layout.atlas.lock().unwrap().clone_from(&knowledge);
                }
                Err(error) => {
                    assert_ne!(words, truth, "the truth was refused: {error}");
                    assert_ne!(error.kind(), ErrorKind::Stale, "nothing changed: {error}");
                    let cause = error.cause().replace("the memory handle", "..");
                    *tally.refused.entry(cause).or_default() += 1;
                }
            }
        }
        scene.model.lies.borrow_mut().clear();
        // Whatever was told, the truth is still taken.
        resolves(&scene.model, &scene.layout, victim.base);
    }
    tallies
}

/// What may pass for the victim's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Beyond {
    Nothing,
    /// Any object of CUDA's, of the right size.
    Unseen,
}

fn judge(tallies: &BTreeMap<Lie, Tally>, beyond: Beyond) {
    assert_eq!(tallies.len(), LIES.len());
    for (lie, tally) in tallies {
        let &Tally { harmless, wrong, strange, unnoticed, .. } = tally;
        assert_eq!(unnoticed, 0, "{lie:?}");
        assert!(wrong == 0 || beyond == Beyond::Unseen, "{lie:?}: {wrong} wrong");
        assert_eq!(strange, 0, "{lie:?}: objects of other clients");
        let refused: u64 = tally.refused.values().sum();
        let told = if *lie == Idle { refused == 0 && harmless > 0 } else { refused + wrong + strange > 0 };
        assert!(told, "{lie:?}: {refused} refused, {harmless} harmless");
    }
}

fn stock(content: Content, known: Known, count: usize) -> BTreeMap<Lie, Tally> {
    let tallies = run(Wording::branch_580(), content, known, count);
    println!("\n{content:?} bytes, {known:?} known, {count} handles:");
    for (lie, tally) in &tallies {
        let Tally { truth, harmless, wrong, strange, unnoticed, .. } = tally;
        println!("  {lie:?}: {truth} true, {harmless} harmless, {unnoticed} unnoticed, {wrong}+{strange} WRONG");
        tally.refused.iter().for_each(|(cause, count)| println!("    {count:>7}  {cause}"));
    }
    tallies
}

/// The bytes alone tell the rest, the first time any handle is seen.
#[test]
fn distinct_bytes_give_every_lie_away() {
    judge(&stock(Content::Distinct, Known::Nothing, 1_000_000), Beyond::Nothing);
}

/// No bytes to tell by, but the process has met the blocks that the lies are made of.
#[test]
fn known_blocks_give_lies_about_uniform_bytes_away() {
    judge(&stock(Content::Zero, Known::Everything, 1_000_000), Beyond::Nothing);
    judge(&stock(Content::Twins, Known::Everything, 100_000), Beyond::Nothing);
    // The victim's own place is new, all others are not.
    judge(&stock(Content::Zero, Known::Others, 200_000), Beyond::Nothing);
    judge(&stock(Content::Twins, Known::Others, 100_000), Beyond::Nothing);
}

/// What is left: the number of another object of CUDA's own that was never seen, of the same size, with the same bytes.
#[test]
fn offsets_and_sizes_are_held_to_even_among_strangers() {
    for content in [Content::Zero, Content::Twins] {
        let tallies = stock(content, Known::Nothing, 100_000);
        judge(&tallies, Beyond::Unseen);
        for lie in [TwinSameObject, ShiftedOffset, Consistent, Idle] {
            assert_eq!(tallies[&lie].wrong + tallies[&lie].strange, 0, "{lie:?}");
        }
    }
}

/// Copies of words, and words that look like others, make no hole.
#[test]
fn other_layouts_are_no_weaker() {
    for seed in 0..24 {
        let wording = Wording::permuted(&mut Rng(seed));
        for (content, known) in [(Content::Distinct, Known::Nothing), (Content::Zero, Known::Everything)] {
            let tallies = run(wording.clone(), content, known, 6_000);
            assert!(tallies.values().all(|tally| tally.wrong + tally.strange == 0), "{wording:?}");
        }
    }
}
