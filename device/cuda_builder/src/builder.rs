//! `CudaBuilder`: runs cargo on the kernel crate, once per architecture, and checks the output.
//!
//! rustc's NVPTX target has no linker of its own. Fat link-time optimization makes the kernel
//! crate, its dependencies and `core` one LLVM module, so the assembly from `--emit=asm` is the
//! whole program. The linker is set to `true`, which does nothing. The errors that a linker would
//! report, unresolved names, are reported here.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    CudaBuilderError, DeviceCompiler, Library, NvvmArch, Search,
    bounds::with_block_threads,
    compiler::{DEVICE_RUSTC, TARGET},
};

/// The functions that the CUDA driver provides to device code.
const DRIVER_FUNCTIONS: [&str; 4] = ["vprintf", "malloc", "free", "__assertfail"];

/// A builder that compiles a kernel crate to one PTX file. The methods are rust-cuda's, except
/// [`CudaBuilder::target_dir`].
#[derive(Clone, Debug)]
pub struct CudaBuilder {
    crate_path: PathBuf,
    arch: NvvmArch,
    release: bool,
    fma_contraction: bool,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    search: Search,
}

impl CudaBuilder {
    /// Returns a builder for the crate in folder `crate_path`: optimized, for
    /// [`NvvmArch::Compute121`].
    pub fn new(crate_path: impl AsRef<Path>) -> Self {
        Self {
            crate_path: crate_path.as_ref().to_owned(),
            arch: NvvmArch::Compute121,
            release: true,
            fma_contraction: false,
            copy_to: None,
            target_dir: None,
            search: Search::from_env(),
        }
    }

    /// Sets the GPU architecture to compile for.
    #[must_use]
    pub fn arch(mut self, arch: NvvmArch) -> Self {
        self.arch = arch;
        self
    }

    /// Sets full optimization, which is the default. If false, the device build uses the dev
    /// profile at level 1.
    #[must_use]
    pub fn release(mut self, release: bool) -> Self {
        self.release = release;
        self
    }

    /// Allows `a * b + c` to become one fused operation. rustc never fuses, so only `false`, the
    /// default here, is supported. rust-cuda's default is `true`.
    #[must_use]
    pub fn fma_contraction(mut self, fma_contraction: bool) -> Self {
        self.fma_contraction = fma_contraction;
        self
    }

    /// Also copies the PTX to this file.
    #[must_use]
    pub fn copy_to(mut self, path: impl AsRef<Path>) -> Self {
        self.copy_to = Some(path.as_ref().to_owned());
        self
    }

    /// Sets the folder for the device build's artifacts, one subfolder per architecture. The
    /// default is `cuda-builder/ARCH` under `OUT_DIR`, or under the crate's `target` outside a
    /// build script.
    ///
    /// It must not be the target folder of the cargo that runs the build script, because that one
    /// is locked.
    #[must_use]
    pub fn target_dir(mut self, path: impl AsRef<Path>) -> Self {
        self.target_dir = Some(path.as_ref().to_owned());
        self
    }

    /// Sets where to search for the device compiler, in place of the environment's settings.
    #[must_use]
    pub fn search(mut self, search: Search) -> Self {
        self.search = search;
        self
    }

    /// Compiles, and returns the path of the PTX file. Waits for cargo to end. cargo's messages go
    /// to standard error. In a build script it also prints when cargo must run the script again.
    ///
    /// # Errors
    /// Fails if the folder has no crate, if there is no device compiler, or on a compile
    /// error. Also fails if the output calls functions that it does not define.
    pub fn build(self) -> Result<PathBuf, CudaBuilderError> {
        if self.fma_contraction {
            return Err(CudaBuilderError::FmaContraction);
        }
        let crate_path = fs::canonicalize(&self.crate_path)
            .ok()
            .filter(|path| path.join("Cargo.toml").is_file())
            .ok_or_else(|| CudaBuilderError::NoCrate { path: self.crate_path.clone() })?;
        let compiler = self.search.find(self.arch)?;
        let target_dir = self.target_dir_or_default(&crate_path);
        let profile_dir = target_dir.join(TARGET).join(if self.release { "release" } else { "debug" });
        let ptx = profile_dir.join(format!("{}.ptx", self.arch));
        if !ptx.is_file() {
            // cargo does not track this file and would consider the crate fresh.
            let _ = fs::remove_dir_all(profile_dir.join(".fingerprint"));
        }
        fs::create_dir_all(&profile_dir).map_err(|source| CudaBuilderError::Io {
            action: "create",
            path: profile_dir.clone(),
            source,
        })?;

        let workspace = workspace_of(&crate_path, &compiler)?;
        let mut command = self.command(&crate_path, &workspace, &compiler, &target_dir, &ptx);
        let status = command.status().map_err(|source| start_error(&command, source))?;
        if !status.success() {
            let (path, arch, command) = (crate_path, self.arch, written(&command));
            return Err(CudaBuilderError::Build { path, arch, status, command });
        }

        let text = fs::read_to_string(&ptx).map_err(|source| CudaBuilderError::Io {
            action: "read",
            path: ptx.clone(),
            source,
        })?;
        let bounded = with_block_threads(&text);
        if bounded != text {
            fs::write(&ptx, &bounded).map_err(|source| CudaBuilderError::Io {
                action: "write",
                path: ptx.clone(),
                source,
            })?;
        }
        let text = bounded;
        check(&text, self.arch).map_err(|reason| CudaBuilderError::BadOutput { path: ptx.clone(), reason })?;
        let records = dep_info(&profile_dir);
        stand_in_for_the_linker(&records, &profile_dir, &text);
        if env::var_os("OUT_DIR").is_some() {
            rerun_if_changed(&crate_path, &records);
        }
        match self.copy_to {
            Some(to) => match fs::copy(&ptx, &to) {
                Ok(_) => Ok(to),
                Err(source) => Err(CudaBuilderError::Io { action: "copy the PTX to", path: to, source }),
            },
            None => Ok(ptx),
        }
    }

    fn target_dir_or_default(&self, crate_path: &Path) -> PathBuf {
        self.target_dir.clone().unwrap_or_else(|| {
            let base = env::var_os("OUT_DIR").map_or_else(|| crate_path.join("target"), PathBuf::from);
            base.join("cuda-builder").join(self.arch.sm())
        })
    }

    /// Returns the cargo command. No variable inherited from an outer cargo affects it.
    fn command(
        &self,
        crate_path: &Path,
        workspace: &Path,
        compiler: &DeviceCompiler,
        target_dir: &Path,
        ptx: &Path,
    ) -> Command {
        let mut command = Command::new(&compiler.cargo);
        command.current_dir(crate_path).stdin(Stdio::null()).stdout(Stdio::null());
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(steers_cargo) {
                command.env_remove(name);
            }
        }

        command.args(["rustc", "--lib", "--crate-type", "cdylib", "--target", TARGET]);
        if self.release {
            command.arg("--release");
        }
        if compiler.library == Library::Source {
            command.arg("-Zbuild-std=core");
        }
        command.arg("--target-dir").arg(target_dir).arg("--");
        command.arg(format!("--emit=asm={}", ptx.display()));
        // At level 0, calls such as memcmp remain, and nothing defines them. A level that the
        // workspace's profile gives this package must not change its PTX, and the last one counts.
        let level = if self.release { "3" } else { "1" };
        command.arg(format!("-Copt-level={level}"));

        // Enables unstable features with any compiler. Both rustc and cargo require it.
        command.env("RUSTC_BOOTSTRAP", "1").env("RUSTC", &compiler.rustc);
        let profile = if self.release { "CARGO_PROFILE_RELEASE" } else { "CARGO_PROFILE_DEV" };
        for (setting, value) in [
            ("LTO", "fat"),
            ("CODEGEN_UNITS", "1"),
            ("OPT_LEVEL", level),
            ("PANIC", "abort"),
            ("DEBUG", "false"),
            ("DEBUG_ASSERTIONS", "false"),
            ("OVERFLOW_CHECKS", "false"),
            ("INCREMENTAL", "false"),
        ] {
            command.env(format!("{profile}_{setting}"), value);
        }

        let mut flags = vec![
            format!("-Ctarget-cpu={}", self.arch),
            "-Clinker=true".to_owned(),
            // PTX for sm_90a contains only kernels of warpgroups: see cuda_std's
            // `warpgroup_kernel`.
            format!("--cfg=cuda_arch=\"{}\"", self.arch),
        ];
        if self.arch.capability() >= 90 {
            // A launch may begin before the previous one has ended; see cuda_std's `grid`.
            flags.push("--cfg=grid_dependency".to_owned());
        }
        // Panic messages name source files, whose absolute folder must not reach the PTX.
        let cargo_home =
            env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| env::home_dir().map(|home| home.join(".cargo")));
        let remapped = [
            (Some(workspace.to_owned()), "/workspace"),
            (cargo_home, "/cargo"),
            (Some(compiler.sysroot.join("lib/rustlib/src/rust")), "/rust"),
        ];
        for (from, to) in remapped {
            if let Some(from) = from {
                flags.push(format!("--remap-path-prefix={}={to}", from.display()));
            }
        }
        command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        command
    }
}

/// Formats a command as one would type it, with the variables that are set for it.
fn written(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        Some(format!("{}={}", name.to_string_lossy(), value?.to_string_lossy().replace('\x1f', "\\x1f")))
    });
    let words =
        std::iter::once(command.get_program()).chain(command.get_args()).map(|word| word.to_string_lossy().into());
    variables.chain(words).collect::<Vec<String>>().join(" ")
}

/// True if an environment variable would change what the inner cargo builds.
fn steers_cargo(name: &str) -> bool {
    matches!(
        name,
        "CARGO_TARGET_DIR" | "CARGO_ENCODED_RUSTFLAGS" | "CARGO_INCREMENTAL" | "CARGO_MAKEFLAGS" | "RUSTFLAGS"
    ) || name.starts_with("RUSTC")
        || name.starts_with("RUSTUP_TOOLCHAIN")
        || name.starts_with("CARGO_BUILD_")
        || name.starts_with("CARGO_PROFILE_")
        || name.starts_with("CARGO_UNSTABLE_")
        || name.starts_with("CARGO_TARGET_NVPTX64_")
        // The outer package's metadata, which `env!` would read.
        || name.starts_with("CARGO_PKG_")
        || name.starts_with("CARGO_MANIFEST_")
        || name.starts_with("CARGO_CFG_")
        || name.starts_with("CARGO_FEATURE_")
        || name.starts_with("CLIPPY_")
}

/// Returns the root of the workspace that the crate belongs to.
fn workspace_of(crate_path: &Path, compiler: &DeviceCompiler) -> Result<PathBuf, CudaBuilderError> {
    let mut command = Command::new(&compiler.cargo);
    command
        .current_dir(crate_path)
        .env("RUSTC", &compiler.rustc)
        .env_remove("RUSTUP_TOOLCHAIN")
        .args(["locate-project", "--workspace", "--message-format", "plain"])
        .stderr(Stdio::inherit());
    let output = command.output().map_err(|source| start_error(&command, source))?;
    let manifest = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    // If cargo fails here, the build that follows fails too and reports the reasons.
    Ok(manifest.parent().filter(|_| output.status.success()).unwrap_or(crate_path).to_owned())
}

pub(crate) fn start_error(command: &Command, source: std::io::Error) -> CudaBuilderError {
    CudaBuilderError::Start { program: command.get_program().to_string_lossy().into_owned(), source }
}

/// Rejects assembly that a driver could not load: another architecture, or calls to undefined
/// functions.
fn check(ptx: &str, arch: NvvmArch) -> Result<(), String> {
    let target = ptx.lines().find_map(|line| line.strip_prefix(".target ")).map(str::trim);
    if target.and_then(|target| target.split(',').next()) != Some(arch.sm()) {
        return Err(format!("expected `.target {arch}`, got {}", target.unwrap_or("none")));
    }
    // `.extern .func (.param .b64 result) name` or `.extern .func name`, with parameters on the
    // lines that follow.
    let mut unresolved: Vec<&str> = ptx
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix(".extern .func"))
        .map(|rest| rest.trim_start())
        .map(|rest| rest.strip_prefix('(').and_then(|r| r.split_once(')')).map_or(rest, |(_, name)| name))
        .map(|name| name.trim().trim_end_matches('(').trim())
        .filter(|name| !DRIVER_FUNCTIONS.contains(name))
        .collect();
    unresolved.dedup();
    if unresolved.is_empty() {
        Ok(())
    } else {
        Err(format!("it calls functions that no crate defines: {}", unresolved.join(", ")))
    }
}

/// Reads the `.d` files that the inner cargo writes next to its artifacts: `artifact: source source
/// ...`.
fn dep_info(profile_dir: &Path) -> Vec<String> {
    fs::read_dir(profile_dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "d"))
        .filter_map(|path| fs::read_to_string(path).ok())
        .collect()
}

/// Writes the file that a linker would have written. Without it, cargo would compile again every
/// time. It is written every time, because cargo considers an artifact that is older than its
/// sources stale. A failure only costs time.
fn stand_in_for_the_linker(records: &[String], profile_dir: &Path, ptx: &str) {
    for artifact in records.iter().filter_map(|record| Path::new(record.split_once(": ")?.0).file_name()) {
        let _ = fs::write(profile_dir.join("deps").join(artifact), ptx);
    }
}

/// Reports to the outer cargo the files that the PTX was made from, as the inner cargo recorded
/// them.
fn rerun_if_changed(crate_path: &Path, records: &[String]) {
    println!("cargo::rerun-if-env-changed={DEVICE_RUSTC}");
    println!("cargo::rerun-if-changed={}", crate_path.join("Cargo.toml").display());
    if records.is_empty() {
        println!("cargo::rerun-if-changed={}", crate_path.join("src").display());
    }
    for source in records.iter().flat_map(|record| sources(record)) {
        println!("cargo::rerun-if-changed={}", source.display());
    }
}

/// Returns the files after the colon of a `.d` file. A space within a name is written `\ `.
fn sources(dep_info: &str) -> Vec<PathBuf> {
    dep_info
        .lines()
        .filter_map(|line| line.split_once(": "))
        .flat_map(|(_, files)| {
            files.replace("\\ ", "\0").split(' ').map(|file| PathBuf::from(file.replace('\0', " "))).collect::<Vec<_>>()
        })
        .filter(|file| !file.as_os_str().is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiler(library: Library) -> DeviceCompiler {
        DeviceCompiler {
            rustc: PathBuf::from("/opt/rust/bin/rustc"),
            cargo: PathBuf::from("/opt/rust/bin/cargo"),
            sysroot: PathBuf::from("/opt/rust"),
            library,
        }
    }

    fn command(builder: &CudaBuilder, library: Library) -> Command {
        let [crate_path, workspace, target] = ["/src/app/device", "/src/app", "/t"].map(Path::new);
        builder.command(crate_path, workspace, &compiler(library), target, Path::new("/t/sm_121.ptx"))
    }

    fn arguments(command: &Command) -> String {
        command.get_args().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    fn variable(command: &Command, name: &str) -> Option<String> {
        let (_, value) = command.get_envs().find(|(key, _)| *key == name)?;
        value.map(|value| value.to_string_lossy().into_owned())
    }

    #[test]
    fn the_call_follows_the_recipe() {
        let command = command(&CudaBuilder::new("device"), Library::Source);
        assert_eq!(command.get_program(), "/opt/rust/bin/cargo");
        assert_eq!(
            arguments(&command),
            "rustc --lib --crate-type cdylib --target nvptx64-nvidia-cuda --release -Zbuild-std=core \
             --target-dir /t -- --emit=asm=/t/sm_121.ptx -Copt-level=3"
        );
        assert_eq!(variable(&command, "RUSTC").as_deref(), Some("/opt/rust/bin/rustc"));
        assert_eq!(variable(&command, "RUSTC_BOOTSTRAP").as_deref(), Some("1"));
        assert_eq!(variable(&command, "CARGO_PROFILE_RELEASE_LTO").as_deref(), Some("fat"));
        let flags = variable(&command, "CARGO_ENCODED_RUSTFLAGS").unwrap();
        let flags: Vec<&str> = flags.split('\x1f').collect();
        let of_arch = ["-Ctarget-cpu=sm_121", "-Clinker=true", "--cfg=cuda_arch=\"sm_121\"", "--cfg=grid_dependency"];
        assert_eq!(flags[..4], of_arch);
        assert_eq!(flags[4], "--remap-path-prefix=/src/app=/workspace");
    }

    #[test]
    fn old_gpus_have_no_grid_dependency() {
        let command = command(&CudaBuilder::new("device").arch(NvvmArch::Compute89), Library::Source);
        assert!(!variable(&command, "CARGO_ENCODED_RUSTFLAGS").unwrap().contains("grid_dependency"));
    }

    #[test]
    fn precompiled_libraries_are_reused() {
        let command = command(&CudaBuilder::new("device"), Library::Precompiled);
        assert!(!arguments(&command).contains("build-std"));
    }

    #[test]
    fn unoptimised_builds_use_the_dev_profile() {
        let command = command(&CudaBuilder::new("device").release(false), Library::Source);
        assert!(!arguments(&command).contains("--release"));
        assert_eq!(variable(&command, "CARGO_PROFILE_DEV_LTO").as_deref(), Some("fat"));
    }

    #[test]
    fn outer_build_variables_are_removed() {
        for name in [
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "CARGO_BUILD_TARGET",
            "CARGO_BUILD_RUSTFLAGS",
            "CARGO_PROFILE_RELEASE_DEBUG",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTC_LINKER",
            "RUSTUP_TOOLCHAIN",
            "CLIPPY_ARGS",
        ] {
            assert!(steers_cargo(name), "{name}");
        }
        for name in ["CARGO_HOME", "CARGO", "CARGO_NET_OFFLINE", "CARGO_HTTP_CAINFO", "PATH", "HOME"] {
            assert!(!steers_cargo(name), "{name}");
        }
    }

    #[test]
    fn contraction_is_refused() {
        let error = CudaBuilder::new(".").fma_contraction(true).build().unwrap_err();
        assert!(matches!(error, CudaBuilderError::FmaContraction));
    }

    #[test]
    fn folders_without_a_crate_are_refused() {
        let error = CudaBuilder::new("/nowhere/device").build().unwrap_err();
        assert!(error.to_string().contains("/nowhere/device"), "{error}");
    }

    #[test]
    fn wrong_ptx_is_refused() {
        let whole = ".version 8.8\n.target sm_121\n.extern .func (.param .b32 r) vprintf\n(\n)\n";
        assert_eq!(check(whole, NvvmArch::Compute121), Ok(()));
        assert!(check(whole, NvvmArch::Compute90).unwrap_err().contains("sm_90"));
        assert!(check("", NvvmArch::Compute90).unwrap_err().contains("none"));
        let broken = format!("{whole}.extern .func (.param .b32 func_retval0) expf\n(\n.extern .func abort\n");
        let reason = check(&broken, NvvmArch::Compute121).unwrap_err();
        assert!(reason.ends_with("expf, abort"), "{reason}");
    }

    #[test]
    fn source_names_may_contain_spaces() {
        let found = sources("/t/tiny.ptx: /a/src/lib.rs /a/my\\ file.rs\n\n/a/src/lib.rs:\n");
        assert_eq!(found, [PathBuf::from("/a/src/lib.rs"), PathBuf::from("/a/my file.rs")]);
    }
}
