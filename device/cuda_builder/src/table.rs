//! The table from which `stepscope::kernels!()` builds what a device loads: a package's PTX, under
//! the name by which its contracts look it up.
//!
//! Invariant: the name is the crate's own, as cargo reports it, so a build script cannot
//! misattribute its kernels.

use std::{
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{CudaBuilderError, NvvmArch, builder::start_error};

/// Writes `OUT_DIR/kernels.rs` in a build script. `stepscope::kernels!()` reads it in the package
/// that is built. [`CudaBuilder`](crate::CudaBuilder) made `ptx` from the crate in folder
/// `crate_path`, one file for each architecture.
///
/// # Errors
/// Fails outside a build script, if the folder has no crate, or if a file cannot be read or
/// written.
pub fn write_table(crate_path: impl AsRef<Path>, ptx: &[(NvvmArch, PathBuf)]) -> Result<(), CudaBuilderError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| CudaBuilderError::Io { action, path, source }
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(CudaBuilderError::NoBuildScript)?).join("kernels.rs");
    // Text instead of `include_str!`: it contains no name that the including module could redefine.
    let mut table = format!("({:?}, &[", package(crate_path.as_ref())?);
    for (arch, path) in ptx {
        let text = fs::read_to_string(path).map_err(io("read", path))?;
        write!(table, "({:?}, {text:?}), ", arch.sm()).expect("writing into a String cannot fail");
    }
    fs::write(&out, table + "])\n").map_err(io("write", &out))
}

/// Returns the crate in a folder, as `name@version`.
fn package(crate_path: &Path) -> Result<String, CudaBuilderError> {
    let no_crate = || CudaBuilderError::NoCrate { path: crate_path.to_owned() };
    let manifest = crate_path.join("Cargo.toml");
    println!("cargo::rerun-if-changed={}", manifest.display());
    if !manifest.is_file() {
        return Err(no_crate());
    }
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate_path).arg("pkgid").stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().map_err(|source| start_error(&command, source))?;
    let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    named(&id).filter(|_| output.status.success()).ok_or_else(no_crate)
}

/// Returns the `name@version` from the output of `cargo pkgid`: `URL#name@version`, or
/// `URL#version` if the URL ends in the name.
fn named(id: &str) -> Option<String> {
    let (url, fragment) = id.rsplit_once('#')?;
    if fragment.contains('@') {
        return Some(fragment.to_owned());
    }
    let name = url.split('?').next()?.rsplit('/').next()?;
    Some(format!("{name}@{fragment}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_and_contracts_name_packages_alike() {
        for (id, name) in [
            ("path+file:///work/device#stepscope-kernels@0.1.0", "stepscope-kernels@0.1.0"),
            ("path+file:///work/kernels#0.0.0", "kernels@0.0.0"),
            ("git+https://host/own?rev=1#1.2.3", "own@1.2.3"),
            ("file:///work/old#name@0.1.0", "name@0.1.0"),
        ] {
            assert_eq!(named(id).as_deref(), Some(name));
        }
        assert_eq!(named("no package"), None);
        let own = concat!(env!("CARGO_PKG_NAME"), "@", env!("CARGO_PKG_VERSION"));
        assert_eq!(package(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap(), own);
    }

    #[test]
    fn no_crate_has_no_name() {
        let error = package(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").as_path()).unwrap_err();
        assert!(matches!(error, CudaBuilderError::NoCrate { .. }), "{error}");
    }
}
