//! Compiles the kernels to PTX and writes their table, which `stepscope::kernels!()` reads, if
//! feature `cuda` is enabled.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    ptx()?;
    Ok(())
}

#[cfg(feature = "cuda")]
fn ptx() -> Result<(), Box<dyn std::error::Error>> {
    use cuda_builder::{CudaBuilder, NvvmArch, write_table};
    use std::env;

    println!("cargo::rerun-if-env-changed=STEPSCOPE_ARCHS");
    let archs = env::var("STEPSCOPE_ARCHS").unwrap_or("sm_121,sm_90".into());
    let mut ptx = Vec::new();
    for name in archs.split(',') {
        let arch: NvvmArch = name.trim().parse()?;
        ptx.push((arch, CudaBuilder::new("kernels").arch(arch).fma_contraction(false).build()?));
    }
    Ok(write_table("kernels", &ptx)?)
}
