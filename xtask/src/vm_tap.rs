//! What the guest reports: TAP of each program, between lines of the guest's init that frame it.
//!
//! `# start NAME`, the program's TAP, `# status EXIT NAME`; then kernel messages as `# kernel MESSAGE`, and `# end`.

use std::fmt::Write as _;

/// Marks of a kernel that found fault with itself. Its log is cleared before the first test.
const COMPLAINTS: [&str; 14] = [
    "BUG:",
    "WARNING:",
    "kernel BUG",
    "Oops",
    "KASAN",
    "UBSAN",
    "general protection",
    "possible circular locking",
    "possible recursive locking",
    "suspicious RCU",
    "unreferenced object",
    "refcount_t:",
    "blocked for more than",
    "Kernel panic",
];

/// Bytes that a test left in a page of the BAR.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) page: usize,
    pub(crate) seed: u8,
}

#[derive(Debug, Default)]
struct Program {
    name: String,
    passed: usize,
    failed: usize,
    plan: Option<usize>,
    status: Option<i32>,
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    programs: Vec<Program>,
    complaints: Vec<String>,
    pub(crate) layouts: Vec<Layout>,
    ended: bool,
}

pub(crate) fn is_complaint(line: &str) -> bool {
    COMPLAINTS.iter().any(|mark| line.contains(mark))
}

impl Report {
    /// Reads one line of the guest's.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix("# start ") {
            self.programs.push(Program { name: name.to_owned(), ..Program::default() });
        } else if let Some(rest) = line.strip_prefix("# status ") {
            let status = rest.split(' ').next().and_then(|status| status.parse().ok());
            self.status(status);
        } else if let Some(message) = line.strip_prefix("# kernel ") {
            if is_complaint(message) {
                self.complain(format!("kernel: {message}"));
            }
        } else if let Some(rest) = line.strip_prefix("# layout ") {
            match layout(rest) {
                Some(layout) => self.layouts.push(layout),
                None => self.complain(format!("unreadable: {line}")),
            }
        } else if line == "# end" {
            self.ended = true;
        } else {
            self.tap(line);
        }
    }

    fn tap(&mut self, line: &str) {
        let Some(program) = self.programs.last_mut() else { return };
        if line.starts_with("ok ") {
            program.passed += 1;
        } else if line.starts_with("not ok ") {
            program.failed += 1;
            let complaint = format!("{}: {line}", program.name);
            self.complaints.push(complaint);
        } else if line.starts_with("Bail out!") {
            let complaint = format!("{}: {line}", program.name);
            self.complaints.push(complaint);
        } else if let Some(plan) = line.strip_prefix("1..") {
            program.plan = plan.parse().ok();
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            // Rust's own harness, whose last line has both counts.
            program.passed += number_before(counts, " passed");
            program.failed += number_before(counts, " failed");
            program.plan = Some(program.passed + program.failed);
        }
    }

    fn status(&mut self, status: Option<i32>) {
        let Some(program) = self.programs.last_mut() else { return };
        program.status = status;
        let total = program.passed + program.failed;
        let complaint = match (status, program.plan) {
            (Some(0), Some(plan)) if plan == total && total > 0 => return,
            (Some(0), plan) => format!("{}: {total} tests, planned {plan:?}", program.name),
            (status, _) if program.failed > 0 => format!("{}: exit status {status:?}", program.name),
            (status, _) => format!("{}: exit status {status:?} with no failed test", program.name),
        };
        self.complaints.push(complaint);
    }

    pub(crate) fn complain(&mut self, complaint: String) {
        self.complaints.push(complaint);
    }

    /// To be called when the machine has stopped.
    pub(crate) fn finish(&mut self) {
        if let Some(program) = self.programs.last()
            && program.status.is_none()
        {
            self.complaints.push(format!("{}: did not end", program.name));
        }
        if !self.ended {
            self.complaints.push("the guest stopped before its end".to_owned());
        }
        if self.programs.is_empty() {
            self.complaints.push("no test ran".to_owned());
        }
    }

    pub(crate) fn first_complaint(&self) -> Option<&str> {
        self.complaints.first().map(String::as_str)
    }

    pub(crate) fn summary(&self) -> String {
        let passed: usize = self.programs.iter().map(|program| program.passed).sum();
        let failed: usize = self.programs.iter().map(|program| program.failed).sum();
        format!("{} programs, {passed} tests passed, {failed} failed", self.programs.len())
    }

    pub(crate) fn verdict(&self) -> Result<(), String> {
        let Some(first) = self.first_complaint() else { return Ok(()) };
        let mut text = first.to_owned();
        if self.complaints.len() > 1 {
            let _ = write!(text, " (and {} more)", self.complaints.len() - 1);
        }
        Err(text)
    }
}

fn number_before(text: &str, word: &str) -> usize {
    let number = text.split(word).next().and_then(|before| before.rsplit(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn layout(text: &str) -> Option<Layout> {
    let (page, seed) = text.split_once(' ')?;
    Some(Layout { page: page.parse().ok()?, seed: seed.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(text: &str) -> Report {
        let mut report = Report::default();
        text.lines().for_each(|line| report.line(line));
        report.finish();
        report
    }

    const GOOD: &str = "# start a\nok 1 - x\n# note\nok 2 - y\n1..2\n# status 0 a\n";

    #[test]
    fn a_good_report_has_no_complaint() {
        let report = report(&format!("{GOOD}# layout 3 200\n# kernel [1.0] gdrdrv: fine\n# end\n"));
        assert_eq!(report.verdict(), Ok(()));
        assert_eq!(report.summary(), "1 programs, 2 tests passed, 0 failed");
        assert_eq!(report.layouts, [Layout { page: 3, seed: 200 }]);
    }

    #[test]
    fn rusts_harness_is_understood() {
        let text = "# start a\ntest x ... ok\ntest result: ok. 3 passed; 0 failed; 1 ignored\n# status 0 a\n# end\n";
        let good = report(text);
        assert_eq!(good.verdict(), Ok(()));
        assert_eq!(good.summary(), "1 programs, 3 tests passed, 0 failed");
        let failed = report(&text.replace("0 failed", "2 failed").replace("status 0", "status 101"));
        assert_eq!(failed.summary(), "1 programs, 3 tests passed, 2 failed");
        assert!(failed.verdict().is_err());
        assert!(report(&text.replace("3 passed", "0 passed")).verdict().is_err());
    }

    #[test]
    fn everything_missing_or_wrong_is_a_complaint() {
        let complaints = |text: &str| report(text).complaints;
        assert_eq!(complaints("# end\n"), ["no test ran"]);
        assert_eq!(complaints(GOOD), ["the guest stopped before its end"]);
        for (text, wanted) in [
            ("# start a\nok 1 - x\nnot ok 2 - y\n1..2\n# status 1 a\n# end\n", "a: not ok 2 - y"),
            ("# start a\nok 1 - x\n1..2\n# status 0 a\n# end\n", "a: 1 tests, planned Some(2)"),
            ("# start a\nok 1 - x\n# status 0 a\n# end\n", "a: 1 tests, planned None"),
            ("# start a\n1..0\n# status 0 a\n# end\n", "a: 0 tests, planned Some(0)"),
            ("# start a\nok 1 - x\n1..1\n# status 139 a\n# end\n", "a: exit status Some(139) with no failed test"),
            ("# start a\nBail out! no\n# status 2 a\n# end\n", "a: Bail out! no"),
            ("# start a\nok 1 - x\n", "a: did not end"),
            (
                "# start a\nok 1 - x\n1..1\n# status 0 a\n# kernel [2.0] WARNING: CPU: 1\n# end\n",
                "kernel: [2.0] WARNING: CPU: 1",
            ),
            ("# start a\nok 1 - x\n1..1\n# layout x\n# status 0 a\n# end\n", "unreadable: # layout x"),
        ] {
            let all = complaints(text);
            assert_eq!(all.first().map(String::as_str), Some(wanted), "{all:?}");
        }
    }
}
