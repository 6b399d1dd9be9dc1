//! The command line of `gdrcopy_sanity`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;

use crate::backend::BackendKind;
use crate::tool::rig;

/// Tests that GPU memory can be pinned, mapped, written and read on this machine.
///
/// Each test runs in a process of its own: a crash or a hang is its failure, nobody else's.
/// Tests that do not apply to the backend are waived, with the reason.
///
/// Exit status: 0 passed, 1 a test failed, 2 bad command line, 3 every test was waived.
#[derive(Parser, Debug, Clone)]
#[command(name = super::TOOL, version, verbatim_doc_comment)]
pub(super) struct Args {
    /// Say what each test does, and what it noticed
    #[arg(short = 'v')]
    pub(super) verbose: bool,

    /// No summary at the end
    #[arg(short = 's')]
    pub(super) no_summary: bool,

    /// List the tests and stop
    #[arg(short = 'l', long = "list", conflicts_with = "json")]
    pub(super) list: bool,

    /// Run the one test of this name (may be repeated)
    #[arg(short = 't', value_name = "TEST")]
    pub(super) tests: Vec<String>,

    /// Run the tests whose names contain this
    #[arg(long, value_name = "SUBSTR")]
    pub(super) filter: Option<String>,

    /// Ordinal of the GPU
    #[arg(short = 'd', value_name = "N", default_value_t = 0)]
    pub(super) device: usize,

    /// Also run the extended tests, which take longer
    #[arg(short = 'e')]
    pub(super) extended: bool,

    /// gdrdrv, rm, vulkan or emulated [default: the best there is]
    ///
    /// Without a GPU and without this flag or GDRCOPY_BACKEND, an emulated GPU is tested.
    #[arg(long, value_name = "BACKEND", value_parser = rig::backend)]
    pub(super) backend: Option<BackendKind>,

    /// Copy routine [default: the library's choice for this CPU]
    #[arg(long, value_name = "ROUTINE", value_parser = rig::routine)]
    pub(super) copy: Option<String>,

    /// Emulated GPUs only: access to freed memory raises SIGBUS
    #[arg(long)]
    pub(super) sigbus: bool,

    /// Time limit of one test in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout: u64,

    /// Print the results as TAP (Test Anything Protocol)
    #[arg(long)]
    pub(super) tap: bool,

    /// Write the results as JSON, with - to standard output
    ///
    /// Standard output then carries nothing else; the text goes to standard error.
    #[arg(long, value_name = "FILE|-")]
    pub(super) json: Option<PathBuf>,

    /// Be the process of one test
    #[arg(long, value_name = "TEST", hide = true)]
    pub(super) be: Option<String>,

    /// Be a second process of one test
    #[arg(long, value_name = "PART", hide = true)]
    pub(super) assist: Option<String>,
}

impl Args {
    /// The flags that matter to a test in a process of its own.
    pub(super) fn passed_on(&self) -> Vec<OsString> {
        let mut flags: Vec<OsString> = vec!["-d".into(), self.device.to_string().into()];
        if let Some(kind) = self.backend {
            flags.extend(["--backend".into(), kind.name().into()]);
        }
        if let Some(name) = &self.copy {
            flags.extend(["--copy".into(), name.into()]);
        }
        if self.sigbus {
            flags.push("--sigbus".into());
        }
        flags
    }
}
