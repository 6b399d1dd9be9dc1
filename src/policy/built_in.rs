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

/// AVX-512 is the preferred routine of exactly those processors that the records stand for.
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
    use crate::policy::choose::{Cell, MARGIN};

    const SIZES: [usize; 11] = [0, 1, 3, 63, 64, 65, 128, 4096, 64 << 10, 1 << 20, usize::MAX];

    /// What the recorded table gives a plain copy.
    fn recorded_routine(direction: CopyDirection, bytes: usize) -> &'static str {
        match (direction, bytes) {
            (CopyDirection::HostToDevice, 64) | (CopyDirection::DeviceToHost, _) => "avx512",
            (CopyDirection::HostToDevice, _) => "avx2",
        }
    }

    /// The recorded rows, on any processor.
    fn recorded(direction: CopyDirection) -> Vec<Row> {
        let known = |name: &str| Ok(*copy::routines().iter().find(|routine| routine.name() == name).unwrap());
        let (_, h2d, d2h) = text::rows("recorded", SAPPHIRE_RAPIDS, known).unwrap();
        match direction {
            CopyDirection::HostToDevice => h2d,
            CopyDirection::DeviceToHost => d2h,
        }
    }

    fn row(rows: &[Row], bytes: usize) -> &Row {
        rows.iter().find(|row| bytes <= row.last).unwrap()
    }

    #[test]
    fn plain_copies_use_the_recorded_routines_or_else_the_preferred_one() {
        let policy = Policy::built_in();
        let preferred = copy::preferred().name();
        for direction in CopyDirection::ALL {
            for bytes in SIZES {
                let wanted = if preferred == "avx512" { recorded_routine(direction, bytes) } else { preferred };
                assert_eq!(policy.explain(direction, bytes).routine(), wanted, "{direction} {bytes}");
                let used = match direction {
                    CopyDirection::HostToDevice => policy.routines().store(bytes),
                    CopyDirection::DeviceToHost => policy.routines().load(bytes),
                };
                assert_eq!(used.name(), wanted, "{direction} {bytes}");
            }
        }
        // What `post_line`, values and messages of a whole line are stored with.
        assert!(std::ptr::eq(policy.routines().store(copy::LINE_BYTES), copy::preferred()));
    }

    #[test]
    fn another_processor_has_one_routine_at_every_size() {
        let policy = choose(copy::scalar_routine());
        for direction in CopyDirection::ALL {
            for bytes in SIZES {
                let choice = policy.explain(direction, bytes);
                assert_eq!((choice.routine(), choice.best()), ("scalar", CopyMethod::Routine("scalar")));
                assert!(choice.candidates().is_empty());
            }
        }
    }

    #[test]
    fn the_recorded_table_has_its_routine_at_every_size() {
        for direction in CopyDirection::ALL {
            let rows = recorded(direction);
            assert_eq!((rows[0].first, rows[rows.len() - 1].last), (1, usize::MAX));
            for bytes in SIZES {
                assert_eq!(row(&rows, bytes).routine, recorded_routine(direction, bytes), "{direction} {bytes}");
            }
            let changes = rows.chunk_by(|a, b| a.routine == b.routine).count() - 1;
            assert_eq!(changes, if direction == CopyDirection::HostToDevice { 2 } else { 0 });
        }
    }

    /// As a calibration would have said.
    #[test]
    fn the_recorded_best_is_the_cheapest() {
        for direction in CopyDirection::ALL {
            let rows = recorded(direction);
            for row in &rows {
                let (bytes, candidates) = (row.measured.unwrap(), row.candidates.clone());
                let cell = Cell { bytes, candidates, margin: MARGIN };
                assert_eq!(row.best, cell.best(row.routine), "{direction} {row:?}");
            }
            let best = |bytes| row(&rows, bytes).best;
            let (copied, left) = match direction {
                CopyDirection::HostToDevice => (128 << 10, 256 << 10),
                CopyDirection::DeviceToHost => (4096, 8192),
            };
            assert_eq!(best(copied), CopyMethod::Routine(recorded_routine(direction, copied)));
            assert_eq!((best(left), best(1 << 20)), (CopyMethod::CudaMemcpy, CopyMethod::CudaMemcpy));
        }
    }

    /// Every figure is the records', and none of theirs is left out.
    #[cfg(feature = "tools")]
    #[test]
    fn the_recorded_table_is_what_the_records_say() {
        use serde_json::Value;

        let limits = include_str!("../../benches/record/2026-12-01-h200/limits-first.json");
        let copylat = include_str!("../../benches/record/2026-12-01-h200/copylat-compare.json");
        let [limits, copylat] = [limits, copylat].map(|text| serde_json::from_str::<Value>(text).unwrap());
        let figure = |record: &Value, wanted: &[(&str, Value)]| {
            let fits = |row: &&Value| wanted.iter().all(|(key, value)| row[key] == *value);
            record["results"].as_array().unwrap().iter().find(fits).map(|row| row["p50_ns"].as_f64().unwrap())
        };
        for direction in CopyDirection::ALL {
            for row in recorded(direction) {
                let bytes = row.measured.unwrap();
                let of = |key, value: &str, method: &str| {
                    [
                        (key, Value::from(value)),
                        ("direction", Value::from(direction.name())),
                        ("method", Value::from(method)),
                        ("bytes", Value::from(bytes)),
                    ]
                };
                let routines = copy::routines().iter().map(|routine| {
                    // The inlined store.
                    let is_inlined = (direction, bytes, routine.name()) == (CopyDirection::HostToDevice, 64, "avx512");
                    let method = if is_inlined { "write" } else { routine.name() };
                    (CopyMethod::Routine(routine.name()), figure(&limits, &of("part", "chosen", method)))
                });
                let cuda = figure(&copylat, &of("metric", "sustained", "cuda_memcpy_pinned"));
                let wanted = routines.chain([(CopyMethod::CudaMemcpy, cuda)]);
                let rounded = |ns: f64| format!("{ns:.1}");
                let wanted: Vec<_> = wanted.filter_map(|(method, ns)| Some((method, rounded(ns?)))).collect();
                let found: Vec<_> = row.candidates.iter().map(|(method, ns)| (*method, rounded(*ns))).collect();
                assert_eq!(found, wanted, "{direction} {row:?}");
            }
        }
    }
}
