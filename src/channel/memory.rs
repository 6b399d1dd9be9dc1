//! The memory of a channel, which its two ends share.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::layout::{DeviceChannel, ENDED, LINE, RUNNING, STATE_BITS, places, unwritten};
use super::post::LineStore;
use crate::backend::BackendKind;
use crate::buffer::DeviceBuffer;
use crate::copy::fence;
#[cfg(feature = "cuda")]
use crate::cuda::PinnedHost;
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;
use crate::range::DeviceRange;
use crate::session::Session;
use crate::sys::num::{u64_of, usize_of};
use crate::sys::process::Owner;

/// Host memory that the device reaches.
enum HostMemory {
    #[cfg(feature = "cuda")]
    Pinned(PinnedHost),
    /// For emulated GPUs.
    Plain(Box<[PlainLine]>),
}

#[repr(align(64))]
struct PlainLine(#[allow(dead_code, reason = "reached by address")] [AtomicU64; LINE / 8]);

impl HostMemory {
    fn new(session: &Session, ordinal: usize, bytes: usize) -> Result<Self> {
        match session.backend() {
            BackendKind::Emulated => {
                let line = || PlainLine(std::array::from_fn(|_| AtomicU64::new(0)));
                Ok(Self::Plain(std::iter::repeat_with(line).take(bytes.div_ceil(LINE)).collect()))
            }
            #[cfg(feature = "cuda")]
            _ => PinnedHost::new(ordinal, bytes).map(Self::Pinned),
            #[cfg(not(feature = "cuda"))]
            _ => {
                let cause = format!("GPU {ordinal} needs page-locked memory, which only CUDA gives");
                Err(Error::new("open channel", ErrorKind::UnsupportedFeature(crate::Feature::Operation), cause)
                    .remedy("build with feature 'cuda'"))
            }
        }
    }

    fn as_ptr(&self) -> *mut u8 {
        match self {
            #[cfg(feature = "cuda")]
            Self::Pinned(host) => host.as_ptr(),
            Self::Plain(lines) => lines.as_ptr().cast_mut().cast(),
        }
    }

    /// Where the device sees byte 0.
    fn device_addr(&self) -> Result<u64> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Pinned(host) => host.gpu_addr().map(crate::range::GpuAddr::raw),
            Self::Plain(_) => Ok(u64_of(self.as_ptr().expose_provenance())),
        }
    }
}

/// Byte offsets in host memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostPlan {
    pub(super) credits: usize,
    pub(super) ring: usize,
    /// The GPU's part, where host memory takes the GPU memory's place.
    pub(super) far: usize,
    pub(super) bytes: usize,
}

/// In GPU memory, where the kernel looks without crossing the bus: line 0 is the credit for the ring to the CPU, line 1 the
/// stop word; then comes the ring, or from the next page on each place that it may have.
const STOP_AT: usize = LINE;

fn far_ring_at(places: u32) -> usize {
    if places == 1 { 2 * LINE } else { DeviceChannel::PLACE }
}

impl HostPlan {
    pub(super) fn new(asked: &Asked) -> Self {
        let words = (4 * usize_of(u64::from(asked.readers))).next_multiple_of(LINE);
        // First a state for each reader, then its credit.
        let credits = words;
        let ring = (credits + words).next_multiple_of(2 * LINE);
        let far = ring + usize_of(u64::from(asked.out_lines)) * LINE;
        let bytes = if asked.far_in_host { far + asked.far_bytes() } else { far };
        Self { credits, ring, far, bytes }
    }
}

/// What a channel is made of, checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) ordinal: Option<usize>,
    pub(super) in_lines: u32,
    pub(super) in_start: u32,
    pub(super) out_lines: u32,
    pub(super) out_start: u32,
    pub(super) readers: u32,
    pub(super) limit_ns: u64,
    /// For comparison: what belongs in GPU memory lies in host memory.
    pub(super) far_in_host: bool,
}

impl Asked {
    /// Places for the ring in GPU memory; host memory has no near half.
    fn places(&self) -> u32 {
        if self.far_in_host { 1 } else { places(self.in_lines, self.readers) }
    }

    fn far_bytes(&self) -> usize {
        let ring = usize_of(u64::from(self.in_lines)) * LINE;
        far_ring_at(self.places())
            + match self.places() {
                1 => ring,
                places => usize_of(u64::from(places)) * DeviceChannel::PLACE,
            }
    }
}

/// Device memory and its window; the window, which keeps the memory, goes first.
pub(super) struct Far {
    pub(super) mapping: Mapping<'static>,
    /// Where the device sees byte 0.
    pub(super) addr: u64,
}

impl Far {
    /// Allocates and maps `bytes` bytes of device memory.
    pub(super) fn new(session: &Session, ordinal: Option<usize>, bytes: usize) -> Result<(Self, usize)> {
        let buffer: Arc<DeviceBuffer> = Arc::new(match ordinal {
            Some(ordinal) => session.alloc_on(ordinal, bytes)?,
            None => session.alloc(bytes)?,
        });
        let mapping = session.pin(DeviceRange::from(&buffer))?.map()?;
        // A thread that plays a kernel sees the window.
        let addr = match session.backend() {
            BackendKind::Emulated => u64_of(mapping.as_ptr().expose_provenance()),
            _ => mapping.gpu_addr().raw(),
        };
        Ok((Self { mapping, addr }, buffer.ordinal()))
    }

    /// Writes and reads back: it has arrived, and the window shows the memory that it should.
    pub(super) fn fill(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.mapping.write(at, bytes)?;
        let mut back = vec![0; bytes.len()];
        self.mapping.read(at, &mut back)?;
        if back == bytes {
            return Ok(());
        }
        Err(Error::new("open channel", ErrorKind::Io(libc::EIO), "GPU memory does not hold what was written to it")
            .remedy("see the kernel log for errors of the GPU or its bus"))
    }
}

/// Everything that lives as long as an end of the channel does.
pub(crate) struct Shared {
    /// Not dropped in a forked child, whose driver knows nothing of it.
    host: ManuallyDrop<HostMemory>,
    far: Option<Far>,
    plan: HostPlan,
    pub(super) store: LineStore,
    pub(super) device: DeviceChannel,
    pub(super) owner: Owner,
}

// SAFETY: the memory is reached through raw pointers by atomic or 16-byte accesses, each place written by one end only;
// all other fields are Send and Sync.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(session: &Session, asked: &Asked) -> Result<Self> {
        super::part::require_avx("open channel")?;
        let plan = HostPlan::new(asked);
        let (far, ordinal) = if asked.far_in_host {
            (None, asked.ordinal.unwrap_or(0))
        } else {
            let (far, ordinal) = Far::new(session, asked.ordinal, asked.far_bytes())?;
            (Some(far), ordinal)
        };
        let store = match &far {
            Some(far) => LineStore::choose("open channel", &far.mapping)?,
            None => LineStore::Parts,
        };
        let host = HostMemory::new(session, ordinal, plan.bytes)?;
        let near = host.device_addr()?;
        let far_addr = far.as_ref().map_or(near + u64_of(plan.far), |far| far.addr);
        let device = DeviceChannel {
            in_ring: far_addr + u64_of(far_ring_at(asked.places())),
            in_credit: near + u64_of(plan.credits),
            out_ring: near + u64_of(plan.ring),
            out_credit: far_addr,
            stop: far_addr + u64_of(STOP_AT),
            state: near,
            limit_ns: asked.limit_ns,
            in_lines: asked.in_lines,
            in_start: asked.in_start,
            out_lines: asked.out_lines,
            out_start: asked.out_start,
            readers: asked.readers,
            places: asked.places(),
        };
        let shared = Self { host: ManuallyDrop::new(host), far, plan, store, device, owner: Owner::here() };
        shared.fill()?;
        Ok(shared)
    }

    /// Puts both rings and credits in the state of a lap before the first.
    fn fill(&self) -> Result<()> {
        let DeviceChannel { in_lines, in_start, out_lines, out_start, readers, places, .. } = self.device;
        let mut far = vec![0; far_ring_at(places)];
        far[..LINE].copy_from_slice([out_start.to_le_bytes(); LINE / 4].as_flattened());
        let ring = unwritten(in_start, in_lines);
        for place in 0..places {
            far.resize(self.place_at(place), 0);
            far.extend_from_slice(&ring);
        }
        match &self.far {
            Some(window) => window.fill(0, &far)?,
            None => self.fill_host(self.plan.far, &far),
        }
        self.fill_host(self.plan.ring, &unwritten(out_start, out_lines));
        for reader in 0..readers {
            let first = in_start.wrapping_add(reader * super::layout::BLOCK_LINES);
            self.host_word(self.plan.credits + 4 * usize_of(u64::from(reader))).store(first, Ordering::Release);
        }
        Ok(())
    }

    fn fill_host(&self, at: usize, bytes: &[u8]) {
        let to = self.host.as_ptr().wrapping_add(at);
        // SAFETY: the plan keeps `at` and the ring's length inside the allocation; nobody else knows of it yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn host_word(&self, at: usize) -> &AtomicU32 {
        let word = self.host.as_ptr().wrapping_add(at);
        // SAFETY: a multiple of 4 inside the allocation by the plan; only accessed as an atomic, and by the device.
        unsafe { AtomicU32::from_ptr(word.cast()) }
    }

    fn place_at(&self, place: u32) -> usize {
        far_ring_at(self.device.places) + usize_of(u64::from(place)) * DeviceChannel::PLACE
    }

    /// The window address of the ring to the GPU, if its first line goes out now: in the place that the kernel took, or in the
    /// first one, where a kernel that starts later will look as well.
    pub(super) fn in_ring(&self) -> *mut u8 {
        let place = match self.states().next() {
            Some(state) if state & ((1 << STATE_BITS) - 1) == RUNNING => state >> STATE_BITS,
            _ => 0,
        };
        debug_assert!(place < self.device.places, "a place that a kernel was offered");
        self.far_ptr().wrapping_add(self.place_at(place.min(self.device.places - 1)))
    }

    /// The window address of the credit for the ring to the CPU.
    pub(super) fn far_ptr(&self) -> *mut u8 {
        match &self.far {
            Some(far) => far.mapping.as_ptr(),
            None => self.host.as_ptr().wrapping_add(self.plan.far),
        }
    }

    pub(super) fn out_ring(&self) -> *const u8 {
        self.host.as_ptr().wrapping_add(self.plan.ring)
    }

    /// The number of the first line that a reader of the GPU has not consumed.
    #[inline]
    pub(super) fn in_credit(&self, reader: u32) -> u32 {
        self.host_word(self.plan.credits + 4 * usize_of(u64::from(reader))).load(Ordering::Acquire)
    }

    fn states(&self) -> impl Iterator<Item = u32> {
        let word = |reader: u32| self.host_word(4 * usize_of(u64::from(reader)));
        (0..self.device.readers).map(move |reader| word(reader).load(Ordering::Acquire))
    }

    /// Whether every reader has reported its end.
    pub(super) fn is_gone(&self) -> bool {
        self.states().all(|state| state == ENDED)
    }

    /// Whether every reader has reported that it runs, or has ended since.
    pub(super) fn has_started(&self) -> bool {
        self.states().all(|state| state != 0)
    }

    /// Asks the kernel to end.
    pub(super) fn stop(&self) {
        if self.owner.is_here() {
            let at = self.far_ptr().wrapping_add(STOP_AT);
            // SAFETY: the stop word's line; `new` chose instructions that this processor has.
            unsafe { self.store.word(at, 1) };
            fence::store();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return;
        }
        // Freeing waits for a kernel that still runs.
        self.stop();
        // SAFETY: this is the value's own drop; the field is not used again.
        unsafe { ManuallyDrop::drop(&mut self.host) };
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("device", &self.device).field("store", &self.store).finish_non_exhaustive()
    }
}
