//! `gdrcopy_pplat`: how long a message to a running kernel and its answer take, with the GPU polling its own memory, written
//! through BAR1, and polling host memory.

fn main() -> std::process::ExitCode {
    gdrcopy::tool::pplat::main(std::env::args_os())
}
