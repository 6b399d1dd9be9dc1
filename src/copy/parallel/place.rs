//! Where the workers run.

use crate::error::{Error, ErrorKind, Result};
use crate::sys::cpu::{self, CpuList};

/// What placing depends on.
pub(super) struct Machine<S> {
    /// The CPUs that may be used.
    pub(super) allowed: CpuList,
    /// Those near the GPU, where known.
    pub(super) local: Option<CpuList>,
    /// The CPU of the calling thread.
    pub(super) here: Option<u32>,
    /// The CPUs of one physical core.
    pub(super) siblings: S,
}

impl Machine<fn(u32) -> CpuList> {
    /// This machine as the calling thread sees it.
    pub(super) fn this(local: Option<CpuList>) -> Result<Self> {
        let allowed = cpu::allowed().ok_or_else(|| {
            let cause = "the system does not say which CPUs this thread may use";
            Error::new(super::OP, ErrorKind::UnsupportedFeature(crate::Feature::Operation), cause)
                .remedy("name the CPUs of the workers")
        })?;
        // Virtual machines often hide which CPUs share a core. Those that run on whole cores number them in pairs.
        let is_told = allowed.iter().any(|cpu| cpu::siblings(cpu).len() > 1);
        let siblings = if is_told { cpu::siblings } else { pair };
        Ok(Self { allowed, local, here: cpu::current(), siblings })
    }
}

/// The core of a CPU where the system tells nothing. Where cores have one CPU each, this costs nothing: neighbours are
/// used last, not never.
fn pair(cpu: u32) -> CpuList {
    [cpu & !1, cpu | 1].into_iter().collect()
}

impl<S: Fn(u32) -> CpuList> Machine<S> {
    /// The CPUs for workers, best first: one of each physical core, those near the GPU before others; then their
    /// siblings, which share the fill buffers of their core and so add little. Never the caller's own.
    pub(super) fn candidates(&self) -> Vec<u32> {
        let is_local = |cpu: &u32| self.local.as_ref().is_none_or(|local| local.contains(*cpu));
        let (near, far): (Vec<_>, Vec<_>) =
            self.allowed.iter().filter(|&cpu| Some(cpu) != self.here).partition(is_local);
        let mut taken: Vec<u32> = self.here.map_or_else(Vec::new, |here| (self.siblings)(here).iter().collect());
        let mut is_first_of_its_core = |cpu: &u32| {
            let is_first = !taken.contains(cpu);
            if is_first {
                taken.extend((self.siblings)(*cpu).iter());
            }
            is_first
        };
        let (mut first, rest): (Vec<u32>, Vec<u32>) =
            near.into_iter().chain(far).partition(|cpu| is_first_of_its_core(cpu));
        first.extend(rest);
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> CpuList {
        CpuList::parse(text).unwrap()
    }

    /// CPUs n and n + 8 are one core.
    fn two_per_core(cpu: u32) -> CpuList {
        [cpu % 8, cpu % 8 + 8].into_iter().collect()
    }

    fn candidates(allowed: &str, local: Option<&str>, here: Option<u32>) -> Vec<u32> {
        let machine = Machine { allowed: list(allowed), local: local.map(list), here, siblings: two_per_core };
        machine.candidates()
    }

    #[test]
    fn whole_cores_come_first_and_near_ones_before_far_ones() {
        assert_eq!(candidates("0-15", Some("4-7,12-15"), Some(4)), [5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11]);
        assert_eq!(candidates("0-7", None, Some(2)), [0, 1, 3, 4, 5, 6, 7]);
        assert_eq!(candidates("0-3", Some("8-11"), Some(0)), [1, 2, 3], "none is near");
    }

    #[test]
    fn only_allowed_cpus_and_never_the_caller_s() {
        assert_eq!(candidates("3,5,11", None, Some(3)), [5, 11]);
        assert!(candidates("3", None, Some(3)).is_empty());
        assert_eq!(candidates("3", None, None), [3]);
        // Moved away by now: nothing of another's core is held back.
        assert_eq!(candidates("0-1", None, Some(7)), [0, 1]);
    }

    #[test]
    fn where_cores_are_hidden_every_other_cpu_comes_first() {
        let machine = Machine { allowed: list("0-7"), local: None, here: Some(3), siblings: pair };
        assert_eq!(machine.candidates(), [0, 4, 6, 1, 2, 5, 7]);
    }

    #[test]
    fn this_machine_s_candidates_are_allowed() {
        let machine = Machine::this(None).unwrap();
        let candidates = machine.candidates();
        assert!(candidates.iter().all(|&cpu| machine.allowed.contains(cpu)), "{candidates:?}");
        assert_eq!(CpuList::from_iter(candidates.iter().copied()).len(), candidates.len(), "each once");
    }
}
