//! `cargo xtask vm`: the kernel module and its tests in a virtual machine with a stand-in for a GPU's BAR.
//!
//! Packages come from the Debian archive that this machine is configured for ([`packages`](crate::vm_packages)); both
//! modules and the test programs are built ([`build`](crate::vm_build)); a machine is booted under emulation, its report
//! read, and the memory behind the BAR looked at from outside ([`guest`](crate::vm_guest)).

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::ci::Verdict;
use crate::run::Log;
use crate::vm_build::{self, Modules, Program};
use crate::vm_contract;
use crate::vm_guest::{self, Guest};
use crate::vm_packages::{self, Kernel};
use crate::workspace::Workspace;

/// The kernel series that are tested: the oldest and the newest that Debian 12 has.
pub(crate) const SERIES: [&str; 2] = ["6.1", "6.12"];

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// One of [`SERIES`]; all of them if not given.
    pub(crate) kernel: Option<String>,
    /// Leave the initramfs and the BAR's memory behind, and say how the machine was started.
    pub(crate) keep: bool,
    /// Run the broken variants of the module instead, each of which a test must notice.
    pub(crate) broken: bool,
    /// Run the library's contract suite over the module, instead of the module's own tests.
    pub(crate) contract: bool,
    /// Folder of further static programs to run in the guest.
    pub(crate) extra: Option<PathBuf>,
    /// Kernel image and build tree to use instead of Debian's.
    pub(crate) custom: Option<PathBuf>,
    /// Run only the tests (or broken variants) whose name contains this.
    pub(crate) filter: Option<String>,
}

impl Options {
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().cloned().ok_or_else(|| format!("vm: {arg} needs a value"));
            match arg.as_str() {
                "--kernel" => {
                    let series = value()?;
                    if !SERIES.contains(&series.as_str()) {
                        return Err(format!("vm: --kernel is one of {}, not `{series}`", SERIES.join(", ")));
                    }
                    options.kernel = Some(series);
                }
                "--keep" => options.keep = true,
                "--broken" => options.broken = true,
                "--contract" => options.contract = true,
                "--extra" => options.extra = Some(value()?.into()),
                "--build-tree" => options.custom = Some(value()?.into()),
                flag if flag.starts_with('-') => return Err(format!("vm: unexpected argument `{flag}`")),
                filter if options.filter.is_none() => options.filter = Some(filter.to_owned()),
                second => return Err(format!("vm: one filter, not also `{second}`")),
            }
        }
        Ok(options)
    }

    fn selects(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }
}

/// The command: every kernel asked for, one after the other.
pub(crate) fn command(log: &mut Log, workspace: &Workspace, options: &Options) -> Result<(), String> {
    if let Some(tree) = &options.custom {
        vm_packages::install_tools(log, workspace, &[])?;
        return test(log, workspace, &vm_packages::build_tree(tree)?, options);
    }
    for series in SERIES {
        if options.kernel.as_deref().is_some_and(|only| only != series) {
            continue;
        }
        match vm_packages::kernel(log, workspace, series)? {
            Ok(kernel) => test(log, workspace, &kernel, options)?,
            Err(reason) => log.say(&format!("kernel {series}: SKIPPED: {reason}")),
        }
    }
    Ok(())
}

fn test(log: &mut Log, workspace: &Workspace, kernel: &Kernel, options: &Options) -> Result<(), String> {
    let dir = workspace.target.join("vm").join(&kernel.name);
    let modules = vm_build::modules(log, workspace, kernel, &dir)?;
    if options.broken {
        broken(log, workspace, kernel, &modules, &dir, options)
    } else {
        boot(log, workspace, kernel, &modules, &dir, options)
    }
}

fn boot(
    log: &mut Log,
    workspace: &Workspace,
    kernel: &Kernel,
    modules: &Modules,
    dir: &Path,
    options: &Options,
) -> Result<(), String> {
    let mut files = Vec::new();
    let mut programs = if options.contract {
        let (suite, needed) = vm_contract::collect(log, workspace, dir)?;
        files = needed;
        vec![suite]
    } else {
        vm_build::programs(log, workspace, dir)?
    };
    if let Some(extra) = &options.extra {
        programs.extend(vm_build::extra_programs(extra)?);
    }
    programs.retain(|program| options.selects(&program.name));
    if programs.is_empty() {
        return Err("no test has a name that contains the filter".to_owned());
    }
    // Its tests give no memory out twice.
    let bar_bytes = if options.contract { 1 << 30 } else { vm_guest::BAR_BYTES };
    let guest = Guest { kernel, modules, programs: &programs, files: &files, bar_bytes, dir, keep: options.keep };
    let start = Instant::now();
    let report = vm_guest::boot(log, &guest)?;
    let seconds = start.elapsed().as_secs_f64();
    log.keep(format!("kernel {}: {} in {seconds:.1} s of guest and checks", kernel.release, report.summary()));
    report.verdict()
}

/// A variant is caught if a test fails, or the kernel complains, or the machine stops.
fn broken(
    log: &mut Log,
    workspace: &Workspace,
    kernel: &Kernel,
    modules: &Modules,
    dir: &Path,
    options: &Options,
) -> Result<(), String> {
    let programs = vm_build::programs(log, workspace, dir)?;
    let mut table = Vec::new();
    let mut survived = Vec::new();
    for variant in vm_build::variants(workspace)?.into_iter().filter(|variant| options.selects(&variant.name)) {
        let modules = match vm_build::variant(log, workspace, kernel, modules, &variant, dir) {
            Ok(modules) => modules,
            Err(error) => {
                table.push(format!("{:24} {:16} DOES NOT BUILD: {error}", variant.name, variant.test));
                survived.push(variant.name);
                continue;
            }
        };
        let test: Vec<Program> = programs.iter().filter(|program| program.name == variant.test).cloned().collect();
        if test.is_empty() {
            return Err(format!("{}: there is no test `{}`", variant.name, variant.test));
        }
        let dir = dir.join("broken");
        let report = vm_guest::boot(
            log,
            &Guest {
                kernel,
                modules: &modules,
                programs: &test,
                files: &[],
                bar_bytes: vm_guest::BAR_BYTES,
                dir: &dir,
                keep: false,
            },
        )?;
        table.push(format!(
            "{:24} {:16} {}",
            variant.name,
            variant.test,
            report.first_complaint().unwrap_or("NOT NOTICED")
        ));
        if report.first_complaint().is_none() {
            survived.push(variant.name);
        }
    }
    log.say("");
    log.keep(format!("{:24} {:16} first complaint, kernel {}", "broken variant", "test", kernel.release));
    for line in table {
        log.keep(line);
    }
    if survived.is_empty() { Ok(()) } else { Err(format!("not noticed, or not built: {}", survived.join(", "))) }
}

// --- steps of `cargo xtask ci` ---------------------------------------------------------------------------------------

pub(crate) fn step_packages(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    for series in SERIES {
        if let Err(reason) = vm_packages::kernel(log, workspace, series)? {
            return Ok(Verdict::Skipped(reason));
        }
    }
    Ok(Verdict::Passed)
}

/// Both modules for both kernels, all warnings errors.
pub(crate) fn step_build(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    for series in SERIES {
        let kernel = match vm_packages::kernel(log, workspace, series)? {
            Ok(kernel) => kernel,
            Err(reason) => return Ok(Verdict::Skipped(reason)),
        };
        vm_build::modules(log, workspace, &kernel, &workspace.target.join("vm").join(&kernel.name))?;
    }
    Ok(Verdict::Passed)
}

pub(crate) fn step_6_1(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    step_vm(log, workspace, "6.1", &Options::default())
}

pub(crate) fn step_6_12(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    step_vm(log, workspace, "6.12", &Options::default())
}

/// The library's contract suite over the module.
pub(crate) fn step_contract(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    step_vm(log, workspace, "6.12", &Options { contract: true, ..Options::default() })
}

fn step_vm(log: &mut Log, workspace: &Workspace, series: &str, options: &Options) -> Result<Verdict, String> {
    match vm_packages::kernel(log, workspace, series)? {
        Ok(kernel) => test(log, workspace, &kernel, options).map(|()| Verdict::Passed),
        Err(reason) => Ok(Verdict::Skipped(reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Options, String> {
        Options::parse(&args.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read() {
        assert_eq!(parsed(&[]), Ok(Options::default()));
        let all = parsed(&["--kernel", "6.12", "--keep", "--contract", "--broken", "--extra", "x", "race"]).unwrap();
        assert_eq!(all.kernel.as_deref(), Some("6.12"));
        assert!(all.contract);
        assert!(all.keep && all.broken);
        assert_eq!(all.extra, Some(PathBuf::from("x")));
        assert!(all.selects("60-race") && !all.selects("10-requests"));
        assert!(parsed(&["--kernel", "5.10"]).is_err());
        assert!(parsed(&["--kernel"]).is_err());
        assert!(parsed(&["--fast"]).is_err());
        assert!(parsed(&["a", "b"]).is_err());
    }
}
