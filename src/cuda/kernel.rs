//! Kernels of our own: PTX from this tree, compiled by the driver, loaded before anything runs, launched on a stream that
//! waits for nobody.
//!
//! A kernel that stays on the GPU holds up, until it ends, `cudaFree`, `cudaFreeHost`, `cudaHostRegister`,
//! `cudaDeviceSynchronize` and the first launch of a kernel that is not loaded yet (measured with CUDA 13.0). So memory
//! is allocated and kernels are loaded before a launch, and freed after [`Stream::finish`].

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::fmt;
use std::time::{Duration, Instant};

use super::context::{Device, Primary};
use super::driver::{Driver, Handle, NOT_READY, SUCCESS};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::num::usize_of;

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const JIT_ERROR_LOG: c_uint = 5;
const JIT_ERROR_LOG_BYTES: c_uint = 6;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
/// `CU_FUNC_ATTRIBUTE_NUM_REGS`: any attribute will do, for asking makes the driver load the kernel.
const FUNCTION_REGISTERS: c_int = 4;
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`: what the code itself declares.
const FUNCTION_SHARED: c_int = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const FUNCTION_DYNAMIC_SHARED: c_int = 8;
/// `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
const ATTRIBUTE_BLOCK_SHARED: c_int = 97;
/// `CU_STREAM_NON_BLOCKING`: does not synchronise with the default stream.
const NON_BLOCKING: c_uint = 1;

/// PTX compiled for one GPU, in its primary context.
///
/// Dropping it unloads the kernels, which waits for those that run.
pub struct Module {
    primary: Primary,
    module: Handle,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles `ptx` for the GPU with this ordinal.
    ///
    /// # Errors
    ///
    /// `NoDriver`, `NoDevice`; what the driver's compiler says against the code.
    pub fn load(ordinal: usize, ptx: &str) -> Result<Self> {
        let primary = Device::new(Driver::get()?, ordinal)?.retain_primary()?;
        let driver = primary.device.driver;
        let entered = primary.enter()?;
        let image: Vec<u8> = ptx.bytes().chain([0]).collect();
        let mut log = [0_u8; 4096];
        let mut options = [JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        // The driver takes the second value as a number in the place of a pointer; one byte stays 0 at the end.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(log.len() - 1)];
        let mut module = std::ptr::null_mut();
        // SAFETY: NUL-terminated text, two options with their values, and a log of the stated size, all of which
        // outlive the call.
        let code = unsafe {
            driver.module_load(&mut module, image.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
        };
        drop(entered);
        if code != SUCCESS {
            let said = CStr::from_bytes_until_nul(&log).map_or_else(|_| "".into(), CStr::to_string_lossy);
            let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
            let error = driver.error("load kernel", "cuModuleLoadDataEx", code);
            return Err(match said.as_str() {
                "" => error,
                said => Error::new("load kernel", error.kind(), format!("{} ({said})", error.cause())).cuda(code),
            });
        }
        Ok(Self { primary, module })
    }

    /// The kernel of this name, loaded onto the GPU so that its launch waits for nothing.
    ///
    /// # Errors
    ///
    /// What CUDA reports, for a name that is not in the module above all.
    pub fn kernel(&self, name: &CStr) -> Result<Kernel<'_>> {
        let driver = self.primary.device.driver;
        let _entered = self.primary.enter()?;
        let mut function = std::ptr::null_mut();
        // SAFETY: a live place, our own module, a NUL-terminated name.
        let code = unsafe { driver.module_function(&mut function, self.module, name.as_ptr()) };
        driver.check("load kernel", "cuModuleGetFunction", code)?;
        let mut registers = 0;
        // SAFETY: a live place and a function of our own module.
        let code = unsafe { driver.function_attribute(&mut registers, FUNCTION_REGISTERS, function) };
        driver.check("load kernel", "cuFuncGetAttribute", code)?;
        if let Some(code) = driver.function_load(function) {
            driver.check("load kernel", "cuFuncLoad", code)?;
        }
        Ok(Kernel { module: self, function, shared: 0 })
    }

    /// A stream in the same context.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn stream(&self, priority: Priority) -> Result<Stream<'_>> {
        let driver = self.primary.device.driver;
        let _entered = self.primary.enter()?;
        // Out of range is clamped; smaller is more urgent.
        let priority = match priority {
            Priority::High => c_int::MIN,
            Priority::Low => c_int::MAX,
        };
        let mut stream = std::ptr::null_mut();
        // SAFETY: the place outlives the call.
        let code = unsafe { driver.stream_create(&mut stream, NON_BLOCKING, priority) };
        driver.check("create stream", "cuStreamCreateWithPriority", code)?;
        Ok(Stream { module: self, stream })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(_entered) = self.primary.enter() else { return };
        // SAFETY: loaded once; kernels and streams borrow the module, so none is used after this.
        let _ = unsafe { self.primary.device.driver.module_unload(self.module) };
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("ordinal", &self.primary.device.ordinal).finish_non_exhaustive()
    }
}

/// Which of two ready kernels the GPU starts first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// The highest that the GPU has.
    High,
    /// The lowest.
    Low,
}

/// A loaded kernel.
#[derive(Debug)]
pub struct Kernel<'m> {
    module: &'m Module,
    function: Handle,
    /// Bytes of dynamic shared memory that a block gets.
    shared: c_uint,
}

// SAFETY: functions may be used from any thread.
unsafe impl Send for Kernel<'_> {}

impl Kernel<'_> {
    /// Has each block take all the shared memory that a block may have, so that no other block finds room on its SM: a warp
    /// that waits for messages shares no issue slots then. From compute capability 8.0 on, where every block needs 1 KiB
    /// of it; earlier, blocks that use none still fit. Launch no more blocks than the GPU has SMs.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn alone_on_its_sm(mut self) -> Result<Self> {
        let most = self.most_shared()?;
        self.allow_shared(most)?;
        self.take_shared(most);
        Ok(self)
    }

    /// Bytes of dynamic shared memory that a block may have at most, beside what the code declares.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn most_shared(&self) -> Result<u32> {
        let driver = self.module.primary.device.driver;
        let _entered = self.module.primary.enter()?;
        let mut own = 0;
        // SAFETY: a live place and a live function.
        let code = unsafe { driver.function_attribute(&mut own, FUNCTION_SHARED, self.function) };
        driver.check("launch", "cuFuncGetAttribute", code)?;
        let most = self.module.primary.device.attribute(ATTRIBUTE_BLOCK_SHARED).unwrap_or(0);
        Ok(u32::try_from(most.saturating_sub(own)).unwrap_or(0))
    }

    /// Allows launches with so many bytes of dynamic shared memory for each block.
    ///
    /// # Errors
    ///
    /// What CUDA reports, for more than [`Kernel::most_shared`] above all.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        let driver = self.module.primary.device.driver;
        let _entered = self.module.primary.enter()?;
        let wanted = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: a live function.
        let code = unsafe { driver.function_set_attribute(self.function, FUNCTION_DYNAMIC_SHARED, wanted) };
        driver.check("launch", "cuFuncSetAttribute", code)
    }

    /// Launches from now on give each block so many bytes of dynamic shared memory, as many as were allowed at most.
    pub fn take_shared(&mut self, bytes: u32) {
        self.shared = bytes;
    }

    /// How many blocks of `threads` threads run at once, on an otherwise idle GPU.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn resident_blocks(&self, threads: u32) -> Result<u32> {
        let driver = self.module.primary.device.driver;
        let _entered = self.module.primary.enter()?;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        let mut per_sm = 0;
        // SAFETY: a live place and a live function.
        let code = unsafe { driver.occupancy(&mut per_sm, self.function, threads, usize_of(u64::from(self.shared))) };
        driver.check("launch", "cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        let sms = self.module.primary.device.attribute(ATTRIBUTE_MULTIPROCESSORS).unwrap_or(1);
        Ok(u32::try_from(per_sm.saturating_mul(sms)).unwrap_or(0))
    }

    /// Starts `blocks` blocks of `threads` threads on the stream and returns at once.
    ///
    /// # Errors
    ///
    /// What CUDA reports: a shape that the GPU cannot run, or that an earlier kernel failed.
    ///
    /// # Safety
    ///
    /// - `parameter` is the kernel's one parameter: a structure of nothing but 64-bit words;
    /// - what its addresses lead to stays allocated until [`Stream::finish`] says that the kernel has ended.
    pub unsafe fn launch(&self, stream: &Stream<'_>, blocks: u32, threads: u32, parameter: &[u64]) -> Result<()> {
        let driver = self.module.primary.device.driver;
        let _entered = self.module.primary.enter()?;
        let mut parameters = [parameter.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: a live function and stream; the one parameter is copied during the call, and its layout and
        // addresses are the caller's duty.
        let code = unsafe {
            driver.launch(
                self.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                self.shared,
                stream.stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        driver.check("launch", "cuLaunchKernel", code)
    }
}

/// A non-blocking stream. Destroying it waits for nobody (CUDA releases a busy stream when it is done).
#[derive(Debug)]
pub struct Stream<'m> {
    module: &'m Module,
    stream: Handle,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream<'_> {}

impl Stream<'_> {
    /// Whether everything launched on it has ended.
    ///
    /// # Errors
    ///
    /// That a kernel failed.
    pub fn is_idle(&self) -> Result<bool> {
        let driver = self.module.primary.device.driver;
        let _entered = self.module.primary.enter()?;
        // SAFETY: our own stream.
        match unsafe { driver.stream_query(self.stream) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(driver.error("run kernel", "cuStreamQuery", code)),
        }
    }

    /// Waits until everything launched on it has ended.
    ///
    /// # Errors
    ///
    /// `Busy` after `limit`; that a kernel failed.
    pub fn finish(&self, limit: Duration) -> Result<()> {
        let started = Instant::now();
        while !self.is_idle()? {
            if started.elapsed() > limit {
                let cause = format!("a kernel did not end within {} ms", limit.as_millis());
                return Err(Error::new("run kernel", ErrorKind::Busy, cause)
                    .remedy("look with nvidia-smi for another program that keeps the GPU busy"));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        let Ok(_entered) = self.module.primary.enter() else { return };
        // SAFETY: our own stream, destroyed once.
        let _ = unsafe { self.module.primary.device.driver.stream_destroy(self.stream) };
    }
}

/// The size of a kernel's one parameter as its PTX declares it: `.param .align 8 .b8 NAME_param_0[SIZE]`.
///
/// For tests that keep a structure here and its twin in the kernel's source together.
#[must_use]
pub fn parameter_bytes(ptx: &str, kernel: &str) -> Option<usize> {
    let (_, rest) = ptx.split_once(&format!(".b8 {kernel}_param_0["))?;
    rest.split_once(']')?.0.parse::<u64>().ok().map(usize_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameters_size_is_read_from_ptx() {
        let ptx = ".visible .entry k(\n\t.param .align 8 .b8 k_param_0[80]\n)\n{ ret; }\n";
        assert_eq!(parameter_bytes(ptx, "k"), Some(80));
        assert_eq!(parameter_bytes(ptx, "other"), None);
    }

    #[test]
    fn without_a_driver_loading_says_so() {
        // Where there is a GPU, a compiler's error is what comes back.
        let error = Module::load(0, "this is no PTX").unwrap_err();
        assert!(!error.to_string().contains('\n') && !error.cause().is_empty(), "{error}");
    }
}
