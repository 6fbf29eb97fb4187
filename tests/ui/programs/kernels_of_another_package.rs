//! A PTX table cannot claim another package's name: the build that made it writes the name.

use stepscope::device::Kernels;
use stepscope::{Device, DeviceKind};

fn main() {
    let kernels = Kernels { package: "downstream-kernels@0.0.0", ptx: &[("sm_121", "any text")] };
    let _ = Device::builder(DeviceKind::Cuda).kernels(kernels).open();
}
