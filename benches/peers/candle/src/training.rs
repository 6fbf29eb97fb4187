//! A model in training, with its weights, optimizer and batch.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};

use crate::clip::clip;
use crate::crossasset::CrossAsset;
use crate::gpt2::Gpt2;
use crate::work::crossasset::{CLASSES, FEATURES, LEARNING_RATE, SCALES};
use crate::work::{self, Gpt2Sizes, Result, Training};

/// The norm limit over all gradients together.
const MOST: f64 = 1.0;

/// The two tensors of a batch on the device.
type Inputs = [Tensor; 2];
/// A function that computes `Made` from `T`.
type Maker<T, Made> = Box<dyn Fn(&T) -> candle_core::Result<Made>>;

pub(crate) struct Trained {
    device: Device,
    weights: Vec<Var>,
    optimizer: AdamW,
    upload: Maker<Device, Inputs>,
    forward: Maker<Inputs, Tensor>,
    inputs: Option<Inputs>,
    loss: Option<Tensor>,
}

impl Trained {
    /// Creates CrossAsset on random features.
    pub(crate) fn crossasset(device: &Device, dtype: DType, batch: usize) -> Result<Self> {
        let (variables, model) = initialized(device, dtype, CrossAsset::new)?;
        let (x, labels) = (work::numbers(batch * SCALES * FEATURES), work::below(CLASSES, batch));
        let upload = move |device: &Device| {
            let x = Tensor::from_slice(&x, (batch, SCALES, FEATURES), device)?.to_dtype(dtype)?;
            Ok([x, Tensor::from_slice(&labels, batch, device)?])
        };
        let settings = ParamsAdamW { lr: LEARNING_RATE, ..ParamsAdamW::default() };
        Self::new(device, &variables, settings, upload, move |[x, labels]| model.loss(x, labels))
    }

    /// Creates GPT-2 on random tokens.
    pub(crate) fn gpt2(device: &Device, dtype: DType, sizes: Gpt2Sizes, batch: usize) -> Result<Self> {
        let (variables, model) = initialized(device, dtype, |builder| Gpt2::new(sizes, builder))?;
        let tokens = sizes.tokens;
        let ids = work::below(sizes.vocabulary, batch * (tokens + 1));
        let upload = move |device: &Device| {
            let ids = Tensor::from_slice(&ids, (batch, tokens + 1), device)?;
            Ok([ids.narrow(1, 0, tokens)?.contiguous()?, ids.narrow(1, 1, tokens)?.contiguous()?])
        };
        let weight_decay = Gpt2Sizes::WEIGHT_DECAY.into();
        let settings = ParamsAdamW { lr: Gpt2Sizes::LEARNING_RATE, weight_decay, ..ParamsAdamW::default() };
        Self::new(device, &variables, settings, upload, move |[ids, targets]| model.loss(ids, targets))
    }

    fn new(
        device: &Device,
        variables: &VarMap,
        settings: ParamsAdamW,
        upload: impl Fn(&Device) -> candle_core::Result<Inputs> + 'static,
        forward: impl Fn(&Inputs) -> candle_core::Result<Tensor> + 'static,
    ) -> Result<Self> {
        let weights = variables.all_vars();
        let optimizer = AdamW::new(weights.clone(), settings)?;
        let (upload, forward) = (Box::new(upload), Box::new(forward));
        Ok(Self { device: device.clone(), weights, optimizer, upload, forward, inputs: None, loss: None })
    }
}

/// Creates a model and its weights. They are initialized in f32, because candle's CUDA backend
/// cannot draw BF16.
fn initialized<M>(
    device: &Device,
    dtype: DType,
    make: impl Fn(VarBuilder) -> candle_core::Result<M>,
) -> Result<(VarMap, M)> {
    let variables = VarMap::new();
    make(VarBuilder::from_varmap(&variables, DType::F32, device))?;
    for variable in variables.data().lock().expect("no other thread has them").values_mut() {
        *variable = Var::from_tensor(&variable.to_dtype(dtype)?)?;
    }
    let model = make(VarBuilder::from_varmap(&variables, dtype, device))?;
    Ok((variables, model))
}

impl Training for Trained {
    fn model(&self) -> [usize; 2] {
        [self.weights.len(), self.weights.iter().map(|weight| weight.elem_count()).sum()]
    }

    fn upload(&mut self) -> Result<()> {
        self.inputs = Some((self.upload)(&self.device)?);
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let loss = (self.forward)(self.inputs.as_ref().ok_or("no batch on the device")?)?;
        let mut gradients = loss.backward()?;
        clip(&mut gradients, &self.weights, MOST)?;
        self.optimizer.step(&gradients)?;
        self.loss = Some(loss.detach());
        Ok(())
    }

    fn loss(&self) -> Result<f32> {
        Ok(self.loss.as_ref().ok_or("no step was made")?.to_scalar()?)
    }

    fn wait(&self) -> Result<()> {
        Ok(self.device.synchronize()?)
    }
}
