//! A launch's arguments stay on their thread, because they name a step's memory.

use kernels::fill::fill;
use stepscope::tensor::Target;
use stepscope::{Arena, Capacity, Device, DeviceKind};

fn main() {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let mut other = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let _ = arena.step(|step| {
        let mut x = step.empty::<f32>([4])?;
        let kernel = fill { out: x.out(), length: 4, value: 1.0 };
        std::thread::scope(|threads| threads.spawn(move || other.step(|step| step.launch(kernel))).join().unwrap())
    });
}
