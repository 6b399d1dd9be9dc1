//! The clock of every measurement: the time-stamp counter where it can be trusted, `clock_gettime` elsewhere.
//!
//! A timed region is `LFENCE; RDTSC .. RDTSCP; LFENCE`: nothing before it is still executing when it starts, everything
//! in it has executed when it ends. *Executed* is not *arrived*: neither instruction waits for write-combining buffers
//! to drain, which is why the loops in [`super::measure`] fence between samples and outside the region.

#![allow(unsafe_code, reason = "time-stamp counter, CPUID and clock_gettime")]

use std::arch::asm;
use std::fmt;
use std::time::Duration;

use super::cpu;
use super::num::f64_of;
use super::stats::Samples;

/// How long the counter is compared with the system's clock.
const CALIBRATION: Duration = Duration::from_millis(100);
/// Empty regions timed to learn what timing costs, and how often.
const OVERHEAD_SAMPLES: u32 = 1000;
const OVERHEAD_BATCHES: u32 = 20;
/// Binary places of [`Clock::ps_per_tick`].
const FRACTION_BITS: u32 = 32;

/// Where the ticks come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Invariant time-stamp counter.
    Tsc,
    /// `CLOCK_MONOTONIC_RAW`, in nanoseconds.
    MonotonicRaw,
}

/// The end of a timed region.
#[derive(Debug, Clone, Copy)]
pub struct Stop {
    /// The counter.
    pub ticks: u64,
    /// The CPU it was read on (and, on Linux, its NUMA node): two stops that differ here must not be compared.
    pub cpu: u32,
}

/// A calibrated counter.
#[derive(Debug, Clone)]
pub struct Clock {
    source: Source,
    /// Picoseconds per tick, as fixed point with [`FRACTION_BITS`].
    ps_per_tick: u64,
    overhead_ps: u64,
}

impl Clock {
    /// Picks the counter, calibrates it and measures its overhead. Takes a little over 100 ms of busy waiting, which
    /// also brings the core up to speed. Call it on the CPU that will measure.
    #[must_use]
    pub fn calibrate() -> Self {
        let mut clock = if has_invariant_tsc() { Self::tsc() } else { Self::monotonic() };
        clock.overhead_ps = clock.measure_overhead();
        clock
    }

    fn tsc() -> Self {
        let (tick0, nanos0) = simultaneous();
        while monotonic_raw() - nanos0 < u64::try_from(CALIBRATION.as_nanos()).unwrap_or(u64::MAX) {
            std::hint::spin_loop();
        }
        let (tick1, nanos1) = simultaneous();
        match fixed_point(nanos1 - nanos0, tick1.saturating_sub(tick0)) {
            Some(ps_per_tick) => Self { source: Source::Tsc, ps_per_tick, overhead_ps: 0 },
            // A counter that stands still or crawls is none.
            None => Self::monotonic(),
        }
    }

    fn monotonic() -> Self {
        Self { source: Source::MonotonicRaw, ps_per_tick: 1000 << FRACTION_BITS, overhead_ps: 0 }
    }

    /// The median of the quietest batch: what is subtracted must not be more than what was spent.
    fn measure_overhead(&self) -> u64 {
        let batch = |_| {
            let mut samples = Samples::new();
            for _ in 0..OVERHEAD_SAMPLES {
                cpu::mfence();
                let start = self.start();
                let stop = self.stop();
                samples.record(self.ps(stop.ticks.saturating_sub(start)));
            }
            samples.quantile(0.5)
        };
        (0..OVERHEAD_BATCHES).map(batch).min().unwrap_or(0)
    }

    /// Opens a timed region. Also a compiler barrier.
    #[inline(always)]
    #[must_use]
    pub fn start(&self) -> u64 {
        match self.source {
            Source::Tsc => rdtsc_start(),
            Source::MonotonicRaw => monotonic_raw(),
        }
    }

    /// Closes a timed region. Also a compiler barrier.
    #[inline(always)]
    #[must_use]
    pub fn stop(&self) -> Stop {
        match self.source {
            Source::Tsc => rdtscp_stop(),
            Source::MonotonicRaw => {
                let ticks = monotonic_raw();
                Stop { ticks, cpu: cpu::current().unwrap_or(0) }
            }
        }
    }

    /// Ticks as picoseconds.
    #[must_use]
    pub fn ps(&self, ticks: u64) -> u64 {
        let ps = (u128::from(ticks) * u128::from(self.ps_per_tick)) >> FRACTION_BITS;
        u64::try_from(ps).unwrap_or(u64::MAX)
    }

    /// Times of single regions that differ by less than this many nanoseconds do not differ: the counter is read at both
    /// ends, each time to a whole tick.
    #[must_use]
    pub fn resolution_ns(&self) -> f64 {
        // Of a million times two ticks, since whole picoseconds are coarse for two.
        f64_of(self.ps(2_000_000)) / 1e9
    }

    /// What an empty timed region costs, to be subtracted from every region.
    #[must_use]
    pub fn overhead_ps(&self) -> u64 {
        self.overhead_ps
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            Source::Tsc => {
                let mhz = (1_000_000_u128 << FRACTION_BITS) / u128::from(self.ps_per_tick.max(1));
                write!(f, "invariant TSC, {mhz} MHz")
            }
            Source::MonotonicRaw => f.write_str("CLOCK_MONOTONIC_RAW (no invariant TSC here)"),
        }
    }
}

/// `nanos / ticks` in picoseconds, fixed point; `None` unless a tick is between 1 ps and 100 ns.
fn fixed_point(nanos: u64, ticks: u64) -> Option<u64> {
    let ps = u128::from(nanos) * 1000;
    let fixed = (ps << FRACTION_BITS).checked_div(u128::from(ticks))?;
    let fixed = u64::try_from(fixed).ok()?;
    ((1 << FRACTION_BITS)..=(100_000 << FRACTION_BITS)).contains(&fixed).then_some(fixed)
}

/// Both clocks at one moment: of several attempts the one with the shortest gap between two reads of the counter.
fn simultaneous() -> (u64, u64) {
    let attempt = || {
        let before = rdtsc_start();
        let nanos = monotonic_raw();
        let after = rdtscp_stop().ticks;
        let gap = after.saturating_sub(before);
        (gap, before + gap / 2, nanos)
    };
    let best = (0..32).map(|_| attempt()).min_by_key(|&(gap, ..)| gap);
    best.map_or((0, 0), |(_, ticks, nanos)| (ticks, nanos))
}

/// CPUID says that the counter runs at one rate in all power states, and that RDTSCP exists.
#[allow(unused_unsafe, reason = "CPUID became a safe call after this crate's minimum Rust version")]
fn has_invariant_tsc() -> bool {
    use std::arch::x86_64::__cpuid;
    // SAFETY: every 64-bit x86 CPU has CPUID.
    let highest = unsafe { __cpuid(0x8000_0000) }.eax;
    if highest < 0x8000_0007 {
        return false;
    }
    // SAFETY: as above; the leaf exists, `highest` says so.
    let rdtscp = unsafe { __cpuid(0x8000_0001) }.edx & (1 << 27) != 0;
    // SAFETY: as above.
    let invariant = unsafe { __cpuid(0x8000_0007) }.edx & (1 << 8) != 0;
    rdtscp && invariant
}

#[inline(always)]
fn rdtsc_start() -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: LFENCE and RDTSC touch no memory and only the two registers named; RDTSC is enabled for user code on
    // Linux unless a process gives it up by prctl. Without `nomem` the compiler moves no memory access across.
    unsafe {
        asm!("lfence", "rdtsc", out("rax") low, out("rdx") high, options(nostack, preserves_flags));
    }
    high << 32 | low
}

#[inline(always)]
fn rdtscp_stop() -> Stop {
    let (low, high, aux): (u64, u64, u64);
    // SAFETY: as for `rdtsc_start`, with RCX for TSC_AUX; called only where CPUID reports RDTSCP.
    unsafe {
        asm!("rdtscp", "lfence", out("rax") low, out("rdx") high, out("rcx") aux, options(nostack, preserves_flags));
    }
    Stop { ticks: high << 32 | low, cpu: u32::try_from(aux).unwrap_or(u32::MAX) }
}

fn monotonic_raw() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live timespec. The call cannot fail for this clock, which every supported kernel has.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn agrees_with_the_system(clock: &Clock) {
        // Preemption between the two pairs of reads only lengthens one of them: a few attempts find an undisturbed one.
        let closest = (0..10)
            .map(|_| {
                let (wall, start) = (Instant::now(), clock.start());
                std::thread::sleep(Duration::from_millis(10));
                let (stop, wall) = (clock.stop().ticks, wall.elapsed());
                clock.ps(stop - start).abs_diff(u64::try_from(wall.as_nanos()).unwrap() * 1000)
            })
            .min();
        assert!(closest < Some(20_000_000), "off by {closest:?} ps in 10 ms");
    }

    #[test]
    fn both_sources_keep_time() {
        agrees_with_the_system(&Clock::calibrate());
        agrees_with_the_system(&Clock::monotonic());
    }

    #[test]
    fn overhead_is_small_and_not_nothing() {
        let overhead = Clock::calibrate().overhead_ps();
        assert!((1_000..5_000_000).contains(&overhead), "{overhead} ps");
    }

    #[test]
    fn the_fallback_says_what_it_is() {
        assert!(Clock::monotonic().to_string().contains("CLOCK_MONOTONIC_RAW"));
        let clock =
            Clock { source: Source::Tsc, ps_per_tick: fixed_point(100_000_000, 210_000_000).unwrap(), overhead_ps: 0 };
        assert_eq!(clock.to_string(), "invariant TSC, 2100 MHz");
        assert!((clock.resolution_ns() - 2.0 / 2.1).abs() < 1e-6, "{}", clock.resolution_ns());
        assert_eq!(Clock::monotonic().resolution_ns(), 2.0);
    }

    #[test]
    fn ticks_become_picoseconds() {
        let clock = Clock { source: Source::Tsc, ps_per_tick: fixed_point(100, 200).unwrap(), overhead_ps: 0 };
        assert_eq!(clock.ps(3), 1500);
        assert_eq!(clock.ps(u64::MAX), u64::MAX, "saturates");
    }

    #[test]
    fn a_broken_counter_is_refused() {
        assert_eq!(fixed_point(100_000_000, 0), None, "stands still");
        assert_eq!(fixed_point(100_000_000, 10), None, "crawls");
        assert_eq!(fixed_point(100, 1_000_000), None, "races");
    }
}
