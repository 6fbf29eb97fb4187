//! Kernels as PTX: the library's own, as it was built in, and what other packages bring.
//!
//! Invariant: the same sources and device compiler give the same bytes on any host, so that a digest names the kernels. PTX is
//! given out under the name of the package that it was compiled from, and each package's once: contracts look it up by that name.

use crate::error::{Error, Result};
use crate::ptx::PtxBuild;

/// The kernels of a package as PTX, for a GPU; the emulator needs none. [`kernels!`](crate::kernels) makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    /// `name@version` of the package.
    pub(super) package: &'static str,
    /// Compute capability times ten (121 for GB10), and the PTX for it.
    pub(super) ptx: &'static [(u32, &'static str)],
}

impl Kernels {
    /// PTX that was made in another way than [`kernels!`](crate::kernels) knows.
    ///
    /// # Safety
    /// The PTX was made from the sources of `package`, a crate's `name@version`, as this program is compiled with them: for each
    /// contract of that package it has the kernel beside which the contract stands. The numbers are compute capabilities times
    /// ten, each with the PTX for it.
    pub const unsafe fn new(package: &'static str, ptx: &'static [(u32, &'static str)]) -> Self {
        Self { package, ptx }
    }

    fn name(&self) -> &'static str {
        self.package.split_once('@').map_or(self.package, |(name, _)| name)
    }
}

/// The [`Kernels`] that the build script of the package has made: it compiles the crate that holds them by `CudaBuilder`, and
/// hands the PTX to `cuda_builder::write_table`. `tests/downstream` is such a package.
///
/// ```ignore
/// let device = Device::builder(DeviceKind::Cuda).kernels(stepscope::kernels!()).open()?;
/// ```
#[macro_export]
macro_rules! kernels {
    () => {{
        const MADE: (&str, &[(u32, &str)]) =
            $crate::of_core::include!($crate::of_core::concat!($crate::of_core::env!("OUT_DIR"), "/kernels.rs"));
        // SAFETY: the package's own build script has compiled them, from the crate whose name it found there.
        unsafe { $crate::Kernels::new(MADE.0, MADE.1) }
    }};
}

/// The library's own. A static: of a constant each use would have a copy of the PTX, ten megabytes for each GPU.
#[cfg(feature = "cuda")]
pub(super) static OWN: Kernels = crate::kernels!();
#[cfg(not(feature = "cuda"))]
pub(super) static OWN: Kernels = Kernels { package: "stepscope-kernels", ptx: &[] };

/// An error unless each package is there once, and none calls itself like the library's own.
pub(super) fn check_names(others: &[Kernels]) -> Result<()> {
    for (at, kernels) in others.iter().enumerate() {
        if others[..at].iter().chain([&OWN]).any(|before| before.name() == kernels.name()) {
            let expected = "each package once, and none that is named like stepscope's own";
            return Err(Error::misuse("kernels", expected, format!("a second {}", kernels.package)));
        }
    }
    Ok(())
}

/// The library's own kernels as they were built in, for each architecture. Empty without feature `cuda`.
pub fn ptx_builds() -> Vec<PtxBuild> {
    OWN.ptx.iter().map(|(arch, ptx)| PtxBuild::of(*arch, ptx)).collect()
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
    fn a_package_is_given_once_and_none_stands_for_the_librarys() {
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
