//! Nobody gives PTX the name of another package: what a table holds is written by the build that made it.

use stepscope::{Device, DeviceKind, Kernels};

fn main() {
    let kernels = Kernels { package: "downstream-kernels@0.0.0", ptx: &[(121, "any text")] };
    let _ = Device::builder(DeviceKind::Cuda).kernels(kernels).open();
}
