//! Exports the location of this package's sources as `DEP_STEPSCOPE_KERNELS_ROOT`, to the build
//! scripts of packages that depend on it. stepscope compiles the sources for the GPU.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR to a path of UTF-8");
    println!("cargo::metadata=root={root}");
}
