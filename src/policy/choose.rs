//! From figures to a table.

use super::routines::MAX_CLASSES;
use super::{CopyMethod, Row};

/// What every candidate took at one size: median times in nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) bytes: usize,
    pub(super) candidates: Vec<(CopyMethod, f64)>,
}

/// Two ways within this are equally good: less than that is not told apart from noise.
const MARGIN: f64 = 1.03;

impl Cell {
    fn routines(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.candidates.iter().filter_map(|(method, ns)| match method {
            CopyMethod::Routine(name) => Some((*name, *ns)),
            _ => None,
        })
    }

    /// A routine's time over that of the best.
    fn ratio(&self, routine: &str) -> f64 {
        let best = self.routines().map(|(_, ns)| ns).fold(f64::INFINITY, f64::min);
        let own = self.routines().find(|(name, _)| *name == routine).map_or(f64::INFINITY, |(_, ns)| ns);
        // A clock that did not move is a tenth of a nanosecond.
        if own <= best { 1.0 } else { own / best.max(0.1) }
    }

    /// The first method that is as good as any, in the order: the routine, few threads, many threads, CUDA.
    pub(super) fn best(&self, routine: &'static str) -> CopyMethod {
        let rank = |method: CopyMethod| match method {
            CopyMethod::Routine(_) => 0,
            CopyMethod::Parallel(threads) => threads,
            CopyMethod::CudaMemcpy => usize::MAX,
        };
        let fits = |method: CopyMethod| !matches!(method, CopyMethod::Routine(name) if name != routine);
        let fitting = || self.candidates.iter().filter(|(method, _)| fits(*method));
        let fastest = fitting().map(|(_, ns)| *ns).fold(f64::INFINITY, f64::min);
        let good = fitting().filter(|(_, ns)| *ns <= fastest * MARGIN);
        good.map(|(method, _)| *method).min_by_key(|method| rank(*method)).unwrap_or(CopyMethod::Routine(routine))
    }
}

/// The rows for these cells, which are in ascending order of size and have the same routines. A row reaches half-way to
/// its neighbours on a scale of ratios. One routine serves them all if it is within the margin of the best everywhere, else
/// as few as there can be.
pub(super) fn rows(cells: Vec<Cell>) -> Vec<Row> {
    let routines = routines(&cells);
    let middle = |n: usize| Some((cells.get(n)?.bytes * cells.get(n + 1)?.bytes).isqrt());
    let first = |n: usize| n.checked_sub(1).and_then(middle).map_or(1, |before| before + 1);
    let row = |(n, routine): (usize, &'static str)| Row {
        first: first(n),
        last: middle(n).unwrap_or(usize::MAX),
        measured: Some(cells[n].bytes),
        routine,
        best: cells[n].best(routine),
        candidates: cells[n].candidates.clone(),
    };
    routines.into_iter().enumerate().map(row).collect()
}

/// The routine of each cell.
fn routines(cells: &[Cell]) -> Vec<&'static str> {
    let mut margin = MARGIN;
    loop {
        let runs = runs(cells, margin);
        if runs.len() <= MAX_CLASSES {
            return runs.into_iter().flat_map(|(len, routine)| std::iter::repeat_n(routine, len)).collect();
        }
        // So many changes are noise: what differs less than that is alike.
        margin = 1.0 + (margin - 1.0) * 1.5;
    }
}

/// The fewest runs of cells, each with a routine that is within the margin of the best in all of them.
fn runs(cells: &[Cell], margin: f64) -> Vec<(usize, &'static str)> {
    let mut runs = Vec::new();
    let mut left = cells;
    while let [cell, ..] = left {
        // How far each routine reaches; of those that reach farthest the one that is best in sum.
        let reach = |name: &str| left.iter().take_while(|cell| cell.ratio(name) <= margin).count();
        let farthest = cell.routines().map(|(name, _)| reach(name)).max().unwrap_or(1).max(1);
        let (run, rest) = left.split_at(farthest);
        let sum = |name: &str| run.iter().map(|cell| cell.ratio(name)).sum::<f64>();
        let names = cell.routines().map(|(name, _)| name).filter(|name| reach(name) == farthest);
        let best = names.min_by(|a, b| sum(a).total_cmp(&sum(b)));
        runs.push((farthest, best.unwrap_or(crate::copy::preferred().name())));
        left = rest;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(bytes: usize, figures: &[(&str, f64)]) -> Cell {
        let method = |(name, ns): &(&str, f64)| (name.parse().unwrap(), *ns);
        Cell { bytes, candidates: figures.iter().map(method).collect() }
    }

    fn table(cells: &[(usize, f64, f64)]) -> Vec<Row> {
        rows(cells.iter().map(|&(bytes, a, b)| cell(bytes, &[("avx2", a), ("avx512", b)])).collect())
    }

    fn names(rows: &[Row]) -> Vec<&str> {
        rows.iter().map(|row| row.routine).collect()
    }

    #[test]
    fn rows_cover_every_size_and_meet_half_way() {
        let rows = table(&[(64, 1.0, 2.0), (256, 1.0, 2.0), (1024, 1.0, 2.0)]);
        let sizes: Vec<_> = rows.iter().map(|row| (row.first, row.measured.unwrap(), row.last)).collect();
        assert_eq!(sizes, [(1, 64, 128), (129, 256, 512), (513, 1024, usize::MAX)]);
    }

    #[test]
    fn one_routine_that_is_good_everywhere_stays() {
        assert_eq!(names(&table(&[(64, 100.0, 102.0), (128, 101.0, 100.0), (256, 150.0, 100.0)])), ["avx512"; 3]);
    }

    #[test]
    fn a_routine_that_loses_more_than_the_margin_is_changed() {
        let rows = table(&[(64, 100.0, 110.0), (128, 101.0, 100.0), (256, 150.0, 100.0)]);
        assert_eq!(names(&rows), ["avx2", "avx2", "avx512"]);
    }

    #[test]
    fn noise_does_not_make_more_classes_than_there_may_be() {
        let zigzag: Vec<_> =
            (0..9).map(|n| if n % 2 == 0 { (64 << n, 100.0, 104.0) } else { (64 << n, 104.0, 100.0) }).collect();
        assert_eq!(names(&table(&zigzag)).chunk_by(|a, b| a == b).count(), 1);
        let big: Vec<_> =
            (0..9).map(|n| if n % 2 == 0 { (64 << n, 100.0, 900.0) } else { (64 << n, 900.0, 100.0) }).collect();
        assert!(names(&table(&big)).chunk_by(|a, b| a == b).count() <= MAX_CLASSES);
    }

    #[test]
    fn the_best_method_is_the_plainest_of_the_good_ones() {
        let best = |figures: &[(&str, f64)]| cell(64, figures).best("avx512").to_string();
        assert_eq!(best(&[("avx512", 100.0), ("parallel-2", 98.0), ("cuda_memcpy_pinned", 99.0)]), "avx512");
        assert_eq!(
            best(&[("avx512", 100.0), ("parallel-4", 50.0), ("parallel-2", 51.0), ("parallel-8", 49.9)]),
            "parallel-2"
        );
        assert_eq!(
            best(&[("avx512", 100.0), ("parallel-8", 50.0), ("cuda_memcpy_pinned", 25.0)]),
            "cuda_memcpy_pinned"
        );
        assert_eq!(best(&[("avx512", 100.0), ("avx2", 90.0)]), "avx512", "not a routine that is not in force");
        assert_eq!(best(&[("avx512", 0.0), ("avx2", 0.0)]), "avx512");
    }
}
