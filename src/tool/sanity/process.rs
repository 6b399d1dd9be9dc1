//! A test in a process of its own, so that whatever it does to itself (SIGBUS, SIGSEGV, a hang) becomes a result.

#![allow(unsafe_code, reason = "ending a process group, and with a parent")]

use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::voice::{Facts, Word, heard};

/// How often a running process is looked at, at most.
const GLANCE: Duration = Duration::from_millis(10);
/// What is still in a pipe when its process has ended arrives at once; a descendant may hold the pipe open.
const REST: Duration = Duration::from_secs(2);
/// How much of what a dying process said is passed on.
const LAST_WORDS: usize = 300;

/// What a test came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::tool) enum Verdict {
    Passed,
    Failed(String),
    Waived(String),
}

/// A finished test.
#[derive(Debug)]
pub(in crate::tool) struct Ran {
    pub(in crate::tool) verdict: Verdict,
    pub(in crate::tool) facts: Option<Facts>,
    pub(in crate::tool) notes: Vec<String>,
    pub(in crate::tool) took: Duration,
}

fn reader(stream: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (tell, hear) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let mut chunk = [0; 4096];
            while let Ok(got @ 1..) = stream.read(&mut chunk) {
                bytes.extend_from_slice(&chunk[..got]);
                // Each state is told, so that a pipe that stays open hides nothing.
                if tell.send(String::from_utf8_lossy(&bytes).into_owned()).is_err() {
                    return;
                }
            }
        }
    });
    hear
}

/// Everything a stream said, once its process has ended.
fn all(hear: &Receiver<String>) -> String {
    let deadline = Instant::now() + REST;
    let mut text = String::new();
    while let Ok(more) = hear.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        text = more;
    }
    text
}

/// Waits for the process, and ends it with all its descendants when its time is up.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let started = Instant::now();
    let mut pause = Duration::from_micros(500);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() >= limit {
            if let Ok(group) = i32::try_from(child.id()) {
                // SAFETY: the leader has not been waited for, so the group is still the one that we made.
                unsafe { libc::kill(-group, libc::SIGKILL) };
            }
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(GLANCE);
    }
}

/// Runs a test's process to its end, which comes after `limit` at the latest.
pub(in crate::tool) fn run(command: &mut Command, limit: Duration) -> io::Result<Ran> {
    let started = Instant::now();
    // A group of its own: a process that hangs is ended with all that it started. Ctrl-C then reaches us alone, and the
    // others end with us.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let (said, complained) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let status = wait(&mut child, limit)?;
    let took = started.elapsed();
    drop(child.stdin.take());
    let words: Vec<Word> = heard(&all(&said)).collect();
    let verdict = judge(status, limit, &words, &all(&complained));
    let facts = words.iter().find_map(|word| match word {
        Word::Session(facts) => Some(facts.clone()),
        _ => None,
    });
    let notes = words.into_iter().filter_map(|word| match word {
        Word::Note(note) => Some(note),
        _ => None,
    });
    Ok(Ran { verdict, facts, notes: notes.collect(), took })
}

/// Has the kernel end this process with the one that started it, so that an interrupted run leaves nothing behind.
pub(super) fn end_with_parent() {
    // SAFETY: plain values; the call affects this process alone.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// The name of a signal that ends processes.
pub(in crate::tool) fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGBUS => "SIGBUS",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGABRT => "SIGABRT",
        libc::SIGILL => "SIGILL",
        libc::SIGKILL => "SIGKILL",
        libc::SIGALRM => "SIGALRM",
        _ => return format!("signal {signal}"),
    };
    name.to_owned()
}

/// The end of what a process complained about.
fn last_words(complaints: &str) -> String {
    let text = complaints.split_whitespace().collect::<Vec<_>>().join(" ");
    if text.is_empty() {
        return String::new();
    }
    let skip = text.chars().count().saturating_sub(LAST_WORDS);
    format!("; its last words: {}", text.chars().skip(skip).collect::<String>())
}

fn judge(status: Option<ExitStatus>, limit: Duration, words: &[Word], complaints: &str) -> Verdict {
    let Some(status) = status else {
        let secs = limit.as_secs();
        return Verdict::Failed(format!("it hung: killed after {secs} s (--timeout){}", last_words(complaints)));
    };
    let expected = words.iter().find_map(|word| match word {
        Word::DyingOf { signal, because } => Some((*signal, because)),
        _ => None,
    });
    let concluded = words.iter().find_map(|word| match word {
        Word::Passed => Some(Verdict::Passed),
        Word::Failed(reason) => Some(Verdict::Failed(reason.clone())),
        Word::Waived(reason) => Some(Verdict::Waived(reason.clone())),
        _ => None,
    });
    match (status.signal(), expected, concluded) {
        (Some(signal), Some((wanted, _)), None) if signal == wanted => Verdict::Passed,
        (Some(signal), Some((wanted, because)), _) => Verdict::Failed(format!(
            "{because}: it died of {}, not of {}{}",
            signal_name(signal),
            signal_name(wanted),
            last_words(complaints)
        )),
        (Some(signal), None, _) => {
            Verdict::Failed(format!("it died of {}{}", signal_name(signal), last_words(complaints)))
        }
        (None, Some((wanted, because)), Some(Verdict::Passed)) => {
            Verdict::Failed(format!("{because}: access should raise {} and did not", signal_name(wanted)))
        }
        (None, _, Some(verdict)) => verdict,
        (None, _, None) => {
            let code = status.code().unwrap_or(-1);
            Verdict::Failed(format!("it ended without a word, with status {code}{}", last_words(complaints)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn shell(script: &str, limit: Duration) -> Verdict {
        run(Command::new("sh").args(["-c", script]), limit).unwrap().verdict
    }

    fn failure(verdict: &Verdict) -> &str {
        let Verdict::Failed(reason) = verdict else { panic!("{verdict:?}") };
        reason
    }

    const DYING: &str = r#"echo '@gdrcopy-sanity {"dying_of":{"signal":7,"because":"freed"}}'"#;
    const PASSED: &str = "echo '@gdrcopy-sanity \"passed\"'";

    #[test]
    fn ends_become_verdicts() {
        assert_eq!(shell(PASSED, LIMIT), Verdict::Passed);
        let waived = r#"echo noise; echo '@gdrcopy-sanity {"waived":"no BAR1"}'"#;
        assert_eq!(shell(waived, LIMIT), Verdict::Waived("no BAR1".to_owned()));
        assert_eq!(failure(&shell(r#"echo '@gdrcopy-sanity {"failed":"bytes"}'"#, LIMIT)), "bytes");
        let mute = shell("echo oh no >&2; exit 7", LIMIT);
        assert_eq!(failure(&mute), "it ended without a word, with status 7; its last words: oh no");
    }

    #[test]
    fn signals_are_named_expected_or_not() {
        assert_eq!(shell(&format!("{DYING}; kill -BUS $$"), LIMIT), Verdict::Passed);
        assert_eq!(failure(&shell("kill -SEGV $$", LIMIT)), "it died of SIGSEGV");
        assert_eq!(failure(&shell(&format!("{PASSED}; kill -BUS $$"), LIMIT)), "it died of SIGBUS");
        let other = shell(&format!("{DYING}; kill -SEGV $$"), LIMIT);
        assert_eq!(failure(&other), "freed: it died of SIGSEGV, not of SIGBUS");
        let survived = shell(&format!("{DYING}; {PASSED}"), LIMIT);
        assert_eq!(failure(&survived), "freed: access should raise SIGBUS and did not");
    }

    #[test]
    fn a_hang_is_a_failure_and_takes_its_descendants_along() {
        let started = Instant::now();
        let hung = shell("sleep 1000 & sleep 1000", Duration::from_millis(300));
        assert!(failure(&hung).starts_with("it hung: killed after 0 s"), "{hung:?}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
