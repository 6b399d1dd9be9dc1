//! Messages on standard error, if the environment asks for them. Without `GDRCOPY_ENABLE_LOGGING` nothing is printed.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The least level to be printed: a name, or a number from 0 (all) to 4 (errors).
fn level(text: Option<&str>) -> Level {
    match text.map(str::trim) {
        Some("0" | "trace") => Level::TRACE,
        Some("1" | "debug") => Level::DEBUG,
        Some("2" | "info") => Level::INFO,
        Some("3" | "warn") => Level::WARN,
        _ => Level::ERROR,
    }
}

struct Printer {
    level: Level,
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

impl Subscriber for Printer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let level = event.metadata().level();
        // Whoever closed standard error does not want messages.
        let _ = writeln!(std::io::stderr(), "gdrcopy: {level}: {}{}", line.message, line.fields);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Sets up messages as the environment says, once per process.
pub(crate) fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let enabled = std::env::var_os("GDRCOPY_ENABLE_LOGGING").is_some_and(|value| !value.is_empty() && value != "0");
        if enabled {
            let asked = std::env::var("GDRCOPY_LOG_LEVEL").ok();
            // Nobody else sets one: this library has a copy of `tracing` of its own.
            let _ = tracing::subscriber::set_global_default(Printer { level: level(asked.as_deref()) });
        } else {
            // Rust's own message about a panic; the panic itself is caught and returned as an error.
            std::panic::set_hook(Box::new(|_| {}));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_by_name_and_number() {
        let expected = [
            (None, Level::ERROR),
            (Some(""), Level::ERROR),
            (Some("4"), Level::ERROR),
            (Some("warn"), Level::WARN),
            (Some(" 2 "), Level::INFO),
            (Some("debug"), Level::DEBUG),
            (Some("0"), Level::TRACE),
        ];
        for (text, expected) in expected {
            assert_eq!(level(text), expected, "{text:?}");
        }
    }
}
