//! The routine table: what a leaf provides, how a copy is made from it, and which leaf is used.

use std::sync::OnceLock;

use super::fence;
use super::fixed::LineStore;
use super::plan::{LINE_BYTES, Plan};
use super::routine::Routine;
use super::scalar::Scalar;
use super::x86_64::{self as isa, Avx2, Avx512, Movdir64b, Sse41};
use crate::error::{Error, ErrorKind, Feature, Result};

/// Something that a leaf's instructions need of the processor or the operating system.
pub(super) struct Need {
    pub(super) name: &'static str,
    pub(super) present: fn() -> bool,
}

/// One instruction set: four primitives on lines, from which [`store`] and [`Leaf::load`] make every copy.
///
/// Common duties: the device range and the host range are valid for the stated bytes and do not overlap, and
/// [`Leaf::is_available`] holds. No primitive fences.
pub(super) trait Leaf: Sized {
    const NAME: &'static str;
    /// Empty for instructions that every x86-64 has.
    const NEEDS: &'static [Need];
    /// How a line is stored where the store is inlined.
    const LINE: LineStore;

    fn is_available() -> bool {
        Self::NEEDS.iter().all(|need| (need.present)())
    }

    /// Stores `lines` whole lines at `dst`, a multiple of 64.
    unsafe fn store_lines(dst: *mut u8, src: *const u8, lines: usize);

    /// Stores 1 to 63 bytes that lie inside one line.
    unsafe fn store_part(dst: *mut u8, src: *const u8, len: usize);

    /// Loads `lines` whole lines at `src`, a multiple of 64, each once.
    unsafe fn load_lines(dst: *mut u8, src: *const u8, lines: usize);

    /// Loads 1 to 63 bytes that lie inside one line; may load that whole line, and no other.
    unsafe fn load_part(dst: *mut u8, src: *const u8, len: usize);

    /// Loads `len` bytes; a line that the range touches is loaded once.
    ///
    /// Begins with LFENCE. A load that the processor begins behind a branch that it guessed wrong is thrown away when it
    /// arrives, and the same line cannot be asked for again before that: the copy takes two round trips. Behind the fence
    /// all branches of before are decided. Measured on an H200 with calls that nothing foretells, 16 lines: 2.02 us
    /// without, 1.07 us for those that were guessed right. What follows once a core's fill buffers are taken needs no
    /// fence, for there the guess is put right before a buffer is free.
    ///
    /// # Safety
    ///
    /// The common duties, for `len` bytes at `dst` and for the whole lines around `len` bytes at `src`.
    unsafe fn load(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the same duties.
        unsafe { load_in_parts::<Self>(dst, src, len) };
    }
}

/// Stores `len` bytes, each once.
///
/// # Safety
///
/// The duties of [`Leaf`], for `len` bytes at `dst` and `src`.
pub(super) unsafe fn store<L: Leaf>(dst: *mut u8, src: *const u8, len: usize) {
    if len == LINE_BYTES && dst.addr().is_multiple_of(LINE_BYTES) {
        // The message that fills its line is what most senders send.
        // SAFETY: one line on both sides, at a multiple of 64.
        return unsafe { L::store_lines(dst, src, 1) };
    }
    let Plan { head_bytes, lines, tail_bytes } = Plan::new(dst.addr(), len);
    if head_bytes > 0 {
        // SAFETY: the head ends at the range's end or at the first line boundary, whichever is first.
        unsafe { L::store_part(dst, src, head_bytes) };
    }
    let (dst, src) = (dst.wrapping_add(head_bytes), src.wrapping_add(head_bytes));
    if lines > 0 {
        // SAFETY: behind the head `dst` is a multiple of 64, and the plan's whole lines fit in the range.
        unsafe { L::store_lines(dst, src, lines) };
    }
    let (dst, src) = (dst.wrapping_add(lines * LINE_BYTES), src.wrapping_add(lines * LINE_BYTES));
    if tail_bytes > 0 {
        // SAFETY: the tail starts on a line boundary and is shorter than a line.
        unsafe { L::store_part(dst, src, tail_bytes) };
    }
}

/// [`Leaf::load`] by the other primitives.
///
/// # Safety
///
/// As [`Leaf::load`].
pub(super) unsafe fn load_in_parts<L: Leaf>(dst: *mut u8, src: *const u8, len: usize) {
    let Plan { head_bytes, lines, tail_bytes } = Plan::new(src.addr(), len);
    let body = head_bytes;
    let tail = body + lines * LINE_BYTES;
    fence::load();
    // Nothing here waits for loaded data, so the processor has all these loads in flight at once.
    if head_bytes > 0 {
        // SAFETY: the head ends at the range's end or at the first line boundary, whichever is first.
        unsafe { L::load_part(dst, src, head_bytes) };
    }
    if tail_bytes > 0 {
        // SAFETY: the tail starts on a line boundary and is shorter than a line.
        unsafe { L::load_part(dst.wrapping_add(tail), src.wrapping_add(tail), tail_bytes) };
    }
    if lines > 0 {
        // SAFETY: behind the head `src` is a multiple of 64, and the plan's whole lines fit in the range.
        unsafe { L::load_lines(dst.wrapping_add(body), src.wrapping_add(body), lines) };
    }
}

static SCALAR: Routine = Routine::of::<Scalar>();

/// The routine that makes single accesses of up to 8 bytes only.
pub(crate) fn scalar_routine() -> &'static Routine {
    &SCALAR
}

static SSE41: Routine = Routine::of::<Sse41>();
static AVX2: Routine = Routine::of::<Avx2>();
static AVX512: Routine = Routine::of::<Avx512>();

// MOVDIR64B only stores, and only whole lines. The rest comes from another leaf, so there is one such routine per leaf.
static MOVDIR64B_AVX512: Routine = Routine::of::<Movdir64b<Avx512>>();
static MOVDIR64B_AVX2: Routine = Routine::of::<Movdir64b<Avx2>>();
static MOVDIR64B_SSE41: Routine = Routine::of::<Movdir64b<Sse41>>();
static MOVDIR64B_SCALAR: Routine = Routine::of::<Movdir64b<Scalar>>();

/// MOVDIR64B over the best of the other leaves.
fn movdir64b() -> &'static Routine {
    if Avx512::is_available() {
        &MOVDIR64B_AVX512
    } else if Avx2::is_available() {
        &MOVDIR64B_AVX2
    } else if Sse41::is_available() {
        &MOVDIR64B_SSE41
    } else {
        &MOVDIR64B_SCALAR
    }
}

/// The routines that [`routines`] has on some processors only, by a name of their own.
#[cfg(test)]
pub(super) fn hidden() -> [(&'static str, &'static Routine); 3] {
    [
        ("movdir64b_avx2", &MOVDIR64B_AVX2),
        ("movdir64b_sse41", &MOVDIR64B_SSE41),
        ("movdir64b_scalar", &MOVDIR64B_SCALAR),
    ]
}

/// Every routine this library was built with, available here or not, from the plainest to the most special.
#[must_use]
pub fn routines() -> &'static [&'static Routine] {
    static TABLE: OnceLock<[&'static Routine; 5]> = OnceLock::new();
    TABLE.get_or_init(|| [&SCALAR, &SSE41, &AVX2, &AVX512, movdir64b()])
}

/// The routine for this processor, resolved once per process: where one has to do for all sizes, and for whole lines. A
/// session's [policy](crate::Policy::built_in) may store other sizes with another.
///
/// `"avx512"` where it was measured to win, which is on Intel processors that also have MOVDIR64B (Sapphire Rapids and
/// later); else `"avx2"`, else `"sse41"`, else `"scalar"`.
///
/// The measurement, on an Emerald Rapids Xeon and an H200's BAR1 behind PCIe Gen5 x16 (`limits-first.json` in
/// `benches/record/2026-12-01-h200`): a posted line takes 3.09 ns with AVX-512, 3.22 ns with AVX2 and 4.83 ns with
/// MOVDIR64B; at 512 KiB one core stores 18.0, 18.4 and 15.1 GB/s, and loads 0.97 GB/s with AVX-512, 0.80 with AVX2.
/// Up to 512 bytes loads are bound by the round trip and alike from AVX2 up. Elsewhere 512-bit accesses
/// are unmeasured, are split in two (Zen 4), or were reported to load one line per round trip (GDRCopy issue 24).
/// `"movdir64b"` is for those who need [`Routine::post_line_is_atomic`]; it is never the default.
#[must_use]
pub fn preferred() -> &'static Routine {
    static PREFERRED: OnceLock<&'static Routine> = OnceLock::new();
    PREFERRED.get_or_init(|| {
        let wins = isa::vendor_is_intel() && isa::has_movdir64b();
        choose(wins, [&AVX512, &AVX2, &SSE41].map(|routine| (routine, routine.is_available())))
    })
}

/// The first available candidate, AVX-512 only where it wins.
fn choose(avx512_wins: bool, candidates: [(&'static Routine, bool); 3]) -> &'static Routine {
    let eligible = |name| avx512_wins || name != Avx512::NAME;
    let mut usable = candidates.into_iter().filter(|&(routine, available)| available && eligible(routine.name()));
    usable.next().map_or(&SCALAR, |(routine, _)| routine)
}

const OP: &str = "copy routine";

/// The routine called `name`, as users spell it in `GDRCOPY_COPY`.
///
/// # Errors
///
/// - [`ErrorKind::InvalidArgument`] for a name that is none; the message lists those there are;
/// - [`ErrorKind::UnsupportedFeature`]\([`Feature::CopyRoutine`]\) if this machine lacks what the routine needs; the
///   message says what that is.
pub fn by_name(name: &str) -> Result<&'static Routine> {
    find(routines(), name)
}

fn find(table: &[&'static Routine], name: &str) -> Result<&'static Routine> {
    let names = |only: fn(&Routine) -> bool| {
        let names: Vec<_> = table.iter().filter(|routine| only(routine)).map(|routine| routine.name()).collect();
        names.join(", ")
    };
    let Some(&routine) = table.iter().find(|routine| routine.name() == name) else {
        let cause = format!("there is no routine {name:?}");
        let remedy = format!("choose one of {}", names(|_| true));
        return Err(Error::new(OP, ErrorKind::InvalidArgument, cause).remedy(remedy));
    };
    if !routine.is_available() {
        let missing: Vec<_> = routine.needs().iter().filter(|need| !(need.present)()).map(|need| need.name).collect();
        let cause = format!("{name} needs {}, which this processor or operating system lacks", missing.join(", "));
        let remedy = format!("choose one of {}, or name none for the best of them", names(Routine::is_available));
        return Err(Error::new(OP, ErrorKind::UnsupportedFeature(Feature::CopyRoutine), cause).remedy(remedy));
    }
    Ok(routine)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A leaf for a machine that never was.
    struct Absent;

    impl Leaf for Absent {
        const NAME: &'static str = "absent";
        const LINE: LineStore = LineStore::WORDS;
        const NEEDS: &'static [Need] =
            &[Need { name: "SSE2", present: || true }, Need { name: "a flux capacitor", present: || false }];

        unsafe fn store_lines(_: *mut u8, _: *const u8, _: usize) {}
        unsafe fn store_part(_: *mut u8, _: *const u8, _: usize) {}
        unsafe fn load_lines(_: *mut u8, _: *const u8, _: usize) {}
        unsafe fn load_part(_: *mut u8, _: *const u8, _: usize) {}
    }

    static ABSENT: Routine = Routine::of::<Absent>();

    #[test]
    fn names_are_stable_and_found() {
        let names: Vec<_> = routines().iter().map(|routine| routine.name()).collect();
        assert_eq!(names, ["scalar", "sse41", "avx2", "avx512", "movdir64b"]);
        for &routine in routines().iter().filter(|routine| routine.is_available()) {
            assert!(std::ptr::eq(by_name(routine.name()).expect("available"), routine));
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        for name in ["", "AVX2", "avx2 ", "memcpy"] {
            let error = by_name(name).expect_err("no such routine");
            assert_eq!((error.op(), error.kind()), ("copy routine", ErrorKind::InvalidArgument));
            assert!(error.to_string().ends_with("choose one of scalar, sse41, avx2, avx512, movdir64b"), "{error}");
        }
    }

    #[test]
    fn an_absent_routine_says_what_is_missing() {
        let error = find(&[&SCALAR, &ABSENT], "absent").expect_err("not available");
        assert_eq!(error.kind(), ErrorKind::UnsupportedFeature(Feature::CopyRoutine));
        assert_eq!(
            error.to_string(),
            "copy routine: absent needs a flux capacitor, which this processor or operating system lacks; \
             choose one of scalar, or name none for the best of them"
        );
    }

    #[test]
    fn preference() {
        let pick = |wins, available: [bool; 3]| {
            let [z, y, x] = available;
            choose(wins, [(&AVX512, z), (&AVX2, y), (&SSE41, x)]).name()
        };
        assert_eq!(pick(true, [true, true, true]), "avx512");
        assert_eq!(pick(false, [true, true, true]), "avx2");
        assert_eq!(pick(true, [false, true, true]), "avx2");
        assert_eq!(pick(false, [true, false, true]), "sse41");
        assert_eq!(pick(true, [false, false, false]), "scalar");
    }

    #[test]
    fn the_preferred_routine_is_available_and_stays() {
        assert!(preferred().is_available());
        assert!(std::ptr::eq(preferred(), preferred()));
    }

    #[test]
    fn only_movdir64b_promises_an_atomic_line() {
        for routine in routines() {
            assert_eq!(routine.post_line_is_atomic(), routine.name() == "movdir64b");
        }
    }
}
