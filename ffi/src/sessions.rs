//! `gdr_t`: open sessions and what hangs on them.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gdrcopy::{BackendKind, DeviceBuffer, ErrorKind, Session};

use crate::failure::{Failure, Kind};
use crate::slab::Slab;
use crate::{marks, pins};

static SESSIONS: Slab<Mutex<Option<Arc<Open>>>> = Slab::new();

/// What `gdr_open` opened.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) handle: u64,
    pub(crate) session: Session,
    /// `None` once `gdr_close` has begun.
    pins: Mutex<Option<BTreeSet<u64>>>,
    /// By device address.
    buffers: Mutex<BTreeMap<u64, DeviceBuffer>>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks is left half-done by a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Open {
    /// Notes a pin, unless the session is being closed.
    pub(crate) fn add_pin(&self, pin: u64) -> Result<(), Failure> {
        lock(&self.pins).as_mut().map(|pins| pins.insert(pin)).map(drop).ok_or_else(Failure::unknown_handle)
    }

    pub(crate) fn remove_pin(&self, pin: u64) {
        if let Some(pins) = lock(&self.pins).as_mut() {
            pins.remove(&pin);
        }
    }

    pub(crate) fn add_buffer(&self, buffer: DeviceBuffer) -> u64 {
        let addr = buffer.addr().raw();
        lock(&self.buffers).insert(addr, buffer);
        addr
    }

    pub(crate) fn take_buffer(&self, addr: u64) -> Result<DeviceBuffer, Failure> {
        lock(&self.buffers).remove(&addr).ok_or_else(not_a_buffer)
    }

    /// Runs `body` with the buffer that `addr` lies in, and the offset of `addr` in it.
    pub(crate) fn with_buffer(
        &self,
        addr: u64,
        body: impl FnOnce(&DeviceBuffer, usize) -> gdrcopy::Result<()>,
    ) -> Result<(), Failure> {
        let buffers = lock(&self.buffers);
        let (start, buffer) = buffers.range(..=addr).next_back().ok_or_else(not_a_buffer)?;
        let offset = usize::try_from(addr - start).ok().filter(|offset| *offset < buffer.len());
        Ok(body(buffer, offset.ok_or_else(not_a_buffer)?)?)
    }
}

fn not_a_buffer() -> Failure {
    Failure::new(libc::EINVAL, Kind::InvalidHandle, "the device address is not of a live buffer that gdrx_alloc made")
}

/// The backend that `GDRCOPY_USE_DMABUF_MMAP=1` leaves: it asks for the way without the kernel module.
fn without_module() -> Result<Option<BackendKind>, Failure> {
    let set = |name| env::var(name).ok().filter(|value| !value.is_empty());
    let asked = set("GDRCOPY_USE_DMABUF_MMAP").is_some_and(|value| value == "1");
    match set("GDRCOPY_BACKEND").filter(|_| asked) {
        Some(backend) if backend != "dmabuf" => Err(Failure::invalid(format!(
            "GDRCOPY_USE_DMABUF_MMAP=1 and GDRCOPY_BACKEND={backend} contradict each other; unset one of them"
        ))),
        // Of those that are tried unasked, one needs no module.
        None if asked => Ok(Some(BackendKind::Rm)),
        _ => Ok(None),
    }
}

pub(crate) fn open(backend: Option<&str>) -> Result<u64, Failure> {
    marks::init();
    let backend = match backend {
        Some(name) => Some(name.parse::<BackendKind>()?),
        None => without_module()?,
    };
    let builder = Session::builder();
    let session = backend.map_or(builder.clone(), |kind| builder.backend(kind)).open()?;
    let full = || Failure::new(libc::EMFILE, Kind::OutOfMemory, "a million sessions are open; close some");
    let (handle, place) = SESSIONS.claim().ok_or_else(full)?;
    tracing::info!(handle, "{}", session.probe_report());
    let (pins, buffers) = (Mutex::new(Some(BTreeSet::new())), Mutex::default());
    *lock(place) = Some(Arc::new(Open { handle, session, pins, buffers }));
    Ok(handle)
}

pub(crate) fn find(handle: u64) -> Result<Arc<Open>, Failure> {
    let place = SESSIONS.find_own(handle)?;
    let open = lock(place).clone();
    open.filter(|open| open.handle == handle).ok_or_else(Failure::unknown_handle)
}

/// How long closing waits for copies at work: no copy takes that long.
const PATIENCE: Duration = Duration::from_secs(1);

/// Unpins and frees what is left and closes; carries on past failures and reports the first.
pub(crate) fn close(handle: u64) -> Result<(), Failure> {
    let place = SESSIONS.retire(handle)?;
    let open = lock(place).take();
    SESSIONS.recycle(handle);
    let open = open.ok_or_else(Failure::unknown_handle)?;
    let mut result = Ok(());
    let mut at_work = Vec::new();
    let pins = lock(&open.pins).take().unwrap_or_default();
    for pin in pins {
        match pins::unpin_left(pin) {
            // Another thread was faster.
            Err(failure) if failure.kind() == Kind::InvalidHandle => {}
            Err(failure) => result = result.and(Err(failure)),
            Ok(window) => at_work.extend(window),
        }
    }
    // Copies that race with this call finish first, for some modules revoke their mapping with the memory.
    let deadline = Instant::now() + PATIENCE;
    while at_work.iter().any(|window| window.has_leftover()) && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let buffers = std::mem::take(&mut *lock(&open.buffers));
    for buffer in buffers.into_values() {
        result = result.and(buffer.free().map_err(Failure::from));
    }
    // While another call, or a copy that races with this one, still uses the session, it ends with the last of them.
    let closed = Arc::into_inner(open).map_or(Ok(()), |open| open.session.close());
    match closed {
        Err(error) if error.error().kind() != ErrorKind::Mapped => {
            result.and(Err(Failure::from(gdrcopy::Error::from(error))))
        }
        _ => result,
    }
}
