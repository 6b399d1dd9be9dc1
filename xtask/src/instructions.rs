//! Instructions per call of the copy path, counted by callgrind and held against a committed table.
//!
//! The program is `benches/instructions.rs`, the table `benches/instructions.txt`. Counting does not need a quiet machine,
//! and one instruction more on the hot path shows.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::c_programs::obtain;
use crate::ci::Verdict;
use crate::run::{Log, capture, cargo, command, query, run};
use crate::workspace::{LIBRARY, Workspace};

type Outcome = Result<Verdict, String>;

/// Instructions of one call, by routine and verb.
type Counts = BTreeMap<(String, String), u64>;

/// Routines that valgrind can run; 3.19, of Debian 12, knows neither AVX-512 nor MOVDIR64B. What is inlined for `avx2` is
/// so for `sse41` too.
const ROUTINES: [&str; 3] = ["avx2", "sse41", "scalar"];

/// How often the program calls each verb.
const CALLS: u64 = 1000;

/// What the functions of the program are called, with the verb behind it.
const PREFIX: &str = "verb_";

/// How far a count may be off where the table was made with another compiler, which allocates registers its own way. The
/// same compiler counts the same.
const ALLOWANCE: u64 = 2;

/// How many instructions an inlined verb may have beyond the bare stores, checks, fence and result included.
const MAX_OVER_BARE: u64 = 15;

/// The inlined verbs, each with the bare stores of its size.
const INLINED: [(&str, &str); 13] = [
    ("write_8", "bare_store_8"),
    ("write_posted_8", "bare_store_8"),
    ("write_64", "bare_store_64"),
    ("write_posted_64", "bare_store_64"),
    ("write_value_8", "bare_store_8"),
    ("write_value_posted_8", "bare_store_8"),
    ("store_u64", "bare_store_8"),
    ("store_u64_posted", "bare_store_8"),
    ("write_value_posted_24", "bare_store_24"),
    ("write_value_posted_48", "bare_store_48"),
    ("write_value_64", "bare_store_64"),
    ("write_value_posted_64", "bare_store_64"),
    ("post_line", "bare_store_64"),
];

const BLESS: &str = "cargo xtask instructions --bless";

/// The step of `cargo xtask ci`.
pub(crate) fn check(log: &mut Log, workspace: &Workspace) -> Outcome {
    let Some(counts) = count(log, workspace)? else {
        return Ok(Verdict::Skipped("valgrind is not installed (Debian: valgrind)".to_owned()));
    };
    let table = table_path(workspace);
    let text =
        fs::read_to_string(&table).map_err(|error| format!("{}: {error}; `{BLESS}` makes it", table.display()))?;
    let (limits, compiler) = parse_table(&text)?;
    for line in shown(&counts) {
        log.say(&line);
    }
    let mut wrong = over_bare(&counts);
    let now = this_compiler();
    let findings = compare(&counts, &limits, if now == compiler { 0 } else { ALLOWANCE });
    wrong.extend(findings.worse);
    for better in &findings.better {
        log.keep(format!("    {better}: `{BLESS}` takes it into the table"));
    }
    if wrong.is_empty() {
        log.keep(format!(
            "    {} counts as in the table; inlined verbs at most {MAX_OVER_BARE} over bare",
            counts.len()
        ));
        return Ok(Verdict::Passed);
    }
    wrong.iter().for_each(|line| log.keep(format!("    {line}")));
    let hint = if now == compiler { String::new() } else { format!("; the table is of {compiler}, this is {now}") };
    Err(format!("{} counts are off; if that is meant, `{BLESS}` rewrites the table{hint}", wrong.len()))
}

/// `cargo xtask instructions [--bless]`.
pub(crate) fn by_hand(log: &mut Log, workspace: &Workspace, bless: bool) -> Result<(), String> {
    if !bless {
        return match check(log, workspace)? {
            Verdict::Passed => Ok(()),
            Verdict::Skipped(why) => Err(why),
        };
    }
    let counts = count(log, workspace)?.ok_or("valgrind is not installed (Debian: valgrind)")?;
    let wrong = over_bare(&counts);
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    let table = table_path(workspace);
    fs::write(&table, written(&counts, &this_compiler())).map_err(|error| format!("{}: {error}", table.display()))?;
    log.say(&format!("wrote {} counts to {}", counts.len(), table.display()));
    Ok(())
}

fn table_path(workspace: &Workspace) -> PathBuf {
    workspace.root.join("benches/instructions.txt")
}

fn this_compiler() -> String {
    query("rustc", ["--version"]).map_or_else(|| "an unknown compiler".to_owned(), |text| text.trim().to_owned())
}

/// `None` without valgrind.
fn count(log: &mut Log, workspace: &Workspace) -> Result<Option<Counts>, String> {
    if !obtain(log, "valgrind", "valgrind") {
        return Ok(None);
    }
    let program = build(log)?;
    let mut counts = Counts::new();
    for routine in ROUTINES {
        let out = workspace.target.join(format!("instructions-{routine}.callgrind"));
        let mut job =
            command("valgrind", ["--tool=callgrind", "--quiet", "--compress-strings=no", "--compress-pos=no"]);
        job.arg(format!("--callgrind-out-file={}", out.display())).arg(&program);
        job.env("GDRCOPY_COPY", routine);
        run(log, job)?;
        let text = fs::read_to_string(&out).map_err(|error| format!("{}: {error}", out.display()))?;
        let verbs = totals(&text).map_err(|why| format!("{}: {why}", out.display()))?;
        counts.extend(verbs.into_iter().map(|(verb, total)| ((routine.to_owned(), verb), total / CALLS)));
    }
    Ok(Some(counts))
}

/// Compiles the benches and returns the one that is counted. With the features of the programs, whose release build has the
/// library by then.
fn build(log: &mut Log) -> Result<PathBuf, String> {
    let args = ["bench", "--locked", "-p", LIBRARY, "--features", "tools", "--bench", "instructions", "--no-run"];
    let messages = capture(log, cargo(args.into_iter().chain(["--message-format=json-render-diagnostics"])))?;
    executable(&messages).ok_or_else(|| "cargo names no executable for the bench `instructions`".to_owned())
}

fn executable(messages: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut ours = messages.filter(|message| message["target"]["name"] == "instructions");
    ours.find_map(|message| message["executable"].as_str().map(|path| Path::new(path).to_owned()))
}

/// Instructions of each verb, with all that it calls, from callgrind's output without compression: below `fn=` come lines
/// of positions and a cost, which for a call is the inclusive one.
fn totals(callgrind: &str) -> Result<BTreeMap<String, u64>, String> {
    let mut verbs: BTreeMap<String, u64> = BTreeMap::new();
    let mut total: Option<&mut u64> = None;
    for line in callgrind.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            total = name.strip_prefix(PREFIX).map(|verb| verbs.entry(verb.to_owned()).or_default());
        } else if let Some(total) = &mut total
            && line.starts_with(|c: char| c.is_ascii_digit())
        {
            let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
            **total += cost.ok_or_else(|| format!("`{line}` is no position and cost"))?;
        }
    }
    match verbs.iter().find(|(_, total)| **total < CALLS) {
        None if verbs.is_empty() => Err("no verb was called".to_owned()),
        None => Ok(verbs),
        Some((verb, total)) => Err(format!("{total} instructions in {CALLS} calls of {verb}")),
    }
}

/// What breaks the promise about inlined verbs. With `scalar` only what is inlined there too: up to 8 bytes at a time.
fn over_bare(counts: &Counts) -> Vec<String> {
    let mut wrong = Vec::new();
    for routine in ROUTINES {
        let of = |verb: &str| counts.get(&(routine.to_owned(), verb.to_owned())).copied();
        let pairs = INLINED
            .iter()
            .filter(|(_, bare)| routine != "scalar" || !matches!(*bare, "bare_store_48" | "bare_store_64"));
        for (verb, bare) in pairs {
            match (of(verb), of(bare)) {
                (Some(ours), Some(theirs)) if ours <= theirs + MAX_OVER_BARE => {}
                (Some(ours), Some(theirs)) => wrong.push(format!(
                    "{routine} {verb}: {ours} instructions, more than {MAX_OVER_BARE} over the {theirs} of {bare}"
                )),
                _ => wrong.push(format!("{routine}: {verb} or {bare} was not counted")),
            }
        }
    }
    wrong
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Findings {
    worse: Vec<String>,
    better: Vec<String>,
}

fn compare(counts: &Counts, limits: &Counts, allowance: u64) -> Findings {
    let mut findings = Findings::default();
    for ((routine, verb), &count) in counts {
        match limits.get(&(routine.clone(), verb.clone())) {
            None => {
                findings.worse.push(format!("{routine} {verb}: {count} instructions, and the table has no such line"))
            }
            Some(&limit) if count > limit + allowance => {
                findings.worse.push(format!("{routine} {verb}: {count} instructions, {limit} in the table"));
            }
            Some(&limit) if count + allowance < limit => {
                findings.better.push(format!("{routine} {verb}: {count} instructions, {limit} in the table"));
            }
            Some(_) => {}
        }
    }
    let gone = limits.keys().filter(|key| !counts.contains_key(*key));
    findings.worse.extend(gone.map(|(routine, verb)| format!("{routine} {verb}: in the table, and not counted")));
    findings
}

/// The table: a line for the compiler, and `routine verb instructions` lines.
fn written(counts: &Counts, compiler: &str) -> String {
    let mut text = format!(
        "# Instructions per call on the emulated backend, counted by callgrind: fence, result and return included.\n\
         # `cargo xtask instructions` compares, `{BLESS}` rewrites.\n\
         compiler {compiler}\n"
    );
    for ((routine, verb), count) in counts {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{routine} {verb} {count}");
    }
    text
}

fn parse_table(text: &str) -> Result<(Counts, String), String> {
    let (mut counts, mut compiler) = (Counts::new(), String::new());
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix("compiler ") {
            name.clone_into(&mut compiler);
            continue;
        }
        let mut words = line.split(' ');
        match (words.next(), words.next(), words.next().and_then(|count| count.parse().ok()), words.next()) {
            (Some(routine), Some(verb), Some(count), None) => {
                counts.insert((routine.to_owned(), verb.to_owned()), count)
            }
            _ => return Err(format!("`{line}` is no line of the table: `routine verb instructions`")),
        };
    }
    Ok((counts, compiler))
}

/// The counts for a reader: a verb a line, a routine a column.
fn shown(counts: &Counts) -> Vec<String> {
    let verbs: std::collections::BTreeSet<&str> = counts.keys().map(|(_, verb)| verb.as_str()).collect();
    let row = |name: &str, cells: [String; ROUTINES.len()]| {
        let [a, b, c] = cells;
        format!("    {name:24}{a:>8}{b:>8}{c:>8}")
    };
    let mut lines = vec![row("instructions per call", ROUTINES.map(str::to_owned))];
    lines.extend(verbs.into_iter().map(|verb| {
        let cell = |routine: &str| counts.get(&(routine.to_owned(), verb.to_owned()));
        row(verb, ROUTINES.map(|routine| cell(routine).map_or_else(|| "-".to_owned(), u64::to_string)))
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts<const N: usize>(of: [(&str, &str, u64); N]) -> Counts {
        of.map(|(routine, verb, count)| ((routine.to_owned(), verb.to_owned()), count)).into()
    }

    /// Every inlined verb at the limit, or `more` above it.
    fn at_the_limit(more: u64) -> Counts {
        let mut all = Counts::new();
        for routine in ROUTINES {
            for (verb, bare) in INLINED {
                all.insert((routine.to_owned(), bare.to_owned()), 10);
                all.insert((routine.to_owned(), verb.to_owned()), 10 + MAX_OVER_BARE + more);
            }
        }
        all
    }

    #[test]
    fn one_instruction_too_many_over_bare_is_found() {
        assert_eq!(over_bare(&at_the_limit(0)), [""; 0]);
        let wrong = over_bare(&at_the_limit(1));
        assert_eq!(wrong.len(), 2 * INLINED.len() + 7, "{wrong:?}");
        assert_eq!(wrong[0], "avx2 write_8: 26 instructions, more than 15 over the 10 of bare_store_8");
        let mut without = at_the_limit(0);
        without.remove(&("sse41".to_owned(), "post_line".to_owned()));
        assert_eq!(over_bare(&without), ["sse41: post_line or bare_store_64 was not counted"]);
    }

    #[test]
    fn counts_above_the_table_are_worse_and_below_it_better() {
        let limits = counts([("avx2", "write_8", 20), ("avx2", "flush", 13)]);
        for allowance in [0, ALLOWANCE] {
            let with = |write| counts([("avx2", "write_8", write), ("avx2", "flush", 13)]);
            for within in 20 - allowance..=20 + allowance {
                assert_eq!(compare(&with(within), &limits, allowance), Findings::default());
            }
            let (above, below) = (20 + allowance + 1, 20 - allowance - 1);
            let (worse, better) =
                (compare(&with(above), &limits, allowance), compare(&with(below), &limits, allowance));
            assert_eq!(worse.worse, [format!("avx2 write_8: {above} instructions, 20 in the table")]);
            assert_eq!(better.better, [format!("avx2 write_8: {below} instructions, 20 in the table")]);
            assert!(worse.better.is_empty() && better.worse.is_empty());
        }
    }

    #[test]
    fn a_verb_that_only_one_side_has_is_found() {
        let findings = compare(&counts([("avx2", "new", 1)]), &counts([("avx2", "gone", 1)]), 0);
        let wanted =
            ["avx2 new: 1 instructions, and the table has no such line", "avx2 gone: in the table, and not counted"];
        assert_eq!(findings.worse, wanted);
    }

    #[test]
    fn the_table_reads_back() {
        let all = counts([("avx2", "write_8", 17), ("scalar", "flush", 13)]);
        assert_eq!(parse_table(&written(&all, "rustc 1.89.0")), Ok((all, "rustc 1.89.0".to_owned())));
        for bad in ["avx2 write_8", "avx2 write_8 many", "avx2 write_8 17 18", ""] {
            assert!(parse_table(&format!("{bad}\n")).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_verb_s_own_and_called_instructions_add_up() {
        let text = "events: Ir\nfl=a.rs\nfn=verb_write\n10 4000\n11 1000\ncfi=b.rs\ncfn=store\ncalls=1000 7\n11 33000\n\n\
                    fn=store\n7 33000\n\nfn=verb_write\nfi=c.rs\n3 2000\n\nfn=verb_flush\n5 13000\n\ntotals: 53000\n";
        let wanted = [("write", 40_000), ("flush", 13_000)].map(|(verb, total)| (verb.to_owned(), total));
        assert_eq!(totals(text), Ok(wanted.into()));
        assert!(totals("fn=verb_write\n10 999\n").unwrap_err().contains("999 instructions in 1000 calls"));
        assert!(totals("fn=store\n7 33000\n").is_err());
        assert!(totals("fn=verb_write\n10\n").is_err());
    }

    #[test]
    fn the_executable_is_that_of_the_bench() {
        let messages = "{\"target\":{\"name\":\"gdrcopy\"},\"executable\":null}\nnot JSON\n\
                        {\"target\":{\"name\":\"instructions\"},\"executable\":\"/t/instructions-1\"}\n";
        assert_eq!(executable(messages), Some("/t/instructions-1".into()));
        assert_eq!(executable("{}"), None);
    }
}
