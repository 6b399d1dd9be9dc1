//! `gdrcopy_copybw`: how many bytes a second go through BAR1, and through `cuMemcpy`.

fn main() -> std::process::ExitCode {
    gdrcopy::tool::copybw::main(std::env::args_os())
}
