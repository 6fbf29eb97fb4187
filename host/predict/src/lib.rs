//! The cost model, from launches to time on a GPU that is not present. The doctor uses it too.
//!
//! ```text
//! gpu.rs        the capabilities of GPUs, with sources
//! code.rs       instruction counts of the kernels, from code.json
//! work.rs       a launch -> instructions, bytes and waits per block
//!   product.rs, attention.rs, warpgroup.rs, stream.rs    by kind of kernel
//! cache.rs      the bytes of a launch that move to or from memory
//! clock.rs      work and bytes -> time
//! forecast.rs   all launches, by kernel
//! ```

#![forbid(unsafe_code)]

mod attention;
mod cache;
mod clock;
mod code;
pub mod forecast;
pub mod gpu;
mod product;
mod stream;
mod warpgroup;
mod work;

pub use code::Kernels;
pub use forecast::Forecast;
pub use gpu::Gpu;

use stepscope::device::Description;
use stepscope::{Arena, Capacity, Device, DeviceKind, EagerStep, Result};
use stepscope_core::internals::{Launch, launches};

/// Returns the launches of `run` on a GPU. They depend on the GPU's multiprocessors, its matrix
/// instruction and its kind of memory. Nothing is computed and no memory is allocated.
///
/// # Errors
/// Returns an error if `run` fails.
pub fn dry_run(gpu: &Gpu, run: impl for<'s> FnOnce(&mut EagerStep<'s>) -> Result<()>) -> Result<Vec<Launch>> {
    let device = Device::open(DeviceKind::Emulated)?;
    let (processors, has_wgmma, integrated) = (gpu.processors, gpu.wgmma.is_some(), gpu.integrated);
    let emulated = device.description().clone();
    let description = Description { kind: DeviceKind::Cuda, processors, has_wgmma, integrated, ..emulated };
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    launches(&arena, description, run).map(|(_, launches)| launches)
}
