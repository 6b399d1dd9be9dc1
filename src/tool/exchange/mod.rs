//! The CPU's half of a ping-pong: sends a message to every receiver, waits for every answer.

#![allow(unsafe_code, reason = "starts the answering side on memory that it shares")]

mod area;

use std::fmt;
use std::time::{Duration, Instant};

pub use area::{Area, SharedHost};

use crate::copy::fence;
use crate::sys::num::u64_of;
use crate::tool::answer::{
    ANSWER_STRIDE, Addresses, Answering, FLAG_STRIDE, Mode, PART, Shape, Side, Totals, WRONG_DATA,
};
use crate::tool::fail::Failure;
use crate::tool::interrupt;

/// Polls between two looks at anything else. No PAUSE among them: the answer is worth more than the sibling's time.
const POLLS: u32 = 1 << 14;
/// The largest number of a message; the next bit is the answer's.
const LAST: u32 = WRONG_DATA - 1;

/// Where flags, data and answers are.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// What the answering side polls, unless the data are their own flag.
    pub flags: Area<'a>,
    /// Data.
    pub data: Area<'a>,
    /// What this side polls.
    pub answers: Area<'a>,
}

/// Bytes that flags, data and answers of this shape take, each from a multiple of 64 on.
#[must_use]
pub fn bytes_of(shape: &Shape) -> [usize; 3] {
    [shape.blocks * FLAG_STRIDE, shape.blocks * shape.data_stride(), shape.blocks * ANSWER_STRIDE]
}

/// A running ping-pong.
pub struct Exchange<'a> {
    shape: Shape,
    places: Places<'a>,
    peer: Box<dyn Answering + 'a>,
    /// Message `number + 1`.
    message: Vec<u8>,
    /// How much of it is stored, where it need not be whole lines.
    stored: usize,
    number: u32,
    wrong: u64,
    timeout: Option<Duration>,
}

impl fmt::Debug for Exchange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("shape", &self.shape).field("number", &self.number).finish_non_exhaustive()
    }
}

/// Rounds made, and what was wrong with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Messages sent and answered.
    pub messages: u64,
    /// Messages whose data the answering side found to be wrong.
    pub wrong_messages: u64,
    /// Their words of 4 bytes that were wrong.
    pub wrong_words: u64,
}

impl<'a> Exchange<'a> {
    /// Starts the answering side. `timeout` is for each answer; without one the wait ends only with the other side.
    ///
    /// # Errors
    ///
    /// An area is too small, or the answering side cannot be started.
    pub fn start(
        side: &'a dyn Side,
        is_emulated: bool,
        shape: Shape,
        places: Places<'a>,
        timeout: Option<Duration>,
    ) -> Result<Self, Failure> {
        let Places { flags, data, answers } = places;
        let [flag_bytes, data_bytes, answer_bytes] = bytes_of(&shape);
        for (area, bytes) in [(flags, flag_bytes), (data, data_bytes), (answers, answer_bytes)] {
            if !area.has(bytes) {
                return Err(Failure::run(format!("no room for {bytes} bytes of messages in {area:?}")));
            }
            area.clear(bytes)?;
        }
        if shape.mode == Mode::Data
            && let Area::Device(mapping, _) = flags
            && !mapping.publish_is_ordered()
        {
            let line =
                "this GPU does not order a flag behind data by itself; measure -m packets or -G hostmem -D hostmem";
            return Err(Failure::run(line));
        }
        let at = Addresses {
            flags: flags.peer_address(is_emulated)?,
            data: data.peer_address(is_emulated)?,
            answers: answers.peer_address(is_emulated)?,
        };
        // Longer than any pause that this side makes between two messages; it bounds what a lost process leaves behind.
        let idle = timeout.unwrap_or_default().max(Duration::from_secs(10)) + Duration::from_secs(5);
        // SAFETY: the areas were found large enough and cleared; they live for 'a, as does the peer at most, which is
        // stopped when dropped.
        let peer = unsafe { side.start(shape, at, idle)? };
        let mut message = vec![0; shape.data_stride()];
        shape.fill(1, &mut message);
        let stored = if data.is_device() { shape.bytes } else { shape.bytes.next_multiple_of(PART) };
        Ok(Self { shape, places, peer, message, stored, number: 0, wrong: 0, timeout })
    }

    /// Makes the next message; not part of the round trip.
    pub fn prepare(&mut self) {
        if self.shape.mode != Mode::Flag {
            self.shape.fill(self.number + 1, &mut self.message);
        }
    }

    /// Sends the prepared message to every receiver and waits for all answers.
    ///
    /// # Errors
    ///
    /// The timeout, or that the other side failed; [`Failure::Interrupted`].
    #[inline]
    pub fn round(&mut self) -> Result<(), Failure> {
        if self.number == LAST {
            return Err(Failure::run(format!("{LAST} messages are the most in one run")));
        }
        self.number += 1;
        let Places { flags, data, .. } = self.places;
        let stride = self.shape.data_stride();
        for block in 0..self.shape.blocks {
            match self.shape.mode {
                Mode::Flag => flags.store(block * FLAG_STRIDE, self.number)?,
                Mode::Packets => data.post(block * stride, &self.message)?,
                Mode::Data => {
                    data.post(block * stride, &self.message[..self.stored])?;
                    fence::store();
                    flags.store(block * FLAG_STRIDE, self.number)?;
                }
            }
        }
        for block in 0..self.shape.blocks {
            self.await_answer(block)?;
        }
        Ok(())
    }

    #[inline]
    fn await_answer(&mut self, block: usize) -> Result<(), Failure> {
        let mut since = None;
        loop {
            for _ in 0..POLLS {
                let answer = self.places.answers.load(block * ANSWER_STRIDE)?;
                if answer & LAST == self.number {
                    self.wrong += u64::from(answer & WRONG_DATA != 0);
                    return Ok(());
                }
            }
            self.look_round(since.get_or_insert_with(Instant::now))?;
        }
    }

    /// What goes on while no answer comes.
    #[cold]
    fn look_round(&self, since: &Instant) -> Result<(), Failure> {
        self.peer.let_run();
        keep_waiting(self.number, *since, self.timeout, || self.peer.has_ended())
    }

    /// Ends the other side and says what was found.
    ///
    /// # Errors
    ///
    /// It failed or does not end, or counted other messages than this side did.
    pub fn stop(self) -> Result<Outcome, Failure> {
        let Totals { messages, wrong_words } = self.peer.stop()?;
        let sent = u64::from(self.number) * u64_of(self.shape.blocks);
        if messages != sent {
            return Err(Failure::run(format!("{sent} messages were sent and {messages} answered")));
        }
        Ok(Outcome { messages, wrong_messages: self.wrong, wrong_words })
    }
}

/// Whether the answer to a message may still come: an error if the user has had enough, `timeout` has passed `since`, or the
/// answering side has ended.
pub(super) fn keep_waiting(
    number: u32,
    since: Instant,
    timeout: Option<Duration>,
    has_ended: impl FnOnce() -> crate::error::Result<bool>,
) -> Result<(), Failure> {
    interrupt::check()?;
    if let Some(timeout) = timeout.filter(|&timeout| since.elapsed() > timeout) {
        let seconds = timeout.as_secs();
        return Err(Failure::run(format!(
            "no answer to message {number} within {seconds} s; is the GPU busy? -u sets another limit, -u 0 none"
        )));
    }
    if has_ended()? {
        return Err(Failure::run(format!("the answering side ended at message {number}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;
    use crate::error::Error;
    use crate::range::GpuAddr;
    use crate::session::Session;
    use crate::tool::answer::CpuSide;
    use crate::tool::answer::{PAGE, PAGES};

    /// What an answering side may do.
    #[derive(Clone, Copy)]
    enum Fault {
        /// Never answers.
        Silent,
        /// Has ended before the first message.
        Ended,
        /// Counts one message more.
        Miscounts,
    }

    impl Side for Fault {
        unsafe fn start(&self, _: Shape, _: Addresses, _: Duration) -> Result<Box<dyn Answering + '_>, Error> {
            Ok(Box::new(*self))
        }

        fn pages_by_distance(&self, _: GpuAddr) -> Result<[usize; PAGES], Error> {
            Ok(std::array::from_fn(|page| PAGE * page))
        }
    }

    impl Answering for Fault {
        fn has_ended(&self) -> Result<bool, Error> {
            Ok(matches!(self, Self::Ended))
        }

        fn let_run(&self) {
            std::thread::yield_now();
        }

        fn stop(self: Box<Self>) -> Result<Totals, Error> {
            Ok(Totals { messages: 1, wrong_words: 0 })
        }
    }

    fn shape(mode: Mode, bytes: usize, blocks: usize) -> Shape {
        Shape { mode, bytes, blocks, threads: 32 }
    }

    /// Runs `check` on an exchange whose flags, data and answers are in emulated GPU memory or in host memory.
    fn with<R>(
        side: &dyn Side,
        shape: Shape,
        in_gpu: [bool; 3],
        check: impl FnOnce(Exchange<'_>) -> R,
    ) -> Result<R, Failure> {
        with_timeout(Duration::from_secs(60), side, shape, in_gpu, check)
    }

    fn with_timeout<R>(
        timeout: Duration,
        side: &dyn Side,
        shape: Shape,
        in_gpu: [bool; 3],
        check: impl FnOnce(Exchange<'_>) -> R,
    ) -> Result<R, Failure> {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = session.alloc(1 << 20).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        let host = SharedHost::new(None, 1 << 20).unwrap();
        let area = |n: usize, in_gpu| {
            let start = n << 18;
            if in_gpu { Area::Device(&mapping, start) } else { Area::Host(&host, start) }
        };
        let [flags, data, answers] = [0, 1, 2].map(|n| area(n, in_gpu[n]));
        let places = Places { flags, data, answers };
        Exchange::start(side, true, shape, places, Some(timeout)).map(check)
    }

    #[test]
    fn every_receiver_is_served_in_every_mode_and_place() {
        let side = CpuSide::new();
        for mode in [Mode::Flag, Mode::Data, Mode::Packets] {
            for (bytes, blocks) in [(1, 1), (4, 8), (100, 3), (4096, 2)] {
                for bits in 0..8 {
                    let in_gpu = [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0];
                    let outcome = with(&side, shape(mode, bytes, blocks), in_gpu, |mut exchange| {
                        for _ in 0..10 {
                            exchange.prepare();
                            exchange.round().unwrap();
                        }
                        exchange.stop().unwrap()
                    });
                    let messages = 10 * u64_of(blocks);
                    let wanted = Outcome { messages, wrong_messages: 0, wrong_words: 0 };
                    assert_eq!(outcome.unwrap(), wanted, "{mode:?} {bytes} {blocks} {in_gpu:?}");
                }
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_counted_and_one_past_the_end_is_not() {
        let side = CpuSide::new();
        let table =
            [(Mode::Data, 100, 99, 1), (Mode::Data, 101, 101, 0), (Mode::Data, 64, 0, 1), (Mode::Packets, 64, 17, 1)];
        for (mode, bytes, at, wrong) in table {
            let outcome = with(&side, shape(mode, bytes, 1), [true, false, false], |mut exchange| {
                for number in 1..=5 {
                    exchange.prepare();
                    if number == 3 {
                        exchange.message[at] ^= 0x40;
                    }
                    exchange.round().unwrap();
                }
                exchange.stop().unwrap()
            });
            let wanted = Outcome { messages: 5, wrong_messages: wrong, wrong_words: wrong };
            assert_eq!(outcome.unwrap(), wanted, "{mode:?}, byte {at} of {bytes}");
        }
    }

    #[test]
    fn no_answer_ends_with_the_reason() {
        let round = |fault: Fault| {
            let soon = Duration::from_millis(20);
            with_timeout(soon, &fault, shape(Mode::Flag, 4, 1), [true, true, false], |mut exchange| exchange.round())
                .unwrap()
                .unwrap_err()
                .to_string()
        };
        assert!(round(Fault::Silent).contains("no answer to message 1 within") && round(Fault::Silent).contains("-u"));
        assert!(round(Fault::Ended).contains("ended at message 1"));
    }

    #[test]
    fn a_miscount_is_no_outcome() {
        let stop = with(&Fault::Miscounts, shape(Mode::Flag, 4, 1), [true; 3], |exchange| exchange.stop()).unwrap();
        assert!(stop.unwrap_err().to_string().contains("0 messages were sent and 1 answered"));
    }

    #[test]
    fn areas_that_do_not_fit_are_refused() {
        let too_large = with(&Fault::Silent, shape(Mode::Data, 1 << 20, 1), [true; 3], |exchange| drop(exchange));
        assert!(too_large.unwrap_err().to_string().contains("no room"));
    }
}
