//! The module `gdrdrv` and its node.

use super::broken;
use crate::tree::{KERNEL, Tree};

#[test]
fn a_container_without_the_module_s_node() {
    let breaking = |tree: &mut Tree| {
        tree.file("proc/1/cgroup", "0::/kubepods.slice/pod7\n");
        tree.remove("dev/gdrdrv");
    };
    let parts =
        ["was not passed into this container", "--device /dev/gdrdrv", "NVIDIA_GDRCOPY=enabled", "names kubepods"];
    broken(breaking, "problem", "gdrdrv", &parts);
}

#[test]
fn no_node() {
    let parts = ["the module is loaded, but /dev/gdrdrv does not exist", "mknod -m 0666 /dev/gdrdrv c 240 0"];
    broken(|tree| tree.remove("dev/gdrdrv"), "problem", "gdrdrv", &parts);
}

#[test]
fn a_node_closed_to_everybody_but_root() {
    let parts = ["this user may not open /dev/gdrdrv", "chmod 0666 /dev/gdrdrv", "mode 0600, uid 0"];
    broken(|tree| tree.node("gdrdrv", 240, 0, 0o600), "problem", "gdrdrv", &parts);
}

#[test]
fn a_node_for_a_group() {
    let parts = ["this user may not open /dev/gdrdrv", "add this user to group 44"];
    broken(|tree| tree.node("gdrdrv", 240, 0, 0o660), "problem", "gdrdrv", &parts);
    // Members of it have no complaint, nor has root.
    for (groups, capabilities) in [("7 44", 0), ("", 1 << 1)] {
        let tree = Tree::healthy();
        tree.node("gdrdrv", 240, 0, 0o660);
        tree.user(1000, 1000, groups, capabilities);
        assert_eq!(tree.diagnosis().complaints(), []);
    }
}

#[test]
fn a_node_of_another_driver() {
    let parts = [
        "/dev/gdrdrv is not gdrdrv's: it belongs to driver other (major number 239)",
        "rm /dev/gdrdrv, then mknod -m 0666 /dev/gdrdrv c 240 0",
        "/proc/devices: 240 gdrdrv",
    ];
    broken(|tree| tree.node("gdrdrv", 239, 0, 0o666), "problem", "gdrdrv", &parts);
}

#[test]
fn a_node_of_a_module_that_is_gone() {
    let breaking = |tree: &mut Tree| {
        tree.no_gdrdrv();
        tree.node("gdrdrv", 240, 0, 0o666);
    };
    let parts =
        ["the module is not loaded: no driver has its major number 240", "rm /dev/gdrdrv, then modprobe gdrdrv"];
    broken(breaking, "problem", "gdrdrv", &parts);
}

#[test]
fn a_file_in_place_of_the_node() {
    let parts = ["/dev/gdrdrv is not a device file", "rm /dev/gdrdrv, then mknod -m 0666 /dev/gdrdrv c 240 0"];
    broken(|tree| tree.file("dev/gdrdrv", "written by mistake"), "problem", "gdrdrv", &parts);
}

#[test]
fn an_old_module() {
    let parts = ["module gdrdrv 2.3 is old", "install gdrdrv 2.6 on the host"];
    broken(|tree| tree.file("sys/module/gdrdrv/version", "2.3\n"), "warning", "gdrdrv", &parts);
    let parts = ["module gdrdrv 1.3 is too old", "install gdrdrv 2.6 on the host"];
    broken(|tree| tree.file("sys/module/gdrdrv/version", "1.3\n"), "problem", "gdrdrv", &parts);
}

#[test]
fn a_module_that_is_not_loaded() {
    let breaking = |tree: &mut Tree| {
        tree.no_gdrdrv();
        tree.built(KERNEL, "gdrdrv");
    };
    broken(
        breaking,
        "problem",
        "gdrdrv",
        &["installed and not loaded", "modprobe gdrdrv, and echo gdrdrv > /etc/modules-load.d"],
    );
}

#[test]
fn a_module_for_another_kernel() {
    let breaking = |tree: &mut Tree| {
        tree.no_gdrdrv();
        tree.built("6.1.0-old", "gdrdrv");
    };
    broken(breaking, "problem", "gdrdrv", &["built for kernel 6.1.0-old", "dkms autoinstall, then modprobe gdrdrv"]);
}

#[test]
fn no_module_at_all_is_no_problem() {
    broken(
        |tree| tree.no_gdrdrv(),
        "note",
        "gdrdrv",
        &["backend rm does without", "nothing to do where backend rm serves"],
    );
}

#[test]
fn secure_boot_refuses_the_module() {
    let breaking = |tree: &mut Tree| {
        tree.no_gdrdrv();
        tree.built(KERNEL, "gdrdrv");
        tree.file("sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
        let variable = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
        tree.file(variable, "\u{6}\0\0\0\u{1}");
    };
    let parts =
        ["Secure Boot is on, and the module is not signed", "mokutil --import /var/lib/dkms/mok.pub", "[integrity]"];
    broken(breaking, "problem", "gdrdrv", &parts);
}

#[test]
fn a_kernel_that_wants_signatures() {
    let breaking = |tree: &mut Tree| {
        tree.no_gdrdrv();
        tree.built(KERNEL, "gdrdrv");
        tree.file("sys/module/module/parameters/sig_enforce", "Y\n");
        let module = format!("lib/modules/{KERNEL}/updates/dkms/gdrdrv.ko");
        tree.file(&module, "a signed module~Module signature appended~\n");
    };
    let parts = ["signed with a key that this machine may not know", "mokutil --import", "sig_enforce is Y"];
    broken(breaking, "problem", "gdrdrv", &parts);
}

#[test]
fn a_kernel_that_takes_no_modules() {
    let breaking = |tree: &mut Tree| {
        tree.no_gdrdrv();
        tree.built(KERNEL, "gdrdrv");
        tree.file("proc/sys/kernel/modules_disabled", "1\n");
    };
    let parts = ["takes no modules any more", "use backend rm, which needs no module"];
    broken(breaking, "problem", "gdrdrv", &parts);
}
