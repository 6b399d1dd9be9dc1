//! Descriptors of the session's in other processes.

#![allow(unsafe_code, reason = "descriptors known by number only")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use super::super::bench::{Bench, Mapped, Step, Stop, downloaded, ensure, filled, same, waived};
use super::super::socket;
use crate::backend::BackendKind;
use crate::error::{ErrorKind, Feature};
use crate::gpu::PciAddress;
use crate::session::Session;
use crate::sys::gdrdrv::{Module, NODE};
use crate::sys::window::{PAGE, Window};

const BYTES: usize = 128 << 10;

/// Open files of this process: number and what it leads to.
fn open_files() -> Step<BTreeSet<(i32, String)>> {
    let mut files = BTreeSet::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // The directory being read is among them, and gone by now.
        if let (Some(number), Ok(target)) = (number, fs::read_link(entry.path())) {
            files.insert((number, target.display().to_string()));
        }
    }
    Ok(files)
}

/// The test's second process.
pub(crate) fn assistant(bench: &Bench, part: &str) -> Step<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(bench.args().passed_on()).args(["--assist", part]);
    Ok(command)
}

/// All that a process says on standard output, and that it ended well.
fn said(child: Child) -> Step<String> {
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        output.status.success(),
        "the second process ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(text)
}

pub(crate) fn fd_closed_on_exec(bench: &Bench) -> Step {
    let before = open_files()?;
    let session = bench.open_quietly()?;
    // Before anything of CUDA's is opened, what is new is the library's own.
    let ours: Vec<_> = open_files()?.difference(&before).cloned().collect();
    bench.introduce(&session);
    if ours.is_empty() {
        return waived(session.backend(), "the session holds no descriptor");
    }
    let listed = said(assistant(bench, "list")?.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?)?;
    for (number, target) in ours {
        let line = format!("{number} {target}");
        ensure!(!listed.lines().any(|found| found == line), "a started program inherits descriptor {line}");
    }
    Ok(())
}

/// For `fd_closed_on_exec`.
pub(crate) fn list() -> Step {
    for (number, target) in open_files()? {
        println!("{number} {target}");
    }
    Ok(())
}

/// A further descriptor of the open node of the module.
fn node_of(session: &Session) -> Step<OwnedFd> {
    if session.backend() != BackendKind::Gdrdrv {
        return waived(session.backend(), "it holds no pins by a device descriptor that could be passed on");
    }
    let Some((number, _)) = open_files()?.into_iter().find(|(_, target)| target == NODE) else {
        return waived(
            session.backend(),
            &format!("no descriptor of {NODE} is open here: its calls are answered by a stand-in"),
        );
    };
    // SAFETY: the session keeps the descriptor open meanwhile.
    let node = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(node.try_clone_to_owned()?)
}

/// What a process other than the opener can do with the node: nothing.
fn try_node(node: OwnedFd) -> Step {
    let module = Module::of_another_process(File::from(node));
    let pinned = module.pin(1 << 16, 1 << 16, (0, 0));
    ensure!(pinned == Err(libc::EACCES), "a pin through another process's descriptor: {pinned:?} instead of EACCES");
    let mut window = Window::reserve("map", PAGE, 0)?;
    match window.place("map", 0, PAGE, module.fd(), 0) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(Stop::Failed(format!("mmap of another process's descriptor, instead of EACCES: {error}"))),
        Ok(()) => Err(Stop::Failed("another process can map through the descriptor".to_owned())),
    }
}

/// For `fd_inherited`: the node is standard input.
pub(crate) fn inherit() -> Step {
    try_node(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// For `fd_passed_over_unix_socket`: the node comes through standard input.
pub(crate) fn receive() -> Step {
    match socket::receive(std::io::stdin().as_fd(), true)? {
        Some((_, Some(node))) => try_node(node),
        other => Err(Stop::Failed(format!("no descriptor came: {other:?}"))),
    }
}

/// The window is as it was, whatever the other process tried.
fn unharmed(mapped: &Mapped) -> Step {
    let mut seen = vec![0; BYTES];
    mapped.mapping.read(0, &mut seen)?;
    same(&seen, &filled(BYTES, 1), "the opener's window afterwards")?;
    mapped.mapping.write(0, &filled(BYTES, 2))?;
    same(&downloaded(&mapped.buffer)?, &filled(BYTES, 2), "the opener's memory afterwards")
}

pub(crate) fn fd_inherited(bench: &Bench) -> Step {
    let session = bench.open()?;
    let node = node_of(&session)?;
    let mapped = bench.mapped(&session, BYTES, 1)?;
    said(assistant(bench, "inherit")?.stdin(node).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)?;
    unharmed(&mapped)
}

pub(crate) fn fd_passed_over_unix_socket(bench: &Bench) -> Step {
    let session = bench.open()?;
    let node = node_of(&session)?;
    let mapped = bench.mapped(&session, BYTES, 1)?;
    let (ours, theirs) = socket::pair()?;
    let child = assistant(bench, "receive")?.stdin(theirs).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    socket::send(ours.as_fd(), "node", Some(node.as_fd()))?;
    said(child)?;
    unharmed(&mapped)
}

pub(crate) fn fd_exported_memory(bench: &Bench) -> Step {
    let session = bench.open()?;
    let mapped = bench.mapped(&session, BYTES, 1)?;
    let Some(pci) = mapped.mapping.facts().pci else {
        return waived(session.backend(), "its GPUs have no PCI address by which another process could name them");
    };
    let exported = match mapped.buffer.export() {
        Err(error) if error.kind() == ErrorKind::UnsupportedFeature(Feature::Operation) => {
            return waived(session.backend(), error.cause());
        }
        exported => exported?,
    };
    if session.backend() != BackendKind::Rm {
        return waived(session.backend(), "it cannot import exported memory; backend rm can");
    }
    let (ours, theirs) = socket::pair()?;
    let mut child = assistant(bench, "import")?.stdin(theirs).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    socket::send(ours.as_fd(), &pci.to_string(), Some(exported.as_fd()))?;
    let mut words = String::new();
    if let Some(stdout) = &mut child.stdout {
        stdout.read_to_string(&mut words)?;
    }
    said(child)?;
    same(&downloaded(&mapped.buffer)?, &filled(BYTES, 2), "written by another process")
}

/// For `fd_exported_memory`: no CUDA is called here.
pub(crate) fn import(bench: &Bench) -> Step {
    let Some((pci, Some(memory))) = socket::receive(std::io::stdin().as_fd(), true)? else {
        return Err(Stop::Failed("no descriptor came".to_owned()));
    };
    let gpu: PciAddress = pci.parse()?;
    let session = bench.open_quietly()?;
    let mapping = session.pin_export(memory.as_fd(), gpu, BYTES)?.map()?;
    let mut seen = vec![0; BYTES];
    mapping.read(0, &mut seen)?;
    same(&seen, &filled(BYTES, 1), "read from another process's memory")?;
    mapping.write(0, &filled(BYTES, 2))?;
    mapping.flush()?;
    Ok(())
}
