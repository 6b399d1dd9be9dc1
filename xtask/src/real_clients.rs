//! Unmodified binaries of clients, from their packages on PyPI, with our library found by its name. They need no GPU for
//! what they do here: both open gdrcopy before they look for one.

use std::path::{Path, PathBuf};

use crate::c_programs::{is_there, stage};
use crate::ci::Verdict;
use crate::run::{Log, capture, command};
use crate::wheels::{Wheel, unpacked};
use crate::workspace::Workspace;

const UCX: Wheel = Wheel {
    requirement: "libucx-cu13==1.22.0",
    sha256: "c6e0aaa82dc6e49dc3ddaac465b530e014f48b6c1c6b5ae74fbdd199d824351b",
};

#[derive(Debug)]
struct Client {
    wheels: &'static [Wheel],
    script: &'static str,
    /// Arguments; those with a slash are paths in the unpacked wheels.
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
    /// What the client must have said.
    said: &'static [&'static str],
}

const NCCL_ENV: &[(&str, &str)] = &[("NCCL_GDRCOPY_ENABLE", "1"), ("NCCL_DEBUG", "INFO"), ("NCCL_SOCKET_IFNAME", "lo")];
const NCCL_SAID: &[&str] = &["GDRCOPY enabled library 2.6 driver 2.6", "ncclGetUniqueId returned 0"];
const NCCL_PATH: &str = "nvidia/nccl/lib/libnccl.so.2";
const NVSHMEM_ENV: &[(&str, &str)] = &[("NVSHMEM_DEBUG", "INFO"), ("NVSHMEM_DEBUG_SUBSYS", "ALL")];
const NVSHMEM_SAID: &[&str] = &["GDR driver version: (2, 6)", "nvshmemt_init returned 0"];
const UCP: &str = "libucx/lib/libucp.so.0";

/// The current pair.
const CURRENT: &[Client] = &[
    Client {
        wheels: &[Wheel {
            requirement: "nvidia-nccl-cu13==2.32.3",
            sha256: "1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3",
        }],
        script: "nccl.py",
        args: &[NCCL_PATH],
        env: NCCL_ENV,
        said: NCCL_SAID,
    },
    Client {
        wheels: &[
            Wheel {
                requirement: "nvidia-nvshmem-cu13==3.8.0",
                sha256: "81a4d1f666543e6d34df6d2ff940c7da1435e34e186aab6f3c2b48861b64ef38",
            },
            UCX,
        ],
        script: "nvshmem.py",
        args: &[UCP, "nvidia/nvshmem/lib/nvshmem_transport_ucx.so.7", "70000"],
        env: NVSHMEM_ENV,
        said: NVSHMEM_SAID,
    },
];

/// The oldest pair in wide use: they know version 1 of the interface only.
const OLDER: &[Client] = &[
    Client {
        wheels: &[Wheel {
            requirement: "nvidia-nccl-cu13==2.28.9",
            sha256: "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
        }],
        script: "nccl.py",
        args: &[NCCL_PATH],
        env: NCCL_ENV,
        said: NCCL_SAID,
    },
    Client {
        wheels: &[
            Wheel {
                requirement: "nvidia-nvshmem-cu13==3.4.5",
                sha256: "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
            },
            UCX,
        ],
        script: "nvshmem.py",
        args: &[UCP, "nvidia/nvshmem/lib/nvshmem_transport_ucx.so.3", "30000"],
        env: NVSHMEM_ENV,
        said: NVSHMEM_SAID,
    },
];

pub(crate) fn current(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    run_clients(log, workspace, CURRENT)
}

pub(crate) fn older(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    run_clients(log, workspace, OLDER)
}

fn run_clients(log: &mut Log, workspace: &Workspace, clients: &[Client]) -> Result<Verdict, String> {
    if !is_there("python3") {
        return Ok(Verdict::Skipped("python3 is not installed".to_owned()));
    }
    let mut ready = Vec::new();
    for client in clients {
        let mut roots = Vec::new();
        for wheel in client.wheels {
            match unpacked(log, workspace, *wheel)? {
                Some(root) => roots.push(root),
                None => return Ok(Verdict::Skipped(format!("{} cannot be downloaded", wheel.requirement))),
            }
        }
        ready.push((client, roots));
    }
    let stage = stage(log, workspace)?;
    for (client, roots) in ready {
        let find = |arg: &&str| -> Result<PathBuf, String> {
            if !arg.contains('/') {
                return Ok(PathBuf::from(arg));
            }
            let found = roots.iter().map(|root| root.join(arg)).find(|path| path.exists());
            found.ok_or_else(|| format!("no file {arg} in {}", client.wheels[0].requirement))
        };
        let paths = client.args.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let libraries = paths.iter().filter_map(|path| path.parent()).filter(|folder| folder.is_absolute());
        let folders = libraries.map(Path::to_path_buf).chain([stage.lib()]);
        let search = std::env::join_paths(folders).map_err(|error| error.to_string())?;

        let mut job = command("timeout", ["120", "python3"]);
        job.arg(workspace.root.join("ffi/tests/real").join(client.script)).args(&paths);
        job.env("LD_LIBRARY_PATH", search).env("GDRCOPY_BACKEND", "emulated").envs(client.env.iter().copied());
        let said = capture_all(log, job)?;
        for expected in client.said {
            if !said.contains(expected) {
                log.keep(said);
                return Err(format!("{} did not say `{expected}`", client.wheels[0].requirement));
            }
        }
        log.keep(format!("    {}: {}", client.wheels[0].requirement, client.said.join("; ")));
    }
    Ok(Verdict::Passed)
}

/// Both outputs: NCCL logs to one, NVSHMEM to the other.
fn capture_all(log: &mut Log, job: std::process::Command) -> Result<String, String> {
    let mut both = command("sh", ["-c", "exec \"$@\" 2>&1", "sh"]);
    both.arg(job.get_program()).args(job.get_args());
    both.envs(job.get_envs().filter_map(|(name, value)| value.map(|value| (name, value))));
    capture(log, both)
}
