//! Names the shared library as its clients look for it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgdrapi.so.2");
    // Thread-local destructors and fork handlers outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // A symbol that nobody provides is found here, not in a client that binds lazily.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
}
