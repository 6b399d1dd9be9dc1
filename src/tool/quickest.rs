//! Several methods side by side: their times in one table, and which of them is the quickest up to which size.

use crate::copy::largest_alone;
use crate::policy::are_shared;
use crate::sys::num::u64_of;

use super::flags::{Binary, size_in_words};
use super::method::{Agent, AgentPinned, Auto, Bar1, CudaMemcpy, Parallel, Posted};
use super::num::f64_of;
use super::report::{Direction, Entry, Metric};
use super::table::nanoseconds;
use super::verdict::{approximate, basis, crossing, sizes, typical};

/// Of methods that are no further behind the best, the plainest counts as the quickest.
const TIE: f64 = 1.05;

/// Columns of a line of text.
const WIDTH: usize = 100;

/// A method's times, size by size.
#[derive(Debug)]
struct Column {
    label: String,
    /// Two lines above the column, of nine characters at most.
    titles: [String; 2],
    times: Vec<Option<f64>>,
    /// The fewer, the plainer.
    threads: Option<usize>,
}

/// The quickest at a size.
#[derive(Debug, Clone, Copy)]
struct Winner {
    row: usize,
    column: usize,
    time: f64,
}

/// What is compared in one direction, at the first offset measured.
#[derive(Debug)]
struct Contest {
    direction: Direction,
    sizes: Vec<u64>,
    columns: Vec<Column>,
}

/// Whether methods other than BAR1 by one thread and `cuMemcpy` were measured, of which [`super::verdict`] speaks.
#[must_use]
pub fn is_due(results: &[Entry]) -> bool {
    let known = [Bar1::NAME, Posted::NAME, CudaMemcpy::PINNED, CudaMemcpy::PAGEABLE];
    results.iter().any(|entry| !known.contains(&entry.method))
}

impl Contest {
    fn new(results: &[Entry], direction: Direction) -> Self {
        let (sizes, offset) = (sizes(results), results.first().map_or(0, |entry| entry.offset));
        let mut columns: Vec<Column> = Vec::new();
        // Posted writes promise less than the others do.
        for entry in results.iter().filter(|entry| entry.direction == direction && entry.method != Posted::NAME) {
            let label = entry.label();
            if columns.iter().all(|column| column.label != label) {
                let times = sizes.iter().map(|&bytes| typical(results, (direction, offset, bytes), &label)).collect();
                columns.push(Column { label, titles: titles(entry), times, threads: entry.threads });
            }
        }
        Self { direction, sizes, columns }
    }

    /// The time of a column, unless it only repeats `bar1`: a copy that is not shared among threads is made by one of them,
    /// by the same code.
    fn time(&self, column: &Column, row: usize) -> Option<f64> {
        let size = usize::try_from(self.sizes[row]).unwrap_or(usize::MAX);
        let is_bar1 = column.threads.is_some() && !are_shared(self.direction, size);
        let has_bar1 = || self.columns.iter().any(|other| other.label == Bar1::NAME && other.times[row].is_some());
        if is_bar1 && has_bar1() { None } else { column.times[row] }
    }

    /// Of those that `may` take part, the plainest of the quickest at one size.
    fn winner(&self, row: usize, may: impl Fn(&str) -> bool) -> Option<Winner> {
        let columns = || self.columns.iter().enumerate().filter(|(_, column)| may(&column.label));
        let times = columns().filter_map(|(column, of)| Some(Winner { row, column, time: self.time(of, row)? }));
        let best = times.clone().map(|winner| winner.time).min_by(f64::total_cmp)?;
        times.filter(|winner| winner.time <= best * TIE).min_by_key(|winner| rank(&self.columns[winner.column]))
    }

    fn winners(&self, may: impl Fn(&str) -> bool) -> Vec<Winner> {
        (0..self.sizes.len()).filter_map(|row| self.winner(row, &may)).collect()
    }

    /// Up to where one remains the quickest that another follows in the next row.
    fn end(&self, won: Winner, lost: Winner) -> f64 {
        let of = |winner: Winner, at: Winner| self.columns[winner.column].times[at.row].unwrap_or(at.time);
        let (from, to) = (self.sizes[won.row], self.sizes[lost.row]);
        // A plainer one takes over before it is ahead.
        let at = match (of(won, lost), lost.time) {
            (before, after) if before <= after => f64_of(from),
            (before, after) => crossing((from, won.time, of(lost, won)), (to, before, after)),
        };
        // As much as one thread copies is never the other's.
        let alone = self.columns[lost.column].threads.map_or(0, |_| largest_alone(self.direction));
        at.max(f64_of(u64_of(alone).min(to)))
    }

    /// `bar1 up to 2.1 KiB, agent up to 510 KiB, cuMemcpy beyond`.
    fn in_words(&self, may: impl Fn(&str) -> bool) -> Option<String> {
        let winners = self.winners(may);
        let mut parts = Vec::new();
        for pair in winners.windows(2) {
            let &[won, lost] = pair else { continue };
            if won.column != lost.column {
                parts.push(format!("{} up to {}", self.name(won.column), approximate(self.end(won, lost))));
            }
        }
        let last = winners.last()?;
        let scope = if parts.is_empty() { "at every size" } else { "beyond" };
        parts.push(format!("{} {scope}", self.name(last.column)));
        Some(parts.join(", "))
    }

    fn name(&self, column: usize) -> &str {
        let label = self.columns[column].label.as_str();
        if is_cuda(label) { "cuMemcpy" } else { label }
    }

    /// How far `auto` is behind the quickest that it could have used, at worst.
    fn auto_in_words(&self) -> Option<String> {
        let auto = self.columns.iter().find(|column| column.label == Auto::NAME)?;
        let behind = (0..self.sizes.len()).filter_map(|row| {
            let others = self.columns.iter().filter(|column| from_any_memory(&column.label));
            let least = others.filter_map(|column| self.time(column, row)).min_by(f64::total_cmp)?;
            Some((row, auto.times[row]? / least.max(0.1)))
        });
        let (row, ratio) = behind.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let size = size_in_words(self.sizes[row]);
        Some(match ratio {
            ratio if ratio <= 1.0 => "as quick as the quickest at every size".to_owned(),
            ratio => format!("at worst {:.1} % behind the quickest, at {size}", 100.0 * (ratio - 1.0)),
        })
    }

    fn table(&self) -> Vec<String> {
        let line = |size: &str, fields: &[String], last: &str| {
            let fields: String = fields.iter().map(|text| format!(" {text:>9}")).collect();
            format!("{size:>6}{fields}  {last}").trim_end().to_owned()
        };
        let all = |text: fn(&Column) -> String| self.columns.iter().map(text).collect::<Vec<_>>();
        let mut lines = vec![
            line("", &all(|column| column.titles[0].clone()), ""),
            line("size", &all(|column| column.titles[1].clone()), "quickest"),
            line("[B]", &all(|_| "[ns]".to_owned()), ""),
        ];
        for (row, &bytes) in self.sizes.iter().enumerate() {
            let times = self.columns.iter().map(|column| column.times[row]);
            let fields: Vec<_> = times.map(|time| time.map_or_else(|| "-".to_owned(), nanoseconds)).collect();
            let best = self.winner(row, |label| label != Auto::NAME);
            let best = best.map_or("-", |winner| &self.columns[winner.column].label);
            lines.push(line(&Binary(bytes).to_string(), &fields, &best.replace("memcpy_", "")));
        }
        lines
    }
}

fn titles(entry: &Entry) -> [String; 2] {
    let [name, kind] = match (entry.method, entry.threads) {
        (method, Some(threads)) => return [method.to_owned(), format!("{threads} thr.")],
        (AgentPinned::NAME, _) => [Agent::NAME, "pinned"],
        (CudaMemcpy::PINNED, _) => ["cuMemcpy", "pinned"],
        (CudaMemcpy::PAGEABLE, _) => ["cuMemcpy", "pageable"],
        (method, _) => [method, ""],
    };
    [name, kind].map(str::to_owned)
}

/// The less, the plainer.
fn rank(column: &Column) -> (usize, usize) {
    let order = [Bar1::NAME, Parallel::NAME, Agent::NAME, AgentPinned::NAME, CudaMemcpy::PAGEABLE, CudaMemcpy::PINNED];
    let name = column.threads.map_or(column.label.as_str(), |_| Parallel::NAME);
    let place = order.iter().position(|&plain| plain == name);
    (place.unwrap_or(order.len()), column.threads.unwrap_or(0))
}

fn is_cuda(label: &str) -> bool {
    [CudaMemcpy::PINNED, CudaMemcpy::PAGEABLE].contains(&label)
}

/// What a program with ordinary host memory can use.
fn from_any_memory(label: &str) -> bool {
    ![AgentPinned::NAME, CudaMemcpy::PINNED, Auto::NAME].contains(&label)
}

/// What a program with page-locked host memory can use.
fn from_page_locked(label: &str) -> bool {
    ![CudaMemcpy::PAGEABLE, Auto::NAME].contains(&label)
}

/// One table for a direction, the times of all methods in it; nothing unless there are two.
#[must_use]
pub fn table(results: &[Entry], direction: Direction) -> Vec<String> {
    let contest = Contest::new(results, direction);
    if contest.columns.len() < 2 { Vec::new() } else { contest.table() }
}

/// What the table's figures are, in words.
#[must_use]
pub fn describe(results: &[Entry]) -> String {
    let Some(first) = results.first() else { return String::new() };
    let waits = results.iter().any(|entry| entry.method == Agent::NAME) && first.metric == Metric::Sustained;
    format!("{}{}", basis(first), if waits { "; agent: median of single calls" } else { "" })
}

/// Up to which size which method is the quickest, in each direction and for each kind of host memory, under a heading;
/// nothing unless two were measured.
#[must_use]
pub fn in_words(results: &[Entry]) -> Vec<String> {
    let mut lines = Vec::new();
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        let contest = Contest::new(results, direction);
        let words = |may: fn(&str) -> bool| {
            let is_contest = contest.columns.iter().filter(|column| may(&column.label)).count() > 1;
            if is_contest { contest.in_words(may) } else { None }
        };
        let is_locked = |column: &Column| [AgentPinned::NAME, CudaMemcpy::PINNED].contains(&&*column.label);
        let locked = if contest.columns.iter().any(is_locked) { words(from_page_locked) } else { None };
        let kinds = match (words(from_any_memory), locked) {
            (Some(any), Some(locked)) if any == locked => vec![("any or page-locked", any)],
            (any, locked) => {
                any.map(|any| ("any", any)).into_iter().chain(locked.map(|locked| ("page-locked", locked))).collect()
            }
        };
        for (memory, words) in kinds {
            lines.extend(wrapped(&format!("  {}, {memory} memory: {words}", direction.in_words())));
        }
        lines.extend(contest.auto_in_words().map(|words| format!("  {}, auto: {words}", direction.in_words())));
    }
    if !lines.is_empty() {
        lines.insert(0, format!("The quickest method on this machine ({}):", describe(results)));
    }
    lines
}

/// Broken between two ranges where it is longer than a line.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in text.split_inclusive(", ") {
        match lines.last_mut() {
            Some(line) if line.len() + part.trim_end().len() <= WIDTH => line.push_str(part),
            Some(_) => lines.push(format!("    {part}")),
            None => lines.push(part.to_owned()),
        }
    }
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

/// `bar1 up to 32 KiB, cuda_memcpy beyond`, of sizes in ascending order and what is used at each.
#[must_use]
pub fn choices(used: &[(u64, &str)]) -> String {
    let mut parts = Vec::new();
    for pair in used.windows(2) {
        if let &[(bytes, name), (_, next)] = pair
            && name != next
        {
            parts.push(format!("{name} up to {}", size_in_words(bytes)));
        }
    }
    let scope = if parts.is_empty() { "at every size" } else { "beyond" };
    parts.extend(used.last().map(|(_, name)| format!("{name} {scope}")));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::entry;
    use super::*;

    /// Single or sustained times of a method at 1 KiB, 2 KiB, ..
    fn sweep(direction: Direction, method: &'static str, times: &[u64]) -> Vec<Entry> {
        let metric =
            if [Agent::NAME, AgentPinned::NAME].contains(&method) { Metric::Single } else { Metric::Sustained };
        let sizes = (0..).map(|n| 1024 << n);
        sizes.zip(times).map(|(bytes, &ns)| entry(direction, method, metric, bytes, ns)).collect()
    }

    fn reads(sweeps: &[(&'static str, &[u64])]) -> Vec<Entry> {
        sweeps.iter().flat_map(|(method, times)| sweep(Direction::DeviceToHost, method, times)).collect()
    }

    #[test]
    fn each_method_has_its_range() {
        let results = reads(&[
            (Bar1::NAME, &[1000, 2000, 4000, 8000]),
            (Agent::NAME, &[2000, 2000, 2400, 6000]),
            (CudaMemcpy::PAGEABLE, &[8000, 8000, 8000, 4000]),
            (CudaMemcpy::PINNED, &[7000, 7000, 7000, 3000]),
        ]);
        assert!(is_due(&results));
        let lines = in_words(&results);
        assert_eq!(
            lines,
            [
                "The quickest method on this machine (time per call, back to back; agent: median of single calls):",
                "  Device to host, any memory: bar1 up to 2.0 KiB, agent up to 6.9 KiB, cuMemcpy beyond",
                "  Device to host, page-locked memory: bar1 up to 2.0 KiB, agent up to 6.4 KiB, cuMemcpy beyond",
            ]
        );
    }

    #[test]
    fn what_is_ahead_by_chance_does_not_take_over() {
        let results = reads(&[(Bar1::NAME, &[1000, 1010, 1000]), (Agent::NAME, &[2000, 1000, 3000])]);
        assert_eq!(in_words(&results)[1], "  Device to host, any memory: bar1 at every size");
    }

    /// A parallel copy of so many threads.
    fn shared(direction: Direction, threads: usize, times: &[u64]) -> Vec<Entry> {
        let mut entries = sweep(direction, Parallel::NAME, times);
        entries.iter_mut().for_each(|entry| entry.threads = Some(threads));
        entries
    }

    #[test]
    fn parallel_is_named_only_where_copies_are_shared() {
        let write = Direction::HostToDevice;
        let mut results = sweep(write, Bar1::NAME, &[100, 200, 400, 800, 3200]);
        results.extend(shared(write, 8, &[50, 100, 200, 400, 1600]));
        assert_eq!(in_words(&results)[1], "  Host to device, any memory: bar1 up to 16 KiB, parallel-8 beyond");
        let quickest = |results: &[Entry], direction| {
            let table = table(results, direction).into_iter().skip(3);
            table.map(|line| line.split_whitespace().last().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(quickest(&results, write), ["bar1", "bar1", "bar1", "bar1", "parallel-8"]);

        let mut results = reads(&[(Bar1::NAME, &[1000, 2000]), (Auto::NAME, &[1000, 500])]);
        results.extend(shared(Direction::DeviceToHost, 8, &[500, 500]));
        assert_eq!(quickest(&results, Direction::DeviceToHost), ["bar1", "parallel-8"]);
        assert!(in_words(&results).last().unwrap().ends_with("as quick as the quickest at every size"));
        // Without bar1 it stands for itself.
        results.retain(|entry| entry.method != Bar1::NAME);
        assert_eq!(quickest(&results, Direction::DeviceToHost), ["parallel-8", "parallel-8"]);
    }

    #[test]
    fn of_equals_the_plainest_is_named() {
        let read = Direction::DeviceToHost;
        let mut results = reads(&[(CudaMemcpy::PAGEABLE, &[960, 960, 960, 100]), (Agent::NAME, &[970, 970, 970, 970])]);
        results.extend(shared(read, 8, &[2000, 980, 1000, 980]));
        results.extend(shared(read, 4, &[2000, 1000, 1030, 980]));
        results.extend(reads(&[(Bar1::NAME, &[1000, 3000, 3000, 3000])]));
        let winners: Vec<_> = Contest::new(&results, read).winners(from_any_memory).iter().map(|w| w.column).collect();
        let labels: Vec<_> = Contest::new(&results, read).columns.into_iter().map(|column| column.label).collect();
        let named: Vec<_> = winners.into_iter().map(|column| labels[column].as_str()).collect();
        assert_eq!(named, ["bar1", "parallel-4", "parallel-8", "cuda_memcpy_pageable"]);
        // parallel-4 is ahead of bar1 from 4/3 KiB on; cuMemcpy was ahead of parallel-8 at 4 KiB already.
        assert_eq!(
            in_words(&results)[1..],
            [
                "  Device to host, any memory: bar1 up to 1.3 KiB, parallel-4 up to 2.0 KiB,",
                "    parallel-8 up to 4.0 KiB, cuMemcpy beyond"
            ]
        );
    }

    #[test]
    fn auto_is_held_against_what_it_could_have_used() {
        let mut results = reads(&[(Bar1::NAME, &[1000, 4000]), (CudaMemcpy::PINNED, &[900, 100])]);
        results.extend(reads(&[(Auto::NAME, &[1010, 4400])]));
        let lines = in_words(&results);
        assert_eq!(lines.last().unwrap(), "  Device to host, auto: at worst 10.0 % behind the quickest, at 2 KiB");
        assert!(lines.iter().all(|line| !line.contains("any memory")), "bar1 alone is no contest: {lines:?}");
        let equal = reads(&[(Bar1::NAME, &[1000]), (Auto::NAME, &[990])]);
        assert!(in_words(&equal)[1].ends_with("as quick as the quickest at every size"));
    }

    #[test]
    fn a_table_has_a_column_for_each() {
        let mut results = reads(&[
            (Bar1::NAME, &[1000, 2000]),
            (Posted::NAME, &[1, 1]),
            (Parallel::NAME, &[500, 500]),
            (AgentPinned::NAME, &[700, 400]),
            (Auto::NAME, &[1, 1]),
        ]);
        results.iter_mut().filter(|entry| entry.method == Parallel::NAME).for_each(|entry| entry.threads = Some(8));
        let lines = table(&results, Direction::DeviceToHost);
        let words = |n: usize| lines[n].split_whitespace().collect::<Vec<_>>();
        assert_eq!(words(0), ["bar1", "parallel", "agent", "auto"]);
        assert_eq!(words(1), ["size", "8", "thr.", "pinned", "quickest"]);
        assert_eq!(words(3), ["1Ki", "1000", "500.0", "700.0", "1.0", "agent_pinned"]);
        assert_eq!(words(4), ["2Ki", "2000", "500.0", "400.0", "1.0", "agent_pinned"]);
        assert!(lines.iter().all(|line| line.len() <= 100), "{lines:?}");
        assert!(table(&results, Direction::HostToDevice).is_empty());
        assert!(!is_due(&results[..4]), "bar1 alone");
    }

    #[test]
    fn the_same_for_both_kinds_of_memory_is_said_once() {
        let results = reads(&[(Bar1::NAME, &[1000]), (Agent::NAME, &[2000]), (AgentPinned::NAME, &[2000])]);
        assert_eq!(in_words(&results)[1..], ["  Device to host, any or page-locked memory: bar1 at every size"]);
    }

    #[test]
    fn long_lines_are_broken_between_ranges() {
        let text = (1..=9).map(|n| format!("parallel-8 up to {n} KiB")).collect::<Vec<_>>().join(", ");
        let lines = wrapped(&text);
        assert!(lines.len() == 3 && lines.iter().all(|line| line.len() <= WIDTH), "{lines:?}");
        assert!(lines[1].starts_with("    parallel-8") && lines[0].ends_with("KiB,"), "{lines:?}");
    }

    #[test]
    fn choices_are_runs() {
        assert_eq!(choices(&[(64, "bar1"), (128, "bar1"), (4096, "agent")]), "bar1 up to 128 B, agent beyond");
        assert_eq!(choices(&[(64, "bar1")]), "bar1 at every size");
        assert_eq!(choices(&[]), "");
    }
}
