//! Tells the build script of a package that depends on this one where its sources are (`DEP_STEPSCOPE_KERNELS_ROOT`), wherever cargo put them:
//! stepscope compiles them for the GPU.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR to a path of UTF-8");
    println!("cargo::metadata=root={root}");
}
