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
}

/// The targets of a run, checked before anything is measured.
#[derive(Debug)]
pub struct Sinks {
    json: Option<Target>,
    csv: Option<Target>,
    /// What people read.
    pub screen: Screen,
}

impl Outputs {
    /// Refuses what would mix on standard output.
    ///
    /// # Errors
    ///
    /// Both are `-`.
    pub fn check(&self) -> Result<(), Failure> {
        let is_stdout = |path: &Option<PathBuf>| path.as_ref().is_some_and(|path| path.as_os_str() == "-");
        if is_stdout(&self.json) && is_stdout(&self.csv) {
            return Err(Failure::usage(
                "--json - and --csv - would mix on standard output; name a file for one of them",
            ));
        }
        Ok(())
    }

    /// Opens every target; files that are there stay as they are until there is a result.
    ///
    /// # Errors
    ///
    /// One cannot be written, or both are `-`.
    pub fn open(&self) -> Result<Sinks, Failure> {
        self.check()?;
        let open = |path: &Option<PathBuf>| path.as_deref().map(Target::open).transpose();
        let (json, csv) = (open(&self.json)?, open(&self.csv)?);
        let screen = Screen::beside(json.iter().chain(&csv));
        Ok(Sinks { json, csv, screen })
    }
}

impl Sinks {
    /// Writes what was asked for.
    ///
    /// # Errors
    ///
    /// A target cannot be written.
    pub fn write<R: Record>(self, report: &Report<R>) -> Result<(), Failure> {
        if let Some(target) = self.json {
            target.write(&report.to_json())?;
        }
        if let Some(target) = self.csv {
            target.write(&report.to_csv())?;
        }
        Ok(())
    }
}
