//! Opening the node: each way in which that fails has its own words and its own way out.

use gdrcopy::{BackendKind, Session};

use crate::again::{NEWEST, OLDEST, answer, inside, run, this_test};
use crate::common::standin::{FAULT, MAJORS, MINIMUM, Module};

fn open_and_answer(builder: gdrcopy::SessionBuilder) {
    match builder.open() {
        Ok(session) => {
            answer(&format!("opened {}: {}", session.backend(), session.probe_report()).replace('\n', "; "));
            session.close().unwrap();
        }
        Err(error) => answer(&format!("failed {:?} {error}", error.kind())),
    }
}

/// A failure's settings and kind, and parts of its words.
type Failure = (&'static [(&'static str, &'static str)], &'static str, &'static [&'static str]);

const FAILURES: &[Failure] = &[
    (&[(FAULT, "open:2")], "NoDriver", &["the kernel module gdrdrv is not loaded; modprobe gdrdrv"]),
    (
        &[(FAULT, "open:2"), (MAJORS, "240,240")],
        "NoDriver",
        &["loaded, but /dev/gdrdrv does not exist; mknod /dev/gdrdrv c 240 0"],
    ),
    (&[(FAULT, "open:13")], "PermissionDenied", &["give this user read and write access to /dev/gdrdrv"]),
    (&[(FAULT, "open:1")], "PermissionDenied", &["give this user read and write access to /dev/gdrdrv"]),
    (
        &[(FAULT, "open:6")],
        "NoDriver",
        &["left from a module that is no longer loaded", "; remove /dev/gdrdrv and load gdrdrv again"],
    ),
    (
        &[(FAULT, "open:6"), (MAJORS, "240,239")],
        "NoDriver",
        &["/dev/gdrdrv has major number 239, but gdrdrv has 240: the node is stale", "let udev create the node"],
    ),
    (&[(FAULT, "open:24")], "Io(24)", &["/dev/gdrdrv cannot be opened"]),
    (&[(FAULT, "version:25")], "NoDriver", &["left from a module that is no longer loaded"]),
    (&[(FAULT, "version:25"), (MAJORS, "240,239")], "NoDriver", &["the node is stale"]),
    (&[(FAULT, "version:25"), (MAJORS, "240,240")], "NoDriver", &["/dev/gdrdrv belongs to another driver"]),
    (&[(FAULT, "version:22"), (MAJORS, "240,240")], "NoDriver", &["/dev/gdrdrv belongs to another driver"]),
    (&[(MINIMUM, "3.0")], "NoDriver", &["2.6 wants a library of interface 3.0 or newer; update this library"]),
    (&[(MINIMUM, "2.7")], "NoDriver", &["interface 2.7 or newer", "which speaks 2.6"]),
];

#[test]
fn failures_are_told_apart() {
    if inside() {
        return open_and_answer(Session::builder().backend(BackendKind::Gdrdrv));
    }
    for &(settings, kind, parts) in FAILURES {
        let ran = run(this_test!(), NEWEST, settings);
        for part in [&format!("failed {kind} open: ")[..]].iter().chain(parts) {
            assert!(ran.answer.contains(part), "{settings:?}: no '{part}' in: {}", ran.answer);
        }
        let opened = ran.calls[0].ends_with("= 0");
        assert_eq!(ran.count("released"), usize::from(opened), "{settings:?}: the node is closed again");
        assert!(ran.names().iter().all(|name| ["open", "version", "released"].contains(name)), "{ran:?}");
    }
}

#[test]
fn versions_before_2_0_are_too_old() {
    if inside() {
        return open_and_answer(Session::builder().backend(BackendKind::Gdrdrv));
    }
    for version in ["1.3", "0.9"] {
        let ran = run(this_test!(), Module { version, persistent: false }, &[]);
        let words = format!("gdrdrv is version {version}, which is too old; load version 2.0 or newer");
        assert!(ran.answer.starts_with("failed NoDriver") && ran.answer.contains(&words), "{}", ran.answer);
        assert_eq!(ran.names(), ["open", "version", "released"]);
    }
    // One that is newer than this library still serves it.
    let ran = run(this_test!(), Module { version: "2.9", persistent: true }, &[]);
    assert!(ran.answer.starts_with("opened gdrdrv"), "{}", ran.answer);
}

#[test]
fn probing_takes_gdrdrv_before_all_others() {
    if inside() {
        return open_and_answer(Session::builder());
    }
    for module in [OLDEST, NEWEST] {
        let ran = run(this_test!(), module, &[]);
        assert_eq!(ran.answer, "opened gdrdrv: gdrdrv: chosen by probing");
    }
    let ran = run(this_test!(), NEWEST, &[(FAULT, "open:2")]);
    assert!(ran.answer.contains("gdrdrv: ") && ran.answer.contains("gdrdrv is not loaded"), "{}", ran.answer);
    assert!(!ran.answer.contains("opened gdrdrv"), "{}", ran.answer);
    let ran = run(this_test!(), NEWEST, &[("GDRCOPY_BACKEND", "emulated")]);
    assert!(ran.answer.starts_with("opened emulated") && ran.calls.is_empty(), "{ran:?}");
}
