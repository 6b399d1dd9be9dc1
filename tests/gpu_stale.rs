//! An old window address never shows another buffer's bytes.
//!
//! Windows are made and given up in every order: unmapped, their handles dropped, their process ended or killed, with a
//! child forked meanwhile that looks at the parent's address all along. All that time neighbours take and give back
//! BAR1 pages and device memory, so that what one lets go another gets. Then the old address is read: it must fault, or
//! show the bytes of the buffer that was there. The words of every buffer name their owner and their place, so the
//! neighbours notice writes that went astray as well.
//!
//! CUDA lives in one process, forked before anything else. The victims have none: they import what the owner exports,
//! which is quick enough for a fork and a session of its own in every round. Without a GPU the same rounds run on
//! emulated ones, each process with its own; that proves the harness, not the driver.
//!
//! Backend vulkan needs CUDA in every process that pins, which a fork does not survive: there each victim and each
//! neighbour allocates by itself, and every scenario has a process of its own. A second or two for each round of them makes
//! these rounds few.
//!
//! Environment: `GDRCOPY_STALE_ROUNDS`, `GDRCOPY_STALE_VULKAN_ROUNDS`, `GDRCOPY_STALE_SECONDS` (after which the test fails).

#![allow(unsafe_code, reason = "raw forks, old addresses and descriptor passing")]

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

mod common {
    pub(crate) mod env;
    pub(crate) mod stale_memory;
    pub(crate) mod stale_probe;
    pub(crate) mod stale_process;
    pub(crate) mod stale_round;
    #[path = "../../src/tool/sanity/socket.rs"]
    pub(crate) mod stale_socket;
}

use gdrcopy::BackendKind;

use common::env::from_env;
use common::stale_memory::{Memory, PER_NEIGHBOUR, neighbour, owner, prove_tags, sockets};
use common::stale_probe;
use common::stale_process::{Crew, MAX_NEIGHBOURS, MAX_WORKERS, Shared, adopt_orphans, alone};
use common::stale_round::{Outcome, Round, SCENARIOS, Scenario, Variant, worker};
use common::stale_socket::{pair, receive, send};

/// Without a cap in the environment.
const SECONDS: u64 = 240;

/// Each has a process with a CUDA context and a Vulkan device at any time.
#[cfg(feature = "vulkan")]
const VULKAN_WORKERS: usize = 6;

/// Past the test harness, which keeps the output of tests that pass to itself.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Runs `check` in a process of its own, where handlers, forks and faults disturb nobody.
fn in_child(check: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let mut crew = Crew::new(Shared::new());
    crew.start("check", check)?;
    crew.join("check", Instant::now() + Duration::from_secs(60))
}

#[test]
fn the_probe_tells_what_is_behind_an_address() {
    let _alone = alone();
    in_child(|| {
        stale_probe::install();
        stale_probe::prove()
    })
    .unwrap();
}

/// The scenarios in which a child looks at the window of a parent that ends or goes on.
fn with_child() -> impl Iterator<Item = &'static Scenario> {
    SCENARIOS.iter().filter(|scenario| scenario.name.contains("parent"))
}

/// A window made inheritable again, onto a neighbour's words, is what the test exists to catch.
#[test]
fn an_inherited_window_is_reported_as_exposed() {
    let _alone = alone();
    let shared = Shared::new();
    let memory = Memory::Own(BackendKind::Emulated);
    shared.neighbours.store(1, Ordering::Relaxed);
    let mut crew = Crew::new(shared);
    crew.start("neighbour", || neighbour(shared, &memory, 0)).unwrap();
    crew.start("check", || {
        stale_probe::install();
        adopt_orphans(true);
        let session = memory.open()?;
        for scenario in with_child() {
            for number in 0..24 {
                let (slot, variant) = (&shared.slots[0], Variant::of(number));
                let round = Round { shared, memory: &memory, slot, number: 0, variant };
                let sound = round.play(scenario, Some(&session))?;
                let leaking = Round { variant: variant.leaking(), ..round }.play(scenario, Some(&session))?;
                if sound > Outcome::Faulted || leaking != Outcome::Exposed {
                    return Err(format!("{}: {sound:?} when sound, {leaking:?} when leaking", scenario.name));
                }
            }
        }
        Ok(())
    })
    .unwrap();
    crew.join("check", Instant::now() + Duration::from_secs(60)).unwrap();
}

/// As for a backend with CUDA in every process, which needs a GPU.
#[test]
fn every_scenario_can_have_a_process_of_its_own() {
    let _alone = alone();
    let shared = Shared::new();
    let memory = Memory::Own(BackendKind::Emulated);
    shared.neighbours.store(1, Ordering::Relaxed);
    let mut crew = Crew::new(shared);
    crew.start("neighbour", || neighbour(shared, &memory, 0)).unwrap();
    crew.start("check", || {
        adopt_orphans(true);
        stale_probe::install();
        for scenario in &SCENARIOS {
            for number in [0, 7, 100] {
                let (slot, variant) = (&shared.slots[0], Variant::of(number));
                let round = Round { shared, memory: &memory, slot, number: 0, variant };
                let outcome = round.play(scenario, None)?;
                // The one that maps again may come to the same address.
                if outcome > Outcome::OwnBytes || (outcome == Outcome::OwnBytes && !scenario.name.contains("again")) {
                    return Err(format!("{}: {outcome:?}", scenario.name));
                }
            }
        }
        Ok(())
    })
    .unwrap();
    crew.join("check", Instant::now() + Duration::from_secs(60)).unwrap();
}

/// A window that shows another's word is noticed by its neighbour, and a neighbour's window by the probe.
#[test]
fn a_foreign_word_is_noticed_in_either_direction() {
    let _alone = alone();
    in_child(|| prove_tags(&Memory::Own(BackendKind::Emulated))).unwrap();
}

/// The way in which victims without CUDA come by their memory.
#[test]
fn descriptors_reach_another_process() {
    let _alone = alone();
    let (from, to) = pair().unwrap();
    let shared = Shared::new();
    let mut crew = Crew::new(shared);
    crew.start("sender", || {
        for number in 0..40_u64 {
            let path = std::env::temp_dir().join(format!("gdrcopy-stale-{}-{number}", std::process::id()));
            std::fs::write(&path, number.to_string()).map_err(|error| error.to_string())?;
            let file = std::fs::File::open(&path).map_err(|error| error.to_string())?;
            std::fs::remove_file(&path).map_err(|error| error.to_string())?;
            send(from.as_fd(), &number.to_string(), (number % 3 > 0).then_some(file.as_fd()))?;
        }
        Ok(())
    })
    .unwrap();
    drop(from);
    for number in 0..40_u64 {
        let (text, fd) = receive(to.as_fd(), true).unwrap().expect("a message");
        assert_eq!((text, fd.is_some()), (number.to_string(), number % 3 > 0));
        let read = fd.map(|fd| std::io::read_to_string(std::fs::File::from(fd)).unwrap());
        assert!(read.is_none_or(|read| read == number.to_string()));
    }
    crew.join("sender", Instant::now() + Duration::from_secs(10)).unwrap();
    assert!(receive(to.as_fd(), true).unwrap().is_none(), "the end");
}

/// Starts the owner, and takes its memory if there is a GPU. The text says why there is none.
fn memory(crew: &mut Crew, shared: &'static Shared, victims: usize) -> Result<(Memory, Option<String>), String> {
    if std::env::var("GDRCOPY_BACKEND").is_ok_and(|name| name == "emulated") {
        return Ok((Memory::Own(BackendKind::Emulated), Some("GDRCOPY_BACKEND=emulated".to_owned())));
    }
    let neighbours = MAX_NEIGHBOURS * PER_NEIGHBOUR;
    let (hand, take) = sockets()?;
    crew.start("owner", || owner(shared, &hand, victims, neighbours))?;
    // The owner's ends are the owner's alone, so that its end is seen.
    drop(hand);
    match take.receive(victims, neighbours) {
        Ok(exports) => Ok((Memory::Exported(exports), None)),
        Err(why) if cfg!(feature = "cuda") && Path::new("/dev/nvidiactl").exists() => {
            Err(format!("there is an NVIDIA driver, but: {}", shared.complaint().unwrap_or(why)))
        }
        Err(why) => {
            crew.join("owner", Instant::now() + Duration::from_secs(10))?;
            Ok((Memory::Own(BackendKind::Emulated), Some(why)))
        }
    }
}

fn table(shared: &Shared) -> String {
    let mut text = format!("{:<28}{:>9}", "scenario", "rounds");
    for (_, name) in Outcome::ALL {
        let _ = write!(text, "{name:>16}");
    }
    for (scenario, counts) in SCENARIOS.iter().zip(&shared.counts) {
        let counts = counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let _ = write!(text, "\n{:<28}{:>9}", scenario.name, counts.iter().sum::<u64>());
        for count in counts {
            let _ = write!(text, "{count:>16}");
        }
    }
    text
}

fn exposures(shared: &Shared) -> u64 {
    shared.counts.iter().map(|counts| counts[Outcome::Exposed.index()].load(Ordering::Relaxed)).sum()
}

/// The rounds, and then the end of everybody.
fn run(
    crew: &mut Crew,
    shared: &'static Shared,
    memory: &Memory,
    limit: u64,
    workers: usize,
    deadline: Instant,
) -> Result<(), String> {
    if !memory.has_cuda() {
        // Loaded here once instead of by every victim. It is initialised in the owner only.
        memory.open()?.close().map_err(|error| error.to_string())?;
    }
    let neighbours = if workers >= 4 { MAX_NEIGHBOURS } else { 1 };
    shared.neighbours.store(neighbours, Ordering::Relaxed);
    for index in 0..neighbours {
        crew.start("neighbour", || neighbour(shared, memory, index))?;
    }
    for index in 0..workers {
        crew.start("worker", || {
            stale_probe::install();
            worker(shared, memory, index, limit)
        })?;
    }
    crew.join("worker", deadline)?;
    shared.finish.store(true, Ordering::Release);
    let deadline = deadline.max(Instant::now() + Duration::from_secs(20));
    crew.join("neighbour", deadline)?;
    crew.join("owner", deadline)?;
    if crew.nobody_left() { Ok(()) } else { Err("a process was left behind".to_owned()) }
}

/// What a soak is told.
struct Soak {
    /// In the report.
    name: String,
    limit: u64,
    workers: usize,
    started: Instant,
}

impl Soak {
    /// Plays the rounds, prints what they showed, and fails if an old address showed another's bytes or anything else went
    /// wrong.
    fn play(&self, mut crew: Crew, shared: &'static Shared, memory: &Memory) {
        let &Self { limit, workers, started, .. } = self;
        let seconds = from_env("GDRCOPY_STALE_SECONDS", SECONDS);
        let result = run(&mut crew, shared, memory, limit, workers, started + Duration::from_secs(seconds));
        if let Err(error) = &result {
            // Before the others leave for want of each other, and complain of that.
            shared.complain(error);
        }
        drop(crew);

        let done = shared.rounds_done();
        let turns: u64 = shared.turns.iter().map(|turns| turns.load(Ordering::Relaxed)).sum();
        say(&format!("\nstale windows on {}", self.name));
        say(&table(shared));
        let seconds = started.elapsed().as_secs_f64();
        say(&format!("{done} of {limit} rounds in {seconds:.1} s, {workers} workers; neighbours made {turns} windows"));
        let recycled = shared.recycled.load(Ordering::Relaxed);
        say(&format!("{recycled} rounds on memory that nobody but the victim held"));
        let complaint = shared.complaint().unwrap_or_default();
        assert_eq!(exposures(shared), 0, "old addresses showed other buffers; first: {complaint}");
        assert!(
            result.is_ok() && complaint.is_empty(),
            "after {done} of {limit} rounds: {result:?}; first: {complaint}"
        );
        assert_eq!(done, limit, "rounds are missing");
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
}

#[test]
fn an_old_address_faults_or_shows_our_own_bytes() {
    let _alone = alone();
    let started = Instant::now();
    let workers = cores().saturating_sub(4).clamp(1, MAX_WORKERS);
    let shared = Shared::new();
    let mut crew = Crew::new(shared);
    let (memory, no_gpu) = memory(&mut crew, shared, workers).unwrap();
    let limit = from_env("GDRCOPY_STALE_ROUNDS", if no_gpu.is_some() { 2_000 } else { 100_000 });
    let name = match no_gpu {
        Some(why) => format!("EMULATED GPUs: proves the harness, not the driver ({why})"),
        None => "backend rm".to_owned(),
    };
    Soak { name, limit, workers, started }.play(crew, shared, &memory);
}

#[cfg(feature = "vulkan")]
#[test]
fn an_old_address_faults_or_shows_our_own_bytes_on_vulkan() {
    let _alone = alone();
    let started = Instant::now();
    let memory = Memory::Own(BackendKind::Vulkan);
    // In a child, for this process is to have no CUDA.
    let pinned = in_child(|| {
        let session = memory.open()?;
        let buffer = session.alloc_on(0, 1 << 20).map_err(|error| error.to_string())?;
        session.pin(&buffer).map(drop).map_err(|error| error.to_string())
    });
    if let Err(why) = pinned {
        let required = std::env::var("GDRCOPY_TEST_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|name| name == "vulkan"), "{why}");
        return say(&format!("SKIPPED, stale windows on backend vulkan: {why}"));
    }
    let limit = from_env("GDRCOPY_STALE_VULKAN_ROUNDS", 110);
    let workers = cores().saturating_sub(4).clamp(1, VULKAN_WORKERS);
    let shared = Shared::new();
    let crew = Crew::new(shared);
    Soak { name: "backend vulkan".to_owned(), limit, workers, started }.play(crew, shared, &memory);
}
