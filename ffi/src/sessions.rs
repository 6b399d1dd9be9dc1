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

/// The name of a kind of objects, and the handle of one.
type Object = (&'static str, u64);
type Destroy = fn(u64) -> Result<(), Failure>;

/// What `gdr_open` opened.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) handle: u64,
    pub(crate) session: Session,
    /// `None` once `gdr_close` has begun.
    pins: Mutex<Option<BTreeSet<u64>>>,
    /// By device address.
    buffers: Mutex<BTreeMap<u64, Arc<DeviceBuffer>>>,
    /// What else is to be destroyed, and how: agents, channels and the like. `None` once `gdr_close` has begun.
    objects: Mutex<Option<BTreeMap<Object, Destroy>>>,
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
        lock(&self.buffers).insert(addr, Arc::new(buffer));
        addr
    }

    /// Frees a buffer that nothing else uses.
    pub(crate) fn free_buffer(&self, addr: u64) -> Result<(), Failure> {
        let mut buffers = lock(&self.buffers);
        match Arc::try_unwrap(buffers.remove(&addr).ok_or_else(not_a_buffer)?) {
            Ok(buffer) => {
                drop(buffers);
                Ok(buffer.free()?)
            }
            Err(used) => {
                buffers.insert(addr, used);
                let text =
                    "the buffer is in use, by an agent, an automatic copier or a copy; destroy or end that first";
                Err(Failure::new(libc::EBUSY, Kind::Busy, text))
            }
        }
    }

    /// The buffer that starts at `addr`.
    pub(crate) fn buffer(&self, addr: u64) -> Result<Arc<DeviceBuffer>, Failure> {
        lock(&self.buffers).get(&addr).cloned().ok_or_else(not_a_buffer)
    }

    /// The buffer that `addr` lies in, and where in it, if there is one.
    pub(crate) fn buffer_around(&self, addr: u64) -> Option<(Arc<DeviceBuffer>, usize)> {
        let buffers = lock(&self.buffers);
        let (start, buffer) = buffers.range(..=addr).next_back()?;
        let offset = usize::try_from(addr - start).ok().filter(|offset| *offset < buffer.len())?;
        Some((Arc::clone(buffer), offset))
    }

    /// Notes what is to be destroyed with the session, unless it is being closed.
    pub(crate) fn add_object(&self, kind: &'static str, handle: u64, destroy: Destroy) -> Result<(), Failure> {
        let mut objects = lock(&self.objects);
        let objects = objects.as_mut().ok_or_else(Failure::unknown_handle)?;
        objects.insert((kind, handle), destroy);
        Ok(())
    }

    pub(crate) fn remove_object(&self, kind: &'static str, handle: u64) {
        if let Some(objects) = lock(&self.objects).as_mut() {
            objects.remove(&(kind, handle));
        }
    }

    /// Runs `body` with the buffer that `addr` lies in, and the offset of `addr` in it.
    pub(crate) fn with_buffer(
        &self,
        addr: u64,
        body: impl FnOnce(&DeviceBuffer, usize) -> gdrcopy::Result<()>,
    ) -> Result<(), Failure> {
        let (buffer, offset) = self.buffer_around(addr).ok_or_else(not_a_buffer)?;
        Ok(body(&buffer, offset)?)
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
    let (pins, objects) = (Mutex::new(Some(BTreeSet::new())), Mutex::new(Some(BTreeMap::new())));
    *lock(place) = Some(Arc::new(Open { handle, session, pins, buffers: Mutex::default(), objects }));
    Ok(handle)
}

pub(crate) fn find(handle: u64) -> Result<Arc<Open>, Failure> {
    let place = SESSIONS.find_own(handle)?;
    let open = lock(place).clone();
    open.filter(|open| open.handle == handle).ok_or_else(Failure::unknown_handle)
}

/// How long closing waits for copies at work: no copy takes that long.
const PATIENCE: Duration = Duration::from_secs(1);

/// Destroys, unpins and frees what is left and closes; carries on past failures and reports the first.
pub(crate) fn close(handle: u64) -> Result<(), Failure> {
    let place = SESSIONS.retire(handle)?;
    let open = lock(place).take();
    SESSIONS.recycle(handle);
    let open = open.ok_or_else(Failure::unknown_handle)?;
    let mut result = Ok(());
    let objects = lock(&open.objects).take().unwrap_or_default();
    for ((_, object), destroy) in objects {
        match destroy(object) {
            // Another thread was faster.
            Err(failure) if failure.kind() == Kind::InvalidHandle => {}
            done => result = result.and(done),
        }
    }
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
    // A buffer that an object still uses, whose end failed, goes with that one.
    for buffer in buffers.into_values().filter_map(Arc::into_inner) {
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
