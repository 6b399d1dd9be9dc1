//! `gdrx_copier_t`: parallel copiers.

use gdrcopy::{ParallelCopier, ParallelCopierBuilder};

use crate::failure::Failure;
use crate::table::Table;

static COPIERS: Table<ParallelCopier> = Table::new("copier");

/// Starts the threads of a copier.
pub(crate) fn create(builder: &ParallelCopierBuilder) -> Result<u64, Failure> {
    COPIERS.create(None, builder.build()?, (), (), destroy)
}

/// Runs `copy` on a copier, without a lock, a system call or an allocation.
#[inline]
pub(crate) fn with<R>(handle: u64, copy: impl FnOnce(&ParallelCopier) -> Result<R, Failure>) -> Result<R, Failure> {
    COPIERS.shared(handle, copy)
}

/// Ends a copier and its threads.
pub(crate) fn destroy(handle: u64) -> Result<(), Failure> {
    COPIERS.destroy(
        handle,
        |_| (),
        |copier, (), ()| {
            drop(copier);
            Ok(())
        },
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::failure::Kind;

    #[test]
    fn a_copier_is_found_until_it_is_destroyed() {
        let handle = create(&ParallelCopier::builder()).unwrap();
        assert!(with(handle, |copier| Ok(copier.threads())).unwrap() >= 1);
        destroy(handle).unwrap();
        let kind = |result: Result<(), Failure>| result.unwrap_err().kind();
        assert_eq!(kind(with(handle, |_| Ok(()))), Kind::InvalidHandle);
        assert_eq!(kind(destroy(handle)), Kind::InvalidHandle);
        assert_eq!(kind(with(0, |_| Ok(()))), Kind::InvalidHandle);
        assert_eq!(kind(create(&ParallelCopier::builder().threads(65)).map(drop)), Kind::InvalidArgument);
    }

    #[test]
    fn destroying_waits_for_a_copy_at_work() {
        let handle = create(&ParallelCopier::builder()).unwrap();
        let (inside, leave) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                with(handle, |_| {
                    inside.store(true, Ordering::SeqCst);
                    while !leave.load(Ordering::SeqCst) {
                        thread::yield_now();
                    }
                    Ok(())
                })
                .unwrap();
            });
            while !inside.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let destroyer = scope.spawn(|| destroy(handle));
            thread::sleep(Duration::from_millis(20));
            assert!(!destroyer.is_finished());
            leave.store(true, Ordering::SeqCst);
            destroyer.join().unwrap().unwrap();
        });
    }
}
