//! Nothing stays behind: files, address space, BAR1.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::super::bench::{Bench, Mapped, Step, Stop, downloaded, ensure, filled, waived};
use super::super::fork;
use super::descriptors::assistant;
use crate::backend::BackendKind;
use crate::range::DeviceRange;
use crate::session::Session;
use crate::sys::num::u64_of;

const BYTES: usize = 70_000;
/// What is held by a process that ends, and by how much BAR1 is told apart: others use it, too.
const HELD: usize = 32 << 20;
/// How long the driver may take to clear up after a process.
const CLEARED: Duration = Duration::from_secs(10);

/// Pieces of this process's address space.
fn areas() -> Step<usize> {
    Ok(fs::read_to_string("/proc/self/maps")?.lines().count())
}

fn descriptors() -> Step<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count())
}

pub(crate) fn leak_descriptors_and_windows(bench: &Bench) -> Step {
    const ROUNDS: usize = 1000;
    let session = bench.open()?;
    let buffer = bench.buffer(&session, BYTES)?;
    let round = |by_drop: bool| -> Step {
        let pinned = session.pin(DeviceRange::from(&buffer).slice(1..)?)?;
        let mapping = pinned.map()?;
        mapping.write(0, &[1])?;
        if !by_drop {
            mapping.unmap()?;
            pinned.unpin()?;
        }
        Ok(())
    };
    // What is opened once, and kept, is opened here.
    round(true)?;
    let (open, mapped) = (descriptors()?, areas()?);
    for number in 0..ROUNDS {
        round(number % 2 == 0)?;
    }
    let (open_now, mapped_now) = (descriptors()?, areas()?);
    ensure!(open_now <= open, "{ROUNDS} rounds: {open} open files became {open_now}");
    // The heap may grow by a piece or two for other reasons.
    ensure!(mapped_now <= mapped + 8, "{ROUNDS} rounds: {mapped} pieces of address space became {mapped_now}");
    Ok(())
}

/// BAR1 in use, in bytes.
fn used(bench: &Bench, session: &Session) -> Step<u64> {
    Ok(bench.bar1(session)?.used_bytes)
}

pub(crate) fn leak_bar1(bench: &Bench) -> Step {
    const ROUNDS: usize = 100;
    let session = bench.open()?;
    let buffer = bench.buffer(&session, HELD)?;
    let before = used(bench, &session)?;
    let window = session.pin(&buffer)?.map()?;
    let during = used(bench, &session)?;
    window.unmap()?;
    if during < before + u64_of(HELD) / 2 {
        return waived(session.backend(), "the driver's figure of BAR1 in use does not count its windows");
    }
    let before = used(bench, &session)?;
    for _ in 0..ROUNDS {
        let pinned = session.pin(DeviceRange::from(&buffer).slice(..HELD / 8)?)?;
        let mapping = pinned.map()?;
        mapping.write(0, &[1])?;
        mapping.unmap()?;
        pinned.unpin()?;
    }
    let after = used(bench, &session)?;
    let all = u64_of(ROUNDS * HELD / 8);
    ensure!(
        after < before + all / 2,
        "BAR1 in use grew from {before} to {after} bytes while {all} were mapped and unmapped"
    );
    Ok(())
}

pub(crate) fn leak_dropped_in_any_order(bench: &Bench) -> Step {
    let keeper = bench.open()?;
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let session = bench.open()?;
        let Mapped { mapping, pinned, buffer } = bench.mapped(&session, BYTES, 1)?;
        let watch = Arc::downgrade(&buffer);
        let (mut session, mut pinned, mut buffer) = (Some(session), Some(pinned), Some(buffer));
        for what in order {
            match what {
                0 => drop(session.take()),
                1 => drop(pinned.take()),
                _ => drop(buffer.take()),
            }
            mapping.write(BYTES - 4, b"here")?;
        }
        let Some(kept) = watch.upgrade() else {
            return Err(Stop::Failed(format!("order {order:?}: the memory was freed under its mapping")));
        };
        ensure!(downloaded(&kept)?.ends_with(b"here"), "order {order:?}: the last write did not arrive");
        drop(kept);
        drop(mapping);
        ensure!(watch.upgrade().is_none(), "order {order:?}: something keeps the buffer");
    }
    keeper.close()?;
    // The mapping first, as usual, and an error nowhere.
    let session = bench.open()?;
    let mapped = bench.mapped(&session, BYTES, 2)?;
    drop(mapped);
    if let Some(gpus) = session.emulated() {
        ensure!(gpus.live() == crate::emulated::Live::default(), "still there: {:?}", gpus.live());
    }
    session.close()?;
    Ok(())
}

/// Starts a process that maps [`HELD`] bytes, and waits until it does.
fn holder(bench: &Bench, part: &str) -> Step<Child> {
    let mut child =
        assistant(bench, part)?.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut line = String::new();
    if let Some(stdout) = &mut child.stdout {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    if line.trim() == "held" {
        return Ok(child);
    }
    let output = child.wait_with_output()?;
    let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if words.contains("exclusive compute mode") {
        return Err(Stop::Waived(words));
    }
    Err(Stop::Failed(format!("a second process could not map: {words}")))
}

/// For the two below: maps, says so, and stays until standard input ends.
pub(crate) fn hold(bench: &Bench, in_child_too: bool) -> Step {
    let session = bench.open_quietly()?;
    let Mapped { mapping, pinned, buffer } = bench.mapped(&session, HELD, 1)?;
    mapping.write(0, &filled(HELD, 2))?;
    let wait = || {
        let _ = std::io::stdin().lock().read(&mut [0]);
    };
    let child = in_child_too.then(|| fork::start(wait));
    println!("held");
    std::io::stdout().flush()?;
    wait();
    drop((mapping, pinned, buffer, child));
    Ok(())
}

/// Waits until no more BAR1 is in use than before, but for what others may have taken meanwhile.
fn comes_back(bench: &Bench, session: &Session, before: u64, what: &str) -> Step {
    let begin = Instant::now();
    loop {
        let now = used(bench, session)?;
        if now < before + u64_of(HELD) / 2 {
            return Ok(());
        }
        ensure!(begin.elapsed() < CLEARED, "{what}: BAR1 in use was {before} bytes and is {now} after {CLEARED:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A session that looks on, and BAR1 before and while a second process holds some.
fn watched(bench: &Bench, part: &str) -> Step<(Session, u64, Child)> {
    let session = bench.open()?;
    if session.backend() == BackendKind::Emulated {
        return waived(session.backend(), "its memory and its BAR1 are those of one process");
    }
    let before = used(bench, &session)?;
    let mut child = holder(bench, part)?;
    let during = used(bench, &session)?;
    if during < before + u64_of(HELD) / 2 {
        child.kill()?;
        child.wait()?;
        return waived(
            session.backend(),
            "the driver's figure of BAR1 in use does not count another process's windows",
        );
    }
    Ok((session, before, child))
}

pub(crate) fn leak_killed_process(bench: &Bench) -> Step {
    let (session, before, mut child) = watched(bench, "hold")?;
    child.kill()?;
    child.wait()?;
    comes_back(bench, &session, before, "after SIGKILL")
}

pub(crate) fn leak_parent_ends_first(bench: &Bench) -> Step {
    let (session, before, mut child) = watched(bench, "hold-in-child")?;
    // Its own child has the same standard input, and lives until that ends.
    let grandchild = child.stdin.take();
    child.kill()?;
    child.wait()?;
    drop(grandchild);
    comes_back(bench, &session, before, "after the parent, then the child")
}
