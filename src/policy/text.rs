//! The file of a policy: read with the line of what is wrong, written in the same form.

use std::fmt;

use super::{CopyDirection, CopyMethod, MeasuredOn, OP, Policy, Row};
use crate::copy::{self, Routine};
use crate::error::{Error, ErrorKind, Result};

const SCHEMA: &str = "1";

const INTRODUCTION: &str = "\
# Copy policy of gdrcopy, for GDRCOPY_POLICY=FILE or SessionBuilder::policy. Rows: direction, sizes in bytes, the size that
# was measured, the routine of plain copies, the best method of all | what each candidate took, median in nanoseconds.
";

/// `1-127`, or `128-` without an end.
pub(super) struct Sizes<'a>(pub(super) &'a Row);

impl fmt::Display for Sizes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { first, last, .. } = self.0;
        if *last == usize::MAX { write!(f, "{first}-") } else { write!(f, "{first}-{last}") }
    }
}

/// `avx2=171.0 avx512=168.8`.
pub(super) struct Candidates<'a>(pub(super) &'a [(CopyMethod, f64)]);

impl fmt::Display for Candidates<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (method, ns)) in self.0.iter().enumerate() {
            let space = if n == 0 { "" } else { " " };
            write!(f, "{space}{method}={ns:.1}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(INTRODUCTION)?;
        writeln!(f, "schema = {SCHEMA}")?;
        for (name, value) in self.measured_on.facts() {
            if let Some(value) = value {
                writeln!(f, "{name} = {value}")?;
            }
        }
        for direction in CopyDirection::ALL {
            writeln!(f)?;
            for row in self.rows(direction) {
                write!(f, "{direction} {}", Sizes(row))?;
                if let Some(bytes) = row.measured {
                    write!(f, " measured={bytes}")?;
                }
                write!(f, " routine={} best={}", row.routine, row.best)?;
                if !row.candidates.is_empty() {
                    write!(f, " | {}", Candidates(&row.candidates))?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

fn wrong(place: &str, cause: impl fmt::Display, remedy: impl Into<String>) -> Error {
    Error::new(OP, ErrorKind::InvalidArgument, format!("{place}: {cause}")).remedy(remedy.into())
}

const AGAIN: &str = "correct the line, or calibrate anew";

/// Reads what `Display` writes.
pub(super) fn parse(source: &str, text: &str) -> Result<Policy> {
    let (measured_on, h2d, d2h) = rows(source, text, copy::by_name)?;
    Policy::new(source.to_owned(), measured_on, h2d, d2h)
}

/// The rows to and from the device, each with a routine that `usable` knows.
pub(super) fn rows(
    source: &str,
    text: &str,
    usable: fn(&str) -> Result<&'static Routine>,
) -> Result<(MeasuredOn, Vec<Row>, Vec<Row>)> {
    let mut measured_on = MeasuredOn::default();
    let (mut h2d, mut d2h) = (Vec::new(), Vec::new());
    let mut has_schema = false;
    for (n, line) in text.lines().enumerate() {
        let line = line.trim();
        let place = format!("{source} line {}", n + 1);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (word, rest.trim_start().strip_prefix('=').map(str::trim)) {
            ("schema", Some(SCHEMA)) => has_schema = true,
            ("schema", Some(other)) => {
                let cause = format!("schema {other} is not known, only {SCHEMA}");
                return Err(wrong(&place, cause, "use the library that wrote the file, or calibrate anew"));
            }
            _ if !has_schema => {
                let cause = format!("the first entry is not 'schema = {SCHEMA}'");
                return Err(wrong(&place, cause, "name a file that a calibration wrote"));
            }
            (name, Some(value)) => *fact(&mut measured_on, name, &place)? = Some(value.to_owned()),
            ("h2d", None) => h2d.push(row(rest, h2d.last(), usable, &place)?),
            ("d2h", None) => d2h.push(row(rest, d2h.last(), usable, &place)?),
            _ => {
                let cause = format!("'{word}' is neither a direction (h2d, d2h) nor 'NAME = VALUE'");
                return Err(wrong(&place, cause, AGAIN));
            }
        }
    }
    for (direction, rows) in [("h2d", &h2d), ("d2h", &d2h)] {
        match rows.last() {
            None => return Err(wrong(source, format!("it has no row for {direction}"), "calibrate anew")),
            Some(row) if row.last != usize::MAX => {
                let cause = format!("{direction}: sizes above {} are in no row", row.last);
                return Err(wrong(source, cause, format!("end the last row's sizes with '-': {}-", row.first)));
            }
            Some(_) => {}
        }
    }
    Ok((measured_on, h2d, d2h))
}

fn fact<'a>(facts: &'a mut MeasuredOn, name: &str, place: &str) -> Result<&'a mut Option<String>> {
    Ok(match name {
        "cpu" => &mut facts.cpu,
        "gpu" => &mut facts.gpu,
        "link" => &mut facts.link,
        "backend" => &mut facts.backend,
        "mapping" => &mut facts.mapping,
        "driver" => &mut facts.driver,
        "date" => &mut facts.date,
        _ => return Err(wrong(place, format!("there is no entry '{name}'"), AGAIN)),
    })
}

fn row(text: &str, before: Option<&Row>, usable: fn(&str) -> Result<&'static Routine>, place: &str) -> Result<Row> {
    let mut words = text.split_whitespace();
    let sizes = words.next().unwrap_or("");
    let (first, last) = self::sizes(sizes).ok_or_else(|| {
        wrong(place, format!("'{sizes}' is no range of sizes"), "write it as 1-127, the last as 128-")
    })?;
    match before.map_or(Some(1), |before| before.last.checked_add(1)) {
        Some(next) if next == first => {}
        Some(next) if next < first => {
            let cause = format!("a gap: sizes {next} to {} are in no row", first - 1);
            return Err(wrong(place, cause, format!("begin this row at {next}")));
        }
        next => {
            let cause = format!("an overlap: size {first} is in a row before");
            let remedy = next.map_or_else(
                || "remove this row, or end the one before".to_owned(),
                |n| format!("begin this row at {n}"),
            );
            return Err(wrong(place, cause, remedy));
        }
    }
    let mut row =
        Row { first, last, measured: None, routine: "", best: CopyMethod::CudaMemcpy, candidates: Vec::new() };
    let (mut best, mut is_past_the_bar) = (None, false);
    for word in words {
        if word == "|" {
            is_past_the_bar = true;
            continue;
        }
        let (name, value) =
            word.split_once('=').ok_or_else(|| wrong(place, format!("'{word}' is not NAME=VALUE"), AGAIN))?;
        let in_place = |error: Error| wrong(place, error.cause(), error.hint().unwrap_or(AGAIN));
        match name {
            _ if is_past_the_bar => {
                let ns = value.parse().ok().filter(|ns: &f64| ns.is_finite() && *ns >= 0.0);
                let ns = ns.ok_or_else(|| wrong(place, format!("'{word}': not a time in nanoseconds"), AGAIN))?;
                row.candidates.push((name.parse().map_err(in_place)?, ns));
            }
            "measured" => {
                let bytes = value.parse().ok().filter(|bytes| (first..=last).contains(bytes));
                let cause = || format!("'{word}': not a size between {first} and {last}");
                row.measured = Some(bytes.ok_or_else(|| wrong(place, cause(), AGAIN))?);
            }
            "routine" => {
                let routine = usable(value).map_err(|error| {
                    Error::new(OP, error.kind(), format!("{place}: {}", error.cause()))
                        .remedy(error.hint().unwrap_or(AGAIN).to_owned())
                })?;
                row.routine = routine.name();
            }
            "best" => best = Some(value.parse().map_err(in_place)?),
            _ => return Err(wrong(place, format!("'{name}' is none of measured, routine, best"), AGAIN)),
        }
    }
    if row.routine.is_empty() {
        return Err(wrong(place, "the row names no routine", "add routine=NAME"));
    }
    row.best = best.unwrap_or(CopyMethod::Routine(row.routine));
    match row.best {
        CopyMethod::Routine(name) if name != row.routine => {
            let cause = format!("best={name}, but routine={}", row.routine);
            Err(wrong(place, cause, "let both name one routine, or best another method"))
        }
        CopyMethod::Parallel(0 | 1) => Err(wrong(place, "a parallel copy of one thread", "name the routine instead")),
        _ => Ok(row),
    }
}

fn sizes(text: &str) -> Option<(usize, usize)> {
    let (first, last) = text.split_once('-')?;
    let first: usize = first.parse().ok()?;
    let last = if last.is_empty() { usize::MAX } else { last.parse().ok()? };
    (1 <= first && first <= last).then_some((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
        # a comment\n\
        schema = 1\n\
        cpu = Some CPU = fast\n\
        date = 2026-12-01T12:00:00Z\n\n\
        h2d 1-127 measured=64 routine=scalar best=scalar | scalar=171.0 parallel-2=168.8 cuda_memcpy_pinned=8133.0\n\
        h2d 128- routine=scalar best=parallel-8\n\
        d2h 1- routine=scalar best=cuda_memcpy_pinned\n";

    #[test]
    fn a_policy_survives_writing_and_reading() {
        let policy = parse("test", GOOD).unwrap();
        let again = parse("test", &policy.to_string()).unwrap();
        assert_eq!((&policy.h2d, &policy.d2h), (&again.h2d, &again.d2h));
        assert_eq!(policy.measured_on, again.measured_on);
        assert_eq!(policy.measured_on.cpu.as_deref(), Some("Some CPU = fast"));
        assert_eq!(policy.to_string(), again.to_string());
    }

    #[test]
    fn sizes_find_their_rows() {
        let policy = parse("test", GOOD).unwrap();
        let best = |direction, bytes| policy.explain(direction, bytes).best();
        let (h2d, d2h) = (CopyDirection::HostToDevice, CopyDirection::DeviceToHost);
        for bytes in [0, 1, 127] {
            assert_eq!(best(h2d, bytes), CopyMethod::Routine("scalar"));
        }
        assert_eq!((best(h2d, 128), best(h2d, usize::MAX)), (CopyMethod::Parallel(8), CopyMethod::Parallel(8)));
        assert_eq!(best(d2h, 1), CopyMethod::CudaMemcpy);
        assert_eq!(
            policy.explain(h2d, 5).to_string(),
            "h2d of 1-127 bytes: scalar is best, a plain copy uses scalar (at 64 bytes: scalar=171.0 parallel-2=168.8 \
             cuda_memcpy_pinned=8133.0; test)"
        );
        assert_eq!(
            policy.explain(d2h, 5).to_string(),
            "d2h of 1- bytes: cuda_memcpy_pinned is best, a plain copy uses scalar (not measured; test)"
        );
    }

    #[track_caller]
    fn refused(from: &str, to: &str, wanted: &str) {
        assert!(GOOD.contains(from), "{from}");
        let error = parse("F", &GOOD.replacen(from, to, 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(wanted), "no '{wanted}' in: {error}");
        assert!(!error.to_string().contains('\n') && error.hint().is_some(), "{error}");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_the_way_out() {
        refused("schema = 1", "schema = 2", "F line 2: schema 2 is not known, only 1");
        refused("schema = 1\n", "", "F line 2: the first entry is not 'schema = 1'");
        refused("cpu =", "size =", "F line 3: there is no entry 'size'");
        refused("h2d 1-127", "x2d 1-127", "F line 6: 'x2d' is neither a direction");
        refused("1-127", "2-127", "F line 6: a gap: sizes 1 to 1 are in no row; begin this row at 1");
        refused("128-", "129-", "F line 7: a gap: sizes 128 to 128");
        refused("128-", "127-", "F line 7: an overlap: size 127 is in a row before; begin this row at 128");
        refused("1-127", "1-", "an overlap: size 128 is in a row before; remove this row");
        refused("128-", "128-4095", "F: h2d: sizes above 4095 are in no row; end the last row's sizes with '-': 128-");
        refused("d2h 1- routine=scalar best=cuda_memcpy_pinned\n", "", "F: it has no row for d2h");
        refused("1-127", "127", "'127' is no range of sizes");
        refused("1-127", "127-1", "'127-1' is no range of sizes");
        refused("measured=64", "measured=128", "'measured=128': not a size between 1 and 127");
        refused("routine=scalar", "routine=avx1024", "F line 6: there is no routine \"avx1024\"; choose one of scalar");
        refused("routine=scalar", "best=scalar", "the row names no routine");
        refused("best=scalar", "best=avx2", "best=avx2, but routine=scalar");
        refused("best=scalar", "best=fastest", "there is no method \"fastest\"");
        refused("best=parallel-8", "best=parallel-1", "a parallel copy of one thread");
        refused("measured=64", "weight=64", "'weight' is none of measured, routine, best");
        refused("measured=64", "fast", "'fast' is not NAME=VALUE");
        refused("=171.0", "=-1", "'scalar=-1': not a time in nanoseconds");
        refused("=171.0", "=NaN", "'scalar=NaN': not a time");
        refused("scalar=171.0", "pigeon=171.0", "there is no method \"pigeon\"");
        refused(GOOD, "hello\n", "the first entry is not 'schema = 1'; name a file that a calibration wrote");
        assert!(parse("F", "").is_err());
    }

    #[test]
    fn too_many_changes_of_routine_are_refused() {
        let usable: Vec<_> = copy::routines().iter().filter(|routine| routine.is_available()).collect();
        let [a, b, ..] = usable[..] else { return };
        let rows = |direction: &str, count: usize| -> String {
            let last = |n: usize| if n == count { String::new() } else { (n * 10).to_string() };
            let name = |n: usize| if n.is_multiple_of(2) { a.name() } else { b.name() };
            let row = |n| format!("{direction} {}-{} routine={}\n", n * 10 - 9, last(n), name(n));
            (1..=count).map(row).collect()
        };
        let table = |h2d, d2h| format!("schema = 1\n{}{}", rows("h2d", h2d), rows("d2h", d2h));
        parse("F", &table(4, 4)).unwrap();
        let error = parse("F", &table(5, 4)).unwrap_err().to_string();
        assert!(error.contains("the routines of one direction change more than 3 times"), "{error}");
    }
}
