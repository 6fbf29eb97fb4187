//! Tells the sources that rust-cuda compiles them: `cfg(rust_cuda)` takes the place of what it cannot express.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(rust_cuda)");
    println!("cargo::rustc-cfg=rust_cuda");
}
