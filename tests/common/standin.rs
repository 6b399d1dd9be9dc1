//! The stand-in for a GPU and the module `gdrdrv` (see `tests/standin/standin.h`), built when first wanted.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The version of the module that the stand-in plays; set in processes that run over it, and in no other.
pub const VERSION: &str = "GDRCOPY_STANDIN_VERSION";
pub const PERSISTENT: &str = "GDRCOPY_STANDIN_PERSISTENT";
pub const FAULT: &str = "GDRCOPY_STANDIN_FAULT";
pub const MINIMUM: &str = "GDRCOPY_STANDIN_MINIMUM";
pub const LOG: &str = "GDRCOPY_STANDIN_LOG";
pub const GPUS: &str = "GDRCOPY_STANDIN_GPUS";
pub const WATCHDOG: &str = "GDRCOPY_STANDIN_WATCHDOG";
pub const MPS: &str = "GDRCOPY_STANDIN_MPS";
pub const MAJORS: &str = "GDRCOPY_STANDIN_MAJORS";
pub const MEMORY: &str = "GDRCOPY_STANDIN_MEMORY";
pub const VA: &str = "GDRCOPY_STANDIN_VA";
pub const FREE: &str = "GDRCOPY_STANDIN_FREE";

const FLAGS: [&str; 8] = [
    "-shared",
    "-fPIC",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
    // What `dlopen` goes by: the preloaded library is the driver.
    "-Wl,-soname,libcuda.so.1",
];

/// A setting of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    pub version: &'static str,
    pub persistent: bool,
}

const fn module(version: &'static str, persistent: bool) -> Module {
    Module { version, persistent }
}

/// Every version with calls of its own, in each mode that it has.
pub const MODULES: [Module; 8] = [
    module("2.0", false),
    module("2.3", false),
    module("2.4", false),
    module("2.4", true),
    module("2.5", false),
    module("2.5", true),
    module("2.6", false),
    module("2.6", true),
];

impl Module {
    /// The setting that this process runs over, if it runs over the stand-in.
    pub fn here() -> Option<Self> {
        let version = std::env::var(VERSION).ok()?;
        let persistent = std::env::var(PERSISTENT).is_ok_and(|value| value == "1");
        MODULES.into_iter().find(|module| module.version == version && module.persistent == persistent)
    }
}

fn build() -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/standin");
    let mut files: Vec<_> =
        fs::read_dir(&sources).expect("the sources").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    FLAGS.hash(&mut hasher);
    for file in &files {
        (file, fs::read(file).expect("a source")).hash(&mut hasher);
    }
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let built = tmp.join(format!("standin-{:016x}.so", hasher.finish()));
    if !built.exists() {
        // Several test binaries may be at it: each builds its own, and the last one to finish stays.
        let own = tmp.join(format!("standin-{}.so", std::process::id()));
        let units = files.iter().filter(|file| file.extension() == Some(OsStr::new("c")));
        let cc = Command::new("cc").args(FLAGS).arg("-o").arg(&own).args(units).output().expect("a C compiler, cc");
        assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
        fs::rename(&own, &built).expect("a name of its own");
    }
    built
}

/// The built stand-in.
pub fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build)
}

/// This test binary again, over the stand-in, without settings of the environment's.
pub fn command(module: Module) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("GDRCOPY_")) {
            command.env_remove(name);
        }
    }
    command.env("LD_PRELOAD", library()).env(VERSION, module.version);
    if module.persistent {
        command.env(PERSISTENT, "1");
    }
    command
}

/// Both outputs of a process.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The number before a word in the harness's last line, as in `27 passed`.
pub fn counted(text: &str, word: &str) -> usize {
    let result = text.lines().rfind(|line| line.starts_with("test result: ")).unwrap_or_else(|| panic!("{text}"));
    let words: Vec<_> = result.split_whitespace().collect();
    let at = words.iter().position(|found| found.trim_end_matches(';') == word).expect("the word");
    words[at - 1].parse().expect("a number")
}
