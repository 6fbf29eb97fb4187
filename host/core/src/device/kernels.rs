//! Kernels as PTX: the library's own, which are built in, and those of other packages.
//!
//! Invariant: PTX is stored under the name of the package that it was compiled from, once per
//! package. Contracts find it by that name.

use crate::error::{Error, Result};
use crate::ptx::PtxBuild;

/// The kernels of a package as PTX for GPUs, made by [`kernels!`](crate::kernels). The emulator
/// needs none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    /// The package as `name@version`.
    pub(super) package: &'static str,
    /// Architectures (`sm_121` for GB10), each with its PTX.
    pub(super) ptx: &'static [(&'static str, &'static str)],
}

impl Kernels {
    /// Creates kernels from PTX that was not made by [`kernels!`](crate::kernels).
    ///
    /// # Safety
    /// The PTX was made from the sources of `package`, a crate's `name@version`, exactly as this
    /// program is compiled with them. For each contract of that package it contains the kernel that
    /// the contract is declared with, except PTX for `sm_90a`, which may contain only kernels that
    /// need it. The first text of each pair is the architecture of the second, such as `sm_121`.
    pub const unsafe fn new(package: &'static str, ptx: &'static [(&'static str, &'static str)]) -> Self {
        Self { package, ptx }
    }

    fn name(&self) -> &'static str {
        self.package.split_once('@').map_or(self.package, |(name, _)| name)
    }
}

/// Returns the [`Kernels`] that the package's build script has made. The script compiles the crate
/// that contains them with `CudaBuilder`, and passes the PTX to `cuda_builder::write_table`.
/// `tests/downstream` is such a package.
///
/// ```ignore
/// let device = Device::builder(DeviceKind::Cuda).kernels(stepscope::kernels!()).open()?;
/// ```
#[macro_export]
macro_rules! kernels {
    () => {{
        const MADE: (&str, &[(&str, &str)]) =
            $crate::of_core::include!($crate::of_core::concat!($crate::of_core::env!("OUT_DIR"), "/kernels.rs"));
        // SAFETY: the package's own build script compiled them, from the crate whose name it found
        // there.
        unsafe { $crate::Kernels::new(MADE.0, MADE.1) }
    }};
}

/// The library's own kernels. This is a static because each use of a constant would copy the PTX,
/// which is ten megabytes per GPU.
#[cfg(feature = "cuda")]
pub(super) static OWN: Kernels = crate::kernels!();
#[cfg(not(feature = "cuda"))]
pub(super) static OWN: Kernels = Kernels { package: "stepscope-kernels", ptx: &[] };

/// Returns an error unless each package appears once and none has the name of the library's own.
pub(super) fn check_names(others: &[Kernels]) -> Result<()> {
    for (at, kernels) in others.iter().enumerate() {
        if others[..at].iter().chain([&OWN]).any(|before| before.name() == kernels.name()) {
            let expected = "each package once, and none with the name of stepscope's own";
            return Err(Error::misuse("kernels", expected, format!("a second {}", kernels.package)));
        }
    }
    Ok(())
}

/// Returns the library's own kernels as built in, for each architecture. Empty without the feature
/// `cuda`.
pub fn ptx_builds() -> Vec<PtxBuild> {
    OWN.ptx.iter().map(|&built| PtxBuild::of(built)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, DeviceKind};

    fn named(package: &'static str) -> Kernels {
        // SAFETY: the emulator loads no PTX.
        unsafe { Kernels::new(package, &[]) }
    }

    #[test]
    fn packages_are_unique() {
        let open = |packages: &[&'static str]| {
            let builder = Device::builder(DeviceKind::Emulated);
            packages.iter().fold(builder, |builder, package| builder.kernels(named(package))).open()
        };
        assert!(open(&["a@1.0.0", "b@1.0.0"]).is_ok());
        for packages in [["a@1.0.0", "a@1.0.0"], ["a@1.0.0", "a@2.0.0"], ["a@1.0.0", "stepscope-kernels@9.0.0"]] {
            let error = open(&packages).expect_err("refused");
            assert!(matches!(error, Error::Misuse { op: "kernels", .. }), "{error:?}");
            assert!(error.to_string().contains(packages[1]), "{error}");
        }
    }
}
