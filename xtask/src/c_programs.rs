//! C and C++ programs against the installed library: replays of clients, tests, examples, under memory checkers too.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::ci::Verdict;
use crate::install::{self, Layout};
use crate::run::{Log, command, query, run};
use crate::workspace::Workspace;

type Outcome = Result<Verdict, String>;

/// A C compiler and the C++ compiler that goes with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compiler {
    pub(crate) c: &'static str,
    pub(crate) cxx: &'static str,
}

const GCC: Compiler = Compiler { c: "gcc", cxx: "g++" };
const CLANG: Compiler = Compiler { c: "clang", cxx: "clang++" };

impl Compiler {
    /// gcc, which must be there, and clang, without which a line says so.
    pub(crate) fn all(log: &mut Log) -> Result<Vec<Self>, String> {
        if !(is_there(GCC.c) && is_there(GCC.cxx)) {
            return Err("gcc and g++ are not installed (Debian: build-essential)".to_owned());
        }
        let mut all = vec![GCC];
        if obtain(log, CLANG.c, "clang") && is_there(CLANG.cxx) {
            all.push(CLANG);
        } else {
            log.keep("SKIPPED with clang, which is not installed (Debian: clang)".to_owned());
        }
        Ok(all)
    }
}

pub(crate) fn is_there(program: &str) -> bool {
    query(program, ["--version"]).is_some()
}

/// Whether a program is there. Where `GDRCOPY_CI_APT=1` allows it, its Debian package is installed first.
pub(crate) fn obtain(log: &mut Log, program: &str, package: &str) -> bool {
    if !is_there(program) {
        install_package(log, package);
    }
    is_there(program)
}

/// Installs a Debian package where `GDRCOPY_CI_APT=1` allows it.
pub(crate) fn install_package(log: &mut Log, package: &str) {
    if std::env::var_os("GDRCOPY_CI_APT").is_some_and(|value| value == "1") {
        let script = format!("apt-get install -y {package} || {{ apt-get update && apt-get install -y {package}; }}");
        let quiet = format!("{{ {script} ; }} >/dev/null 2>&1");
        // Without a network it stays away, and the step says that it was skipped.
        let _ = run(log, command("sh", ["-c", &quiet]));
    }
}

/// An installation in the target folder.
pub(crate) fn stage(log: &mut Log, workspace: &Workspace) -> Result<Layout, String> {
    let layout = Layout::at(workspace.target.join("c-stage"));
    install::install(log, workspace, &layout)?;
    Ok(layout)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checker {
    None,
    Valgrind,
    AddressSanitizer,
}

/// One program of the tests.
#[derive(Debug)]
struct Program {
    name: String,
    path: PathBuf,
}

fn sources(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let fail = |error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(fail)?.collect::<Result<Vec<_>, _>>().map_err(fail)?;
    let mut sources: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "c" || extension == "cc"));
    // Compiled only.
    sources.retain(|path| path.file_stem().is_none_or(|stem| stem != "layout"));
    sources.sort();
    Ok(sources)
}

/// Compiles each source of a folder to a program of its own.
fn compile(log: &mut Log, stage: &Layout, folder: &Path, out: &Path, flags: &[&str]) -> Result<Vec<Program>, String> {
    fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let mut programs = Vec::new();
    let mut jobs = Vec::new();
    for source in sources(folder)? {
        let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let path = out.join(&name);
        let is_cxx = source.extension().is_some_and(|extension| extension == "cc");
        let (compiler, standard) = if is_cxx { (GCC.cxx, "-std=c++17") } else { (GCC.c, "-std=gnu11") };
        let mut job = command(compiler, [standard, "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
        job.args(flags).arg(format!("-I{}", stage.include().display())).arg(&source).arg("-o").arg(&path);
        // Clients that dlopen are not linked with it.
        let text = fs::read_to_string(&source).map_err(|error| format!("{}: {error}", source.display()))?;
        if text.contains("#include <gdrapi.h>") {
            job.arg(format!("-L{}", stage.lib().display())).arg("-lgdrapi");
        }
        jobs.push((format!("compile {name}"), job));
        programs.push(Program { name, path });
    }
    run_all(log, jobs, Expect::Silence)?;
    Ok(programs)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    Success,
    /// Success, and nothing printed: neither the library nor a passing test says anything.
    Silence,
}

/// A program that hangs is stopped after this long.
const LIMIT_SECONDS: &str = "180";

/// Runs jobs, as many at a time as there are cores.
fn run_all(log: &mut Log, jobs: Vec<(String, Command)>, expect: Expect) -> Result<(), String> {
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let total = jobs.len();
    let queue = Mutex::new(jobs.into_iter());
    let next = || queue.lock().ok()?.next();
    let work = || {
        let mut done: Vec<(String, std::io::Result<Output>, Duration)> = Vec::new();
        while let Some((name, mut job)) = next() {
            let started = Instant::now();
            let output = job.stdin(Stdio::null()).output();
            done.push((name, output, started.elapsed()));
        }
        done
    };
    let mut done: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    if done.len() != total {
        return Err("a worker died".to_owned());
    }
    done.sort_by(|a, b| a.0.cmp(&b.0));
    let mut failed = Vec::new();
    for (name, output, took) in done {
        let (said, fine) = match output {
            Ok(output) => {
                let text = [output.stdout, output.stderr].concat();
                let silent = text.is_empty() || expect == Expect::Success;
                let said = String::from_utf8_lossy(&text).into_owned();
                (format!("{} {said}", output.status), output.status.success() && silent)
            }
            Err(error) => (error.to_string(), false),
        };
        if fine {
            log.say(&format!("    ok {name} ({:.2} s)", took.as_secs_f64()));
        } else {
            log.keep(format!("    FAILED {name}: {said}"));
            failed.push(name);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// The backend that the programs run on, unless the environment names another.
fn backend() -> String {
    std::env::var("GDRCOPY_BACKEND").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "emulated".to_owned())
}

/// What the programs run over: the backend, and what plays the machine.
type Ground<'a> = &'a [(&'a str, &'a OsStr)];

fn execute<'a>(
    log: &mut Log,
    stage: &Layout,
    programs: impl IntoIterator<Item = &'a Program>,
    checker: Checker,
    ground: Ground<'_>,
) -> Result<(), String> {
    let jobs = programs.into_iter().map(|program| {
        let mut job = command("timeout", [LIMIT_SECONDS]);
        if checker == Checker::Valgrind {
            let flags = ["--quiet", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite"];
            // Valgrind runs one thread at a time; unless told to be fair, one that waits for another can keep its turn for
            // minutes.
            job.arg("valgrind").arg("--fair-sched=yes").args(flags);
        }
        if checker != Checker::None {
            job.env("CHECK_UNDER_CHECKER", "1");
        }
        job.arg(&program.path).env("LD_LIBRARY_PATH", stage.lib()).env("GDRCOPY_BACKEND", backend());
        job.env_remove("GDRCOPY_ENABLE_LOGGING").envs(ground.iter().copied());
        (program.name.clone(), job)
    });
    run_all(log, jobs.collect(), Expect::Silence)
}

/// Programs that demand a kernel module of 2.5 or newer, as the clients they replay do.
const MODERN: [&str; 8] =
    ["aws_ofi_nccl", "mscclpp", "nccl_2_28", "nccl_2_30", "nccl_2_31", "nvshmem_3_8", "semantics", "tensorrt_llm"];

/// Version and mode of the module that the stand-in plays.
const MODULES: [(&str, bool); 6] =
    [("2.0", false), ("2.3", false), ("2.4", false), ("2.5", true), ("2.6", false), ("2.6", true)];

/// A stand-in for GPU and kernel module, to be preloaded.
pub(crate) fn stand_in(log: &mut Log, workspace: &Workspace) -> Result<PathBuf, String> {
    let folder = workspace.root.join("tests/standin");
    let library = workspace.target.join("libcuda-standin.so");
    let flags = ["-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"];
    let mut build = command(GCC.c, flags);
    build.arg("-o").arg(&library).args(sources(&folder)?);
    run(log, build)?;
    Ok(library)
}

/// C tests and replays of clients on backend `gdrdrv`, over every version of the module.
pub(crate) fn tests_over_gdrdrv(log: &mut Log, workspace: &Workspace) -> Outcome {
    let stage = stage(log, workspace)?;
    let programs = compile_tests(log, workspace, &stage, false)?;
    let library = stand_in(log, workspace)?;
    for (version, persistent) in MODULES {
        log.keep(format!("    module {version}, {}", if persistent { "persistent" } else { "told of frees" }));
        let mut ground: Vec<(&str, &OsStr)> = vec![
            ("GDRCOPY_BACKEND", OsStr::new("gdrdrv")),
            ("LD_PRELOAD", library.as_os_str()),
            ("GDRCOPY_STANDIN_VERSION", OsStr::new(version)),
        ];
        if persistent {
            ground.push(("GDRCOPY_STANDIN_PERSISTENT", OsStr::new("1")));
        }
        let old = ["2.0", "2.3", "2.4"].contains(&version);
        let (modern, any): (Vec<_>, Vec<_>) = programs.iter().partition(|program| MODERN.contains(&&*program.name));
        execute(log, &stage, any, Checker::None, &ground)?;
        if !old {
            execute(log, &stage, modern, Checker::None, &ground)?;
        }
    }
    Ok(Verdict::Passed)
}

fn folders(workspace: &Workspace) -> [PathBuf; 2] {
    ["c", "replay"].map(|folder| workspace.root.join("ffi/tests").join(folder))
}

fn compile_tests(log: &mut Log, workspace: &Workspace, stage: &Layout, sanitize: bool) -> Result<Vec<Program>, String> {
    let flags: &[&str] = if sanitize { &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] } else { &[] };
    let mut programs = Vec::new();
    for folder in folders(workspace) {
        let name = folder.file_name().unwrap_or_default();
        let out = workspace.target.join(if sanitize { "c-asan" } else { "c-tests" }).join(name);
        programs.extend(compile(log, stage, &folder, &out, flags)?);
    }
    if programs.is_empty() { Err("there are no C tests".to_owned()) } else { Ok(programs) }
}

/// C tests and replays of clients.
pub(crate) fn tests(log: &mut Log, workspace: &Workspace) -> Outcome {
    let stage = stage(log, workspace)?;
    let programs = compile_tests(log, workspace, &stage, false)?;
    execute(log, &stage, &programs, Checker::None, &[])?;
    log.keep(format!("{} programs on backend {}", programs.len(), backend()));
    Ok(Verdict::Passed)
}

/// The library with backend vulkan built in, and the system's loader hidden by a file of its name that is no library.
pub(crate) fn with_vulkan(log: &mut Log, workspace: &Workspace) -> Outcome {
    let stage = Layout::at(workspace.target.join("c-stage-vulkan")).with("vulkan");
    install::install(log, workspace, &stage)?;
    let out = workspace.target.join("c-tests/vulkan");
    let programs = compile(log, &stage, &workspace.root.join("ffi/tests/vulkan"), &out, &[])?;
    let hidden = out.join("hidden");
    let loader = hidden.join("libvulkan.so.1");
    let hide = fs::create_dir_all(&hidden).and_then(|()| fs::write(&loader, ""));
    hide.map_err(|error| format!("{}: {error}", loader.display()))?;
    let path = std::env::join_paths([hidden, stage.lib()]).map_err(|error| error.to_string())?;
    execute(log, &stage, &programs, Checker::None, &[("LD_LIBRARY_PATH", &path)])?;
    Ok(Verdict::Passed)
}

pub(crate) fn memcheck(log: &mut Log, workspace: &Workspace) -> Outcome {
    if !obtain(log, "valgrind", "valgrind") {
        return Ok(Verdict::Skipped("valgrind is not installed (Debian: valgrind)".to_owned()));
    }
    let stage = stage(log, workspace)?;
    let programs = compile_tests(log, workspace, &stage, false)?;
    execute(log, &stage, &programs, Checker::Valgrind, &[])?;
    Ok(Verdict::Passed)
}

pub(crate) fn sanitize(log: &mut Log, workspace: &Workspace) -> Outcome {
    let stage = stage(log, workspace)?;
    let programs = compile_tests(log, workspace, &stage, true)?;
    execute(log, &stage, &programs, Checker::AddressSanitizer, &[])?;
    Ok(Verdict::Passed)
}

/// Another library in Rust, with a standard library of its own, in the same program.
const OTHER_RUST: &str = "#[unsafe(no_mangle)] pub extern \"C\" fn other_rust() -> i32 { \
                          std::panic::catch_unwind(|| vec![1, 2, 3].into_iter().sum()).unwrap_or(0) }";
const BESIDE_IT: &str = "#include <gdrapi.h>\nint other_rust(void);\n\
                         int main(void) { gdr_t g = gdr_open(); return !(g && gdr_close(g) == 0 && other_rust() == 6); }";

/// The ways to build against an installation: pkg-config, CMake, the archive; and that uninstalling leaves nothing.
pub(crate) fn installed(log: &mut Log, workspace: &Workspace) -> Outcome {
    let stage = stage(log, workspace)?;
    let examples = workspace.root.join("examples/c");
    let out = workspace.target.join("c-install");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).map_err(|error| format!("{}: {error}", out.display()))?;

    let order_book = workspace.root.join("examples/order_book");
    let mut programs = compile(log, &stage, &examples, &out.join("examples"), &[])?;
    programs.extend(compile(log, &stage, &order_book, &out.join("examples"), &[])?);
    let jobs = programs.iter().map(|program| {
        let mut job = command("timeout", [LIMIT_SECONDS]);
        job.arg(&program.path).env("LD_LIBRARY_PATH", stage.lib()).env("GDRCOPY_BACKEND", backend());
        (program.name.clone(), job)
    });
    run_all(log, jobs.collect(), Expect::Success)?;

    static_link(log, &stage, &out)?;
    // What a configure script does: a declaration of its own, and no other library.
    let probe = out.join("probe.c");
    let text = "char gdr_pin_buffer(void);\nint main(void) { return gdr_pin_buffer(); }\n";
    fs::write(&probe, text).map_err(|error| format!("{}: {error}", probe.display()))?;
    let mut link = command("gcc", ["-fno-builtin"]);
    link.arg(&probe).arg(format!("-L{}", stage.lib().display())).args(["-lgdrapi", "-o"]).arg(out.join("probe"));
    run(log, link)?;
    if is_there("pkg-config") {
        let minimal = examples.join("minimal.c");
        let script = format!(
            "gcc {} $(pkg-config --cflags --libs gdrapi) -o {}/by-pkg-config",
            minimal.display(),
            out.display()
        );
        let mut job = command("sh", ["-c", &script]);
        job.env("PKG_CONFIG_PATH", stage.pkgconfig());
        run(log, job)?;
    } else {
        log.keep("SKIPPED pkg-config, which is not installed (Debian: pkg-config)".to_owned());
    }
    if obtain(log, "cmake", "cmake") {
        let mut configure = command("cmake", ["-S"]);
        configure.arg(&examples).arg("-B").arg(out.join("cmake"));
        configure.arg(format!("-DCMAKE_PREFIX_PATH={}", workspace.target.join("c-stage").display()));
        run(log, configure)?;
        run(log, command("cmake", [Path::new("--build"), &out.join("cmake")]))?;
    } else {
        log.keep("SKIPPED CMake, which is not installed (Debian: cmake)".to_owned());
    }
    cuda_examples(log, workspace, &stage, &out)?;

    let destdir = out.join("destdir");
    let args = ["--prefix", "/usr", "--destdir", &destdir.to_string_lossy()].map(Into::into);
    let packaged = Layout::parse(&args)?;
    install::install(log, workspace, &packaged)?;
    install::uninstall(log, workspace, &packaged)?;
    let left = files_below(&destdir)?;
    if left.is_empty() { Ok(Verdict::Passed) } else { Err(format!("uninstall left {}", left.join(", "))) }
}

/// The examples with kernels: by nvcc, and by clang against declarations of what they use of CUDA.
fn cuda_examples(log: &mut Log, workspace: &Workspace, stage: &Layout, out: &Path) -> Result<(), String> {
    let sources = ["examples/c/pingpong.cu", "examples/order_book/order_book.cc"].map(|path| workspace.root.join(path));
    let include = format!("-I{}", stage.include().display());
    if is_there("nvcc") {
        for source in &sources {
            let mut build = command("nvcc", ["-std=c++17", "-arch=sm_80", "-x", "cu", &include]);
            build.arg(source).arg(format!("-L{}", stage.lib().display())).args(["-lgdrapi", "-o"]);
            build.arg(out.join(source.file_stem().unwrap_or_default()));
            run(log, build)?;
        }
    } else {
        log.keep("SKIPPED the examples' build by nvcc, which is not installed".to_owned());
    }
    if is_there(CLANG.cxx) {
        let declarations = format!("-I{}", workspace.root.join("ffi/tests/cuda").display());
        for source in &sources {
            for side in ["--cuda-host-only", "--cuda-device-only"] {
                let mut check = command(CLANG.cxx, ["-std=c++17", "-x", "cuda", side, "-nocudainc", "-nocudalib"]);
                check.args(["--cuda-gpu-arch=sm_70", "-include", "cuda_runtime.h", "-fsyntax-only"]);
                check.args(["-Wall", "-Wextra", "-Wno-unused-function", "-Werror", &declarations, &include]);
                check.arg(source);
                run(log, check)?;
            }
        }
    } else {
        log.keep("SKIPPED the examples' check by clang, which is not installed (Debian: clang)".to_owned());
    }
    Ok(())
}

fn static_link(log: &mut Log, stage: &Layout, out: &Path) -> Result<(), String> {
    let write = |name: &str, text: &str| {
        let path = out.join(name);
        fs::write(&path, text).map(|()| path.clone()).map_err(|error| format!("{}: {error}", path.display()))
    };
    let (rust, c) = (write("other.rs", OTHER_RUST)?, write("beside.c", BESIDE_IT)?);
    let other = out.join("libother.a");
    let mut build = command("rustc", ["--edition=2024", "--crate-type=staticlib", "-O", "-o"]);
    build.arg(&other).arg(&rust);
    run(log, build)?;
    // Either order: whichever comes first must not satisfy, or clash with, the second.
    let archive = stage.lib().join("libgdrapi.a");
    for (name, libraries) in [("beside-1", [&archive, &other]), ("beside-2", [&other, &archive])] {
        let program = out.join(name);
        let mut link = command("gcc", [format!("-I{}", stage.include().display())]);
        link.arg(&c).args(libraries).args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program);
        run(log, link)?;
        let mut job = Command::new(&program);
        job.env("GDRCOPY_BACKEND", "emulated");
        run(log, job)?;
    }
    Ok(())
}

fn files_below(folder: &Path) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    let fail = |error| format!("{}: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files_below(&path)?);
        } else {
            found.push(path.display().to_string());
        }
    }
    Ok(found)
}
