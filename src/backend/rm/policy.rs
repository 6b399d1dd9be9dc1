//! The administrator's word: `/etc/gdrcopy.conf` can cap the level of the `rm` backend for the whole machine.

use std::io::ErrorKind as IoKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::backend::RmLevel;
use crate::error::{Error, ErrorKind, Result};

pub(crate) const FILE: &str = "/etc/gdrcopy.conf";

/// The highest level the file allows; `None` without a file, or without a word on it.
///
/// A file that cannot be trusted or understood is an error rather than no limit.
pub(crate) fn cap(path: &Path, owner: u32) -> Result<Option<RmLevel>> {
    let refuse = |cause: String| {
        Error::new("open", ErrorKind::PermissionDenied, cause).remedy("ask the administrator to correct the file")
    };
    let name = path.display();
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == IoKind::NotFound => return Ok(None),
        Err(error) => return Err(refuse(format!("the policy file {name} cannot be read: {error}"))),
    };
    if meta.uid() != owner || meta.mode() & 0o022 != 0 {
        return Err(refuse(format!("the policy file {name} can be changed by others than root")));
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| refuse(format!("the policy file {name} cannot be read: {error}")))?;
    let mut cap = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let unclear = || refuse(format!("line {} of the policy file {name} is not 'rm = off|vmm|ipc'", number + 1));
        let (key, value) = line.split_once('=').ok_or_else(unclear)?;
        if key.trim() != "rm" {
            return Err(unclear());
        }
        cap = Some(value.trim().parse::<RmLevel>().map_err(|_| unclear())?);
    }
    Ok(cap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn with(text: &str, mode: u32) -> Result<Option<RmLevel>> {
        let path = std::env::temp_dir().join(format!("gdrcopy-policy-{}-{mode:o}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let owner = std::fs::metadata(&path).unwrap().uid();
        let read = cap(&path, owner);
        let foreign = cap(&path, owner + 1);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(foreign.unwrap_err().kind(), ErrorKind::PermissionDenied);
        read
    }

    #[test]
    fn caps_and_refusals() {
        assert_eq!(cap(Path::new("/nonexistent/gdrcopy.conf"), 0).unwrap(), None);
        assert_eq!(with("# no undocumented handles here\nrm = vmm\n", 0o644).unwrap(), Some(RmLevel::Vmm));
        assert_eq!(with("\n", 0o600).unwrap(), None);
        for (text, mode) in [("rm = all", 0o640), ("rn = off", 0o604), ("rm", 0o400), ("rm = off", 0o664)] {
            assert_eq!(with(text, mode).unwrap_err().kind(), ErrorKind::PermissionDenied, "{text}");
        }
    }
}
