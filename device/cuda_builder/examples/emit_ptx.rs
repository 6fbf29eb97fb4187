//! Writes `OUT/ARCH.ptx` for each architecture, for use as `STEPSCOPE_PTX_DIR` on a machine without
//! a device compiler. Prints each file and the compiler that made it.
//!
//! `cargo run -p stepscope-cuda-builder --example emit_ptx -- CRATE OUT TARGET_DIR ARCH...`
#![forbid(unsafe_code)]

use std::{env, error::Error, fs, path::PathBuf, process::ExitCode};

use cuda_builder::{CudaBuilder, NvvmArch, Search};

fn main() -> ExitCode {
    match run(&env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("emit_ptx: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [kernels, out, target_dir, archs @ ..] = arguments else {
        return Err("usage: emit_ptx CRATE OUT TARGET_DIR ARCH...".into());
    };
    fs::create_dir_all(out).map_err(|error| format!("cannot create {out}: {error}"))?;
    for arch in archs {
        let arch: NvvmArch = arch.parse()?;
        let ptx = CudaBuilder::new(kernels)
            .arch(arch)
            .target_dir(PathBuf::from(target_dir).join(arch.sm()))
            .copy_to(PathBuf::from(out).join(format!("{arch}.ptx")))
            .build()?;
        println!("{}\tby {}", ptx.display(), Search::from_env().find(arch)?.rustc.display());
    }
    Ok(())
}
