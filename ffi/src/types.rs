//! The C types, laid out as `gdrapi.h` and `gdrapi_ext.h` declare them.

use std::ffi::{c_char, c_int, c_ulong};

/// `struct gdr`: never dereferenced, on either side. A `gdr_t` is a handle in a pointer's clothes.
#[repr(C)]
#[derive(Debug)]
pub struct Gdr {
    _opaque: [u8; 0],
}

/// `gdr_mh_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryHandle {
    /// 0 for no handle.
    pub h: c_ulong,
}

/// `gdrx_copier_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CopierHandle {
    /// 0 for no copier.
    pub h: c_ulong,
}

/// The first 40 bytes of `gdr_info_t`, and all of what `gdr_get_info` writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct InfoV1 {
    /// Device address of the first page.
    pub va: u64,
    /// Whole pages, in bytes.
    pub mapped_size: u64,
    /// Always 65536.
    pub page_size: u32,
    /// How long mapping took.
    pub tm_cycles: u64,
    /// Unit of `tm_cycles`.
    pub cycles_per_ms: u32,
    /// Bit-fields `mapped` and `wc_mapping`.
    pub bits: u32,
}

/// `gdr_info_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct InfoV2 {
    /// What version 1 has.
    pub v1: InfoV1,
    /// `gdr_mapping_type_t`.
    pub mapping_type: c_int,
}

/// `gdrx_mapping_facts_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MappingFacts {
    /// Address space in use, in bytes.
    pub window_bytes: u64,
    /// How long pinning took.
    pub pin_ns: u64,
    /// How long mapping took.
    pub map_ns: u64,
    /// `gdr_mapping_type_t`.
    pub mapping_type: c_int,
    /// `gdrx_after_free_t`.
    pub after_free: c_int,
    /// Whether `gdrx_post_line` is one write by architecture.
    pub post_line_is_atomic: c_int,
    /// PCI address; -1 where there is none.
    pub pci_domain: c_int,
    /// PCI bus.
    pub pci_bus: c_int,
    /// PCI device.
    pub pci_device: c_int,
    /// Name of the copy routine, null-terminated.
    pub routine: [c_char; 16],
}

/// `gdrx_cost_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Nanoseconds of a small store.
    pub put_overhead_ns: f64,
    /// Bytes per second of long stores.
    pub put_bytes_per_second: f64,
    /// Nanoseconds of a small load.
    pub get_overhead_ns: f64,
    /// Bytes per second of long loads.
    pub get_bytes_per_second: f64,
}

const _: () = {
    assert!(size_of::<MemoryHandle>() == 8 && size_of::<CopierHandle>() == 8);
    assert!(size_of::<InfoV1>() == 40 && size_of::<InfoV2>() == 48);
    assert!(std::mem::offset_of!(InfoV1, bits) == 36 && std::mem::offset_of!(InfoV2, mapping_type) == 40);
    assert!(size_of::<MappingFacts>() == 64 && size_of::<Cost>() == 32);
};
