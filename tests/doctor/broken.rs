//! Set-ups that are broken on purpose: one complaint each, with the right remedy.

use crate::tree::{KERNEL, LIBS, PCI, Tree};

/// Breaks one thing of a healthy machine: nothing else is complained about, and what is said has these parts.
#[track_caller]
fn broken(breaking: impl FnOnce(&mut Tree), severity: &str, area: &str, parts: &[&str]) {
    let mut tree = Tree::healthy();
    breaking(&mut tree);
    let diagnosis = tree.diagnosis();
    assert_eq!(diagnosis.complaints(), [(severity, area)], "{}", diagnosis.text);
    for part in parts {
        assert!(diagnosis.text.contains(part), "no '{part}' in: {}", diagnosis.text);
    }
    let finding = &diagnosis.json["findings"][0];
    assert_eq!((&finding["severity"], &finding["area"]), (&severity.into(), &area.into()), "the worst comes first");
    let first = &diagnosis.json["fix_first"];
    if severity == "problem" {
        assert_eq!(first["remedy"], finding["remedy"]);
        let line = format!("Fix this first: {}", finding["what"].as_str().unwrap());
        assert!(diagnosis.text.contains(&line), "{}", diagnosis.text);
    } else {
        assert!(first.is_null(), "{first}");
    }
}

#[test]
fn a_healthy_machine_has_no_complaint() {
    let diagnosis = Tree::healthy().diagnosis();
    assert_eq!(diagnosis.complaints(), [], "{}", diagnosis.text);
    for part in [
        "NVIDIA H200 at 0000:01:00.0",
        "NVIDIA driver 580.159.04, open kernel modules",
        "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 are there",
        "libcuda.so.580.159.04",
        "level vmm (the default), no cap",
        "module gdrdrv 2.6 is loaded, pins keep memory that is freed",
        "/dev/gdrdrv is gdrdrv's and open to this user",
        "libgdrapi.so.2 is /usr/lib/x86_64-linux-gnu/libgdrapi.so.2.6, version 2.6",
        "256 GiB",
        "Gen5 x16, all that GPU and slot have",
        "CPU 3 is next to NVIDIA H200",
        "no IOMMU is in use",
        "copy routines scalar, sse41, avx2 (not on this CPU: avx512, movdir64b)",
    ] {
        assert!(diagnosis.text.contains(part), "no '{part}' in: {}", diagnosis.text);
    }
}

#[test]
fn no_driver() {
    let remedy = "install NVIDIA's driver, 535 or newer";
    broken(|tree| tree.no_driver(), "problem", "driver", &["no NVIDIA driver is loaded", remedy]);
}

#[test]
fn nouveau_has_the_gpu() {
    let breaking = |tree: &mut Tree| {
        tree.no_driver();
        let driver = format!("sys/devices/pci0000:00/0000:00:01.0/{PCI}/driver");
        tree.link(&driver, "../../../../bus/pci/drivers/nouveau");
    };
    broken(breaking, "problem", "driver", &["driven by nouveau", "echo blacklist nouveau"]);
}

#[test]
fn a_driver_for_another_kernel() {
    let breaking = |tree: &mut Tree| {
        tree.no_driver();
        tree.built("6.1.0-old", "nvidia");
    };
    broken(
        breaking,
        "problem",
        "driver",
        &["built for kernel 6.1.0-old, and 6.12.0-test is running", "dkms autoinstall"],
    );
}

#[test]
fn a_driver_that_is_not_loaded() {
    let breaking = |tree: &mut Tree| {
        tree.no_driver();
        tree.built(KERNEL, "nvidia");
    };
    broken(breaking, "problem", "driver", &["is installed and not loaded", "modprobe nvidia"]);
}

#[test]
fn an_old_driver() {
    let breaking = |tree: &mut Tree| {
        tree.driver("470.57.02");
        tree.cuda("470.57.02");
    };
    broken(breaking, "warning", "driver", &["470.57.02 is older than backend rm knows", "update to 535"]);
}

#[test]
fn two_halves_of_a_driver() {
    let remedy = "reboot or reload the nvidia modules";
    broken(|tree| tree.cuda("575.51.03"), "problem", "driver", &["libcuda is of driver 575.51.03", remedy]);
}

#[test]
fn no_cuda_library() {
    let breaking = |tree: &mut Tree| tree.remove(&format!("{LIBS}/libcuda.so.1"));
    broken(breaking, "problem", "driver", &["libcuda.so.1 is not on the loader's path", "libcuda1"]);
}

#[test]
fn driver_without_its_files() {
    let breaking = |tree: &mut Tree| tree.remove("dev/nvidia-uvm");
    broken(breaking, "problem", "driver", &["/dev/nvidia-uvm is not there", "nvidia-modprobe -u -c 0"]);
}

#[test]
fn a_gpu_closed_to_this_user() {
    let breaking = |tree: &mut Tree| tree.node("nvidia0", 195, 0, 0o660);
    broken(breaking, "problem", "driver", &["may not open /dev/nvidia0", "add this user to group 44"]);
}

#[test]
fn a_container_without_the_gpu() {
    let breaking = |tree: &mut Tree| {
        tree.container();
        for name in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
            tree.remove(&format!("dev/{name}"));
        }
    };
    let parts = [
        "this container lacks /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0",
        "--gpus all",
        "nvidia.com/gpu",
        "--device /dev/nvidiactl",
        "/.dockerenv exists",
    ];
    broken(breaking, "problem", "driver", &parts);
}

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

#[test]
fn a_module_without_library() {
    let breaking = |tree: &mut Tree| {
        for name in ["libgdrapi.so", "libgdrapi.so.2", "libgdrapi.so.2.6"] {
            tree.remove(&format!("{LIBS}/{name}"));
        }
    };
    let parts = [
        "the module gdrdrv is loaded, but there is no libgdrapi.so.2",
        "cargo xtask install --prefix /usr/local, then ldconfig",
    ];
    broken(breaking, "warning", "library", &parts);
}

#[test]
fn a_library_without_links() {
    let breaking = |tree: &mut Tree| {
        tree.remove(&format!("{LIBS}/libgdrapi.so"));
        tree.remove(&format!("{LIBS}/libgdrapi.so.2"));
    };
    let parts = [
        "libgdrapi.so.2.6 is there, but not the link libgdrapi.so.2",
        "ldconfig, or ln -s libgdrapi.so.2.6 /usr/lib/x86_64-linux-gnu/libgdrapi.so.2",
    ];
    broken(breaking, "problem", "library", &parts);
}

#[test]
fn a_library_without_the_name_that_nccl_opens() {
    let breaking = |tree: &mut Tree| tree.remove(&format!("{LIBS}/libgdrapi.so"));
    let parts = [
        "libgdrapi.so is missing beside libgdrapi.so.2",
        "ln -s libgdrapi.so.2 /usr/lib/x86_64-linux-gnu/libgdrapi.so",
    ];
    broken(breaking, "warning", "library", &parts);
}

#[test]
fn a_library_off_the_path() {
    let breaking = |tree: &mut Tree| {
        for name in ["libgdrapi.so", "libgdrapi.so.2", "libgdrapi.so.2.6"] {
            tree.remove(&format!("{LIBS}/{name}"));
        }
        tree.gdrapi("usr/local/lib", "2.6");
    };
    let parts =
        ["its folder is not on the loader's path", "echo /usr/local/lib > /etc/ld.so.conf.d/gdrcopy.conf and ldconfig"];
    broken(breaking, "problem", "library", &parts);
}

#[test]
fn two_libraries() {
    let breaking = |tree: &mut Tree| {
        tree.gdrapi("usr/lib64", "2.4");
        tree.link("usr/lib64/libgdrapi.so.2", "libgdrapi.so.2.4");
    };
    let parts = [
        "programs get /usr/lib/x86_64-linux-gnu/libgdrapi.so.2.6 (version 2.6), not /usr/lib64/libgdrapi.so.2.4 (version 2.4)",
        "remove the one that is not wanted",
    ];
    broken(breaking, "warning", "library", &parts);
}

#[test]
fn a_library_path_decides_which_of_two() {
    let mut tree = Tree::healthy();
    tree.gdrapi("opt/own", "2.5");
    tree.link("opt/own/libgdrapi.so.2", "libgdrapi.so.2.5");
    tree.link("opt/own/libgdrapi.so", "libgdrapi.so.2");
    tree.set("LD_LIBRARY_PATH", "/opt/own");
    let diagnosis = tree.diagnosis();
    assert_eq!(diagnosis.complaints(), [("warning", "library")]);
    let part = "programs get /opt/own/libgdrapi.so.2.5 (version 2.5), not /usr/lib/x86_64-linux-gnu/libgdrapi.so.2.6";
    assert!(diagnosis.text.contains(part), "{}", diagnosis.text);
}

#[test]
fn a_library_of_another_interface() {
    let breaking = |tree: &mut Tree| tree.gdrapi_named(LIBS, "2.6", "libgdrapi.so.1");
    broken(breaking, "problem", "library", &["calls itself libgdrapi.so.1, not libgdrapi.so.2", "cargo xtask install"]);
    let breaking = |tree: &mut Tree| tree.file(&format!("{LIBS}/libgdrapi.so.2.6"), "#!/bin/sh");
    broken(breaking, "problem", "library", &["is not a 64-bit shared library", "install the library again"]);
}

#[test]
fn a_routine_that_this_cpu_lacks() {
    let parts =
        ["GDRCOPY_COPY=movdir64b makes every session fail", "unset GDRCOPY_COPY, or choose one of scalar, sse41, avx2"];
    broken(|tree| tree.set("GDRCOPY_COPY", "movdir64b"), "problem", "cpu", &parts);
    let parts = ["there is no routine \"avx1024\"", "unset GDRCOPY_COPY, or choose one of scalar"];
    broken(|tree| tree.set("GDRCOPY_COPY", "avx1024"), "problem", "settings", &parts);
}

#[test]
fn settings_that_are_none() {
    let parts = [
        "GDRCOPY_BACKEND makes every session fail: unknown backend 'rdma'",
        "unset GDRCOPY_BACKEND, or choose one of: gdrdrv",
    ];
    broken(|tree| tree.set("GDRCOPY_BACKEND", "rdma"), "problem", "settings", &parts);
    let parts = ["unknown rm level 'all'", "unset GDRCOPY_RM, or choose one of: off, vmm, ipc"];
    broken(|tree| tree.set("GDRCOPY_RM", "all"), "problem", "settings", &parts);
    let parts = ["programs use host memory in place of a GPU", "unset GDRCOPY_BACKEND"];
    broken(|tree| tree.set("GDRCOPY_BACKEND", "emulated"), "warning", "settings", &parts);
    broken(|tree| tree.set("GDRCOPY_RM", "off"), "problem", "rm", &["switched off by GDRCOPY_RM", "unset GDRCOPY_RM"]);
}

#[test]
fn mps() {
    let parts = ["runs under MPS", "without CUDA_MPS_PIPE_DIRECTORY"];
    let mut tree = Tree::healthy();
    tree.set("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps");
    let diagnosis = tree.diagnosis();
    assert_eq!(diagnosis.complaints(), [("warning", "rm")]);
    assert!(parts.iter().all(|part| diagnosis.text.contains(part)), "{}", diagnosis.text);
}

#[test]
fn a_policy_caps_rm() {
    let capped = |tree: &mut Tree| {
        tree.file("etc/gdrcopy.conf", "# no undocumented handles here\nrm = vmm\n");
        tree.mode("etc/gdrcopy.conf", 0o644);
        tree.set("GDRCOPY_RM", "ipc");
    };
    let parts = [
        "level ipc is asked for by GDRCOPY_RM, and capped at vmm in /etc/gdrcopy.conf",
        "allocate with Session::alloc",
        "/etc/gdrcopy.conf: rm = vmm",
    ];
    broken(capped, "warning", "rm", &parts);

    let off = |tree: &mut Tree| {
        tree.file("etc/gdrcopy.conf", "rm = off\n");
        tree.mode("etc/gdrcopy.conf", 0o644);
    };
    let parts = ["the administrator switched backend rm off in /etc/gdrcopy.conf", "ask for 'rm = vmm'"];
    broken(off, "problem", "rm", &parts);

    let fine = Tree::healthy();
    fine.file("etc/gdrcopy.conf", "rm = ipc\n");
    fine.mode("etc/gdrcopy.conf", 0o644);
    let diagnosis = fine.diagnosis();
    assert_eq!(diagnosis.complaints(), []);
    assert!(diagnosis.text.contains("the administrator's cap is ipc: ipc is allowed"), "{}", diagnosis.text);
}

#[test]
fn a_policy_that_cannot_be_trusted() {
    let breaking = |tree: &mut Tree| {
        tree.file("etc/gdrcopy.conf", "rm = ipc\n");
        tree.mode("etc/gdrcopy.conf", 0o666);
    };
    broken(
        breaking,
        "problem",
        "rm",
        &["can be changed by others than root", "chown root /etc/gdrcopy.conf, chmod 0644"],
    );
}

#[test]
fn a_link_narrower_than_the_slot() {
    let parts = ["runs on 8 lanes of the 16 that GPU and slot have", "seat the GPU again", "current_link Gen5 x8"];
    broken(|tree| tree.gpu_file("current_link_width", "8"), "warning", "link", &parts);
}

#[test]
fn a_slot_narrower_than_the_gpu() {
    let breaking = |tree: &mut Tree| {
        tree.slot("16.0 GT/s PCIe", "8");
        tree.gpu_file("current_link_width", "8");
        tree.gpu_file("current_link_speed", "16.0 GT/s PCIe");
    };
    let parts = ["offers Gen4 x8, the GPU could do Gen5 x16", "move the GPU to a wider or newer slot"];
    broken(breaking, "note", "link", &parts);
}

#[test]
fn a_link_asleep() {
    let parts = ["is at Gen1 of 5 now", "none if the GPU is idle"];
    broken(|tree| tree.gpu_file("current_link_speed", "2.5 GT/s PCIe"), "note", "link", &parts);
    // Virtual machines do not tell.
    let tree = Tree::healthy();
    tree.gpu_file("current_link_speed", "Unknown");
    assert_eq!(tree.diagnosis().complaints(), []);
}

#[test]
fn a_small_bar1() {
    let parts = ["is small: 256 MiB", "enable Resizable BAR and Above 4G Decoding", "displaymodeselector"];
    broken(|tree| tree.bar1(256 << 20), "warning", "bar1", &parts);
    let breaking = |tree: &mut Tree| {
        tree.bar1(256 << 20);
        tree.gpu_file("resource1_resize", "000000000001ffc0\n");
    };
    broken(breaking, "warning", "bar1", &["is small: 256 MiB", "the GPU offers up to 64 GiB"]);
}

#[test]
fn a_cpu_on_the_far_side() {
    let parts =
        ["this runs on CPU 3, and NVIDIA H200 at 0000:01:00.0 is next to CPUs 8-15, NUMA node 1", "taskset -c 8-15"];
    let breaking = |tree: &mut Tree| {
        tree.gpu_file("local_cpulist", "8-15");
        tree.gpu_file("numa_node", "1");
    };
    broken(breaking, "note", "numa", &parts);
    let parts = ["give this process or container CPUs of 64-71", "it may use 0-15"];
    broken(|tree| tree.gpu_file("local_cpulist", "64-71"), "warning", "numa", &parts);
}

#[test]
fn of_several_problems_the_one_needed_first_is_named() {
    let tree = Tree::healthy();
    tree.bar1(256 << 20);
    tree.remove("dev/gdrdrv");
    tree.no_driver();
    let diagnosis = tree.diagnosis();
    assert_eq!(diagnosis.complaints(), [("problem", "driver"), ("problem", "gdrdrv"), ("warning", "bar1")]);
    assert!(diagnosis.text.contains("Fix this first: no NVIDIA driver is loaded"), "{}", diagnosis.text);
}
