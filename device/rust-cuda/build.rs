//! Compiles the kernels with rust-cuda, for the GB10: its LLVM 19 code generator supports no GPU
//! before `compute_100`.

use std::{env, error::Error, path::PathBuf};

use cuda_builder::{CudaBuilder, NvvmArch};

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: cargo runs this")?);
    println!("cargo::rerun-if-changed=../src");
    CudaBuilder::new("kernels")
        .arch(NvvmArch::Compute121)
        // Multiply-adds are fused only where the source says so, and no libdevice function is used:
        // the bits are the emulator's.
        .fma_contraction(false)
        .override_libm(false)
        .copy_to(out.join("sm_121.ptx"))
        .build()
        .map_err(|error| format!("rust-cuda: {error}"))?;
    Ok(())
}
