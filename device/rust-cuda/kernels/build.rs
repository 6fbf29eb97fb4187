//! Sets `cfg(rust_cuda)`, by which the sources replace what rust-cuda cannot express.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(rust_cuda)");
    // Set by stepscope's own builder only, so kernels of warpgroups are left out.
    println!("cargo::rustc-check-cfg=cfg(cuda_arch, values(any()))");
    println!("cargo::rustc-cfg=rust_cuda");
}
