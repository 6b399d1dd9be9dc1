//! The contract: what every backend promises, run over every backend that this machine has.
//!
//! `GDRCOPY_TEST_REQUIRE=rm` turns skipping backend `rm` into a failure, and so for `gdrdrv` and `vulkan`, with commas between.

#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]

#[path = "../common/mod.rs"]
mod common;

mod copies;
mod emulated;
mod forked;
mod freed;
mod lifetimes;
mod ranges;
mod refusals;
#[cfg(feature = "cuda")]
mod standin;
mod threads;

use common::subject::{each, each_alone};

/// One test for each check, run by `each` or `each_alone`.
macro_rules! contract {
    ($($runner:ident: $module:ident::{$($check:ident),+ $(,)?})+) => {
        $($(
            #[test]
            fn $check() {
                $runner($module::$check);
            }
        )+)+
    };
}

contract! {
    each: copies::{
        round_trips_at_odd_offsets_and_sizes,
        the_device_s_own_writes_are_read,
        single_accesses_land_where_they_should,
        posted_writes_arrive_after_a_flush,
        batches_arrive_and_pass_errors_on,
        publishing_stores_data_and_flag,
        values_round_trip,
    }
    each: ranges::{
        any_range_starts_at_its_exact_byte,
        parts_of_parts_add_up,
        overlapping_pins_show_the_same_memory,
    }
    each: refusals::{
        out_of_bounds_changes_nothing,
        misaligned_accesses_change_nothing,
        nothing_to_copy_is_fine_inside_only,
        impossible_ranges_are_refused,
        memory_that_the_backend_cannot_map_is_refused,
    }
    each: lifetimes::{
        a_pin_has_one_mapping_at_a_time,
        a_mapped_pin_comes_back_from_unpin,
        handles_drop_in_any_order,
        a_session_in_use_comes_back_from_close,
        facts_are_the_backend_s_own,
    }
    each_alone: lifetimes::{
        cycles_leave_nothing_behind,
    }
    each: freed::{
        mapping_freed_memory_is_stale,
        freed_memory_behaves_as_the_backend_says,
    }
    each: threads::{
        threads_copy_pin_and_map_at_once,
    }
    each_alone: forked::{
        a_child_can_use_nothing_of_its_parent_s,
        a_child_s_drops_leave_the_parent_alone,
    }
}
