//! The launches of a training step, from a dry run on a GPU that is not present.
//!
//! Invariant: nothing is computed and no memory is allocated, however large the model. Its weights
//! are created in the dry run too.

use stepscope::ops::Precision;
use stepscope::{
    AdamW, EagerStep, Gradients, HostInputs, Launch, Model, Optimizer, ParameterSpec, Parameters, Result, Tape,
};

use crate::crossasset;
use crate::sizes::{FEATURES, SCALES};
use crate::train::model::{Gpt, Mode, Sizes};
use stepscope_predict::dry_run;

/// The model to train.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    CrossAsset,
    Gpt { sizes: Sizes, recompute: bool },
}

/// Returns the launches of one step on `batch` samples, on a GPU with this many multiprocessors.
///
/// # Errors
/// When an op fails.
pub(crate) fn launches(processors: u32, work: Work, precision: Precision, batch: usize) -> Result<Vec<Launch>> {
    // The launches that initialize the weights and the optimizer's state are not part of a step.
    let before = dry_run(processors, |step| set_up(step, work, precision, batch, Until::Ready))?.len();
    let mut launches = dry_run(processors, |step| set_up(step, work, precision, batch, Until::Updated))?;
    Ok(launches.split_off(before))
}

/// The end of a dry run.
#[derive(Clone, Copy, PartialEq)]
enum Until {
    Ready,
    Updated,
}

fn set_up(step: &EagerStep<'_>, work: Work, precision: Precision, batch: usize, until: Until) -> Result<()> {
    match work {
        Work::CrossAsset => {
            let (model, layout) = crossasset::Model::<f32>::new()?;
            let (x, labels) = (vec![0.0; batch * SCALES.len() * FEATURES], vec![0; batch]);
            let inputs = HostInputs::new().with(&x, [batch, SCALES.len(), FEATURES])?.with_indices(&labels, [batch])?;
            train(step, &model, &layout, &inputs, precision, (batch, false), until)
        }
        Work::Gpt { sizes, recompute } => {
            let mode = Mode { bf16: precision == Precision::Bf16, recompute, documents: false };
            let (model, layout) = Gpt::new(sizes, mode)?;
            let tokens = vec![0; batch * sizes.context];
            let shape = [batch, sizes.context];
            let inputs = HostInputs::new().with_indices(&tokens, shape)?.with_indices(&tokens, shape)?;
            train(step, &model, &layout, &inputs, precision, (batch, mode.bf16), until)
        }
    }
}

/// Runs forward, loss, backward, clipping and AdamW, as the trainer does.
fn train(
    step: &EagerStep<'_>,
    model: &impl Model,
    layout: &ParameterSpec,
    inputs: &HostInputs<'_>,
    precision: Precision,
    (samples, copied): (usize, bool),
    until: Until,
) -> Result<()> {
    let mut parameters = Parameters::new(step.device(), layout, 7)?;
    if copied {
        parameters = parameters.with_bf16_copy()?;
    }
    let mut gradients = Gradients::zeros(&parameters)?;
    let config = AdamW { clip: Some(1.0), ..AdamW::default() };
    let mut optimizer = Optimizer::new(&parameters, config)?;
    step.set_precision(precision);
    let batch = step.upload_inputs(inputs)?;
    optimizer.advance()?;
    if until == Until::Ready {
        return Ok(());
    }
    let tape = Tape::new(step, &parameters);
    let output = model.forward(&tape, &batch)?;
    let loss = model.loss(&tape, &output, &batch, 1.0 / samples as f32)?;
    tape.backward_overwrite(&loss, &mut gradients)?;
    optimizer.apply(step, &mut parameters, &gradients)
}
