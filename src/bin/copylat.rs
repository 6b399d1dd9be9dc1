//! `gdrcopy_copylat`: how long a copy of each size takes, from one byte up, through BAR1 and through `cuMemcpy`.

fn main() -> std::process::ExitCode {
    gdrcopy::tool::copylat::main(std::env::args_os())
}
