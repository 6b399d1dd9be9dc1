//! `gdrcopy_sanity`: whether GPU memory can be pinned, mapped, written and read here, test by test.

fn main() -> std::process::ExitCode {
    gdrcopy::tool::sanity::main(std::env::args_os())
}
