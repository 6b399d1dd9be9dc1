//! `gdrcopy_apiperf`: what pinning, mapping and their opposites cost.

fn main() -> std::process::ExitCode {
    gdrcopy::tool::apiperf::main(std::env::args_os())
}
