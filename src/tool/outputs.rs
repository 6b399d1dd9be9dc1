//! The flags that say where results go, and writing them there.

use std::path::PathBuf;

use clap::Args;

use super::fail::Failure;
use super::output::{Screen, Target};
use super::report::{Record, Report};

/// Where results go besides the screen, the same for every program.
#[derive(Args, Debug, Clone, Default)]
pub struct Outputs {
    /// Write the results as JSON, with - to standard output
    ///
    /// Standard output then carries nothing else; the tables go to standard error.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,

    /// Write the results as CSV, with - to standard output
    #[arg(long, value_name = "FILE|-")]
    pub csv: Option<PathBuf>,

    /// No progress bar, which otherwise a terminal gets
    #[arg(long)]
    pub no_progress: bool,
}

/// The picture, for programs whose results make one.
#[derive(Args, Debug, Clone, Default)]
pub struct PlotFlag {
    /// Draw the results against the size, as SVG; with - to standard output
    #[arg(long, value_name = "FILE.svg|-")]
    pub plot: Option<PathBuf>,
}

/// The targets of a run, checked before anything is measured.
#[derive(Debug)]
pub struct Sinks {
    json: Option<Target>,
    csv: Option<Target>,
    plot: Option<Target>,
    /// What people read.
    pub screen: Screen,
    show_progress: bool,
}

impl Outputs {
    /// Refuses what would mix on standard output.
    ///
    /// # Errors
    ///
    /// More than one of the targets is `-`.
    pub fn check(&self) -> Result<(), Failure> {
        self.check_with(&PlotFlag::default())
    }

    /// [`Outputs::check`] for a program that draws.
    ///
    /// # Errors
    ///
    /// As [`Outputs::check`].
    pub fn check_with(&self, plot: &PlotFlag) -> Result<(), Failure> {
        let named = [("--json", &self.json), ("--csv", &self.csv), ("--plot", &plot.plot)];
        let on_stdout = |(flag, path): &(&'static str, &Option<PathBuf>)| {
            path.as_ref().is_some_and(|path| path.as_os_str() == "-").then_some(*flag)
        };
        match named.iter().filter_map(on_stdout).collect::<Vec<_>>()[..] {
            [first, second, ..] => Err(Failure::usage(format!(
                "{first} - and {second} - would mix on standard output; name a file for one of them"
            ))),
            _ => Ok(()),
        }
    }

    /// Opens every target; files that are there stay as they are until there is a result.
    ///
    /// # Errors
    ///
    /// One cannot be written, or more than one is `-`.
    pub fn open(&self) -> Result<Sinks, Failure> {
        self.open_with(&PlotFlag::default())
    }

    /// [`Outputs::open`] for a program that draws.
    ///
    /// # Errors
    ///
    /// As [`Outputs::open`].
    pub fn open_with(&self, plot: &PlotFlag) -> Result<Sinks, Failure> {
        self.check_with(plot)?;
        let open = |path: &Option<PathBuf>| path.as_deref().map(Target::open).transpose();
        let (json, csv, plot) = (open(&self.json)?, open(&self.csv)?, open(&plot.plot)?);
        let screen = Screen::beside(json.iter().chain(&csv).chain(&plot));
        Ok(Sinks { json, csv, plot, screen, show_progress: !self.no_progress })
    }
}

impl Sinks {
    /// A progress bar for so many steps, where one is wanted and can be seen.
    pub fn begin(&self, steps: usize) {
        if self.show_progress {
            self.screen.begin(steps);
        }
    }

    /// Writes the picture and the results, each where it was asked for; no picture of a run that ended before its first row.
    ///
    /// # Errors
    ///
    /// There is nothing to draw, or a target cannot be written; [`Failure::Interrupted`] after a partial report.
    pub fn finish<R: Record>(
        self,
        report: &Report<R>,
        picture: impl FnOnce() -> Result<String, Failure>,
    ) -> Result<(), Failure> {
        if let Some(target) = self.plot.filter(|_| !(report.partial && report.results.is_empty())) {
            target.write(&picture()?)?;
        }
        if let Some(target) = self.json {
            target.write(&report.to_json())?;
        }
        if let Some(target) = self.csv {
            target.write(&report.to_csv())?;
        }
        if report.partial { Err(Failure::Interrupted) } else { Ok(()) }
    }
}
