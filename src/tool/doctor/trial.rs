//! The self-test: each backend in a process of its own writes and reads both ways, on every GPU.

use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::backend::{Allocator, BackendKind};
use crate::error::Error;
use crate::mapping::Mapping;
use crate::session::Session;
use crate::tool::pattern;
use crate::tool::sanity::process::{self, Ran, Verdict};
use crate::tool::sanity::voice::{self, Facts, Word, say};

/// In the order in which sessions try them; the last is for its CPU side alone.
const BACKENDS: [BackendKind; 4] = [BackendKind::Gdrdrv, BackendKind::Rm, BackendKind::Vulkan, BackendKind::Emulated];

/// Past one GPU page, and ends on no boundary.
const BYTES: usize = 70_001;
/// Enough for a median.
const ROUNDS: usize = 101;

/// What came of one backend.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Trial {
    pub(super) backend: &'static str,
    #[serde(skip)]
    pub(super) kind: BackendKind,
    pub(super) works: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    pub(super) notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) session: Option<Facts>,
    pub(super) seconds: f64,
}

impl Trial {
    /// Whether it reached a GPU.
    pub(super) fn is_real(&self) -> bool {
        self.works && self.kind != BackendKind::Emulated
    }
}

/// Tries all backends.
pub(super) fn all(limit: Duration) -> io::Result<Vec<Trial>> {
    let program = std::env::current_exe()?;
    BACKENDS
        .into_iter()
        .map(|kind| {
            let mut command = Command::new(&program);
            let Ran { verdict, facts, notes, took } = process::run(command.args(["--be", kind.name()]), limit)?;
            let (works, reason) = match verdict {
                Verdict::Passed => (true, None),
                Verdict::Failed(reason) | Verdict::Waived(reason) => (false, Some(reason)),
            };
            let seconds = took.as_secs_f64();
            Ok(Trial { backend: kind.name(), kind, works, reason, notes, session: facts, seconds })
        })
        .collect()
}

/// The inner process of one backend's trial.
pub(super) fn be(kind: BackendKind) {
    say(&match attempt(kind) {
        Ok(()) => Word::Passed,
        Err(reason) => Word::Failed(reason),
    });
}

fn attempt(kind: BackendKind) -> Result<(), String> {
    let words = |error: Error| error.to_string();
    let session = Session::builder().backend(kind).open().map_err(words)?;
    voice::introduce(&session);
    for gpu in session.gpus().map_err(words)? {
        let on_gpu = |reason: String| format!("GPU {} ({}): {reason}", gpu.ordinal, gpu.name);
        let note = copy(&session, gpu.ordinal).map_err(on_gpu)?;
        say(&Word::Note(format!("GPU {} ({}): {note}", gpu.ordinal, gpu.name)));
    }
    session.close().map_err(|error| error.to_string())
}

/// Writes and reads both ways, compared by the GPU's own copy engine.
fn copy(session: &Session, ordinal: usize) -> Result<String, String> {
    let words = |error: Error| error.to_string();
    let buffer = session.alloc_as(ordinal, BYTES, Allocator::Buffer).map_err(words)?;
    let pinned = session.pin(&buffer).map_err(words)?;
    let mapping = pinned.map().map_err(words)?;
    let (mut out, mut back) = (vec![0; BYTES], vec![0; BYTES]);
    pattern::fill(&mut out, 1);
    mapping.write(0, &out).and_then(|()| mapping.flush()).map_err(words)?;
    buffer.download(0, &mut back).map_err(words)?;
    same(&back, &out, "written")?;
    pattern::fill(&mut out, 2);
    buffer.upload(0, &out).map_err(words)?;
    mapping.read(0, &mut back).map_err(words)?;
    same(&back, &out, "read")?;
    let (write, read) = times(&mapping).map_err(words)?;
    let how = format!("mapped as {}, routine {}", mapping.mapping_type(), mapping.routine().name());
    mapping.unmap().map_err(words)?;
    pinned.unpin().map_err(|error| error.to_string())?;
    Ok(format!(
        "{how}; 64 bytes written and arrived {} ns, 64 bytes read {} ns (medians)",
        write.as_nanos(),
        read.as_nanos()
    ))
}

fn same(found: &[u8], wanted: &[u8], how: &str) -> Result<(), String> {
    match pattern::first_difference(found, wanted) {
        None => Ok(()),
        Some((at, got, want)) => Err(format!(
            "DATA IS WRONG: byte {at} of {BYTES}, {how} through the mapping, is {got:#04x} and should be {want:#04x}"
        )),
    }
}

/// Median times of a line: written until it has arrived, and read.
fn times(mapping: &Mapping<'_>) -> Result<(Duration, Duration), Error> {
    let median = |step: &mut dyn FnMut() -> Result<(), Error>| -> Result<Duration, Error> {
        let mut all = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            step()?;
            all.push(begin.elapsed());
        }
        all.sort_unstable();
        Ok(all[ROUNDS / 2])
    };
    let mut line = [0; 64];
    let write = median(&mut || mapping.write(0, &[0x5a; 64]).and_then(|()| mapping.flush()))?;
    let read = median(&mut || mapping.read(0, &mut line))?;
    Ok((write, read))
}
