//! One round: a window is made, given up in one of many ways, and its old address is looked at.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gdrcopy::{ErrorKind, Mapping, Pinned, Session};

use crate::common::stale_memory::{BUFFER, Kind, Memory, Tag, samples, text};
use crate::common::stale_probe::{self, Load};
use crate::common::stale_process::{
    Ended, Fork, OUTCOMES, Shared, Slot, adopt_orphans, die_with, kill, parent_pid, pid, reap, spawn,
};

/// What an old address shows, from best to worst.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Outcome {
    NothingMapped,
    Faulted,
    OwnBytes,
    Exposed,
}

impl Outcome {
    pub(crate) const ALL: [(Self, &'static str); OUTCOMES] = [
        (Self::NothingMapped, "nothing mapped"),
        (Self::Faulted, "faulted"),
        (Self::OwnBytes, "own bytes"),
        (Self::Exposed, "EXPOSED"),
    ];

    pub(crate) fn index(self) -> usize {
        Self::ALL.iter().position(|(outcome, _)| *outcome == self).unwrap_or(OUTCOMES - 1)
    }
}

/// How the window goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Act {
    /// Unmapped, in one process.
    Unmap,
    /// Unmapped and mapped once more, in one process.
    MapAgain,
    /// Mapping, pin and session dropped, in one process.
    Close,
    /// The parent of a live child gives it up, in part or whole, and lives on.
    ParentStays,
    /// As before, and the parent exits.
    ParentExits,
    /// As before, and the parent is killed; while it copies, if it still can.
    ParentKilled,
    /// The child drops what it inherited; the parent goes on using its own.
    ChildDrops,
}

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    act: Act,
    how: Fork,
}

const fn scenario(name: &'static str, act: Act, how: Fork) -> Scenario {
    Scenario { name, act, how }
}

pub(crate) const SCENARIOS: [Scenario; 11] = [
    scenario("unmap", Act::Unmap, Fork::Library),
    scenario("unmap, map again", Act::MapAgain, Fork::Library),
    scenario("drop mapping, pin, session", Act::Close, Fork::Library),
    scenario("fork, parent closes", Act::ParentStays, Fork::Library),
    scenario("fork, parent exits", Act::ParentExits, Fork::Library),
    scenario("fork, parent killed", Act::ParentKilled, Fork::Library),
    scenario("fork, child drops", Act::ChildDrops, Fork::Library),
    scenario("clone, parent closes", Act::ParentStays, Fork::Raw),
    scenario("clone, parent exits", Act::ParentExits, Fork::Raw),
    scenario("clone, parent killed", Act::ParentKilled, Fork::Raw),
    scenario("clone, child drops", Act::ChildDrops, Fork::Raw),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Mapping,
    Pin,
    Session,
}

const ORDERS: [[Step; 3]; 6] = {
    use Step::{Mapping, Pin, Session};
    [
        [Mapping, Pin, Session],
        [Mapping, Session, Pin],
        [Pin, Mapping, Session],
        [Pin, Session, Mapping],
        [Session, Mapping, Pin],
        [Session, Pin, Mapping],
    ]
};

/// What the number of a round decides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    order: [Step; 3],
    /// Steps of the order that are taken before the end; an end takes the rest.
    steps: usize,
    bytes: usize,
    /// Take memory that nobody else holds, if there is some.
    fresh: bool,
    /// The child keeps the descriptors it inherited, and with them the driver's idea of the parent.
    keeps_files: bool,
    before_kill: Duration,
    /// What the window shows. The neighbour's kind is for the harness's own check.
    kind: Kind,
}

impl Variant {
    pub(crate) fn of(number: u64) -> Self {
        let mut rest = usize::try_from(number).expect("usize has 64 bits");
        let mut digit = |base: usize| {
            let digit = rest % base;
            rest /= base;
            digit
        };
        Self {
            order: ORDERS[digit(ORDERS.len())],
            steps: digit(ORDERS[0].len() + 1),
            bytes: [4096, 65536, BUFFER][digit(3)],
            keeps_files: digit(2) == 0,
            fresh: digit(2) == 0,
            before_kill: Duration::from_micros([0, 3, 20, 100][digit(4)]),
            kind: Kind::Victim,
        }
    }

    pub(crate) fn leaking(self) -> Self {
        Self { kind: Kind::Neighbour, ..self }
    }
}

/// Where a window was, and whose words it may show.
#[derive(Clone, Copy, Debug)]
struct Place {
    addr: usize,
    bytes: usize,
    tag: Tag,
}

/// What a round works with.
#[derive(Clone, Copy)]
pub(crate) struct Round<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) memory: &'a Memory,
    pub(crate) slot: &'a Slot,
    /// Of the worker; its buffers bear it.
    pub(crate) number: u32,
    pub(crate) variant: Variant,
}

/// What a victim holds.
struct Held {
    mapping: Option<Mapping<'static>>,
    pin: Option<Pinned<'static>>,
    session: Option<Session>,
    tag: Tag,
}

impl Held {
    /// With the verb that reports where nothing hangs on it any more, by dropping where something does.
    fn take(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Mapping => self.mapping.take().map_or(Ok(()), |mapping| mapping.unmap().map_err(text)),
            Step::Pin if self.mapping.is_none() => self.pin.take().map_or(Ok(()), |pin| pin.unpin().map_err(text)),
            Step::Session if self.mapping.is_none() && self.pin.is_none() => {
                self.session.take().map_or(Ok(()), |session| session.close().map_err(text))
            }
            Step::Pin => {
                self.pin = None;
                Ok(())
            }
            Step::Session => {
                self.session = None;
                Ok(())
            }
        }
    }

    /// Drops alone, as a child's copies go.
    fn drop_one(&mut self, step: Step) {
        match step {
            Step::Mapping => self.mapping = None,
            Step::Pin => self.pin = None,
            Step::Session => self.session = None,
        }
    }

    /// A window that is still there shows what it must, and takes writes.
    fn in_use(&self) -> Result<(), String> {
        self.mapping.as_ref().map_or(Ok(()), |mapping| self.tag.check(mapping).and_then(|()| self.tag.rewrite(mapping)))
    }
}

impl Round<'_> {
    fn kept_tag(&self) -> Tag {
        Tag { kind: self.variant.kind, number: self.number }
    }

    fn hold(&self, session: Session) -> Result<(Held, Place), String> {
        let pin = self.memory.pin(&session, self.kept_tag(), self.variant.bytes, self.variant.fresh)?;
        if pin.sole {
            self.shared.recycled.fetch_add(1, Ordering::Relaxed);
        }
        let mapping = pin.pinned.map().map_err(text)?;
        // The address alone: nothing but the probe goes there once the mapping is gone.
        let addr = mapping.as_ptr().expose_provenance();
        let place = Place { addr, bytes: mapping.len(), tag: Tag { kind: Kind::Victim, ..pin.tag } };
        let held = Held { mapping: Some(mapping), pin: Some(pin.pinned), session: Some(session), tag: pin.tag };
        held.in_use()?;
        Ok((held, place))
    }

    /// Looks at an old address and keeps the worst that was seen.
    fn probe(&self, place: Place) -> Outcome {
        let worst = samples(place.bytes).map(|offset| {
            let addr = place.addr + offset;
            match stale_probe::load(addr) {
                Load::Unmapped => Outcome::NothingMapped,
                Load::Refused => Outcome::Faulted,
                Load::Word(word) if place.tag.owns(word) => Outcome::OwnBytes,
                Load::Word(word) => {
                    if self.variant.kind == Kind::Victim {
                        self.shared
                            .complain(&format!("EXPOSED: {word:#x} at {addr:#x}, {place:?}, {:?}", self.variant));
                    }
                    Outcome::Exposed
                }
            }
        });
        let worst = worst.into_iter().max().unwrap_or(Outcome::Exposed);
        self.slot.worst.fetch_max(worst.index() + 1, Ordering::AcqRel);
        worst
    }

    fn probe_after_neighbours(&self, place: Place) -> Result<(), String> {
        self.probe(place);
        self.shared.neighbours_turn()?;
        self.probe(place);
        Ok(())
    }

    /// Plays the round and says what the old address showed at worst. Without a session of the caller's every scenario
    /// has a process of its own.
    pub(crate) fn play(&self, scenario: &Scenario, session: Option<&Session>) -> Result<Outcome, String> {
        self.slot.reset();
        let played = match (scenario.act, session) {
            (Act::Unmap, Some(session)) => self.unmap(session.clone(), false),
            (Act::MapAgain, Some(session)) => self.unmap(session.clone(), true),
            (Act::Close, Some(_)) => self.close(),
            (act @ (Act::Unmap | Act::MapAgain | Act::Close), None) => self.apart(act),
            (act, _) => self.with_child(act, scenario.how),
        };
        played.map_err(|error| format!("{}, {:?}: {error}", scenario.name, self.variant))?;
        let worst = self.slot.worst.load(Ordering::Acquire);
        let seen = worst.checked_sub(1).and_then(|index| Outcome::ALL.get(index));
        let (outcome, _) = *seen.ok_or_else(|| format!("{}: nothing was probed", scenario.name))?;
        if outcome == Outcome::OwnBytes && scenario.act != Act::MapAgain {
            // Harmless, but no window may outlive its mapping.
            self.shared.complain(&format!("{}, {:?}: the window is still there", scenario.name, self.variant));
        }
        Ok(outcome)
    }

    /// A scenario of one process, in one of its own.
    fn apart(&self, act: Act) -> Result<(), String> {
        let worker = pid();
        let victim = spawn(self.shared, Fork::Library, || {
            die_with(worker)?;
            match act {
                Act::Close => self.close(),
                act => self.unmap(self.memory.open()?, act == Act::MapAgain),
            }
        })?;
        reap(victim, Ended::Code(0))
    }

    fn unmap(&self, session: Session, again: bool) -> Result<(), String> {
        let (mut held, place) = self.hold(session)?;
        held.take(Step::Mapping)?;
        if again {
            // As a rule it comes to the same address.
            held.mapping = held.pin.as_ref().map(Pinned::map).transpose().map_err(text)?;
        }
        self.probe_after_neighbours(place)?;
        held.in_use()?;
        held.take(Step::Mapping)?;
        held.take(Step::Pin)?;
        self.probe_after_neighbours(place)
    }

    fn close(&self) -> Result<(), String> {
        let (mut held, place) = self.hold(self.memory.open()?)?;
        for step in self.variant.order {
            held.take(step)?;
            held.in_use()?;
            if held.mapping.is_none() {
                self.probe_after_neighbours(place)?;
            }
        }
        Ok(())
    }

    /// Starts the victim and sees it, and the child it leaves, to the end.
    fn with_child(&self, act: Act, how: Fork) -> Result<(), String> {
        let worker = pid();
        let victim =
            spawn(self.shared, Fork::Library, || die_with(worker).and_then(|()| self.victim(worker, act, how)))?;
        if act == Act::ParentKilled {
            self.shared.wait("the victim's copy loop", || self.slot.copying.load(Ordering::Acquire))?;
            let started = Instant::now();
            while started.elapsed() < self.variant.before_kill {
                std::hint::spin_loop();
            }
            kill(victim);
            reap(victim, Ended::Signal(libc::SIGKILL))?;
        } else {
            reap(victim, Ended::Code(0))?;
        }
        if matches!(act, Act::ParentExits | Act::ParentKilled) {
            self.slot.gone.store(true, Ordering::Release);
            reap(self.slot.child.load(Ordering::Acquire), Ended::Code(0))?;
        }
        if self.slot.inherited.load(Ordering::Acquire) && self.variant.kind == Kind::Victim {
            return Err("a child inherited its parent's window".to_owned());
        }
        Ok(())
    }

    fn victim(&self, worker: i32, act: Act, how: Fork) -> Result<(), String> {
        let (mut held, place) = self.hold(self.memory.open()?)?;
        if self.variant.kind == Kind::Neighbour {
            undo_dontfork(place)?;
        }
        let parents = [pid(), worker];
        let child = spawn(self.shared, how, || self.child(parents, act, place, &mut held))?;
        self.shared.wait("the child", || self.slot.ready.load(Ordering::Acquire))?;
        held.in_use()?;
        if act == Act::ChildDrops {
            reap(child, Ended::Code(0))?;
            held.in_use()?;
            self.shared.neighbours_turn()?;
            held.in_use()?;
            self.variant.order.iter().try_for_each(|step| held.take(*step))?;
            return self.probe_after_neighbours(place);
        }
        for step in &self.variant.order[..self.variant.steps] {
            held.take(*step)?;
            held.in_use()?;
        }
        match act {
            Act::ParentExits => std::mem::forget(held),
            Act::ParentKilled => {
                self.slot.copying.store(true, Ordering::Release);
                loop {
                    held.in_use()?;
                }
            }
            _ => {
                self.slot.gone.store(true, Ordering::Release);
                reap(child, Ended::Code(0))?;
                held.in_use()?;
                self.variant.order.iter().try_for_each(|step| held.take(*step))?;
                self.probe_after_neighbours(place)?;
            }
        }
        Ok(())
    }

    /// Looks at its parent's window from the first moment until after the neighbours had their turn.
    fn child(&self, parents: [i32; 2], act: Act, place: Place, held: &mut Held) -> Result<(), String> {
        self.slot.child.store(pid(), Ordering::Release);
        let look = || {
            if self.probe(place) > Outcome::Faulted {
                self.slot.inherited.store(true, Ordering::Release);
            }
        };
        look();
        if act == Act::ChildDrops {
            let refused = held.mapping.as_ref().map(|mapping| mapping.store_u64(0, 0).map_err(|error| error.kind()));
            if refused != Some(Err(ErrorKind::WrongProcess)) {
                return Err(format!("a store through an inherited mapping gave {refused:?}"));
            }
            self.variant.order.iter().for_each(|step| held.drop_one(*step));
            look();
        }
        if !self.variant.keeps_files {
            // SAFETY: the handles that own these descriptors are not used in this process any more.
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        }
        self.slot.ready.store(true, Ordering::Release);
        if act == Act::ChildDrops {
            return Ok(());
        }
        // Nothing else ends it if both are killed: it must survive the one, and is not the other's child at first.
        let orphan = || !parents.contains(&parent_pid());
        self.shared.wait("the parent's end", || {
            look();
            self.slot.gone.load(Ordering::Acquire) || orphan()
        })?;
        // Whoever is the parent now stays it.
        die_with(parent_pid())?;
        if orphan() {
            return Err("both parents ended".to_owned());
        }
        self.shared.neighbours_turn()?;
        look();
        Ok(())
    }
}

/// Lets children inherit a window of host memory after all: what the library prevents.
fn undo_dontfork(place: Place) -> Result<(), String> {
    let at = std::ptr::with_exposed_provenance_mut(place.addr);
    // SAFETY: the window is live; the advice changes only what a child inherits.
    let code = unsafe { libc::madvise(at, place.bytes, libc::MADV_DOFORK) };
    if code == 0 { Ok(()) } else { Err(format!("MADV_DOFORK: {}", std::io::Error::last_os_error())) }
}

/// Plays rounds until there are `limit`, counting what they showed.
pub(crate) fn worker(shared: &Shared, memory: &Memory, index: usize, limit: u64) -> Result<(), String> {
    adopt_orphans(true);
    let session = if memory.has_cuda() { None } else { Some(memory.open()?) };
    let number = u32::try_from(index).map_err(text)?;
    let scenarios = u64::try_from(SCENARIOS.len()).map_err(text)?;
    while !shared.abandon.load(Ordering::Acquire) {
        let ticket = shared.next_round.fetch_add(1, Ordering::Relaxed);
        if ticket >= limit {
            break;
        }
        let kind = usize::try_from(ticket % scenarios).map_err(text)?;
        let variant = Variant::of(ticket / scenarios);
        let round = Round { shared, memory, slot: &shared.slots[index], number, variant };
        let outcome = round.play(&SCENARIOS[kind], session.as_ref())?;
        shared.counts[kind][outcome.index()].fetch_add(1, Ordering::Relaxed);
    }
    session.map_or(Ok(()), |session| session.close().map_err(text))
}
