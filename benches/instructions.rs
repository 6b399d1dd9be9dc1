//! One never-inlined function for each verb of the copy path, called a thousand times, for `cargo xtask instructions`: it
//! runs this program under callgrind and holds the instructions of each function against `benches/instructions.txt`.
//!
//! A count is the same on a busy machine as on a quiet one, so a longer path shows where a time would not. A verb's name is
//! that of its function behind `verb_`. Everything goes through the emulated backend; the routine is `GDRCOPY_COPY`'s.

#![allow(unsafe_code, reason = "the functions keep their names, and the bare stores are the measure of the others")]
#![allow(
    clippy::unwrap_used,
    reason = "a program that meets an error should stop there, with the error in its message"
)]

use std::hint::black_box;

use gdrcopy::{BackendKind, Mapping, Result, Session};

/// How often each function is called.
const CALLS: u32 = 1000;
/// What one copy moves at most.
const BYTES: usize = 4096;

/// What a verb is called with: each part in a register of its own, none of them known to the compiler.
type Verb<R> = fn(&Mapping<'_>, usize, &[u8; BYTES], &mut [u8; BYTES], *mut u8) -> Result<R>;

/// The first `N` bytes, of which the compiler knows the number.
fn first<const N: usize>(bytes: &[u8; BYTES]) -> &[u8; N] {
    bytes.first_chunk().unwrap()
}

fn word(bytes: &[u8; BYTES]) -> u64 {
    u64::from_ne_bytes(*first(bytes))
}

/// `N`, of which the compiler knows nothing.
#[inline(always)]
fn unknown<const N: usize>() -> usize {
    black_box(N)
}

/// Defines the functions and lists them. Each gets the mapping, an offset, bytes to write, room to read into, and the
/// window's address of that offset.
macro_rules! verbs {
    ($list:ident -> $result:ty: $($name:ident($mapping:pat, $offset:pat, $from:pat, $to:pat, $at:pat) $body:block)+) => {
        $(
            #[unsafe(no_mangle)]
            #[inline(never)]
            fn $name(
                $mapping: &Mapping<'_>,
                $offset: usize,
                $from: &[u8; BYTES],
                $to: &mut [u8; BYTES],
                $at: *mut u8,
            ) -> Result<$result> $body
        )+
        const $list: &[Verb<$result>] = &[$($name),+];
    };
}

verbs! { STORES -> ():
    verb_bare_store_8(_, _, from, _, at) {
        // SAFETY: `at` is the start of the window, which is larger.
        unsafe { at.cast::<u64>().write_volatile(word(from)) };
        Ok(())
    }
    verb_bare_store_24(_, _, from, _, at) {
        // SAFETY: as above.
        unsafe { at.cast::<[u8; 24]>().write_volatile(*first(from)) };
        Ok(())
    }
    verb_bare_store_48(_, _, from, _, at) {
        // SAFETY: as above.
        unsafe { at.cast::<[u8; 48]>().write_volatile(*first(from)) };
        Ok(())
    }
    verb_bare_store_64(_, _, from, _, at) {
        // SAFETY: as above.
        unsafe { at.cast::<[u8; 64]>().write_volatile(*first(from)) };
        Ok(())
    }
    verb_write_8(mapping, offset, from, _, _) { mapping.write(offset, first::<8>(from)) }
    verb_write_64(mapping, offset, from, _, _) { mapping.write(offset, first::<64>(from)) }
    verb_write_61_odd(mapping, offset, from, _, _) { mapping.write(offset + 3, first::<61>(from)) }
    verb_write_1024(mapping, offset, from, _, _) { mapping.write(offset, first::<1024>(from)) }
    verb_write_posted_8(mapping, offset, from, _, _) { mapping.write_posted(offset, first::<8>(from)) }
    verb_write_posted_64(mapping, offset, from, _, _) { mapping.write_posted(offset, first::<64>(from)) }
    verb_write_posted_any_8(mapping, offset, from, _, _) { mapping.write_posted(offset, &from[..unknown::<8>()]) }
    verb_write_posted_any_40(mapping, offset, from, _, _) { mapping.write_posted(offset, &from[..unknown::<40>()]) }
    verb_write_posted_any_64(mapping, offset, from, _, _) { mapping.write_posted(offset, &from[..unknown::<64>()]) }
    verb_write_value_8(mapping, offset, from, _, _) { mapping.write_value(offset, first::<8>(from)) }
    verb_write_value_64(mapping, offset, from, _, _) { mapping.write_value(offset, first::<64>(from)) }
    verb_write_value_posted_8(mapping, offset, from, _, _) { mapping.write_value_posted(offset, first::<8>(from)) }
    verb_write_value_posted_24(mapping, offset, from, _, _) { mapping.write_value_posted(offset, first::<24>(from)) }
    verb_write_value_posted_48(mapping, offset, from, _, _) { mapping.write_value_posted(offset, first::<48>(from)) }
    verb_write_value_posted_64(mapping, offset, from, _, _) { mapping.write_value_posted(offset, first::<64>(from)) }
    verb_store_u32(mapping, offset, from, _, _) { mapping.store_u32(offset, u32::from_ne_bytes(*first(from))) }
    verb_store_u64(mapping, offset, from, _, _) { mapping.store_u64(offset, word(from)) }
    verb_store_u64_posted(mapping, offset, from, _, _) { mapping.store_u64_posted(offset, word(from)) }
    verb_post_line(mapping, offset, from, _, _) { mapping.post_line(offset, first(from)) }
    verb_batch_16_lines(mapping, offset, from, _, _) {
        mapping.batch(|batch| (0..16).try_for_each(|line| batch.post_line(offset + line * 64, first(from))))
    }
    verb_publish_64(mapping, offset, from, _, _) {
        mapping.publish(offset, first::<64>(from), offset + 128, word(from))
    }
    verb_read_8(mapping, offset, _, to, _) { mapping.read(offset, &mut to[..8]) }
    verb_read_64(mapping, offset, _, to, _) { mapping.read(offset, &mut to[..64]) }
    verb_read_61_odd(mapping, offset, _, to, _) { mapping.read(offset + 3, &mut to[..61]) }
    verb_read_1024(mapping, offset, _, to, _) { mapping.read(offset, &mut to[..1024]) }
    verb_flush(mapping, _, _, _, _) { mapping.flush() }
}

verbs! { LOADS -> u64:
    verb_load_u64(mapping, offset, _, _, _) { mapping.load_u64(offset) }
    verb_read_value_8(mapping, offset, _, _, _) { mapping.read_value::<u64>(offset) }
}

fn call<R>(verbs: &[Verb<R>], mapping: &Mapping<'_>) {
    let (from, mut to) = ([0x5a; BYTES], [0; BYTES]);
    for verb in verbs {
        for _ in 0..CALLS {
            let at = mapping.as_ptr();
            black_box(verb)(mapping, black_box(0), black_box(&from), black_box(&mut to), at).unwrap();
        }
    }
}

fn main() {
    let session = Session::builder().backend(BackendKind::Emulated).open().unwrap();
    let buffer = session.alloc(2 * BYTES).unwrap();
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    call(STORES, &mapping);
    call(LOADS, &mapping);
    let (verbs, routine) = (STORES.len() + LOADS.len(), mapping.routine().name());
    println!("{CALLS} calls of each of {verbs} verbs, routine {routine}: `cargo xtask instructions` counts them");
}
