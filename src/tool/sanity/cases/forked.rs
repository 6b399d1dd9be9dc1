//! A forked child has nothing of its parent's, and takes nothing from it.

use std::io::{Read, Write};

use super::super::bench::{Bench, Mapped, Step, Stop, downloaded, ensure, filled, same};
use super::super::fork::{self, Ended, is_readable, is_writable};
use super::super::process::signal_name;
use crate::error::{Error, ErrorKind};

const BYTES: usize = 70_000;

/// What a child did, which has to be well done.
fn went_well(ended: Ended, what: &str) -> Step {
    match ended {
        Ended::Well => Ok(()),
        Ended::Panicked(words) => Err(Stop::Failed(format!("{what}: {words}"))),
        Ended::Killed(signal) => Err(Stop::Failed(format!("{what}: the child died of {}", signal_name(signal)))),
    }
}

/// Runs a step in a forked child.
fn in_child(step: impl FnOnce() -> Step, what: &str) -> Step {
    went_well(fork::fork(|| spoken(step())), what)
}

/// What a child has to say goes out as the words of a panic.
fn spoken(step: Step) {
    if let Err(stop) = step {
        std::panic::resume_unwind(Box::new(stop.to_string()));
    }
}

fn wrong_process<T>(result: Result<T, Error>, what: &str) -> Step {
    match result {
        Err(error) if error.kind() == ErrorKind::WrongProcess => Ok(()),
        Err(error) => Err(Stop::Failed(format!("in a forked child {what} is refused for another reason: {error}"))),
        Ok(_) => Err(Stop::Failed(format!("in a forked child {what} is not refused"))),
    }
}

pub(crate) fn fork_child_has_no_window(bench: &Bench) -> Step {
    let session = bench.open()?;
    let Mapped { mapping, pinned, buffer } = bench.mapped(&session, BYTES, 1)?;
    in_child(
        || {
            wrong_process(mapping.write(0, b"data"), "a write")?;
            wrong_process(mapping.read(0, &mut [0; 4]), "a read")?;
            wrong_process(mapping.flush(), "a flush")?;
            wrong_process(mapping.store_u32(0, 1), "a store")?;
            for at in [0, BYTES / 2, BYTES - 1] {
                let place = mapping.as_ptr().wrapping_add(at);
                ensure!(!is_readable(place), "byte {at} of the window is readable in a forked child");
                ensure!(!is_writable(place, 0xee), "byte {at} of the window is writable in a forked child");
            }
            Ok(())
        },
        "the child",
    )?;
    let touched = fork::fork(|| {
        let _ = fork::load(mapping.as_ptr());
    });
    ensure!(touched == Ended::Killed(libc::SIGSEGV), "a load in a forked child: {touched:?} instead of SIGSEGV");
    same(&downloaded(&buffer)?, &filled(BYTES, 1), "the memory after the children")?;
    mapping.write(0, &filled(BYTES, 2))?;
    same(&downloaded(&buffer)?, &filled(BYTES, 2), "written by the parent after the children")?;
    mapping.unmap()?;
    pinned.unpin()?;
    Ok(())
}

pub(crate) fn fork_child_cannot_use_parents_pin(bench: &Bench) -> Step {
    let session = bench.open()?;
    let buffer = bench.buffer(&session, BYTES)?;
    let pinned = session.pin(&buffer)?;
    in_child(
        || {
            wrong_process(pinned.map(), "map")?;
            wrong_process(session.pin(&buffer), "pin")?;
            wrong_process(session.alloc(64), "alloc")?;
            wrong_process(session.gpus(), "a list of GPUs")?;
            wrong_process(buffer.upload(0, b"data"), "an upload")?;
            wrong_process(buffer.download(0, &mut [0; 4]), "a download")
        },
        "the child",
    )?;
    let mapping = pinned.map()?;
    mapping.write(0, b"the parent's")?;
    mapping.unmap()?;
    pinned.unpin()?;
    Ok(())
}

pub(crate) fn fork_child_ends_first(bench: &Bench) -> Step {
    let session = bench.open()?;
    let mut all = [Some(bench.mapped(&session, BYTES, 1)?), Some(bench.mapped(&session, BYTES, 2)?)];
    // One child drops everything and ends, one is killed in the middle.
    in_child(
        || {
            drop(all[0].take());
            drop(all[1].take());
            Ok(())
        },
        "the child that drops all",
    )?;
    let child = fork::start(|| std::thread::sleep(std::time::Duration::from_secs(20)));
    child.kill();
    let ended = child.ended();
    ensure!(ended == Ended::Killed(libc::SIGKILL), "the child that was to be killed: {ended:?}");
    for (number, mapped) in (1..).zip(all.into_iter().flatten()) {
        let Mapped { mapping, pinned, buffer } = mapped;
        let mut seen = vec![0; BYTES];
        mapping.read(0, &mut seen)?;
        same(&seen, &filled(BYTES, number), "the parent's window after its children")?;
        mapping.write(0, &filled(BYTES, 10 + number))?;
        same(&downloaded(&buffer)?, &filled(BYTES, 10 + number), "the parent's memory after its children")?;
        mapping.unmap()?;
        pinned.map()?.unmap()?;
        pinned.unpin()?;
    }
    session.close()?;
    Ok(())
}

/// Own session, own buffer; waits for the other side with the buffer mapped.
fn map_beside(bench: &Bench, seed: u64, mut to: impl Write, mut from: impl Read) -> Step {
    let session = bench.open()?;
    let Mapped { mapping, pinned, buffer } = bench.mapped(&session, BYTES, seed)?;
    for round in 0..3 {
        let bytes = filled(BYTES, seed + round);
        mapping.write(0, &bytes)?;
        to.write_all(&[1])?;
        // Both have written, and both have theirs.
        from.read_exact(&mut [0]).map_err(|_| Stop::Failed("the other process ended early".to_owned()))?;
        let mut seen = vec![0; BYTES];
        mapping.read(0, &mut seen)?;
        same(&seen, &bytes, "own bytes beside another process")?;
        same(&downloaded(&buffer)?, &bytes, "own memory beside another process")?;
    }
    mapping.unmap()?;
    pinned.unpin()?;
    Ok(())
}

pub(crate) fn fork_parent_and_child_map(bench: &Bench) -> Step {
    // The fork comes before anything of CUDA's: it does not survive one.
    let ((from_child, to_parent), (from_parent, to_child)) = (std::io::pipe()?, std::io::pipe()?);
    let mut parents = Some((to_child, from_child));
    let child = fork::start(|| {
        // Each side keeps its own ends alone, so that it notices when the other is gone.
        drop(parents.take());
        spoken(map_beside(bench, 1000, &to_parent, &from_parent));
    });
    drop((to_parent, from_parent));
    let parent =
        parents.as_ref().map_or(Ok(()), |(to_child, from_child)| map_beside(bench, 2000, to_child, from_child));
    drop(parents);
    let beside = went_well(child.ended(), "the child");
    match (parent, beside) {
        // A side that was refused ends early, and the other's complaint about that says nothing.
        (waived @ Err(Stop::Waived(_)), _) => waived,
        (Err(Stop::Failed(_)), Err(Stop::Failed(words))) if words.contains("exclusive compute mode") => {
            Err(Stop::Waived(words))
        }
        (parent, beside) => parent.and(beside),
    }
}
