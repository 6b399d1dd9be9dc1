//! What is written is what the device has, and the other way round.

use gdrcopy::{DeviceBuffer, ErrorKind, Feature, Mapping};

use crate::common::subject::{Subject, assert_same, downloaded, pattern};

const BYTES: usize = 70_000;
const OFFSETS: [usize; 12] = [0, 1, 3, 7, 8, 63, 64, 65, 1000, 4095, 4096, 65_535];
const SIZES: [usize; 20] = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 129, 4096, 4097, 4465];

/// A mapped buffer, and what should be in it.
struct Mirror<'a> {
    buffer: &'a DeviceBuffer,
    mapping: Mapping<'a>,
    wanted: Vec<u8>,
    what: &'a str,
}

impl<'a> Mirror<'a> {
    fn new(session: &gdrcopy::Session, buffer: &'a DeviceBuffer, what: &'a str) -> Self {
        let wanted = pattern(1, buffer.len());
        buffer.upload(0, &wanted).unwrap();
        let mapping = session.pin(buffer).unwrap().map().unwrap();
        assert_eq!((mapping.len(), mapping.gpu_addr()), (buffer.len(), buffer.addr()), "{what}");
        Self { buffer, mapping, wanted, what }
    }

    /// `bytes` were stored at `offset`: the device has them there, and everything else as before.
    #[track_caller]
    fn has(&mut self, offset: usize, bytes: &[u8], how: &str) {
        self.wanted[offset..offset + bytes.len()].copy_from_slice(bytes);
        assert_same(&downloaded(self.buffer), &self.wanted, &format!("{}, {how} at {offset}", self.what));
    }
}

pub(crate) fn round_trips_at_odd_offsets_and_sizes(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut mirror = Mirror::new(session, &buffer, what);
        for (seed, offset) in OFFSETS.into_iter().enumerate() {
            for len in SIZES.into_iter().chain([BYTES - offset]) {
                let bytes = pattern(seed * 1000 + len, len);
                mirror.mapping.write(offset, &bytes).unwrap();
                let mut back = vec![0; len];
                mirror.mapping.read(offset, &mut back).unwrap();
                assert_same(&back, &bytes, &format!("{what}, read at {offset}"));
                mirror.has(offset, &bytes, "write");
            }
        }
        for (at, byte) in [(0, 0x5a), (BYTES - 1, 0xa5)] {
            mirror.mapping.write(at, &[byte]).unwrap();
            mirror.has(at, &[byte], "write of one byte");
        }
    });
}

pub(crate) fn the_device_s_own_writes_are_read(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mirror = Mirror::new(session, &buffer, what);
        let mut back = vec![0; BYTES];
        mirror.mapping.read(0, &mut back).unwrap();
        assert_same(&back, &mirror.wanted, what);
        for (seed, offset) in OFFSETS.into_iter().enumerate() {
            for len in SIZES {
                let (len, from) = (len.min(BYTES - offset), pattern(seed * 777 + len, len));
                buffer.upload(offset, &from[..len]).unwrap();
                mirror.mapping.read(offset, &mut back[..len]).unwrap();
                assert_same(&back[..len], &from[..len], &format!("{what}, read at {offset}"));
            }
        }
        buffer.upload(BYTES - 8, &7_u64.to_ne_bytes()).unwrap();
        assert_eq!(mirror.mapping.load_u64(BYTES - 8).unwrap(), 7, "{what}");
        assert_eq!(mirror.mapping.load_u32(BYTES - 8).unwrap(), 7, "{what}");
    });
}

pub(crate) fn single_accesses_land_where_they_should(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut mirror = Mirror::new(session, &buffer, what);
        for at in [0, 4, 60, 4092, BYTES - 4] {
            let value = u32::try_from(0x0102_0304 + at).unwrap();
            mirror.mapping.store_u32(at, value).unwrap();
            assert_eq!(mirror.mapping.load_u32(at).unwrap(), value, "{what}");
            mirror.has(at, &value.to_ne_bytes(), "store_u32");
        }
        for at in [0, 8, 56, 4088, BYTES - 8] {
            let value = 0x0102_0304_0506_0708 + u64::try_from(at).unwrap();
            mirror.mapping.store_u64(at, value).unwrap();
            assert_eq!(mirror.mapping.load_u64(at).unwrap(), value, "{what}");
            mirror.has(at, &value.to_ne_bytes(), "store_u64");
        }
        for at in [0, 64, 4032] {
            let line: [u8; 64] = pattern(at, 64).try_into().unwrap();
            mirror.mapping.post_line(at, &line).unwrap();
            mirror.mapping.flush().unwrap();
            mirror.has(at, &line, "post_line");
        }
    });
}

pub(crate) fn posted_writes_arrive_after_a_flush(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut mirror = Mirror::new(session, &buffer, what);
        for (seed, len) in SIZES.into_iter().enumerate() {
            let bytes = pattern(seed, len);
            mirror.mapping.write_posted(seed * 31, &bytes).unwrap();
            mirror.mapping.flush().unwrap();
            mirror.has(seed * 31, &bytes, "write_posted");
        }
        mirror.mapping.store_u32_posted(12, 0xdead_beef).unwrap();
        mirror.mapping.flush().unwrap();
        mirror.has(12, &0xdead_beef_u32.to_ne_bytes(), "store_u32_posted");
        mirror.mapping.store_u64_posted(24, 0xfeed_beef).unwrap();
        mirror.mapping.flush().unwrap();
        mirror.has(24, &0xfeed_beef_u64.to_ne_bytes(), "store_u64_posted");
    });
}

pub(crate) fn batches_arrive_and_pass_errors_on(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut mirror = Mirror::new(session, &buffer, what);
        let line = [9; 64];
        let answer = mirror.mapping.batch(|batch| {
            batch.write(3, b"scattered")?;
            batch.store_u32(16, 1)?;
            batch.store_u64(24, 2)?;
            batch.post_line(64, &line)?;
            Ok("the closure's own")
        });
        assert_eq!(answer.unwrap(), "the closure's own");
        mirror.mapping.flush().unwrap();
        mirror.wanted[3..12].copy_from_slice(b"scattered");
        mirror.wanted[16..20].copy_from_slice(&1_u32.to_ne_bytes());
        mirror.wanted[24..32].copy_from_slice(&2_u64.to_ne_bytes());
        mirror.has(64, &line, "batch");

        let failed = mirror.mapping.batch(|batch| {
            batch.write(200, b"kept")?;
            batch.write(BYTES, b"refused")?;
            batch.write(300, b"never reached")
        });
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfBounds, "{what}");
        mirror.mapping.flush().unwrap();
        mirror.has(200, b"kept", "batch");
    });
}

pub(crate) fn publishing_stores_data_and_flag(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut mirror = Mirror::new(session, &buffer, what);
        if !mirror.mapping.publish_is_ordered() {
            let refused = mirror.mapping.publish(0, b"data", 64, 1_u32).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::UnsupportedFeature(Feature::Publish), "{what}");
            assert!(refused.to_string().contains("allow_cuda_flush"), "{refused}");
            mirror.has(0, &[], "refused publish");
            return;
        }
        mirror.mapping.publish(1, b"narrow", 4096 + 4, 0x1234_5678_u32).unwrap();
        mirror.mapping.flush().unwrap();
        mirror.wanted[1..7].copy_from_slice(b"narrow");
        mirror.has(4096 + 4, &0x1234_5678_u32.to_ne_bytes(), "publish with u32");
        let data = pattern(3, 5000);
        mirror.mapping.publish(101, &data, BYTES - 8, 0x1234_5678_9abc_def0_u64).unwrap();
        mirror.mapping.flush().unwrap();
        mirror.wanted[101..5101].copy_from_slice(&data);
        mirror.has(BYTES - 8, &0x1234_5678_9abc_def0_u64.to_ne_bytes(), "publish with u64");
        // The flag is the last word on overlapping bytes.
        mirror.mapping.publish(0, &[0xff; 64], 8, 5_u64).unwrap();
        mirror.mapping.flush().unwrap();
        mirror.wanted[..64].fill(0xff);
        mirror.has(8, &5_u64.to_ne_bytes(), "publish over its own data");
    });
}

pub(crate) fn values_round_trip(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut mirror = Mirror::new(session, &buffer, what);
        let value = [0x0102_0304_u32, 0x0506_0708, 0x090a_0b0c];
        for at in [0, 1, 62, BYTES - 12] {
            mirror.mapping.write_value(at, &value).unwrap();
            assert_eq!(mirror.mapping.read_value::<[u32; 3]>(at).unwrap(), value, "{what}");
            let bytes: Vec<u8> = value.iter().flat_map(|word| word.to_ne_bytes()).collect();
            mirror.has(at, &bytes, "write_value");
        }
        // Sizes that are inlined and one that is not, where the device address is aligned for them and where it is not.
        macro_rules! sizes {
            ($($size:literal)+) => { $(
                for at in [0, 4, 8, 16, 64, 4096 - 8, BYTES - $size] {
                    let value: [u8; $size] = pattern(at + $size, $size).try_into().unwrap();
                    mirror.mapping.write_value(at, &value).unwrap();
                    assert_eq!(mirror.mapping.read_value::<[u8; $size]>(at).unwrap(), value, "{what}");
                    mirror.has(at, &value, "write_value");
                }
                for at in [64, 65] {
                    let value: [u8; $size] = pattern(at + $size + 1, $size).try_into().unwrap();
                    mirror.mapping.write_value_posted(at, &value).unwrap();
                    mirror.mapping.flush().unwrap();
                    mirror.has(at, &value, "write_value_posted");
                    let value: [u8; $size] = pattern(at + $size + 2, $size).try_into().unwrap();
                    mirror.mapping.batch(|batch| batch.write_value(at, &value)).unwrap();
                    mirror.mapping.flush().unwrap();
                    mirror.has(at, &value, "a value in a batch");
                }
            )+ };
        }
        sizes!(1 2 3 5 8 16 24 32 48 60 64 100);
        assert_eq!(mirror.mapping.read_value::<u64>(BYTES - 7).unwrap_err().kind(), ErrorKind::OutOfBounds);
    });
}
