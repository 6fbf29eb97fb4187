//! One set of bits: every kernel gives the emulator's bits on the GPU.
//!
//! Each [`CASES`] entry runs one op on seeded inputs. Invariant: together they launch every kernel that
//! `device/src/kernels` holds; which kernels those are is read from the sources, and which ones ran from the library's
//! own trace. The trials of the other modules compare devices too, over all their shapes; this is the short proof.

use crate::launches::launched;
use crate::math::{SPECIAL, sample};
use crate::support::{self, Random};
use crate::trial::canonical;
use kernels::guard::{guard_check, guard_write};
use kernels::matmul::{matmul_16x64, matmul_64x64, matmul_128x128};
use std::collections::BTreeSet;
use stepscope::ops::{self, Gemm};
use stepscope::{Arena, Capacity, Device, DeviceKind, Eager, Element, Result, Shape, Source, Target, Tensor};

/// The sources of all kernels, and the file that says which there are.
const LIBRARY: &str = include_str!("../../device/src/lib.rs");
const SOURCES: [(&str, &str); 12] = [
    ("activation", include_str!("../../device/src/kernels/activation.rs")),
    ("adamw", include_str!("../../device/src/kernels/adamw.rs")),
    ("attention", include_str!("../../device/src/kernels/attention.rs")),
    ("elementwise", include_str!("../../device/src/kernels/elementwise.rs")),
    ("fill", include_str!("../../device/src/kernels/fill.rs")),
    ("guard", include_str!("../../device/src/kernels/guard.rs")),
    ("loss", include_str!("../../device/src/kernels/loss.rs")),
    ("matmul", include_str!("../../device/src/kernels/matmul.rs")),
    ("norm", include_str!("../../device/src/kernels/norm.rs")),
    ("reduce", include_str!("../../device/src/kernels/reduce.rs")),
    ("softmax", include_str!("../../device/src/kernels/softmax.rs")),
    ("tokens", include_str!("../../device/src/kernels/tokens.rs")),
];

/// The names in `contract!` lines.
fn contracts(source: &str) -> Vec<String> {
    let name = |rest: &str| -> String {
        let start = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '{' || c == '(');
        start.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    source.split("contract!").skip(1).map(name).filter(|name| !name.is_empty()).collect()
}

pub(crate) type Case = for<'s> fn(&Inputs<'_, 's>) -> Result<()>;

/// Every op, by the name that a failure gives.
pub(crate) const CASES: [(&str, Case); 27] = [
    ("tanh", |i| i.keep(&ops::tanh(i.step, &i.dense(1)?)?)),
    ("tanh backward", |i| i.keep(&ops::tanh_backward(i.step, &i.dense(1)?, &i.dense(2)?)?)),
    ("gelu", |i| i.keep(&ops::gelu(i.step, &i.dense(1)?)?)),
    ("gelu backward", |i| i.keep(&ops::gelu_backward(i.step, &i.dense(1)?, &i.dense(2)?)?)),
    ("add", |i| i.keep(&ops::add(i.step, &i.dense(1)?, &i.dense(2)?)?)),
    ("add in place", |i| {
        let mut out = i.dense(1)?;
        ops::add_assign(i.step, &mut out, &i.dense(2)?)?;
        i.keep(&out)
    }),
    ("scale", |i| i.keep(&ops::scale(i.step, &i.dense(1)?, 0.1)?)),
    ("bias", |i| i.keep(&ops::add_bias(i.step, &i.normals([65, 193])?, &i.normals([193])?)?)),
    ("guard", |i| {
        let (mut block, mut found) = (i.step.upload(&[7u32; 200], [200])?, i.step.upload(&[0u32; 2], [2])?);
        i.step.launch(guard_write { block: block.out(), length: 200, start: 101 })?;
        for (place, start) in [(0, 101), (1, 100)] {
            i.step.launch(guard_check { block: block.slice(), start, place, found: found.out() })?;
        }
        i.keep(&block)?;
        i.keep(&found)
    }),
    ("fill", |i| i.keep(&ops::fill(i.step, [1025], 0.1)?)),
    ("copy", |i| i.keep(&ops::copy(i.step, &i.dense(1)?)?)),
    ("sum", |i| i.keep(&ops::sum(i.step, &i.normals([4096 * 70 + 3])?)?)),
    ("sum over columns", |i| i.rows(|i, x| i.keep(&ops::sum_columns(i.step, x)?))),
    ("sum over rows", |i| i.rows(|i, x| i.keep(&ops::sum_rows(i.step, x)?))),
    ("squared norm", |i| i.keep(&ops::squared_norm(i.step, &i.normals([4096 * 70 + 3])?)?)),
    ("max", |i| i.keep(&ops::max(i.step, &i.normals([4096 * 70 + 3])?)?)),
    ("max of rows", |i| i.rows(|i, x| i.keep(&ops::max_columns(i.step, x)?))),
    ("argmax of rows", |i| i.rows(|i, x| i.keep(&ops::argmax_columns(i.step, x)?))),
    ("softmax", |i| i.rows(|i, x| i.keep(&ops::softmax(i.step, x)?))),
    ("softmax backward", |i| i.rows(|i, x| i.keep(&ops::softmax_backward(i.step, x, &i.normals(x.shape())?)?))),
    ("rms norm", |i| i.rows(norm)),
    ("attention", attention),
    ("tokens", |i| {
        let y = ops::mean_tokens(i.step, &i.normals([33, 12, 67])?)?;
        i.keep(&y)?;
        i.keep(&ops::mean_tokens_backward(i.step, &y, [33, 12, 67])?)
    }),
    ("cross-entropy", |i| i.rows(cross_entropy)),
    ("adamw", adamw),
    ("matmul", matmul),
    ("linear with gelu", |i| {
        let (x, w, bias) = (i.normals([24, 193])?, i.normals([193, 256])?, i.normals([256])?);
        let (out, pre) = ops::linear_gelu(i.step, &x, &w, Some(&bias))?;
        i.keep(&out)?;
        i.keep(&pre)
    }),
];

fn norm<'s>(i: &Inputs<'_, 's>, x: &Tensor<'s>) -> Result<()> {
    let [rows, cols] = x.shape().as_rows();
    let (gain, dy, mut dgain) = (i.normals([cols])?, i.normals([rows, cols])?, i.normals([cols])?);
    let (y, scale) = ops::rms_norm(i.step, x, &gain, 1e-6)?;
    ops::rms_norm_gain_backward_into(i.step, x, &scale, &dy, &mut dgain)?;
    for tensor in [&y, &scale, &dgain, &ops::rms_norm_backward(i.step, x, &gain, &scale, &dy)?] {
        i.keep(tensor)?;
    }
    Ok(())
}

fn attention(i: &Inputs<'_, '_>) -> Result<()> {
    for shape in [[4, 12, 256], [3, 16, 128], [2, 1, 64]] {
        let (q, k, v, dout) = (i.normals(shape)?, i.normals(shape)?, i.normals(shape)?, i.normals(shape)?);
        let (out, probabilities) = ops::attention(i.step, &q, &k, &v, 0.125)?;
        i.keep(&out)?;
        i.keep(&probabilities)?;
        for gradient in ops::attention_backward(i.step, &q, &k, &v, &probabilities, &dout, 0.125)? {
            i.keep(&gradient)?;
        }
    }
    Ok(())
}

fn cross_entropy<'s>(i: &Inputs<'_, 's>, logits: &Tensor<'s>) -> Result<()> {
    let [rows, classes] = logits.shape().as_rows();
    let labels = Random::new(5).belows(rows, classes as u32 + 1);
    let labels = i.step.upload(&labels, [rows])?;
    let (losses, probabilities) = ops::cross_entropy(i.step, logits, &labels)?;
    i.keep(&losses)?;
    i.keep(&probabilities)?;
    let upstream = i.normals([1])?;
    i.keep(&ops::cross_entropy_backward(i.step, &probabilities, &labels, &upstream, 0.1)?)
}

fn adamw(i: &Inputs<'_, '_>) -> Result<()> {
    let length = 70_003;
    let (mut weights, gradients, mut first) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
    let mut second = i.step.upload(&Random::new(8).uniforms(length, 0.0, 2.0), [length])?;
    let hyper = i.step.upload(&[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.002, 1.0], [8])?;
    let norm = ops::squared_norm(i.step, &gradients)?;
    ops::adamw(i.step, &mut weights, &gradients, &mut first, &mut second, &hyper, &norm)?;
    [&weights, &first, &second].into_iter().try_for_each(|tensor| i.keep(tensor))
}

/// Each tile, which the op would choose by the device, on the same multiply.
fn matmul(i: &Inputs<'_, '_>) -> Result<()> {
    let form = Gemm::new(150, 193, 257);
    let (a, b, bias) = (i.normals([150, 257])?, i.normals([257, 193])?, i.normals([193])?);
    macro_rules! tile {
        ($kernel:ident) => {{
            let (mut out, mut pre) = (i.normals([150, 193])?, i.normals([150, 193])?);
            let (c, written) = out.in_place();
            i.step.launch($kernel {
                a: a.slice(),
                b: b.slice(),
                bias: bias.slice(),
                c,
                out: written,
                pre: pre.out(),
                m: form.m as u32,
                n: form.n as u32,
                k: form.k as u32,
                lda: form.lda as u32,
                ldb: form.ldb as u32,
                ldc: form.ldc as u32,
                batches: 1,
                stride_a: 0,
                stride_b: 0,
                stride_c: 0,
                stride_bias: 0,
                beta: 0.5,
                flags: kernels::matmul::GELU | kernels::matmul::KEEP,
            })?;
            i.keep(&out)?;
            i.keep(&pre)?;
        }};
    }
    tile!(matmul_16x64);
    tile!(matmul_64x64);
    tile!(matmul_128x128);
    Ok(())
}

/// Seeded inputs of one case, and what its op gave.
pub(crate) struct Inputs<'i, 's> {
    step: &'i Eager<'s>,
    random: std::cell::RefCell<Random>,
    results: std::cell::RefCell<Vec<Vec<u32>>>,
}

impl<'s> Inputs<'_, 's> {
    fn normals(&self, shape: impl Into<Shape>) -> Result<Tensor<'s>> {
        let shape = shape.into();
        self.step.upload(&self.random.borrow_mut().normals(shape.elements()), shape)
    }

    /// All magnitudes, and what is not a number.
    fn dense(&self, seed: u64) -> Result<Tensor<'s>> {
        let values = sample(seed, -12.5, 10.0);
        self.step.upload(&values, [values.len()])
    }

    /// The same op on rows of several lengths, some with special numbers.
    fn rows(&self, op: impl Fn(&Self, &Tensor<'s>) -> Result<()>) -> Result<()> {
        for [rows, cols] in [[300, 3], [65, 64], [12, 193], [129, 256], [4100, 5], [2, 20_001]] {
            let mut values = self.random.borrow_mut().normals(rows * cols);
            values[..SPECIAL.len()].copy_from_slice(&SPECIAL);
            op(self, &self.step.upload(&values, [rows, cols])?)?;
        }
        Ok(())
    }

    /// A result: its bits are compared.
    fn keep<T: Element>(&self, tensor: &Tensor<'s, T>) -> Result<()> {
        let values = self.step.read(tensor)?;
        self.results.borrow_mut().push(bytemuck::cast_slice(&values).to_vec());
        Ok(())
    }
}

pub(crate) fn run(device: &Device, case: Case) -> Vec<Vec<u32>> {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(64)).build().expect("an arena");
    let run = arena.step(|step| {
        let inputs = Inputs { step, random: Random::new(17).into(), results: Vec::new().into() };
        case(&inputs)?;
        Ok(inputs.results.into_inner())
    });
    run.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_kernel_has_a_case() {
    let modules: BTreeSet<&str> = LIBRARY
        .split_once("mod entries {")
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(entries, _)| entries.lines().filter_map(|line| line.trim().strip_prefix("pub mod ")?.strip_suffix(';')))
        .expect("device/src/lib.rs has a module `entries`")
        .collect();
    assert_eq!(modules, SOURCES.iter().map(|(module, _)| *module).collect(), "SOURCES holds every kernel file");
    let known: BTreeSet<String> = SOURCES.iter().flat_map(|(_, source)| contracts(source)).collect();
    let device = support::open(DeviceKind::Emulated);
    let ran = launched(|| CASES.iter().for_each(|(_, case)| drop(run(&device, *case))));
    assert_eq!(ran, known, "kernels that CASES launch, and kernels that exist");
}

#[test]
fn contracts_are_found_in_any_form() {
    assert_eq!(contracts("use crate::{contract};\ncontract! { add { block: 1 } |k| {}}"), ["add"]);
    assert_eq!(contracts("contract!(\n    tile_1x2 { block: 1 } | p | {}\n);\ncontract!(b{"), ["tile_1x2", "b"]);
}

#[cfg(feature = "cuda")]
mod on_the_emulator_and_the_gpu {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda() {
        let [emulated, gpu] = [DeviceKind::Emulated, DeviceKind::Cuda].map(support::open);
        let differences: Vec<String> = CASES
            .iter()
            .filter_map(|(name, case)| difference(name, &run(&emulated, *case), &run(&gpu, *case)))
            .collect();
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    }
}

/// Where the bits of two devices differ, NaNs aside.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "there is no second device"))]
fn difference(name: &str, emulated: &[Vec<u32>], gpu: &[Vec<u32>]) -> Option<String> {
    assert_eq!(emulated.len(), gpu.len());
    emulated.iter().zip(gpu).enumerate().find_map(|(result, (emulated, gpu))| {
        assert_eq!(emulated.len(), gpu.len());
        let word = |word: u32| canonical(f32::from_bits(word));
        let at = emulated.iter().zip(gpu).position(|(&a, &b)| word(a) != word(b))?;
        let count = emulated.iter().zip(gpu).filter(|&(&a, &b)| word(a) != word(b)).count();
        let (a, b) = (emulated[at], gpu[at]);
        let place = format!("{name}, result {result}: element {at}");
        Some(format!("{place} is {a:#010x} emulated and {b:#010x} on the GPU; {count} of {} differ", gpu.len()))
    })
}

#[test]
fn a_difference_is_named() {
    let nan = [0x7fc0_0000, 0xffc0_0001];
    assert_eq!(difference("op", &[vec![1, 2], vec![3, nan[0]]], &[vec![1, 2], vec![3, nan[1]]]), None);
    let told = difference("op", &[vec![1, 2], vec![3, 4, 5]], &[vec![1, 2], vec![3, 5, 6]]).expect("it differs");
    assert_eq!(told, "op, result 1: element 1 is 0x00000004 emulated and 0x00000005 on the GPU; 2 of 3 differ");
}
