//! Convolutions of images, their transposes, and pooling.
//!
//! A convolution is one product: its weight times the *windows* of its input. The windows are rows
//! that overlap: for each place of a line there are the elements of one column of the kernel, of
//! all channels, and a window begins a stride after the window before it. So an element is stored
//! once for each row of the kernel, not also for each column. Windows that reach into the next line
//! are multiplied too, and their products are left out.
//!
//! ```text
//! windows [groups, batch oh columns, kw kh in]   row r begins at r stride kh in
//! weight [groups, out, kw kh in] x windows^T = [groups, out, batch oh columns]
//! ```
//! The input's gradient is a convolution too: of the result's gradient, with zeros between its
//! elements where the stride leaves places out, with the flipped weight. A transposed convolution
//! is that function.
//!
//! Invariant: an element is one chain of fused multiply-adds over the kernel's columns, its rows
//! and the channels, ascending, as [`matmul`](super::matmul()) documents. That of a weight's
//! gradient is such a chain for each piece, and the pieces are added in ascending order.

use super::Activation;
use super::cast::narrowed;
use super::matmul::{Gemm, gemm_into};
use super::pieces::{part, pieces};
use super::transpose::{permuted, transpose};
use super::views::{Places, among_zeros, copy, taken};
use crate::elementary::fill_into;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tape::Var;
use crate::tensor::{Saved, Shape, Source, Stored, Tensor};
use std::ops::Range;

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

    fn weight(&self) -> [usize; 4] {
        [self.channels[1], self.channels[0] / self.config.groups, self.kernel[0], self.kernel[1]]
    }

    /// Returns the windows in an image, between zeros.
    fn grid(&self) -> Grid {
        let ConvolutionConfig { stride, padding, .. } = self.config;
        let [h, w] = [0, 1].map(|at| self.image[at] + 2 * padding[at]);
        // The windows of a line are a stride apart, so a line has whole strides.
        let extents = [h, w.next_multiple_of(stride[1])];
        Grid { image: self.image, extents, first: padding, apart: [1; 2], places: self.places, stride }
    }

    /// Returns the windows in the gradient of the result: its elements a stride apart, among as
    /// many zeros as a window overlaps.
    fn gradient_grid(&self) -> Grid {
        let ConvolutionConfig { stride, padding, dilation, .. } = self.config;
        let reach = [0, 1].map(|at| dilation[at] * (self.kernel[at] - 1));
        let [extents, first] = [[0, 1].map(|at| self.image[at] + reach[at]), [0, 1].map(|at| reach[at] - padding[at])];
        Grid { image: self.places, extents, first, apart: stride, places: self.image, stride: [1; 2] }
    }

    /// Returns the convolution of images with a weight.
    fn products<'s, S: Activation>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        weight: &impl Source<'s, S>,
    ) -> Result<Tensor<'s, S>> {
        let weight = permuted(step, &Saved::new(weight.memory(), self.weight().into()), &[0, 3, 2, 1])?;
        self.convolved(step, x, self.grid(), weight, self.channels)
    }

    /// Returns the gradient of images.
    fn image_gradient<'s, S: Activation>(
        &self,
        step: &Step<'s>,
        dy: &impl Source<'s, S>,
        weight: &impl Source<'s, S>,
    ) -> Result<Tensor<'s, S>> {
        // [groups, in, kw, kh, out], with the kernel flipped.
        let groups = self.config.groups;
        let ([own, out], [kh, kw]) = (self.channels.map(|channels| channels / groups), self.kernel);
        let [to_group, to_own, to_row, to_out] =
            [out * own * kh * kw, kh * kw, kw, own * kh * kw].map(|stride| stride as isize);
        let flipped = Places { start: kh * kw - 1, strides: vec![to_group, to_own, -1, -to_row, to_out] };
        let weight = taken(step, [groups, own, kw, kh, out].into(), weight, &flipped)?;
        let [own, out] = self.channels;
        self.convolved(step, dy, self.gradient_grid(), weight, [out, own])
    }

    /// Returns the products of a weight `[groups, to / groups, kw kh from / groups]` with windows,
    /// `[batch, to, height, width]`; `x`: `[batch, from, ..]`. Frees the weight.
    fn convolved<'s, S: Activation>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        grid: Grid,
        weight: Tensor<'s, S>,
        [from, to]: [usize; 2],
    ) -> Result<Tensor<'s, S>> {
        let mut y = step.empty([self.batch, to, grid.places[0], grid.places[1]])?;
        if weight.shape().elements() == 0 {
            fill_into(step, &mut y, 0.0)?;
            return Ok(y);
        }
        for images in self.pieces::<S>(grid, from) {
            let first = images.start;
            self.windows(step, x, grid, from, images)?.times(step, &weight, &mut y, first)?;
        }
        step.free(weight);
        Ok(y)
    }

    /// Returns the gradient of the weight. The sums over pieces of the batch are added in f32.
    fn weight_gradient<'s, S: Activation>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        dy: &impl Source<'s, S>,
    ) -> Result<Tensor<'s, S>> {
        let [out, own, kh, kw] = self.weight();
        let mut dw = step.empty([out, kw, kh, own])?;
        if self.result().elements() == 0 || dw.shape().elements() == 0 {
            fill_into(step, &mut dw, 0.0)?;
        } else {
            for images in self.pieces::<S>(self.grid(), self.channels[0]) {
                let first = images.start;
                self.windows(step, x, self.grid(), self.channels[0], images)?.gradient(step, dy, first, &mut dw)?;
            }
        }
        let turned = permuted(step, &dw, &[0, 3, 2, 1])?;
        step.free(dw);
        narrowed(step, turned)
    }

    /// True if windows share the elements of their columns, which dilated ones cannot.
    fn overlap(&self) -> bool {
        self.kernel[1] == 1 || self.config.dilation[1] == 1
    }

    /// Returns ranges of the batch whose windows exist at a time.
    fn pieces<S>(&self, grid: Grid, channels: usize) -> impl Iterator<Item = Range<usize>> + use<S> {
        let columns = if self.overlap() { grid.extents[1] } else { grid.places[1].saturating_mul(self.kernel[1]) };
        let factors = [grid.places[0], self.kernel[0], channels, size_of::<S>()];
        let bytes = factors.into_iter().fold(columns, usize::saturating_mul);
        pieces(self.batch, bytes, &[channels * grid.image[0] * grid.image[1]])
    }

    /// Returns the windows in these images of `[batch, channels, height, width]`.
    fn windows<'s, S: Activation>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        grid: Grid,
        channels: usize,
        images: Range<usize>,
    ) -> Result<Windows<'s, S>> {
        let (groups, [kh, kw], [dh, dw]) = (self.config.groups, self.kernel, self.config.dilation);
        let batch = images.len();
        let image = grid.spread(step, &part(x, &images))?;
        let ([h, w], [along, across], width) = (grid.places, grid.stride, grid.extents[1]);
        let own = channels / groups;
        // The windows of a line, and the columns from a window to the next.
        let (columns, apart) = if self.overlap() { (width / across, across) } else { (w, kw) };
        let (inner, ld) = (kw * kh * own, apart * kh * own);
        let made = |values| Windows { values, groups, batch, places: [h, w], columns, inner, ld };
        if self.overlap() && [groups, kh, along] == [1; 3] {
            return Ok(made(image));
        }
        let strides = Places::of(image.shape()).strides;
        let by = |stride: isize, count: usize| stride * count as isize;
        let (to_line, to_row) = (by(strides[1], along), by(strides[1], dh));
        let (shape, strides, copies) = if self.overlap() {
            let strides = [own as isize, strides[0], to_line, strides[2], to_row, 1];
            (Shape::from([groups, batch, h, width, kh, own]), strides, 1)
        } else {
            let strides = [strides[0], to_line, by(strides[2], across), by(strides[2], dw), to_row, 1];
            (Shape::from([batch, h, w, kw, kh, own]), strides, groups)
        };
        let mut values = step.empty([copies, shape.elements()])?;
        for group in 0..copies {
            let from = Places { start: group * own, strides: strides.to_vec() };
            let to = Places { start: group * shape.elements(), ..Places::of(shape) };
            copy(step, shape, (&image, &from), (&mut values, &to))?;
        }
        step.free(image);
        Ok(made(values))
    }
}

/// Images between zeros, and the windows in them, along height and width.
#[derive(Clone, Copy, Debug)]
struct Grid {
    /// The extents without the zeros, and with them.
    image: [usize; 2],
    extents: [usize; 2],
    /// The place of the first element.
    first: [usize; 2],
    /// The distance between elements.
    apart: [usize; 2],
    /// The number of windows.
    places: [usize; 2],
    /// The distance between windows.
    stride: [usize; 2],
}

impl Grid {
    /// Returns images `[batch, channels, ..]` between zeros, `[batch, height, width, channels]`.
    fn spread<'s, S: Stored>(&self, step: &Step<'s>, x: &Saved<'s, S>) -> Result<Tensor<'s, S>> {
        let [batch, channels, h, w] = *x.shape().extents() else { unreachable!("images have four extents") };
        let last = transpose(step, &x.reshape([batch, channels, h * w])?)?.reshape([batch, h, w, channels])?;
        if [h, w] == self.extents && self.apart == [1; 2] {
            return Ok(last);
        }
        let to = Shape::from([batch, self.extents[0], self.extents[1], channels]);
        let mut places = Places::of(to).from(1, self.first[0]).from(2, self.first[1]);
        places.strides[1] *= self.apart[0] as isize;
        places.strides[2] *= self.apart[1] as isize;
        let spread = among_zeros(step, &last, to, &places)?;
        step.free(last);
        Ok(spread)
    }
}

/// The windows of some images: rows of one tensor, which may overlap.
#[derive(Debug)]
struct Windows<'s, S: Stored> {
    values: Tensor<'s, S>,
    groups: usize,
    batch: usize,
    /// The windows along the height and the width.
    places: [usize; 2],
    /// The rows of a line: its windows, and those that reach into the next line.
    columns: usize,
    /// The elements of a window.
    inner: usize,
    /// The elements from a window to the next.
    ld: usize,
}

impl<'s, S: Activation> Windows<'s, S> {
    /// Writes weights `[channels, inner]` times the windows to `y`,
    /// `[all images, channels, height, width]`, from image `first` on. Frees the windows.
    fn times(self, step: &Step<'s>, weight: &Tensor<'s, S>, y: &mut Tensor<'s, S>, first: usize) -> Result<()> {
        let channels = y.shape().extents()[1];
        let mut products = step.empty([channels, self.batch, self.places[0], self.columns])?;
        if products.shape().elements() > 0 {
            let (m, all) = (channels / self.groups, self.lines());
            let (n, k) = (self.rows(), self.inner);
            let form = Gemm { m, n, k, lda: k, ldc: all, transpose_b: true, ..self.form() };
            let form = Gemm { stride_a: m * k, stride_c: m * all, ..form };
            gemm_into(step, &form, weight, &self.values, None::<&Tensor<'s>>, &mut products)?;
        }
        step.free(self.values);
        let mut from = Places::of(products.shape());
        from.strides.swap(0, 1);
        let to = Places::of(y.shape()).from(0, first);
        copy(step, y.shape().with(0, self.batch), (&products, &from), (y, &to))?;
        step.free(products);
        Ok(())
    }

    /// Writes the gradient of the weights to `dw`, `[channels, inner]`, or adds it unless `first`
    /// is 0; `dy`: `[all images, channels, height, width]`, read from image `first` on. Frees the
    /// windows.
    fn gradient(self, step: &Step<'s>, dy: &impl Source<'s, S>, first: usize, dw: &mut Tensor<'s>) -> Result<()> {
        let ([h, w], channels) = (self.places, dy.shape().extents()[1]);
        // Rows that are no windows count as zero.
        let mut turned = step.empty([channels, self.batch, h, self.columns])?;
        if self.columns != w {
            fill_into(step, &mut turned, 0.0)?;
        }
        let mut from = Places::of(dy.shape()).from(0, first);
        from.strides.swap(0, 1);
        let to = Places::of(turned.shape());
        copy(step, [channels, self.batch, h, w].into(), (dy, &from), (&mut turned, &to))?;
        let (m, all) = (channels / self.groups, self.lines());
        let (n, k) = (self.inner, self.rows());
        let form = Gemm { m, n, k, lda: all, ldc: n, stride_a: m * all, stride_c: m * n, ..self.form() };
        let form = if first == 0 { form } else { form.accumulate() };
        gemm_into(step, &form, &turned, &self.values, None::<&Tensor<'s>>, dw)?;
        step.free(turned);
        step.free(self.values);
        Ok(())
    }

    /// Returns the common part of products with the windows.
    fn form(&self) -> Gemm {
        let stride_b = self.values.shape().elements() / self.groups;
        Gemm { ldb: self.ld, batches: self.groups, stride_b, ..Gemm::default() }
    }

    /// Returns the number of rows of all lines.
    fn lines(&self) -> usize {
        self.batch * self.places[0] * self.columns
    }

    /// Returns the number of rows up to the last window.
    fn rows(&self) -> usize {
        self.lines() - (self.columns - self.places[1])
    }
}

impl<'s, S: Activation> Var<'s, S> {
    /// The convolution (a cross-correlation, as in PyTorch) with a weight
    /// `[out, in / groups, kh, kw]`; this variable: `[batch, in, height, width]`, result:
    /// `[batch, out, (height + 2 padding - dilation (kh - 1) - 1) / stride + 1, ..]`. Where an
    /// element of the input is not finite, more elements of the weight's gradient may be NaN than
    /// in PyTorch.
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
