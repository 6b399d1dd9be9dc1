//! Set-ups that are broken on purpose: one complaint each, with the right remedy.

use crate::tree::Tree;

mod driver;
mod library;
mod module;

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
