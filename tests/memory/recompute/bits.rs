//! A pass with recomputing has the bits of the same pass without.

use crate::recompute::graphs::{BATCH, Fixture, GRAPHS, Graph, TOKENS, WIDTH, eager, values};
use crate::support::{bits, on_each_device};
use stepscope::capture::{Captured, Output};
use stepscope::memory::Overflow;
use stepscope::tensor::Indices;
use stepscope::{Arena, Capacity, Device, Error, HostInputs, Result, ops};

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap()
}

type Steps = Captured<(Fixture, (bool, Graph)), Output>;

fn inputs<'i>((x, labels, lengths): &'i (Vec<f32>, Vec<u32>, Vec<u32>)) -> HostInputs<'i> {
    let inputs = HostInputs::new().with(x, [BATCH, TOKENS, WIDTH]).unwrap();
    inputs.with(labels, [labels.len()]).unwrap().with(lengths, [BATCH]).unwrap()
}

fn capture(arena: &mut Arena, run: (bool, Graph)) -> Result<Steps> {
    let state = (Fixture::new(arena.device()), run);
    arena.capture(state, &inputs(&values(0)), |step, (fixture, run), slots| {
        let loss = fixture.passes(step, *run, slots.input(0)?, slots.indices(1)?, slots.input(2)?)?;
        Ok(slots.output(&loss))
    })
}

/// Returns the results of [`eager`] by replays of one capture.
fn captured(arena: &mut Arena, run: (bool, Graph)) -> Vec<Vec<u32>> {
    let mut steps = capture(arena, run).unwrap();
    let mut found = Vec::new();
    for seed in 0..2 {
        let replay = steps.replay(&inputs(&values(seed))).unwrap();
        found.push(bits(&replay.read(*replay.outputs()).unwrap()));
        found.push(bits(&steps.state().0.gradients.read_flat().unwrap()));
    }
    found
}

on_each_device! {
    also late;

    fn match_without_recomputing(device: &Device) {
        for (name, graph) in GRAPHS {
            let want = eager(&mut arena(device), (false, graph));
            assert!(want[1].iter().filter(|&&bits| bits << 1 != 0).count() > 1000, "{name}: the gradients are zero");
            assert_ne!(want[0], want[2], "{name}: two batches must have different losses");
            assert_eq!(eager(&mut arena(device), (true, graph)), want, "{name}, eager");
            assert_eq!(captured(&mut arena(device), (true, graph)), want, "{name}, captured");
        }
    }

    /// Checked mode poisons each byte that a closure leaves, and guards each tensor.
    fn match_in_checked_mode(device: &Device) {
        for (name, graph) in GRAPHS {
            let want = eager(&mut arena(device), (false, graph));
            let checked = || Arena::builder(device).capacity(Capacity::mib(16)).checked(true).build().unwrap();
            assert_eq!(eager(&mut checked(), (true, graph)), want, "{name}, eager");
            assert_eq!(captured(&mut checked(), (true, graph)), want, "{name}, captured");
        }
    }

    /// Most tensors come from the pool, for both ends of the arena.
    fn match_in_overflow(device: &Device) {
        for (name, graph) in GRAPHS {
            let want = eager(&mut arena(device), (false, graph));
            for kib in [4, 16] {
                let builder = Arena::builder(device).capacity(Capacity::Bytes(kib << 10));
                let mut small = builder.overflow(Overflow::pool(64 << 20)).build().unwrap();
                assert_eq!(eager(&mut small, (true, graph)), want, "{name} in {kib} KiB");
                let overflow = small.report().overflow;
                assert!(overflow.allocations > 10, "{name}: {overflow:?}");
                assert_eq!(overflow.live_blocks, 0, "{name}");
            }
        }
    }

    fn match_in_scratch(device: &Device) {
        // No op copies labels into a scratch.
        for (name, graph) in GRAPHS.into_iter().filter(|(name, _)| !["transformer", "inputs only"].contains(name)) {
            let run = |on| {
                let (x, ..) = values(4);
                let mut fixture = Fixture::new(device);
                let loss = arena(device).step(|step| {
                    let x = step.upload(&x, [BATCH, TOKENS, WIDTH])?;
                    let mut out = step.empty([1])?;
                    step.scratch(|inner| {
                        let x = ops::copy(inner, &inner.lend(&x))?.save();
                        let none = inner.empty([1])?.save();
                        let loss = fixture.passes(inner, (on, graph), x, Indices::on_device(none), none)?;
                        ops::copy_into(inner, &loss, &mut inner.lend_mut(&mut out))
                    })?;
                    step.read(&out)
                });
                (bits(&loss.unwrap()), bits(&fixture.gradients.read_flat().unwrap()))
            };
            assert_eq!(run(true), run(false), "{name}");
        }
    }

    /// The measure of the dry run suffices, and less does not.
    fn capture_needs_its_dry_run_size(device: &Device) {
        for (name, graph) in GRAPHS {
            let owned = |capacity| {
                let mut arena = Arena::builder(device).capacity(Capacity::Bytes(capacity)).build().unwrap();
                capture(&mut arena, (true, graph)).map(|steps| steps.report().bytes_owned)
            };
            let bytes = owned(8 << 20).unwrap();
            assert_eq!(owned(bytes).unwrap(), bytes, "{name}");
            assert!(matches!(owned(bytes - 256), Err(Error::CaptureNeeds { .. })), "{name}");
        }
    }
}
