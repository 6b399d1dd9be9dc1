//! Running other programs: their output is shown as it comes, and the end of it is kept for the summary.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, PipeReader, Read, Write, pipe};
use std::process::{Child, Command, Stdio};
use std::thread;

/// Lines of output repeated under a failed step: enough for a compiler error or a panic.
const KEPT_LINES: usize = 60;

/// Everything goes to one output, in order, and the last lines stay at hand.
pub(crate) struct Log {
    output: Box<dyn Write>,
    kept: VecDeque<String>,
}

impl Log {
    pub(crate) fn new(output: impl Write + 'static) -> Self {
        Self { output: Box::new(output), kept: VecDeque::new() }
    }

    /// Prints a line of our own.
    pub(crate) fn say(&mut self, line: &str) {
        // A reader that went away (`| head`) is no reason to stop the checks.
        let _ = writeln!(self.output, "{line}");
    }

    /// Prints a line that is kept for the summary.
    pub(crate) fn keep(&mut self, line: String) {
        self.say(&line);
        if self.kept.len() == KEPT_LINES {
            self.kept.pop_front();
        }
        self.kept.push_back(line);
    }

    /// Takes the lines kept since the last call.
    pub(crate) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.kept).into()
    }

    fn keep_all(&mut self, from: PipeReader) -> Result<(), String> {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while from.read_until(b'\n', &mut line).map_err(|error| format!("reading a program's output: {error}"))? > 0 {
            self.keep(String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned());
            line.clear();
        }
        Ok(())
    }
}

/// A command that runs without standard input.
pub(crate) fn command<A: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    command
}

/// The cargo that runs us.
pub(crate) fn cargo<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    command(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()), args)
}

/// Runs a command, both of its outputs into the log.
pub(crate) fn run(log: &mut Log, mut command: Command) -> Result<(), String> {
    let (reader, writer) = new_pipe()?;
    let copy = writer.try_clone().map_err(|error| format!("duplicating a pipe: {error}"))?;
    command.stdout(copy).stderr(writer);
    let shown = shown(&command);
    log.keep(format!("    $ {shown}"));
    let child = spawn(&mut command)?;
    // The command holds the write ends: the reader would never see the end of the output.
    drop(command);
    log.keep_all(reader)?;
    finished(child, &shown)
}

/// Runs a command and returns its standard output; its standard error goes into the log.
pub(crate) fn capture(log: &mut Log, mut command: Command) -> Result<String, String> {
    let (errors, error_writer) = new_pipe()?;
    let (mut output, output_writer) = new_pipe()?;
    command.stdout(output_writer).stderr(error_writer);
    let shown = shown(&command);
    log.keep(format!("    $ {shown}"));
    let child = spawn(&mut command)?;
    drop(command);
    // On a thread: a program that fills one pipe while the other is being read would wait for ever.
    let collector = thread::spawn(move || {
        let mut bytes = Vec::new();
        output.read_to_end(&mut bytes).map(|_| bytes)
    });
    log.keep_all(errors)?;
    let bytes = match collector.join() {
        Ok(read) => read.map_err(|error| format!("reading the output of `{shown}`: {error}"))?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    finished(child, &shown)?;
    String::from_utf8(bytes).map_err(|_| format!("the output of `{shown}` is not UTF-8"))
}

/// The standard output of a short query, with nothing printed; `None` if it cannot be run or fails.
pub(crate) fn query<'a>(program: &str, args: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let output = command(program, args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn new_pipe() -> Result<(PipeReader, std::io::PipeWriter), String> {
    pipe().map_err(|error| format!("creating a pipe: {error}"))
}

fn spawn(command: &mut Command) -> Result<Child, String> {
    command.spawn().map_err(|error| format!("`{}` cannot be started: {error}", command.get_program().display()))
}

fn finished(mut child: Child, shown: &str) -> Result<(), String> {
    let status = child.wait().map_err(|error| format!("waiting for `{shown}`: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("`{shown}`: {status}")) }
}

/// The command as one would type it, environment first.
fn shown(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        value.map(|value| format!("{}={}", name.display(), quoted(&value.to_string_lossy())))
    });
    let program = command.get_program().to_string_lossy();
    let program = program.rsplit('/').next().unwrap_or(&program).to_owned();
    let args = command.get_args().map(|arg| quoted(&arg.to_string_lossy()));
    variables.chain([program]).chain(args).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    if word.is_empty() || word.contains(char::is_whitespace) { format!("'{word}'") } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::io::sink;

    use super::*;

    #[test]
    fn both_outputs_are_kept_and_a_failure_names_the_command() {
        let mut log = Log::new(sink());
        let error = run(&mut log, command("sh", ["-c", "echo out; echo err >&2; exit 3"])).unwrap_err();
        assert!(error.contains("sh -c") && error.contains('3'), "{error}");
        let kept = log.take();
        assert_eq!(kept.len(), 3, "{kept:?}");
        assert!(kept.contains(&"out".to_owned()) && kept.contains(&"err".to_owned()), "{kept:?}");
        assert!(log.take().is_empty());
    }

    #[test]
    fn capture_separates_the_outputs_beyond_a_pipe_full() {
        let mut log = Log::new(sink());
        let script = "i=0; while [ $i -lt 20000 ]; do echo 12345678; echo 87654321 >&2; i=$((i+1)); done";
        let output = capture(&mut log, command("sh", ["-c", script])).unwrap();
        assert_eq!(output.len(), 20000 * 9);
        assert!(output.lines().all(|line| line == "12345678"));
        let kept = log.take();
        assert_eq!(kept.len(), KEPT_LINES);
        assert!(kept.iter().all(|line| line == "87654321"));
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(&mut Log::new(sink()), command("no-such-program", [""; 0])).unwrap_err();
        assert!(error.contains("no-such-program"), "{error}");
        assert_eq!(query("no-such-program", []), None);
    }

    #[test]
    fn there_is_no_standard_input() {
        assert_eq!(capture(&mut Log::new(sink()), command("cat", [""; 0])), Ok(String::new()));
    }

    #[test]
    fn a_command_is_shown_as_typed() {
        let mut command = command("/usr/bin/cargo", ["doc", "--cfg", "a b"]);
        command.env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(shown(&command), "RUSTDOCFLAGS='-D warnings' cargo doc --cfg 'a b'");
    }
}
