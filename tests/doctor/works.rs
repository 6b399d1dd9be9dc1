//! Machines on which something works: the module's stand-in answers the self-test.

use std::process::Output;

use crate::standin::{self, MODULES, Module};
use crate::tree::{Diagnosis, Tree};

fn over(module: Module, tree: &Tree, fault: Option<&str>) -> Output {
    let mut command = tree.doctor();
    command.env("LD_PRELOAD", standin::library()).env(standin::VERSION, module.version);
    if module.persistent {
        command.env(standin::PERSISTENT, "1");
    }
    if let Some(fault) = fault {
        command.env(standin::FAULT, fault);
    }
    command.args(["--self-test", "--json", "-"]).output().unwrap()
}

#[test]
fn the_self_test_copies_through_every_module_version() {
    for module in MODULES {
        let output = over(module, &Tree::healthy(), None);
        let diagnosis = Diagnosis::of(&output);
        assert_eq!(output.status.code(), Some(0), "{}", diagnosis.text);
        assert_eq!((&diagnosis.json["works"], &diagnosis.json["fix_first"]), (&true.into(), &serde_json::Value::Null));
        let gdrdrv = &diagnosis.json["self_test"][0];
        assert_eq!((&gdrdrv["backend"], &gdrdrv["works"]), (&"gdrdrv".into(), &true.into()));
        assert_eq!(gdrdrv["session"]["module"], module.version);
        assert!(diagnosis.text.contains("Result backend gdrdrv works. Nothing needs fixing."), "{}", diagnosis.text);
        assert!(diagnosis.text.contains("mapped as WC") && diagnosis.text.contains("(medians)"), "{}", diagnosis.text);
    }
}

#[test]
fn what_is_worth_fixing_where_something_works() {
    let tree = Tree::healthy();
    tree.gpu_file("current_link_width", "4");
    let output = over(MODULES[7], &tree, None);
    let diagnosis = Diagnosis::of(&output);
    assert_eq!(output.status.code(), Some(0));
    let line = "backend gdrdrv works. Worth fixing: NVIDIA H200 at 0000:01:00.0 runs on 4 lanes of the 16";
    assert!(diagnosis.text.contains(line), "{}", diagnosis.text);
}

#[test]
fn a_problem_of_another_backend_is_a_warning_there() {
    let tree = Tree::healthy();
    tree.file("etc/gdrcopy.conf", "rm = off\n");
    tree.mode("etc/gdrcopy.conf", 0o644);
    assert_eq!(tree.diagnosis().complaints(), [("problem", "rm")]);
    let output = over(MODULES[7], &tree, None);
    assert_eq!(Diagnosis::of(&output).complaints(), [("warning", "rm")]);
}

#[test]
fn a_self_test_that_fails_is_told_in_the_library_s_words() {
    let output = over(MODULES[7], &Tree::healthy(), Some("pin_v2:12"));
    let diagnosis = Diagnosis::of(&output);
    assert_eq!(output.status.code(), Some(1), "{}", diagnosis.text);
    let reason = diagnosis.json["self_test"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("GPU 0 (stand-in GPU): pin: no room to pin"), "{reason}");
    assert!(diagnosis.text.contains("Result no backend for GPUs works."), "{}", diagnosis.text);
}
