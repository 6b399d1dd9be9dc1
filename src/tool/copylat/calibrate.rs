//! `--calibrate`: measures every way of copying and writes what was best as a policy.

use std::path::Path;

use super::TOOL;
use super::args::Args;
use crate::backend::BackendKind;
use crate::policy::{Calibration, CopyDirection, CopyMethod, Policy, Progress};
use crate::sys::num::{u64_of, usize_of};
use crate::tool::fail::Failure;
use crate::tool::flags::size_in_words;
use crate::tool::host::Host;
use crate::tool::interrupt;
use crate::tool::output::{Screen, Target};
use crate::tool::rig::{self, BANNER};
use crate::tool::table::nanoseconds;

/// Candidates shown for each size: the best, and the others in order.
const SHOWN: usize = 4;

/// Runs the calibration and writes the file.
pub(super) fn run(args: &Args, path: &Path) -> Result<(), Failure> {
    let target = Target::open(path)?;
    // There is no part of a policy to keep: Ctrl-C ends this as it ends any program.
    interrupt::release();
    let screen = Screen::beside(std::iter::once(&target));
    let session = rig::open(TOOL, &args.common)?;
    let gpu = rig::gpu(&session, args.common.device)?;
    let mut what = Calibration::new().gpu(gpu.ordinal);
    if let Some(largest) = args.buffer {
        what = what.largest(usize_of(largest));
    }

    rig::approach(&args.common, &gpu);
    let mut settled = Ok(());
    let mut is_settled = false;
    let policy = session.calibrate(&what, |Progress { done, of, direction, bytes }| {
        if !is_settled {
            // The workers of parallel copies are there: this thread may be kept where it is.
            is_settled = true;
            settled = rig::settle_on_cpu(TOOL, args.common.cpu, &gpu, &mut Host::default());
            if !args.outputs.no_progress {
                screen.begin(of);
            }
        }
        if done > 0 {
            screen.done();
        }
        screen.doing(&format!("{direction} {}", size_in_words(u64_of(bytes))));
    })?;
    settled?;
    screen.end();

    if session.backend() == BackendKind::Emulated {
        screen.line(BANNER)?;
    }
    for direction in [CopyDirection::HostToDevice, CopyDirection::DeviceToHost] {
        table(&policy, direction).iter().try_for_each(|line| screen.line(line))?;
    }
    target.write(&policy.to_string())?;
    screen.line(&format!("GDRCOPY_POLICY={} puts it in force", path.display()))
}

/// One line for each row of the policy.
fn table(policy: &Policy, direction: CopyDirection) -> Vec<String> {
    let row = |sizes: &str, routine: &str, best: &str, times: &str| {
        format!("{sizes:>19} {routine:<10} {best:<19} {times}").trim_end().to_owned()
    };
    let mut lines =
        vec![direction.in_words().to_owned(), row("sizes [B]", "routine", "best", "p50 [ns] of the best candidates")];
    let mut from = 1;
    loop {
        let choice = policy.explain(direction, from);
        let (first, last) = choice.sizes();
        let sizes = if last == usize::MAX { format!("{first}-") } else { format!("{first}-{last}") };
        let mut candidates: Vec<(CopyMethod, f64)> = choice.candidates().to_vec();
        candidates.sort_by(|a, b| a.1.total_cmp(&b.1));
        let times = candidates.iter().take(SHOWN).map(|(method, ns)| format!("{method} {}", nanoseconds(*ns)));
        let times = times.collect::<Vec<_>>().join(", ");
        lines.push(row(&sizes, choice.routine(), &choice.best().to_string(), &times));
        match last.checked_add(1) {
            Some(next) => from = next,
            None => break,
        }
    }
    lines.push(String::new());
    lines
}
