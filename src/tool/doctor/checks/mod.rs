//! The checks, one file for each part of the set-up.

use super::finding::Finding;
use super::root::Root;
use super::scene::Scene;

mod cpu;
mod dmabuf;
mod driver;
mod elf;
mod gdrdrv;
mod library;
mod loader;
mod modules;
mod pci;
mod place;
mod rm;
mod settings;

/// All findings, what is needed most first.
pub(super) fn all(root: &Root, scene: &Scene) -> Vec<Finding> {
    let mut findings = settings::check();
    findings.extend(place::check(root, scene));
    findings.extend(driver::check(root, scene));
    findings.extend(rm::check(root));
    findings.extend(gdrdrv::check(root, scene));
    findings.extend(dmabuf::check(root, scene));
    findings.extend(library::check(root));
    findings.extend(pci::check(root, scene));
    findings.extend(cpu::check(root));
    findings
}
