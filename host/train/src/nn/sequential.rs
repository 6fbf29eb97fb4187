//! Layers one after another.

use super::{
    Conv1d, Conv2d, ConvTranspose2d, Dropout, GroupNorm, Gru, LayerNorm, Linear, Lstm, Mlp, Norm, RmsNorm, SwiGlu,
};
use std::fmt;
use stepscope_core::ops::{Activation, Cast};
use stepscope_core::{Result, Stored, Tape, Var};

/// A layer of one variable. A type of your own may be one too.
pub trait Layer<S: Stored> {
    /// Computes the layer's output.
    ///
    /// # Errors
    /// Those of the layer.
    fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>>;
}

macro_rules! layers {
    ($bound:ident: $($layer:ident),+) => {$(
        impl<S: $bound> Layer<S> for $layer {
            #[track_caller]
            fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
                $layer::forward(self, tape, x)
            }
        }
    )+};
}

layers! { Stored: Dropout, LayerNorm, Norm, RmsNorm }
layers! { Cast: GroupNorm }
layers! { Activation: Conv1d, Conv2d, ConvTranspose2d, Gru, Linear, Lstm, Mlp, SwiGlu }

/// A function as a layer.
struct Function<F>(F);

impl<S: Stored, F> Layer<S> for Function<F>
where
    F: for<'t, 's> Fn(&Tape<'t, 's>, &Var<'s, S>) -> Result<Var<'s, S>>,
{
    #[track_caller]
    fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.0(tape, x)
    }
}

/// Layers that are applied one after another, as `torch.nn.Sequential` does.
///
/// ```
/// use stepscope::nn::{Linear, Sequential};
///
/// let mut spec = stepscope::ParameterSpec::builder();
/// let model = Sequential::<f32>::default()
///     .then(Linear::new(spec.at("hidden"), 64, 32))
///     .then_fn(|_, x| x.tanh())
///     .then(Linear::new(spec.at("output"), 32, 10));
/// ```
pub struct Sequential<S: Stored = f32> {
    layers: Vec<Box<dyn Layer<S>>>,
}

impl<S: Stored> Default for Sequential<S> {
    fn default() -> Self {
        Self { layers: Vec::new() }
    }
}

impl<S: Stored> fmt::Debug for Sequential<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} layers", self.layers.len())
    }
}

impl<S: Stored> Sequential<S> {
    /// Adds a layer after the last.
    #[must_use]
    pub fn then(mut self, layer: impl Layer<S> + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Adds a function after the last layer.
    #[must_use]
    pub fn then_fn(
        self,
        function: impl for<'t, 's> Fn(&Tape<'t, 's>, &Var<'s, S>) -> Result<Var<'s, S>> + 'static,
    ) -> Self {
        self.then(Function(function))
    }

    /// Applies the layers. Without layers the result is x.
    #[track_caller]
    pub fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.layers.iter().try_fold(*x, |x, layer| layer.forward(tape, &x))
    }
}

impl<S: Stored> Layer<S> for Sequential<S> {
    #[track_caller]
    fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        Self::forward(self, tape, x)
    }
}
