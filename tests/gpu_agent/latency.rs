//! How long a read takes, beside the other ways of reading, in one run.

use std::time::{Duration, Instant};

use gdrcopy::ParallelCopier;
use gdrcopy::agent::{AgentOptions, Bounce, PushAgent, Segment};
use gdrcopy::auto::{AutoCopier, AutoOptions};
use gdrcopy::cuda::{PinnedHost, memcpy_to_device, memcpy_to_host};
use gdrcopy::policy::CopyDirection;

use crate::alone;
use crate::support::pattern;

const SIZES: [usize; 8] = [64, 512, 1024, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Sorted times of single calls; two readings of the clock, some 40 ns, are in each.
struct Times(Vec<Duration>);

impl Times {
    /// At most `count` calls in at most `limit`, after some that are not timed.
    fn of(count: usize, limit: Duration, mut call: impl FnMut()) -> Self {
        (0..10).for_each(|_| call());
        let started = Instant::now();
        let mut all = Vec::with_capacity(count);
        while all.len() < count && (all.len() < 20 || started.elapsed() < limit) {
            let one = Instant::now();
            call();
            all.push(one.elapsed());
        }
        all.sort();
        Self(all)
    }

    /// In microseconds.
    fn at(&self, share: f64) -> f64 {
        let index = ((self.0.len() - 1) as f64 * share) as usize;
        self.0[index].as_nanos() as f64 / 1000.0
    }

    fn shown(&self) -> String {
        format!("{:>8.2} {:>8.2}", self.at(0.5), self.at(0.99))
    }
}

#[test]
fn beside_the_other_ways() {
    let Some(alone) = alone() else { return };
    const LIMIT: Duration = Duration::from_millis(25);
    let memory = alone.session.alloc(1 << 20).unwrap();
    let data = pattern(12, 1 << 20);
    memory.upload(0, &data).unwrap();
    memory.make_current().unwrap();
    let mapping = alone.session.pin(&memory).unwrap().map().unwrap();
    let mut host = PinnedHost::new(0, 1 << 20).unwrap();
    host.as_mut_slice().fill(1);
    println!("microseconds, p50 and p99 of single calls; two readings of the clock are in each");
    println!(
        "{:>8}  {:^17}  {:^17}  {:^17}  {:^17}",
        "bytes", "agent, its memory", "agent, any memory", "BAR1 read", "cuMemcpyDtoH"
    );
    for threads in [512, 1024, 256] {
        println!("block of {threads} threads");
        let options = AgentOptions::default().threads(threads).dedicated();
        let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        let mut buffer = agent.host_buffer(1 << 20).unwrap();
        buffer.as_mut_slice().fill(1);
        for bytes in SIZES {
            let whole = [Segment { range: 0, offset: 0, bytes, at: 0 }];
            let direct = Times::of(5000, LIMIT, || agent.read_into(&mut buffer, &whole).unwrap());
            assert!(buffer.as_slice()[..bytes] == data[..bytes]);
            let to = &mut host.as_mut_slice()[..bytes];
            let any = Times::of(5000, LIMIT, || agent.read(0, 0, to).unwrap());
            assert!(*to == data[..bytes]);
            let bar1 = Times::of(5000, LIMIT, || mapping.read(0, to).unwrap());
            let cuda = Times::of(5000, LIMIT, || unsafe { memcpy_to_host(to, memory.addr()) }.unwrap());
            assert!(*to == data[..bytes]);
            let [direct_at, any_at, bar1_at, cuda_at] = [&direct, &any, &bar1, &cuda].map(Times::shown);
            println!("{bytes:>8}  {direct_at}  {any_at}  {bar1_at}  {cuda_at}");
            if bytes == 64 << 10 && threads == 512 {
                assert!(direct.at(0.5) < cuda.at(0.5), "the agent has to win here");
            }
        }
        assert_eq!(agent.launches(), 1);
        agent.stop().unwrap();
    }
}

#[test]
fn writes_beside_the_other_ways() {
    let Some(alone) = alone() else { return };
    const LIMIT: Duration = Duration::from_millis(25);
    let memory = alone.session.alloc(4 << 20).unwrap();
    memory.make_current().unwrap();
    let mapping = alone.session.pin(&memory).unwrap().map().unwrap();
    let mut host = PinnedHost::new(0, 4 << 20).unwrap();
    host.as_mut_slice().fill(1);
    println!("microseconds, p50 and p99 of single calls that return when the bytes are in device memory");
    println!("{:>8}  {:^17}  {:^17}  {:^17}", "bytes", "agent", "BAR1 and flush", "cuMemcpyHtoD");
    for threads in [256, 512, 1024] {
        println!("block of {threads} threads");
        let options = AgentOptions::default().threads(threads).dedicated();
        let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
        let mut buffer = agent.host_buffer(4 << 20).unwrap();
        buffer.as_mut_slice().fill(1);
        for bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20] {
            let whole = [Segment { range: 0, offset: 0, bytes, at: 0 }];
            let pulled = Times::of(3000, LIMIT, || agent.write_from(&mut buffer, &whole).unwrap());
            let from = &host.as_slice()[..bytes];
            let bar1 = Times::of(3000, LIMIT, || {
                mapping.write(0, from).unwrap();
                mapping.flush().unwrap();
            });
            let cuda = Times::of(3000, LIMIT, || unsafe { memcpy_to_device(memory.addr(), from) }.unwrap());
            println!("{bytes:>8}  {}  {}  {}", pulled.shown(), bar1.shown(), cuda.shown());
            if bytes == 256 << 10 && agent.bulk_bytes() > 0 {
                assert!(pulled.at(0.5) < cuda.at(0.5), "the agent has to win here");
            }
        }
        agent.stop().unwrap();
    }
}

/// By how many stages, and by how many threads' own loads: where the thresholds belong.
#[test]
#[ignore = "a table to choose by"]
fn writes_by_stages() {
    let Some(alone) = alone() else { return };
    const LIMIT: Duration = Duration::from_millis(15);
    const SIZES: [usize; 8] =
        [16 << 10, 32 << 10, (32 << 10) + 16, 64 << 10, (64 << 10) + 16, 128 << 10, 256 << 10, 1 << 20];
    let memory = alone.session.alloc(1 << 20).unwrap();
    memory.make_current().unwrap();
    let mut host = PinnedHost::new(0, 1 << 20).unwrap();
    host.as_mut_slice().fill(1);
    println!("microseconds, p50 of single writes; 0 stages: the threads' own loads");
    print!("{:>7} {:>6}", "threads", "stages");
    SIZES.iter().for_each(|bytes| print!(" {bytes:>8}"));
    println!();
    for threads in [256, 512, 1024] {
        for stages in [0, 5, 6, 8, 10, 12, 14] {
            let options = AgentOptions::default().threads(threads).bulk_stages(stages).dedicated();
            let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
            let mut buffer = agent.host_buffer(1 << 20).unwrap();
            buffer.as_mut_slice().fill(1);
            print!("{threads:>7} {stages:>6}");
            for bytes in SIZES {
                let whole = [Segment { range: 0, offset: 0, bytes, at: 0 }];
                let times = Times::of(1000, LIMIT, || agent.write_from(&mut buffer, &whole).unwrap());
                print!(" {:>8.2}", times.at(0.5));
            }
            println!();
            agent.stop().unwrap();
        }
    }
    print!("{:>14}", "cuMemcpyHtoD");
    for bytes in SIZES {
        let host = &host.as_slice()[..bytes];
        let times = Times::of(1000, LIMIT, || unsafe { memcpy_to_device(memory.addr(), host) }.unwrap());
        print!(" {:>8.2}", times.at(0.5));
    }
    println!();
}

/// How reads into ordinary memory should be cut up: the median of single calls, in microseconds, beside the
/// agent straight into its own memory. To choose `Bounce::default` by, so nothing is judged but the bytes.
#[test]
#[ignore = "a table to choose by"]
fn pieces_of_reads_into_ordinary_memory() {
    let Some(alone) = alone() else { return };
    const SIZES: [usize; 7] = [4096, 16 << 10, 32 << 10, 64 << 10, 100_000, 256 << 10, 1 << 20];
    const LIMIT: Duration = Duration::from_millis(40);
    let memory = alone.session.alloc(1 << 20).unwrap();
    let data = pattern(13, 1 << 20);
    memory.upload(0, &data).unwrap();
    let mut host = vec![0; 1 << 20];
    let line = |name: &str, times: &[f64]| {
        println!("{name:<36}{}", times.iter().map(|us| format!("{us:>9.2}")).collect::<String>());
    };
    line("bytes", &SIZES.map(|bytes| bytes as f64));
    let pieces =
        [(128, 100), (8, 100), (16, 100), (32, 100), (64, 100), (8, 150), (16, 150), (16, 200), (32, 150), (8, 200)];
    // Twice, to see how much of it is noise.
    for _ in 0..2 {
        for (first, growth) in pieces {
            let bounce = Bounce { first: first << 10, growth };
            let options = AgentOptions::default().dedicated().bounce(bounce);
            let mut agent = PushAgent::start(&alone.session, [&memory], options).unwrap();
            let times = SIZES.map(|bytes| {
                let to = &mut host[..bytes];
                let times = Times::of(5000, LIMIT, || agent.read(0, 0, to).unwrap());
                assert!(*to == data[..bytes], "{bounce:?}, {bytes} bytes");
                to.fill(0);
                times.at(0.5)
            });
            agent.stop().unwrap();
            line(&format!("{first} KiB, {growth} %"), &times);
        }
        let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
        let mut buffer = agent.host_buffer(1 << 20).unwrap();
        let times = SIZES.map(|bytes| {
            let to = &mut buffer.as_mut_slice()[..bytes];
            Times::of(5000, LIMIT, || agent.read(0, 0, to).unwrap()).at(0.5)
        });
        assert!(*buffer.as_slice() == data);
        agent.stop().unwrap();
        line("into the agent's own memory", &times);
    }
}

/// Packets against flags, size by size: where the threshold belongs.
#[test]
fn packets_beside_answers() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(4096).unwrap();
    let mut with = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
    println!("{:>8}  {:^17}  {:^17}", "bytes", "packets", "flag");
    let sizes = [8, 64, 128, 256, 512, 768, 1024];
    let limit = Duration::from_millis(30);
    let mut to = [0; 1024];
    let packets = sizes.map(|bytes| Times::of(5000, limit, || with.read(0, 0, &mut to[..bytes]).unwrap()));
    with.stop().unwrap();
    let options = AgentOptions::default().dedicated().packet_bytes(0);
    let mut without = PushAgent::start(&alone.session, [&memory], options).unwrap();
    let flags = sizes.map(|bytes| Times::of(5000, limit, || without.read(0, 0, &mut to[..bytes]).unwrap()));
    for ((bytes, packets), flag) in sizes.iter().zip(&packets).zip(&flags) {
        println!("{bytes:>8}  {}  {}", packets.shown(), flag.shown());
    }
}

/// After a pause the kernel has to be launched again.
#[test]
fn after_a_pause() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(65536).unwrap();
    // Once it has written a long piece, each launch takes shared memory for bulk copies.
    for after_a_long_write in [false, true] {
        let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default()).unwrap();
        let mut buffer = agent.host_buffer(65536).unwrap();
        if after_a_long_write {
            agent.write_from(&mut buffer, &[Segment { range: 0, offset: 0, bytes: 65536, at: 0 }]).unwrap();
        }
        println!("after a long write: {after_a_long_write}");
        for bytes in [64, 4096, 65536] {
            let whole = [Segment { range: 0, offset: 0, bytes, at: 0 }];
            let mut all = Vec::new();
            for _ in 0..200 {
                while agent.is_resident() {}
                // The block has left for good.
                std::thread::sleep(Duration::from_micros(100));
                let started = Instant::now();
                agent.read_into(&mut buffer, &whole).unwrap();
                all.push(started.elapsed());
            }
            all.sort();
            println!("{bytes:>8} bytes after a pause: p50, p99 us {}", Times(all).shown());
        }
        assert!(agent.launches() >= 600);
    }
}

/// Requests one behind the other, many in flight.
#[test]
fn rate_with_many_in_flight() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(1 << 20).unwrap();
    for bytes in [256, 4 << 10, 64 << 10, 1 << 20] {
        let mut agent = PushAgent::start(&alone.session, [&memory], AgentOptions::default().dedicated()).unwrap();
        let mut flying = std::collections::VecDeque::new();
        let whole = [Segment { range: 0, offset: 0, bytes, at: 0 }];
        for _ in 0..16 {
            let mut buffer = agent.host_buffer(bytes).unwrap();
            buffer.as_mut_slice().fill(1);
            flying.push_back(agent.submit(buffer, &whole).unwrap());
        }
        let (started, mut done) = (Instant::now(), 0_u32);
        while started.elapsed() < Duration::from_millis(100) {
            let buffer = agent.wait(flying.pop_front().unwrap()).unwrap();
            flying.push_back(agent.submit(buffer, &whole).unwrap());
            done += 1;
        }
        let seconds = started.elapsed().as_secs_f64();
        let (rate, gigabytes) = (f64::from(done) / seconds, f64::from(done) * bytes as f64 / seconds / 1e9);
        println!("{bytes:>8} bytes, 16 in flight: {rate:.0} reads/s, {gigabytes:.2} GB/s");
    }
}

/// The automatic copier beside each method by itself, at sizes between those that it measured.
#[test]
fn automatic_copies_beside_each_method() {
    let Some(alone) = alone() else { return };
    let buffer = alone.session.alloc(8 << 20).unwrap();
    let copier = ParallelCopier::builder();
    let options =
        AutoOptions::default().agent(AgentOptions::default().dedicated()).parallel(copier).time(Duration::from_secs(1));
    let mut copier = AutoCopier::new(&alone.session, &buffer, options).unwrap();
    let mut host = vec![1; 8 << 20];
    println!("microseconds, p50 and p99 of single calls with memory that is not page-locked");
    for direction in [CopyDirection::HostToDevice, CopyDirection::DeviceToHost] {
        for power in 0..=23 {
            let bytes = 1 << power;
            let shown = copier.explain(direction, bytes).to_string();
            let host = &mut host[..bytes];
            let times = Times::of(2000, Duration::from_millis(20), || match direction {
                CopyDirection::HostToDevice => copier.write(0, host).unwrap(),
                CopyDirection::DeviceToHost => copier.read(0, host).unwrap(),
            });
            println!("{}  {shown}", times.shown());
        }
    }
}
