//! How a program ends when it cannot do what was asked: one line, and an exit status.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::Error;

/// Why a program stops.
#[derive(Debug)]
pub enum Failure {
    /// The command line makes no sense; exit status 2.
    Usage(String),
    /// It could not be done; exit status 1.
    Run(String),
    /// The user asked for an end; exit status 130, as shells have it for SIGINT.
    Interrupted,
    /// Whoever read our output has had enough of it: no error, and nobody to tell.
    ReaderGone,
}

impl Failure {
    /// A command line that makes no sense.
    pub fn usage(line: impl Into<String>) -> Self {
        Self::Usage(line.into())
    }

    /// Something that could not be done.
    pub fn run(line: impl Into<String>) -> Self {
        Self::Run(line.into())
    }

    /// Failure to write `what`.
    #[must_use]
    pub fn write(what: &str, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ReaderGone,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Run(format!("cannot write {what}: {error}; make room or name another file"))
            }
            _ => Self::Run(format!("cannot write {what}: {error}")),
        }
    }

    /// Says it on standard error under the program's name, and gives the exit status.
    #[must_use]
    pub fn report(&self, tool: &str) -> ExitCode {
        let status = match self {
            Self::Usage(_) => ExitCode::from(2),
            Self::Run(_) => ExitCode::FAILURE,
            Self::Interrupted => ExitCode::from(130),
            Self::ReaderGone => return ExitCode::SUCCESS,
        };
        say(tool, &self.to_string());
        status
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(line) | Self::Run(line) => f.write_str(line),
            Self::Interrupted => {
                f.write_str("interrupted: what was measured until then is complete, the rest is missing")
            }
            Self::ReaderGone => f.write_str("the reader of the output is gone"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Run(error.to_string())
    }
}

/// One line on standard error under the program's name; nobody is left to tell if that fails.
pub fn say(tool: &str, line: &str) {
    let _ = writeln!(io::stderr(), "{tool}: {line}");
}

/// What clap says in several paragraphs, as one line; its help and version texts go to standard output instead.
///
/// # Errors
///
/// Standard output cannot be written.
pub fn clap_outcome(error: &clap::Error) -> Result<(), Failure> {
    use clap::error::ErrorKind;
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let mut out = io::stdout().lock();
        return writeln!(out, "{}", error.to_string().trim_end())
            .and_then(|()| out.flush())
            .map_err(|error| Failure::write("standard output", &error));
    }
    Err(Failure::Usage(one_line(&error.to_string())))
}

fn one_line(text: &str) -> String {
    let said =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).take_while(|line| !line.starts_with("Usage:"));
    let mut line = said.map(|part| part.trim_start_matches("error: ")).collect::<Vec<_>>().join("; ");
    if let Some(rest) = line.find("; For more information") {
        line.truncate(rest);
    }
    line + "; --help lists the flags"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_in_one_line() {
        let text = "error: invalid value 'x' for '-M <TYPE>'\n  [possible values: wc, cache]\n\nFor more information, try '--help'.\n";
        assert_eq!(
            one_line(text),
            "invalid value 'x' for '-M <TYPE>'; [possible values: wc, cache]; --help lists the flags"
        );
        let text =
            "error: unexpected argument '-x' found\n\nUsage: t [OPTIONS]\n\nFor more information, try '--help'.\n";
        assert_eq!(one_line(text), "unexpected argument '-x' found; --help lists the flags");
    }

    #[test]
    fn a_broken_pipe_is_no_error() {
        let gone = Failure::write("standard output", &io::Error::from_raw_os_error(libc::EPIPE));
        assert!(matches!(gone, Failure::ReaderGone));
        let full = Failure::write("out.json", &io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(
            full.to_string(),
            "cannot write out.json: No space left on device (os error 28); make room or name another file"
        );
    }
}
