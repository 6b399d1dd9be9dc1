//! Scratch memory, and the copies by which a window is shown to be what it should be.
//!
//! All of it stays until the process ends: freeing would wait for running kernels, and pinning must not.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::ipc::{Identity, Layout, Verdict, World, learn};
use super::node::{Held, Manager, Node};
use crate::backend::View;
use crate::copy::{self, fence};
use crate::cuda::context::{Device, Primary};
use crate::cuda::driver::Driver;
use crate::cuda::memory::Vmm;
use crate::cuda::pointer::{Block, Pools};
use crate::cuda::transfer::Lane;
use crate::error::{Error, ErrorKind, Result};
use crate::range::GpuAddr;
use crate::sys::num::{u64_of, usize_of};
use crate::sys::rm::RmFailure;

/// How long a copy of a few lines may take before the GPU counts as busy.
const LIMIT: Duration = Duration::from_secs(1);
/// Bytes compared at one place.
const LINE: usize = 64;
/// Sizes that differ in every half and make offsets use every bit; the last has an object of its own.
pub(super) const SCRATCH: [usize; 5] = [0x3100, 0x9_5300, 0x9_7500, 0x2b00, 0x30_1100];

/// Copies to and from one GPU that wait for nobody else's work.
#[derive(Debug)]
pub(super) struct Prover {
    primary: Primary,
    lane: Mutex<Lane>,
    /// Page-locked.
    bounce: *mut c_void,
    scratch: OnceLock<Vec<GpuAddr>>,
    vmm_proven: Mutex<bool>,
}

// SAFETY: the bounce buffer is used under the lane's lock only.
#[allow(unsafe_code, reason = "a pointer field keeps the type from being Send by itself")]
unsafe impl Send for Prover {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "a pointer field keeps the type from being Sync by itself")]
unsafe impl Sync for Prover {}

impl Prover {
    /// One for each GPU and process.
    pub(super) fn of(device: &Device) -> Result<Arc<Self>> {
        static ALL: Mutex<Option<HashMap<usize, Arc<Prover>>>> = Mutex::new(None);
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        if let Some(prover) = all.get(&device.ordinal) {
            return Ok(Arc::clone(prover));
        }
        let primary = device.retain_primary()?;
        let prover = {
            let _entered = primary.enter()?;
            let lane = Mutex::new(Lane::new(device.driver)?);
            let bounce = device.driver.page_locked(4096)?;
            Self { primary, lane, bounce, scratch: OnceLock::new(), vmm_proven: Mutex::new(false) }
        };
        let prover = Arc::new(prover);
        all.insert(device.ordinal, Arc::clone(&prover));
        Ok(prover)
    }

    #[allow(unsafe_code, reason = "copies through the page-locked buffer")]
    fn to_device(&self, to: GpuAddr, line: &[u8; LINE]) -> Result<()> {
        let _entered = self.primary.enter()?;
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the buffer holds 4096 bytes and is ours under the lock.
        unsafe { self.bounce.cast::<[u8; LINE]>().write(*line) };
        // SAFETY: the buffer is never freed, and scratch memory is not either.
        unsafe { lane.upload_within(to.raw(), self.bounce, LINE, LIMIT) }
    }

    /// `bytes` is at most a line.
    #[allow(unsafe_code, reason = "copies through the page-locked buffer")]
    fn to_host(&self, from: GpuAddr, bytes: usize) -> Result<[u8; LINE]> {
        let _entered = self.primary.enter()?;
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = [0; LINE];
        // SAFETY: the buffer holds 4096 bytes and is ours under the lock.
        unsafe { self.bounce.cast::<[u8; LINE]>().write(line) };
        // SAFETY: the buffer is never freed; a source that was freed meanwhile is an error of CUDA's.
        unsafe { lane.download_within(self.bounce, from.raw(), bytes.min(LINE), LIMIT) }?;
        // SAFETY: as above, and the copy is complete.
        line.copy_from_slice(unsafe { &*self.bounce.cast::<[u8; LINE]>() });
        Ok(line)
    }

    /// Shows that bytes go both ways between `held` at `offset` and the scratch memory at `addr`.
    fn both_ways(&self, held: &Held, offset: u64, addr: GpuAddr) -> Result<bool> {
        let view = held.map(offset, LINE)?;
        let there = pattern(addr.raw() ^ 0x5bd1_e995);
        self.to_device(addr, &there)?;
        if load(&view, LINE) != there {
            return Ok(false);
        }
        let back = pattern(addr.raw().rotate_left(17) ^ 0x9e37_79b9);
        store(&view, &back);
        Ok(self.to_host(addr, LINE)? == back)
    }

    /// Proves once that exported memory appears as it should.
    pub(super) fn prove_vmm(&self, manager: &Arc<Manager>, node: &Arc<Node>) -> Result<()> {
        let mut proven = self.vmm_proven.lock().unwrap_or_else(PoisonError::into_inner);
        if *proven {
            return Ok(());
        }
        let vmm = {
            let _entered = self.primary.enter()?;
            Vmm::new(&self.primary.device, LINE)?
        };
        let mut held = Held::none(manager, node);
        let bytes = held.import(std::os::fd::AsFd::as_fd(&vmm.export()?))?;
        let tail = bytes - u64_of(LINE);
        let last = GpuAddr::new(vmm.addr().raw() + tail);
        if !(self.both_ways(&held, 0, vmm.addr())? && self.both_ways(&held, tail, last)?) {
            return Err(Error::new(
                "pin",
                ErrorKind::UnknownLayout,
                "a window onto scratch memory does not show its bytes",
            )
            .remedy("use another backend, and report the driver's version"));
        }
        *proven = true;
        Ok(())
    }

    fn scratch(&self) -> Result<&[GpuAddr]> {
        if let Some(blocks) = self.scratch.get() {
            return Ok(blocks);
        }
        let _entered = self.primary.enter()?;
        let blocks: Result<Vec<_>> = SCRATCH.iter().map(|&bytes| self.primary.device.driver.allocate(bytes)).collect();
        let blocks = blocks?;
        Ok(self.scratch.get_or_init(|| blocks))
    }
}

fn load(view: &impl View, bytes: usize) -> [u8; LINE] {
    let mut line = [0; LINE];
    fence::full();
    #[allow(unsafe_code, reason = "reads the window just made")]
    // SAFETY: the view shows at least `bytes` bytes, in whole pages.
    unsafe {
        copy::preferred().load(&mut line[..bytes], view.ptr().as_ptr());
    }
    fence::load();
    line
}

fn store(view: &impl View, line: &[u8; LINE]) {
    #[allow(unsafe_code, reason = "writes the window just made, onto scratch memory")]
    // SAFETY: the view shows a whole line of scratch memory.
    unsafe {
        copy::preferred().store(view.ptr().as_ptr(), line);
    }
    // Reading back pushes the line out before the GPU is asked.
    load(view, LINE);
}

/// 64 bytes that no other seed gives (splitmix64).
fn pattern(seed: u64) -> [u8; LINE] {
    let mut state = seed;
    let mut line = [0; LINE];
    for word in line.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(mixed ^ mixed >> 31).to_le_bytes());
    }
    line
}

/// The driver itself.
pub(super) struct Live<'a> {
    pub(super) manager: &'a Arc<Manager>,
    pub(super) node: &'a Arc<Node>,
    pub(super) prover: &'a Prover,
    pub(super) driver: &'static Driver,
}

impl Live<'_> {
    /// The layout of memory handles, learnt once a process.
    pub(super) fn layout(&self) -> Result<Arc<Layout>> {
        static LAYOUT: Mutex<Option<Result<Arc<Layout>>>> = Mutex::new(None);
        let mut known = LAYOUT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*known {
            return known.clone();
        }
        let samples: Result<Vec<_>> = self.prover.scratch()?.iter().map(|&addr| self.identity(addr)).collect();
        let learnt = learn(self, &samples?).map(Arc::new);
        // Another try makes sense after any failure but this one.
        if learnt.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::UnknownLayout) {
            *known = Some(learnt.clone());
        }
        learnt
    }
}

impl World for Live<'_> {
    type Object = Held;

    fn pid(&self) -> u32 {
        std::process::id()
    }

    fn identity(&self, addr: GpuAddr) -> Result<Identity> {
        let block = Block::of(self.driver, addr, Pools::Refused)?;
        let _context = block.enter(&self.prover.primary.device)?;
        let words = block.ipc_words(self.driver)?;
        Ok(Identity {
            words,
            base: block.base,
            bytes: u64_of(block.bytes),
            object_base: block.mapping.base,
            object_bytes: u64_of(block.mapping.bytes),
            id: block.id,
        })
    }

    fn duplicate(&self, client: u32, object: u32) -> std::result::Result<Held, RmFailure> {
        Held::duplicate(self.manager, self.node, client, object)
    }

    fn object_bytes(&self, object: &Held) -> u64 {
        object.bytes()
    }

    fn proves(&self, object: &Held, offset: u64, sample: &Identity) -> Result<bool> {
        let tail = sample.bytes - u64_of(LINE);
        let last = GpuAddr::new(sample.base.raw() + tail);
        Ok(self.prover.both_ways(object, offset, sample.base)? && self.prover.both_ways(object, offset + tail, last)?)
    }

    fn compare(&self, object: &Held, offset: u64, block: &Identity) -> Result<Verdict> {
        let bytes = usize_of(block.bytes).min(LINE);
        let mut told = false;
        let tail = block.bytes - u64_of(bytes);
        for at in [0, (tail / 2) & !63, tail] {
            let addr = GpuAddr::new(block.base.raw() + at);
            let view = object.map(offset + at, bytes)?;
            // A kernel may be writing there: only bytes that stay, and stay different, speak against the object.
            let mut different = true;
            for _ in 0..8 {
                let before = load(&view, bytes);
                let device = self.prover.to_host(addr, bytes)?;
                if before == device {
                    told |= device[..bytes].iter().any(|byte| *byte != device[0]);
                } else if load(&view, bytes) == before {
                    continue;
                }
                different = false;
                break;
            }
            if different {
                return Ok(Verdict::Different);
            }
        }
        Ok(if told { Verdict::Same } else { Verdict::Inconclusive })
    }
}
