//! What `cargo metadata` says about this workspace.

use std::path::PathBuf;

use serde_json::Value;

use crate::run::cargo;

/// The package whose programs and tests are bundled.
pub(crate) const LIBRARY: &str = "gdrcopy";

#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    /// The oldest compiler the library promises to build with.
    pub(crate) rust_version: String,
    /// The library's integration tests by name.
    pub(crate) tests: Vec<String>,
}

impl Workspace {
    pub(crate) fn load() -> Result<Self, String> {
        let args = ["metadata", "--no-deps", "--format-version", "1", "--locked"];
        let output = cargo(args).output().map_err(|error| format!("cargo metadata cannot be started: {error}"))?;
        if !output.status.success() {
            return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim_end()));
        }
        let metadata =
            serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata is not JSON: {error}"))?;
        Self::read(&metadata).ok_or_else(|| "cargo metadata lacks a field that this program reads".to_owned())
    }

    fn read(metadata: &Value) -> Option<Self> {
        let packages = metadata["packages"].as_array()?;
        let library = packages.iter().find(|package| package["name"] == LIBRARY)?;
        let targets = library["targets"].as_array()?;
        Some(Self {
            root: metadata["workspace_root"].as_str()?.into(),
            target: metadata["target_directory"].as_str()?.into(),
            rust_version: library["rust_version"].as_str()?.to_owned(),
            tests: targets
                .iter()
                .filter(|target| target["kind"][0] == "test")
                .filter_map(|target| target["name"].as_str().map(str::to_owned))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_found() {
        let metadata = serde_json::json!({
            "workspace_root": "/src",
            "target_directory": "/src/target",
            "packages": [
                {"name": "xtask", "rust_version": null, "targets": []},
                {"name": "gdrcopy", "rust_version": "1.89", "targets": [
                    {"name": "gdrcopy", "kind": ["lib"]},
                    {"name": "gpu", "kind": ["test"]},
                    {"name": "gdrcopy_copylat", "kind": ["bin"]},
                ]},
            ],
        });
        let workspace = Workspace::read(&metadata).unwrap();
        assert_eq!(workspace.rust_version, "1.89");
        assert_eq!(workspace.tests, ["gpu"]);
        assert!(Workspace::read(&serde_json::json!({"packages": []})).is_none());
    }

    #[test]
    fn this_workspace_can_be_read() {
        let workspace = Workspace::load().unwrap();
        assert!(workspace.root.join("xtask/Cargo.toml").exists());
    }
}
