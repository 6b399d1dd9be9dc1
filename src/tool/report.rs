//! Results, schema 1: the one structure behind JSON, CSV and the tables.
//!
//! Sets are open: a reader ignores fields and values that it does not know.

use serde::Serialize;

use super::host::Host;
use super::measure::Measured;
use super::stats::nanoseconds;

/// Version of the layout below.
pub const SCHEMA: u32 = 1;

/// Everything a run found out.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Program.
    pub tool: &'static str,
    /// Version of this package.
    pub version: &'static str,
    /// Backend that mapped the memory.
    pub backend: String,
    /// What the figures were measured on.
    pub host: Host,
    /// What was mapped, and how it is copied.
    pub mapping: MappingReport,
    /// Cost of an empty timed region, already subtracted from every figure.
    pub timer_overhead_ns: f64,
    /// One entry per figure set.
    pub results: Vec<Entry>,
}

/// The mapping under test.
#[derive(Debug, Clone, Serialize)]
pub struct MappingReport {
    /// Memory type of the window: `WC`, ..
    #[serde(rename = "type")]
    pub memory_type: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Copy routine.
    pub routine: String,
}

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Direction {
    /// Host to device.
    #[serde(rename = "h2d")]
    HostToDevice,
    /// Device to host.
    #[serde(rename = "d2h")]
    DeviceToHost,
}

impl Direction {
    /// As in the report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "h2d",
            Self::DeviceToHost => "d2h",
        }
    }

    /// As in a sentence.
    #[must_use]
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::HostToDevice => "Host to device",
            Self::DeviceToHost => "Device to host",
        }
    }
}

/// What a figure means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Calls back to back: percentiles of bucket means, and time over calls in `mean_ns`.
    Sustained,
    /// One call at a time, from an idle core.
    Single,
}

impl Metric {
    /// As in the report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sustained => "sustained",
            Self::Single => "single",
        }
    }
}

/// One set of figures.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    /// Direction.
    pub direction: Direction,
    /// Mechanism: `bar1`, `cuda_memcpy_pinned`, ..
    pub method: &'static str,
    /// Meaning.
    pub metric: Metric,
    /// Size of one copy.
    pub bytes: u64,
    /// Offset of the copy from the start of the device buffer, which is page aligned.
    pub offset: u64,
    /// Shortest.
    pub min_ns: f64,
    /// Median.
    pub p50_ns: f64,
    /// 99th percentile; the maximum where there are fewer than 100 samples.
    pub p99_ns: f64,
    /// 99.9th percentile; the maximum where there are fewer than 1000 samples.
    pub p999_ns: f64,
    /// Longest.
    pub max_ns: f64,
    /// Time over calls; for sustained figures only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_ns: Option<f64>,
    /// Calls timed.
    pub iterations: u64,
    /// After the timed copies the bytes on the far side were compared, and those next to them.
    pub verified: bool,
}

/// Where a set of figures belongs.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Direction.
    pub direction: Direction,
    /// Mechanism.
    pub method: &'static str,
    /// Size of one copy.
    pub bytes: u64,
    /// Offset of the copy from the start of the device buffer.
    pub offset: u64,
}

impl Entry {
    /// From the outcome of a timed loop.
    #[must_use]
    pub fn new(place: Place, metric: Metric, measured: &Measured, verified: bool) -> Self {
        let figures = measured.samples.distribution();
        Self {
            direction: place.direction,
            method: place.method,
            metric,
            bytes: place.bytes,
            offset: place.offset,
            min_ns: figures.min,
            p50_ns: figures.p50,
            p99_ns: figures.p99,
            p999_ns: figures.p999,
            max_ns: figures.max,
            mean_ns: (metric == Metric::Sustained).then(|| nanoseconds(measured.mean_ps)),
            iterations: measured.calls,
            verified,
        }
    }

    /// The one figure that stands for this set: time over calls where there is one, else the median.
    #[must_use]
    pub fn typical_ns(&self) -> f64 {
        self.mean_ns.unwrap_or(self.p50_ns)
    }
}

impl Report {
    /// As one JSON object, indented, with a newline at the end.
    ///
    /// # Panics
    ///
    /// Never: the structure has no map with keys other than strings and no failing serialiser.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain structures serialise") + "\n"
    }

    /// As CSV with a header line. Host facts are repeated in every row: rows of several machines can be put in one file.
    #[must_use]
    pub fn to_csv(&self) -> String {
        let facts = self.host.facts();
        let mut titles = vec![
            "direction",
            "method",
            "metric",
            "bytes",
            "offset",
            "min_ns",
            "p50_ns",
            "p99_ns",
            "p999_ns",
            "max_ns",
            "mean_ns",
            "iterations",
            "verified",
            "tool",
            "version",
            "backend",
            "mapping_type",
            "mapping_bytes",
            "routine",
            "timer_overhead_ns",
        ];
        titles.extend(facts.iter().map(|(name, _)| name.as_str()));
        let mut text = titles.join(",") + "\n";
        for entry in &self.results {
            let mut row: Vec<String> = vec![
                entry.direction.name().to_owned(),
                entry.method.to_owned(),
                entry.metric.name().to_owned(),
                entry.bytes.to_string(),
                entry.offset.to_string(),
                entry.min_ns.to_string(),
                entry.p50_ns.to_string(),
                entry.p99_ns.to_string(),
                entry.p999_ns.to_string(),
                entry.max_ns.to_string(),
                entry.mean_ns.map_or_else(String::new, |ns| ns.to_string()),
                entry.iterations.to_string(),
                entry.verified.to_string(),
                self.tool.to_owned(),
                self.version.to_owned(),
                self.backend.clone(),
                self.mapping.memory_type.clone(),
                self.mapping.bytes.to_string(),
                self.mapping.routine.clone(),
                self.timer_overhead_ns.to_string(),
            ];
            row.extend(facts.iter().map(|(_, value)| value.clone()));
            text += &row.iter().map(|field| quoted(field)).collect::<Vec<_>>().join(",");
            text.push('\n');
        }
        text
    }
}

/// A CSV field after RFC 4180.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tool::stats::Samples;

    pub(crate) fn entry(direction: Direction, method: &'static str, metric: Metric, bytes: u64, ns: u64) -> Entry {
        let mut samples = Samples::new();
        samples.record(ns * 1000);
        let measured = Measured { samples, calls: 100, mean_ps: ns * 1000 };
        Entry::new(Place { direction, method, bytes, offset: 0 }, metric, &measured, true)
    }

    pub(crate) fn report() -> Report {
        Report {
            schema: SCHEMA,
            tool: "gdrcopy_copylat",
            version: "0.0.0",
            backend: "emulated".to_owned(),
            host: Host { cpu_model: Some("Some, \"CPU\"".to_owned()), ..Host::default() },
            mapping: MappingReport { memory_type: "WB".to_owned(), bytes: 1 << 20, routine: "avx2".to_owned() },
            timer_overhead_ns: 17.1,
            results: vec![
                entry(Direction::HostToDevice, "bar1", Metric::Sustained, 64, 175),
                entry(Direction::DeviceToHost, "bar1", Metric::Single, 64, 1050),
            ],
        }
    }

    #[test]
    fn json_has_the_shape_of_schema_1() {
        let json: serde_json::Value = serde_json::from_str(&report().to_json()).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(json["mapping"], serde_json::json!({"type": "WB", "bytes": 1 << 20, "routine": "avx2"}));
        assert_eq!(json["timer_overhead_ns"], 17.1);
        let first = serde_json::json!({
            "direction": "h2d", "method": "bar1", "metric": "sustained", "bytes": 64, "offset": 0, "min_ns": 175.0,
            "p50_ns": 175.0, "p99_ns": 175.0, "p999_ns": 175.0, "max_ns": 175.0, "mean_ns": 175.0, "iterations": 100,
            "verified": true,
        });
        assert_eq!(json["results"][0], first);
        assert_eq!(json["results"][1]["direction"], "d2h");
        assert_eq!(json["results"][1].get("mean_ns"), None, "single shots are not averaged");
    }

    #[test]
    fn csv_rows_are_as_long_as_the_header() {
        let csv = report().to_csv();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("direction,method,metric,bytes,offset,min_ns,"));
        assert!(lines[1].starts_with("h2d,bar1,sustained,64,0,175,175,175,175,175,175,100,true,gdrcopy_copylat,"));
        assert!(lines[2].starts_with("d2h,bar1,single,64,0,1050,1050,1050,1050,1050,,100,true,"));
        assert!(lines[1].contains("\"Some, \"\"CPU\"\"\""));
        // The one quoted field has one comma in it.
        let commas = |line: &str| line.matches(',').count();
        assert_eq!(commas(lines[0]) + 1, commas(lines[1]));
        assert_eq!(commas(lines[1]), commas(lines[2]));
    }
}
