//! `gdrcopy_doctor`: why gdrcopy does not work here, and the one thing to fix.
//!
//! `root` reads the machine, or a folder that a test makes look like a broken one; `scene` has what several `checks` look
//! at, each of which gives `finding`s; `trial` copies data through every backend; `tell` sorts and prints.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use self::args::Args;
use self::root::Root;
use self::scene::Scene;
use self::tell::Diagnosis;
use super::fail::{self, Failure};
use super::output::{Screen, Target};

mod args;
mod checks;
mod finding;
mod root;
mod scene;
mod tell;
mod trial;

const TOOL: &str = "gdrcopy_doctor";

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outcome = match Args::try_parse_from(args) {
        Ok(args) => run(&args),
        Err(error) => fail::clap_outcome(&error).map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|failure| failure.report(TOOL))
}

fn run(args: &Args) -> Result<ExitCode, Failure> {
    if let Some(kind) = args.be {
        trial::be(kind);
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(folder) = args.root.as_ref().filter(|folder| !folder.is_dir()) {
        return Err(Failure::usage(format!("--root {}: there is no such folder", folder.display())));
    }
    let json = args.json.as_deref().map(Target::open).transpose()?;
    let screen = Screen::beside(json.iter());

    let root = Root::new(args.root.clone());
    let findings = checks::all(&root, &Scene::read(&root));
    let trials = if args.root.is_none() || args.self_test {
        let limit = Duration::from_secs(args.timeout);
        trial::all(limit).map_err(|error| Failure::run(format!("cannot start a process for the self-test: {error}")))?
    } else {
        Vec::new()
    };
    let diagnosis = Diagnosis::new(findings, trials);
    diagnosis.lines(args.verbose).iter().try_for_each(|line| screen.line(line))?;
    if let Some(target) = json {
        target.write(&diagnosis.to_json())?;
    }
    Ok(if diagnosis.works() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
