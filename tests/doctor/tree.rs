//! A folder that looks like a machine, healthy until a test breaks it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::program::{Scratch, plain, text};

pub(crate) const KERNEL: &str = "6.12.0-test";
pub(crate) const PCI: &str = "0000:01:00.0";
pub(crate) const LIBS: &str = "usr/lib/x86_64-linux-gnu";
const PORT: &str = "sys/devices/pci0000:00/0000:00:01.0";
/// What nobody is to see in a report.
pub(crate) const UUID: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";
pub(crate) const SECRET: &str = "a-secret-of-the-environment";

pub(crate) struct Tree {
    scratch: Scratch,
    settings: Vec<(&'static str, &'static str)>,
}

/// A shared library that says no more than its name.
fn library(soname: &str) -> Vec<u8> {
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let (headers, dynamic) = (64 + 2 * 56, 3 * 16);
    let strings = headers + dynamic;
    let end = strings + 1 + u64::try_from(soname.len()).unwrap() + 1;
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    // A shared object for x86-64, version 1.
    bytes.extend([3, 0, 62, 0, 1, 0, 0, 0]);
    bytes.extend(words(&[0, 64, 0]));
    bytes.extend([0, 0, 0, 0, 64, 0, 56, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    // Loaded as a whole; the dynamic section behind the headers: strings, name, end.
    bytes.extend(words(&[4 << 32 | 1, 0, 0, 0, end, end, 4096]));
    bytes.extend(words(&[4 << 32 | 2, headers, headers, headers, dynamic, dynamic, 8]));
    bytes.extend(words(&[5, strings, 14, 1, 0, 0]));
    bytes.push(0);
    bytes.extend(soname.bytes().chain([0]));
    bytes
}

impl Tree {
    /// A machine with one GPU, the driver, the module and the library, all as they should be, seen by an ordinary user.
    pub(crate) fn healthy() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let tree = Self { scratch: Scratch::new(&format!("doctor-tree-{number}")), settings: Vec::new() };
        tree.user(1000, 1000, "", 0);
        tree.file("proc/self/stat", &format!("7 (a (b) c) R {}3 0 0", "0 ".repeat(35)));
        tree.file("proc/sys/kernel/osrelease", KERNEL);
        tree.file("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sse4_1 avx2\n");
        tree.file("proc/1/cgroup", "0::/init.scope\n");
        let devices = "Character devices:\n  1 mem\n195 nvidia\n239 other\n240 gdrdrv\n\nBlock devices:\n  8 sd\n";
        tree.file("proc/devices", devices);
        tree.driver("580.159.04");
        let information =
            format!("Model: \t\t NVIDIA H200\nGPU UUID: \t {UUID}\nBus Type: \t PCIe\nDevice Minor: \t 0\n");
        tree.file(&format!("proc/driver/nvidia/gpus/{PCI}/information"), &information);
        for (name, minor) in [("nvidiactl", 255), ("nvidia0", 0), ("nvidia-uvm", 1)] {
            tree.node(name, 195, minor, 0o666);
        }
        tree.gpu_files();
        tree.file("sys/module/gdrdrv/version", "2.6");
        tree.file("proc/driver/gdrdrv/params", "Version: 2.6\nUse persistent mapping: yes\n");
        tree.node("gdrdrv", 240, 0, 0o666);
        tree.gdrapi(LIBS, "2.6");
        tree.link(&format!("{LIBS}/libgdrapi.so.2"), "libgdrapi.so.2.6");
        tree.link(&format!("{LIBS}/libgdrapi.so"), "libgdrapi.so.2");
        tree.cuda("580.159.04");
        tree
    }

    fn gpu_files(&self) {
        let gpu = format!("{PORT}/{PCI}");
        let files = [
            ("vendor", "0x10de"),
            ("class", "0x030200"),
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "16"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("max_link_width", "16"),
            ("numa_node", "0"),
            ("local_cpulist", "0-7"),
        ];
        for (name, text) in files {
            self.file(&format!("{gpu}/{name}"), text);
        }
        self.bar1(256 << 30);
        self.slot("32.0 GT/s PCIe", "16");
        self.link(&format!("{gpu}/driver"), "../../../../bus/pci/drivers/nvidia");
        self.link(&format!("sys/bus/pci/devices/{PCI}"), &format!("../../../../{gpu}"));
    }

    fn at(&self, path: &str) -> PathBuf {
        let path = self.scratch.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    pub(crate) fn file(&self, path: &str, text: &str) {
        fs::write(self.at(path), text).unwrap();
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.at(path);
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    pub(crate) fn remove(&self, path: &str) {
        let path = self.at(path);
        fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path)).unwrap();
    }

    pub(crate) fn mode(&self, path: &str, mode: u32) {
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(mode)).unwrap();
    }

    pub(crate) fn set(&mut self, name: &'static str, value: &'static str) {
        self.settings.push((name, value));
    }

    /// Who asks: uid, gid, further groups, capabilities.
    pub(crate) fn user(&self, uid: u32, gid: u32, groups: &str, capabilities: u64) {
        let status = format!(
            "Name:\tdoctor\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{gid}\t{gid}\t{gid}\t{gid}\nGroups:\t{groups}\n\
             CapEff:\t{capabilities:016x}\nCpus_allowed_list:\t0-15\n"
        );
        self.file("proc/self/status", &status);
    }

    /// A device file of root's, group 44.
    pub(crate) fn node(&self, name: &str, major: u32, minor: u32, mode: u32) {
        self.file(&format!("dev/{name}"), &format!("char {major} {minor} {mode:o} 0 44\n"));
    }

    pub(crate) fn driver(&self, version: &str) {
        let line =
            format!("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (a@b)  now\n");
        self.file("proc/driver/nvidia/version", &line);
    }

    pub(crate) fn no_driver(&self) {
        self.remove("proc/driver/nvidia");
        for name in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
            self.remove(&format!("dev/{name}"));
        }
    }

    pub(crate) fn cuda(&self, version: &str) {
        self.file(&format!("{LIBS}/libcuda.so.{version}"), "");
        self.link(&format!("{LIBS}/libcuda.so.1"), &format!("libcuda.so.{version}"));
    }

    /// The file of a library, without its links.
    pub(crate) fn gdrapi(&self, folder: &str, version: &str) {
        self.gdrapi_named(folder, version, "libgdrapi.so.2");
    }

    pub(crate) fn gdrapi_named(&self, folder: &str, version: &str, soname: &str) {
        fs::write(self.at(&format!("{folder}/libgdrapi.so.{version}")), library(soname)).unwrap();
    }

    pub(crate) fn no_gdrdrv(&self) {
        for path in ["sys/module/gdrdrv", "proc/driver/gdrdrv", "dev/gdrdrv"] {
            self.remove(path);
        }
        self.file("proc/devices", "Character devices:\n  1 mem\n195 nvidia\n239 other\n");
    }

    pub(crate) fn built(&self, release: &str, module: &str) {
        self.file(&format!("lib/modules/{release}/modules.dep"), &format!("updates/dkms/{module}.ko: kernel/x.ko\n"));
        self.file(&format!("lib/modules/{release}/updates/dkms/{module}.ko"), "an unsigned module");
    }

    pub(crate) fn gpu_file(&self, name: &str, text: &str) {
        self.file(&format!("{PORT}/{PCI}/{name}"), text);
    }

    pub(crate) fn slot(&self, speed: &str, width: &str) {
        self.file(&format!("{PORT}/max_link_speed"), speed);
        self.file(&format!("{PORT}/max_link_width"), width);
    }

    pub(crate) fn bar1(&self, bytes: u64) {
        let start = 0x3800_0000_0000_u64;
        let regions = format!("0xa0000000 0xa0ffffff 0x40200\n{start:#x} {:#x} 0x14220c\n", start + bytes - 1);
        self.gpu_file("resource", &regions);
    }

    pub(crate) fn container(&self) {
        self.file(".dockerenv", "");
    }

    pub(crate) fn doctor(&self) -> Command {
        let mut command = plain(env!("CARGO_BIN_EXE_gdrcopy_doctor"));
        command.env_remove("LD_LIBRARY_PATH").env_remove("CUDA_MPS_PIPE_DIRECTORY").env("SOME_TOKEN", SECRET);
        command.arg("--root").arg(&self.scratch.0).envs(self.settings.iter().copied());
        command
    }

    pub(crate) fn path(&self) -> &Path {
        &self.scratch.0
    }

    /// What the doctor says of it, as text and as JSON, which have to agree.
    pub(crate) fn diagnosis(&self) -> Diagnosis {
        let output = self.doctor().args(["--json", "-"]).output().unwrap();
        Diagnosis::of(&output)
    }
}

pub(crate) struct Diagnosis {
    pub(crate) json: Value,
    pub(crate) text: String,
}

impl Diagnosis {
    pub(crate) fn of(output: &Output) -> Self {
        let stderr = text(&output.stderr).to_owned();
        let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
        let all = stderr.clone() + text(&output.stdout);
        assert!(!all.contains(UUID) && !all.contains(SECRET), "a secret: {all}");
        for finding in json["findings"].as_array().unwrap() {
            let (severity, remedy) = (finding["severity"].as_str().unwrap(), finding["remedy"].as_str());
            assert_eq!(remedy.is_some(), severity != "ok", "{finding}");
            assert!(severity == "ok" || !finding["evidence"].as_array().unwrap().is_empty(), "{finding}");
            assert!(remedy.is_none_or(|remedy| !remedy.contains('\n')), "{finding}");
        }
        let text = stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        Self { json, text }
    }

    /// What is not as it should be: severity and area.
    pub(crate) fn complaints(&self) -> Vec<(&str, &str)> {
        let findings = self.json["findings"].as_array().unwrap().iter();
        let complaints = findings.filter(|finding| finding["severity"] != "ok");
        complaints.map(|finding| (finding["severity"].as_str().unwrap(), finding["area"].as_str().unwrap())).collect()
    }
}
