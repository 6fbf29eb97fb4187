//! The memory of a run.

use stepscope::{Arena, Capacity, Device, HostBatch, HostInputs, Model, Parameters, Result, Tape, TrainState, bf16};

/// Spare bytes of the arena, for differences from the measured steps.
const ROOM: usize = 4 << 20;

/// Builds an arena of `mebibytes`, or else with room for a training step on `largest` and an
/// evaluation step on `evaluated`. Both are measured by dry run; their values are not read.
pub(crate) fn arena<M: Model>(
    device: &Device,
    state: &mut TrainState<M>,
    mebibytes: Option<usize>,
    [largest, evaluated]: [&impl HostBatch; 2],
) -> Result<Arena> {
    if let Some(mebibytes) = mebibytes {
        return Arena::builder(device).capacity(Capacity::mib(mebibytes)).build();
    }
    let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    let mut needs = |inputs: &HostInputs<'_>, train: bool| {
        let measured = small.measure(|step| {
            step.set_precision(state.precision);
            let batch = step.upload_inputs(inputs)?;
            let tape = Tape::new(step, &state.parameters);
            let tape = if train { tape } else { tape.evaluating() };
            let hidden = state.model.forward(&tape, &batch)?;
            let loss = state.model.loss(&tape, &hidden, &batch, 1.0)?;
            if train { tape.backward_overwrite(&loss, &mut state.gradients) } else { Ok(()) }
        });
        measured.map(|measured| measured.high_water_bytes())
    };
    let (step, look) = (needs(&largest.inputs()?, true)?, needs(&evaluated.inputs()?, false)?);
    Arena::builder(device).capacity(Capacity::Bytes(step + look + ROOM)).build()
}

/// Returns the bytes that persist across steps: weights, gradients, two moments, and the BF16 copy.
pub(crate) fn weights_bytes(weights: &Parameters) -> usize {
    let copy = weights.bf16_copy().map_or(0, |copy| copy.len() * size_of::<bf16>());
    4 * weights.flat().len() * size_of::<f32>() + copy
}
