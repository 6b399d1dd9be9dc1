//! Backend `rm`: how far it may go, and who said so.

use std::env;

use crate::backend::rm::policy;
use crate::backend::{BackendKind, RmLevel};
use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::Root;

const AREA: &str = "rm";

pub(super) fn check(root: &Root) -> Vec<Finding> {
    let from_env = env::var("GDRCOPY_RM").ok().and_then(|value| value.parse::<RmLevel>().ok());
    let (asked, by) = match from_env {
        Some(level) => (level, "GDRCOPY_RM"),
        None => (RmLevel::Vmm, "the default"),
    };
    let mut findings = vec![level(root, asked, by)];
    if let Ok(pipes) = env::var("CUDA_MPS_PIPE_DIRECTORY") {
        let what = "CUDA runs under MPS, whose server owns the memory: backend rm refuses it";
        let remedy = "start this process without CUDA_MPS_PIPE_DIRECTORY, or stop the MPS control daemon";
        findings.push(Finding::warning(AREA, what, remedy).read(format!("CUDA_MPS_PIPE_DIRECTORY={pipes}")));
    }
    findings
}

fn level(root: &Root, asked: RmLevel, by: &str) -> Finding {
    let file = policy::FILE;
    let cap = match policy::cap(&root.path(file), root.owner()) {
        Ok(cap) => cap,
        Err(error) => {
            let remedy = format!(
                "as root: chown root {file}, chmod 0644 {file}, and write 'rm = off', 'rm = vmm' or 'rm = ipc'"
            );
            let what = format!("backend rm refuses to work: {}", error.cause());
            return Finding::problem(AREA, what, remedy).read(file).only_for(BackendKind::Rm);
        }
    };
    match cap {
        Some(RmLevel::Off) => Finding::problem(
            AREA,
            format!("the administrator switched backend rm off in {file}"),
            format!("ask for 'rm = vmm' in {file}, or use the module gdrdrv"),
        )
        .read(format!("{file}: rm = off"))
        .only_for(BackendKind::Rm),
        _ if asked == RmLevel::Off => {
            let what = format!("backend rm is switched off by {by}");
            Finding::problem(AREA, what, "unset GDRCOPY_RM").read("GDRCOPY_RM=off").only_for(BackendKind::Rm)
        }
        Some(cap) if cap < asked => Finding::warning(
            AREA,
            format!("level {asked} is asked for by {by}, and capped at {cap} in {file}: cudaMalloc memory is refused"),
            "allocate with Session::alloc or as exportable cuMemCreate memory, or ask the administrator for 'rm = ipc'",
        )
        .read(format!("{file}: rm = {cap}")),
        Some(cap) => {
            let ipc = if cap == RmLevel::Vmm { "ipc is not allowed" } else { "ipc is allowed" };
            Finding::ok(AREA, format!("level {asked} ({by}); the administrator's cap is {cap}: {ipc}")).read(file)
        }
        None => {
            let more = if asked == RmLevel::Ipc { "" } else { "; GDRCOPY_RM=ipc adds cudaMalloc memory" };
            Finding::ok(AREA, format!("level {asked} ({by}), no cap in {file}{more}"))
                .read(format!("{file} is not there"))
        }
    }
}
