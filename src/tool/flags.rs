//! Sizes, lists and ranges on the command line.

use std::fmt;

/// Most values a list or range may name: a grid of more cells than this would not end.
pub const MAX_VALUES: usize = 65_536;

/// Reads a number of bytes: `4096`, `64K`, `16MiB`, `1GB`. Every suffix is a power of two, as upstream's sizes are.
///
/// # Errors
///
/// Not a number, an unknown suffix, or more than 64 bits hold; the text is fit for the user.
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let number: u64 = match number {
        "" => return Err(format!("'{text}' is not a size; write bytes or 64K, 16M, 1G")),
        _ => number.parse().map_err(|_| format!("'{text}' is more than 64 bits hold"))?,
    };
    let shift = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "ki" | "kb" | "kib" => 10,
        "m" | "mi" | "mb" | "mib" => 20,
        "g" | "gi" | "gb" | "gib" => 30,
        other => return Err(format!("'{other}' is not a unit of size; write bytes or K, M, G (powers of two)")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is more than 64 bits hold"))
}

/// A size of at least one byte.
///
/// # Errors
///
/// As [`bytes`], and for 0.
pub fn positive_bytes(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        0 => Err("a size of 0 bytes has nothing to measure; name at least 1".to_owned()),
        n => Ok(n),
    }
}

/// How a range `A-B` without a step goes from A to B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// A, 2A, 4A, .. up to B: sizes.
    Doubling,
    /// A, A+1, A+2, .. B: offsets.
    Each,
}

/// The values of a list, in the order given, without repetition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Values(pub Vec<u64>);

impl Values {
    /// The largest; 0 for none.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// `1, 2, 4, ..` up to `last`.
    #[must_use]
    pub fn powers_up_to(last: u64) -> Self {
        Self(std::iter::successors(Some(1_u64), |n| n.checked_mul(2)).take_while(|&n| n <= last).collect())
    }
}

/// Sizes: `64,4K`, `1-1M` (doubling), `1-256:1` (every 1), or a mixture.
///
/// # Errors
///
/// As [`positive_bytes`]; a range that runs backwards, a step of 0, more than [`MAX_VALUES`] values.
pub fn sizes(text: &str) -> Result<Values, String> {
    values(text, Walk::Doubling, positive_bytes)
}

/// Offsets: `0,1,63`, `0-63` (each), `0-4K:64` (every 64), or a mixture.
///
/// # Errors
///
/// As for [`sizes`], but 0 is a good offset.
pub fn offsets(text: &str) -> Result<Values, String> {
    values(text, Walk::Each, bytes)
}

fn values(text: &str, walk: Walk, value: fn(&str) -> Result<u64, String>) -> Result<Values, String> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let Some((first, rest)) = part.split_once('-') else {
            all.push(value(part)?);
            continue;
        };
        let (last, step) = match rest.split_once(':') {
            Some((last, step)) => (last, Some(positive_bytes(step)?)),
            None => (rest, None),
        };
        let (first, last) = (value(first)?, value(last)?);
        if first > last {
            return Err(format!("the range '{part}' runs backwards; write {last}-{first}"));
        }
        let next = |n: &u64| match (step, walk) {
            (Some(step), _) => n.checked_add(step),
            (None, Walk::Each) => n.checked_add(1),
            (None, Walk::Doubling) => n.checked_mul(2),
        };
        all.extend(std::iter::successors(Some(first), next).take_while(|&n| n <= last).take(MAX_VALUES + 1));
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|&n| seen.insert(n));
    if all.len() > MAX_VALUES {
        return Err(format!("'{text}' names more than {MAX_VALUES} values; give a larger step, as in 0-1M:64"));
    }
    Ok(Values(all))
}

/// A number of bytes for people: exact, with a binary prefix where it divides evenly. The unit `B` is left to the caller
/// (or the column's title).
#[derive(Debug, Clone, Copy)]
pub struct Binary(pub u64);

impl fmt::Display for Binary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            n if n >= 1 << 30 && n.trailing_zeros() >= 30 => format!("{}Gi", n >> 30),
            n if n >= 1 << 20 && n.trailing_zeros() >= 20 => format!("{}Mi", n >> 20),
            n if n >= 1 << 10 && n.trailing_zeros() >= 10 => format!("{}Ki", n >> 10),
            n => n.to_string(),
        };
        f.pad(&text)
    }
}

/// A size in a sentence: `64 KiB`, `1000 B`.
#[must_use]
pub fn size_in_words(n: u64) -> String {
    let text = Binary(n).to_string();
    match text.find(char::is_alphabetic) {
        Some(unit) => format!("{} {}B", &text[..unit], &text[unit..]),
        None => format!("{text} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes() {
        let table = [
            ("0", 0),
            ("7", 7),
            ("7B", 7),
            ("4k", 4096),
            ("4Ki", 4096),
            ("4 KiB", 4096),
            ("16M", 16 << 20),
            ("16MB", 16 << 20),
            ("1g", 1 << 30),
            ("17179869183G", (u64::MAX >> 30) << 30),
        ];
        for (text, n) in table {
            assert_eq!(bytes(text), Ok(n), "{text}");
        }
    }

    #[test]
    fn not_sizes() {
        let table = [
            ("", "not a size"),
            ("K", "not a size"),
            ("-1", "not a size"),
            ("1.5K", "not a unit"),
            ("4X", "not a unit"),
            ("4KK", "not a unit"),
            ("17179869184G", "64 bits"),
            ("18446744073709551616", "64 bits"),
        ];
        for (text, why) in table {
            let error = bytes(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn lists_and_ranges() {
        assert_eq!(sizes("1-16").unwrap().0, [1, 2, 4, 8, 16]);
        assert_eq!(sizes("3-20").unwrap().0, [3, 6, 12]);
        assert_eq!(sizes("60-64:1").unwrap().0, [60, 61, 62, 63, 64]);
        assert_eq!(sizes("4K,1,1-4").unwrap().0, [4096, 1, 2, 4]);
        assert_eq!(sizes("1K-4K").unwrap().0, [1024, 2048, 4096]);
        assert_eq!(offsets("0-3,64").unwrap().0, [0, 1, 2, 3, 64]);
        assert_eq!(offsets("0-256:64").unwrap().0, [0, 64, 128, 192, 256]);
        assert_eq!(offsets(&format!("{0}-{0}", u64::MAX)).unwrap().0, [u64::MAX]);
    }

    #[test]
    fn bad_lists() {
        let table = [
            ("", "not a size"),
            ("1,,2", "not a size"),
            ("1-", "not a size"),
            ("0", "at least 1"),
            ("0-64", "at least 1"),
            ("8-4", "write 4-8"),
            ("1-8:0", "at least 1"),
            ("1-1G:1", "larger step"),
            ("1-4-8", "not a unit"),
        ];
        for (text, why) in table {
            let error = sizes(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn powers() {
        assert_eq!(Values::powers_up_to(1).0, [1]);
        assert_eq!(Values::powers_up_to(100).0, [1, 2, 4, 8, 16, 32, 64]);
        assert_eq!(Values::powers_up_to(16 << 20).0.len(), 25);
        assert_eq!(Values::powers_up_to(u64::MAX).largest(), 1 << 63);
    }

    #[test]
    fn sizes_for_people() {
        let table = [(1, "1", "1 B"), (1000, "1000", "1000 B"), (1024, "1Ki", "1 KiB"), (1536, "1536", "1536 B")];
        for (n, short, long) in table {
            assert_eq!((Binary(n).to_string().as_str(), size_in_words(n).as_str()), (short, long));
        }
        assert_eq!(size_in_words(16 << 20), "16 MiB");
        assert_eq!(format!("[{:>6}]", Binary(64 << 10)), "[  64Ki]");
    }
}
