//! A forked child has nothing of its parent's, and takes nothing from it.

use std::os::fd::AsFd;
use std::sync::Arc;

use gdrcopy::{DeviceBuffer, ErrorKind, Mapping, PciAddress, Pinned, Result, Session};

use crate::common::fork::{in_child, is_readable};
use crate::common::subject::{Subject, assert_same, downloaded, pattern};

const BYTES: usize = 70_000;

/// One handle of each kind. A child takes them out of its own copy; the parent's stay.
struct Handles {
    session: Option<Session>,
    buffer: Option<Arc<DeviceBuffer>>,
    free: Option<DeviceBuffer>,
    pinned: Option<Pinned<'static>>,
    mapping: Option<Mapping<'static>>,
}

impl Handles {
    fn new(session: &Session, buffer: DeviceBuffer) -> Self {
        let free = session.alloc_as(buffer.ordinal(), BYTES, buffer.allocator()).unwrap();
        let buffer = Arc::new(buffer);
        let pinned = session.pin(&buffer).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        mapping.write(0, &pattern(1, BYTES)).unwrap();
        Self {
            session: Some(session.clone()),
            buffer: Some(buffer),
            free: Some(free),
            pinned: Some(pinned),
            mapping: Some(mapping),
        }
    }
}

/// Counts refusals, each of which has to be for the process.
struct Refusals(usize);

impl Refusals {
    #[track_caller]
    fn note<T>(&mut self, result: Result<T>) {
        match result {
            Ok(_) => panic!("a child may use its parent's handle"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WrongProcess, "{error}"),
        }
        self.0 += 1;
    }
}

fn use_everything(handles: &mut Handles) -> usize {
    let mut no = Refusals(0);
    let mut to = [0; 4];
    let mapping = handles.mapping.as_ref().unwrap();
    no.note(mapping.write(0, b"data"));
    no.note(mapping.write(0, b""));
    no.note(mapping.write_posted(0, b"data"));
    no.note(mapping.batch(|batch| batch.write(0, b"data")));
    no.note(mapping.publish(0, b"data", 8, 1_u32));
    no.note(mapping.publish(0, b"data", 8, 1_u64));
    no.note(mapping.read(0, &mut to));
    no.note(mapping.store_u32(0, 1));
    no.note(mapping.store_u32_posted(0, 1));
    no.note(mapping.store_u64(0, 1));
    no.note(mapping.store_u64_posted(0, 1));
    no.note(mapping.load_u32(0));
    no.note(mapping.load_u64(0));
    no.note(mapping.write_value(0, &1_u32));
    no.note(mapping.write_value_posted(0, &1_u32));
    no.note(mapping.batch(|batch| batch.write_value(0, &1_u32)));
    no.note(mapping.write_value(BYTES - 4, &1_u32));
    no.note(mapping.write_value(0, &[0_u8; 64]));
    no.note(mapping.read_value::<u32>(0));
    no.note(mapping.post_line(0, &[0; 64]));
    no.note(mapping.flush());
    assert_eq!(to, [0; 4], "the destination is untouched");
    for at in [0, BYTES / 2, BYTES - 1] {
        assert!(!is_readable(mapping.as_ptr().wrapping_add(at)), "the window is inherited");
    }

    let (session, buffer) = (handles.session.as_ref().unwrap(), handles.buffer.as_ref().unwrap());
    no.note(handles.pinned.as_ref().unwrap().map());
    no.note(session.pin(buffer));
    no.note(session.pin_export(std::io::stdin().as_fd(), PciAddress { domain: 0, bus: 1, device: 0 }, 1));
    no.note(session.alloc(64));
    no.note(session.alloc_on(0, 64));
    no.note(session.alloc_as(0, 64, buffer.allocator()));
    no.note(session.gpus());
    no.note(buffer.upload(0, b"data"));
    no.note(buffer.download(0, &mut to));
    no.note(buffer.make_current());
    no.note(buffer.export());
    if let Some(gpus) = session.emulated() {
        no.note(gpus.device_write(buffer.addr(), b"data"));
        no.note(gpus.device_read(buffer.addr(), &mut to));
        no.note(gpus.alloc_raw(0, 64));
        no.note(gpus.free_raw(buffer.addr()));
    }

    no.note(handles.mapping.take().unwrap().unmap());
    no.note(handles.pinned.take().unwrap().unpin().map_err(Into::into));
    no.note(handles.free.take().unwrap().free());
    // Still in use, and in the wrong process: the latter is what the caller has to know.
    no.note(handles.session.take().unwrap().close().map_err(Into::into));
    no.0
}

/// The parent goes on as if there had been no child.
fn parent_goes_on(session: &Session, handles: Handles, what: &str) {
    let mapping = handles.mapping.unwrap();
    let mut seen = vec![0; BYTES];
    mapping.read(0, &mut seen).unwrap();
    assert_same(&seen, &pattern(1, BYTES), what);
    mapping.write(1, &pattern(2, BYTES - 1)).unwrap();
    let buffer = handles.buffer.unwrap();
    assert_same(&downloaded(&buffer)[1..], &pattern(2, BYTES - 1), what);
    drop(mapping);
    let again = handles.pinned.unwrap();
    again.map().unwrap().write(0, b"again").unwrap();
    assert_eq!(&downloaded(&buffer)[..5], b"again", "{what}");
    again.unpin().unwrap();
    handles.free.unwrap().free().unwrap();
    drop(buffer);
    drop(handles.session);
    if let Some(gpus) = session.emulated() {
        assert_eq!(gpus.live(), gdrcopy::emulated::Live::default(), "{what}");
    }
}

pub(crate) fn a_child_can_use_nothing_of_its_parent_s(subject: &Subject) {
    let calls = if subject.is_emulated() { 40 } else { 36 };
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut handles = Handles::new(session, buffer);
        in_child(|| assert_eq!(use_everything(&mut handles), calls));
        parent_goes_on(session, handles, what);
    });
}

pub(crate) fn a_child_s_drops_leave_the_parent_alone(subject: &Subject) {
    subject.for_each_buffer(BYTES, |session, buffer, what| {
        let mut handles = Handles::new(session, buffer);
        let live = session.emulated().map(gdrcopy::emulated::Emulated::live);
        in_child(|| {
            drop(handles.mapping.take());
            drop(handles.pinned.take());
            drop(handles.free.take());
            drop(handles.buffer.take());
            drop(handles.session.take());
            // The child's own copy of the emulated GPUs' books shows that it gave nothing back.
            assert_eq!(session.emulated().map(gdrcopy::emulated::Emulated::live), live);
            // CUDA does not work in a child of a process that used it, so that nothing can be opened on a GPU.
            if subject.is_emulated() {
                let own = subject.session();
                let buffer = own.alloc_on(subject.gpu, BYTES).unwrap();
                let mapping = own.pin(&buffer).unwrap().map().unwrap();
                mapping.write(3, b"the child's own").unwrap();
                assert_eq!(&downloaded(&buffer)[3..18], b"the child's own");
                drop(mapping);
                drop(buffer);
                own.close().unwrap();
            }
        });
        assert_eq!(session.emulated().map(gdrcopy::emulated::Emulated::live), live, "{what}");
        parent_goes_on(session, handles, what);
    });
}
