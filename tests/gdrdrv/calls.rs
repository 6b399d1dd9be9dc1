//! Which calls each version of the module gets, and in which order.

use gdrcopy::{BackendKind, DeviceBuffer, DeviceRange, ErrorKind, Feature, MappingType, Session};

use crate::again::{NEWEST, OLDEST, inside, run, this_test};
use crate::common::fork::in_child;
use crate::common::standin::{FAULT, MODULES, Module};

const BYTES: usize = 70_000;

fn opened() -> (Session, DeviceBuffer) {
    let session = Session::builder().backend(BackendKind::Gdrdrv).open().unwrap();
    let buffer = session.alloc(BYTES).unwrap();
    (session, buffer)
}

fn minor(module: Module) -> u32 {
    module.version.split_once('.').expect("a dot").1.parse().expect("a number")
}

/// `newer` from that minor version on, `older` before.
fn since<'a>(module: Module, first: u32, newer: &'a [&'a str], older: &'a [&'a str]) -> &'a [&'a str] {
    if minor(module) >= first { newer } else { older }
}

#[test]
fn each_version_gets_the_calls_it_knows() {
    if inside() {
        let (session, buffer) = opened();
        let pinned = session.pin(&buffer).unwrap();
        let mapping = pinned.map().unwrap();
        mapping.write(0, b"bytes").unwrap();
        mapping.flush().unwrap();
        mapping.unmap().unwrap();
        pinned.unpin().unwrap();
        drop(buffer);
        return session.close().unwrap();
    }
    for module in MODULES {
        let ran = run(this_test!(), module, &[]);
        let wanted = [
            &["open", "version"],
            since(module, 5, &["attribute", "pin_v2"], &["pin"]),
            &["callback_flag", "mmap"],
            since(module, 4, &["info_v2"], &["info"]),
            &["unpin", "released"],
        ]
        .concat();
        assert_eq!(ran.names(), wanted, "{module:?}");
        assert!(ran.calls.iter().all(|line| line == "released" || line.ends_with("= 0")), "{module:?}: {ran:?}");
        assert_eq!(ran.calls[0], "open cloexec=1 = 0", "{module:?}");
    }
}

#[test]
fn a_mapping_type_is_asked_for_where_that_can_be_done() {
    if inside() {
        let (session, buffer) = opened();
        let pinned = session.pin(&buffer).unwrap();
        for other in [MappingType::Cached, MappingType::Device] {
            let error = pinned.map_as(other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnsupportedFeature(Feature::MappingType), "{error}");
            assert!(!pinned.is_mapped(), "nothing is left of the attempt");
        }
        let mapping = pinned.map_as(MappingType::WriteCombining).unwrap();
        assert_eq!(mapping.mapping_type(), MappingType::WriteCombining);
        return;
    }
    for module in MODULES {
        let ran = run(this_test!(), module, &[]);
        // Older modules map as they do, which the library finds out afterwards.
        let (requests, maps) = if minor(module) >= 5 { (3, 1) } else { (0, 3) };
        assert_eq!((ran.count("request_type"), ran.count("mmap")), (requests, maps), "{module:?}");
    }
}

#[test]
fn whole_gpu_pages_are_pinned_around_any_range() {
    if inside() {
        let (session, buffer) = opened();
        buffer.upload(0, &[0; BYTES]).unwrap();
        for (start, len) in [(1, 1), (65_535, 2), (4097, 60_000), (0, BYTES), (BYTES - 1, 1)] {
            let range = DeviceRange::from(&buffer).slice(start..start + len).unwrap();
            let mapping = session.pin(range).unwrap().map().unwrap();
            mapping.write(len - 1, b"!").unwrap();
            mapping.flush().unwrap();
            let mut seen = [0];
            buffer.download(start + len - 1, &mut seen).unwrap();
            assert_eq!(&seen, b"!", "{len} bytes from {start}");
        }
        return;
    }
    for module in [OLDEST, NEWEST] {
        let ran = run(this_test!(), module, &[]);
        let field = |line: &str, name: &str| {
            let text = line.split(' ').find_map(|word| word.strip_prefix(name)).expect("the field");
            u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("a number")
        };
        let pins: Vec<_> = ran.calls.iter().filter(|line| line.starts_with("pin")).collect();
        let sizes: Vec<_> = pins.iter().map(|line| field(line, "size=")).collect();
        assert_eq!(sizes, [0x10000, 0x20000, 0x10000, 0x20000, 0x10000], "{module:?}");
        assert!(pins.iter().all(|line| field(line, "addr=") % 0x10000 == 0), "{module:?}: {pins:?}");
    }
}

#[test]
fn every_pin_is_released_once_in_whatever_order_handles_end() {
    if inside() {
        let (session, buffer) = opened();
        let pinned = session.pin(&buffer).unwrap();
        let mapping = pinned.map().unwrap();
        let (pinned, error) = match pinned.unpin() {
            Err(error) => (error.to_string(), "mapped"),
            Ok(()) => panic!("unpinned under its mapping"),
        };
        assert!(!pinned.is_empty(), "{error}");
        mapping.write(0, b"still mapped").unwrap();
        drop(mapping);
        let (first, second) = (session.pin(&buffer).unwrap(), session.pin(&buffer).unwrap());
        let mapping = second.map().unwrap();
        drop(second);
        first.unpin().unwrap();
        drop(session);
        mapping.unmap().unwrap();
        return;
    }
    for module in MODULES {
        let ran = run(this_test!(), module, &[]);
        let pins = ran.count("pin") + ran.count("pin_v2");
        assert_eq!((pins, ran.count("unpin"), ran.count("released")), (3, 3, 1), "{module:?}: {ran:?}");
        assert!(ran.calls.iter().all(|line| line == "released" || line.ends_with("= 0")), "{module:?}: {ran:?}");
    }
}

/// Pieces of address space that show device memory. The stand-in has one of its own.
fn windows() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("standin-memory")).count() - 1
}

#[test]
fn a_mapping_that_fails_leaves_the_pin_alone_and_nothing_mapped() {
    if inside() {
        let (session, buffer) = opened();
        let pinned = session.pin(&buffer).unwrap();
        for _ in 0..2 {
            let error = pinned.map().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io(libc::EIO), "{error}");
            assert!(error.to_string().starts_with("map: "), "{error}");
            assert_eq!((pinned.is_mapped(), windows()), (false, 0), "{error}");
        }
        pinned.unpin().unwrap();
        return;
    }
    for (module, calls) in [(OLDEST, ["callback_flag", "mmap", "info"]), (NEWEST, ["callback_flag", "mmap", "info_v2"])]
    {
        for call in calls {
            let ran = run(this_test!(), module, &[(FAULT, &format!("{call}:5"))]);
            assert_eq!((ran.count(call), ran.count("unpin")), (2, 1), "{call}: {ran:?}");
        }
    }
}

#[test]
fn an_unpin_that_fails_is_reported_and_not_repeated() {
    if inside() {
        let (session, buffer) = opened();
        let error = gdrcopy::Error::from(session.pin(&buffer).unwrap().unpin().unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Io(libc::EIO), "{error}");
        drop(session.pin(&buffer).unwrap());
        drop(buffer);
        // What a drop could not return.
        assert!(session.close().unwrap_err().to_string().contains("gdrdrv did not release the pin"));
        return;
    }
    let ran = run(this_test!(), NEWEST, &[(FAULT, "unpin:5")]);
    assert_eq!((ran.count("pin_v2"), ran.count("unpin"), ran.count("released")), (2, 2, 1), "{ran:?}");
}

#[test]
fn a_forked_child_makes_no_call_on_the_node() {
    if inside() {
        let (session, buffer) = opened();
        let pinned = session.pin(&buffer).unwrap();
        let mut handles = Some((pinned.map().unwrap(), pinned, session.clone()));
        in_child(|| {
            let (mapping, pinned, session) = handles.take().unwrap();
            assert_eq!(pinned.map().unwrap_err().kind(), ErrorKind::WrongProcess);
            assert_eq!(mapping.write(0, b"no").unwrap_err().kind(), ErrorKind::WrongProcess);
            drop(mapping);
            drop(pinned);
            drop(session);
        });
        let (mapping, pinned, _session) = handles.take().unwrap();
        mapping.write(0, b"parent").unwrap();
        drop(mapping);
        pinned.map().unwrap().unmap().unwrap();
        pinned.unpin().unwrap();
        return;
    }
    for module in MODULES {
        let ran = run(this_test!(), module, &[]);
        assert_eq!((ran.count("callback_flag"), ran.count("mmap"), ran.count("unpin")), (2, 2, 1), "{module:?}");
        assert!(ran.calls.iter().all(|line| line == "released" || line.ends_with("= 0")), "{module:?}: {ran:?}");
    }
}
