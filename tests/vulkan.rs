//! Backend `vulkan` where something that it needs is missing: each names what, and the way out.
//!
//! The environment belongs to a whole process, so each case is one of its own: this program again, running
//! [`in_a_process_of_its_own`] alone.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use gdrcopy::{BackendKind, Session};

const ASK: &str = "GDRCOPY_TEST_ASK";
const ANSWER: &str = "answer: ";

/// One case, if this process was started for one.
#[test]
fn in_a_process_of_its_own() {
    if env::var_os(ASK).is_none() {
        return;
    }
    // `GDRCOPY_BACKEND` may ask for it as well.
    let builder = match env::var("GDRCOPY_BACKEND") {
        Ok(_) => Session::builder(),
        Err(_) => Session::builder().ignore_env().backend(BackendKind::Vulkan),
    };
    let answer = match builder.open() {
        Ok(session) => format!("opened {}", session.backend()),
        Err(error) => format!("failed {:?} {error}", error.kind()),
    };
    println!("{ANSWER}{}", answer.replace('\n', "\\n"));
}

/// What opening the backend comes to in a fresh process with these variables.
fn answer(vars: &[(&str, &str)]) -> String {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", "in_a_process_of_its_own", "--nocapture"]).env(ASK, "open");
    for name in ["GDRCOPY_BACKEND", "VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES"] {
        command.env_remove(name);
    }
    let output = command.envs(vars.iter().copied()).output().expect("a process");
    let text = String::from_utf8(output.stdout).expect("text");
    let start = text.find(ANSWER).unwrap_or_else(|| panic!("no answer with {vars:?}: {text}"));
    let answer = text[start + ANSWER.len()..].lines().next().expect("a line").to_owned();
    assert!(!answer.contains("\\n"), "more than one line: {answer}");
    answer
}

/// A folder that hides the system's loader: it has a file of its name that is no library.
#[derive(Debug)]
struct Hidden(PathBuf);

impl Hidden {
    fn new(case: &str) -> Self {
        let folder = env::temp_dir().join(format!("gdrcopy-no-vulkan-{}-{case}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("libvulkan.so.1"), "").expect("a file");
        Self(folder)
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(feature = "vulkan")]
mod built_in {
    use super::*;

    #[test]
    fn without_a_loader_it_says_which_package_has_it() {
        let hidden = Hidden::new("loader");
        let path = hidden.0.to_str().expect("text");
        for vars in [&[("LD_LIBRARY_PATH", path)][..], &[("LD_LIBRARY_PATH", path), ("GDRCOPY_BACKEND", "vulkan")]] {
            let found = answer(vars);
            assert!(found.starts_with("failed NoDriver open: libvulkan.so.1 cannot be loaded: "), "{found}");
            assert!(found.contains("file too short"), "the system's word: {found}");
            assert!(found.ends_with("; install the Vulkan loader (Debian: libvulkan1)"), "{found}");
        }
    }

    #[test]
    fn without_a_driver_it_says_how_to_bring_one() {
        let found = answer(&[("VK_DRIVER_FILES", "/nonexistent"), ("VK_ICD_FILENAMES", "/nonexistent")]);
        if found.contains("libvulkan.so.1 cannot be loaded") {
            eprintln!("SKIPPED vulkan, no driver: {found}");
            return;
        }
        assert!(found.starts_with("failed NoDriver open: the Vulkan loader finds no driver (ICD)"), "{found}");
        assert!(found.contains("NVIDIA_DRIVER_CAPABILITIES=all") && found.contains("VK_DRIVER_FILES"), "{found}");
    }

    /// A device that Vulkan shows is not enough: the memory is CUDA's.
    #[test]
    fn with_a_driver_only_cuda_can_be_missing() {
        let found = answer(&[]);
        if found.contains("libvulkan.so.1") || found.contains("no driver (ICD)") {
            eprintln!("SKIPPED vulkan, no CUDA: {found}");
            return;
        }
        assert!(
            found == "opened vulkan" || found.starts_with("failed NoDriver open: libcuda.so.1 cannot be loaded"),
            "{found}"
        );
    }

    #[test]
    fn probing_names_it_last_and_mends_rm() {
        let hidden = Hidden::new("probing");
        let path = hidden.0.to_str().expect("text");
        let found = answer(&[("LD_LIBRARY_PATH", path), ("GDRCOPY_BACKEND", "")]);
        if found.starts_with("opened") {
            assert!(!found.contains("vulkan"), "{found}");
            return;
        }
        let (rm, vulkan) = (found.find("; rm: ").expect("rm"), found.find("; vulkan: ").expect("vulkan"));
        assert!(rm < vulkan, "{found}");
        assert!(!found.contains("install the Vulkan loader"), "the remedy is rm's: {found}");
    }
}

#[cfg(not(feature = "vulkan"))]
#[test]
fn what_is_not_built_in_says_how_to_build_it() {
    let hidden = Hidden::new("not-built");
    let path = hidden.0.to_str().expect("text");
    let found = answer(&[("LD_LIBRARY_PATH", path)]);
    assert!(found.starts_with("failed UnsupportedFeature(Operation) open: built without backend 'vulkan'"), "{found}");
    assert!(found.ends_with("; build gdrcopy with feature 'vulkan'"), "{found}");
    let found = answer(&[("GDRCOPY_BACKEND", "")]);
    assert!(!found.contains("vulkan"), "probing does not speak of it: {found}");
}
