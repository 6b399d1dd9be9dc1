//! `cargo xtask`: build and test commands of this repository.

fn main() {}
