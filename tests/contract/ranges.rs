//! Any address and any length can be pinned and mapped.

use gdrcopy::DeviceRange;

use crate::common::subject::{Subject, assert_same, downloaded, pattern};

const MIB: usize = 1 << 20;

pub(crate) fn any_range_starts_at_its_exact_byte(subject: &Subject) {
    // Parts of one buffer that is two pages of 2 MiB long and a bit.
    const BYTES: usize = 5 * MIB + 3;
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut wanted = pattern(7, BYTES);
        buffer.upload(0, &wanted).unwrap();
        let starts = [0, 1, 511, 4095, 4097, 65_535, 2 * MIB - 1, 2 * MIB];
        let lengths = [1, 2, 63, 4096, 65_536, 70_000, 2 * MIB + 1];
        let ranges = starts.iter().flat_map(|&start| lengths.map(|len| (start, len)));
        for (start, len) in ranges.chain([(0, BYTES), (BYTES - 1, 1), (BYTES - 70_000, 70_000), (3, 5 * MIB)]) {
            let what = format!("{what}, {len} bytes from {start}");
            let range = DeviceRange::from(&buffer).slice(start..start + len).unwrap();
            let pinned = session.pin(range).unwrap_or_else(|error| panic!("{what}: {error}"));
            let addr = buffer.addr().checked_add(start).unwrap();
            assert_eq!((pinned.addr(), pinned.len()), (addr, len), "{what}");
            let mapping = pinned.map().unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!((mapping.gpu_addr(), mapping.len()), (addr, len), "{what}");
            let here = u64::try_from(mapping.as_ptr().addr()).unwrap();
            assert_eq!(here % 4096, addr.raw() % 4096, "{what}: the place in the page carries over");

            let mut edges = [0; 2];
            mapping.read(0, &mut edges[..1]).unwrap();
            mapping.read(len - 1, &mut edges[1..]).unwrap();
            assert_eq!(edges, [wanted[start], wanted[start + len - 1]], "{what}");
            for at in [0, len - 1] {
                wanted[start + at] ^= 0xff;
                mapping.write(at, &wanted[start + at..=start + at]).unwrap();
                let around = (start + at).saturating_sub(64)..(start + at + 64).min(BYTES);
                let mut seen = vec![0; around.len()];
                buffer.download(around.start, &mut seen).unwrap();
                assert_same(&seen, &wanted[around], &what);
            }
        }
        assert_same(&downloaded(&buffer), &wanted, what);
    });
    subject.for_each_buffer(33 * MIB, |session, buffer, what| {
        let mapping = session.pin(DeviceRange::from(&buffer).slice(1..).unwrap()).unwrap().map().unwrap();
        let mut wanted = pattern(8, 33 * MIB);
        mapping.write(0, &wanted[1..]).unwrap();
        wanted[0] = 0x77;
        buffer.upload(0, &[0x77]).unwrap();
        assert_same(&downloaded(&buffer), &wanted, what);
        let mut back = vec![0; 33 * MIB - 1];
        mapping.read(0, &mut back).unwrap();
        assert_same(&back, &wanted[1..], what);
    });
}

pub(crate) fn parts_of_parts_add_up(subject: &Subject) {
    subject.for_each_buffer(10_000, |session, buffer, what| {
        let part = DeviceRange::from(&buffer).slice(100..=9000).unwrap().slice(1000..).unwrap().slice(..77).unwrap();
        assert_eq!((part.addr(), part.len()), (buffer.addr().checked_add(1100).unwrap(), 77), "{what}");
        buffer.upload(0, &[0; 10_000]).unwrap();
        let mapping = session.pin(part).unwrap().map().unwrap();
        let bytes = pattern(5, 77);
        mapping.write(0, &bytes).unwrap();
        let mut wanted = vec![0; 10_000];
        wanted[1100..1177].copy_from_slice(&bytes);
        assert_same(&downloaded(&buffer), &wanted, what);
    });
}

pub(crate) fn overlapping_pins_show_the_same_memory(subject: &Subject) {
    subject.for_each_buffer(3 * MIB, |session, buffer, what| {
        let map =
            |start, end| session.pin(DeviceRange::from(&buffer).slice(start..end).unwrap()).unwrap().map().unwrap();
        let (whole, part) = (map(0, 3 * MIB), map(4099, 3 * MIB - 1));
        for (seed, at) in [0, 1, 60_000, 3 * MIB - 4101].into_iter().enumerate() {
            let (bytes, mut seen) = (pattern(seed, 1), [0]);
            part.write(at, &bytes).unwrap();
            whole.read(4099 + at, &mut seen).unwrap();
            assert_eq!(seen[..], bytes, "{what}, {at}");
            whole.write(4099 + at, &[!bytes[0]]).unwrap();
            part.read(at, &mut seen).unwrap();
            assert_eq!(seen, [!bytes[0]], "{what}, {at}");
        }
        drop(whole);
        part.write(0, b"still there").unwrap();
        assert_eq!(&downloaded(&buffer)[4099..4110], b"still there", "{what}");
    });
}
