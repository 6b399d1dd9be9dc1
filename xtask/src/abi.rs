//! The C library's outside: the symbols it defines, its names, what it needs, and whether its headers compile.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::c_programs::{Compiler, stage};
use crate::ci::Verdict;
use crate::install::SONAME;
use crate::run::{Log, capture, command, run};
use crate::workspace::Workspace;

/// The functions of libgdrapi 2.6 that clients use.
const UPSTREAM: [&str; 17] = [
    "gdr_close",
    "gdr_copy_from_mapping",
    "gdr_copy_to_mapping",
    "gdr_driver_get_version",
    "gdr_get_attribute",
    "gdr_get_callback_flag",
    "gdr_get_info",
    "gdr_get_info_v2",
    "gdr_get_mapping_type_string",
    "gdr_map",
    "gdr_map_v2",
    "gdr_open",
    "gdr_pin_buffer",
    "gdr_pin_buffer_v2",
    "gdr_runtime_get_version",
    "gdr_unmap",
    "gdr_unpin_buffer",
];

/// All that a client machine has. `libgcc_s` unwinds; nothing of CUDA is among them.
const NEEDED: [&str; 3] = ["libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"];

/// The names that both libraries define: upstream's, and what the extension header declares.
fn expected(workspace: &Workspace) -> Result<BTreeSet<String>, String> {
    let header = workspace.root.join("ffi/include/gdrapi_ext.h");
    let text = fs::read_to_string(&header).map_err(|error| format!("{}: {error}", header.display()))?;
    let declared = declared(&text, "gdrx_");
    if declared.is_empty() {
        return Err(format!("{} declares no function", header.display()));
    }
    Ok(UPSTREAM.iter().map(|&name| name.to_owned()).chain(declared).collect())
}

/// The functions with this prefix that a header declares.
fn declared(header: &str, prefix: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    // A declaration that goes on in the next line.
    let header = header.replace(",\n            ", ", ");
    let declarations = header.lines().filter(|line| line.ends_with(");") && !line.starts_with([' ', '*', '/']));
    declarations
        .filter_map(|line| line.split_once('('))
        .map(|(before, _)| before.rsplit(|c| !is_name(c)).next().unwrap_or(""))
        .filter(|name| name.starts_with(prefix))
        .map(str::to_owned)
        .collect()
}

/// The names in `nm --format=posix` output.
fn names(nm: &str) -> BTreeSet<String> {
    nm.lines()
        .filter(|line| !line.ends_with(':'))
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect()
}

/// The symbols that a file defines: `--dynamic` or `--extern-only`.
fn defined(log: &mut Log, which: &str, file: &Path) -> Result<BTreeSet<String>, String> {
    let mut nm = command("nm", [which, "--defined-only", "--format=posix"]);
    nm.arg(file);
    Ok(names(&capture(log, nm)?))
}

fn compare(what: &str, found: &BTreeSet<String>, expected: &BTreeSet<String>) -> Result<(), String> {
    let list = |names: Vec<&String>| names.into_iter().take(10).cloned().collect::<Vec<_>>().join(", ");
    let (missing, extra) = (list(expected.difference(found).collect()), list(found.difference(expected).collect()));
    if missing.is_empty() && extra.is_empty() {
        Ok(())
    } else {
        Err(format!("{what}: missing [{missing}], beyond the list [{extra}]"))
    }
}

/// Makes of Rust's archive one object in which only the interface is visible, so that it links beside another Rust
/// library, whose standard library has the same names.
pub(crate) fn localise(log: &mut Log, workspace: &Workspace, from: &Path, to: &Path) -> Result<(), String> {
    let keep = expected(workspace)?;
    let object = to.with_extension("o");
    let listed = |name: &str, lines: String| {
        let path = to.with_extension(name);
        fs::write(&path, lines).map(|()| path.clone()).map_err(|error| format!("{}: {error}", path.display()))
    };
    let roots = listed("roots", keep.iter().map(|name| format!("--undefined={name}\n")).collect())?;
    // Without --gc-sections, which makes weak references to newer functions of the C library local, then strong. Groups
    // would still be told apart by their names, and one library's copy be dropped for the other's.
    let mut link = command("ld", ["-r", "--force-group-allocation", "--strip-debug", "-o"]);
    link.arg(&object).arg(format!("@{}", roots.display())).arg(from);
    run(log, link)?;
    // The standard library comes with its bitcode, which is of no use here and which older binutils choke on.
    let mut strip = command("objcopy", ["--remove-section=.llvmbc", "--remove-section=.llvmcmd"]);
    strip.arg(&object);
    run(log, strip)?;
    let defined = defined(log, "--extern-only", &object)?;
    let hidden = listed("hidden", defined.difference(&keep).map(|name| format!("{name}\n")).collect())?;
    let mut hide = command("objcopy", [format!("--localize-symbols={}", hidden.display())]);
    hide.arg(&object);
    run(log, hide)?;
    let _ = fs::remove_file(to);
    let mut pack = command("ar", ["rcsD"]);
    pack.arg(to).arg(&object);
    run(log, pack)
}

pub(crate) fn check(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    let stage = stage(log, workspace)?;
    let expected = expected(workspace)?;
    let (shared, archive) = (stage.lib().join(SONAME), stage.lib().join("libgdrapi.a"));
    compare("libgdrapi.so", &defined(log, "--dynamic", &shared)?, &expected)?;
    compare("libgdrapi.a", &defined(log, "--extern-only", &archive)?, &expected)?;

    let mut readelf = command("readelf", ["--dynamic", "--wide"]);
    readelf.arg(&shared);
    let dynamic = capture(log, readelf)?;
    let entries = |tag: &str| -> BTreeSet<String> {
        let lines = dynamic.lines().filter(|line| line.contains(tag));
        lines.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned())).collect()
    };
    compare("SONAME", &entries("(SONAME)"), &BTreeSet::from([SONAME.to_owned()]))?;
    let beyond: Vec<_> = entries("(NEEDED)").into_iter().filter(|name| !NEEDED.contains(&name.as_str())).collect();
    if !beyond.is_empty() {
        return Err(format!("libgdrapi.so needs {}", beyond.join(", ")));
    }
    if !dynamic.contains("NODELETE") {
        return Err("libgdrapi.so may be unloaded, with destructors of threads still to run in it".to_owned());
    }
    log.keep(format!("{} symbols, SONAME {SONAME}, nothing needed beyond the C library", expected.len()));
    headers(log, workspace)
}

/// Compiles the headers, each alone, and what asserts their layout, as every language version that clients use.
fn headers(log: &mut Log, workspace: &Workspace) -> Result<Verdict, String> {
    let source = workspace.root.join("ffi/tests/c/layout.c").display().to_string();
    let include = format!("-I{}", workspace.root.join("ffi/include").display());
    let alone = |header| ["-include", header, "-include", header, "/dev/null"];
    let strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wstrict-prototypes", "-fsyntax-only"];
    for compiler in Compiler::all(log)? {
        let mut compile = |language: &str, standard: &str, what: &[&str]| {
            let flags = strict.iter().filter(|flag| language == "c" || **flag != "-Wstrict-prototypes");
            let mut job = command(if language == "c" { compiler.c } else { compiler.cxx }, ["-x", language]);
            job.arg(format!("-std={standard}")).args(flags).arg(&include).args(what);
            run(log, job)
        };
        for (language, standards) in
            [("c", &["c89", "c99", "c11", "c17"][..]), ("c++", &["c++11", "c++17", "c++20"][..])]
        {
            for standard in standards {
                compile(language, standard, &[&source])?;
                compile(language, standard, &alone("gdrapi.h"))?;
                compile(language, standard, &alone("gdrapi_ext.h"))?;
            }
        }
        // As it compiles for a CPU thread in a kernel's place: with POSIX's clock, and vectors.
        for (language, standard) in [("c", "gnu11"), ("c++", "c++11"), ("c++", "c++20")] {
            compile(language, standard, &alone("gdrcopy_channel.cuh"))?;
        }
    }
    Ok(Verdict::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_found_and_comments_are_not() {
        let header = "/* Call gdrx_no(x);\n * gdrx_nor_this(void); */\n#define GDRX_A 1\nint gdrx_a(int x);\n\
                      const char *gdrx_b(void);\nvoid gdr_c(void);\ngdr_t gdrx_open(const char *b);\n    gdrx_inner(y);\n\
                      int gdrx_long(int a,\n              int b);\n";
        assert_eq!(Vec::from_iter(declared(header, "gdrx_")), ["gdrx_a", "gdrx_b", "gdrx_long", "gdrx_open"]);
    }

    #[test]
    fn differences_are_named_both_ways() {
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(compare("so", &set(&["a", "b"]), &set(&["a", "b"])), Ok(()));
        let error = compare("so", &set(&["a", "rust_eh_personality"]), &set(&["a", "b"])).unwrap_err();
        assert_eq!(error, "so: missing [b], beyond the list [rust_eh_personality]");
    }

    #[test]
    fn names_in_nm_output() {
        let nm = "libgdrapi.a[gdrapi.o]:\ngdr_open T 0 0\ngdr_close T 10 20\n";
        assert_eq!(Vec::from_iter(names(nm)), ["gdr_close", "gdr_open"]);
    }
}
