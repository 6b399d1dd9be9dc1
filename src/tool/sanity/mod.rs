//! `gdrcopy_sanity`: whether GPU memory can be pinned, mapped, written and read on this machine, test by test.
//!
//! `cases` has the tests and `bench` what they work with; `process` runs each in a process of its own, to which `voice`
//! listens; `tell` says what came of them, as text, TAP or JSON. Here they are put in order.

use std::ffi::OsString;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;

use self::args::Args;
use self::bench::{Bench, Step, Stop};
use self::cases::Test;
use self::process::{Ran, Verdict};
use self::tell::{Outcome, Teller};
use super::fail::{self, Failure, say};
use super::output::{Screen, Target};
use crate::backend::{Allocator, BackendKind};
use crate::error::ErrorKind;
use crate::session::Session;

mod args;
mod bench;
mod cases;
mod fork;
pub(super) mod process;
mod socket;
mod tell;
pub(super) mod voice;

const TOOL: &str = "gdrcopy_sanity";
/// Exit status when nothing was tested.
const ALL_WAIVED: u8 = 3;

/// Runs the program on a command line, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outcome = match Args::try_parse_from(args) {
        Ok(args) => run(args),
        Err(error) => fail::clap_outcome(&error).map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|failure| failure.report(TOOL))
}

fn run(mut args: Args) -> Result<ExitCode, Failure> {
    if let Some(name) = &args.be {
        let test = cases::all().into_iter().find(|test| test.name == *name);
        let test = test.ok_or_else(|| Failure::usage(format!("there is no test {name}")))?;
        return Ok(be(&test, args));
    }
    if let Some(part) = args.assist.clone() {
        return assist(&part, args).map(|()| ExitCode::SUCCESS).map_err(|stop| Failure::run(stop.to_string()));
    }
    if args.tap && args.json.as_ref().is_some_and(|path| path.as_os_str() == "-") {
        return Err(Failure::usage("--tap and --json - would mix on standard output; name a file for one of them"));
    }
    let tests = chosen(&args)?;
    let json = args.json.as_deref().map(Target::open).transpose()?;
    let screen = Screen::beside(json.iter());
    if args.list {
        return list(&screen, &tests).map(|()| ExitCode::SUCCESS);
    }
    settle_backend(&mut args)?;

    let mut teller = Teller::new(&args, screen);
    teller.begin(tests.len())?;
    let mut outcomes = Vec::with_capacity(tests.len());
    for test in &tests {
        let ran = in_its_process(test, &args)?;
        let outcome = Outcome::new(test, ran);
        teller.tell(&outcome)?;
        outcomes.push(outcome);
    }
    teller.end(&outcomes)?;
    if let Some(target) = json {
        target.write(&tell::json(&args, &outcomes))?;
    }
    Ok(status(&outcomes))
}

fn status(outcomes: &[Outcome]) -> ExitCode {
    if outcomes.iter().any(|outcome| matches!(outcome.verdict, Verdict::Failed(_))) {
        ExitCode::FAILURE
    } else if outcomes.iter().all(|outcome| matches!(outcome.verdict, Verdict::Waived(_))) {
        ExitCode::from(ALL_WAIVED)
    } else {
        ExitCode::SUCCESS
    }
}

/// The tests that the command line names.
fn chosen(args: &Args) -> Result<Vec<Test>, Failure> {
    let mut tests = cases::all();
    if !args.tests.is_empty() {
        if let Some(unknown) = args.tests.iter().find(|name| tests.iter().all(|test| test.name != **name)) {
            return Err(Failure::usage(format!("-t {unknown}: there is no such test; -l lists them")));
        }
        // A test that is named is wanted, extended or not.
        tests.retain(|test| args.tests.contains(&test.name));
    } else if !args.extended && !args.list {
        tests.retain(|test| !test.extended);
    }
    if let Some(part) = &args.filter {
        tests.retain(|test| test.name.contains(part.as_str()));
        if tests.is_empty() {
            return Err(Failure::usage(format!("--filter {part}: no test's name contains it; -l lists them")));
        }
    }
    Ok(tests)
}

fn list(screen: &Screen, tests: &[Test]) -> Result<(), Failure> {
    tests.iter().try_for_each(|test| {
        let extended = if test.extended { " (extended: -e)" } else { "" };
        screen.line(&format!("{:<48} {}{extended}", test.name, test.about))
    })
}

/// Without a GPU, and without the user's word on it, emulated ones are tested. No CUDA is called here: this process
/// starts others, and a GPU in exclusive compute mode has room for one.
fn settle_backend(args: &mut Args) -> Result<(), Failure> {
    let chosen = args.backend.is_some() || std::env::var_os("GDRCOPY_BACKEND").is_some_and(|value| !value.is_empty());
    let opened = Bench::new(args.clone(), Allocator::Buffer).open_quietly();
    match opened.as_ref().map(Session::backend) {
        Ok(kind) => args.backend = Some(kind),
        Err(error) if !chosen && matches!(error.kind(), ErrorKind::NoDriver | ErrorKind::NoDevice) => {
            say(TOOL, &format!("no GPU to test, so an emulated one is used ({})", error.cause()));
            args.backend = Some(BackendKind::Emulated);
        }
        Err(error) => return Err(error.clone().into()),
    }
    if args.sigbus && args.backend != Some(BackendKind::Emulated) {
        return Err(Failure::usage("--sigbus is a setting of emulated GPUs; add --backend emulated"));
    }
    Ok(())
}

fn in_its_process(test: &Test, args: &Args) -> Result<Ran, Failure> {
    let cannot = |error: std::io::Error| Failure::run(format!("cannot start a process for {}: {error}", test.name));
    let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
    command.args(args.passed_on()).args(["--be", &test.name]);
    process::run(&mut command, Duration::from_secs(args.timeout)).map_err(cannot)
}

/// The inner process of a test.
fn be(test: &Test, args: Args) -> ExitCode {
    process::end_with_parent();
    fork::no_core();
    voice::conclude(test.run(&Bench::new(args, test.how)));
    ExitCode::SUCCESS
}

/// The second process of a test.
fn assist(part: &str, args: Args) -> Step {
    process::end_with_parent();
    fork::no_core();
    let bench = Bench::new(args, Allocator::Buffer);
    match part {
        "list" => cases::descriptors::list(),
        "inherit" => cases::descriptors::inherit(),
        "receive" => cases::descriptors::receive(),
        "import" => cases::descriptors::import(&bench),
        "hold" => cases::leaks::hold(&bench, false),
        "hold-in-child" => cases::leaks::hold(&bench, true),
        other => Err(Stop::Failed(format!("there is no part {other}"))),
    }
}
