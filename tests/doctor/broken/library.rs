//! `libgdrapi.so.2` and its links.

use super::broken;
use crate::tree::{LIBS, Tree};

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
