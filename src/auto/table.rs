//! From a policy to what an automatic copier does at each size.

use super::method::AutoMethod;
use crate::policy::{Choice, CopyDirection, CopyMethod, Policy, are_shared, last_of_lower};
use crate::sys::num::usize_of;

/// Two methods within this are equally good, as far as a policy's figures say.
const MARGIN: f64 = 1.02;

/// Host memory that a copy goes to or comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HostKind {
    Ordinary,
    /// The copy engine reaches it.
    PageLocked,
    /// And so does the agent's kernel.
    Reached,
}

/// What an automatic copier has to copy with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    /// Threads of the parallel copier.
    pub(super) threads: Option<usize>,
    pub(super) has_agent: bool,
    pub(super) host: HostKind,
}

impl Offer {
    /// Whether a method of the policy's can be what this one does, and the better the larger: a policy may know a method in
    /// several forms.
    fn likeness(self, method: CopyMethod) -> Option<usize> {
        match (method, self.host) {
            (CopyMethod::Routine(_), _) => Some(0),
            (CopyMethod::Parallel(threads), _) => self.threads.filter(|&own| threads <= own).map(|_| threads),
            (CopyMethod::Agent, _) => self.has_agent.then_some(0),
            (CopyMethod::AgentPinned, HostKind::Reached) => self.has_agent.then_some(1),
            (CopyMethod::AgentPinned, _) => None,
            // A policy from before the copy engine was measured as it is used has `cuMemcpy` alone, which is near enough.
            (CopyMethod::CopyEngine, HostKind::Ordinary)
            | (CopyMethod::CopyEnginePinned, HostKind::PageLocked | HostKind::Reached) => Some(2),
            (CopyMethod::CudaMemcpy, _) => Some(1),
            (CopyMethod::CopyEngine | CopyMethod::CopyEnginePinned, _) => Some(0),
        }
    }

    /// Whether `method` is this copier's way of doing it, with `others` known.
    fn is_own(self, method: CopyMethod, others: &[(CopyMethod, f64)]) -> bool {
        let Some(likeness) = self.likeness(method) else { return false };
        let same = others.iter().filter(|(other, _)| AutoMethod::of(*other) == AutoMethod::of(method));
        same.filter_map(|(other, _)| self.likeness(*other)).all(|other| other <= likeness)
    }

    /// Whether it does what the row says is best.
    pub(super) fn has_best(self, choice: &Choice<'_>) -> bool {
        self.is_own(choice.best(), choice.candidates())
    }

    /// What it does with the copies of a row: the row's best method, or else the plainest of the quickest that it has; if
    /// there are no figures, the calling thread copies.
    fn own(self, choice: &Choice<'_>) -> CopyMethod {
        let (first, _) = choice.sizes();
        let candidates = choice.candidates();
        if self.has_best(choice) {
            return choice.best();
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
        plainest.unwrap_or(CopyMethod::Routine(choice.routine()))
    }

    #[cfg(test)]
    pub(super) fn method(self, choice: &Choice<'_>) -> AutoMethod {
        AutoMethod::of(self.own(choice))
    }

    /// The last size of each row, and the method.
    ///
    /// A row ends where its best method is no longer the best. Where another one takes that one's place, or its neighbour's,
    /// figures of these two decide.
    fn runs(self, policy: &Policy, direction: CopyDirection) -> Vec<(usize, AutoMethod)> {
        let rows: Vec<_> = policy.choices(direction).map(|choice| (choice, self.own(&choice))).collect();
        let mut runs: Vec<(usize, AutoMethod)> = Vec::with_capacity(rows.len());
        for (n, (choice, own)) in rows.iter().enumerate() {
            let mut last = choice.sizes().1;
            if let Some((next, other)) = rows.get(n + 1)
                && AutoMethod::of(*other) != AutoMethod::of(*own)
                && !(self.has_best(choice) && self.has_best(next))
                && let (Some(low), Some(high)) = (choice.figures(), next.figures())
            {
                last = last_of_lower(direction, (low, *own), (high, *other), last);
            }
            let method = AutoMethod::of(*own);
            match runs.last_mut() {
                Some((before, same)) if *same == method => *before = last,
                _ => runs.push((last, method)),
            }
        }
        runs
    }
}

/// Sizes with the same methods.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    /// The largest of them.
    last: usize,
    method: AutoMethod,
    /// With memory that the agent reaches.
    reached: AutoMethod,
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
    /// For memory as the offer says, and for what the agent reaches of it.
    pub(super) fn new(policy: &Policy, direction: CopyDirection, offer: Offer) -> Self {
        let others = offer.runs(policy, direction);
        let reached = if offer.has_agent {
            Offer { host: HostKind::Reached, ..offer }.runs(policy, direction)
        } else {
            others.clone()
        };
        let mut ends: Vec<usize> = others.iter().chain(&reached).map(|(last, _)| *last).collect();
        ends.sort_unstable();
        ends.dedup();
        let at = |runs: &[(usize, AutoMethod)], bytes: usize| {
            runs.iter().find(|(last, _)| bytes <= *last).map_or(AutoMethod::Bar1, |(_, method)| *method)
        };
        let runs: Vec<Run> =
            ends.into_iter().map(|last| Run { last, method: at(&others, last), reached: at(&reached, last) }).collect();
        let start = |bits: usize| {
            let smallest = if bits == 0 { 0 } else { 1 << (bits - 1) };
            let before = runs.partition_point(|run| run.last < smallest);
            // Where there are more, the search begins too early, and finds it all the same.
            u16::try_from(before).unwrap_or(u16::MAX)
        };
        let starts = std::array::from_fn(start);
        let small = runs.first().copied().unwrap_or(Run {
            last: usize::MAX,
            method: AutoMethod::Bar1,
            reached: AutoMethod::Bar1,
        });
        Self { small, runs, starts }
    }

    /// What is done with so many bytes of memory that the agent reaches, or else does not. It is asked only where that makes
    /// a difference.
    #[inline]
    pub(super) fn method(&self, bytes: usize, is_reached: impl FnOnce() -> bool) -> AutoMethod {
        let run = if bytes <= self.small.last { self.small } else { self.later(bytes) };
        if run.method == run.reached || !is_reached() { run.method } else { run.reached }
    }

    fn later(&self, bytes: usize) -> Run {
        let bits = usize_of(u64::from(usize::BITS - bytes.leading_zeros()));
        let start = self.starts.get(bits).map_or(0, |&start| usize::from(start));
        let later = self.runs.get(start..).unwrap_or_default();
        later.iter().find(|run| bytes <= run.last).copied().unwrap_or(self.small)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AutoMethod::{Agent, Bar1, CopyEngine, Parallel};
    use CopyDirection::{DeviceToHost, HostToDevice};

    const NOTHING: Offer = Offer { threads: None, has_agent: false, host: HostKind::Ordinary };
    const ALL: Offer = Offer { threads: Some(8), has_agent: true, host: HostKind::Ordinary };

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
        let pinned = Offer { host: HostKind::PageLocked, ..NOTHING };
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
    fn the_agent_s_figure_is_that_of_memory_which_it_reaches() {
        let row = "best=agent_pinned | scalar=79000 agent=8000 agent_pinned=4000 copy_engine_pinned=7800";
        let locked = Offer { host: HostKind::PageLocked, ..ALL };
        let reached = Offer { host: HostKind::Reached, ..ALL };
        assert_eq!((method_of(row, reached), method_of(row, locked)), (Agent, CopyEngine));
        // The bounce is no way of its own where the memory is reached.
        let row = "best=agent | scalar=79000 agent=7000 agent_pinned=9000 copy_engine_pinned=7800";
        assert_eq!((method_of(row, reached), method_of(row, locked)), (CopyEngine, Agent));
        // From before there was such a figure.
        let row = "best=agent | scalar=79000 agent=7000 copy_engine_pinned=7800";
        assert_eq!((method_of(row, reached), method_of(row, locked)), (Agent, Agent));
        let without = Offer { has_agent: false, ..locked };
        assert_eq!(method_of("best=agent_pinned", without), Bar1);
    }

    #[test]
    fn memory_is_asked_about_only_where_it_makes_a_difference() {
        let rows = "1-100 measured=64 routine=scalar best=scalar | scalar=10 agent=100 agent_pinned=90;
            101- measured=4096 routine=scalar best=agent_pinned | scalar=5000 agent=300 agent_pinned=200 copy_engine=250";
        let policy = policy(&rows.replace('\n', " "), "1- routine=scalar");
        let table = Table::new(&policy, HostToDevice, ALL);
        assert_eq!(table.method(100, || panic!("asked")), Bar1);
        assert_eq!((table.method(5000, || true), table.method(5000, || false)), (Agent, CopyEngine));
        let table = Table::new(&policy, HostToDevice, Offer { has_agent: false, ..ALL });
        assert_eq!(table.method(5000, || panic!("asked")), CopyEngine);
    }

    /// The row's best method is not to be had on both sides: the two that take its place meet where they cost the same.
    #[test]
    fn methods_that_take_the_best_one_s_place_meet_where_they_cost_the_same() {
        let rows = "1-1448 measured=1024 routine=scalar best=agent | scalar=1000 agent=500 copy_engine=1300;
            1449- measured=2048 routine=scalar best=agent | scalar=1600 agent=600 copy_engine=1500";
        let policy = policy(&rows.replace('\n', " "), "1- routine=scalar");
        let table = Table::new(&policy, HostToDevice, NOTHING);
        let method = |bytes| table.method(bytes, || false);
        assert_eq!((method(1024 + 768), method(1024 + 769)), (Bar1, CopyEngine));
        let table = Table::new(&policy, HostToDevice, ALL);
        assert_eq!((table.method(1, || false), table.method(1 << 20, || false)), (Agent, Agent));
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
            assert_eq!(table.method(bytes, || false), wanted, "{bytes}");
        }
        assert_eq!(Table::new(&policy, DeviceToHost, ALL).method(77, || true), Bar1);
    }
}
