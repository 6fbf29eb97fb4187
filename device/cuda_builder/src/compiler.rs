//! The search for the device compiler: a rustc that can build for NVPTX on this machine.
//!
//! The order is fixed: `STEPSCOPE_DEVICE_RUSTC`, then rustup's toolchains, then the system's rustc.
//! A compiler that the variable names is used, or the search fails.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{CudaBuilderError, NvvmArch};

/// The environment variable that names the device compiler.
pub(crate) const DEVICE_RUSTC: &str = "STEPSCOPE_DEVICE_RUSTC";

/// rustc's name for NVIDIA GPUs.
pub(crate) const TARGET: &str = "nvptx64-nvidia-cuda";

/// The source of a device compiler's `core`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// The source code of `core`, compiled for the requested architecture.
    Source,
    /// The precompiled target, if the source is not installed.
    Precompiled,
}

/// A compiler that can build kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCompiler {
    /// The `rustc` itself, never a rustup proxy.
    pub rustc: PathBuf,
    /// The `cargo` that drives it.
    pub cargo: PathBuf,
    /// The compiler's root, as `rustc --print sysroot` prints it.
    pub sysroot: PathBuf,
    /// The source of its `core`.
    pub library: Library,
}

/// The places in which to search for a device compiler.
#[derive(Clone, Debug)]
pub struct Search {
    /// The compiler that the user named. If set, no other is used.
    pub named: Option<PathBuf>,
    /// The `rustup` command. A bare name is looked up in `PATH`.
    pub rustup: PathBuf,
    /// The system's compilers, best first.
    pub system: Vec<PathBuf>,
    /// The `cargo` for compilers without their own.
    pub cargo: PathBuf,
}

impl Search {
    /// Returns the search that this process's environment defines: `STEPSCOPE_DEVICE_RUSTC`,
    /// `PATH`, `CARGO`.
    pub fn from_env() -> Self {
        let on_path = env::var_os("PATH").unwrap_or_default();
        let mut system: Vec<PathBuf> =
            env::split_paths(&on_path).map(|folder| folder.join("rustc")).filter(|rustc| rustc.is_file()).collect();
        system.push(PathBuf::from("/usr/bin/rustc"));
        let mut seen = Vec::new();
        // rustup's proxies refer to toolchains that are already in the list.
        system.retain(|rustc| {
            let first = !seen.contains(rustc);
            seen.push(rustc.clone());
            first && !is_rustup_proxy(rustc)
        });
        Self {
            named: env::var_os(DEVICE_RUSTC).filter(|path| !path.is_empty()).map(PathBuf::from),
            rustup: PathBuf::from("rustup"),
            system,
            cargo: env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")).into(),
        }
    }

    /// Returns the first compiler, in the order of this module, that can build for `arch`.
    ///
    /// # Errors
    /// Returns [`CudaBuilderError::NoDeviceCompiler`] with every place that was searched and what
    /// it lacked.
    pub fn find(&self, arch: NvvmArch) -> Result<DeviceCompiler, CudaBuilderError> {
        let mut tried = Vec::new();
        match &self.named {
            Some(rustc) => match self.probe(rustc, arch) {
                Ok(found) => return Ok(found),
                Err(lack) => {
                    tried.push(format!("{DEVICE_RUSTC}={}: {lack}; nothing else was tried", rustc.display()));
                    return Err(CudaBuilderError::NoDeviceCompiler { arch, tried });
                }
            },
            None => tried.push(format!("{DEVICE_RUSTC}: not set")),
        }

        let mut precompiled = None;
        for (toolchain, rustc) in self.rustup_toolchains(&mut tried) {
            match self.probe(&rustc, arch) {
                // Source first: a precompiled `core` was built for the oldest GPU.
                Ok(found) if found.library == Library::Source => return Ok(found),
                Ok(found) => precompiled = precompiled.or(Some(found)),
                Err(lack) => tried.push(format!("rustup toolchain {toolchain}: {lack}")),
            }
        }
        if let Some(found) = precompiled {
            return Ok(found);
        }

        for rustc in &self.system {
            match self.probe(rustc, arch) {
                Ok(found) => return Ok(found),
                Err(lack) => tried.push(format!("{}: {lack}", rustc.display())),
            }
        }
        Err(CudaBuilderError::NoDeviceCompiler { arch, tried })
    }

    /// Returns rustup's toolchains with their compilers, the active one first.
    fn rustup_toolchains(&self, tried: &mut Vec<String>) -> Vec<(String, PathBuf)> {
        let listed = match output(clean(&self.rustup).args(["toolchain", "list"])) {
            Ok(listed) => listed,
            Err(lack) => {
                tried.push(format!("rustup: {lack}"));
                return Vec::new();
            }
        };
        let mut names: Vec<(bool, &str)> = listed
            .lines()
            .filter_map(|line| Some((line.contains("active"), line.split_whitespace().next()?)))
            .filter(|(_, name)| *name != "no")
            .collect();
        names.sort_by_key(|(active, _)| !active);
        if names.is_empty() {
            tried.push("rustup: no toolchain is installed".to_owned());
        }
        let mut found = Vec::new();
        for (_, name) in names {
            match output(clean(&self.rustup).args(["which", "--toolchain", name, "rustc"])) {
                Ok(rustc) => found.push((name.to_owned(), PathBuf::from(rustc.trim()))),
                Err(lack) => tried.push(format!("rustup toolchain {name}: {lack}")),
            }
        }
        found
    }

    /// Checks if a compiler can build for `arch`. The error names the parts that the compiler
    /// lacks.
    fn probe(&self, rustc: &Path, arch: NvvmArch) -> Result<DeviceCompiler, String> {
        let sysroot = PathBuf::from(output(clean(rustc).args(["--print", "sysroot"]))?.trim());
        let rustlib = sysroot.join("lib/rustlib");
        // cargo's -Zbuild-std requires this file.
        let library = if rustlib.join("src/rust/library/Cargo.lock").is_file() {
            Library::Source
        } else if rustlib.join(TARGET).join("lib").is_dir() {
            Library::Precompiled
        } else {
            return Err(format!(
                "has neither lib/rustlib/src/rust/library nor lib/rustlib/{TARGET} under {}",
                sysroot.display()
            ));
        };
        let cpus = output(clean(rustc).args(["--print", "target-cpus", "--target", TARGET]))?;
        if !cpus.split_whitespace().any(|cpu| cpu == arch.sm()) {
            return Err(format!("its LLVM does not know {arch}; a newer compiler is needed"));
        }
        // A rustup toolchain has its own matching cargo. The system's cargo may be years older than
        // its rustc.
        let own = sysroot.join("bin/cargo");
        let cargo = if sysroot != Path::new("/usr") && own.is_file() { own } else { self.cargo.clone() };
        Ok(DeviceCompiler { rustc: rustc.to_owned(), cargo, sysroot, library })
    }
}

/// Returns a command without the toolchain choice that was made for the outer build.
fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// Returns the standard output of a command that must succeed. The error is one line for the list
/// of what was tried.
fn output(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let result = command.output().map_err(|error| format!("cannot run {program}: {error}"))?;
    if result.status.success() {
        return Ok(String::from_utf8_lossy(&result.stdout).into_owned());
    }
    let messages = String::from_utf8_lossy(&result.stderr);
    let first = messages.lines().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    Err(format!("{program} failed ({}): {first}", result.status))
}

/// True for a rustup proxy. rustup installs one executable under many names, and its `rustc` is a
/// link to (or a copy next to) `rustup`.
fn is_rustup_proxy(rustc: &Path) -> bool {
    rustc.with_file_name("rustup").exists()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        sync::{Mutex, MutexGuard, PoisonError},
    };

    use super::*;

    /// A lock that runs one test at a time: a process started by one would hold another's script
    /// open for writing ("text file busy").
    static ALONE: Mutex<()> = Mutex::new(());

    /// A folder of fake compilers, removed at the end.
    struct Fakes(PathBuf, #[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

    impl Fakes {
        fn new(name: &str) -> Self {
            let folder = env::temp_dir().join(format!("cuda-builder-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).unwrap();
            Self(folder, ALONE.lock().unwrap_or_else(PoisonError::into_inner))
        }

        fn script(&self, path: &str, body: &str) -> PathBuf {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        }

        /// Creates a compiler in `name/bin`, with or without what it needs.
        fn rustc(&self, name: &str, source: bool, target: bool, cpus: &str) -> PathBuf {
            let root = self.0.join(name);
            let rustlib = root.join("lib/rustlib");
            if source {
                fs::create_dir_all(rustlib.join("src/rust/library")).unwrap();
                fs::write(rustlib.join("src/rust/library/Cargo.lock"), "").unwrap();
            }
            if target {
                fs::create_dir_all(rustlib.join(TARGET).join("lib")).unwrap();
            }
            let body = format!("case $2 in sysroot) echo {};; target-cpus) echo '{cpus}';; esac", root.display());
            self.script(&format!("{name}/bin/rustc"), &body)
        }

        /// Creates a rustup with these toolchains, each a fake compiler of that name.
        fn rustup(&self, toolchains: &[&str]) -> PathBuf {
            let list = toolchains.join("\n");
            let body =
                format!("case $1 in toolchain) echo '{list}';; which) echo {}/$3/bin/rustc;; esac", self.0.display());
            self.script("rustup", &body)
        }

        fn search(&self) -> Search {
            Search {
                named: None,
                rustup: self.0.join("rustup"),
                system: vec![self.0.join("system/bin/rustc")],
                cargo: PathBuf::from("outer-cargo"),
            }
        }
    }

    impl Drop for Fakes {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const CPUS: &str = "sm_90 sm_120 sm_121";

    #[test]
    fn the_named_compiler_comes_first() {
        let fakes = Fakes::new("named");
        let named = fakes.rustc("named", true, false, CPUS);
        fakes.rustc("stable", true, false, CPUS);
        fakes.rustc("system", true, false, CPUS);
        let mut search = fakes.search();
        search.rustup = fakes.rustup(&["stable"]);
        search.named = Some(named.clone());
        assert_eq!(search.find(NvvmArch::Compute121).unwrap().rustc, named);
    }

    /// A compiler named by the variable must work, even if another could build the kernels.
    #[test]
    fn unusable_named_compilers_are_refused() {
        let fakes = Fakes::new("named-bad");
        fakes.rustc("system", true, false, CPUS);
        let mut search = fakes.search();
        search.named = Some(fakes.rustc("named", false, false, CPUS));
        let message = search.find(NvvmArch::Compute121).unwrap_err().to_string();
        assert!(message.contains("STEPSCOPE_DEVICE_RUSTC=") && message.contains("neither"), "{message}");
    }

    /// Toolchains of rustup precede the system's compiler, the active one first.
    #[test]
    fn compilers_are_tried_in_order() {
        let fakes = Fakes::new("rustup");
        fakes.rustc("other", true, false, CPUS);
        let active = fakes.rustc("chosen", true, false, CPUS);
        fakes.rustc("system", true, false, CPUS);
        fakes.rustup(&["other", "chosen (active, default)"]);
        let found = fakes.search().find(NvvmArch::Compute121).unwrap();
        assert_eq!((found.rustc, found.library), (active, Library::Source));
    }

    /// The source of `core` precedes a precompiled target, which precedes the system's compiler.
    #[test]
    fn core_source_is_preferred() {
        let fakes = Fakes::new("library");
        let precompiled = fakes.rustc("target", false, true, CPUS);
        let source = fakes.rustc("source", true, false, CPUS);
        fakes.rustc("system", true, false, CPUS);
        fakes.rustup(&["target (active)", "source"]);
        assert_eq!(fakes.search().find(NvvmArch::Compute121).unwrap().rustc, source);
        fakes.rustup(&["target (active)"]);
        let found = fakes.search().find(NvvmArch::Compute121).unwrap();
        assert_eq!((found.rustc, found.library), (precompiled, Library::Precompiled));
    }

    #[test]
    fn old_toolchains_are_skipped() {
        let fakes = Fakes::new("old");
        fakes.rustc("old", true, false, "sm_80 sm_90");
        let system = fakes.rustc("system", true, false, CPUS);
        fakes.rustup(&["old (active)"]);
        assert_eq!(fakes.search().find(NvvmArch::Compute121).unwrap().rustc, system);
        let found = fakes.search().find(NvvmArch::Compute90).unwrap();
        assert!(found.rustc.ends_with("old/bin/rustc"), "{found:?}");
    }

    #[test]
    fn a_toolchain_brings_its_own_cargo() {
        let fakes = Fakes::new("cargo");
        fakes.rustc("own", true, false, CPUS);
        let own = fakes.script("own/bin/cargo", "");
        fakes.rustup(&["own"]);
        assert_eq!(fakes.search().find(NvvmArch::Compute121).unwrap().cargo, own);
        fs::remove_file(own).unwrap();
        assert_eq!(fakes.search().find(NvvmArch::Compute121).unwrap().cargo, Path::new("outer-cargo"));
    }

    /// The error lists what was tried and what to install.
    #[test]
    fn missing_compilers_are_explained() {
        let fakes = Fakes::new("nothing");
        fakes.rustc("stable", false, false, CPUS);
        fakes.rustup(&["stable (active)"]);
        let message = fakes.search().find(NvvmArch::Compute121).unwrap_err().to_string();
        for part in [
            "STEPSCOPE_DEVICE_RUSTC: not set",
            "rustup toolchain stable: has neither",
            "system/bin/rustc: cannot run",
            "apt-get install rustc-web rust-web-src",
            "rustup component add rust-src --toolchain nightly",
            "STEPSCOPE_PTX_DIR",
        ] {
            assert!(message.contains(part), "`{part}` is not in:\n{message}");
        }
    }

    #[test]
    fn missing_rustup_is_tolerated() {
        let fakes = Fakes::new("no-rustup");
        let mut search = fakes.search();
        let message = search.find(NvvmArch::Compute121).unwrap_err().to_string();
        assert!(message.contains("rustup: cannot run"), "{message}");
        search.system.push(fakes.rustc("second", true, false, CPUS));
        assert!(search.find(NvvmArch::Compute121).unwrap().rustc.ends_with("second/bin/rustc"));
    }
}
