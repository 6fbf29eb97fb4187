//! The build script of `stepscope-core`: `host/core/build.rs` is a symbolic link to this file.
//!
//! Compiles the kernels to PTX for every architecture with feature `cuda`, and writes
//! `OUT_DIR/kernels.rs`, a table that `kernels!` of `host/core/src/device/kernels.rs` includes.
//! Without the feature it does nothing, so neither CUDA nor a device compiler is needed.
//!
//! - `STEPSCOPE_ARCHS=sm_121,sm_90,sm_90a`: the architectures (this is the default). PTX for
//!   `sm_90a` contains only the kernels of warpgroups, which a GPU of compute capability 9.0 loads
//!   next to those of `sm_90`.
//! - `STEPSCOPE_PTX_DIR=DIR`: uses precompiled `DIR/ARCH.ptx` instead of compiling.

fn main() {
    #[cfg(feature = "cuda")]
    if let Err(error) = ptx::build() {
        // Plain text on standard error: a panic would hide the instructions behind a backtrace.
        eprintln!("\n{error}\n");
        std::process::exit(1);
    }
    #[cfg(not(feature = "cuda"))]
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
mod ptx {
    use std::{
        env,
        error::Error,
        fs,
        path::{Path, PathBuf},
        thread,
    };

    use cuda_builder::{CudaBuilder, NvvmArch, write_table};

    const ARCHS: &str = "STEPSCOPE_ARCHS";
    const PTX_DIR: &str = "STEPSCOPE_PTX_DIR";
    /// The variable with the folder of the kernels' package, which its build script sets.
    const KERNELS: &str = "DEP_STEPSCOPE_KERNELS_ROOT";

    pub(super) fn build() -> Result<(), Box<dyn Error>> {
        println!("cargo::rerun-if-changed=build.rs");
        println!("cargo::rerun-if-env-changed={ARCHS}");
        println!("cargo::rerun-if-env-changed={PTX_DIR}");
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: cargo runs this")?);
        // A folder of the repository, or of cargo's registry.
        let kernels = env::var_os(KERNELS).map(PathBuf::from);
        let kernels = kernels.ok_or(format!("{KERNELS} is not set: the build script of stepscope-kernels sets it"))?;
        let made_elsewhere = env::var_os(PTX_DIR).filter(|path| !path.is_empty()).map(PathBuf::from);
        let made = |arch: NvvmArch| match &made_elsewhere {
            Some(folder) => copied(folder, arch, &out),
            None => compiled(&kernels, arch, &out),
        };

        let archs = archs(&env::var(ARCHS).unwrap_or_default())?;
        // In parallel, since one compilation keeps only one core busy.
        let ptx: Result<Vec<(NvvmArch, PathBuf)>, String> = thread::scope(|scope| {
            let threads: Vec<_> =
                archs.iter().map(|&arch| scope.spawn(move || made(arch).map(|ptx| (arch, ptx)))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a compilation panicked")).collect()
        });
        Ok(write_table(&kernels, &ptx?)?)
    }

    /// Returns the requested architectures without duplicates, or the project's own by default.
    fn archs(asked: &str) -> Result<Vec<NvvmArch>, Box<dyn Error>> {
        let mut archs = Vec::new();
        for name in asked.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let arch = name.parse().map_err(|error| format!("{ARCHS}={asked}: {error}"))?;
            if !archs.contains(&arch) {
                archs.push(arch);
            }
        }
        Ok(if archs.is_empty() { vec![NvvmArch::Compute121, NvvmArch::Compute90, NvvmArch::Compute90a] } else { archs })
    }

    fn compiled(kernels: &Path, arch: NvvmArch, out: &Path) -> Result<PathBuf, String> {
        CudaBuilder::new(kernels)
            .arch(arch)
            .fma_contraction(false)
            .target_dir(shared_target(out).join(arch.sm()))
            .copy_to(out.join(format!("{arch}.ptx")))
            .build()
            .map_err(|error| error.to_string())
    }

    fn copied(folder: &Path, arch: NvvmArch, out: &Path) -> Result<PathBuf, String> {
        let from = folder.join(format!("{arch}.ptx"));
        let to = out.join(format!("{arch}.ptx"));
        println!("cargo::rerun-if-changed={}", from.display());
        let ptx = fs::read_to_string(&from).map_err(|error| format!("{PTX_DIR}: {}: {error}", from.display()))?;
        if !ptx.lines().any(|line| line.trim_end() == format!(".target {arch}")) {
            return Err(format!("{PTX_DIR}: {} has no line `.target {arch}`", from.display()));
        }
        if leaves_rounding_open(&ptx) {
            return Err(format!(
                "{PTX_DIR}: {} was compiled with contraction: a multiplication and an addition may become one operation, with \
                 different bits. Compile it with `fma_contraction(false)` (libNVVM's -fma=0), as device/rust-cuda/build.rs does",
                from.display()
            ));
        }
        fs::write(&to, ptx).map_err(|error| format!("{}: {error}", to.display()))?;
        Ok(to)
    }

    /// Returns true if the assembler may fuse: with contraction, neither compiler writes a rounding
    /// mode into additions and multiplications.
    fn leaves_rounding_open(ptx: &str) -> bool {
        ptx.split_whitespace().any(|word| matches!(word, "add.f32" | "sub.f32" | "mul.f32"))
    }

    /// Returns `cuda-builder` in the workspace's target folder, which all profiles share. Cargo's
    /// layout is `target[/TRIPLE]/PROFILE/build/PACKAGE/out`; trybuild's programs build in
    /// `target/tests/trybuild`.
    fn shared_target(out: &Path) -> PathBuf {
        let mut target = out.ancestors().nth(4).unwrap_or(out);
        let triple = env::var_os("TARGET").unwrap_or_default();
        for inner in [Path::new(&triple), Path::new("trybuild"), Path::new("tests")] {
            if target.ends_with(inner) {
                target = target.parent().unwrap_or(target);
            }
        }
        target.join("cuda-builder")
    }
}
