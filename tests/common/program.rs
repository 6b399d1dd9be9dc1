//! A program of this package as a user meets it.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// The program in an environment that sets nothing of ours.
pub(crate) fn plain(path: &str) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("GDRCOPY_")) {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// Exit status and the one line on standard error that a refusal consists of.
#[track_caller]
pub(crate) fn refusal<'a>(tool: &str, output: &'a Output) -> (i32, &'a str) {
    let stderr = text(&output.stderr);
    assert_eq!(stderr.lines().count(), 1, "not one line: {stderr:?}");
    let line = stderr.trim_end().strip_prefix(tool).and_then(|line| line.strip_prefix(": "));
    (output.status.code().expect("an exit"), line.expect("the line begins with the program's name"))
}

/// Runs it into a pipe that nobody reads.
pub(crate) fn closed_pipe(command: &mut Command) -> Output {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let child = command.stdout(writer).stderr(Stdio::piped()).spawn().expect("a process");
    child.wait_with_output().expect("its end")
}

/// A directory that goes away with the test.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("text").to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
