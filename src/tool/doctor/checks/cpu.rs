//! The copy routines of this CPU.

use std::env;

use super::settings::unusable;
use crate::copy::{self, Routine};
use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::Root;

const AREA: &str = "cpu";

/// What `/proc/cpuinfo` calls the instructions of each routine.
const FLAGS: [(&str, &[&str]); 4] = [
    ("sse41", &["sse4_1"]),
    ("avx2", &["avx2"]),
    ("avx512", &["avx512f", "avx512bw", "avx512vl"]),
    ("movdir64b", &["movdir64b"]),
];

/// Whether the CPU has what a routine needs: by its own word, or, where everything is made up, by `/proc/cpuinfo`.
fn has(routine: &Routine, made_up: Option<&str>) -> bool {
    let Some(flags) = made_up else { return routine.is_available() };
    let needs = FLAGS.iter().find(|(name, _)| *name == routine.name()).map_or(&[][..], |(_, needs)| needs);
    needs.iter().all(|need| flags.split_whitespace().any(|flag| flag == *need))
}

pub(super) fn check(root: &Root) -> Vec<Finding> {
    let info = root.text("/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let made_up = root.is_made_up().then_some(flags);
    let (there, missing): (Vec<&Routine>, Vec<&Routine>) =
        copy::routines().iter().copied().partition(|routine| has(routine, made_up));
    let names = |routines: &[&Routine]| routines.iter().map(|routine| routine.name()).collect::<Vec<_>>().join(", ");
    let read = if made_up.is_some() { "/proc/cpuinfo: flags" } else { "CPUID" };
    let wanted = env::var("GDRCOPY_COPY").ok().filter(|value| !value.is_empty());
    let finding = match wanted.as_deref().map(|name| (name, copy::by_name(name))) {
        Some((name, _)) if missing.iter().any(|routine| routine.name() == name) => {
            let what = format!("GDRCOPY_COPY={name} makes every session fail: this CPU does not have what it needs");
            let remedy = format!("unset GDRCOPY_COPY, or choose one of {}", names(&there));
            Finding::problem(AREA, what, remedy).read("environment variable GDRCOPY_COPY")
        }
        Some((_, Err(error))) => unusable("GDRCOPY_COPY", &error),
        Some((name, Ok(_))) => {
            Finding::ok(AREA, format!("routine {name} is used (GDRCOPY_COPY), of {}", names(&there)))
        }
        None => {
            let best =
                if made_up.is_some() { String::new() } else { format!("; {} is used", copy::preferred().name()) };
            let absent =
                if missing.is_empty() { String::new() } else { format!(" (not on this CPU: {})", names(&missing)) };
            Finding::ok(AREA, format!("copy routines {}{absent}{best}", names(&there)))
        }
    };
    vec![finding.read(read)]
}
