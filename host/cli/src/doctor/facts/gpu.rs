//! The first GPU, as reported by NVML, which is loaded at run time.

use nvml_wrapper::Nvml;
use serde::{Deserialize, Serialize};
use std::path::Path;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Gpu {
    /// True if the system shows an NVIDIA device, independent of NVML.
    pub in_system: Option<bool>,
    pub name: Option<String>,
    pub driver: Option<String>,
    /// The driver's CUDA version: 13000 for 13.0.
    pub cuda: Option<i32>,
    /// Ten times the compute capability.
    pub capability: Option<u32>,
    /// The NVML error, if it failed.
    pub nvml_error: Option<String>,
    /// The value of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible_devices: Option<String>,
    /// True if `CUDA_CACHE_DISABLE` is set.
    pub cache_disabled: bool,
    /// The folder of the driver's cache of compiled PTX.
    pub cache_folder: Option<String>,
    pub cache_writable: Option<bool>,
}

impl Gpu {
    #[expect(clippy::unnecessary_wraps, reason = "the other parts return a Result")]
    pub(crate) fn gather() -> Result<Self, String> {
        let mut found = Self {
            in_system: Some(Path::new("/proc/driver/nvidia").exists() || Path::new("/dev/nvidiactl").exists()),
            visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            cache_disabled: std::env::var("CUDA_CACHE_DISABLE").is_ok_and(|value| value == "1"),
            ..Self::default()
        };
        let own = std::env::var_os("CUDA_CACHE_PATH").map(Into::into);
        let usual = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".nv/ComputeCache"));
        if let Some(folder) = own.or_else(usual) {
            let there = folder.ancestors().find(|folder| folder.is_dir());
            found.cache_writable = Some(there.is_some_and(|there| tempfile::tempfile_in(there).is_ok()));
            found.cache_folder = Some(folder.display().to_string());
        }
        if let Err(error) = found.ask() {
            found.nvml_error = Some(error.to_string());
        }
        Ok(found)
    }

    fn ask(&mut self) -> Result<(), nvml_wrapper::error::NvmlError> {
        // The name that drivers install. The name without a number exists only with development
        // packages.
        let nvml = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init()?;
        self.driver = nvml.sys_driver_version().ok();
        self.cuda = nvml.sys_cuda_driver_version().ok();
        let device = nvml.device_by_index(0)?;
        self.name = device.name().ok();
        let capability = device.cuda_compute_capability().ok();
        self.capability = capability.and_then(|of| u32::try_from(of.major * 10 + of.minor).ok());
        Ok(())
    }
}
