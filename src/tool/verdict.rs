//! What the figures amount to, in words: where BAR1 stops winning.

use std::collections::BTreeSet;

use super::flags::{Binary, size_in_words};
use super::method::{Bar1, CudaMemcpy};
use super::num::{f64_of, u64_of_f64};
use super::report::{Direction, Entry, Metric};

/// Reads of this size and more deserve a warning.
const LARGE_READ: u64 = 1 << 20;

/// For each rival and direction a sentence on where it overtakes BAR1 at the first offset measured, under a heading;
/// nothing if no size was measured by both.
#[must_use]
pub fn crossovers(results: &[Entry]) -> Vec<String> {
    let Some(first) = results.first() else { return Vec::new() };
    let basis = basis(first);
    let rivals = [(CudaMemcpy::PINNED, "page-locked"), (CudaMemcpy::PAGEABLE, "pageable")];
    let sentences: Vec<String> = rivals
        .into_iter()
        .flat_map(|(rival, memory)| {
            [Direction::HostToDevice, Direction::DeviceToHost].map(|direction| {
                let pairs = pairs(results, direction, first.offset, rival);
                Some(format!("  {}, {memory} memory: {}", direction.in_words(), sentence(&pairs)?))
            })
        })
        .flatten()
        .collect();
    if sentences.is_empty() {
        return sentences;
    }
    std::iter::once(format!("BAR1 against cuMemcpy on this machine ({basis}):")).chain(sentences).collect()
}

/// What a run's typical figures are, in words.
pub(super) fn basis(first: &Entry) -> &'static str {
    match first.metric {
        Metric::Sustained => "time per call, back to back",
        _ => "median of single copies; writes until drained",
    }
}

/// Size and both typical times.
pub(super) type Pair = (u64, f64, f64);

/// The one figure of a method at a size: back to back where that was measured; else a single write counts when it has
/// drained.
pub(super) fn typical(
    results: &[Entry],
    (direction, offset, bytes): (Direction, u64, u64),
    label: &str,
) -> Option<f64> {
    let mut entries = results.iter().filter(|entry| {
        (entry.direction, entry.offset, entry.bytes) == (direction, offset, bytes) && entry.label() == label
    });
    let first = entries.next()?;
    let entry = if first.metric == Metric::Sustained { first } else { entries.next_back().unwrap_or(first) };
    Some(entry.figures.typical_ns())
}

/// All sizes, smallest first.
pub(super) fn sizes(results: &[Entry]) -> Vec<u64> {
    let sizes: BTreeSet<u64> = results.iter().map(|entry| entry.bytes).collect();
    sizes.into_iter().collect()
}

/// What both measured, smallest size first.
fn pairs(results: &[Entry], direction: Direction, offset: u64, rival: &str) -> Vec<Pair> {
    let of = |method: &str, bytes: u64| typical(results, (direction, offset, bytes), method);
    let sizes = sizes(results).into_iter();
    sizes.filter_map(|bytes| Some((bytes, of(Bar1::NAME, bytes)?, of(rival, bytes)?))).collect()
}

fn sentence(pairs: &[Pair]) -> Option<String> {
    let (smallest, largest) = (pairs.first()?, pairs.last()?);
    // From here on the rival is ahead at every size.
    let lost = pairs.len() - pairs.iter().rev().take_while(|(_, ours, rival)| rival < ours).count();
    let at = |(bytes, ours, rival): &Pair| {
        format!("{} {} vs {} ns", size_in_words(*bytes), u64_of_f64(*ours), u64_of_f64(*rival))
    };
    let is_mixed = pairs[..lost].iter().any(|(_, ours, rival)| rival < ours);
    Some(match pairs.get(lost) {
        None if is_mixed => format!("both win in turn; BAR1 at the largest size ({})", at(largest)),
        None => format!("BAR1 wins at every size ({})", at(largest)),
        Some(_) if lost == 0 => format!("cuMemcpy wins at every size ({})", at(smallest)),
        Some(beaten) => {
            let won = &pairs[lost - 1];
            let size = approximate(crossing(*won, *beaten));
            format!("BAR1 wins up to about {size} (measured: {}, {})", at(won), at(beaten))
        }
    })
}

/// The size at which both would take as long, on straight lines between the two sizes measured. It lies between them:
/// the first is won, the second lost.
pub(super) fn crossing(won: Pair, lost: Pair) -> f64 {
    let (lead, deficit) = ((won.2 - won.1).max(0.0), lost.1 - lost.2);
    let (from, to) = (f64_of(won.0), f64_of(lost.0));
    from + (to - from) * lead / (lead + deficit)
}

/// Two or three digits: `7.4 KiB`, `190 KiB`, `12 B`.
pub(super) fn approximate(bytes: f64) -> String {
    let (value, unit) = match bytes {
        b if b < 1024.0 => (b, "B"),
        b if b < 1024.0 * 1024.0 => (b / 1024.0, "KiB"),
        b => (b / (1024.0 * 1024.0), "MiB"),
    };
    match value {
        value if unit == "B" || value >= 10.0 => format!("{} {unit}", Binary(u64_of_f64(value))),
        value => format!("{value:.1} {unit}"),
    }
}

/// Advice on large reads through BAR1 from a real GPU.
#[must_use]
pub fn advice(results: &[Entry]) -> Option<String> {
    let slow = results
        .iter()
        .filter(|entry| {
            entry.direction == Direction::DeviceToHost && entry.method == Bar1::NAME && entry.bytes >= LARGE_READ
        })
        .min_by_key(|entry| entry.bytes)?;
    Some(format!(
        "Reads through BAR1 wait for the bus every few lines ({} took {} ns): leave large ones to cuMemcpy.",
        size_in_words(slow.bytes),
        u64_of_f64(slow.figures.typical_ns())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::report::tests::entry;

    fn verdict(ours: &[u64], rival: &[u64]) -> Vec<String> {
        let mut results = vec![];
        for (method, times) in [(Bar1::NAME, ours), (CudaMemcpy::PINNED, rival)] {
            for (n, &ns) in times.iter().enumerate() {
                results.push(entry(Direction::HostToDevice, method, Metric::Sustained, 1024 << n, ns));
            }
        }
        crossovers(&results)
    }

    #[test]
    fn the_crossover_is_where_the_rival_stays_ahead() {
        assert_eq!(
            verdict(&[100, 400, 1600, 6400], &[1000, 1100, 1200, 1300]),
            [
                "BAR1 against cuMemcpy on this machine (time per call, back to back):",
                "  Host to device, page-locked memory: BAR1 wins up to about 3.3 KiB \
                 (measured: 2 KiB 400 vs 1100 ns, 4 KiB 1600 vs 1200 ns)"
            ]
        );
        // One size where the rival is ahead by chance is not yet a crossover.
        assert!(verdict(&[100, 1200, 800, 6400], &[1000, 1100, 1200, 1300])[1].contains("8 KiB 6400 vs 1300 ns"));
    }

    #[test]
    fn one_sided_outcomes_say_so() {
        assert!(verdict(&[1, 2, 3], &[4, 5, 6])[1].ends_with("BAR1 wins at every size (4 KiB 3 vs 6 ns)"));
        assert!(verdict(&[4, 5, 6], &[1, 2, 3])[1].ends_with("cuMemcpy wins at every size (1 KiB 4 vs 1 ns)"));
        assert!(verdict(&[1, 9, 3], &[4, 5, 6])[1].contains("in turn"));
    }

    #[test]
    fn nothing_to_compare_is_no_verdict() {
        assert!(verdict(&[1, 2], &[]).is_empty());
        assert!(verdict(&[], &[]).is_empty());
    }

    #[test]
    fn both_rivals_get_a_sentence_for_each_direction() {
        let mut results = vec![];
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            for method in [Bar1::NAME, CudaMemcpy::PINNED, CudaMemcpy::PAGEABLE] {
                results.push(entry(direction, method, Metric::Sustained, 64, 100));
            }
        }
        let lines = crossovers(&results);
        assert_eq!(lines.len(), 5);
        assert_eq!(lines.iter().filter(|line| line.contains("Device to host")).count(), 2);
        assert_eq!(lines.iter().filter(|line| line.contains("pageable memory")).count(), 2);
    }

    #[test]
    fn like_is_compared_with_like() {
        let read = |method, metric, ns| entry(Direction::DeviceToHost, method, metric, 64, ns);
        let mut results = vec![
            read(Bar1::NAME, Metric::Sustained, 100),
            read(Bar1::NAME, Metric::Single, 9000),
            read(CudaMemcpy::PINNED, Metric::Sustained, 1),
            read(CudaMemcpy::PINNED, Metric::Single, 1),
        ];
        assert!(crossovers(&results)[1].contains("cuMemcpy wins at every size (64 B 100 vs 1 ns)"));
        results[2].offset = 1;
        results[3].offset = 1;
        assert!(crossovers(&results).is_empty());
        // Cold copies have no sustained figure: a write counts when it has drained.
        let write = |method, metric, ns| entry(Direction::HostToDevice, method, metric, 64, ns);
        let cold = [
            write(Bar1::NAME, Metric::Issue, 10),
            write(Bar1::NAME, Metric::Drained, 100),
            write(CudaMemcpy::PINNED, Metric::Single, 50),
        ];
        assert!(crossovers(&cold)[1].contains("cuMemcpy wins at every size (64 B 100 vs 50 ns)"));
    }

    #[test]
    fn a_crossing_lies_between_the_sizes_measured() {
        for (won, lost) in [((64, 1.0, 9.0), (128, 9.0, 1.0)), ((64, 5.0, 5.0), (128, 9.0, 1.0))] {
            let size = crossing(won, lost);
            assert!((64.0..128.0).contains(&size), "{size}");
        }
        assert_eq!(crossing((4096, 4000.0, 7400.0), (8192, 8000.0, 7500.0)), 4096.0 + 4096.0 * 3400.0 / 3900.0);
        assert_eq!(approximate(7666.0), "7.5 KiB");
        assert_eq!(approximate(194_560.0), "190 KiB");
        assert_eq!(approximate(12.4), "12 B");
        assert_eq!(approximate(3.5 * 1024.0 * 1024.0), "3.5 MiB");
    }

    #[test]
    fn large_reads_get_advice() {
        let read = |bytes| entry(Direction::DeviceToHost, Bar1::NAME, Metric::Sustained, bytes, 1_100_000);
        assert_eq!(advice(&[read(1 << 19)]), None);
        assert!(advice(&[read(1 << 21), read(1 << 20)]).unwrap().contains("(1 MiB took 1100000 ns)"));
        assert_eq!(advice(&[entry(Direction::HostToDevice, Bar1::NAME, Metric::Sustained, 1 << 24, 1)]), None);
    }
}
