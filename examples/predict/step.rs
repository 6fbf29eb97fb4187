//! The launches of a training step, which is rehearsed on a GPU that is not here.
//!
//! Invariant: nothing is computed and no memory is taken, however large the model: its weights are made on the rehearsal, too.

use stepscope::ops::Precision;
use stepscope::{AdamW, AdamWConfig, Eager, Gradients, Inputs, Launch, Layout, Model, Parameters, Result, Tape};

use crate::crossasset;
use crate::gpt::{self, Gpt, Mode};
use crate::model::rehearse;
use crate::sizes::{FEATURES, SCALES};

/// What is trained.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    CrossAsset,
    Gpt { sizes: gpt::Sizes, recompute: bool },
}

/// What one step on `batch` samples launches on a GPU with so many multiprocessors.
///
/// # Errors
/// Those of the ops.
pub(crate) fn launches(processors: u32, work: Work, precision: Precision, batch: usize) -> Result<Vec<Launch>> {
    // What makes the weights and the optimiser's state is no part of a step.
    let before = rehearse(processors, |step| set_up(step, work, precision, batch, Until::Ready))?.len();
    let mut launches = rehearse(processors, |step| set_up(step, work, precision, batch, Until::Updated))?;
    Ok(launches.split_off(before))
}

/// How far a rehearsal goes.
#[derive(Clone, Copy, PartialEq)]
enum Until {
    Ready,
    Updated,
}

fn set_up(step: &Eager<'_>, work: Work, precision: Precision, batch: usize, until: Until) -> Result<()> {
    match work {
        Work::CrossAsset => {
            let (model, layout) = crossasset::Model::<f32>::new()?;
            let (x, labels) = (vec![0.0; batch * SCALES.len() * FEATURES], vec![0; batch]);
            let inputs = Inputs::new().with(&x, [batch, SCALES.len(), FEATURES])?.with(&labels, [batch])?;
            train(step, &model, &layout, &inputs, precision, (batch, false), until)
        }
        Work::Gpt { sizes, recompute } => {
            let mode = Mode { bf16: precision == Precision::Bf16, recompute, documents: false };
            let (model, layout) = Gpt::new(sizes, mode)?;
            let tokens = vec![0; batch * sizes.context];
            let shape = [batch, sizes.context];
            let inputs = Inputs::new().with(&tokens, shape)?.with(&tokens, shape)?;
            train(step, &model, &layout, &inputs, precision, (batch, mode.bf16), until)
        }
    }
}

/// Forward, loss, backward, clipping and AdamW, as the trainer has them.
fn train(
    step: &Eager<'_>,
    model: &impl Model,
    layout: &Layout,
    inputs: &Inputs<'_>,
    precision: Precision,
    (samples, copied): (usize, bool),
    until: Until,
) -> Result<()> {
    let mut parameters = Parameters::new(step.device(), layout, 7)?;
    if copied {
        parameters = parameters.with_bf16_copy()?;
    }
    let mut gradients = Gradients::zeros(&parameters)?;
    let config = AdamWConfig { clip: Some(1.0), ..AdamWConfig::default() };
    let mut optimizer = AdamW::new(&parameters, config)?;
    step.set_precision(precision);
    let batch = step.upload_inputs(inputs)?;
    optimizer.advance()?;
    if until == Until::Ready {
        return Ok(());
    }
    let tape = Tape::new(step, &parameters);
    let output = model.forward(&tape, &batch)?;
    let loss = model.loss(&tape, &output, &batch, 1.0 / samples as f32)?;
    tape.backward_afresh(&loss, &mut gradients)?;
    optimizer.apply(step, &mut parameters, &gradients)
}
