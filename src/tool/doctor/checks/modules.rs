//! Kernel modules: which are built, and what keeps them from being loaded.

use crate::tool::doctor::root::Root;
use crate::tool::doctor::scene::Scene;

/// What a signed module ends with.
const SIGNED: &[u8] = b"~Module signature appended~\n";
const SECURE_BOOT: &str = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Where a module was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Built {
    /// For the running kernel, with its path.
    Here(String),
    /// For another one.
    Elsewhere(String),
    Nowhere,
}

/// Looks a module up in the dependency lists that depmod writes.
pub(super) fn built(root: &Root, scene: &Scene, name: &str) -> Built {
    let listed = |release: &str| {
        let list = root.text(format!("/lib/modules/{release}/modules.dep")).unwrap_or_default();
        let is_it = |path: &&str| {
            let file = path.rsplit('/').next().unwrap_or_default();
            file.strip_prefix(name).is_some_and(|rest| rest == ".ko" || rest.starts_with(".ko."))
        };
        let found = list.lines().filter_map(|line| line.split(':').next()).find(is_it)?;
        Some(format!("/lib/modules/{release}/{found}"))
    };
    if let Some(path) = listed(&scene.kernel) {
        return Built::Here(path);
    }
    let others = root.names("/lib/modules").into_iter().filter(|release| *release != scene.kernel);
    others.into_iter().find(|release| listed(release).is_some()).map_or(Built::Nowhere, Built::Elsewhere)
}

/// Why the kernel takes no module, or not this one.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) because: String,
    pub(super) remedy: String,
    pub(super) evidence: String,
}

/// What is known to keep the module at `path` out of the kernel.
pub(super) fn refusal(root: &Root, path: &str) -> Option<Refusal> {
    if root.line("/proc/sys/kernel/modules_disabled").as_deref() == Some("1") {
        return Some(Refusal {
            because: "this kernel takes no modules any more until it is booted again".to_owned(),
            remedy: "use backend rm, which needs no module; or load the module at boot, before modules_disabled is set"
                .to_owned(),
            evidence: "/proc/sys/kernel/modules_disabled is 1".to_owned(),
        });
    }
    let lockdown = root.line("/sys/kernel/security/lockdown").filter(|line| !line.contains("[none]"));
    let enforced = root.line("/sys/module/module/parameters/sig_enforce").as_deref() == Some("Y");
    let secure_boot = root.bytes(SECURE_BOOT).is_some_and(|bytes| bytes.last() == Some(&1));
    let evidence = match (&lockdown, enforced) {
        (Some(line), _) => format!("/sys/kernel/security/lockdown is {line}"),
        (None, true) => "/sys/module/module/parameters/sig_enforce is Y".to_owned(),
        (None, false) => return None,
    };
    let boot = if secure_boot { "Secure Boot is on" } else { "the kernel is locked down" };
    let enrol = "enrol DKMS's key: mokutil --import /var/lib/dkms/mok.pub, reboot, confirm, then dkms install --force";
    // A compressed module hides its signature from us.
    let signed = root.bytes(path).filter(|_| path.ends_with(".ko")).map(|bytes| bytes.ends_with(SIGNED));
    let because = match signed {
        Some(false) => format!("{boot}, and the module is not signed"),
        Some(true) => format!("{boot}, and the module is signed with a key that this machine may not know"),
        None => format!("{boot}, so that the module must be signed with a key that this machine knows"),
    };
    Some(Refusal { because, remedy: enrol.to_owned(), evidence })
}
