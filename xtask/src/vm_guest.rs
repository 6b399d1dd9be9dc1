//! The virtual machine: its initial file system, the emulator, and what is looked at after it has stopped.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::run::{Log, command, run};
use crate::vm_build::{Modules, Program, file_name};
use crate::vm_contract::GuestFile;
use crate::vm_packages::{Kernel, io_error};
use crate::vm_tap::{Layout, Report, is_complaint};

/// Size of the device's memory, as the tests expect it.
pub(crate) const BAR_BYTES: u64 = 16 << 20;
const GPU_PAGE: usize = 64 << 10;

/// Longer than any run takes, also on a kernel with all its checks on.
const LIMIT: Duration = Duration::from_secs(480);

/// Starts of lines that are read but not shown.
const UNSHOWN: [&str; 3] = ["ok ", "# layout ", "# kernel "];

#[derive(Debug)]
pub(crate) struct Guest<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) modules: &'a Modules,
    pub(crate) programs: &'a [Program],
    /// What else they need, by its path.
    pub(crate) files: &'a [GuestFile],
    pub(crate) bar_bytes: u64,
    pub(crate) dir: &'a Path,
    pub(crate) keep: bool,
}

/// Boots, shows the report as it comes, and checks the BAR from outside.
pub(crate) fn boot(log: &mut Log, guest: &Guest<'_>) -> Result<Report, String> {
    fs::create_dir_all(guest.dir).map_err(io_error(guest.dir))?;
    let initramfs = guest.dir.join("initramfs");
    write_initramfs(log, guest, &initramfs)?;
    let bar = guest.dir.join("bar");
    new_bar(&bar, guest.bar_bytes)?;
    let console = guest.dir.join("console.log");

    let mut qemu = qemu(guest.kernel, &initramfs, &bar, guest.bar_bytes, &console);
    if guest.keep {
        log.say(&format!("{qemu:?}"));
    }
    let mut report = read_report(log, &mut qemu)?;
    // The console shows only what is serious, and a panic.
    let text = fs::read(&console).map_err(io_error(&console))?;
    for line in String::from_utf8_lossy(&text).lines().map(str::trim_end).filter(|line| is_complaint(line)) {
        log.keep(format!("console: {line}"));
        report.complain(format!("console: {line}"));
    }
    report.finish();
    check_bar(log, &bar, &mut report)?;
    if !guest.keep {
        for file in [&initramfs, &bar] {
            fs::remove_file(file).map_err(io_error(file))?;
        }
    }
    Ok(report)
}

/// Emulation and not virtualization: it needs no rights, and behaves the same inside another virtual machine.
fn qemu(kernel: &Kernel, initramfs: &Path, bar: &Path, bar_bytes: u64, console: &Path) -> Command {
    let mut qemu =
        command("qemu-system-x86_64", ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "1024"]);
    qemu.args(["-nodefaults", "-no-reboot", "-display", "none"]);
    // Two lines: the kernel's messages cannot fall into the report's.
    qemu.arg("-serial").arg(format!("file:{}", console.display())).args(["-serial", "stdio"]);
    qemu.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initramfs);
    qemu.args(["-append", "console=ttyS0 panic=-1 oops=panic quiet loglevel=2 slub_debug=FZP"]);
    qemu.arg("-object").arg(format!("memory-backend-file,id=bar,share=on,mem-path={},size={bar_bytes}", bar.display()));
    qemu.args(["-device", "ivshmem-plain,memdev=bar"]);
    qemu.stdout(Stdio::piped());
    qemu
}

fn new_bar(path: &Path, bytes: u64) -> Result<(), String> {
    let file = File::create(path).map_err(io_error(path))?;
    file.set_len(bytes).map_err(io_error(path))
}

/// Runs the emulator until it ends, or the limit is reached.
fn read_report(log: &mut Log, qemu: &mut Command) -> Result<Report, String> {
    let mut child = qemu.spawn().map_err(|error| format!("qemu-system-x86_64 cannot be started: {error}"))?;
    let output = child.stdout.take().ok_or("qemu-system-x86_64 has no output")?;
    let child = Arc::new(Mutex::new(Some(child)));
    let watchdog = thread::spawn({
        let child = Arc::clone(&child);
        move || watch(&child, Instant::now() + LIMIT)
    });

    let mut report = Report::default();
    let mut started = Instant::now();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.map_err(|error| format!("reading the guest's report: {error}"))?;
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        report.line(&line);
        if line.starts_with("# start ") {
            started = Instant::now();
        }
        if line.starts_with("# status ") {
            log.keep(format!("{line}: {:.1} s", started.elapsed().as_secs_f64()));
        } else if is_complaint(&line) || !UNSHOWN.iter().any(|start| line.starts_with(start)) {
            log.keep(line);
        }
    }
    // The output has ended, so the emulator has, or is about to.
    let mut ended = child.lock().map_err(|_| "the watchdog failed")?.take();
    if let Some(child) = &mut ended {
        child.wait().map_err(|error| format!("waiting for qemu-system-x86_64: {error}"))?;
    }
    if watchdog.join().unwrap_or(false) {
        report.complain(format!("stopped after {} s", LIMIT.as_secs()));
    }
    Ok(report)
}

/// Kills the child at the deadline, unless it was taken away before; says whether it did.
fn watch(child: &Mutex<Option<Child>>, deadline: Instant) -> bool {
    loop {
        thread::sleep(Duration::from_millis(100));
        let Ok(mut child) = child.lock() else { return false };
        let Some(running) = child.as_mut() else { return false };
        if Instant::now() >= deadline {
            return running.kill().is_ok();
        }
    }
}

// --- the memory behind the BAR ---------------------------------------------------------------------------------------

/// Byte `at` of a page filled from `seed`, as the guest's tests write it.
fn pattern(seed: u8, at: usize) -> u8 {
    let mixed = at.wrapping_mul(7).wrapping_add((at >> 8).wrapping_mul(13)) & 0xff;
    seed.wrapping_mul(31).wrapping_add(u8::try_from(mixed).unwrap_or(0))
}

fn check_bar(log: &mut Log, path: &Path, report: &mut Report) -> Result<(), String> {
    if report.layouts.is_empty() {
        return Ok(());
    }
    let bar = fs::read(path).map_err(io_error(path))?;
    let wrong: Vec<&Layout> = report.layouts.iter().filter(|layout| !holds(&bar, layout)).collect();
    let line =
        format!("{} of {} pages of the BAR hold their bytes", report.layouts.len() - wrong.len(), report.layouts.len());
    log.keep(line.clone());
    if let Some(first) = wrong.first() {
        let complaint = format!("{line}: page {} does not", first.page);
        report.complain(complaint);
    }
    Ok(())
}

fn holds(bar: &[u8], layout: &Layout) -> bool {
    let start = layout.page * GPU_PAGE;
    bar.get(start..start + GPU_PAGE)
        .is_some_and(|page| page.iter().enumerate().all(|(at, &byte)| byte == pattern(layout.seed, at)))
}

// --- the initial file system -----------------------------------------------------------------------------------------

fn write_initramfs(log: &mut Log, guest: &Guest<'_>, path: &Path) -> Result<(), String> {
    let mut archive = Cpio::default();
    for dir in ["bin", "dev", "proc", "sys", "tmp", "modules", "tests"] {
        archive.entry(dir, 0o040_755, &[]);
    }
    archive.entry("bin/busybox", 0o100_755, &read(&busybox()?)?);
    archive.entry("init", 0o100_755, include_bytes!("../../gdrdrv/tests/guest/init"));
    for module in [&guest.modules.gdrdrv, &guest.modules.provider] {
        let stripped = guest.dir.join(file_name(module));
        let mut strip = command("strip", ["-g", "-o"]);
        strip.arg(&stripped).arg(module);
        run(log, strip)?;
        archive.entry(&format!("modules/{}", file_name(module)), 0o100_644, &read(&stripped)?);
    }
    for program in guest.programs {
        archive.entry(&format!("tests/{}", program.name), 0o100_755, &read(&program.path)?);
    }
    let mut folders = BTreeSet::new();
    for file in guest.files {
        let place = file.place.trim_start_matches('/');
        for (end, _) in place.match_indices('/') {
            if folders.insert(&place[..end]) {
                archive.entry(&place[..end], 0o040_755, &[]);
            }
        }
        archive.entry(place, 0o100_755, &read(&file.path)?);
    }
    let mut file = File::create(path).map_err(io_error(path))?;
    file.write_all(&archive.finish()).map_err(io_error(path))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(io_error(path))
}

fn busybox() -> Result<PathBuf, String> {
    ["/bin/busybox", "/usr/bin/busybox"]
        .map(PathBuf::from)
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| "no busybox: `apt-get install busybox-static` installs it".to_owned())
}

/// An archive of kind `newc`, the one that the kernel unpacks.
#[derive(Debug, Default)]
struct Cpio {
    bytes: Vec<u8>,
    entries: u32,
}

impl Cpio {
    fn entry(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.entries += 1;
        self.bytes.extend_from_slice(b"070701");
        let inode = self.entries;
        let fields = [inode, mode, 0, 0, 1, 0].map(u64::from);
        let sizes = [data.len(), 0, 0, 0, 0, name.len() + 1, 0].map(|size| u64::try_from(size).unwrap_or(u64::MAX));
        for field in fields.into_iter().chain(sizes) {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_header_of_110_bytes_a_name_and_padded_data() {
        let mut archive = Cpio::default();
        archive.entry("init", 0o100_755, b"abc");
        assert_eq!(archive.bytes.len(), (110 + 5usize).next_multiple_of(4) + 4);
        let header = String::from_utf8(archive.bytes[..110].to_vec()).unwrap();
        assert_eq!(&header[..22], "07070100000001000081ed");
        assert_eq!(&header[54..62], "00000003");
        assert_eq!(&header[94..102], "00000005");
        assert!(archive.finish().windows(10).any(|name| name == b"TRAILER!!!"));
    }

    #[test]
    fn a_page_holds_its_pattern_and_no_other() {
        let mut bar = vec![0; 2 * GPU_PAGE];
        for (at, byte) in bar[GPU_PAGE..].iter_mut().enumerate() {
            *byte = pattern(5, at);
        }
        assert!(holds(&bar, &Layout { page: 1, seed: 5 }));
        assert!(!holds(&bar, &Layout { page: 1, seed: 6 }));
        assert!(!holds(&bar, &Layout { page: 0, seed: 5 }));
        assert!(!holds(&bar, &Layout { page: 2, seed: 5 }));
        bar[2 * GPU_PAGE - 1] ^= 1;
        assert!(!holds(&bar, &Layout { page: 1, seed: 5 }));
    }
}
