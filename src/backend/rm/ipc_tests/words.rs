//! How a driver might lay out a memory handle.

use super::model::{Block, Rng, mix, pages};

/// What one of the 16 words holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Word {
    Pid,
    SizeLow,
    SizeHigh,
    Pages,
    Offset,
    Client,
    Object,
    // What may lie beside it, to mislead.
    Constant(u32),
    BlockNoise,
    ObjectNoise,
    /// The handle number after the object's.
    NextObject,
    /// The address, shifted right and cut to so many bits.
    Address(u32, u32),
    /// The size in units of so many bits.
    Units(u32),
    Ordinal,
}

use Word::{Client, Object, Offset, Pages, Pid, SizeHigh, SizeLow};

/// One word for each number.
pub(super) const MEANINGFUL: [Word; 7] = [Pid, SizeLow, SizeHigh, Pages, Offset, Client, Object];

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Wording {
    words: [Word; 16],
    /// Where each of `MEANINGFUL` lies, copies apart.
    at: [usize; 7],
}

/// What there is to write.
pub(super) struct Facts<'a> {
    pub(super) pid: u32,
    pub(super) block: &'a Block,
}

fn low(n: u64) -> u32 {
    u32::try_from(n & u64::from(u32::MAX)).unwrap()
}

impl Wording {
    fn new(words: [Word; 16], at: [usize; 7]) -> Self {
        assert!(at.iter().zip(MEANINGFUL).all(|(&at, word)| words[at] == word));
        Self { words, at }
    }

    /// As driver 580 has it, where known.
    pub(super) fn branch_580() -> Self {
        let constant = Word::Constant;
        let mut words = [constant(0); 16];
        words[0] = constant(0x0000_0001);
        words[1] = Word::BlockNoise;
        words[3] = constant(0x2330_10de);
        words[8] = Word::ObjectNoise;
        words[9] = constant(0x8c2f_00a7);
        words[10] = Word::Ordinal;
        words[14] = constant(0x0000_0080);
        let at = [2, 4, 5, 6, 7, 12, 13];
        at.iter().zip(MEANINGFUL).for_each(|(&at, word)| words[at] = word);
        Self::new(words, at)
    }

    /// The meaningful words anywhere, the size's halves side by side, and decoys between them.
    pub(super) fn permuted(rng: &mut Rng) -> Self {
        let mut words: [Word; 16] = std::array::from_fn(|_| match rng.below(16) {
            0 => Word::Constant(rng.word()),
            1 => Word::BlockNoise,
            2 => Word::ObjectNoise,
            3 => Word::NextObject,
            4 => Word::Address(0, 32),
            5 => Word::Address(u32::try_from(rng.below(36)).unwrap(), 32),
            6 => Word::Address(0, u32::try_from(9 + rng.below(23)).unwrap()),
            7 => Word::Units([0, 9, 12, 16, 21][rng.below(5)]),
            8 => Word::Ordinal,
            9 | 10 => *rng.pick(&MEANINGFUL),
            11 => Word::Constant(512),
            12 => SizeLow,
            _ => Word::Constant(0),
        });
        let size = rng.below(15);
        let mut free: Vec<usize> = (0..16).filter(|&at| at != size && at != size + 1).collect();
        let at = MEANINGFUL.map(|word| match word {
            SizeLow => size,
            SizeHigh => size + 1,
            _ => free.swap_remove(rng.below(free.len())),
        });
        at.iter().zip(MEANINGFUL).for_each(|(&at, word)| words[at] = word);
        Self::new(words, at)
    }

    pub(super) fn at(&self, word: Word) -> usize {
        self.at[MEANINGFUL.iter().position(|&known| known == word).expect("a meaningful word")]
    }

    /// Words that say nothing, not even again.
    pub(super) fn idle(&self) -> Vec<usize> {
        (0..16).filter(|&at| matches!(self.words[at], Word::Constant(_) | Word::BlockNoise)).collect()
    }

    /// Whether a handle says anything that the true one does not.
    pub(super) fn differs(&self, one: &[u32; 16], other: &[u32; 16]) -> bool {
        self.at.iter().any(|&at| one[at] != other[at])
    }

    pub(super) fn replace(mut self, at: usize, word: Word) -> Self {
        assert!(!self.at.contains(&at), "only decoys can be replaced");
        self.words[at] = word;
        self
    }

    /// A driver that does not state `word`.
    pub(super) fn without(mut self, word: Word) -> Self {
        self.words[self.at(word)] = Word::BlockNoise;
        self
    }

    pub(super) fn write(&self, facts: &Facts<'_>) -> [u32; 16] {
        let block = facts.block;
        let noise = |seed: u64, at: usize| low(mix(seed << 8 ^ u64::try_from(at).unwrap()) >> 7);
        std::array::from_fn(|at| match self.words[at] {
            Pid => facts.pid,
            SizeLow => low(block.bytes),
            SizeHigh => low(block.bytes >> 32),
            Pages => pages(block),
            Offset => low(block.offset),
            Client => block.name.0,
            Object => block.name.1,
            Word::Constant(word) => word,
            Word::BlockNoise => noise(block.id, at),
            Word::ObjectNoise => noise(block.memory.serial, at),
            Word::NextObject => block.name.1 + 1,
            Word::Address(shift, bits) => low(block.base >> shift & ((1 << bits) - 1)),
            Word::Units(bits) => low(block.bytes >> bits),
            Word::Ordinal => low(block.id),
        })
    }
}
