//! Results, schema 1: the one structure behind JSON, CSV and the tables.
//!
//! Sets are open: a reader ignores fields and values that it does not know.

use serde::Serialize;

use super::clock::Clock;
use super::fail::Failure;
use super::flags::size_in_words;
use super::host::Host;
use super::measure::Measured;
use super::stats::{Samples, nanoseconds};
use crate::backend::BackendKind;
use crate::mapping::Mapping;
pub use crate::policy::CopyDirection as Direction;
use crate::sys::num::u64_of;

/// Version of the layout below.
pub const SCHEMA: u32 = 1;

/// Everything a run found out; `R` is what one entry says.
#[derive(Debug, Clone, Serialize)]
pub struct Report<R = Entry> {
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
    /// The run was interrupted: some results are missing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The timed loop around nothing at all, on the same thread: what is above this in a tail is the copy's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hiccups: Option<Figures>,
    /// One entry per figure set.
    pub results: Vec<R>,
}

/// What an entry says besides its figures.
pub trait Record: Serialize {
    /// Titles of the CSV columns, without those of the figures.
    const COLUMNS: &'static [&'static str];

    /// As many fields as there are columns.
    fn fields(&self) -> Vec<String>;

    /// The times.
    fn figures(&self) -> &Figures;
}

/// The mapping under test.
#[derive(Debug, Clone, Serialize)]
pub struct MappingReport {
    /// Memory type of the window: `WC`, ..
    #[serde(rename = "type")]
    pub memory_type: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Copy routine of whole lines.
    pub routine: String,
}

/// What a figure means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Calls back to back: percentiles of bucket means, and time over calls in `mean_ns`.
    Sustained,
    /// One write at a time, from an idle core, until the caller may go on: the stores are issued, nothing has to have
    /// left the core.
    Issue,
    /// One write at a time, until MFENCE finds the core's write-combining buffers empty.
    Drained,
    /// One call at a time, from an idle core, until it has returned.
    Single,
    /// One write, until a kernel that polls has seen the flag behind it: the time to its answer, less half of a bare
    /// flag's round trip for the answer's way.
    GpuVisible,
    /// A round trip to a kernel.
    Rtt,
    /// A call that does not copy.
    Call,
}

impl Metric {
    /// As in the report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sustained => "sustained",
            Self::Issue => "issue",
            Self::Drained => "drained",
            Self::Single => "single",
            Self::GpuVisible => "gpu_visible",
            Self::Rtt => "rtt",
            Self::Call => "call",
        }
    }

    /// As above a column of a table, in at most nine characters.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::GpuVisible => "visible",
            _ => self.name(),
        }
    }
}

/// The times of one set, whatever was timed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// Shortest (p0).
    pub min_ns: f64,
    /// Median.
    pub p50_ns: f64,
    /// 99th percentile; the maximum where there are fewer than 100 samples.
    pub p99_ns: f64,
    /// 99.9th percentile; the maximum where there are fewer than 1000 samples.
    pub p999_ns: f64,
    /// Longest.
    pub max_ns: f64,
    /// Time over calls, where that is what is reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_ns: Option<f64>,
    /// Calls timed.
    pub iterations: u64,
}

impl Figures {
    const COLUMNS: [&'static str; 7] = ["min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns", "mean_ns", "iterations"];

    /// From single samples, of which no mean is reported.
    #[must_use]
    pub fn new(samples: &Samples) -> Self {
        let figures = samples.distribution();
        Self {
            min_ns: figures.min,
            p50_ns: figures.p50,
            p99_ns: figures.p99,
            p999_ns: figures.p999,
            max_ns: figures.max,
            mean_ns: None,
            iterations: samples.len(),
        }
    }

    /// With the mean of a loop.
    #[must_use]
    pub fn with_mean(measured: &Measured) -> Self {
        let mean_ns = Some(nanoseconds(measured.mean_ps));
        Self { mean_ns, iterations: measured.calls, ..Self::new(&measured.samples) }
    }

    /// Each less so many nanoseconds, but no less than none.
    pub(crate) fn deduct(&mut self, ns: f64) {
        for figure in [&mut self.min_ns, &mut self.p50_ns, &mut self.p99_ns, &mut self.p999_ns, &mut self.max_ns] {
            // Tenths, as all of them are.
            *figure = ((*figure - ns).max(0.0) * 10.0).round() / 10.0;
        }
    }

    /// The one figure that stands for all: time over calls where there is one, else the median.
    #[must_use]
    pub fn typical_ns(&self) -> f64 {
        self.mean_ns.unwrap_or(self.p50_ns)
    }

    fn fields(&self) -> [String; 7] {
        let ns = [self.min_ns, self.p50_ns, self.p99_ns, self.p999_ns, self.max_ns].map(|ns| ns.to_string());
        let [min, p50, p99, p999, max] = ns;
        let mean = self.mean_ns.map_or_else(String::new, |ns| ns.to_string());
        [min, p50, p99, p999, max, mean, self.iterations.to_string()]
    }
}

/// One set of figures of a copy.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    /// Direction.
    pub direction: Direction,
    /// Mechanism: `bar1`, `bar1_posted`, `cuda_memcpy_pinned`, ..
    pub method: &'static str,
    /// Meaning.
    pub metric: Metric,
    /// Size of one copy.
    pub bytes: u64,
    /// Offset of the copy from the start of the device buffer, which is page aligned.
    pub offset: u64,
    /// The times.
    #[serde(flatten)]
    pub figures: Figures,
    /// After the timed copies the bytes on the far side were compared, and those next to them.
    pub verified: bool,
    /// Threads that share a copy; of method `parallel` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
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
    /// Threads that share it, where that is the method.
    pub threads: Option<usize>,
}

impl Entry {
    /// From the outcome of a timed loop.
    #[must_use]
    pub fn new(place: Place, metric: Metric, measured: &Measured, verified: bool) -> Self {
        let figures = match metric {
            Metric::Sustained => Figures::with_mean(measured),
            _ => Figures::new(&measured.samples),
        };
        let Place { direction, method, bytes, offset, threads } = place;
        Self { direction, method, metric, bytes, offset, figures, verified, threads }
    }

    /// The method as a table has it: `parallel-4` for four threads.
    #[must_use]
    pub fn label(&self) -> String {
        match self.threads {
            Some(threads) => format!("{}-{threads}", self.method),
            None => self.method.to_owned(),
        }
    }
}

impl Record for Entry {
    const COLUMNS: &'static [&'static str] =
        &["direction", "method", "threads", "metric", "bytes", "offset", "verified"];

    fn fields(&self) -> Vec<String> {
        vec![
            self.direction.name().to_owned(),
            self.method.to_owned(),
            self.threads.map_or_else(String::new, |threads| threads.to_string()),
            self.metric.name().to_owned(),
            self.bytes.to_string(),
            self.offset.to_string(),
            self.verified.to_string(),
        ]
    }

    fn figures(&self) -> &Figures {
        &self.figures
    }
}

impl<R: Record> Report<R> {
    /// A report without results.
    #[must_use]
    pub fn new(tool: &'static str, host: Host, mapping: &Mapping<'_>, backend: BackendKind, clock: &Clock) -> Self {
        Self {
            schema: SCHEMA,
            tool,
            version: env!("CARGO_PKG_VERSION"),
            backend: backend.to_string(),
            host,
            mapping: MappingReport {
                memory_type: mapping.mapping_type().to_string(),
                bytes: u64_of(mapping.len()),
                routine: mapping.routine().name().to_owned(),
            },
            timer_overhead_ns: nanoseconds(clock.overhead_ps()),
            partial: false,
            hiccups: None,
            results: Vec::new(),
        }
    }

    /// Takes note of how measuring ended: what was found until Ctrl-C is a report, too.
    ///
    /// # Errors
    ///
    /// Every other failure.
    pub fn settle(&mut self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        self.partial = matches!(outcome, Err(Failure::Interrupted));
        if self.partial { Ok(()) } else { outcome }
    }

    /// The facts above the tables.
    #[must_use]
    pub fn header(&self) -> Vec<String> {
        fn join(facts: &[Option<String>]) -> String {
            facts.iter().flatten().cloned().collect::<Vec<_>>().join(", ")
        }
        let host = &self.host;
        let link = host.link_generation.zip(host.link_width).map(|(generation, width)| {
            let link = format!("PCIe gen {generation} x{width}");
            match (host.link_max_generation, host.link_max_width) {
                (Some(g), Some(w)) if (g, w) != (generation, width) => format!("{link} (of gen {g} x{w})"),
                _ => link,
            }
        });
        let gpu = [
            host.gpu_ordinal.zip(host.gpu.as_ref()).map(|(ordinal, name)| format!("{ordinal}: {name}")),
            host.pci.clone(),
            link,
            host.driver.as_ref().map(|version| format!("driver {version}")),
        ];
        let cpu = [
            host.cpu.zip(host.cpu_model.as_ref()).map(|(cpu, model)| format!("{cpu}: {model}")),
            host.virtual_machine.then(|| "virtual machine".to_owned()),
            host.cpu_governor.as_ref().map(|governor| format!("governor {governor}")),
            host.kernel.as_ref().map(|release| format!("kernel {release}")),
        ];
        let mapping = [
            Some(format!("backend {}", self.backend)),
            host.rm_level.as_ref().map(|level| format!("level {level}")),
            Some(self.mapping.memory_type.clone()),
            host.allocator.as_ref().map(|how| format!("{} of {how}", size_in_words(self.mapping.bytes))),
            Some(format!("routine {}", self.mapping.routine)),
        ];
        let clock = host.clock.as_deref().unwrap_or_default();
        vec![
            format!("{} {}", self.tool, self.version),
            format!("GPU       {}", join(&gpu)),
            format!("CPU       {}", join(&cpu)),
            format!("Mapping   {}", join(&mapping)),
            format!("Clock     {clock}; {} ns for reading it are subtracted", self.timer_overhead_ns),
        ]
    }

    /// As one JSON object, indented, with a newline at the end.
    ///
    /// # Panics
    ///
    /// Never: the structure has no map with keys other than strings and no failing serialiser.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain structures serialise") + "\n"
    }

    /// As CSV with a header line. What the whole run has in common is repeated in every row: rows of several machines
    /// can be put in one file.
    #[must_use]
    pub fn to_csv(&self) -> String {
        let facts = self.host.facts();
        let run = [
            ("tool", self.tool.to_owned()),
            ("version", self.version.to_owned()),
            ("backend", self.backend.clone()),
            ("mapping_type", self.mapping.memory_type.clone()),
            ("mapping_bytes", self.mapping.bytes.to_string()),
            ("routine", self.mapping.routine.clone()),
            ("timer_overhead_ns", self.timer_overhead_ns.to_string()),
            ("hiccups_p999_ns", self.hiccups.map_or_else(String::new, |figures| figures.p999_ns.to_string())),
            ("hiccups_max_ns", self.hiccups.map_or_else(String::new, |figures| figures.max_ns.to_string())),
            ("partial", self.partial.to_string()),
        ];
        let titles = R::COLUMNS.iter().copied().chain(Figures::COLUMNS).chain(run.iter().map(|(title, _)| *title));
        let titles: Vec<&str> = titles.chain(facts.iter().map(|(name, _)| name.as_str())).collect();
        let mut text = titles.join(",") + "\n";
        for entry in &self.results {
            let row = entry.fields().into_iter().chain(entry.figures().fields());
            let row = row.chain(run.iter().map(|(_, value)| value.clone()));
            let row = row.chain(facts.iter().map(|(_, value)| value.clone()));
            text += &row.map(|field| quoted(&field)).collect::<Vec<_>>().join(",");
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
        Entry::new(Place { direction, method, bytes, offset: 0, threads: None }, metric, &measured, true)
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
            partial: false,
            hiccups: None,
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
        assert!(lines[0].starts_with("direction,method,threads,metric,bytes,offset,verified,min_ns,"));
        assert!(lines[1].starts_with("h2d,bar1,,sustained,64,0,true,175,175,175,175,175,175,100,gdrcopy_copylat,"));
        assert!(lines[2].starts_with("d2h,bar1,,single,64,0,true,1050,1050,1050,1050,1050,,1,gdrcopy_copylat,"));
        assert!(lines[1].contains("\"Some, \"\"CPU\"\"\""));
        // The one quoted field has one comma in it.
        let commas = |line: &str| line.matches(',').count();
        assert_eq!(commas(lines[0]) + 1, commas(lines[1]));
        assert_eq!(commas(lines[1]), commas(lines[2]));
    }
}
