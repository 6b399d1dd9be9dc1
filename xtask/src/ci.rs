//! The runner of `cargo xtask ci`: selection, one line before and after each step, the summary.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::run::Log;
use crate::steps;
use crate::workspace::Workspace;

#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// `Err` is a failure with its reason.
    pub(crate) run: fn(&mut Log, &Workspace) -> Result<Verdict, String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// Not run, and why not.
    Skipped(String),
}

#[derive(Debug)]
struct Done {
    name: &'static str,
    result: Result<Verdict, String>,
    took: Duration,
    /// The end of the step's output, shown again if it failed.
    output: Vec<String>,
}

/// The steps of these names in the order asked for, each once; all the usual ones if no name is given.
pub(crate) fn select<'a>(usual: &'a [Step], further: &'a [Step], names: &[String]) -> Result<Vec<&'a Step>, String> {
    if names.is_empty() {
        return Ok(usual.iter().collect());
    }
    let mut selected: Vec<&Step> = Vec::new();
    for name in names {
        let step = usual
            .iter()
            .chain(further)
            .find(|step| step.name == name)
            .ok_or_else(|| format!("ci: no step `{name}`; `cargo xtask ci --list` names them"))?;
        if selected.iter().all(|earlier| earlier.name != step.name) {
            selected.push(step);
        }
    }
    Ok(selected)
}

pub(crate) fn list(log: &mut Log) {
    let width = steps::every().map(|step| step.name.len()).max().unwrap_or(0);
    for step in steps::every() {
        log.say(&format!("{:width$}  {}", step.name, step.about));
    }
}

pub(crate) fn run(log: &mut Log, workspace: &Workspace, steps: &[&Step]) -> ExitCode {
    let done: Vec<Done> = steps.iter().map(|step| run_step(log, workspace, step)).collect();
    log.say("");
    for line in report(&done) {
        log.say(&line);
    }
    if done.iter().any(|step| step.result.is_err()) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run_step(log: &mut Log, workspace: &Workspace, step: &Step) -> Done {
    log.say(&format!("==> {}", step.name));
    // What earlier steps left is not this step's output.
    log.take();
    let start = Instant::now();
    let result = (step.run)(log, workspace);
    let done = Done { name: step.name, result, took: start.elapsed(), output: log.take() };
    log.say(&format!("<== {}", verdict_line(&done)));
    done
}

fn verdict_line(done: &Done) -> String {
    let seconds = done.took.as_secs_f64();
    match &done.result {
        Ok(Verdict::Passed) => format!("{}: passed in {seconds:.1} s", done.name),
        Ok(Verdict::Skipped(reason)) => format!("{}: SKIPPED in {seconds:.1} s: {reason}", done.name),
        Err(reason) => format!("{}: FAILED in {seconds:.1} s: {reason}", done.name),
    }
}

/// One line per step, the failed ones with the end of their output, and the counts as the last line.
fn report(done: &[Done]) -> Vec<String> {
    let mut lines = Vec::new();
    for step in done {
        lines.push(verdict_line(step));
        if step.result.is_err() {
            lines.extend(step.output.iter().map(|line| format!("  | {line}")));
        }
    }
    lines.push(counts(done));
    lines
}

fn counts(done: &[Done]) -> String {
    let failed = done.iter().filter(|step| step.result.is_err()).count();
    let skipped = done.iter().filter(|step| matches!(step.result, Ok(Verdict::Skipped(_)))).count();
    format!("{} passed, {failed} failed, {skipped} skipped", done.len() - failed - skipped)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: &[Step] = &[
        Step { name: "one", about: "", run: |_, _| Ok(Verdict::Passed) },
        Step { name: "two words", about: "", run: |_, _| Ok(Verdict::Skipped("no card".to_owned())) },
        Step {
            name: "three",
            about: "",
            run: |log, _| {
                log.keep("error[E0308]".to_owned());
                Err("exit status: 1".to_owned())
            },
        },
    ];

    fn selected(names: &[&str]) -> Result<Vec<&'static str>, String> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        select(&STEPS[..2], &STEPS[2..], &names).map(|steps| steps.iter().map(|step| step.name).collect())
    }

    fn done(steps: &[&Step]) -> Vec<Done> {
        let workspace =
            Workspace { root: "/".into(), target: "/".into(), rust_version: String::new(), tests: Vec::new() };
        steps.iter().map(|step| run_step(&mut Log::new(std::io::sink()), &workspace, step)).collect()
    }

    #[test]
    fn no_name_selects_the_usual_steps() {
        assert_eq!(selected(&[]), Ok(vec!["one", "two words"]));
    }

    #[test]
    fn names_select_in_the_order_given_and_once() {
        assert_eq!(selected(&["three", "two words", "three"]), Ok(vec!["three", "two words"]));
    }

    #[test]
    fn an_unknown_step_is_an_error_that_names_it() {
        let error = selected(&["one", "four"]).unwrap_err();
        assert!(error.contains("`four`"), "{error}");
    }

    #[test]
    fn the_last_line_is_the_counts_alone() {
        let all = done(&selected_steps());
        assert_eq!(report(&all).last().map(String::as_str), Some("1 passed, 1 failed, 1 skipped"));
        assert_eq!(counts(&[]), "0 passed, 0 failed, 0 skipped");
    }

    #[test]
    fn the_report_repeats_output_of_failed_steps_only() {
        let lines = report(&done(&selected_steps()));
        assert!(lines[0].starts_with("one: passed in "), "{lines:?}");
        assert!(lines[1].starts_with("two words: SKIPPED in ") && lines[1].ends_with(": no card"), "{lines:?}");
        assert!(lines[2].starts_with("three: FAILED in ") && lines[2].ends_with(": exit status: 1"), "{lines:?}");
        assert_eq!(lines[3], "  | error[E0308]");
        assert_eq!(lines.len(), 5);
    }

    #[test]
    fn every_step_has_its_own_name_and_says_what_it_does() {
        let all: Vec<_> = steps::every().collect();
        for (at, step) in all.iter().enumerate() {
            assert!(!step.about.is_empty(), "{}", step.name);
            assert!(all[..at].iter().all(|earlier| earlier.name != step.name), "{}", step.name);
        }
    }

    fn selected_steps() -> Vec<&'static Step> {
        STEPS.iter().collect()
    }
}
