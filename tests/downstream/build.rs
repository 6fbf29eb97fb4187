//! With feature `cuda`: compiles the kernels to PTX, and writes `OUT_DIR/ptx.rs`, a table of them by architecture.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    ptx()?;
    Ok(())
}

#[cfg(feature = "cuda")]
fn ptx() -> Result<(), Box<dyn std::error::Error>> {
    use cuda_builder::{CudaBuilder, NvvmArch};
    use std::{env, fs, path::PathBuf};

    println!("cargo::rerun-if-env-changed=STEPSCOPE_ARCHS");
    let archs = env::var("STEPSCOPE_ARCHS").unwrap_or("sm_121,sm_90".into());
    let mut table = String::new();
    for name in archs.split(',') {
        let arch: NvvmArch = name.trim().parse()?;
        let ptx = CudaBuilder::new("kernels").arch(arch).fma_contraction(false).build()?;
        table += &format!("({}, include_str!({:?})), ", arch.capability(), ptx.display().to_string());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: cargo runs this")?);
    fs::write(out.join("ptx.rs"), format!("&[{table}]"))?;
    Ok(())
}
