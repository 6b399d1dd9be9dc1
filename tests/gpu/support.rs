//! Sessions, patterns, and the few CUDA calls that tests make beside the library.

use std::ffi::c_void;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gdrcopy::cuda::PinnedHost;
use gdrcopy::{BackendKind, Result, RmLevel, Session};

/// A session on the GPU, or a line that says why there is none.
pub(crate) fn session(level: RmLevel) -> Option<Session> {
    opened(Session::builder().ignore_env().backend(BackendKind::Rm).rm(level).open(), BackendKind::Rm)
}

/// The session, or a line that says why there is none, which fails where the environment asks for the backend.
pub(crate) fn opened(session: Result<Session>, kind: BackendKind) -> Option<Session> {
    match session {
        Ok(session) => Some(session),
        Err(error) => {
            let required = std::env::var("GDRCOPY_TEST_REQUIRE")
                .is_ok_and(|names| names.split(',').any(|name| name == kind.name()));
            assert!(!required, "{error}");
            println!("SKIPPED: {error}");
            None
        }
    }
}

pub(crate) fn check(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// `len` bytes that no other seed gives.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}

/// Runs one test of this binary in a process of its own.
pub(crate) fn alone(test: &str, env: &[(&str, &str)]) -> Output {
    let exe = std::env::current_exe().unwrap();
    Command::new(exe)
        .args(["--exact", test, "--nocapture", "--test-threads=1", "--include-ignored"])
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

pub(crate) fn assert_success(output: &Output) {
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A kernel that runs until told to stop, and one that answers through memory.
///
/// `spin(flag)`: until the word at `flag` is not 0. `echo(cell)`: until the word at `cell` is not 0, then stores its
/// double 4 bytes further on.
const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 flag) {
    .reg .u64 %p; .reg .u32 %v; .reg .pred %q;
    ld.param.u64 %p, [flag];
again:
    ld.volatile.global.u32 %v, [%p];
    setp.eq.u32 %q, %v, 0;
    @%q bra again;
    ret;
}
.visible .entry echo(.param .u64 cell) {
    .reg .u64 %p; .reg .u32 %v; .reg .pred %q;
    ld.param.u64 %p, [cell];
wait:
    ld.volatile.global.u32 %v, [%p];
    setp.eq.u32 %q, %v, 0;
    @%q bra wait;
    add.u32 %v, %v, %v;
    st.volatile.global.u32 [%p+4], %v;
    ret;
}
\0";

pub(crate) struct Kernel(sys::CUfunction);

/// Loads a kernel into the current context, before anything occupies the device.
pub(crate) fn kernel(name: &std::ffi::CStr) -> Kernel {
    let mut module = std::ptr::null_mut();
    let mut function = std::ptr::null_mut();
    unsafe {
        check(sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
        check(sys::cuModuleGetFunction(&mut function, module, name.as_ptr()));
    }
    Kernel(function)
}

impl Kernel {
    /// One thread on `stream`; null is the default stream.
    pub(crate) fn launch(&self, stream: sys::CUstream, argument: u64) {
        let mut argument = argument;
        let mut params = [(&raw mut argument).cast::<c_void>()];
        unsafe {
            check(sys::cuLaunchKernel(self.0, 1, 1, 1, 1, 1, 1, 0, stream, params.as_mut_ptr(), std::ptr::null_mut()));
        }
    }
}

/// A kernel that spins on the default stream until dropped.
pub(crate) struct Spinning {
    flag: PinnedHost,
}

impl Spinning {
    pub(crate) fn start() -> Self {
        let flag = PinnedHost::new(0, 4096).unwrap();
        kernel(c"spin").launch(std::ptr::null_mut(), flag.as_ptr() as u64);
        // The default stream really is held up.
        std::thread::sleep(Duration::from_millis(20));
        let busy = unsafe { sys::cuStreamQuery(std::ptr::null_mut()) };
        assert_eq!(busy, sys::CUresult::CUDA_ERROR_NOT_READY);
        Self { flag }
    }

    pub(crate) fn still(&self) -> bool {
        unsafe { sys::cuStreamQuery(std::ptr::null_mut()) == sys::CUresult::CUDA_ERROR_NOT_READY }
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        unsafe { self.flag.as_ptr().cast::<u32>().write_volatile(1) };
        unsafe { check(sys::cuStreamSynchronize(std::ptr::null_mut())) };
    }
}

/// Median of the times that `run` takes, after one unmeasured run.
pub(crate) fn median(times: usize, mut run: impl FnMut()) -> Duration {
    run();
    let mut all: Vec<Duration> = (0..times)
        .map(|_| {
            let started = Instant::now();
            run();
            started.elapsed()
        })
        .collect();
    all.sort();
    all[all.len() / 2]
}
