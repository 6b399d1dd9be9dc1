//! The newest of a series of values, as a kernel sees it.

use std::time::{Duration, Instant};

use gdrcopy::Session;
use gdrcopy::channel::Latest;
use gdrcopy::cuda::Module;

use crate::{PATIENCE, Reports, builder, launch, module, session, word_of};

fn watch<const WORDS: usize>(session: &Session, module: &Module, last: u64) {
    let value = |number| -> [u32; WORDS] { std::array::from_fn(|n| word_of(number, n as u32)) };
    // The channel goes first, which ends the kernel.
    let reports = Reports::new(1);
    let mut latest = Latest::starting_at(session, Some(0), &value(0), u32::MAX - 1000).unwrap();
    let (sender, _receiver) = builder().open(session).unwrap();
    let more = [&latest.device().to_words()[..], &[last, reports.addr()]].concat();
    let stream = launch(module, c"watch", 1, &sender.device(), &more, || sender.kernel_has_started());
    let started = Instant::now();
    for number in 1..=last {
        latest.set(&value(number)).unwrap();
        // One time in 64 it stays long enough to be looked at.
        if number % 64 == 0 {
            let since = Instant::now();
            while since.elapsed() < Duration::from_micros(10) {}
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    stream.finish(PATIENCE).unwrap();
    let [state, seen, mixed, backward, newest] = std::array::from_fn(|word| reports.get(0, word));
    println!(
        "{} B, {last} values set in {seconds:.2} s: {seen} seen, {mixed} mixed, {backward} out of order",
        4 * WORDS
    );
    assert_eq!((state, mixed, backward, newest), (2, 0, 0, last));
    assert!(seen > last / 200, "a kernel saw {seen} of {last} values");
}

#[test]
fn the_newest_value_is_never_a_mix() {
    let Some(session) = session() else { return };
    let module = module();
    watch::<12>(&session, &module, 5_000_000);
    watch::<60>(&session, &module, 2_000_000);
    watch::<768>(&session, &module, 200_000);
}
