//! What the figures amount to, in words: where BAR1 stops winning.

use crate::tool::flags::size_in_words;
use crate::tool::num::u64_of_f64;
use crate::tool::report::{Direction, Entry, Metric};

/// Reads of this size and more deserve a warning.
const LARGE_READ: u64 = 1 << 20;

/// For each direction a sentence on where `rival` overtakes `ours`, by typical time at the first offset measured.
pub(super) fn crossovers(results: &[Entry], ours: &str, rival: &str) -> Vec<String> {
    [Direction::HostToDevice, Direction::DeviceToHost]
        .into_iter()
        .filter_map(|direction| crossover(results, direction, ours, rival))
        .collect()
}

/// Size and both typical times, smallest size first.
type Pair = (u64, f64, f64);

fn crossover(results: &[Entry], direction: Direction, ours: &str, rival: &str) -> Option<String> {
    let first = results.iter().find(|entry| entry.direction == direction)?;
    // One metric for both: time over calls, or the median where single copies alone were timed.
    let metric = first.metric;
    let of = |method: &str| {
        let wanted = |entry: &&Entry| {
            entry.direction == direction
                && entry.method == method
                && entry.metric == metric
                && entry.offset == first.offset
        };
        results.iter().filter(wanted).map(|entry| (entry.bytes, entry.typical_ns())).collect::<Vec<_>>()
    };
    let rivals = of(rival);
    let mut pairs: Vec<Pair> = of(ours)
        .into_iter()
        .filter_map(|(bytes, ns)| rivals.iter().find(|(b, _)| *b == bytes).map(|&(_, rival_ns)| (bytes, ns, rival_ns)))
        .collect();
    pairs.sort_by_key(|&(bytes, ..)| bytes);
    let basis = match metric {
        Metric::Sustained => "back to back",
        Metric::Single => "median of single copies",
    };
    Some(format!("{}, {basis}: {}", direction.in_words(), sentence(&pairs)?))
}

fn sentence(pairs: &[Pair]) -> Option<String> {
    let (smallest, largest) = (pairs.first()?, pairs.last()?);
    // From here on the rival is ahead at every size.
    let lost = pairs.len() - pairs.iter().rev().take_while(|(_, ours, rival)| rival < ours).count();
    let at = |(bytes, ours, rival): &Pair| {
        format!("{}: {} against {} ns", size_in_words(*bytes), u64_of_f64(*ours), u64_of_f64(*rival))
    };
    let mixed = pairs[..lost].iter().any(|(_, ours, rival)| rival < ours);
    Some(match pairs.get(lost) {
        None if mixed => {
            format!("BAR1 and cuMemcpy take turns up to {}, where BAR1 is faster", size_in_words(largest.0))
        }
        None => format!("BAR1 is faster at every size measured, up to {} ({})", size_in_words(largest.0), at(largest)),
        Some(_) if lost == 0 => {
            format!("cuMemcpy is faster at every size measured, from {} ({})", size_in_words(smallest.0), at(smallest))
        }
        Some(won_by_rival) => {
            let last = &pairs[lost - 1];
            format!(
                "BAR1 is faster up to {}, cuMemcpy from {} ({})",
                at(last),
                size_in_words(won_by_rival.0),
                at(won_by_rival)
            )
        }
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
        "Reads through BAR1 wait for the bus once per few lines ({} took {} us): leave large ones to cuMemcpy.",
        size_in_words(slow.bytes),
        u64_of_f64(slow.typical_ns() / 1000.0)
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
                "Host to device, back to back: BAR1 is faster up to 2 KiB: 400 against 1100 ns, cuMemcpy from 4 KiB (4 KiB: 1600 against 1200 ns)"
            ]
        );
        // One size where the rival is ahead by chance is not yet a crossover.
        assert!(verdict(&[100, 1200, 800, 6400], &[1000, 1100, 1200, 1300])[0].contains("cuMemcpy from 8 KiB"));
    }

    #[test]
    fn one_sided_outcomes_say_so() {
        assert!(verdict(&[1, 2, 3], &[4, 5, 6])[0].contains("BAR1 is faster at every size measured, up to 4 KiB"));
        assert!(verdict(&[4, 5, 6], &[1, 2, 3])[0].contains("cuMemcpy is faster at every size measured, from 1 KiB"));
        assert!(verdict(&[1, 9, 3], &[4, 5, 6])[0].contains("take turns"));
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
        assert!(crossovers(&results, OURS, RIVAL)[0].starts_with("Device to host, back to back: cuMemcpy is faster"));
    }

    #[test]
    fn large_reads_get_advice() {
        let read = |bytes| entry(Direction::DeviceToHost, OURS, Metric::Sustained, bytes, 1_100_000);
        assert_eq!(advice(&[read(1 << 19)]), None);
        assert!(advice(&[read(1 << 21), read(1 << 20)]).unwrap().contains("(1 MiB took 1100 us)"));
        assert_eq!(advice(&[entry(Direction::HostToDevice, OURS, Metric::Sustained, 1 << 24, 1)]), None);
    }
}
