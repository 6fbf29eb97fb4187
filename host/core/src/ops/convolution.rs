//! Convolutions of images, their transposes, and pooling.
//!
//! A convolution is one product: its weight times the *windows* of its input, which one strided
//! copy makes. The input's gradient is a convolution too: of the result's gradient, with zeros
//! between its elements where the stride leaves places out, with the flipped weight. A transposed
//! convolution is that function.
//!
//! ```text
//! weight [groups, out, in kh kw] x windows [groups, in kh kw, batch oh ow] = [groups, out, batch oh ow]
//! ```
//! Invariant: an element is one chain of fused multiply-adds over the channels and the kernel's
//! places, ascending, as [`matmul`](super::matmul()) documents.

use super::matmul::GemmElement;
use super::product::product;
use super::transpose::permuted;
use super::views::{Places, among_zeros, taken};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tape::Var;
use crate::tensor::{Saved, Shape, Source, Stored, Tensor};

/// The settings of a convolution along height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolutionConfig {
    /// The distance between neighboring windows.
    pub stride: [usize; 2],
    /// The zeros on each side of the image, at most `dilation * (kernel - 1)`.
    pub padding: [usize; 2],
    /// The distance between neighboring elements of a window.
    pub dilation: [usize; 2],
    /// The number of groups into which the channels are divided.
    pub groups: usize,
}

impl Default for ConvolutionConfig {
    fn default() -> Self {
        Self { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 }
    }
}

/// The extents of a convolution, whose direction may be either.
#[derive(Clone, Copy, Debug)]
struct Plan {
    batch: usize,
    /// The channels of the image and of its windows' products.
    channels: [usize; 2],
    image: [usize; 2],
    kernel: [usize; 2],
    /// The number of windows.
    places: [usize; 2],
    config: ConvolutionConfig,
}

impl Plan {
    /// Checks a config and a weight `[out, in / groups, kh, kw]`. `places` returns the number of
    /// windows from the extents between the first and the last element of a window.
    fn new(
        op: &'static str,
        shapes: [Shape; 2],
        config: ConvolutionConfig,
        transposed: bool,
        sizes: impl Fn([usize; 2], [usize; 2]) -> Option<[[usize; 2]; 2]>,
    ) -> Result<Self> {
        let refused =
            |expected: String| Err(Error::misuse(op, expected, format!("{} and {}, {config:?}", shapes[0], shapes[1])));
        let (&[batch, own, h, w], &[out, of_group, kh, kw]) = (shapes[0].extents(), shapes[1].extents()) else {
            return refused("an input [batch, channels, height, width] and a weight of four extents".into());
        };
        let ConvolutionConfig { stride, padding, dilation, groups } = config;
        if stride.contains(&0) || dilation.contains(&0) || kh == 0 || kw == 0 {
            return refused("strides, dilations and a kernel of at least 1".into());
        }
        let reach = [dilation[0].saturating_mul(kh - 1), dilation[1].saturating_mul(kw - 1)];
        if padding[0] > reach[0] || padding[1] > reach[1] {
            return refused("a padding of at most `dilation * (kernel - 1)`".into());
        }
        let channels = [of_group.saturating_mul(groups), out];
        if groups == 0 || !out.is_multiple_of(groups) || channels[usize::from(transposed)] != own {
            let form = if transposed { "[in, out / groups, kh, kw]" } else { "[out, in / groups, kh, kw]" };
            return refused(format!("a weight {form}, and groups that divide both"));
        }
        let Some([image, places]) = sizes([h, w], reach) else {
            return refused("an image at least as large as a window".into());
        };
        Ok(Self { batch, channels, image, kernel: [kh, kw], places, config })
    }

    /// Returns the plan of a convolution.
    fn forward(shapes: [Shape; 2], config: ConvolutionConfig) -> Result<Self> {
        Self::new("conv2d", shapes, config, false, |image, reach| {
            let mut places = [0; 2];
            for at in 0..2 {
                let room = (image[at] + 2 * config.padding[at]).checked_sub(reach[at] + 1)?;
                places[at] = room / config.stride[at] + 1;
            }
            Some([image, places])
        })
    }

    /// Returns the plan of the convolution whose transpose has this input. `more` rows and columns
    /// of its image are in no window.
    fn transposed(shapes: [Shape; 2], config: ConvolutionConfig, more: [usize; 2]) -> Result<Self> {
        Self::new("conv_transpose2d", shapes, config, true, |places, reach| {
            let mut image = [0; 2];
            for at in 0..2 {
                let all = places[at].checked_sub(1)?.checked_mul(config.stride[at])?.checked_add(reach[at] + 1)?;
                image[at] = all.checked_sub(2 * config.padding[at])?.checked_add(more[at])?;
            }
            let is_reached = (0..2).all(|at| more[at] < config.stride[at] && image[at] > 0);
            is_reached.then_some([image, places])
        })
    }

    fn result(&self) -> Shape {
        [self.batch, self.channels[1], self.places[0], self.places[1]].into()
    }

    fn weight(&self) -> Shape {
        [self.channels[1], self.channels[0] / self.config.groups, self.kernel[0], self.kernel[1]].into()
    }

    /// Returns the convolution of an image with a weight.
    fn products<'s, S: GemmElement<S>>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        weight: &impl Source<'s, S>,
    ) -> Result<Tensor<'s, S>> {
        let windows = self.windows_of_image(step, x)?;
        self.times(step, weight, windows, self.channels[1], self.places)
    }

    /// Returns the gradient of an image.
    fn image_gradient<'s, S: GemmElement<S>>(
        &self,
        step: &Step<'s>,
        dy: &impl Source<'s, S>,
        weight: &impl Source<'s, S>,
    ) -> Result<Tensor<'s, S>> {
        let ConvolutionConfig { stride, padding, dilation, groups } = self.config;
        let ([own, out], [kh, kw]) = (self.channels, self.kernel);
        // The gradient's elements, a stride apart, among as many zeros as a window overlaps.
        let [h, w] = [0, 1].map(|at| self.image[at] + dilation[at] * (self.kernel[at] - 1));
        let [top, left] = [0, 1].map(|at| dilation[at] * (self.kernel[at] - 1) - padding[at]);
        let to = Shape::from([self.batch, out, h, w]);
        let mut places = Places::of(to).from(2, top).from(3, left);
        places.strides[2] *= stride[0] as isize;
        places.strides[3] *= stride[1] as isize;
        let spread = among_zeros(step, dy, to, &places)?;
        let windows = self.windows(step, &spread, self.image, [1; 2])?;
        step.free(spread);
        // [groups, in, out, kh, kw], with the kernel flipped.
        let (own, out, kernel) = (own / groups, out / groups, kh * kw);
        let flipped = Places {
            start: kernel - 1,
            strides: [out * own * kernel, kernel, own * kernel]
                .map(|stride| stride as isize)
                .into_iter()
                .chain([-(kw as isize), -1])
                .collect(),
        };
        let weight = taken(step, [groups, own, out, kh, kw].into(), weight, &flipped)?;
        self.times(step, &weight, windows, self.channels[0], self.image)
    }

    /// Returns the gradient of the weight.
    fn weight_gradient<'s, S: GemmElement<S>>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        dy: &impl Source<'s, S>,
    ) -> Result<Tensor<'s, S>> {
        let windows = self.windows_of_image(step, x)?.save();
        let dy = swapped(step, dy, self.result())?.save();
        let groups = self.config.groups;
        let columns = self.batch * self.places[0] * self.places[1];
        let windows = windows.reshape([groups, windows.shape().elements() / (groups * columns).max(1), columns])?;
        let dy = dy.reshape([groups, self.channels[1] / groups, columns])?;
        product(step, (&dy, false), (&windows, true))?.reshape(self.weight())
    }

    /// Returns the windows of an image between zeros.
    fn windows_of_image<'s, S: Stored>(&self, step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
        let ConvolutionConfig { stride, padding: [top, left], .. } = self.config;
        if [top, left] == [0, 0] {
            return self.windows(step, x, self.places, stride);
        }
        let ([h, w], [batch, channels]) = (self.image, [self.batch, self.channels[0]]);
        let to = Shape::from([batch, channels, h + 2 * top, w + 2 * left]);
        let padded = among_zeros(step, x, to, &Places::of(to).from(2, top).from(3, left))?;
        let windows = self.windows(step, &padded, self.places, stride)?;
        step.free(padded);
        Ok(windows)
    }

    /// Returns the windows at these places, `[channels, kh, kw, batch, height, width]`.
    fn windows<'s, S: Stored>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        [h, w]: [usize; 2],
        stride: [usize; 2],
    ) -> Result<Tensor<'s, S>> {
        let channels = x.shape().extents()[1];
        let own = Places::of(x.shape()).strides;
        let (along, [dh, dw]) = (stride.map(|by| by as isize), self.config.dilation.map(|by| by as isize));
        let strides = vec![own[1], dh * own[2], dw * own[3], own[0], along[0] * own[2], along[1] * own[3]];
        let [kh, kw] = self.kernel;
        taken(step, [channels, kh, kw, self.batch, h, w].into(), x, &Places { start: 0, strides })
    }

    /// Returns a weight times windows, `[batch, channels, height, width]`. Frees the windows.
    fn times<'s, S: GemmElement<S>>(
        &self,
        step: &Step<'s>,
        weight: &impl Source<'s, S>,
        windows: Tensor<'s, S>,
        channels: usize,
        [h, w]: [usize; 2],
    ) -> Result<Tensor<'s, S>> {
        let (groups, columns) = (self.config.groups, self.batch * h * w);
        let inner = weight.shape().elements() / channels.max(1);
        let weight = Saved::new(weight.memory(), [groups, channels / groups, inner].into());
        let windows = windows.reshape([groups, inner, columns])?;
        let y = product(step, (&weight, false), (&windows, false))?;
        step.free(windows);
        let turned = swapped(step, &y, [channels, self.batch, h, w].into())?;
        step.free(y);
        Ok(turned)
    }
}

/// Returns a tensor of four extents, which has this shape, with its first two swapped.
fn swapped<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, shape: Shape) -> Result<Tensor<'s, S>> {
    permuted(step, &Saved::new(x.memory(), shape), &[1, 0, 2, 3])
}

impl<'s, S: GemmElement<S>> Var<'s, S> {
    /// The convolution (a cross-correlation, as in PyTorch) with a weight
    /// `[out, in / groups, kh, kw]`; this variable: `[batch, in, height, width]`, result:
    /// `[batch, out, (height + 2 padding - dilation (kh - 1) - 1) / stride + 1, ..]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes or a larger padding; [`Error::ArenaFull`].
    #[track_caller]
    pub fn conv2d(&self, weight: &Self, config: ConvolutionConfig) -> Result<Self> {
        let plan = Plan::forward([self.shape(), weight.shape()], config)?;
        let op = self.op("conv2d", &[self, weight])?;
        let y = plan.products(op.step(), self.value(), weight.value())?;
        let (x, weight) = (self.keep(), weight.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let (x, weight, step) = (x.var(back)?, weight.var(back)?, back.step());
            if x.wants_gradient() {
                let dx = plan.image_gradient(step, &dy, weight.value())?;
                back.add(&x, dx)?;
            }
            if weight.wants_gradient() {
                let dw = plan.weight_gradient(step, x.value(), &dy)?;
                back.add(&weight, dw)?;
            }
            step.free(dy);
            Ok(())
        }))
    }

    /// The transposed convolution with a weight `[in, out / groups, kh, kw]`; this variable:
    /// `[batch, in, height, width]`, result: `[batch, out, (height - 1) stride - 2 padding +
    /// dilation (kh - 1) + 1 + more, ..]`. `more` is less than the stride: PyTorch's
    /// `output_padding`.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes or a larger padding; [`Error::ArenaFull`].
    #[track_caller]
    pub fn conv_transpose2d(&self, weight: &Self, config: ConvolutionConfig, more: [usize; 2]) -> Result<Self> {
        let plan = Plan::transposed([self.shape(), weight.shape()], config, more)?;
        let op = self.op("conv_transpose2d", &[self, weight])?;
        let y = plan.image_gradient(op.step(), self.value(), weight.value())?;
        let (x, weight) = (self.keep(), weight.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let (x, weight, step) = (x.var(back)?, weight.var(back)?, back.step());
            if x.wants_gradient() {
                let dx = plan.products(step, &dy, weight.value())?;
                back.add(&x, dx)?;
            }
            if weight.wants_gradient() {
                let dw = plan.weight_gradient(step, &dy, x.value())?;
                back.add(&weight, dw)?;
            }
            step.free(dy);
            Ok(())
        }))
    }
}

impl<S: Stored> Var<'_, S> {
    /// The largest element of each rectangle of an image; this variable:
    /// `[batch, channels, height, width]`. The rectangles do not overlap, and rows and columns past
    /// the last whole one are left out. Equal elements share the gradient; see [`Var::max`].
    ///
    /// # Errors
    /// [`Error::Misuse`] unless the image has a whole rectangle; [`Error::ArenaFull`].
    #[track_caller]
    pub fn max_pool2d(&self, rectangle: [usize; 2]) -> Result<Self> {
        self.rectangles("max_pool2d", rectangle)?.max([3, 5])
    }

    /// The mean of each rectangle of an image; see [`Var::max_pool2d`].
    #[track_caller]
    pub fn mean_pool2d(&self, rectangle: [usize; 2]) -> Result<Self> {
        self.rectangles("mean_pool2d", rectangle)?.mean([3, 5])
    }

    /// The rectangles, `[batch, channels, rows, height, columns, width]`.
    fn rectangles(&self, op: &'static str, [h, w]: [usize; 2]) -> Result<Self> {
        let [batch, channels, height, width] = *self.shape().extents() else {
            return Err(Error::misuse(op, "an image [batch, channels, height, width]", self.shape().to_string()));
        };
        if h == 0 || w == 0 || h > height || w > width {
            return Err(Error::misuse(op, format!("rectangles inside {}", self.shape()), format!("[{h}, {w}]")));
        }
        let (rows, columns) = (height / h, width / w);
        let mut whole = *self;
        if rows * h != height {
            whole = whole.narrow(2, 0..rows * h)?;
        }
        if columns * w != width {
            whole = whole.narrow(3, 0..columns * w)?;
        }
        whole.reshape([batch, channels, rows, h, columns, w])
    }
}
