//! The clock and the temperature of a run's GPU, as NVML reports them.

use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::{Device as NvmlDevice, Nvml};
use stepscope::{Device, DeviceKind};

/// A GPU that is read now and then. Without a GPU, or without NVML, it reports nothing.
#[derive(Default)]
pub(crate) struct GpuWatch {
    nvml: Option<Nvml>,
    /// NVML's number of the GPU.
    ordinal: u32,
}

impl GpuWatch {
    /// Opens NVML for a GPU.
    pub(crate) fn open(device: &Device) -> Self {
        let description = device.description();
        if description.kind != DeviceKind::Cuda {
            return Self::default();
        }
        // The name that drivers install. The name without a number exists only with development
        // packages.
        let nvml = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok();
        Self { nvml, ordinal: visible(description.ordinal) }
    }

    /// Returns the clock in MHz and the temperature in degrees Celsius.
    pub(crate) fn read(&self) -> (Option<u32>, Option<u32>) {
        let gpu: Option<NvmlDevice<'_>> = self.nvml.as_ref().and_then(|nvml| nvml.device_by_index(self.ordinal).ok());
        let Some(gpu) = gpu else { return (None, None) };
        (gpu.clock_info(Clock::SM).ok(), gpu.temperature(TemperatureSensor::Gpu).ok())
    }
}

/// Returns NVML's number of the GPU with this number in CUDA. NVML counts all GPUs, and CUDA those
/// that `CUDA_VISIBLE_DEVICES` lists.
fn visible(ordinal: i32) -> u32 {
    let listed = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let number = listed.split(',').nth(ordinal as usize).and_then(|number| number.trim().parse().ok());
    number.unwrap_or(ordinal as u32)
}
