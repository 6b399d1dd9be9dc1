//! The name by which a shared library is known to the loader.

/// `DT_STRTAB`, `DT_SONAME` and `PT_LOAD`, `PT_DYNAMIC` (System V ABI, ELF-64).
const STRTAB: u64 = 5;
const SONAME: u64 = 14;
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;

struct File<'a>(&'a [u8]);

impl File<'_> {
    fn part<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let at = usize::try_from(at).ok()?;
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn u16(&self, at: u64) -> Option<u64> {
        self.part(at).map(|bytes| u64::from(u16::from_le_bytes(bytes)))
    }

    fn u32(&self, at: u64) -> Option<u32> {
        self.part(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: u64) -> Option<u64> {
        self.part(at).map(u64::from_le_bytes)
    }

    fn text(&self, at: u64) -> Option<String> {
        let rest = self.0.get(usize::try_from(at).ok()?..)?;
        let end = rest.iter().position(|&byte| byte == 0)?;
        String::from_utf8(rest[..end].to_vec()).ok()
    }

    /// Program headers: type, file offset, address, size in the file.
    fn segments(&self) -> Option<Vec<(u32, u64, u64, u64)>> {
        let (table, size, count) = (self.u64(32)?, self.u16(54)?, self.u16(56)?);
        (0..count)
            .map(|number| {
                let at = table.checked_add(number * size)?;
                Some((self.u32(at)?, self.u64(at + 8)?, self.u64(at + 16)?, self.u64(at + 32)?))
            })
            .collect()
    }
}

/// The SONAME of a 64-bit little-endian library; `None` where there is none, or it is something else.
pub(super) fn soname(bytes: &[u8]) -> Option<String> {
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let file = File(bytes);
    let segments = file.segments()?;
    let &(_, start, _, size) = segments.iter().find(|(kind, ..)| *kind == DYNAMIC)?;
    let entries = (0..size / 16).map_while(|number| {
        let at = start.checked_add(number * 16)?;
        Some((file.u64(at)?, file.u64(at + 8)?))
    });
    let entries: Vec<_> = entries.take_while(|(tag, _)| *tag != 0).collect();
    let value = |wanted| entries.iter().find(|(tag, _)| *tag == wanted).map(|(_, value)| *value);
    let (strings, name) = (value(STRTAB)?, value(SONAME)?);
    // The table is named by its address, which a loaded segment has in the file.
    let holds =
        |&&(kind, _, addr, size): &&(u32, u64, u64, u64)| kind == LOAD && strings >= addr && strings - addr < size;
    let &(_, offset, addr, _) = segments.iter().find(holds)?;
    file.text(offset.checked_add(strings - addr)?.checked_add(name)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_has_a_name() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path =
            maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc.so"));
        let bytes = std::fs::read(path.expect("a C library")).unwrap();
        assert_eq!(soname(&bytes).as_deref(), Some("libc.so.6"));
        // Every shorter beginning of it is something that was cut off, and no reason to panic.
        for len in (0..4096).chain([bytes.len() / 2]) {
            let _ = soname(&bytes[..len]);
        }
    }

    #[test]
    fn programs_and_text_have_none() {
        assert_eq!(soname(&std::fs::read("/proc/self/exe").unwrap()), None);
        assert_eq!(soname(b"not a library"), None);
        assert_eq!(soname(b"\x7fELF\x02\x01"), None);
    }
}
