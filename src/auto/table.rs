//! From a policy to what an automatic copier does at each size.

use super::method::AutoMethod;
use crate::policy::{Choice, CopyDirection, CopyMethod, Policy, are_shared};
use crate::sys::num::usize_of;

/// Two methods within this are equally good, as far as a policy's figures say.
const MARGIN: f64 = 1.02;

/// What an automatic copier has to copy with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    /// Threads of the parallel copier.
    pub(super) threads: Option<usize>,
    pub(super) has_agent: bool,
    /// The host memory is page-locked.
    pub(super) is_page_locked: bool,
}

impl Offer {
    /// Whether a method of the policy's can be what this one does, and the better the larger: a policy may know a method in
    /// several forms.
    fn likeness(self, method: CopyMethod) -> Option<usize> {
        match (method, self.is_page_locked) {
            (CopyMethod::Routine(_), _) => Some(0),
            (CopyMethod::Parallel(threads), _) => self.threads.filter(|&own| threads <= own).map(|_| threads),
            (CopyMethod::Agent, _) => self.has_agent.then_some(0),
            // A policy from before the copy engine was measured as it is used has `cuMemcpy` alone, which is near enough.
            (CopyMethod::CopyEngine, false) | (CopyMethod::CopyEnginePinned, true) => Some(2),
            (CopyMethod::CudaMemcpy, _) => Some(1),
            (CopyMethod::CopyEngine, true) | (CopyMethod::CopyEnginePinned, false) => Some(0),
        }
    }

    /// Whether `method` is this copier's way of doing it, with `others` known.
    fn is_own(self, method: CopyMethod, others: &[(CopyMethod, f64)]) -> bool {
        let Some(likeness) = self.likeness(method) else { return false };
        let same = others.iter().filter(|(other, _)| AutoMethod::of(*other) == AutoMethod::of(method));
        same.filter_map(|(other, _)| self.likeness(*other)).all(|other| other <= likeness)
    }

    /// What it does with the copies of a row: the row's best method, or else the plainest of the quickest that it has.
    pub(super) fn method(self, choice: &Choice<'_>) -> AutoMethod {
        let (first, _) = choice.sizes();
        let (best, candidates) = (choice.best(), choice.candidates());
        if self.is_own(best, candidates) {
            return AutoMethod::of(best);
        }
        let size = choice.measured().unwrap_or(first);
        let own = candidates.iter().filter(|(method, _)| match method {
            CopyMethod::Routine(name) => *name == choice.routine(),
            CopyMethod::Parallel(_) => are_shared(choice.direction(), size) && self.is_own(*method, candidates),
            _ => self.is_own(*method, candidates),
        });
        let fastest = own.clone().map(|(_, ns)| *ns).fold(f64::INFINITY, f64::min);
        let good = own.filter(|(_, ns)| *ns <= fastest * MARGIN);
        let plainest = good.map(|(method, _)| *method).min_by_key(|method| method.rank());
        plainest.map_or(AutoMethod::Bar1, AutoMethod::of)
    }
}

/// Sizes with one method.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    /// The largest of them.
    last: usize,
    method: AutoMethod,
}

/// One direction's methods by size.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// The first run, which has the sizes at which a comparison more would be felt.
    small: Run,
    runs: Vec<Run>,
    /// For each number of bits of a size, the run of the smallest such size. So finding a size's run takes one or two
    /// comparisons: methods seldom change between a power of two and the next.
    starts: [u16; 65],
}

impl Table {
    pub(super) fn new(policy: &Policy, direction: CopyDirection, offer: Offer) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        for choice in policy.choices(direction) {
            let run = Run { last: choice.sizes().1, method: offer.method(&choice) };
            match runs.last_mut() {
                Some(before) if before.method == run.method => before.last = run.last,
                _ => runs.push(run),
            }
        }
        let start = |bits: usize| {
            let smallest = if bits == 0 { 0 } else { 1 << (bits - 1) };
            let before = runs.partition_point(|run| run.last < smallest);
            // Where there are more, the search begins too early, and finds it all the same.
            u16::try_from(before).unwrap_or(u16::MAX)
        };
        let starts = std::array::from_fn(start);
        let small = runs.first().copied().unwrap_or(Run { last: usize::MAX, method: AutoMethod::Bar1 });
        Self { small, runs, starts }
    }

    #[inline]
    pub(super) fn method(&self, bytes: usize) -> AutoMethod {
        if bytes <= self.small.last { self.small.method } else { self.later(bytes) }
    }

    fn later(&self, bytes: usize) -> AutoMethod {
        let bits = usize_of(u64::from(usize::BITS - bytes.leading_zeros()));
        let start = self.starts.get(bits).map_or(0, |&start| usize::from(start));
        let later = self.runs.get(start..).unwrap_or_default();
        later.iter().find(|run| bytes <= run.last).map_or(AutoMethod::Bar1, |run| run.method)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AutoMethod::{Agent, Bar1, CopyEngine, Parallel};
    use CopyDirection::{DeviceToHost, HostToDevice};

    const NOTHING: Offer = Offer { threads: None, has_agent: false, is_page_locked: false };
    const ALL: Offer = Offer { threads: Some(8), has_agent: true, is_page_locked: false };

    fn policy(h2d: &str, d2h: &str) -> Policy {
        let lines = |direction: &str, rows: &str| -> String {
            rows.split(';').map(|row| format!("{direction} {}\n", row.trim())).collect()
        };
        Policy::parse("test", &format!("schema = 1\n{}{}", lines("h2d", h2d), lines("d2h", d2h))).unwrap()
    }

    fn method_of(row: &str, offer: Offer) -> AutoMethod {
        let policy = policy(&format!("1- measured=65536 routine=scalar {row}"), "1- routine=scalar");
        offer.method(&policy.explain(HostToDevice, 1))
    }

    #[test]
    fn the_best_is_taken_where_it_is_to_be_had() {
        let row = "best=agent | scalar=900 parallel-4=300 parallel-8=310 agent=100 copy_engine=500";
        assert_eq!(method_of(row, ALL), Agent);
        assert_eq!(method_of(row, Offer { has_agent: false, ..ALL }), Parallel);
        assert_eq!(method_of(row, Offer { threads: None, ..ALL }), Agent);
        assert_eq!(method_of(row, NOTHING), CopyEngine);
        // The copier's own figure is that of the most threads that it has.
        let row = "best=agent | scalar=900 parallel-2=800 parallel-8=300 agent=100 copy_engine=500";
        let without_agent = |threads| Offer { threads, has_agent: false, ..ALL };
        assert_eq!(method_of(row, without_agent(Some(16))), Parallel);
        assert_eq!(method_of(row, without_agent(Some(7))), CopyEngine);
        assert_eq!(method_of(row, without_agent(Some(1))), CopyEngine);
        // Of equals the plainer one.
        assert_eq!(method_of("best=agent | scalar=101 copy_engine=100 agent=50", NOTHING), Bar1);
        assert_eq!(method_of("best=scalar | scalar=101 copy_engine=100 agent=50", ALL), Bar1, "as the policy says");
    }

    #[test]
    fn without_figures_the_best_is_taken_on_trust() {
        for (name, wanted) in
            [("agent", Agent), ("parallel-4", Parallel), ("copy_engine", CopyEngine), ("scalar", Bar1)]
        {
            assert_eq!(method_of(&format!("best={name}"), ALL), wanted);
        }
        for name in ["agent", "parallel-4", "scalar"] {
            assert_eq!(method_of(&format!("best={name}"), NOTHING), Bar1);
        }
    }

    #[test]
    fn the_copy_engine_s_figure_is_that_of_the_host_s_memory() {
        let pinned = Offer { is_page_locked: true, ..NOTHING };
        let row = "best=cuda_memcpy_pinned | scalar=300 copy_engine=900 cuda_memcpy_pinned=90 copy_engine_pinned=100";
        assert_eq!((method_of(row, NOTHING), method_of(row, pinned)), (Bar1, CopyEngine));
        // From before there was such a figure.
        let row = "best=cuda_memcpy_pinned | scalar=300 cuda_memcpy_pinned=90";
        assert_eq!((method_of(row, NOTHING), method_of(row, pinned)), (CopyEngine, CopyEngine));
        let row = "best=copy_engine | scalar=300 copy_engine=100";
        assert_eq!((method_of(row, NOTHING), method_of(row, pinned)), (CopyEngine, CopyEngine));
    }

    #[test]
    fn a_parallel_copier_is_no_choice_where_it_copies_alone() {
        let row = |bytes| format!("1- measured={bytes} routine=scalar best=agent | scalar=900 parallel-2=100 agent=50");
        let policy = policy(&row(8192), &row(8192));
        let offer = Offer { has_agent: false, ..ALL };
        assert_eq!(offer.method(&policy.explain(HostToDevice, 1)), Bar1);
        assert_eq!(offer.method(&policy.explain(DeviceToHost, 1)), Parallel);
    }

    #[test]
    fn every_size_finds_its_row() {
        let rows = "1-64 routine=scalar best=scalar; 65-70 routine=scalar best=agent; 71-100 routine=scalar best=agent;
            101-101 routine=scalar best=parallel-2; 102-5000 routine=scalar best=scalar; 5001- routine=scalar
            best=copy_engine";
        let policy = policy(&rows.replace("\n", " "), "1- routine=scalar");
        let table = Table::new(&policy, HostToDevice, ALL);
        assert_eq!(table.runs.len(), 5, "rows with one method are one");
        for bytes in (0..10_000).chain([usize::MAX / 2, usize::MAX / 2 + 1, usize::MAX]) {
            let wanted = ALL.method(&policy.explain(HostToDevice, bytes));
            assert_eq!(table.method(bytes), wanted, "{bytes}");
        }
        assert_eq!(Table::new(&policy, DeviceToHost, ALL).method(77), Bar1);
    }
}
