//! Test data: every position and every seed gives different bytes, so that a lost, doubled, shifted or stale byte shows.

/// Fills `bytes` with the pattern of `seed`. Two seeds agree in about one byte of 256.
pub fn fill(bytes: &mut [u8], seed: u64) {
    let mut word = seed;
    for chunk in bytes.chunks_mut(8) {
        word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
        chunk.copy_from_slice(&mix(word).to_le_bytes()[..chunk.len()]);
    }
}

/// Fills `bytes` with the complement of `of`: different in every single byte.
///
/// # Panics
///
/// If the lengths differ.
pub fn fill_complement(bytes: &mut [u8], of: &[u8]) {
    assert_eq!(bytes.len(), of.len(), "a complement is as long as its original");
    bytes.iter_mut().zip(of).for_each(|(byte, of)| *byte = !of);
}

/// Where two buffers first differ: the position, what was there and what should have been.
#[must_use]
pub fn first_difference(got: &[u8], want: &[u8]) -> Option<(usize, u8, u8)> {
    if got == want {
        return None;
    }
    got.iter().zip(want).position(|(a, b)| a != b).map(|at| (at, got[at], want[at]))
}

/// The finaliser of SplitMix64: a bijection, so that no two positions of one pattern repeat a word.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(len: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fill(&mut bytes, seed);
        bytes
    }

    #[test]
    fn a_longer_pattern_begins_with_the_shorter() {
        assert_eq!(pattern(100, 7)[..13], pattern(13, 7)[..]);
    }

    #[test]
    fn seeds_and_shifts_show() {
        let (a, b) = (pattern(4096, 1), pattern(4096, 2));
        let alike = |x: &[u8], y: &[u8]| x.iter().zip(y).filter(|(x, y)| x == y).count();
        assert!(alike(&a, &b) < 64);
        for shift in [1, 4, 8, 64] {
            assert!(alike(&a[shift..], &a) < 64, "shift {shift}");
        }
    }

    #[test]
    fn a_complement_shares_no_byte() {
        let a = pattern(1000, 3);
        let mut b = vec![0; 1000];
        fill_complement(&mut b, &a);
        assert!(a.iter().zip(&b).all(|(a, b)| a != b));
    }

    #[test]
    fn the_first_difference_is_found() {
        let a = pattern(300, 5);
        let mut b = a.clone();
        assert_eq!(first_difference(&a, &b), None);
        b[299] ^= 1;
        b[17] ^= 0x80;
        assert_eq!(first_difference(&b, &a), Some((17, a[17] ^ 0x80, a[17])));
    }
}
