//! From figures to a table.

use super::routines::MAX_CLASSES;
use super::{CopyDirection, CopyMethod, Row};
use crate::copy::largest_alone;

/// What every candidate took at one size: median times in nanoseconds.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(super) bytes: usize,
    pub(super) candidates: Vec<(CopyMethod, f64)>,
    /// The best method and a plainer one within this ratio are equally good.
    pub(super) margin: f64,
}

/// Two routines within this are equally good: less than that is not told apart from noise.
pub(super) const MARGIN: f64 = 1.03;

/// From so many bytes on, in [`LARGE_MARGIN`], the copy engine is as good as any: it takes neither cores nor an SM, and what
/// differs is how busy memory is at the moment (20 % from run to run on an H200).
const LARGE: usize = 4 << 20;
const LARGE_MARGIN: f64 = 1.08;

impl Cell {
    /// The copy engine with the host memory that was measured.
    fn engine(&self) -> Option<(CopyMethod, f64)> {
        let is_engine = |method| matches!(method, CopyMethod::CopyEngine | CopyMethod::CopyEnginePinned);
        self.candidates.iter().copied().find(|(method, _)| is_engine(*method))
    }

    fn routines(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.candidates.iter().filter_map(|(method, ns)| match method {
            CopyMethod::Routine(name) => Some((*name, *ns)),
            _ => None,
        })
    }

    /// A routine's time over that of the best; 1 where no routine was measured.
    fn ratio(&self, routine: &str) -> f64 {
        let best = self.routines().map(|(_, ns)| ns).fold(f64::INFINITY, f64::min);
        let own = self.routines().find(|(name, _)| *name == routine).map_or(f64::INFINITY, |(_, ns)| ns);
        // A clock that did not move is a tenth of a nanosecond.
        if own <= best { 1.0 } else { own / best.max(0.1) }
    }

    pub(super) fn figures(&self) -> Figures<'_> {
        Figures { bytes: self.bytes, candidates: &self.candidates }
    }

    /// What a method took.
    pub(super) fn ns(&self, method: CopyMethod) -> Option<f64> {
        self.figures().ns(method)
    }

    /// The least that any of these took.
    pub(super) fn fastest(&self, is_one: impl Fn(CopyMethod) -> bool) -> f64 {
        let those = self.candidates.iter().filter(|(method, _)| is_one(*method));
        those.map(|(_, ns)| *ns).fold(f64::INFINITY, f64::min)
    }

    /// The plainest method that is as good as any, with this routine in force.
    pub(super) fn best(&self, routine: &'static str) -> CopyMethod {
        let fits = |method: CopyMethod| !matches!(method, CopyMethod::Routine(name) if name != routine);
        if self.bytes >= LARGE
            && let Some((engine, _)) = self.engine().filter(|(_, ns)| *ns <= LARGE_MARGIN * self.fastest(fits))
        {
            return engine;
        }
        let limit = self.fastest(fits) * self.margin;
        let good = self.candidates.iter().filter(|(method, ns)| fits(*method) && *ns <= limit);
        good.map(|(method, _)| *method).min_by_key(|method| method.rank()).unwrap_or(CopyMethod::Routine(routine))
    }
}

/// The rows for these cells, which are in ascending order of size. A row reaches to where its neighbour's method becomes the
/// quicker one, or else half-way to its neighbour on a scale of ratios. One routine serves them all if it is within the
/// margin of the best everywhere, else as few as there can be.
pub(super) fn rows(direction: CopyDirection, cells: Vec<Cell>) -> Vec<Row> {
    let routines = routines(&cells);
    let best: Vec<_> = cells.iter().zip(&routines).map(|(cell, routine)| cell.best(routine)).collect();
    let mut first = 1;
    let mut rows = Vec::with_capacity(cells.len());
    for (n, cell) in cells.iter().enumerate() {
        let last = match (cells.get(n + 1), best.get(n + 1)) {
            (Some(next), Some(&method)) => {
                let middle = (cell.bytes * next.bytes).isqrt();
                last_of_lower(direction, (cell.figures(), best[n]), (next.figures(), method), middle)
            }
            _ => usize::MAX,
        };
        rows.push(Row {
            first,
            last,
            measured: Some(cell.bytes),
            routine: routines[n],
            best: best[n],
            candidates: cell.candidates.clone(),
        });
        first = last.saturating_add(1);
    }
    rows
}

/// What every candidate took at a size: in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures<'a> {
    pub(crate) bytes: usize,
    pub(crate) candidates: &'a [(CopyMethod, f64)],
}

impl Figures<'_> {
    fn ns(self, method: CopyMethod) -> Option<f64> {
        self.candidates.iter().find(|(candidate, _)| *candidate == method).map(|(_, ns)| *ns)
    }
}

/// The last size of the lower of two neighbours, each with its own method: where the upper one's becomes quicker if times are
/// on a straight line in between, and `otherwise` if it does not. What a parallel copier would copy alone is not the upper
/// one's if that is its method.
pub(crate) fn last_of_lower(
    direction: CopyDirection,
    (below, low): (Figures<'_>, CopyMethod),
    (above, high): (Figures<'_>, CopyMethod),
    otherwise: usize,
) -> usize {
    let last = meet((below, low), (above, high)).unwrap_or(otherwise);
    let is_parallel = matches!(high, CopyMethod::Parallel(_));
    if is_parallel { last.max(largest_alone(direction).min(above.bytes - 1)) } else { last }
}

fn meet((below, low): (Figures<'_>, CopyMethod), (above, high): (Figures<'_>, CopyMethod)) -> Option<usize> {
    /// Steps between the two.
    const STEPS: u16 = 256;
    // How much longer the lower one's method takes than the upper one's.
    let longer = |at: Figures<'_>| Some(at.ns(low)? - at.ns(high)?);
    let (start, end) = (longer(below)?, longer(above)?);
    if start >= 0.0 || end <= 0.0 {
        return None;
    }
    let share = start / (start - end) * f64::from(STEPS);
    let steps = (1..STEPS).filter(|&step| f64::from(step) <= share).count();
    let (between, all) = (above.bytes - below.bytes, usize::from(STEPS));
    Some(below.bytes + between / all * steps + between % all * steps / all)
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
    let mut names: Vec<&'static str> = Vec::new();
    for (name, _) in cells.iter().flat_map(Cell::routines) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let mut runs = Vec::new();
    let mut left = cells;
    while !left.is_empty() {
        // How far each routine reaches; of those that reach farthest the one that is best in sum.
        let reach = |name: &str| left.iter().take_while(|cell| cell.ratio(name) <= margin).count();
        let farthest = names.iter().map(|name| reach(name)).max().unwrap_or(left.len()).max(1);
        let (run, rest) = left.split_at(farthest);
        let sum = |name: &str| run.iter().map(|cell| cell.ratio(name)).sum::<f64>();
        let best = names.iter().copied().filter(|name| reach(name) == farthest);
        let best = best.min_by(|a, b| sum(a).total_cmp(&sum(b)));
        runs.push((farthest, best.unwrap_or(crate::copy::preferred().name())));
        left = rest;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    const D2H: CopyDirection = CopyDirection::DeviceToHost;

    fn cell(bytes: usize, figures: &[(&str, f64)]) -> Cell {
        let method = |(name, ns): &(&str, f64)| (name.parse().unwrap(), *ns);
        Cell { bytes, candidates: figures.iter().map(method).collect(), margin: MARGIN }
    }

    fn table(cells: &[(usize, f64, f64)]) -> Vec<Row> {
        rows(D2H, cells.iter().map(|&(bytes, a, b)| cell(bytes, &[("avx2", a), ("avx512", b)])).collect())
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
    fn rows_meet_where_one_method_becomes_quicker_than_the_other() {
        let best_and_last = |low: (f64, f64), high: (f64, f64)| {
            let figures = |(core, agent)| [("avx2", core), ("agent", agent)];
            let rows = rows(D2H, vec![cell(1024, &figures(low)), cell(2048, &figures(high))]);
            (rows[0].best, rows[1].best, rows[0].last)
        };
        let (core, agent) = (CopyMethod::Routine("avx2"), CopyMethod::Agent);
        // Equal at a quarter, and at three quarters of the way.
        assert_eq!(best_and_last((1000.0, 1100.0), (1600.0, 1300.0)), (core, agent, 1024 + 256));
        assert_eq!(best_and_last((1000.0, 1300.0), (1600.0, 1500.0)), (core, agent, 1024 + 768));
        // No crossing in between: the plainer one was taken, though it was a little slower.
        assert_eq!(best_and_last((1001.0, 1000.0), (1600.0, 1000.0)), (core, agent, 1448));
        let unknown = rows(D2H, vec![cell(1024, &[("avx2", 1.0)]), cell(2048, &[("agent", 1.0)])]);
        assert_eq!((unknown[0].last, unknown[1].first), (1448, 1449));
        let small =
            rows(D2H, vec![cell(1, &[("avx2", 1.0), ("agent", 2.0)]), cell(2, &[("avx2", 2.0), ("agent", 1.0)])]);
        assert_eq!((small[0].last, small[1].first), (1, 2));
    }

    #[test]
    fn what_a_parallel_copier_copies_alone_is_not_in_its_row() {
        let cells =
            |low, high| vec![cell(low, &[("avx2", 900.0)]), cell(high, &[("avx2", 1800.0), ("parallel-2", 1000.0)])];
        let last = |direction, low, high| rows(direction, cells(low, high))[0].last;
        assert_eq!(last(CopyDirection::HostToDevice, 8 << 10, 16 << 10), (16 << 10) - 1);
        assert_eq!(last(D2H, 1024, 2048), 1448);
    }

    #[test]
    fn sizes_without_a_routine_keep_their_neighbour_s() {
        let cells = vec![
            cell(64, &[("avx2", 120.0), ("avx512", 100.0)]),
            cell(128, &[("avx2", 120.0), ("avx512", 100.0), ("agent", 20.0)]),
            cell(256, &[("agent", 20.0)]),
            cell(512, &[("agent", 20.0)]),
        ];
        let rows = rows(D2H, cells);
        assert_eq!(names(&rows), ["avx512"; 4]);
        assert_eq!((rows[0].best, rows[3].best), (CopyMethod::Routine("avx512"), CopyMethod::Agent));
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
    fn large_copies_are_the_engines_unless_another_way_is_clearly_better() {
        let best = |bytes: usize, agent: f64| {
            cell(bytes, &[("avx512", 900.0), ("agent", agent), ("copy_engine", 100.0)]).best("avx512").to_string()
        };
        assert_eq!((best(4 << 20, 95.0), best(4 << 20, 90.0)), ("copy_engine".to_owned(), "agent".to_owned()));
        assert_eq!(best(2 << 20, 95.0), "agent");
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
