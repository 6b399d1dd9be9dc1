//! Which routine a mapping copies with, by size: what a policy comes down to on the hot path.

use crate::copy::Routine;

/// Most routines in one direction. A table that changes more often than that follows noise.
pub(crate) const MAX_CLASSES: usize = 4;

/// The routines of one direction: the first whose sizes reach so far.
#[derive(Clone, Copy, Debug)]
struct Classes {
    /// The last size of the first class, for all sizes where there is but one.
    up_to: usize,
    routine: &'static Routine,
    /// The other classes; unused ones repeat the last.
    others: [(usize, &'static Routine); MAX_CLASSES - 1],
}

impl Classes {
    /// From the last size and the routine of each class, in ascending order.
    fn new(classes: &[(usize, &'static Routine)]) -> Option<Self> {
        let (&(up_to, routine), rest) = classes.split_first()?;
        let last = *rest.last().unwrap_or(&(up_to, routine));
        let mut others = [(usize::MAX, last.1); MAX_CLASSES - 1];
        others.get_mut(..rest.len())?.copy_from_slice(rest);
        Some(Self { up_to: if rest.is_empty() { usize::MAX } else { up_to }, routine, others })
    }

    /// Written out, and inlined with it: a call in here would make the copy around it save its registers.
    #[inline(always)]
    fn of(&self, len: usize) -> &'static Routine {
        let [second, third, fourth] = self.others;
        if len <= self.up_to {
            self.routine
        } else if len <= second.0 {
            second.1
        } else if len <= third.0 {
            third.1
        } else {
            fourth.1
        }
    }
}

/// The routines of both directions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routines {
    store: Classes,
    load: Classes,
}

impl Routines {
    /// One for everything.
    pub(crate) fn only(routine: &'static Routine) -> Self {
        let all = Classes { up_to: usize::MAX, routine, others: [(usize::MAX, routine); MAX_CLASSES - 1] };
        Self { store: all, load: all }
    }

    /// From classes as in [`Classes::new`]; `None` where there are none, or too many.
    pub(crate) fn new(store: &[(usize, &'static Routine)], load: &[(usize, &'static Routine)]) -> Option<Self> {
        Some(Self { store: Classes::new(store)?, load: Classes::new(load)? })
    }

    /// The one that stores `len` bytes. A comparison, where one routine does for all sizes.
    #[inline(always)]
    pub(crate) fn store(&self, len: usize) -> &'static Routine {
        self.store.of(len)
    }

    /// The one that loads `len` bytes.
    #[inline(always)]
    pub(crate) fn load(&self, len: usize) -> &'static Routine {
        self.load.of(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::routines;

    #[test]
    fn each_size_has_its_routine() {
        let [a, b, c, d, e] = *routines() else { panic!("five routines") };
        let names = |routines: &Routines, lens: &[usize]| -> Vec<_> {
            lens.iter().map(|&len| routines.store(len).name()).collect()
        };
        let one = Routines::only(a);
        assert_eq!(names(&one, &[0, 1, usize::MAX]), [a.name(); 3]);
        let classes = [(64, a), (128, b), (4096, c), (usize::MAX, d)];
        let four = Routines::new(&classes, &classes[3..]).unwrap();
        let wanted = [a, a, b, b, c, d, d].map(Routine::name);
        assert_eq!(names(&four, &[0, 64, 65, 128, 129, 4097, usize::MAX]), wanted);
        assert_eq!(four.load(1).name(), d.name());
        let two = Routines::new(&[(64, a), (usize::MAX, b)], &[(usize::MAX, e)]).unwrap();
        assert_eq!(names(&two, &[64, 65, usize::MAX]), [a, b, b].map(Routine::name));
        assert!(Routines::new(&[], &classes).is_none());
        assert!(Routines::new(&[(1, a), (2, b), (3, a), (4, b), (usize::MAX, a)], &classes).is_none());
    }
}
