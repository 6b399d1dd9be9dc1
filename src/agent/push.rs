//! The push agent as programs see it.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::bounce::{Bounce, SLOT, SLOTS};
use super::engine::Engine;
use super::link::{Link, prepare};
use super::memory::{self, HostBuffer, HostMemory, Place};
use super::options::AgentOptions;
use super::reach::Reach;
use super::request::{Segment, SubmitError, Ticket};
use super::standin::StandIn;
use super::wire::{Control, LINE, MAX_BYTES, Order, index};
use crate::backend::BackendKind;
use crate::error::{Error, ErrorKind, Feature, Result};
use crate::pinned::Pinned;
use crate::range::DeviceRange;
use crate::session::Session;
use crate::sys::num::u64_of;
use crate::sys::process::Owner;

/// Pages enough for a ring of the usual length in each half of the L2 cache: one allocation is no smaller anyhow.
const RING_SPACE: usize = 64 << 10;

/// Copies between device memory and the host by means of a block of threads that stays on the GPU.
///
/// It reads and writes only the ranges that it was started with; offsets and lengths are checked against them. One thread uses
/// it at a time; start one for each thread, or share it behind a lock. Several requests can be in flight:
/// [`PushAgent::submit`].
///
/// ```
/// use gdrcopy::agent::{AgentOptions, PushAgent, Segment};
/// use gdrcopy::{BackendKind, Session};
///
/// // On a GPU leave out `.backend(..)` and `cpu_stand_in()`.
/// let session = Session::builder().backend(BackendKind::Emulated).open()?;
/// let results = session.alloc(1 << 20)?;
/// results.upload(0, b"computed by a kernel")?;
///
/// let mut agent = PushAgent::start(&session, [&results], AgentOptions::default().cpu_stand_in())?;
/// let mut answer = [0; 20];
/// agent.read(0, 0, &mut answer)?; // range 0, from byte 0
/// assert_eq!(&answer, b"computed by a kernel");
///
/// // Without a copy on the CPU's side: into memory that the GPU writes.
/// let mut buffer = agent.host_buffer(1 << 20)?;
/// agent.read(0, 0, buffer.as_mut_slice())?;
/// assert_eq!(&buffer.as_slice()[..8], b"computed");
/// // The same in pieces, of which there may be any number.
/// agent.read_into(&mut buffer, &[Segment { range: 0, offset: 12, bytes: 8, at: 0 }])?;
/// assert_eq!(&buffer.as_slice()[..8], b"a kernel");
/// # Ok::<(), gdrcopy::Error>(())
/// ```
///
/// # Ordering
///
/// - Everything that a read returns was fetched after the call began; in which order is not said.
/// - It sees what the calling thread wrote through a [`Mapping`](crate::Mapping) before: the doorbell follows an `SFENCE`, and the GPU sees
///   writes over the bus in order. (Where it does not, [`Mapping::publish_is_ordered`](crate::Mapping::publish_is_ordered), the agent refuses to start.)
/// - It runs on a stream of its own and waits for no other: synchronise with the kernel that makes the data first, or wait
///   for a flag that the kernel sets after its data and a `__threadfence_system`.
///
/// # What it costs
///
/// A kernel that runs holds up, until it ends, `cudaFree`, `cudaFreeHost`, `cudaHostRegister`, `cudaHostUnregister`,
/// `cudaDeviceSynchronize` and the first launch of a kernel that CUDA has not loaded yet (`CUDA_MODULE_LOADING=EAGER`
/// avoids the last), in the same process. So the kernel ends by itself when no request came for
/// [`AgentOptions::idle_timeout`], and between two requests after [`AgentOptions::residency`]; the next request launches
/// it again. With [`AgentOptions::dedicated`] those calls block until the agent is dropped, by another thread.
/// A call that waits needs a moment without the kernel. So one that left for the second reason, with a request to wait for, is
/// launched again after 100 µs only. Where other threads read without a pause, and several calls wait at once, some waited 1.5 s on an H200 all the same.
///
/// The block takes an SM while it runs: 256 threads of 64 registers each. On GPUs of compute capability 9.0 and later (from
/// Hopper on) it fetches more than its threads load at once, 32 KiB, through 160 KiB of that SM's shared memory: its launch
/// waits for an SM that has as much free, and blocks of other kernels find less of it there. An agent takes it at the first
/// launch after the first such write, one that stays ([`AgentOptions::dedicated`]) from the start.
///
/// It is refused under MPS, on a GPU with a watchdog for kernels, and in a forked child (`WrongProcess`). A memory range
/// that is freed while the agent lives must not be read any more: that would end the CUDA context.
///
/// # Errors
///
/// An error other than `OutOfBounds`, `InvalidArgument` and `WrongProcess` is final: every later request returns it.
pub struct PushAgent<'a> {
    /// Dropped only when the kernel has ended, and in the process that made it.
    pub(super) parts: ManuallyDrop<Parts<'a>>,
    pub(super) packet_bytes: usize,
    pub(super) bounce: Bounce,
    place: Place,
    id: u64,
    owner: Owner,
}

/// What the kernel uses.
pub(super) struct Parts<'a> {
    pub(super) link: Link<'a>,
    pub(super) bounce: HostMemory,
    pub(super) buffers: Vec<Arc<HostMemory>>,
    /// Those, and what was registered.
    pub(super) reach: Reach,
    ranges: Vec<Range<'a>>,
    _session: Session,
}

/// Which way a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The kernel stores into host memory.
    Push,
    /// The kernel loads from host memory.
    Pull,
}

/// A registered range, pinned so that its memory stays where it is.
struct Range<'a> {
    addr: u64,
    len: usize,
    _pinned: Option<Pinned<'a>>,
}

fn refused(feature: Feature, cause: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new("agent", ErrorKind::UnsupportedFeature(feature), cause)
}

/// Where the kernel will run.
fn place(session: &Session, options: &AgentOptions) -> Result<Place> {
    match (session.backend(), options.stand_in) {
        (BackendKind::Emulated, true) => Ok(Place::StandIn),
        (BackendKind::Emulated, false) => {
            Err(refused(Feature::Operation, "backend 'emulated' has no GPU that could run the agent's kernel")
                .remedy("use a GPU, or ask for cpu_stand_in() to try the program without one"))
        }
        (kind, true) => Err(Error::new(
            "agent",
            ErrorKind::InvalidArgument,
            format!("cpu_stand_in() cannot read the memory of backend '{kind}'"),
        )
        .remedy("leave it out")),
        #[cfg(feature = "cuda")]
        (_, false) => super::gpu::check_gpu(options.gpu).map(|()| Place::Gpu(options.gpu)),
        #[cfg(not(feature = "cuda"))]
        (_, false) => {
            Err(refused(Feature::Operation, "built without the agent's kernel")
                .remedy("build gdrcopy with feature 'cuda'"))
        }
    }
}

impl<'a> PushAgent<'a> {
    /// Launches the kernel, which can read these ranges.
    ///
    /// # Errors
    ///
    /// `UnsupportedFeature` where a kernel may not stay (MPS, a watchdog), where GPU writes are not ordered, and on backend
    /// `emulated` without [`AgentOptions::cpu_stand_in`]; `InvalidArgument` for options out of range, no range, or a range
    /// on another GPU or in another CUDA context; what [`Session::pin`] returns for a range; `OutOfMemory`,
    /// `WrongProcess`, or what CUDA reports.
    pub fn start<R: Into<DeviceRange<'a>>>(
        session: &Session,
        ranges: impl IntoIterator<Item = R>,
        options: AgentOptions,
    ) -> Result<Self> {
        options.check()?;
        let place = place(session, &options)?;
        let pins = ranges
            .into_iter()
            .map(|range| {
                let range = range.into();
                let (addr, len) = (range.addr(), range.len());
                #[cfg(feature = "cuda")]
                if let Place::Gpu(ordinal) = place {
                    super::gpu::check_address(ordinal, addr)?;
                }
                Ok((addr.raw(), len, session.pin(range)?))
            })
            .collect::<Result<Vec<_>>>()?;
        if pins.is_empty() {
            return Err(Error::new("agent", ErrorKind::InvalidArgument, "no range to read from")
                .remedy("name the device memory that the agent shall read"));
        }

        let bounce = HostMemory::new(place, SLOT * SLOTS)?;
        #[cfg(feature = "cuda")]
        let gpu = match place {
            Place::Gpu(ordinal) => Some(super::gpu::Gpu::new(ordinal, options.threads, options.stages)?),
            Place::StandIn => None,
        };
        let ring_bytes = LINE * index(options.ring);
        let bells = Arc::new(session.alloc_on(options.gpu, ring_bytes.max(RING_SPACE))?);
        #[cfg(feature = "cuda")]
        let places = match &gpu {
            // A longer ring is in both halves of the cache anyhow.
            Some(gpu) if ring_bytes <= crate::cuda::near::STRIDE => gpu.nearest(bells.addr(), &bounce)?,
            _ => vec![0],
        };
        #[cfg(not(feature = "cuda"))]
        let places = vec![0];
        let ring = |place: usize| session.pin(DeviceRange::from(&bells).slice(place..place + ring_bytes)?)?.map();
        let rings = places.into_iter().map(ring).collect::<Result<Vec<_>>>()?;
        drop(bells);
        for ring in &rings {
            if !ring.publish_is_ordered() {
                return Err(refused(
                    Feature::Publish,
                    "this GPU does not order a CPU's writes to its memory by itself",
                ));
            }
            prepare(ring, options.ring)?;
        }
        let control = Arc::new(Control::new(place, options.ring, options.first_number)?);

        let (engine, ranges) = match place {
            #[cfg(feature = "cuda")]
            Place::Gpu(_) => {
                let gpu = gpu.ok_or_else(|| refused(Feature::Operation, "no kernel was loaded"))?;
                let engine = Engine::Gpu(gpu);
                let ranges = pins.into_iter().map(|(addr, len, pinned)| Range { addr, len, _pinned: Some(pinned) });
                (engine, ranges.collect())
            }
            Place::StandIn => {
                let windows = pins.iter().map(|(_, _, pinned)| pinned.map()).collect::<Result<Vec<_>>>()?;
                let fault = options.fault.map(|(after, fault)| {
                    let after = u32::try_from(after).unwrap_or(u32::MAX);
                    (options.first_number.wrapping_add(after), fault)
                });
                let ranges = pins.into_iter().map(|(addr, len, _)| Range { addr, len, _pinned: None }).collect();
                (Engine::StandIn(StandIn::new(Arc::clone(&control), &rings[0], windows, fault)), ranges)
            }
        };
        let link = Link::start(engine, rings, control, &options)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            parts: ManuallyDrop::new(Parts {
                link,
                bounce,
                buffers: Vec::new(),
                reach: Reach::default(),
                ranges,
                _session: session.clone(),
            }),
            packet_bytes: options.packet_bytes,
            bounce: options.bounce,
            place,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            owner: Owner::here(),
        })
    }

    /// Page-locked, zeroed host memory that the agent reads and writes directly.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for 0 bytes, `OutOfMemory`, `WrongProcess`.
    pub fn host_buffer(&mut self, bytes: usize) -> Result<HostBuffer> {
        self.owner.check("agent")?;
        memory::some(bytes)?;
        let memory = Arc::new(HostMemory::new(self.place, bytes)?);
        self.parts.reach.add(memory.ptr().addr(), bytes, memory.addr(), false);
        // Freed only when the kernel has ended, for freeing waits for it.
        self.parts.buffers.push(Arc::clone(&memory));
        Ok(HostBuffer::new(memory, self.id))
    }

    /// Lets [`read`](Self::read) and [`write`](Self::write) reach page-locked memory directly that is not the agent's: that
    /// of `cuMemHostAlloc` (`cudaHostAlloc`, PyTorch's pinned tensors), or what `cuMemHostRegister` (`cudaHostRegister`)
    /// page-locked. Any part of an allocation will do. CUDA is asked once, here, where the kernel finds it.
    ///
    /// With [`AgentOptions::cpu_stand_in`] any memory will do.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for memory that is not page-locked, or of which some is registered already or a
    /// [host buffer](Self::host_buffer); `WrongProcess`, or what CUDA reports.
    ///
    /// # Safety
    ///
    /// The memory stays allocated and page-locked until it is [taken back](Self::unregister_host) or the agent has been
    /// dropped. (Freeing page-locked memory waits for the kernel in any case.) After an error of a request with it that is
    /// final, it is not touched before the agent has been dropped, for the kernel may still be at work on it.
    pub unsafe fn register_host(&mut self, memory: *mut u8, bytes: usize) -> Result<()> {
        self.owner.check("agent")?;
        self.parts.reach.check(memory.addr(), bytes)?;
        let addr = match self.place {
            #[cfg(feature = "cuda")]
            Place::Gpu(ordinal) => super::gpu::host_address(ordinal, memory, bytes)?,
            Place::StandIn => u64_of(memory.expose_provenance()),
        };
        self.parts.reach.add(memory.addr(), bytes, addr, true);
        Ok(())
    }

    /// Takes memory back that was [registered](Self::register_host), by its first byte. It may be freed then.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if none was registered that begins there, `WrongProcess`.
    pub fn unregister_host(&mut self, memory: *const u8) -> Result<()> {
        self.owner.check("agent")?;
        self.parts.reach.remove(memory.addr())
    }

    /// Whether all of these bytes lie in one [host buffer](Self::host_buffer) of the agent's or in one piece of
    /// [registered](Self::register_host) memory, so that they are read and written without a copy on the CPU's side.
    #[inline]
    #[must_use]
    pub fn reaches(&self, host: &[u8]) -> bool {
        self.parts.reach.find(host.as_ptr().addr(), host.len()).is_some()
    }

    /// The device address of `bytes` bytes from `offset` in a registered range.
    #[inline]
    pub(super) fn device(&self, range: usize, offset: usize, bytes: usize) -> Result<u64> {
        self.owner.check("agent")?;
        match self.parts.ranges.get(range) {
            Some(found) if offset <= found.len && bytes <= found.len - offset => Ok(found.addr + u64_of(offset)),
            found => Err(no_such_bytes(found, range, offset, bytes)),
        }
    }

    /// Reads pieces of registered ranges into a buffer that the GPU writes itself, and waits for all of them.
    ///
    /// Any number, size and alignment. A piece that has the same place in 16 bytes on both sides is the quickest.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::read`]; `InvalidArgument` if the buffer is another agent's. Where bytes may have been asked for, the
    /// buffer is given up: its length is 0 then.
    pub fn read_into(&mut self, buffer: &mut HostBuffer, segments: &[Segment]) -> Result<()> {
        self.check(buffer, segments)?;
        self.run(Way::Push, buffer, segments)
    }

    /// The other way round: the GPU fetches pieces of a host buffer into registered ranges. On return the bytes are in
    /// device memory, and kernels see them that start later, or that acquire a flag which is set later.
    ///
    /// [`Mapping::write`](crate::Mapping::write) is quicker for small pieces, for it does not wait for the GPU.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::read_into`].
    pub fn write_from(&mut self, buffer: &mut HostBuffer, segments: &[Segment]) -> Result<()> {
        self.check(buffer, segments)?;
        self.run(Way::Pull, buffer, segments)
    }

    fn run(&mut self, way: Way, buffer: &mut HostBuffer, segments: &[Segment]) -> Result<()> {
        let outcome = self.ring_all(way, buffer, segments).and_then(|number| self.parts.link.wait(number));
        outcome.inspect_err(|_| buffer.abandon())
    }

    /// As [`PushAgent::read_into`], but returns at once: the request is in flight until [`PushAgent::wait`].
    ///
    /// Requests are served in the order in which they are made. At most half of the [ring](AgentOptions::ring) is in
    /// flight; beyond that the call waits for room.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::read_into`]; the buffer comes back inside the error if nothing was asked for.
    pub fn submit(&mut self, buffer: HostBuffer, segments: &[Segment]) -> Result<Ticket, SubmitError> {
        self.send_off(Way::Push, buffer, segments)
    }

    /// As [`PushAgent::write_from`], but returns at once, as [`PushAgent::submit`] does.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::submit`].
    pub fn submit_write(&mut self, buffer: HostBuffer, segments: &[Segment]) -> Result<Ticket, SubmitError> {
        self.send_off(Way::Pull, buffer, segments)
    }

    fn send_off(&mut self, way: Way, buffer: HostBuffer, segments: &[Segment]) -> Result<Ticket, SubmitError> {
        if let Err(error) = self.check(&buffer, segments) {
            return Err(SubmitError { buffer: Some(buffer), error });
        }
        match self.ring_all(way, &buffer, segments) {
            Ok(number) => Ok(Ticket { agent: self.id, number, buffer }),
            Err(error) => Err(SubmitError { buffer: None, error }),
        }
    }

    /// Whether a request is done. It also launches the kernel again where that is needed.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for another agent's request, `WrongProcess`, or an earlier final error.
    pub fn is_done(&mut self, ticket: &Ticket) -> Result<bool> {
        self.check_ticket(ticket)?;
        if self.parts.link.is_answered(ticket.number) {
            return Ok(true);
        }
        self.parts.link.nudge()?;
        Ok(self.parts.link.is_answered(ticket.number))
    }

    /// Waits for a request and gives its buffer back.
    ///
    /// # Errors
    ///
    /// As [`PushAgent::is_done`] and [`PushAgent::read`]; the buffer is lost then.
    pub fn wait(&mut self, ticket: Ticket) -> Result<HostBuffer> {
        self.check_ticket(&ticket)?;
        self.parts.link.wait(ticket.number)?;
        Ok(ticket.buffer)
    }

    fn check_ticket(&self, ticket: &Ticket) -> Result<()> {
        self.owner.check("agent")?;
        if ticket.agent == self.id {
            return Ok(());
        }
        Err(Error::new("agent", ErrorKind::InvalidArgument, "the request was made of another agent"))
    }

    fn check(&self, buffer: &HostBuffer, segments: &[Segment]) -> Result<()> {
        self.owner.check("agent")?;
        for segment in segments {
            self.device(segment.range, segment.offset, segment.bytes)?;
            buffer.addr(self.id, segment.at, segment.bytes)?;
        }
        Ok(())
    }

    /// Rings for segments that were checked; the request with the number returned is answered after all of them.
    fn ring_all(&mut self, way: Way, buffer: &HostBuffer, segments: &[Segment]) -> Result<u32> {
        // The last piece is the one that is answered, so each waits for the next.
        let mut last = (0, 0, 0);
        let order = if way == Way::Pull { Order::Bulk } else { Order::Copy };
        for segment in segments {
            let device = self.device(segment.range, segment.offset, segment.bytes)?;
            let host = buffer.addr(self.id, segment.at, segment.bytes)?;
            let (source, target) = if way == Way::Push { (device, host) } else { (host, device) };
            for start in (0..segment.bytes).step_by(MAX_BYTES) {
                let bytes = u32::try_from(MAX_BYTES.min(segment.bytes - start)).unwrap_or(u32::MAX);
                let (source, target, bytes) =
                    std::mem::replace(&mut last, (source + u64_of(start), target + u64_of(start), bytes));
                if bytes > 0 {
                    self.parts.link.ring(order, source, target, bytes)?;
                }
            }
        }
        let (source, target, bytes) = last;
        self.parts.link.ring(order.answered(), source, target, bytes)
    }

    /// How often the kernel was launched so far: once at the start, and once for each request that found it gone.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.parts.link.launches()
    }

    /// Bytes of shared memory that the next launch takes for bulk copies: 0 where it has none.
    #[doc(hidden)]
    #[must_use]
    pub fn bulk_bytes(&self) -> u32 {
        self.parts.link.bulk_bytes()
    }

    /// Whether the kernel is on the GPU now, or about to be: the next request needs no launch if it stays so.
    #[must_use]
    pub fn is_resident(&self) -> bool {
        !self.parts.link.has_left()
    }

    /// Ends the kernel and reports failure, which dropping cannot.
    ///
    /// # Errors
    ///
    /// `Busy` if the kernel did not end within [`AgentOptions::deadline`]: its memory stays allocated for good then.
    /// `WrongProcess`.
    pub fn stop(self) -> Result<()> {
        let mut agent = ManuallyDrop::new(self);
        agent.owner.check("agent")?;
        agent.end()
    }

    /// Called once, last.
    fn end(&mut self) -> Result<()> {
        self.parts.link.stop()?;
        // SAFETY: the callers do not use the value after this.
        unsafe { ManuallyDrop::drop(&mut self.parts) };
        Ok(())
    }
}

#[cold]
fn no_such_bytes(found: Option<&Range<'_>>, range: usize, offset: usize, bytes: usize) -> Error {
    let cause = match found {
        Some(found) => format!("{bytes} bytes at offset {offset} reach past the end of a range of {} bytes", found.len),
        None => format!("the agent has no range {range}"),
    };
    Error::new("agent", ErrorKind::OutOfBounds, cause).remedy("name the memory when the agent is started")
}

impl Drop for PushAgent<'_> {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The kernel, and all that it uses, is the parent's.
            return;
        }
        if let Err(error) = self.end() {
            tracing::error!(%error, "a push agent's kernel still runs: its memory stays allocated");
        }
    }
}

impl fmt::Debug for PushAgent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushAgent")
            .field("place", &self.place)
            .field("ranges", &self.parts.ranges.len())
            .field("launches", &self.launches())
            .finish_non_exhaustive()
    }
}
