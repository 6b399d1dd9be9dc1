//! `cargo xtask nvidia-headers`: compiles the kernel module against the `nv-p2p.h` of real drivers.
//!
//! Debian has NVIDIA's open kernel modules in its component contrib, which few machines have switched on: the archive is
//! taken from this machine's apt, component and suite are ours. Only headers are used; nothing is installed or loaded.

use std::fs;
use std::path::{Path, PathBuf};

use crate::run::{Log, command, query, run};
use crate::vm;
use crate::vm_build;
use crate::vm_packages::{self, Apt, Kernel, io_error};
use crate::workspace::Workspace;

/// Suites with different branches of the driver.
const SUITES: [&str; 2] = ["bookworm", "trixie"];
const PACKAGE: &str = "nvidia-open-kernel-dkms";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Every kernel against every header.
pub(crate) fn command_headers(log: &mut Log, workspace: &Workspace) -> Result<(), String> {
    let cache = vm_packages::cache_dir(workspace);
    let site = debian_site().ok_or("this machine's apt has no Debian archive")?;
    let mut results = Vec::new();
    for suite in SUITES {
        let sources = format!("deb [signed-by={KEYRING}] {site} {suite} contrib\n");
        let apt = Apt::with_sources(&cache, &format!("apt-{suite}"), &sources)?.ok_or("this machine has no apt-get")?;
        apt.update(log)?;
        let deb = apt.download(log, PACKAGE)?;
        let header = unpack_header(log, &deb, &cache.join(format!("nvidia-{suite}")))?;
        for series in vm::SERIES {
            let kernel = vm_packages::kernel(log, workspace, series)??;
            build(log, workspace, &kernel, suite, &header)?;
            results.push(format!("{} and Linux {}: compiles", vm_build::file_name(&deb), kernel.release));
        }
    }
    for result in results {
        log.say(&result);
    }
    Ok(())
}

/// The archive of which this machine has its base system.
fn debian_site() -> Option<String> {
    let format = "$(ORIGIN) $(RELEASE) $(SITE)";
    site_in(&query("apt-get", ["indextargets", "--format", format, "Created-By: Packages"])?)
}

fn site_in(targets: &str) -> Option<String> {
    targets.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let [origin, release, site] = words[..] else { return None };
        (origin == "Debian" && !release.contains('-')).then(|| site.to_owned())
    })
}

/// Unpacks the one file from the package, and returns where it lies.
fn unpack_header(log: &mut Log, deb: &Path, dir: &Path) -> Result<PathBuf, String> {
    fs::create_dir_all(dir).map_err(io_error(dir))?;
    let script = "dpkg-deb --fsys-tarfile \"$1\" | tar -x -C \"$2\" --wildcards '*/nv-p2p.h'";
    let mut unpack = command("sh", ["-euc", script, "sh"]);
    unpack.arg(deb).arg(dir);
    run(log, unpack)?;
    let listed = query("find", [&*dir.to_string_lossy(), "-name", "nv-p2p.h"]).unwrap_or_default();
    listed.lines().next().map(PathBuf::from).ok_or_else(|| format!("{}: no nv-p2p.h in it", deb.display()))
}

/// By the module's own Makefile, which also computes the driver's symbol versions from the header.
fn build(log: &mut Log, workspace: &Workspace, kernel: &Kernel, suite: &str, header: &Path) -> Result<(), String> {
    let dir = workspace.target.join("vm").join(format!("nvidia-{suite}-{}", kernel.name));
    vm_build::copy_module(workspace, &dir)?;
    let mut make = command("make", ["-s", "-C"]);
    make.arg(&dir).arg(format!("KDIR={}", kernel.build_tree.display()));
    make.arg(format!("NVIDIA_SRC_DIR={}", header.parent().unwrap_or(header).display()));
    make.args(["W=1", "KCFLAGS=-Werror", "CONFIG_DEBUG_INFO_BTF_MODULES="]);
    run(log, make)?;
    run(log, command("cat", [dir.join("probes.h"), dir.join("symbols/Module.symvers")]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_site_is_that_of_the_base_system() {
        let targets = "Other stable mirror/x\nDebian bookworm-security mirror/sec\nDebian bookworm mirror/deb\n";
        assert_eq!(site_in(targets).as_deref(), Some("mirror/deb"));
        assert_eq!(site_in("Other stable mirror/x\n"), None);
    }
}
