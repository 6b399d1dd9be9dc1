//! Where in the address space this process's memory objects were seen to lie.
//!
//! Two live allocations can agree on an object only at one address, and two objects never share addresses. A handle
//! that breaks this names the wrong memory, even where the bytes of both are alike and a comparison says nothing.

use std::collections::{BTreeMap, HashMap};

use crate::range::GpuAddr;

/// Blocks remembered for one object, so that one freed block does not take the evidence with it.
const WITNESSES: usize = 8;
/// Objects remembered; the one not seen for longest goes first.
pub(super) const OBJECTS: usize = 4096;

/// A memory object at its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// Client and object number, as the resource manager counts them.
    pub(super) name: (u32, u32),
    /// The address of the object's first byte.
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Place {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }
}

/// A block that was shown to lie in an object. As long as CUDA knows its id, it still does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Witness {
    pub(super) base: GpuAddr,
    pub(super) id: u64,
}

#[derive(Clone, Debug)]
struct Sighting {
    place: Place,
    witnesses: Vec<Witness>,
    last: u64,
}

/// Every object seen, at most one at any address and at most one of any name.
#[derive(Clone, Debug, Default)]
pub(super) struct Atlas {
    by_start: BTreeMap<u64, Sighting>,
    by_name: HashMap<(u32, u32), u64>,
    clock: u64,
}

impl Atlas {
    /// The starts of everything that cannot exist beside `place`.
    fn conflicts(&self, place: &Place) -> Vec<u64> {
        // What is recorded never overlaps, so that ends are in order as well.
        let overlapping = self.by_start.range(..place.end()).rev();
        let mut starts: Vec<u64> = overlapping
            .take_while(|(_, sighting)| sighting.place.end() > place.start)
            .filter(|(_, sighting)| sighting.place != *place)
            .map(|(&start, _)| start)
            .collect();
        let elsewhere =
            self.by_name.get(&place.name).filter(|&&start| start != place.start && !starts.contains(&start));
        starts.extend(elsewhere);
        starts
    }

    /// The blocks of which none may be alive if an object is at `place`.
    pub(super) fn against(&self, place: &Place) -> Vec<Witness> {
        let conflicts = self.conflicts(place);
        conflicts
            .iter()
            .filter_map(|start| self.by_start.get(start))
            .flat_map(|s| s.witnesses.iter().copied())
            .collect()
    }

    fn forget(&mut self, start: u64) {
        if let Some(sighting) = self.by_start.remove(&start) {
            self.by_name.remove(&sighting.place.name);
        }
    }

    /// Records that `witness` lies in the object at `place`; whatever contradicts it is history.
    pub(super) fn record(&mut self, place: Place, witness: Witness) {
        for start in self.conflicts(&place) {
            self.forget(start);
        }
        self.clock += 1;
        let last = self.clock;
        let sighting =
            self.by_start.entry(place.start).or_insert_with(|| Sighting { place, witnesses: Vec::new(), last });
        sighting.last = last;
        sighting.witnesses.retain(|known| known.base != witness.base);
        if sighting.witnesses.len() == WITNESSES {
            sighting.witnesses.remove(0);
        }
        sighting.witnesses.push(witness);
        self.by_name.insert(place.name, place.start);
        if self.by_start.len() > OBJECTS {
            let oldest = self.by_start.iter().min_by_key(|(_, sighting)| sighting.last).map(|(&start, _)| start);
            oldest.into_iter().for_each(|start| self.forget(start));
        }
    }
}
