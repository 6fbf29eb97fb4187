//! Sets `cfg(rust_cuda)`, by which the sources replace what rust-cuda cannot express.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(rust_cuda)");
    println!("cargo::rustc-cfg=rust_cuda");
}
