//! Where this runs: container, capabilities.

use crate::tool::doctor::finding::Finding;
use crate::tool::doctor::root::Root;
use crate::tool::doctor::scene::Scene;

const AREA: &str = "container";

pub(super) fn check(root: &Root, scene: &Scene) -> Vec<Finding> {
    let capabilities = root
        .text("/proc/self/status")
        .and_then(|text| text.lines().find_map(|line| line.strip_prefix("CapEff:")).map(|set| set.trim().to_owned()));
    let powers = capabilities.map_or_else(String::new, |set| format!(", effective capabilities {set}"));
    let what = match &scene.container {
        Some(sign) => format!("this is a container ({sign}), uid {}{powers}", scene.user.uid),
        None => format!("no container, uid {}{powers}", scene.user.uid),
    };
    vec![Finding::ok(AREA, what).read("/.dockerenv, /run/.containerenv, /proc/1/cgroup, /proc/self/status")]
}
