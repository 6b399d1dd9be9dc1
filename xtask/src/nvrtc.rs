//! NVIDIA's run-time compiler, loaded from a file: CUDA C++ to PTX.

#![allow(unsafe_code, reason = "calls a C library loaded at run time")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

/// What is compiled.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
    /// Name as in `#include`, and text.
    pub(crate) includes: &'a [(String, String)],
}

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| "a NUL byte in a source file".to_owned())
}

fn c_strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Vec<CString>, String> {
    texts.into_iter().map(c_string).collect()
}

fn count(list: &[CString]) -> Result<c_int, String> {
    c_int::try_from(list.len()).map_err(|_| "too many arguments".to_owned())
}

fn pointers(list: &[CString]) -> Vec<*const c_char> {
    list.iter().map(|text| text.as_ptr()).collect()
}

/// The PTX of a source, or what the compiler says against it.
pub(crate) fn compile(library: &Path, source: &Source<'_>, options: &[&str]) -> Result<String, String> {
    // SAFETY: NVRTC's initialisers have no requirements.
    let library = unsafe { Library::new(library) }.map_err(|error| format!("{}: {error}", library.display()))?;
    macro_rules! function {
        ($name:literal, $kind:ty) => {{
            // SAFETY: the type is the one that the NVRTC reference gives for this name.
            let found = unsafe { library.get::<$kind>($name.as_bytes()) };
            found.map_err(|error| error.to_string())?
        }};
    }
    let create = function!("nvrtcCreateProgram", Create);
    let compile = function!("nvrtcCompileProgram", Compile);
    let destroy = function!("nvrtcDestroyProgram", Destroy);
    let log = (function!("nvrtcGetProgramLogSize", Size), function!("nvrtcGetProgramLog", Text));
    let ptx = (function!("nvrtcGetPTXSize", Size), function!("nvrtcGetPTX", Text));

    let (name, text) = (c_string(source.name)?, c_string(source.text)?);
    let names = c_strings(source.includes.iter().map(|(name, _)| name.as_str()))?;
    let texts = c_strings(source.includes.iter().map(|(_, text)| text.as_str()))?;
    let options = c_strings(options.iter().copied())?;

    let mut program = ptr::null_mut();
    let (text_list, name_list) = (pointers(&texts), pointers(&names));
    // SAFETY: NUL-terminated strings, and as many headers as stated, all of which outlive the call.
    let code = unsafe {
        create(&mut program, text.as_ptr(), name.as_ptr(), count(&names)?, text_list.as_ptr(), name_list.as_ptr())
    };
    if code != 0 {
        return Err(format!("nvrtcCreateProgram returned {code}"));
    }
    let option_list = pointers(&options);
    // SAFETY: as many NUL-terminated options as stated.
    let code = unsafe { compile(program, count(&options)?, option_list.as_ptr()) };
    let (size, get) = if code == 0 { ptx } else { log };
    let outcome = output(program, *size, *get);
    // SAFETY: created above and destroyed once.
    let _ = unsafe { destroy(&mut program) };
    match (code, outcome?) {
        (0, ptx) => Ok(ptx),
        (_, said) => Err(format!("{}: NVRTC says: {}", source.name, said.trim())),
    }
}

/// One of the texts that a compilation leaves.
fn output(program: Program, size: Size, get: Text) -> Result<String, String> {
    let mut bytes = 0;
    // SAFETY: a live program and a live place.
    let code = unsafe { size(program, &mut bytes) };
    if code != 0 {
        return Err(format!("NVRTC does not give the size of its output: {code}"));
    }
    let mut text = vec![0_u8; bytes];
    // SAFETY: as many bytes as the library asked for.
    let code = unsafe { get(program, text.as_mut_ptr().cast()) };
    if code != 0 {
        return Err(format!("NVRTC does not give its output: {code}"));
    }
    // The size takes in the NUL.
    text.truncate(bytes.saturating_sub(1));
    String::from_utf8(text).map_err(|_| "NVRTC's output is not UTF-8".to_owned())
}
