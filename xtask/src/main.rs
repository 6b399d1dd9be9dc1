//! `cargo xtask`: build and test commands of this repository.

mod abi;
mod bundle;
mod c_programs;
mod ci;
mod install;
mod instructions;
mod nvrtc;
mod ptx;
mod real_clients;
mod run;
mod steps;
mod vm;
mod vm_build;
mod vm_contract;
mod vm_guest;
mod vm_nvidia;
mod vm_packages;
mod vm_tap;
mod wheels;
mod workspace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use ci::Verdict;
use install::Layout;
use run::Log;
use workspace::Workspace;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  ci [--list] [--full] [STEP...]
                            run every step, or the named ones, and print a summary; --list names the steps, --full adds
                            those that are seldom worth their downloads or their time
  gpu-bundle [--out DIR]    collect release programs and tests for a machine with a GPU (default: bundle/ at the root)
  instructions [--bless]    count the copy path's instructions under valgrind and compare with benches/instructions.txt, or
                            write them there
  install --prefix DIR [--libdir DIR] [--destdir DIR]
                            build and install the C library (libgdrapi.so.2, libgdrapi.a), its headers, and what
                            pkg-config and CMake read; --libdir is below the prefix (default: lib); with --features
                            vulkan that backend is built in
  uninstall --prefix DIR [--libdir DIR] [--destdir DIR]
                            remove what install put there
  vm [--kernel 6.1|6.12] [--contract] [--broken] [--extra DIR] [--build-tree DIR] [--keep] [FILTER]
                            test the kernel module in a virtual machine; only the tests whose name contains FILTER.
                            --contract: the library's contract suite instead; --broken: its broken variants, each of which a test must notice; --extra: static programs
                            to run as well; --build-tree: a kernel built from source instead of Debian's
  ptx [--check]             compile the GPU kernels of the tree to the PTX that is committed beside them; --check: see
                            that this would change nothing, and that the PTX can be assembled
  nvidia-headers            compile the kernel module against the headers of NVIDIA drivers that Debian has
  -h, --help                print this text";

#[derive(Debug, PartialEq, Eq)]
enum Command {
    Help,
    CiList,
    CiFull,
    Ci(Vec<String>),
    GpuBundle(Option<PathBuf>),
    Instructions { bless: bool },
    Install(Layout),
    Uninstall(Layout),
    Vm(vm::Options),
    NvidiaHeaders,
    Ptx,
    PtxCheck,
}

fn parse(args: &[OsString]) -> Result<Command, String> {
    let Some((command, rest)) = args.split_first() else {
        return Ok(Command::Help);
    };
    let is_help = |arg: &OsString| arg == "-h" || arg == "--help";
    if is_help(command) || rest.iter().any(is_help) {
        return Ok(Command::Help);
    }
    match (command.to_str(), rest) {
        (Some("ci"), [list]) if list == "--list" => Ok(Command::CiList),
        (Some("ci"), [full]) if full == "--full" => Ok(Command::CiFull),
        (Some("ci"), steps) => {
            let names: Vec<String> = steps.iter().map(|step| step.to_string_lossy().into_owned()).collect();
            match names.iter().find(|name| name.starts_with('-')) {
                Some(flag) => Err(format!("ci: unexpected argument `{flag}`; --list and --full stand alone")),
                None => Ok(Command::Ci(names)),
            }
        }
        (Some("gpu-bundle"), []) => Ok(Command::GpuBundle(None)),
        (Some("gpu-bundle"), [flag, dir]) if flag == "--out" => Ok(Command::GpuBundle(Some(PathBuf::from(dir)))),
        (Some("gpu-bundle"), _) => Err("gpu-bundle: expected nothing or `--out DIR`".to_owned()),
        (Some("instructions"), []) => Ok(Command::Instructions { bless: false }),
        (Some("instructions"), [flag]) if flag == "--bless" => Ok(Command::Instructions { bless: true }),
        (Some("instructions"), _) => Err("instructions: expected nothing or `--bless`".to_owned()),
        (Some("install"), args) => Layout::parse(args).map(Command::Install).map_err(|why| format!("install: {why}")),
        (Some("uninstall"), args) => {
            Layout::parse(args).map(Command::Uninstall).map_err(|why| format!("uninstall: {why}"))
        }
        (Some("ptx"), []) => Ok(Command::Ptx),
        (Some("ptx"), [check]) if check == "--check" => Ok(Command::PtxCheck),
        (Some("ptx"), _) => Err("ptx: expected nothing or `--check`".to_owned()),
        (Some("nvidia-headers"), []) => Ok(Command::NvidiaHeaders),
        (Some("vm"), options) => {
            let options: Vec<String> = options.iter().map(|option| option.to_string_lossy().into_owned()).collect();
            vm::Options::parse(&options).map(Command::Vm)
        }
        _ => Err(format!("unknown command `{}`; `cargo xtask --help` lists them", command.display())),
    }
}

fn gpu_bundle(log: &mut Log, out: Option<PathBuf>) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let out = match out {
        Some(dir) => std::path::absolute(&dir).map_err(|error| format!("{}: {error}", dir.display()))?,
        None => workspace.root.join("bundle"),
    };
    bundle::build(log, &workspace, &out)
}

fn ptx_check(log: &mut Log, workspace: &Workspace) -> Result<ExitCode, String> {
    if let Verdict::Skipped(why) = ptx::check(log, workspace)? {
        log.say(&format!("SKIPPED: {why}"));
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut log = Log::new(std::io::stdout());
    let done = match parse(&args) {
        Ok(Command::Help) => {
            log.say(USAGE);
            Ok(ExitCode::SUCCESS)
        }
        Ok(Command::CiList) => {
            ci::list(&mut log);
            Ok(ExitCode::SUCCESS)
        }
        Ok(Command::CiFull) => {
            let steps: Vec<_> = steps::every().collect();
            Workspace::load().map(|workspace| ci::run(&mut log, &workspace, &steps))
        }
        Ok(Command::Ci(names)) => match ci::select(steps::ALL, steps::FULL, &names) {
            Ok(steps) => Workspace::load().map(|workspace| ci::run(&mut log, &workspace, &steps)),
            Err(message) => return usage_error(&message),
        },
        Ok(Command::Instructions { bless }) => Workspace::load()
            .and_then(|workspace| instructions::by_hand(&mut log, &workspace, bless))
            .map(|()| ExitCode::SUCCESS),
        Ok(Command::Install(layout)) => Workspace::load()
            .and_then(|workspace| install::install(&mut log, &workspace, &layout))
            .map(|()| ExitCode::SUCCESS),
        Ok(Command::Uninstall(layout)) => Workspace::load()
            .and_then(|workspace| install::uninstall(&mut log, &workspace, &layout))
            .map(|()| ExitCode::SUCCESS),
        Ok(Command::GpuBundle(out)) => gpu_bundle(&mut log, out).map(|()| ExitCode::SUCCESS),
        Ok(Command::Ptx) => {
            Workspace::load().and_then(|workspace| ptx::regenerate(&mut log, &workspace)).map(|()| ExitCode::SUCCESS)
        }
        Ok(Command::PtxCheck) => Workspace::load().and_then(|workspace| ptx_check(&mut log, &workspace)),
        Ok(Command::NvidiaHeaders) => Workspace::load()
            .and_then(|workspace| vm_nvidia::command_headers(&mut log, &workspace))
            .map(|()| ExitCode::SUCCESS),
        Ok(Command::Vm(options)) => Workspace::load()
            .and_then(|workspace| vm::command(&mut log, &workspace, &options))
            .map(|()| ExitCode::SUCCESS),
        Err(message) => return usage_error(&message),
    };
    done.unwrap_or_else(|message| {
        eprintln!("xtask: {message}");
        ExitCode::FAILURE
    })
}

fn usage_error(message: &str) -> ExitCode {
    eprintln!("xtask: {message}");
    ExitCode::from(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Command, String> {
        parse(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn nothing_and_help_print_the_usage() {
        assert_eq!(parsed(&[]), Ok(Command::Help));
        assert_eq!(parsed(&["-h"]), Ok(Command::Help));
        assert_eq!(parsed(&["ci", "--help"]), Ok(Command::Help));
    }

    #[test]
    fn ci_takes_steps_or_list() {
        assert_eq!(parsed(&["ci"]), Ok(Command::Ci(vec![])));
        assert_eq!(parsed(&["ci", "fmt", "gpu tests"]), Ok(Command::Ci(vec!["fmt".into(), "gpu tests".into()])));
        assert_eq!(parsed(&["ci", "--list"]), Ok(Command::CiList));
        assert_eq!(parsed(&["ci", "--full"]), Ok(Command::CiFull));
        assert!(parsed(&["ci", "--list", "fmt"]).is_err());
        assert!(parsed(&["ci", "--fast"]).is_err());
    }

    #[test]
    fn gpu_bundle_takes_one_folder() {
        assert_eq!(parsed(&["gpu-bundle"]), Ok(Command::GpuBundle(None)));
        assert_eq!(parsed(&["gpu-bundle", "--out", "x"]), Ok(Command::GpuBundle(Some("x".into()))));
        assert!(parsed(&["gpu-bundle", "--out"]).is_err());
        assert!(parsed(&["gpu-bundle", "x"]).is_err());
    }

    #[test]
    fn instructions_takes_bless() {
        assert_eq!(parsed(&["instructions"]), Ok(Command::Instructions { bless: false }));
        assert_eq!(parsed(&["instructions", "--bless"]), Ok(Command::Instructions { bless: true }));
        assert!(parsed(&["instructions", "x"]).is_err());
    }

    #[test]
    fn install_and_uninstall_take_a_prefix() {
        let layout = Layout::at("/usr".into());
        assert_eq!(parsed(&["install", "--prefix", "/usr"]), Ok(Command::Install(layout.clone())));
        assert_eq!(parsed(&["uninstall", "--prefix", "/usr"]), Ok(Command::Uninstall(layout)));
        assert!(parsed(&["install"]).unwrap_err().starts_with("install: "));
    }

    #[test]
    fn ptx_writes_or_checks() {
        assert_eq!(parsed(&["ptx"]), Ok(Command::Ptx));
        assert_eq!(parsed(&["ptx", "--check"]), Ok(Command::PtxCheck));
        assert!(parsed(&["ptx", "src/ptx/load.cu"]).is_err());
    }

    #[test]
    fn an_unknown_command_is_one_line() {
        let message = parsed(&["deploy"]).unwrap_err();
        assert!(message.contains("`deploy`") && !message.contains('\n'), "{message}");
    }
}
