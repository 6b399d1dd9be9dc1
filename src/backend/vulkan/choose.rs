//! Which of the devices that Vulkan shows, and which of its memory types. Pure: over property tables.

use std::fmt::Write as _;

use ash::vk;

use crate::backend::MappingType;
use crate::error::{Error, ErrorKind, Feature, Result};

/// What names a device in every programming interface.
pub(super) type Uuid = [u8; 16];

/// A device that Vulkan shows.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) uuid: Uuid,
    /// The version of Vulkan that it has.
    pub(super) version: u32,
}

/// The position of the device with this UUID. Never by number: `CUDA_VISIBLE_DEVICES` reorders.
pub(super) fn device(found: &[Identity], uuid: Uuid) -> Result<usize> {
    if let Some(at) = found.iter().position(|device| device.uuid == uuid && device.version >= vk::API_VERSION_1_1) {
        return Ok(at);
    }
    let shown = match found {
        [] => "none".to_owned(),
        _ => {
            found.iter().map(|device| format!("{} ({})", device.name, hex(device.uuid))).collect::<Vec<_>>().join(", ")
        }
    };
    let cause = format!("no device of Vulkan 1.1 has the UUID of the CUDA device, {}; Vulkan shows {shown}", hex(uuid));
    Err(Error::new("pin", ErrorKind::NoDevice, cause).remedy(
        "give the container the graphics capability (NVIDIA_DRIVER_CAPABILITIES=all), or name the NVIDIA driver's \
         manifest in VK_DRIVER_FILES",
    ))
}

fn hex(uuid: Uuid) -> String {
    uuid.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Device memory that the CPU can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visible {
    /// Of the memory type.
    pub(super) index: u32,
    pub(super) mapping_type: MappingType,
}

const WANTED: [vk::MemoryPropertyFlags; 3] = [
    vk::MemoryPropertyFlags::DEVICE_LOCAL,
    vk::MemoryPropertyFlags::HOST_VISIBLE,
    vk::MemoryPropertyFlags::HOST_COHERENT,
];
const UNWANTED: [vk::MemoryPropertyFlags; 2] =
    [vk::MemoryPropertyFlags::PROTECTED, vk::MemoryPropertyFlags::LAZILY_ALLOCATED];

/// The memory type through which the CPU sees the GPU's memory, all of it.
///
/// With a small BAR1 the type exists too, on a heap of its own: CUDA's memory is in the other heap.
pub(super) fn memory_type(table: &vk::PhysicalDeviceMemoryProperties, gpu: &str) -> Result<Visible> {
    let heaps = table.memory_heaps_as_slice();
    let local = |heap: &&vk::MemoryHeap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let whole = heaps.iter().filter(local).map(|heap| heap.size).max().unwrap_or(0);
    let heap_of = |kind: &vk::MemoryType| heaps.get(usize::try_from(kind.heap_index).ok()?).filter(local);

    let visible = (0..).zip(table.memory_types_as_slice()).filter_map(|(index, kind)| {
        let flags = kind.property_flags;
        let fits =
            WANTED.iter().all(|&flag| flags.contains(flag)) && !UNWANTED.iter().any(|&flag| flags.contains(flag));
        let cached = flags.contains(vk::MemoryPropertyFlags::HOST_CACHED);
        Some((index, cached, heap_of(kind).filter(|_| fits)?.size))
    });
    // The larger heap; what the CPU caches only where there is nothing else.
    let best = visible.min_by_key(|&(index, cached, size)| (std::cmp::Reverse(size), cached, index));
    let cause = match best {
        Some((index, cached, size)) if size >= whole => {
            let mapping_type = if cached { MappingType::Cached } else { MappingType::WriteCombining };
            return Ok(Visible { index, mapping_type });
        }
        Some((_, _, size)) => {
            let (size, whole) = (size >> 20, whole >> 20);
            format!("the CPU sees {size} MiB of the {whole} MiB of {gpu} through its BAR1")
        }
        None => format!("the CPU sees no memory of {gpu}: Vulkan has no type that is device-local and host-visible"),
    };
    Err(Error::new("pin", ErrorKind::UnsupportedFeature(Feature::LargeBar), cause)
        .remedy("enable Resizable BAR (Above 4G Decoding) in the firmware, or use backend 'gdrdrv' or 'rm'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const LOCAL: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::DEVICE_LOCAL;
    const VISIBLE: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::HOST_VISIBLE;
    const COHERENT: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::HOST_COHERENT;
    const CACHED: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::HOST_CACHED;

    /// Heaps as (device-local, size), types as (flags, heap).
    fn table(heaps: &[(bool, u64)], types: &[(&[vk::MemoryPropertyFlags], u32)]) -> vk::PhysicalDeviceMemoryProperties {
        let mut table = vk::PhysicalDeviceMemoryProperties {
            memory_heap_count: u32::try_from(heaps.len()).unwrap(),
            memory_type_count: u32::try_from(types.len()).unwrap(),
            ..Default::default()
        };
        for (to, &(local, size)) in table.memory_heaps.iter_mut().zip(heaps) {
            let flags = if local { vk::MemoryHeapFlags::DEVICE_LOCAL } else { vk::MemoryHeapFlags::empty() };
            *to = vk::MemoryHeap { size, flags };
        }
        for (to, &(flags, heap_index)) in table.memory_types.iter_mut().zip(types) {
            let property_flags = flags.iter().fold(vk::MemoryPropertyFlags::empty(), |all, &flag| all | flag);
            *to = vk::MemoryType { property_flags, heap_index };
        }
        table
    }

    #[test]
    fn the_visible_type_of_the_whole_memory_is_chosen() {
        let types: &[(&[_], u32)] = &[
            (&[], 1),
            (&[LOCAL], 0),
            (&[VISIBLE, COHERENT], 1),
            (&[VISIBLE, COHERENT, CACHED], 1),
            (&[LOCAL, VISIBLE, COHERENT], 0),
        ];
        let large = table(&[(true, 140 * GIB), (false, 500 * GIB)], types);
        let visible = Visible { index: 4, mapping_type: MappingType::WriteCombining };
        assert_eq!(memory_type(&large, "GPU").unwrap(), visible);
    }

    #[test]
    fn what_the_cpu_caches_is_the_second_choice() {
        let both: &[(&[_], u32)] =
            &[(&[LOCAL, VISIBLE, COHERENT, CACHED], 0), (&[LOCAL, VISIBLE, COHERENT], 0), (&[LOCAL], 0)];
        let found = memory_type(&table(&[(true, GIB)], both), "GPU").unwrap();
        assert_eq!((found.index, found.mapping_type), (1, MappingType::WriteCombining));
        let found = memory_type(&table(&[(true, GIB)], &both[..1]), "GPU").unwrap();
        assert_eq!((found.index, found.mapping_type), (0, MappingType::Cached));
    }

    #[test]
    fn memory_that_needs_flushing_or_protection_is_no_choice() {
        let types: &[(&[_], u32)] =
            &[(&[LOCAL, VISIBLE], 0), (&[LOCAL, VISIBLE, COHERENT, vk::MemoryPropertyFlags::PROTECTED], 0)];
        let error = memory_type(&table(&[(true, GIB)], types), "GPU").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnsupportedFeature(Feature::LargeBar), "{error}");
    }

    #[test]
    fn a_small_bar_is_refused_with_its_size() {
        let types: &[(&[_], u32)] = &[(&[LOCAL], 0), (&[VISIBLE, COHERENT], 1), (&[LOCAL, VISIBLE, COHERENT], 2)];
        let small = table(&[(true, 24 * GIB), (false, 64 * GIB), (true, 246 << 20)], types);
        let error = memory_type(&small, "GPU X").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnsupportedFeature(Feature::LargeBar), "{error}");
        let text = error.to_string();
        assert!(text.contains("246 MiB of the 24576 MiB of GPU X") && text.contains("Resizable BAR"), "{text}");

        let absent = table(&[(true, 24 * GIB), (false, 64 * GIB)], &types[..2]);
        let text = memory_type(&absent, "GPU X").unwrap_err().to_string();
        assert!(text.contains("the CPU sees no memory of GPU X") && text.contains("Resizable BAR"), "{text}");
        assert!(memory_type(&table(&[], &[]), "GPU").is_err());
        // A table that contradicts itself names no heap.
        assert!(memory_type(&table(&[(true, GIB)], &[(&[LOCAL, VISIBLE, COHERENT], 7)]), "GPU").is_err());
    }

    fn identity(name: &str, first: u8, version: u32) -> Identity {
        Identity { name: name.to_owned(), uuid: [first; 16], version }
    }

    #[test]
    fn a_device_is_found_by_its_uuid_alone() {
        let devices = [
            identity("a", 1, vk::API_VERSION_1_3),
            identity("a", 2, vk::API_VERSION_1_3),
            identity("llvmpipe", 3, vk::API_VERSION_1_1),
        ];
        for (at, first) in [1, 2, 3].into_iter().enumerate() {
            assert_eq!(device(&devices, [first; 16]).unwrap(), at);
        }
        let mut near = [2; 16];
        near[15] = 3;
        let error = device(&devices, near).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoDevice, "{error}");
        let text = error.to_string();
        assert!(text.contains("02020202020202020202020202020203") && text.contains("llvmpipe (0303"), "{text}");
        assert!(device(&[], near).unwrap_err().to_string().contains("Vulkan shows none"));
    }

    #[test]
    fn a_device_of_vulkan_1_0_is_no_device() {
        let old = [identity("old", 1, vk::API_VERSION_1_0)];
        assert_eq!(device(&old, [1; 16]).unwrap_err().kind(), ErrorKind::NoDevice);
    }
}
