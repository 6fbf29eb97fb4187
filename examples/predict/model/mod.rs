//! The cost model: launches -> time, on a GPU that is not here. The doctor has it too.
//!
//! ```text
//! code.rs    what the kernels are made of: code.json         gpu.rs    what a GPU can do, and who measured it
//! work.rs    a launch -> instructions, bytes, waits of a block         cache.rs  what of its bytes comes from memory
//!   product.rs, attention.rs, stream.rs    by kind of kernel           clock.rs  work and bytes -> time
//! forecast.rs   all launches, by kernel
//! ```

mod attention;
mod cache;
mod clock;
mod code;
pub(crate) mod forecast;
pub(crate) mod gpu;
mod product;
mod stream;
mod work;

pub(crate) use code::Kernels;
pub(crate) use forecast::Forecast;
pub(crate) use gpu::Gpu;

use stepscope::{Arena, Capacity, Description, Device, DeviceKind, Eager, Launch, Result};

/// What `run` launches on a GPU with so many multiprocessors. Nothing is computed and no memory is taken.
///
/// # Errors
/// Those of `run`.
pub(crate) fn rehearse(processors: u32, run: impl for<'s> FnOnce(&mut Eager<'s>) -> Result<()>) -> Result<Vec<Launch>> {
    let device = Device::open(DeviceKind::Emulated)?;
    let description = Description { kind: DeviceKind::Cuda, processors, ..device.description().clone() };
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
    arena.launches(description, run).map(|(_, launches)| launches)
}
