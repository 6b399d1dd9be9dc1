//! The table that is in force without another.

use std::sync::OnceLock;

use super::{CopyMethod, MeasuredOn, Policy, Routines, Row, text};
use crate::copy::{self, Routine};

/// What it calls itself.
pub(super) const SOURCE: &str = "built-in table";

const SAPPHIRE_RAPIDS: &str = include_str!("sapphire-rapids.policy");

pub(super) fn table() -> &'static Policy {
    static TABLE: OnceLock<Policy> = OnceLock::new();
    TABLE.get_or_init(|| choose(copy::preferred()))
}

/// AVX-512 is the preferred routine of exactly those processors that the record stands for.
fn choose(preferred: &'static Routine) -> Policy {
    let recorded = (preferred.name() == "avx512").then(|| text::parse(SOURCE, SAPPHIRE_RAPIDS));
    match recorded {
        Some(Ok(policy)) => policy,
        _ => unmeasured(preferred),
    }
}

/// One routine for everything.
fn unmeasured(routine: &'static Routine) -> Policy {
    let row = Row {
        first: 1,
        last: usize::MAX,
        measured: None,
        routine: routine.name(),
        best: CopyMethod::Routine(routine.name()),
        candidates: Vec::new(),
    };
    Policy {
        source: SOURCE.to_owned(),
        measured_on: MeasuredOn::default(),
        h2d: vec![row.clone()],
        d2h: vec![row],
        routines: Routines::only(routine),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::CopyDirection;

    #[test]
    fn plain_copies_use_the_preferred_routine_at_every_size() {
        let policy = Policy::built_in();
        for direction in CopyDirection::ALL {
            for bytes in [0, 1, 64, 4096, 1 << 20, usize::MAX] {
                assert_eq!(policy.explain(direction, bytes).routine(), copy::preferred().name());
            }
        }
        for len in [0, 64, 1 << 20] {
            assert!(std::ptr::eq(policy.routines().store(len), copy::preferred()));
            assert!(std::ptr::eq(policy.routines().load(len), copy::preferred()));
        }
    }

    /// On any processor: the text alone, with a routine that each has.
    #[test]
    fn the_recorded_table_is_a_policy() {
        let text = SAPPHIRE_RAPIDS.replace("routine=avx512", "routine=scalar").replace("best=avx512", "best=scalar");
        let policy = text::parse("recorded", &text).unwrap();
        let best = |direction, bytes| policy.explain(direction, bytes).best();
        assert_eq!(best(CopyDirection::HostToDevice, 64 << 10), CopyMethod::Routine("scalar"));
        assert_eq!(best(CopyDirection::HostToDevice, 1 << 20), CopyMethod::CudaMemcpy);
        assert_eq!(best(CopyDirection::DeviceToHost, 1024), CopyMethod::Routine("scalar"));
        assert_eq!(best(CopyDirection::DeviceToHost, 64 << 10), CopyMethod::CudaMemcpy);
    }

    /// Every figure is the record's.
    #[cfg(feature = "tools")]
    #[test]
    fn the_recorded_table_is_what_the_record_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/record/2026-12-01-h200/copylat-compare.json");
        let record: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let recorded = |direction: &str, method: &str, bytes: usize| {
            let metric = if direction == "h2d" { "sustained" } else { "single" };
            let fits = |row: &&serde_json::Value| {
                row["direction"] == direction
                    && row["method"] == method
                    && row["bytes"] == bytes
                    && row["metric"] == metric
            };
            record["results"].as_array().unwrap().iter().find(fits).unwrap()["p50_ns"].as_f64().unwrap()
        };
        let text = SAPPHIRE_RAPIDS.replace("routine=avx512", "routine=scalar").replace("best=avx512", "best=scalar");
        let policy = text::parse("recorded", &text).unwrap();
        for direction in CopyDirection::ALL {
            for row in policy.rows(direction) {
                assert_eq!(row.candidates.len(), 2);
                for (method, ns) in &row.candidates {
                    let name = if *method == CopyMethod::CudaMemcpy { "cuda_memcpy_pinned" } else { "bar1" };
                    assert_eq!(*ns, recorded(direction.name(), name, row.measured.unwrap()), "{direction} {row:?}");
                }
            }
        }
    }
}
