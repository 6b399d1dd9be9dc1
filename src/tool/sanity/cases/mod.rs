//! The tests by name.

use super::bench::{Bench, Step};
use crate::backend::Allocator;

pub(super) mod basic;
pub(super) mod data;
pub(super) mod descriptors;
pub(super) mod forked;
pub(super) mod freed;
pub(super) mod leaks;
pub(super) mod threads;

/// What a test is about, before the kinds of memory.
struct Family {
    name: &'static str,
    about: &'static str,
    run: fn(&Bench) -> Step,
    memory: Memory,
    extended: bool,
}

/// Which memory a family is run on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// Each kind: one test for each, with the kind at the end of its name.
    Each,
    /// The library's own.
    Own,
    /// None that matters.
    Small,
}

/// One test.
#[derive(Debug, Clone)]
pub(super) struct Test {
    pub(super) name: String,
    pub(super) about: &'static str,
    pub(super) how: Allocator,
    pub(super) extended: bool,
    run: fn(&Bench) -> Step,
}

impl Test {
    pub(super) fn run(&self, bench: &Bench) -> Step {
        (self.run)(bench)
    }
}

/// Kinds of memory by the end of a test's name; the last two are the names that GDRCopy's users know.
const KINDS: [(&str, Allocator); 3] =
    [("buffer", Allocator::Buffer), ("cumemalloc", Allocator::CuMemAlloc), ("vmmalloc", Allocator::CuMemCreate)];

macro_rules! families {
    ($($module:ident { $($memory:ident $name:ident $(($extended:ident))?: $about:literal,)+ })+) => {
        const FAMILIES: &[Family] = &[$($(
            Family {
                name: stringify!($name),
                about: $about,
                run: $module::$name,
                memory: Memory::$memory,
                extended: families!(@ $($extended)?),
            },
        )+)+];
    };
    (@) => { false };
    (@ extended) => { true };
}

families! {
    basic {
        Each basic: "pin, map, write, read, unmap, unpin and close work and report no error",
        Each basic_unaligned_mapping: "any address and length can be mapped, and the mapping starts at its exact byte",
        Small basic_small_buffers_mapping: "small buffers that share a page are pinned, mapped and given up one by one",
        Each basic_child_thread_pins_buffer: "one thread pins, others map, copy, unmap and unpin",
        Own basic_one_mapping_at_a_time: "a pin has one mapping at a time, and a mapped pin cannot be unpinned",
        Own basic_overlapping_pins: "overlapping pins show the same memory",
        Own basic_bounds: "copies past the end and misaligned accesses are refused and change nothing",
        Own basic_refused_memory: "host memory, freed memory and ranges past the end are refused",
    }
    data {
        Each data_validation: "what is written is what the device has, and the other way round, neighbours untouched",
        Own data_every_routine: "every copy routine of this CPU moves the same bytes, both ways",
        Own data_single_accesses: "4-byte, 8-byte and 64-byte accesses land where they should",
        Own data_posted_writes: "posted and batched writes have arrived after a flush",
        Own data_publish: "data and flag of publish arrive, the flag last",
        Own data_every_offset (extended): "every size up to 320 bytes at 64 offsets, both ways",
        Each data_large (extended): "256 MiB, both ways",
    }
    threads {
        Own thread_copies: "threads copy through one mapping at once",
        Each thread_pins: "threads pin, map and give up windows of one buffer and buffers of their own, at once",
        Own thread_soak (extended): "the same for ten seconds",
    }
    forked {
        Each fork_child_has_no_window: "a forked child has no window: access there is a fault, calls are refused",
        Own fork_child_cannot_use_parents_pin: "a forked child can neither map nor use its parent's pin, session or buffer",
        Own fork_child_ends_first: "the end of a child, by itself or by SIGKILL, takes nothing from its parent",
        Own fork_parent_and_child_map: "parent and child pin and map buffers of their own at the same time",
    }
    descriptors {
        Own fd_closed_on_exec: "a program that is started inherits no descriptor of the session's",
        Own fd_passed_over_unix_socket: "another process can neither pin nor map through the device's descriptor",
        Own fd_inherited: "the same for a process that inherits the descriptor",
        Own fd_exported_memory: "another process pins and maps memory that was exported to it",
    }
    freed {
        Each invalidation_access_after_free: "freed small buffers behave under their mapping as the backend says",
        Each invalidation_access_after_free_large: "freed large buffers behave under their mapping as the backend says",
        Each invalidation_map_after_free: "a pin whose memory was freed is stale, and freed memory cannot be pinned",
        Each invalidation_next_owner: "the next owner's memory is safe from the old mapping, unless blocks share an object",
        Each invalidation_two_mappings: "two mappings of one buffer: giving up one leaves the other; both end as the backend says",
        Own invalidation_access_after_unmap: "access after unmap is a fault",
        Own invalidation_access_after_close: "access after the session is closed is a fault",
    }
    leaks {
        Own leak_descriptors_and_windows: "a thousand rounds leave no open file and no address space behind",
        Own leak_bar1: "a hundred rounds leave no BAR1 aperture behind",
        Own leak_dropped_in_any_order: "mapping, pin, buffer and session may be dropped in any order, and nothing stays",
        Own leak_killed_process: "BAR1 aperture of a killed process comes back",
        Own leak_parent_ends_first: "BAR1 aperture of a process comes back although its child lives on for a while",
    }
}

/// Every test, in the order in which they are run.
pub(super) fn all() -> Vec<Test> {
    let one = |family: &Family, name: String, how| Test {
        name,
        about: family.about,
        how,
        extended: family.extended,
        run: family.run,
    };
    FAMILIES
        .iter()
        .flat_map(|family| match family.memory {
            Memory::Each => {
                KINDS.map(|(kind, how)| one(family, format!("{}_{kind}", family.name), how)).into_iter().collect()
            }
            Memory::Own => vec![one(family, family.name.to_owned(), Allocator::Buffer)],
            Memory::Small => vec![one(family, family.name.to_owned(), Allocator::CuMemAlloc)],
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_plain() {
        let tests = all();
        let names: BTreeSet<_> = tests.iter().map(|test| test.name.as_str()).collect();
        assert_eq!(names.len(), tests.len());
        assert!(
            names.iter().all(|name| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
        );
        for known in
            ["basic_cumemalloc", "basic_vmmalloc", "data_validation_cumemalloc", "basic_unaligned_mapping_buffer"]
        {
            assert!(names.contains(known), "{known}");
        }
    }
}
