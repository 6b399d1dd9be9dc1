//! Packages from PyPI, downloaded once, checked by their hash and unpacked into a cache (`GDRCOPY_WHEELS`, or below the
//! target folder). Nothing of them is installed.

use std::path::{Path, PathBuf};

use crate::run::{Log, command, run};
use crate::workspace::Workspace;

/// A file of a package: name and version as pip takes them, and what the file must hash to (SHA-256).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wheel {
    pub(crate) requirement: &'static str,
    pub(crate) sha256: &'static str,
}

/// The folder a wheel was unpacked to, downloaded first if need be; `None` without a network.
pub(crate) fn unpacked(log: &mut Log, workspace: &Workspace, wheel: Wheel) -> Result<Option<PathBuf>, String> {
    let fail = |path: &Path| {
        let path = path.display().to_string();
        move |error: std::io::Error| format!("{path}: {error}")
    };
    let cache = std::env::var_os("GDRCOPY_WHEELS").map_or_else(|| workspace.target.join("wheels"), PathBuf::from);
    let root = cache.join(wheel.requirement.replace("==", "-"));
    if root.join("done").exists() {
        return Ok(Some(root));
    }
    let download = root.join("download");
    std::fs::create_dir_all(&download).map_err(fail(&download))?;
    let list = root.join("requirement.txt");
    let line = format!("{} --hash=sha256:{}\n", wheel.requirement, wheel.sha256);
    std::fs::write(&list, line).map_err(fail(&list))?;
    let mut pip = command("python3", ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]);
    pip.args(["--only-binary=:all:", "--disable-pip-version-check", "--retries=1", "--timeout=20"]);
    log.take();
    pip.arg("--dest").arg(&download).arg("--requirement").arg(&list);
    if let Err(error) = run(log, pip) {
        // pip checks the hash itself; that it differs is no matter of the network.
        let mismatch = log.take().iter().any(|line| line.contains("DO NOT MATCH THE HASHES"));
        return if mismatch { Err(error) } else { Ok(None) };
    }
    let unpack = "import glob, sys, zipfile\n\
                  for name in glob.glob(sys.argv[1] + '/*.whl'):\n    zipfile.ZipFile(name).extractall(sys.argv[2])\n";
    let mut python = command("python3", ["-c", unpack]);
    python.arg(&download).arg(&root);
    run(log, python)?;
    std::fs::remove_dir_all(&download).map_err(fail(&download))?;
    std::fs::write(root.join("done"), "").map_err(fail(&root))?;
    Ok(Some(root))
}
