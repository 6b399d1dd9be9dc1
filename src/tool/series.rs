//! The tables of one run: every place of a plan, by one method after the other, printed row by row.

use std::time::Duration;

use super::bench::{Bench, Cell};
use super::fail::Failure;
use super::flags::size_in_words;
use super::measure::{Amount, Sampler};
use super::method::Method;
use super::output::Screen;
use super::report::{Direction, Entry, Figures};
use super::table::{Layout, nanoseconds};
use crate::sys::num::u64_of;

/// Time for one row, shared by its loops.
const ROW: Duration = Duration::from_millis(150);
/// Time for all rows together.
pub const RUN: Duration = Duration::from_secs(25);

/// Time for the loop around nothing: some hundred thousand samples.
const HICCUPS: Duration = Duration::from_millis(300);

/// How long each of so many rows may take.
#[must_use]
pub fn row_time(rows: usize) -> Duration {
    ROW.min(RUN / u32::try_from(rows.max(1)).unwrap_or(u32::MAX))
}

/// Measures row after row.
#[derive(Debug)]
pub struct Series<'a> {
    /// Where the rows go.
    pub screen: &'a Screen,
    /// Offset and size of every row.
    pub places: &'a [(usize, usize)],
    /// Rows of all tables still to come.
    pub rows_left: usize,
    /// A banner stands above each table.
    pub is_emulated: bool,
}

impl Series<'_> {
    /// Measures every place by one method in one direction, as a table of its own; `results` has what was measured even
    /// if this fails.
    ///
    /// # Errors
    ///
    /// A copy failed, or the data is wrong, or Ctrl-C.
    pub fn table<M: Method>(
        &mut self,
        bench: &mut Bench<'_>,
        (method, direction): (&M, Direction),
        layout: &impl Layout,
        arena: &mut [u8],
        results: &mut Vec<Entry>,
    ) -> Result<(), Failure> {
        let heading = format!("{}: {}", direction.in_words(), method.describe(direction));
        self.heading(&heading, layout)?;
        self.rows(bench, (method, direction), layout, arena, results)
    }

    /// An empty line, the banner where one belongs, a line, the titles.
    ///
    /// # Errors
    ///
    /// The screen cannot be written.
    pub fn heading(&self, line: &str, layout: &impl Layout) -> Result<(), Failure> {
        self.screen.line("")?;
        self.screen.banner(self.is_emulated)?;
        self.screen.line(line)?;
        layout.titles().iter().try_for_each(|line| self.screen.line(line))
    }

    /// The rows of [`Series::table`] without its heading.
    ///
    /// # Errors
    ///
    /// As [`Series::table`].
    pub fn rows<M: Method>(
        &mut self,
        bench: &mut Bench<'_>,
        (method, direction): (&M, Direction),
        layout: &impl Layout,
        arena: &mut [u8],
        results: &mut Vec<Entry>,
    ) -> Result<(), Failure> {
        for &(offset, bytes) in self.places {
            self.screen.doing(&format!("{} {} {}", direction.name(), method.name(), size_in_words(u64_of(bytes))));
            let time = ROW.min(bench.sampler.share(self.rows_left));
            let entries = bench.cell(method, direction, Cell { offset, bytes, time }, arena)?;
            self.rows_left = self.rows_left.saturating_sub(1);
            self.screen.line(&layout.row(&entries))?;
            self.screen.done();
            results.extend(entries);
        }
        Ok(())
    }
}

/// Times the loop around nothing, for the report and as a line of the header.
pub fn hiccups(sampler: &mut Sampler<'_>) -> (Figures, String) {
    let figures = sampler.hiccups(Amount::UpTo(u64::MAX, HICCUPS));
    let line = hiccups_in_words(&figures);
    (figures, line)
}

fn hiccups_in_words(figures: &Figures) -> String {
    let [p0, p50, p99, p999, max] =
        [figures.min_ns, figures.p50_ns, figures.p99_ns, figures.p999_ns, figures.max_ns].map(nanoseconds);
    format!(
        "Hiccups   no copy at all: p0 {p0}, p50 {p50}, p99 {p99}, p99.9 {p999}, max {max} ns in {} samples",
        figures.iterations
    )
}
