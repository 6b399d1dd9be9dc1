//! The host's half of the protocol: ringing, waiting, and launching the kernel again when it has left.
//!
//! The kernel decides by itself when it leaves, and announces it with the number of the first request that it did not
//! serve. A doorbell that is rung meanwhile stays in the ring, in GPU memory. Whoever waits looks for the announcement as
//! well as for the answer, and launches the kernel again from that number on; so nothing is lost, and nothing that was
//! answered is done again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::{Engine, Launch};
use super::options::AgentOptions;
use super::wire::{Control, Doorbell, LINE, Order, index, reached, silent};
use crate::copy::fence;
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;

/// Looks at host memory between two looks at the clock.
const SPINS: u32 = 256;
/// After so many looks at the clock, some tens of microseconds, the processor's other thread gets its turn.
const IMPATIENT: u32 = 16;
/// Bytes of a copy from which on it is worth while to have bulk copies: more than 256 threads load at once.
const LONG: u32 = 32 << 10;
/// For calls that wait for a kernel's end, between one that stayed its time and the next.
const ROOM: Duration = Duration::from_micros(100);
/// Between two questions to CUDA whether the kernel still runs.
const ASK_EVERY: Duration = Duration::from_millis(2);

pub(super) struct Link<'a> {
    engine: Engine<'a>,
    /// One for each half of the L2 cache, where it has halves. Both always hold the same, and the kernel looks at the one
    /// that is near to its SM.
    rings: Vec<Mapping<'static>>,
    control: Arc<Control>,
    lines: u32,
    idle_ns: u64,
    residency_ns: u64,
    deadline: Duration,
    /// The number of the next request.
    next: u32,
    /// No request after this one is known to be answered.
    seen: u32,
    /// Requests since the last that will be answered.
    silent: u32,
    /// Whether launches take what bulk copies need: others that run on the GPU have less then.
    bulk: bool,
    generation: u32,
    launches: u64,
    launched: Instant,
    broken: Option<Error>,
}

/// The ring, with every line as it is before the first request.
pub(super) fn prepare(ring: &Mapping<'_>, lines: u32) -> Result<()> {
    for line in 0..lines {
        ring.post_line(LINE * index(line), &silent(line))?;
    }
    ring.flush()
}

fn nanoseconds(limit: Option<Duration>) -> u64 {
    // 0 is no limit, as is 584 years.
    limit.map_or(0, |limit| u64::try_from(limit.as_nanos()).unwrap_or(0))
}

impl<'a> Link<'a> {
    /// Launches the kernel.
    pub(super) fn start(
        engine: Engine<'a>,
        rings: Vec<Mapping<'static>>,
        control: Arc<Control>,
        options: &AgentOptions,
    ) -> Result<Self> {
        let mut link = Self {
            engine,
            rings,
            control,
            lines: options.ring,
            idle_ns: nanoseconds(options.idle_timeout),
            residency_ns: nanoseconds(options.residency),
            deadline: options.deadline,
            next: options.first_number,
            seen: options.first_number.wrapping_sub(1),
            silent: 0,
            // There will be no other launch to do so.
            bulk: options.idle_timeout.is_none() && options.residency.is_none(),
            generation: 0,
            launches: 0,
            launched: Instant::now(),
            broken: None,
        };
        link.launch(options.first_number)?;
        Ok(link)
    }

    #[cold]
    fn launch(&mut self, next: u32) -> Result<()> {
        self.launched = Instant::now();
        self.generation = self.generation.wrapping_add(1);
        self.launches += 1;
        let launch = Launch {
            rings: std::array::from_fn(|n| self.rings.get(n).map_or(0, |ring| ring.gpu_addr().raw())),
            control: self.control.addr(),
            idle_ns: self.idle_ns,
            residency_ns: self.residency_ns,
            mask: self.lines - 1,
            next,
            generation: self.generation,
            bulk: self.bulk,
        };
        self.engine.launch(launch).inspect_err(|error| self.broken = Some(error.clone()))
    }

    /// Launches the kernel again that left a request which is waited for. One that had stayed its time has been busy till then:
    /// so first there is a while without one, for the calls that wait for its end. Some of them are done only if nothing else
    /// has been launched by then, which otherwise happens within microseconds.
    #[cold]
    fn launch_for_waiting(&mut self, next: u32) -> Result<()> {
        let stayed = self.launched.elapsed();
        if self.residency_ns != 0 && stayed >= Duration::from_nanos(self.residency_ns) {
            while self.launched.elapsed() < stayed + ROOM {
                std::hint::spin_loop();
            }
        }
        self.launch(next)
    }

    /// How often the kernel was launched.
    pub(super) fn launches(&self) -> u64 {
        self.launches
    }

    /// Shared memory that the next launch takes for bulk copies, in bytes.
    pub(super) fn bulk_bytes(&self) -> u32 {
        if self.bulk { self.engine.bulk_bytes() } else { 0 }
    }

    /// Whether the kernel has announced that it leaves, or left.
    pub(super) fn has_left(&self) -> bool {
        self.control.left(self.generation).is_some()
    }

    /// The error that is final, if there was one.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        match &self.broken {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Rings for a request and returns its number. What this thread wrote to the GPU before is there before the kernel
    /// reads.
    #[inline]
    pub(super) fn ring(&mut self, order: Order, source: u64, target: u64, bytes: u32) -> Result<u32> {
        self.check()?;
        if self.next == u32::MAX {
            self.wrap()?;
        }
        // A packet's place is known by its request's number.
        let target = if order == Order::Send { self.control.packets_addr(self.next) } else { target };
        self.post(Doorbell { order, source, target, bytes })
    }

    fn post(&mut self, mut bell: Doorbell) -> Result<u32> {
        let in_flight = self.lines / 2;
        if bell.order.is_silent() {
            // Whoever waits for room in the ring needs answers to wait for.
            self.silent += 1;
            if self.silent >= self.lines / 4 {
                bell.order = bell.order.answered();
            }
        }
        if bell.order.is_answered() {
            self.silent = 0;
        }
        self.bulk |= bell.order.is_bulk() && bell.bytes > LONG;
        let number = self.next;
        // A line may be rung again when a later request was answered, for all warps have seen this one then.
        if number.wrapping_sub(self.seen) > in_flight {
            self.wait(number.wrapping_sub(in_flight))?;
        }
        self.post_bell(number, bell)?;
        self.next = number.wrapping_add(1);
        if let Some(unserved) = self.control.left(self.generation) {
            self.launch(unserved)?;
        }
        Ok(number)
    }

    /// What this thread wrote before is there before the doorbell is.
    #[inline]
    fn post_bell(&self, number: u32, bell: Doorbell) -> Result<()> {
        let line = bell.line(number);
        fence::store();
        for ring in &self.rings {
            ring.post_line(LINE * index(number & (self.lines - 1)), &line)?;
        }
        Ok(())
    }

    /// Before numbers wrap: a packet's number must not be one that its place has seen before.
    #[cold]
    fn wrap(&mut self) -> Result<()> {
        let last = self.post(Doorbell { order: Order::CopyAndAnswer, source: 0, target: 0, bytes: 0 })?;
        self.wait(last)?;
        self.control.clear_packets();
        Ok(())
    }

    /// Whether a request that is answered has been.
    pub(super) fn is_answered(&self, number: u32) -> bool {
        reached(self.control.answered(), number)
    }

    /// Launches the kernel again if it left requests unserved.
    pub(super) fn nudge(&mut self) -> Result<()> {
        self.check()?;
        match self.control.left(self.generation) {
            Some(unserved) if unserved != self.next => self.launch(unserved),
            _ => Ok(()),
        }
    }

    /// Waits for the answer to a request, or to a later one.
    #[inline]
    pub(super) fn wait(&mut self, number: u32) -> Result<()> {
        self.check()?;
        let answered = self.until(|control| {
            let answered = control.answered();
            reached(answered, number).then_some(answered)
        })?;
        self.saw(answered);
        Ok(())
    }

    /// Waits for the packets of a request that sends them, and takes their data.
    #[inline]
    pub(super) fn take_packets(&mut self, number: u32, to: &mut [u8]) -> Result<()> {
        let mut packets = to.chunks_mut(8).enumerate().peekable();
        self.until(|control| {
            while let Some((packet, chunk)) = packets.peek_mut() {
                let data = control.packet(number, *packet)?;
                chunk.copy_from_slice(&data[..chunk.len()]);
                packets.next();
            }
            Some(())
        })?;
        self.saw(number);
        Ok(())
    }

    fn saw(&mut self, number: u32) {
        if reached(number, self.seen) {
            self.seen = number;
        }
    }

    /// Waits until `ready`, and sees to it that the kernel runs.
    #[inline]
    fn until<T>(&mut self, mut ready: impl FnMut(&Control) -> Option<T>) -> Result<T> {
        for _ in 0..SPINS {
            if let Some(value) = ready(&self.control) {
                return Ok(value);
            }
            if let Some(unserved) = self.control.left(self.generation) {
                // What was answered before the kernel left is there by now.
                if let Some(value) = ready(&self.control) {
                    return Ok(value);
                }
                self.launch_for_waiting(unserved)?;
            }
        }
        self.until_late(ready)
    }

    #[cold]
    fn until_late<T>(&mut self, mut ready: impl FnMut(&Control) -> Option<T>) -> Result<T> {
        let started = Instant::now();
        let mut asked = started;
        let mut looks = 0_u32;
        loop {
            looks = looks.saturating_add(1);
            for _ in 0..SPINS {
                if let Some(value) = ready(&self.control) {
                    return Ok(value);
                }
                if looks > IMPATIENT {
                    std::hint::spin_loop();
                }
            }
            if let Some(unserved) = self.control.left(self.generation) {
                if let Some(value) = ready(&self.control) {
                    return Ok(value);
                }
                self.launch_for_waiting(unserved)?;
            }
            self.engine.give_way();
            let now = Instant::now();
            let mut fate = Ok(());
            if now.duration_since(asked) > ASK_EVERY {
                asked = now;
                fate = self.ask();
            }
            if fate.is_ok() && now.duration_since(started) > self.deadline {
                fate = Err(self.too_late());
            }
            if let Err(error) = fate {
                // It may have answered last of all.
                if let Some(value) = ready(&self.control) {
                    return Ok(value);
                }
                self.broken = Some(error.clone());
                return Err(error);
            }
        }
    }

    /// Whether the kernel runs, or has announced that it does not.
    fn ask(&self) -> Result<()> {
        if self.engine.has_ended()? && !self.has_left() {
            return Err(Error::new("agent", ErrorKind::Io(libc::EIO), "the kernel ended without a word")
                .remedy("look for an error of another kernel in the same context"));
        }
        Ok(())
    }

    #[cold]
    fn too_late(&self) -> Error {
        let ms = self.deadline.as_millis();
        if self.control.started() == self.generation {
            let cause = format!("the kernel did not answer within {ms} ms");
            Error::new("agent", ErrorKind::Busy, cause).remedy("look with nvidia-smi for errors of the GPU")
        } else {
            let cause = format!("the kernel did not start within {ms} ms: other kernels occupy the GPU");
            Error::new("agent", ErrorKind::Busy, cause)
                .remedy("start the agent dedicated() and before them, or give it a longer deadline")
        }
    }

    /// After an error: makes orders to stop of all that was rung for and not answered, and waits until the kernel is at none
    /// of it. Whether that is certain; if not, the kernel may still be copying.
    #[cold]
    pub(super) fn retract(&mut self) -> bool {
        let stop = Doorbell { order: Order::Stop, source: 0, target: 0, bytes: 0 };
        let answered = self.control.answered();
        // One beyond the last, for a kernel that has just read that one. A doorbell is two parts that are each seen whole, and
        // either of these with the other one of before asks for nothing.
        let unanswered = self.next.wrapping_sub(answered).min(self.lines / 2 + 1);
        for back in 0..unanswered {
            let number = self.next.wrapping_sub(back);
            if self.post_bell(number, stop).is_err() {
                return false;
            }
        }
        fence::store();
        if self.rings.iter().any(|ring| ring.flush().is_err()) {
            return false;
        }
        let started = Instant::now();
        loop {
            // An error is one of the context, which took the kernel along.
            if self.has_left() || self.engine.has_ended().unwrap_or(true) {
                return true;
            }
            if started.elapsed() > self.deadline {
                // One that has yet to start will find nothing else.
                return self.control.started() != self.generation;
            }
            self.engine.give_way();
            std::hint::spin_loop();
        }
    }

    /// Ends the kernel and waits for that. After an error it may still run.
    pub(super) fn stop(&mut self) -> Result<()> {
        if !self.has_left() {
            // At most half of the ring is in flight, so there is a line for this.
            let bell = Doorbell { order: Order::Stop, source: 0, target: 0, bytes: 0 };
            let number = self.next;
            self.post_bell(number, bell)?;
            fence::store();
        }
        match self.engine.finish(self.deadline) {
            // A context that died took the kernel along.
            Err(error) if error.kind() != ErrorKind::Busy => Ok(()),
            other => other,
        }
    }
}
