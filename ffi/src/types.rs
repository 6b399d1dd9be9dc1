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

macro_rules! handles {
    ($($(#[$about:meta])* $name:ident,)*) => {
        $($(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name {
            /// 0 for none.
            pub h: c_ulong,
        }

        const _: () = assert!(size_of::<$name>() == 8);)*
    };
}

handles! {
    /// `gdrx_copier_t`.
    CopierHandle,
    /// `gdrx_agent_t`.
    AgentHandle,
    /// `gdrx_auto_t`.
    AutoHandle,
    /// `gdrx_channel_t`.
    ChannelHandle,
    /// `gdrx_mailbox_t`.
    MailboxHandle,
    /// `gdrx_latest_t`.
    LatestHandle,
}

/// `gdrx_range_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Device address.
    pub addr: u64,
    /// Bytes.
    pub size: usize,
}

/// `gdrx_segment_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Place among the agent's ranges.
    pub range: usize,
    /// First byte in the range.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// First byte in the host buffer.
    pub at: usize,
}

/// `gdrx_agent_options_t`. 0 is the default of each field, -1 is never, or none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AgentOptions {
    /// Of the caller's structure.
    pub size: usize,
    /// CUDA ordinal.
    pub gpu: c_int,
    /// Of the block.
    pub threads: c_int,
    /// Doorbells.
    pub ring: c_int,
    /// Longest read that comes as packets.
    pub packet_bytes: c_int,
    /// Without a request.
    pub idle_us: i64,
    /// With requests.
    pub residency_us: i64,
    /// Of a request.
    pub deadline_us: i64,
    /// Threads play the kernel.
    pub cpu_stand_in: c_int,
    /// 0.
    pub unused: c_int,
}

/// `gdrx_auto_options_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AutoOptions {
    /// Of the caller's structure.
    pub size: usize,
    /// Null: no agent.
    pub agent: *const AgentOptions,
    /// 0: the caller alone; -1: as many as gain something.
    pub threads: c_int,
    /// 0.
    pub page_locked: c_int,
    /// For the threads; null: the quickest.
    pub cpus: *const c_char,
    /// Largest size that is measured.
    pub largest: usize,
    /// How long measuring may take.
    pub milliseconds: u64,
}

impl Default for AutoOptions {
    fn default() -> Self {
        let (agent, cpus) = (std::ptr::null(), std::ptr::null());
        Self { size: 0, agent, threads: 0, page_locked: 0, cpus, largest: 0, milliseconds: 0 }
    }
}

/// `gdrx_channel_options_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ChannelOptions {
    /// Of the caller's structure.
    pub size: usize,
    /// CUDA ordinal, or -1.
    pub gpu: c_int,
    /// Of the ring to the GPU.
    pub lines_to_gpu: u32,
    /// Of the ring to the CPU.
    pub lines_to_host: u32,
    /// Warps that receive.
    pub readers: u32,
    /// `gdrx_placement_t`.
    pub placement: c_int,
    /// 0.
    pub unused: c_int,
    /// Of the kernel's life.
    pub kernel_limit_ms: u64,
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
    assert!(size_of::<MemoryHandle>() == 8);
    assert!(size_of::<InfoV1>() == 40 && size_of::<InfoV2>() == 48);
    assert!(std::mem::offset_of!(InfoV1, bits) == 36 && std::mem::offset_of!(InfoV2, mapping_type) == 40);
    assert!(size_of::<MappingFacts>() == 64 && size_of::<Cost>() == 32);
    assert!(size_of::<Range>() == 16 && size_of::<Segment>() == 32);
    assert!(size_of::<AgentOptions>() == 56 && size_of::<AutoOptions>() == 48 && size_of::<ChannelOptions>() == 40);
};
