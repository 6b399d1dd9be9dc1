//! The matrix products that latencies are measured beside: that they are right, that they go on, and how fast.

use std::time::{Duration, Instant};

use gdrcopy::agent::{AgentOptions, PushAgent, Segment};
use gdrcopy::tool::load::{Load, Product, Work};

use crate::alone;
use crate::support::pattern;

#[test]
fn a_product_is_right() {
    let Some(alone) = alone() else { return };
    assert!(Product::new(&alone.session, 0, 192).is_err() && Product::new(&alone.session, 0, 0).is_err());
    for side in [128, 256, 640] {
        let product = Product::new(&alone.session, 0, side).unwrap();
        product.once().unwrap();
        assert_eq!((product.started(), product.finished()), (2, 2));
        assert!(product.finished_at(1) > product.finished_at(0) && product.finished_at(2).is_none());
        let [a, b, c] = product.matrices().unwrap();
        for matrix in [&a, &b] {
            assert_eq!(matrix.len(), side * side);
            let (low, high) = matrix.iter().fold((1.0_f32, -1.0_f32), |(l, h), &x| (l.min(x), h.max(x)));
            assert!((-1.0..-0.99).contains(&low) && high > 0.99 && high <= 1.0, "from {low} to {high}");
            let mean = matrix.iter().map(|&x| f64::from(x)).sum::<f64>() / matrix.len() as f64;
            assert!(mean.abs() < 0.05, "{mean}");
        }
        assert!(a != b);
        // Row by row, so that the inner loop goes along rows of B.
        let mut worst = 0.0_f64;
        for row in 0..side {
            let (mut sums, mut sizes) = (vec![0.0; side], vec![0.0; side]);
            for k in 0..side {
                let left = f64::from(a[row * side + k]);
                for (column, &right) in b[k * side..][..side].iter().enumerate() {
                    sums[column] += left * f64::from(right);
                    sizes[column] += (left * f64::from(right)).abs();
                }
            }
            for (column, (sum, size)) in sums.iter().zip(&sizes).enumerate() {
                worst = worst.max((f64::from(c[row * side + column]) - sum).abs() / size);
            }
        }
        println!("{side} x {side}: at most {worst:.1e} of the sum of sizes off");
        assert!(worst < 1e-5, "{side} x {side}: {worst}");
    }
}

/// Both kinds run until told otherwise, and end by themselves; products count themselves.
#[test]
fn loads_start_and_stop() {
    let Some(alone) = alone() else { return };
    for work in [Work::Matmul, Work::Stream] {
        let load = Load::of(&alone.session, 0, work).unwrap();
        assert_eq!(load.work(), work);
        for _ in 0..3 {
            let loading = load.start(Duration::from_secs(20)).unwrap();
            assert!(loading.still_runs().unwrap());
            let before = loading.product().map(Product::finished);
            std::thread::sleep(Duration::from_millis(300));
            assert!(loading.still_runs().unwrap());
            if let (Some(before), Some(product)) = (before, loading.product()) {
                let done = product.finished() - before;
                let time = product.finished_at(product.finished() - 1).unwrap() - product.finished_at(before).unwrap();
                let each = time / u32::try_from(done - 1).unwrap();
                let tera = 2.0 * (product.side() as f64).powi(3) / each.as_secs_f64() / 1e12;
                println!("{done} products in 300 ms, {each:?} each, {tera:.1} TFLOPS");
            }
            let stopping = Instant::now();
            drop(loading);
            println!("{work:?} stopped after {:?}", stopping.elapsed());
        }
        let short = load.start(Duration::from_millis(100)).unwrap();
        let started = Instant::now();
        while short.still_runs().unwrap() {
            assert!(started.elapsed() < Duration::from_secs(5), "{work:?} goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// An agent that comes after the load gets its turn, as one that came before does.
#[test]
fn an_agent_is_launched_beside_products() {
    let Some(alone) = alone() else { return };
    let memory = alone.session.alloc(1 << 16).unwrap();
    let data = pattern(30, 1 << 16);
    memory.upload(0, &data).unwrap();
    let load = Load::new(&alone.session, 0).unwrap();
    let options = AgentOptions::default().residency(None).deadline(Duration::from_secs(5));
    // Once it has written a long piece, each launch takes shared memory for bulk copies.
    for after_a_long_write in [false, true] {
        let mut agent = PushAgent::start(&alone.session, [&memory], options.clone()).unwrap();
        if after_a_long_write {
            let mut buffer = agent.host_buffer(data.len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(&data);
            agent.write_from(&mut buffer, &[Segment { range: 0, offset: 0, bytes: data.len(), at: 0 }]).unwrap();
        }
        let loading = load.start(Duration::from_secs(60)).unwrap();
        let mut to = vec![0; 1 << 16];
        let mut waits = Vec::new();
        for round in 0..100 {
            while agent.is_resident() {}
            // At any moment of a product.
            std::thread::sleep(Duration::from_micros(100 + 370 * round));
            let started = Instant::now();
            agent.read(0, 0, &mut to).unwrap();
            waits.push(started.elapsed());
            assert!(to == data);
        }
        assert!(loading.still_runs().unwrap());
        waits.sort();
        let [p50, longest] = [waits[50], waits[99]];
        println!("64 KiB by an agent that is launched beside products: p50 {p50:?}, longest {longest:?}");
        println!("  after a long write: {after_a_long_write}");
        assert!(agent.launches() > 100);
    }
}
