//! Where results go: standard streams that may be closed at any moment, and files that appear whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::fail::Failure;
use super::rig::BANNER;
use crate::sys::num::u64_of;

/// The target of `--json`, `--csv` and `--plot`.
#[derive(Debug)]
pub enum Target {
    /// `-`.
    Stdout,
    /// A regular file, or one that is not there yet: written beside it, then renamed over it.
    Replace(PathBuf),
    /// Anything that cannot be replaced (a device, a pipe, a file in a directory we may not write to), held open.
    InPlace(PathBuf, File),
}

impl Target {
    /// Checks before anything is measured that `path` can be written. An existing file stays as it is until then.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        if path.as_os_str() == "-" {
            return Ok(Self::Stdout);
        }
        // A link is followed: what it points at is replaced, not the link.
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let is_new = match fs::metadata(&real) {
            Ok(found) if found.is_dir() => return Err(refused(path, "it is a directory; name a file in it")),
            Ok(found) if !found.is_file() => return Self::in_place(path, real),
            Ok(_) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => return Err(refused(path, &format!("{error}; name a path you can write"))),
        };
        let draft = draft_of(&real);
        match File::create_new(&draft) {
            Ok(_) => {
                let _ = fs::remove_file(&draft);
                Ok(Self::Replace(real))
            }
            Err(_) if !is_new => Self::in_place(path, real),
            Err(error) => Err(refused(path, &format!("{error}; name a path you can write"))),
        }
    }

    fn in_place(path: &Path, real: PathBuf) -> Result<Self, Failure> {
        match OpenOptions::new().write(true).open(&real) {
            Ok(file) => Ok(Self::InPlace(real, file)),
            Err(error) => Err(refused(path, &format!("{error}; name a path you can write"))),
        }
    }

    /// Whether this is standard output.
    #[must_use]
    pub fn is_stdout(&self) -> bool {
        matches!(self, Self::Stdout)
    }

    /// Writes all of `text`.
    ///
    /// # Errors
    ///
    /// It cannot be written; a file that was to be replaced is then as it was before.
    pub fn write(self, text: &str) -> Result<(), Failure> {
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes())
                    .and_then(|()| out.flush())
                    .map_err(|error| Failure::write("standard output", &error))
            }
            Self::Replace(path) => {
                let draft = draft_of(&path);
                let written = File::create(&draft)
                    .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
                    .and_then(|()| fs::rename(&draft, &path));
                written.map_err(|error| {
                    let _ = fs::remove_file(&draft);
                    Failure::write(&path.display().to_string(), &error)
                })
            }
            Self::InPlace(path, mut file) => {
                // Only a regular file has an old end to cut off; devices and pipes refuse.
                let is_file = file.metadata().is_ok_and(|found| found.is_file());
                let cut = if is_file { file.set_len(0) } else { Ok(()) };
                cut.and_then(|()| file.write_all(text.as_bytes()))
                    .map_err(|error| Failure::write(&path.display().to_string(), &error))
            }
        }
    }
}

fn refused(path: &Path, why: &str) -> Failure {
    Failure::run(format!("cannot write {}: {why}", path.display()))
}

/// The name a file has while it is being written.
fn draft_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}

/// The stream people read: standard output, or standard error where standard output carries a report. A terminal also
/// gets a progress bar on standard error. It is drawn between two measurements, by the thread that measures: nothing runs
/// beside them.
#[derive(Debug)]
pub struct Screen {
    to_stderr: bool,
    is_optional: bool,
    bar: ProgressBar,
}

impl Screen {
    /// The stream for a run that makes these reports.
    pub fn beside<'a>(reports: impl Iterator<Item = &'a Target> + Clone) -> Self {
        Self {
            to_stderr: reports.clone().any(Target::is_stdout),
            is_optional: reports.count() > 0,
            bar: ProgressBar::hidden(),
        }
    }

    /// Shows a bar for so many steps, if standard error is a terminal.
    pub fn begin(&self, steps: usize) {
        if io::stderr().is_terminal()
            && let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {msg} (Ctrl-C: report what there is)")
        {
            self.bar.set_style(style);
            self.bar.set_length(u64_of(steps));
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Says what is being measured.
    pub fn doing(&self, what: &str) {
        if !self.bar.is_hidden() {
            self.bar.set_message(what.to_owned());
        }
    }

    /// A step is done.
    pub fn done(&self) {
        self.bar.inc(1);
    }

    /// Takes the bar away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }

    /// Says above a table that its figures are those of no GPU, if so.
    ///
    /// # Errors
    ///
    /// As [`Screen::line`].
    pub fn banner(&self, is_emulated: bool) -> Result<(), Failure> {
        if is_emulated { self.line(BANNER) } else { Ok(()) }
    }

    /// Prints one line at once.
    ///
    /// # Errors
    ///
    /// The stream cannot be written. That its reader is gone is none as long as there is a report to make.
    pub fn line(&self, line: &str) -> Result<(), Failure> {
        self.bar.suspend(|| self.print(&format!("{line}\n")))
    }

    fn print(&self, line: &str) -> Result<(), Failure> {
        if self.to_stderr {
            // A lost progress line is no reason to lose the report.
            let _ = io::stderr().write_all(line.as_bytes());
            return Ok(());
        }
        let mut out = io::stdout().lock();
        match out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe && self.is_optional => Ok(()),
            other => other.map_err(|error| Failure::write("standard output", &error)),
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that goes away with the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("gdrcopy-output-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let mut names: Vec<String> =
                fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_new_file_appears_only_when_written() {
        let dir = Scratch::new("new");
        let target = Target::open(&dir.0.join("a.json")).unwrap();
        assert_eq!(dir.names(), [""; 0]);
        target.write("text").unwrap();
        assert_eq!(dir.names(), ["a.json"]);
        assert_eq!(fs::read_to_string(dir.0.join("a.json")).unwrap(), "text");
    }

    #[test]
    fn an_old_file_is_replaced_through_its_link() {
        let dir = Scratch::new("old");
        let (file, link) = (dir.0.join("a"), dir.0.join("b"));
        fs::write(&file, "a long old text").unwrap();
        std::os::unix::fs::symlink("a", &link).unwrap();
        let target = Target::open(&link).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "a long old text");
        target.write("new").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(dir.names(), ["a", "b"]);
    }

    #[test]
    fn a_file_written_in_place_loses_its_old_end() {
        let dir = Scratch::new("place");
        let path = dir.0.join("a");
        fs::write(&path, "a long old text").unwrap();
        Target::in_place(&path, path.clone()).unwrap().write("new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn what_cannot_be_written_is_refused_at_once() {
        let dir = Scratch::new("bad");
        for (path, why) in [(dir.0.join("no/a"), "No such file"), (dir.0.clone(), "directory")] {
            let line = Target::open(&path).unwrap_err().to_string();
            assert!(line.contains(why) && line.contains(&path.display().to_string()), "{line}");
        }
    }

    #[test]
    fn a_full_device_is_an_error_with_a_remedy() {
        let line = Target::open(Path::new("/dev/full")).unwrap().write("text").unwrap_err().to_string();
        assert!(line.contains("/dev/full") && line.contains("make room"), "{line}");
        Target::open(Path::new("/dev/null")).unwrap().write("text").unwrap();
    }
}
