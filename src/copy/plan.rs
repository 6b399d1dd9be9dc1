//! How a range of device memory splits into 64-byte lines and naturally aligned pieces.
//!
//! Pure arithmetic on addresses, the same for both directions: stores and loads share one plan, so that head and tail
//! handling exists once.

/// Bytes of a line: the unit of a write-combining buffer, of a fill buffer, and of the largest packet a store makes.
pub(crate) const LINE_BYTES: usize = 64;

/// A device range as a partial line, whole lines, and a partial line.
///
/// A range that lies inside one line without filling it is all head, or all tail when it starts on a line boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// Bytes in front of the first line boundary, 0 to 63.
    pub(super) head_bytes: usize,
    /// Whole lines.
    pub(super) lines: usize,
    /// Bytes behind the last whole line, 0 to 63.
    pub(super) tail_bytes: usize,
}

impl Plan {
    /// The plan for `len` bytes at device address `addr`.
    #[inline(always)]
    pub(super) const fn new(addr: usize, len: usize) -> Self {
        let to_boundary = addr.wrapping_neg() % LINE_BYTES;
        let head_bytes = if to_boundary < len { to_boundary } else { len };
        let rest = len - head_bytes;
        Self { head_bytes, lines: rest / LINE_BYTES, tail_bytes: rest % LINE_BYTES }
    }
}

/// Calls `piece(offset, size)` for the naturally aligned pieces that make up `len` bytes at device address `addr`, in
/// ascending order and as few as there can be. Sizes are powers of two up to `MAX`.
///
/// Every size that `piece` sees is a constant once the loops are unrolled, so a `match` on it costs nothing.
#[inline(always)]
pub(super) fn for_each_piece<const MAX: usize>(addr: usize, len: usize, mut piece: impl FnMut(usize, usize)) {
    const SIZES: [usize; 4] = [1, 2, 4, 8];
    const { assert!(MAX == 8 || MAX == 16) };
    let mut at = 0;
    // Up to an address that is a multiple of MAX. A size that no longer fits rules out all larger ones.
    for size in SIZES {
        if size < MAX && addr.wrapping_add(at) & size != 0 && len - at >= size {
            piece(at, size);
            at += size;
        }
    }
    while len - at >= MAX {
        piece(at, MAX);
        at += MAX;
    }
    for size in SIZES.into_iter().rev() {
        if size < MAX && (len - at) & size != 0 {
            piece(at, size);
            at += size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_covers_the_range_and_its_lines_are_aligned() {
        for addr in 0..2 * LINE_BYTES {
            for len in 0..6 * LINE_BYTES {
                let plan = Plan::new(addr, len);
                assert_eq!(plan.head_bytes + plan.lines * LINE_BYTES + plan.tail_bytes, len, "{addr} {len} {plan:?}");
                assert!(plan.head_bytes < LINE_BYTES && plan.tail_bytes < LINE_BYTES, "{addr} {len} {plan:?}");
                if plan.lines > 0 || plan.tail_bytes > 0 {
                    assert_eq!((addr + plan.head_bytes) % LINE_BYTES, 0, "{addr} {len} {plan:?}");
                }
                if plan.head_bytes > 0 {
                    assert!(addr % LINE_BYTES + plan.head_bytes <= LINE_BYTES, "{addr} {len} {plan:?}");
                }
            }
        }
    }

    #[test]
    fn a_plan_at_the_top_of_the_address_space_does_not_overflow() {
        let plan = Plan::new(usize::MAX - 9, 10);
        assert_eq!(plan, Plan { head_bytes: 10, lines: 0, tail_bytes: 0 });
    }

    /// Fewest aligned pieces by exhaustive search: `best[n]` for the last `n` bytes of the range.
    fn fewest(addr: usize, len: usize, max: usize) -> usize {
        let mut best = vec![0];
        for left in 1..=len {
            let here = addr + len - left;
            let fits = |size: &usize| *size <= left && here.is_multiple_of(*size);
            let sizes = [1, 2, 4, 8, 16].into_iter().filter(|size| *size <= max).filter(fits);
            best.push(1 + sizes.map(|size| best[left - size]).min().expect("one byte always fits"));
        }
        best[len]
    }

    fn check_pieces<const MAX: usize>() {
        for addr in 64..128 {
            for len in 0..130 {
                let (mut next, mut count) = (0, 0);
                for_each_piece::<MAX>(addr, len, |at, size| {
                    assert_eq!(at, next, "gap or overlap: {addr} {len}");
                    assert!(
                        size.is_power_of_two() && size <= MAX && (addr + at).is_multiple_of(size),
                        "{addr} {len} {at} {size}"
                    );
                    next += size;
                    count += 1;
                });
                assert_eq!(next, len, "{addr} {len}");
                assert_eq!(count, fewest(addr, len, MAX), "{addr} {len}");
            }
        }
    }

    #[test]
    fn pieces_are_aligned_contiguous_and_as_few_as_possible() {
        check_pieces::<8>();
        check_pieces::<16>();
    }
}
