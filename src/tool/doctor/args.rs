//! The command line of `gdrcopy_doctor`.

use std::path::PathBuf;

use clap::Parser;

use crate::backend::BackendKind;
use crate::tool::rig;

/// Finds out why gdrcopy does not work here, or does not work as well as it could.
///
/// Reads /proc, /sys, /dev, /etc and the library folders, changes nothing, and copies a little data
/// through each backend that opens. Every finding comes with what to do about it, the worst first.
///
/// Exit status: 0 a backend for GPUs works, 1 none works, 2 bad command line.
#[derive(Parser, Debug, Clone)]
#[command(name = super::TOOL, version, verbatim_doc_comment)]
pub(super) struct Args {
    /// Say for every finding what was read where, also where all is well
    #[arg(short = 'v')]
    pub(super) verbose: bool,

    /// Time limit of one backend's self-test in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout: u64,

    /// Write the findings as JSON, with - to standard output
    ///
    /// Standard output then carries nothing else; the text goes to standard error.
    #[arg(long, value_name = "FILE|-")]
    pub(super) json: Option<PathBuf>,

    /// For tests: examine this folder in place of /, and copy nothing
    #[arg(long, value_name = "DIR", hide = true)]
    pub(super) root: Option<PathBuf>,

    /// For tests: copy nevertheless
    #[arg(long, requires = "root", hide = true)]
    pub(super) self_test: bool,

    /// Be the process of one backend's self-test
    #[arg(long, value_name = "BACKEND", hide = true, value_parser = rig::backend)]
    pub(super) be: Option<BackendKind>,
}
