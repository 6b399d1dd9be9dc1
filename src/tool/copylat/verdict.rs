//! What the figures amount to, in words: where BAR1 stops winning.

use crate::tool::flags::size_in_words;
use crate::tool::num::u64_of_f64;
use crate::tool::report::{Direction, Entry, Metric};

/// Reads of this size and more deserve a warning.
const LARGE_READ: u64 = 1 << 20;

/// For each direction a sentence on where `rival` overtakes `ours`, by typical time at the first offset measured, under
/// a heading; nothing if no size was measured by both.
pub(super) fn crossovers(results: &[Entry], ours: &str, rival: &str) -> Vec<String> {
    let Some(first) = results.first() else { return Vec::new() };
    let basis = match first.metric {
        Metric::Sustained => "time per call, back to back",
        _ => "median of single copies",
    };
    let sentences: Vec<_> = [Direction::HostToDevice, Direction::DeviceToHost]
        .into_iter()
        .filter_map(|direction| crossover(results, direction, first, ours, rival))
        .collect();
    if sentences.is_empty() {
        return sentences;
    }
    std::iter::once(format!("BAR1 against cuMemcpy ({basis}):")).chain(sentences).collect()
}

/// Size and both typical times, smallest size first.
type Pair = (u64, f64, f64);

fn crossover(results: &[Entry], direction: Direction, first: &Entry, ours: &str, rival: &str) -> Option<String> {
    // One metric and one offset for both: those of the first row.
    let of = |method: &str| {
        let wanted = |entry: &&Entry| {
            entry.direction == direction
                && entry.method == method
                && entry.metric == first.metric
                && entry.offset == first.offset
        };
        results.iter().filter(wanted).map(|entry| (entry.bytes, entry.figures.typical_ns())).collect::<Vec<_>>()
    };
    let rivals = of(rival);
    let mut pairs: Vec<Pair> = of(ours)
        .into_iter()
        .filter_map(|(bytes, ns)| rivals.iter().find(|(b, _)| *b == bytes).map(|&(_, rival_ns)| (bytes, ns, rival_ns)))
        .collect();
    pairs.sort_by_key(|&(bytes, ..)| bytes);
    Some(format!("{}: {}", direction.in_words(), sentence(&pairs)?))
}

fn sentence(pairs: &[Pair]) -> Option<String> {
    let (smallest, largest) = (pairs.first()?, pairs.last()?);
    // From here on the rival is ahead at every size.
    let lost = pairs.len() - pairs.iter().rev().take_while(|(_, ours, rival)| rival < ours).count();
    let at = |(bytes, ours, rival): &Pair| {
        format!("{} ({} vs {} ns)", size_in_words(*bytes), u64_of_f64(*ours), u64_of_f64(*rival))
    };
    let is_mixed = pairs[..lost].iter().any(|(_, ours, rival)| rival < ours);
    Some(match pairs.get(lost) {
        None if is_mixed => format!("both win in turn; BAR1 at the largest size, {}", at(largest)),
        None => format!("BAR1 wins at every size, up to {}", at(largest)),
        Some(_) if lost == 0 => format!("cuMemcpy wins at every size, from {}", at(smallest)),
        Some(beaten) => format!("BAR1 wins up to {}, cuMemcpy from {}", at(&pairs[lost - 1]), at(beaten)),
    })
}

/// Advice on large reads through BAR1 from a real GPU.
pub(super) fn advice(results: &[Entry]) -> Option<String> {
    let slow = results
        .iter()
        .filter(|entry| {
            entry.direction == Direction::DeviceToHost && entry.method == "bar1" && entry.bytes >= LARGE_READ
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

    const OURS: &str = "bar1";
    const RIVAL: &str = "cuda_memcpy_pinned";

    fn verdict(ours: &[u64], rival: &[u64]) -> Vec<String> {
        let mut results = vec![];
        for (method, times) in [(OURS, ours), (RIVAL, rival)] {
            for (n, &ns) in times.iter().enumerate() {
                results.push(entry(Direction::HostToDevice, method, Metric::Sustained, 1024 << n, ns));
            }
        }
        crossovers(&results, OURS, RIVAL)
    }

    #[test]
    fn the_crossover_is_where_the_rival_stays_ahead() {
        assert_eq!(
            verdict(&[100, 400, 1600, 6400], &[1000, 1100, 1200, 1300]),
            [
                "BAR1 against cuMemcpy (time per call, back to back):",
                "Host to device: BAR1 wins up to 2 KiB (400 vs 1100 ns), cuMemcpy from 4 KiB (1600 vs 1200 ns)"
            ]
        );
        // One size where the rival is ahead by chance is not yet a crossover.
        assert!(verdict(&[100, 1200, 800, 6400], &[1000, 1100, 1200, 1300])[1].contains("cuMemcpy from 8 KiB"));
    }

    #[test]
    fn one_sided_outcomes_say_so() {
        assert!(verdict(&[1, 2, 3], &[4, 5, 6])[1].ends_with("BAR1 wins at every size, up to 4 KiB (3 vs 6 ns)"));
        assert!(verdict(&[4, 5, 6], &[1, 2, 3])[1].ends_with("cuMemcpy wins at every size, from 1 KiB (4 vs 1 ns)"));
        assert!(verdict(&[1, 9, 3], &[4, 5, 6])[1].contains("in turn"));
    }

    #[test]
    fn nothing_to_compare_is_no_verdict() {
        assert!(verdict(&[1, 2], &[]).is_empty());
        assert!(verdict(&[], &[]).is_empty());
    }

    #[test]
    fn only_the_same_metric_and_offset_are_compared() {
        let mut results = vec![
            entry(Direction::DeviceToHost, OURS, Metric::Sustained, 64, 100),
            entry(Direction::DeviceToHost, OURS, Metric::Single, 64, 9000),
            entry(Direction::DeviceToHost, RIVAL, Metric::Single, 64, 1),
            entry(Direction::DeviceToHost, RIVAL, Metric::Sustained, 64, 1),
        ];
        results[3].offset = 1;
        assert!(crossovers(&results, OURS, RIVAL).is_empty());
        results[3].offset = 0;
        assert!(crossovers(&results, OURS, RIVAL)[1].starts_with("Device to host: cuMemcpy wins"));
    }

    #[test]
    fn large_reads_get_advice() {
        let read = |bytes| entry(Direction::DeviceToHost, OURS, Metric::Sustained, bytes, 1_100_000);
        assert_eq!(advice(&[read(1 << 19)]), None);
        assert!(advice(&[read(1 << 21), read(1 << 20)]).unwrap().contains("(1 MiB took 1100000 ns)"));
        assert_eq!(advice(&[entry(Direction::HostToDevice, OURS, Metric::Sustained, 1 << 24, 1)]), None);
    }
}
