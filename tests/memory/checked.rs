//! Checked mode: unwritten memory is NaN, overruns are named, and nothing else changes.

use crate::overrun::one_too_far;
use crate::support::{Random, bits, on_each_device};
use stepscope::memory::Overflow;
use stepscope::tensor::Target;
use stepscope::{Arena, Buffer, Capacity, Device, Error, Result, ops};

/// f32 poison, and u32 poison.
const POISON: [u32; 2] = [0x7fc0_dead, 0xdead_beef];

fn checked(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).checked(true).build().unwrap()
}

#[track_caller]
fn overrun(outcome: Result<()>, tensor: &str, bytes: usize) {
    let error = outcome.unwrap_err();
    let Error::Overrun { tensor: named, site, bytes: of, offset_bytes } = &error else { panic!("{error}") };
    assert_eq!((named.as_str(), *of, *offset_bytes), (tensor, bytes, bytes), "{error}");
    assert!(site.contains("tests/memory/checked.rs"), "{site}");
}

on_each_device! {
    fn unwritten_memory_is_poison(device: &Device) {
        let mut arena = checked(device);
        for _ in 0..2 {
            arena.step(|step| {
                let (x, y) = (step.empty::<f32>([5])?, step.empty::<u32>([3])?);
                assert_eq!(bits(&step.read(&x)?), [POISON[0]; 5]);
                assert_eq!(step.read(&y)?, [POISON[1]; 3]);
                let z = ops::add(step, &x, &step.upload(&[1.0; 5], [5])?)?;
                assert!(step.read(&z)?.iter().all(|z| z.is_nan()), "a checked read returns NaN");
                ops::fill(step, [100], 2.0).map(drop)
            }).unwrap();
        }
    }

    fn checks_keep_bits(device: &Device) {
        let values = Random::new(3).normals(12 * 64);
        let run = |checked: bool| {
            let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).checked(checked).build().unwrap();
            arena.step(|step| {
                let x = step.upload(&values, [12, 64])?;
                let w = step.upload(&values[..64 * 7], [64, 7])?;
                let mut y = ops::softmax(step, &ops::gelu(step, &ops::matmul(step, &x, &w)?)?)?;
                step.scratch(|inner| {
                    let half = ops::scale(inner, &inner.lend(&y), 0.5)?;
                    ops::add_assign(inner, &mut inner.lend_mut(&mut y), &half)
                })?;
                step.read(&y)
            }).unwrap()
        };
        assert_eq!(bits(&run(true)), bits(&run(false)));
    }
}

#[test]
fn overrun_is_named() {
    let device = crate::support::open(stepscope::DeviceKind::Emulated);
    let mut arena = checked(&device);
    // Tensors that end at a multiple of the alignment, and in between.
    for length in [1usize, 63, 64, 100] {
        let outcome = arena.step(|step| {
            let mut x = step.empty([length])?;
            step.launch(one_too_far(x.out()))
        });
        overrun(outcome, &format!("f32[{length}]"), 4 * length);
        // The arena keeps working.
        arena.step(|step| ops::fill(step, [length], 1.0).map(drop)).unwrap();
    }
    let outcome = arena.step(|step| {
        step.scratch(|inner| {
            let mut x = inner.empty([2, 3])?;
            inner.launch(one_too_far(x.out()))
        })
    });
    overrun(outcome, "f32[2, 3]", 24);
}

#[test]
fn overflow_blocks_are_guarded_too() {
    let device = crate::support::open(stepscope::DeviceKind::Emulated);
    let overflow = Overflow::pool(1 << 20);
    let mut arena =
        Arena::builder(&device).capacity(Capacity::Bytes(256)).overflow(overflow).checked(true).build().unwrap();
    let outcome = arena.step(|step| {
        let mut x = step.empty([300])?;
        step.launch(one_too_far(x.out()))
    });
    overrun(outcome, "f32[300]", 1200);
    assert_eq!(arena.report().overflow.live_blocks, 0);
    arena.step(|step| ops::fill(step, [300], 1.0).map(drop)).unwrap();
}

#[test]
fn another_devices_memory_is_refused() {
    let [here, there] = [0, 1].map(|_| crate::support::open(stepscope::DeviceKind::Emulated));
    let (mut arena, buffer) = (checked(&here), Buffer::from_slice(&there, &[1.0f32; 4]).unwrap());
    let mut elsewhere = checked(&there);
    let refused = elsewhere.step(|other| {
        let x = other.lend(&buffer, [4])?;
        arena.step(|step| {
            let mut y = step.empty::<f32>([4])?;
            use stepscope::tensor::Source;
            step.launch(kernels::fill::copy { x: x.slice(), out: y.out() })
        })
    });
    assert!(matches!(refused, Err(Error::Contract { kernel: "copy_f32", .. })), "{refused:?}");
}
