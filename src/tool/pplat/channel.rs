//! Round trips through the library's message channel: the CPU's ends of its two rings.

use std::thread;
use std::time::{Duration, Instant};

use super::answerer::{Answerer, PATIENCE, Peer, fill};
use super::args::Plan;
use super::message::{Letter, Memory};
use super::timing::Rounds;
use crate::channel::{ChannelBuilder, ChannelError, LINE_PAYLOAD, Receiver, Sender};
use crate::copy::fence;
use crate::error::Error;
use crate::session::Session;
use crate::sys::num::u64_of;
use crate::tool::answer::{Totals, WRONG_DATA};
use crate::tool::exchange::{Outcome, keep_waiting};
use crate::tool::fail::Failure;
use crate::tool::interrupt;
use crate::tool::measure::Amount;

/// How long to wait for an answer between two looks at anything else.
const SLICE: Duration = Duration::from_millis(5);
/// For a kernel that should stay for as many rounds as were asked for. The end of the process ends it, too.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The largest number of a message; the next bit is the answer's.
const LAST: u32 = WRONG_DATA - 1;

/// A channel's two ends for such messages on this GPU.
pub(super) fn open(
    session: &Session,
    ordinal: usize,
    letter: Letter,
    plan: &Plan,
) -> Result<(Sender, Receiver), Error> {
    // From its start on; the row and whatever comes before it take less.
    let limit = match plan.amount {
        Amount::Exactly(_) => DAY,
        Amount::UpTo(_, time) => 2 * time + plan.timeout.unwrap_or(DAY) + Duration::from_secs(60),
    };
    // As short as it can be, for it is near then: there is one message at a time.
    let lines = letter.bytes.div_ceil(LINE_PAYLOAD).next_power_of_two().max(32);
    let lines = u32::try_from(lines).unwrap_or(u32::MAX);
    let builder = ChannelBuilder::new().gpu(ordinal).kernel_limit(limit).lines_to_gpu(lines);
    let builder = if letter.ring == Memory::Hostmem { builder.ring_in_host_memory() } else { builder };
    builder.open(session)
}

/// A running ping-pong over a channel.
pub(super) struct Line<'a> {
    /// Ended first: it uses what the ends keep.
    peer: Peer<'a>,
    sender: Sender,
    receiver: Receiver,
    letter: Letter,
    /// Message `number + 1`, once it is prepared.
    message: Vec<[u8; LINE_PAYLOAD]>,
    answer: [u8; LINE_PAYLOAD],
    number: u32,
    /// Messages, as the other side says, and answers.
    wrong_messages: u64,
    /// In answers; the other side counts those in messages.
    wrong_words: u64,
    timeout: Option<Duration>,
}

impl<'a> Line<'a> {
    /// Starts the answering side on a new channel. `timeout` is for each answer.
    pub(super) fn start(
        answerer: &'a Answerer,
        (sender, receiver): (Sender, Receiver),
        letter: Letter,
        timeout: Option<Duration>,
    ) -> Result<Self, Failure> {
        let peer = answerer.start(&sender, letter)?;
        let message = vec![[0; LINE_PAYLOAD]; letter.bytes.div_ceil(LINE_PAYLOAD)];
        let answer = [0; LINE_PAYLOAD];
        let mut line = Self {
            peer,
            sender,
            receiver,
            letter,
            message,
            answer,
            number: 0,
            wrong_messages: 0,
            wrong_words: 0,
            timeout,
        };
        fill(1, line.letter.bytes, &mut line.message);
        line.await_start()?;
        Ok(line)
    }

    fn await_start(&self) -> Result<(), Failure> {
        let started = Instant::now();
        while !self.sender.kernel_has_started() {
            interrupt::check()?;
            if started.elapsed() > PATIENCE {
                let seconds = PATIENCE.as_secs();
                return Err(Failure::run(format!(
                    "the GPU did not start a kernel within {seconds} s; look with nvidia-smi for another program that keeps \
                     it busy"
                )));
            }
            thread::yield_now();
        }
        Ok(())
    }

    /// Counts what is wrong with the rest of the last answer, which the round did not look at.
    fn check_answer(&mut self) {
        if self.number == 0 {
            return;
        }
        let mut wanted = [[0; LINE_PAYLOAD]];
        fill(self.number, self.letter.answer_bytes, &mut wanted);
        let words = |bytes: &[u8; LINE_PAYLOAD]| bytes.as_chunks::<4>().0.to_vec();
        let pairs = words(&self.answer).into_iter().zip(words(&wanted[0])).skip(1);
        let wrong = u64_of(pairs.filter(|(found, wanted)| found != wanted).count());
        self.wrong_words += wrong;
        self.wrong_messages += u64::from(wrong > 0);
    }

    #[inline]
    fn send(&mut self) -> Result<(), Failure> {
        let mut sent = self.sender.try_send_lines(&self.message).map_err(|error| self.failed(error))?;
        // One message is under way at a time, and fits: there is room unless the other side is gone.
        let mut since = None;
        while sent < self.message.len() {
            self.look_round(*since.get_or_insert_with(Instant::now))?;
            sent += self.sender.try_send_lines(&self.message[sent..]).map_err(|error| self.failed(error))?;
        }
        // Nothing else is stored until the answer is there, so nothing else would see the last line off.
        fence::store();
        Ok(())
    }

    #[inline]
    fn await_answer(&mut self) -> Result<[u8; LINE_PAYLOAD], Failure> {
        let mut since = None;
        loop {
            match self.receiver.recv_line(SLICE) {
                Ok(line) => return Ok(line),
                Err(ChannelError::TimedOut) => self.look_round(*since.get_or_insert_with(Instant::now))?,
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    /// What goes on while nothing moves.
    #[cold]
    fn look_round(&self, since: Instant) -> Result<(), Failure> {
        keep_waiting(self.number, since, self.timeout, || self.peer.has_ended())
    }

    #[cold]
    fn failed(&self, error: ChannelError) -> Failure {
        match error {
            ChannelError::Failed(error) => error.into(),
            other => Failure::run(format!("message {}: {other}", self.number)),
        }
    }

    /// Ends the other side and says what was found.
    pub(super) fn stop(mut self) -> Result<Outcome, Failure> {
        self.check_answer();
        self.sender.stop();
        let Totals { messages, wrong_words } = self.peer.finish()?;
        if messages != u64::from(self.number) {
            return Err(Failure::run(format!("{} messages were sent and {messages} answered", self.number)));
        }
        Ok(Outcome { messages, wrong_messages: self.wrong_messages, wrong_words: wrong_words + self.wrong_words })
    }
}

impl Rounds for Line<'_> {
    fn prepare(&mut self) {
        self.check_answer();
        fill(self.number + 1, self.letter.bytes, &mut self.message);
    }

    #[inline]
    fn round(&mut self) -> Result<(), Failure> {
        if self.number == LAST {
            return Err(Failure::run(format!("{LAST} messages are the most in one run")));
        }
        self.number += 1;
        self.send()?;
        self.answer = self.await_answer()?;
        let [a, b, c, d, ..] = self.answer;
        let first = u32::from_le_bytes([a, b, c, d]);
        if first & LAST != self.number {
            return Err(Failure::run(format!(
                "the answer to message {} came to message {}",
                first & LAST,
                self.number
            )));
        }
        self.wrong_messages += u64::from(first & WRONG_DATA != 0);
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        self.sender.stop();
        // After `stop` there is nothing left to end.
        let _ = self.peer.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;
    use crate::tool::pplat::args;

    fn with<R>(letter: Letter, check: impl FnOnce(Line<'_>) -> R) -> R {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let plan = args::tests::plan("-m channel -t 20").unwrap();
        let answerer = Answerer::new(None).unwrap();
        let ends = open(&session, 0, letter, &plan).unwrap();
        check(Line::start(&answerer, ends, letter, Some(Duration::from_secs(60))).unwrap())
    }

    fn letter(bytes: usize, answer_bytes: usize, ring: Memory) -> Letter {
        Letter { bytes, answer_bytes, ring }
    }

    #[test]
    fn messages_of_every_size_go_round_in_both_memories() {
        for ring in [Memory::Gpumem, Memory::Hostmem] {
            for (bytes, answer_bytes) in [(1, 4), (48, 48), (49, 4), (512, 4), (16 << 10, 48)] {
                let outcome = with(letter(bytes, answer_bytes, ring), |mut line| {
                    for _ in 0..30 {
                        line.prepare();
                        line.round().unwrap();
                    }
                    line.stop().unwrap()
                });
                let wanted = Outcome { messages: 30, wrong_messages: 0, wrong_words: 0 };
                assert_eq!(outcome, wanted, "{bytes}/{answer_bytes} {ring:?}");
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_counted_on_either_side() {
        let outcome = with(letter(100, 48, Memory::Gpumem), |mut line| {
            for number in 1..=5 {
                line.prepare();
                if number == 2 {
                    // The last byte of the message, in its third line.
                    line.message[2][3] ^= 1;
                }
                line.round().unwrap();
                if number == 4 {
                    line.answer[LINE_PAYLOAD - 1] ^= 1;
                }
            }
            line.stop().unwrap()
        });
        assert_eq!(outcome, Outcome { messages: 5, wrong_messages: 2, wrong_words: 2 });
    }

    #[test]
    fn no_answer_ends_with_the_reason() {
        let line = with(letter(48, 48, Memory::Gpumem), |mut line| {
            line.round().unwrap();
            line.sender.stop();
            while !line.sender.kernel_has_ended() {
                thread::yield_now();
            }
            line.round().unwrap_err().to_string()
        });
        assert!(line.contains("message 2: channel: the kernel has ended"), "{line}");
    }
}
