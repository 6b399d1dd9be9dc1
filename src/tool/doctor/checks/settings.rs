//! What the environment asks of the library.

use std::env;

use crate::backend::{BackendKind, RmLevel};
use crate::error::Error;
use crate::tool::doctor::finding::Finding;

const AREA: &str = "settings";

/// Our variables alone are looked at, and of these only what the library reads.
pub(super) fn check() -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut set = Vec::new();
    for name in ["GDRCOPY_BACKEND", "GDRCOPY_RM", "GDRCOPY_COPY"] {
        let Some(value) = env::var(name).ok().filter(|value| !value.is_empty()) else { continue };
        // GDRCOPY_COPY is for the CPU's check.
        let error = match name {
            "GDRCOPY_BACKEND" => value.parse::<BackendKind>().err(),
            "GDRCOPY_RM" => value.parse::<RmLevel>().err(),
            _ => None,
        };
        findings.extend(error.map(|error| unusable(name, &error)));
        if name == "GDRCOPY_BACKEND" && value == BackendKind::Emulated.name() {
            let what = "GDRCOPY_BACKEND=emulated: programs use host memory in place of a GPU";
            findings.push(Finding::warning(AREA, what, "unset GDRCOPY_BACKEND").read(format!("{name}={value}")));
        }
        set.push(format!("{name}={value}"));
    }
    if findings.is_empty() {
        let what =
            if set.is_empty() { "the environment sets nothing".to_owned() } else { format!("set: {}", set.join(", ")) };
        findings.push(Finding::ok(AREA, what));
    }
    findings
}

/// A value with which no session opens.
pub(super) fn unusable(name: &'static str, error: &Error) -> Finding {
    let what = format!("{name} makes every session fail: {}", error.cause());
    let remedy = format!("unset {name}, or {}", error.hint().unwrap_or("correct it"));
    Finding::problem(AREA, what, remedy).read(format!("environment variable {name}"))
}
