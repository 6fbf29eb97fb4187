//! PTX comes from the package's own build script; providing any other text is `unsafe`.

use stepscope::device::Kernels;
use stepscope::{Device, DeviceKind};

fn main() {
    let kernels = Kernels::new("downstream-kernels@0.0.0", &[("sm_121", "any text")]);
    let _ = Device::builder(DeviceKind::Cuda).kernels(kernels).open();
}
