//! The kernel module `gdrdrv`: built, loaded, with a node that is its own and open to this user, and new enough.

use super::modules::{Built, built, refusal};
use crate::backend::BackendKind;
use crate::sys::gdrdrv::NODE;
use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::{Access, Node, Root};
use crate::tool::doctor::scene::Scene;

const AREA: &str = "gdrdrv";
const DEVICES: &str = "/proc/devices";
const PARAMS: &str = "/proc/driver/gdrdrv/params";
const MODULE: &str = "/sys/module/gdrdrv";

pub(super) fn check(root: &Root, scene: &Scene) -> Vec<Finding> {
    let devices = root.text(DEVICES).unwrap_or_default();
    let loaded = root.exists(MODULE) || major_of(&devices, "gdrdrv").is_some();
    let findings = if loaded { of_loaded(root, scene, &devices) } else { vec![of_absent(root, scene, &devices)] };
    findings.into_iter().map(|finding| finding.only_for(BackendKind::Gdrdrv)).collect()
}

/// The major number under which a character driver is listed.
fn major_of(devices: &str, name: &str) -> Option<u32> {
    character(devices).find(|(_, found)| *found == name).map(|(major, _)| major)
}

/// The character drivers in `/proc/devices`.
fn character(devices: &str) -> impl Iterator<Item = (u32, &str)> {
    devices.lines().take_while(|line| !line.starts_with("Block")).filter_map(|line| {
        let (major, name) = line.trim().split_once(' ')?;
        Some((major.parse().ok()?, name.trim()))
    })
}

/// Whose node it is, in words.
fn owner_of(devices: &str, access: &Access) -> String {
    match character(devices).find(|(major, _)| *major == access.major) {
        Some((major, name)) => format!("it belongs to driver {name} (major number {major})"),
        None => format!("no driver has its major number {}", access.major),
    }
}

fn of_absent(root: &Root, scene: &Scene, devices: &str) -> Finding {
    if let Node::Char(access) = root.node(NODE) {
        return Finding::problem(
            AREA,
            format!("{NODE} is there, but the module is not loaded: {}", owner_of(devices, &access)),
            format!("rm {NODE}, then modprobe gdrdrv"),
        )
        .read(format!("{NODE}: {access}; gdrdrv is not in {DEVICES}"));
    }
    let absent = format!("{MODULE} is not there");
    match built(root, scene, "gdrdrv") {
        Built::Here(path) => match refusal(root, &path) {
            Some(refusal) => {
                let what = format!("the module is installed and not loaded: {}", refusal.because);
                Finding::problem(AREA, what, refusal.remedy).read(refusal.evidence).read(path)
            }
            None => {
                let remedy = "modprobe gdrdrv, and echo gdrdrv > /etc/modules-load.d/gdrdrv.conf for every boot; if it is \
                              refused, dmesg says why";
                Finding::problem(AREA, "the module is installed and not loaded", remedy).read(path)
            }
        },
        Built::Elsewhere(release) => {
            let what = format!("the module was built for kernel {release}, and {} is running", scene.kernel);
            let remedy = "install this kernel's headers and run dkms autoinstall, then modprobe gdrdrv";
            Finding::problem(AREA, what, remedy).read(format!("/lib/modules/{release}/modules.dep"))
        }
        Built::Nowhere => {
            let remedy = "nothing to do where backend rm serves; else install the module on the host (gdrdrv/README.md)";
            Finding::note(AREA, "the module is not installed; backend rm does without", remedy)
        }
    }
    .read(absent)
}

fn of_loaded(root: &Root, scene: &Scene, devices: &str) -> Vec<Finding> {
    let mut findings = vec![version(root)];
    let listed = major_of(devices, "gdrdrv");
    let (number, read) = match listed {
        Some(major) => (major.to_string(), format!("{DEVICES}: {major} gdrdrv")),
        None => ("MAJOR".to_owned(), format!("gdrdrv is not in {DEVICES}")),
    };
    let finding = match root.node(NODE) {
        Node::Missing => match &scene.container {
            Some(sign) => Finding::problem(
                AREA,
                format!("the host has the module, but {NODE} was not passed into this container"),
                format!("start it with --device {NODE} (NVIDIA's toolkit: -e NVIDIA_GDRCOPY=enabled)"),
            )
            .read(sign.clone()),
            None => Finding::problem(
                AREA,
                format!("the module is loaded, but {NODE} does not exist"),
                format!(
                    "mknod -m 0666 {NODE} c {number} 0, or install the udev rule 60-gdrdrv.rules and load it again"
                ),
            ),
        },
        Node::NotADevice => Finding::problem(
            AREA,
            format!("{NODE} is not a device file"),
            format!("rm {NODE}, then mknod -m 0666 {NODE} c {number} 0"),
        ),
        Node::Char(access) if listed.is_some_and(|major| major != access.major) => Finding::problem(
            AREA,
            format!("{NODE} is not gdrdrv's: {}", owner_of(devices, &access)),
            format!("rm {NODE}, then mknod -m 0666 {NODE} c {number} 0"),
        )
        .read(format!("{NODE}: {access}")),
        Node::Char(access) if !scene.user.may_use(&access) => Finding::problem(
            AREA,
            format!("this user may not open {NODE}"),
            if access.mode & 0o060 == 0o060 {
                format!("add this user to group {}, or chmod 0666 {NODE}", access.gid)
            } else {
                format!(
                    "chmod 0666 {NODE}, and for every boot 'options gdrdrv dev_mode=0666' in /etc/modprobe.d or the udev \
                     rule 60-gdrdrv.rules"
                )
            },
        )
        .read(format!("{NODE}: {access}; own uid {}", scene.user.uid)),
        Node::Char(access) => {
            Finding::ok(AREA, format!("{NODE} is gdrdrv's and open to this user")).read(format!("{NODE}: {access}"))
        }
    };
    findings.push(finding.read(read));
    findings
}

/// The version that the module states.
fn version(root: &Root) -> Finding {
    let file = format!("{MODULE}/version");
    let params = root.text(PARAMS).unwrap_or_default();
    let param = |name: &str| params.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
    let Some(version) = root.line(&file).or_else(|| param("Version:")) else {
        return Finding::note(AREA, "the module does not state its version", "see gdrcopy_sanity, which asks it")
            .read(file);
    };
    let mut numbers = version.split('.').map(|number| number.trim_start_matches('v').parse().unwrap_or(0_u32));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let read = format!("{file}: {version}");
    let update = "install gdrdrv 2.6 on the host and load it in place of the old one";
    if number < (2, 0) {
        let what = format!("module gdrdrv {version} is too old: this library speaks 2.0 to 2.6");
        return Finding::problem(AREA, what, update).read(read);
    }
    if number < (2, 5) {
        let what = format!(
            "module gdrdrv {version} is old: the mapping type cannot be asked for, and programs that want interface 2.5 do \
             not use it"
        );
        return Finding::warning(AREA, what, update).read(read);
    }
    let mode = match param("Use persistent mapping:").as_deref() {
        Some("yes") => ", pins keep memory that is freed",
        Some("no") => ", access to freed memory raises SIGBUS",
        _ => "",
    };
    Finding::ok(AREA, format!("module gdrdrv {version} is loaded{mode}")).read(read).read(PARAMS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_drivers_do_not_count() {
        let devices = "Character devices:\n  1 mem\n240 gdrdrv\n\nBlock devices:\n  8 sd\n239 gdrdrv2\n";
        assert_eq!(major_of(devices, "gdrdrv"), Some(240));
        assert_eq!(
            (major_of(devices, "gdrdrv2"), major_of(devices, "sd"), major_of(devices, "me")),
            (None, None, None)
        );
    }
}
