//! `gdrcopy_doctor`: why gdrcopy does not work here, and the one thing to fix.

fn main() -> std::process::ExitCode {
    gdrcopy::tool::doctor::main(std::env::args_os())
}
