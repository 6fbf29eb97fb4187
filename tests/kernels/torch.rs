//! The table "Functions of torch" in `docs/from-pytorch.md`: each function that it lists is written
//! here with ops of variables, as the table says, and runs. Functions of each element are compared
//! with their formulas.

use crate::algebra::unused;
use crate::support::{Random, on_each_device};
use std::collections::BTreeSet;
use std::f32::consts::{LN_2, LN_10};
use stepscope::ops;
use stepscope::{Arena, Capacity, Result, Tape, Var};

/// A function of x and y, `[4, 6]`, of numbers between 0 and 1.
type Written = for<'t, 's> fn(&Tape<'t, 's>, &Var<'s>, &Var<'s>) -> Result<Var<'s>>;

/// A function of an element of each, in float64.
type Formula = fn(f64, f64) -> f64;

/// Functions of each element.
const POINTWISE: &[(&str, Written, Formula)] = &[
    ("abs", |_, x, _| x.abs(), |x, _| x),
    ("exp", |_, x, _| x.exp(), |x, _| x.exp()),
    ("log", |_, x, _| x.log(), |x, _| x.ln()),
    ("log1p", |_, x, _| x.log1p(), |x, _| x.ln_1p()),
    ("sqrt", |_, x, _| x.sqrt(), |x, _| x.sqrt()),
    ("rsqrt", |_, x, _| x.rsqrt(), |x, _| 1.0 / x.sqrt()),
    ("square", |_, x, _| x.square(), |x, _| x * x),
    ("sin", |_, x, _| x.sin(), |x, _| x.sin()),
    ("cos", |_, x, _| x.cos(), |x, _| x.cos()),
    ("erf", |_, x, _| x.erf(), |x, _| libm::erf(x)),
    ("div", |_, x, y| x / y, |x, y| x / y),
    ("pow", |_, x, y| x.pow(y), |x, y| x.powf(y)),
    ("minimum", |_, x, y| x.minimum(y), f64::min),
    ("maximum", |_, x, y| x.maximum(y), f64::max),
    ("add", |_, x, y| x + y, |x, y| x + y),
    ("sub", |_, x, y| x - y, |x, y| x - y),
    ("mul", |_, x, y| x * y, |x, y| x * y),
    ("neg", |_, x, _| -x, |x, _| -x),
    ("reciprocal", |_, x, _| 1.0 / x, |x, _| 1.0 / x),
    ("tanh", |_, x, _| x.tanh(), |x, _| x.tanh()),
    ("sigmoid", |_, x, _| x.sigmoid(), |x, _| 1.0 / (1.0 + (-x).exp())),
    ("relu", |_, x, y| (x - y)?.relu(), |x, y| (x - y).max(0.0)),
    ("silu", |_, x, _| x.silu(), |x, _| x / (1.0 + (-x).exp())),
    ("gelu", |_, x, _| x.gelu_exact(), |x, _| x * 0.5 * (1.0 + libm::erf(x / 2f64.sqrt()))),
    ("softplus", |_, x, _| x.softplus(), |x, _| x.exp().ln_1p()),
    ("clamp", |_, x, _| x.clamp(0.25, 0.5), |x, _| x.clamp(0.25, 0.5)),
    ("eq", |_, x, _| x.equal(x), |_, _| 1.0),
    ("ne", |_, x, _| x.not_equal(x), |_, _| 0.0),
    ("lt", |_, x, y| x.less(y), |x, y| f64::from(x < y)),
    ("le", |_, x, y| x.less_or_equal(y), |x, y| f64::from(x <= y)),
    ("gt", |_, x, y| x.greater(y), |x, y| f64::from(x > y)),
    ("ge", |_, x, y| x.greater_or_equal(y), |x, y| f64::from(x >= y)),
    ("where", |_, x, y| x.less(0.5)?.choose(x, y), |x, y| if x < 0.5 { x } else { y }),
    ("masked_fill", |_, x, y| x.less(y)?.choose(0.25, x), |x, y| if x < y { 0.25 } else { x }),
    ("exp2", |_, x, _| (x * LN_2)?.exp(), |x, _| x.exp2()),
    ("log2", |_, x, _| x.log()? / LN_2, |x, _| x.log2()),
    ("log10", |_, x, _| x.log()? / LN_10, |x, _| x.log10()),
    ("tan", |_, x, _| x.sin()? / x.cos()?, |x, _| x.tan()),
    ("sinh", |_, x, _| (x.exp()? - (-x)?.exp()?)? * 0.5, |x, _| x.sinh()),
    ("cosh", |_, x, _| (x.exp()? + (-x)?.exp()?)? * 0.5, |x, _| x.cosh()),
    ("logit", |_, x, _| (x / (1.0 - x)?)?.log(), |x, _| (x / (1.0 - x)).ln()),
    (
        "sign",
        |_, x, y| {
            let d = (x - y)?;
            d.greater(0.0)? - d.less(0.0)?
        },
        |x, y| (x - y).signum(),
    ),
    ("lerp", |_, x, y| x + ((y - x)? * 0.25)?, |x, y| x + 0.25 * (y - x)),
    ("addcmul", |_, x, y| x + ((x * y)? * 0.5)?, |x, y| x + 0.5 * x * y),
    ("addcdiv", |_, x, y| x + ((x / y)? * 0.5)?, |x, y| x + 0.5 * x / y),
    ("hypot", |_, x, y| (x.square()? + y.square()?)?.sqrt(), f64::hypot),
    ("logaddexp", |_, x, y| x.maximum(y)? + (-(x - y)?.abs()?)?.softplus()?, |x, y| (x.exp() + y.exp()).ln()),
    ("isnan", |_, x, _| x.not_equal(x), |_, _| 0.0),
    ("isinf", |_, x, _| x.abs()?.equal(f32::INFINITY), |_, _| 0.0),
    ("isfinite", |_, x, _| x.abs()?.less(f32::INFINITY), |_, _| 1.0),
    ("nan_to_num", |_, x, _| x.equal(x)?.choose(x, 0.0), |x, _| x),
    ("logical_and", |_, x, y| x.less(0.5)? * y.less(0.5)?, |x, y| f64::from(x < 0.5 && y < 0.5)),
    ("logical_or", |_, x, y| x.less(0.5)?.maximum(y.less(0.5)?), |x, y| f64::from(x < 0.5 || y < 0.5)),
    ("logical_not", |_, x, _| 1.0 - x.less(0.5)?, |x, _| f64::from(x >= 0.5)),
    (
        "leaky_relu",
        |_, x, y| {
            let d = (x - y)?;
            d.maximum((d * 0.01)?)
        },
        |x, y| (x - y).max(0.01 * (x - y)),
    ),
    (
        "elu",
        |_, x, y| {
            let d = (x - y)?;
            d.greater(0.0)?.choose(d, (d.exp()? - 1.0)?)
        },
        |x, y| {
            if x > y { x - y } else { (x - y).exp() - 1.0 }
        },
    ),
    ("relu6", |_, x, _| (x * 9.0)?.clamp(0.0, 6.0), |x, _| (9.0 * x).min(6.0)),
    ("hardtanh", |_, x, _| (x * 2.0)?.clamp(-1.0, 1.0), |x, _| (2.0 * x).min(1.0)),
    ("hardsigmoid", |_, x, _| ((x / 6.0)? + 0.5)?.clamp(0.0, 1.0), |x, _| x / 6.0 + 0.5),
    ("hardswish", |_, x, _| x * ((x / 6.0)? + 0.5)?.clamp(0.0, 1.0)?, |x, _| x * (x / 6.0 + 0.5)),
    ("mish", |_, x, _| x * x.softplus()?.tanh()?, |x, _| x * x.exp().ln_1p().tanh()),
    ("softsign", |_, x, _| x / (x.abs()? + 1.0)?, |x, _| x / (1.0 + x)),
    ("logsigmoid", |_, x, _| (-x)?.softplus()? * -1.0, |x, _| -(-x).exp().ln_1p()),
    ("tanhshrink", |_, x, _| x - x.tanh()?, |x, _| x - x.tanh()),
    ("threshold", |_, x, _| x.greater(0.5)?.choose(x, 0.25), |x, _| if x > 0.5 { x } else { 0.25 }),
];

/// Other functions.
const OTHERS: &[(&str, Written)] = &[
    ("softmax", |_, x, _| x.softmax()),
    ("log_softmax", |_, x, _| x.log_softmax()),
    ("softmin", |_, x, _| (-x)?.softmax()),
    ("glu", |_, x, _| {
        let [a, b] = x.chunks::<2>(-1)?;
        a * b.sigmoid()?
    }),
    ("sum", |_, x, _| x.sum(0)),
    ("mean", |_, x, _| x.mean([0, 1])),
    ("var", |_, x, _| x.variance(1, 1)),
    ("std", |_, x, _| x.variance(1, 1)?.sqrt()),
    ("norm", |_, x, _| x.square()?.sum(..)?.sqrt()),
    ("logsumexp", |_, x, _| x.logsumexp(-1)),
    ("amax", |_, x, _| x.max(-1)),
    ("amin", |_, x, _| x.min(-1)),
    ("all", |_, x, y| x.less(y)?.min(..)),
    ("any", |_, x, y| x.less(y)?.max(..)),
    ("count_nonzero", |_, x, _| x.not_equal(0.0)?.sum(..)),
    ("argmax", |_, x, _| x.gather(-1, &x.argmax(-1)?.reshape([4, 1])?)),
    ("argmin", |_, x, _| x.gather(-1, &x.argmin(-1)?.reshape([4, 1])?)),
    ("topk", |_, x, _| Ok(x.top_k(2)?.0)),
    ("cumsum", |_, x, _| x.cumulative_sum(-1)),
    ("matmul", |_, x, y| x.matmul(&y.transpose(0, 1)?)),
    ("mm", |_, x, y| x.matmul_with(y, [false, true])),
    ("bmm", |_, x, y| x.unsqueeze(0)?.matmul_with(&y.unsqueeze(0)?, [false, true])),
    ("addmm", |_, x, y| x.matmul_with(y, [false, true])? + 1.0),
    ("einsum", |_, x, y| x.einsum("ij,kj->ik", y)),
    ("tensordot", |_, x, y| x.einsum("ij,ij->", y)),
    ("dot", |_, x, y| (x * y)?.sum(..)),
    ("outer", |_, x, y| x.unsqueeze(-1)? * y.unsqueeze(-2)?),
    ("mv", |_, x, y| x.matmul(&y.narrow(0, 0..1)?.transpose(0, 1)?)?.squeeze(-1)),
    ("reshape", |_, x, _| x.reshape([2, 12])),
    ("view", |_, x, _| x.reshape([24])),
    ("flatten", |_, x, _| x.reshape([24])),
    ("squeeze", |_, x, _| x.unsqueeze(0)?.squeeze(0)),
    ("unsqueeze", |_, x, _| x.unsqueeze(1)),
    ("permute", |_, x, _| x.permute([1, 0])),
    ("movedim", |_, x, _| x.permute([1, 0])),
    ("transpose", |_, x, _| x.transpose(0, 1)),
    ("expand", |_, x, _| x.broadcast_to([3, 4, 6])),
    ("repeat", |_, x, _| x.broadcast_to([3, 4, 6])?.reshape([12, 6])),
    ("repeat_interleave", |_, x, _| x.unsqueeze(1)?.broadcast_to([4, 3, 6])?.reshape([12, 6])),
    ("flip", |_, x, _| x.flip([0, 1])),
    ("roll", |_, x, _| Var::cat(&[x.narrow(0, 3..4)?, x.narrow(0, 0..3)?], 0)),
    ("narrow", |_, x, _| x.narrow(1, 2..5)),
    ("select", |_, x, _| x.narrow(0, 2..3)?.squeeze(0)),
    ("split", |_, x, _| Ok(x.split(0, 3)?[1])),
    ("chunk", |_, x, _| Ok(x.chunks::<2>(1)?[1])),
    ("unbind", |_, x, _| Ok(x.unbind(0)?[1])),
    ("cat", |_, x, y| Var::cat(&[*x, *y], 0)),
    ("stack", |_, x, y| Var::stack(&[*x, *y], 0)),
    ("pad", |_, x, _| x.pad(1, [1, 2], 0.0)),
    ("gather", |_, x, y| x.gather(0, &y.argmax(0)?.reshape([1, 6])?)),
    ("index_select", |_, x, y| x.gather(0, &y.argmax(0)?)),
    ("take_along_dim", |_, x, y| x.gather(0, &y.argmax(0)?.reshape([1, 6])?)),
    ("scatter_add", |_, x, y| x.scatter_add(0, &y.argmax(0)?.reshape([1, 6])?, &y.narrow(0, 0..1)?)),
    ("index_add", |_, x, y| x.scatter_add(1, &y.argmax(1)?, &y.narrow(1, 0..4)?)),
    ("one_hot", |tape, _, y| Ok(tape.input(ops::one_hot::<f32>(tape.step(), &y.argmax(1)?, 6)?))),
    ("zeros", |tape, _, _| Ok(tape.input(ops::fill(tape.step(), [4, 6], 0.0)?))),
    ("ones", |tape, _, _| Ok(tape.input(ops::fill(tape.step(), [4, 6], 1.0)?))),
    ("full", |tape, _, _| Ok(tape.input(ops::fill(tape.step(), [4, 6], 0.5)?))),
    ("arange", |tape, _, _| tape.input(ops::fill(tape.step(), [6], 1.0)?).cumulative_sum(0)? - 1.0),
    ("l1_loss", |_, x, y| (x - y)?.abs()?.mean(..)),
    ("mse_loss", |_, x, y| (x - y)?.square()?.mean(..)),
    ("huber_loss", |_, x, y| {
        let d = (x - y)?.abs()?;
        d.less(0.5)?.choose((d.square()? * 0.5)?, ((d - 0.25)? * 0.5)?)?.mean(..)
    }),
    ("smooth_l1_loss", |_, x, y| {
        let d = (x - y)?.abs()?;
        d.less(1.0)?.choose((d.square()? * 0.5)?, (d - 0.5)?)?.mean(..)
    }),
    ("kl_div", |_, x, y| (y * (y.log()? - x)?)?.mean(..)),
    ("nll_loss", |_, x, y| x.gather(1, &y.argmax(1)?.reshape([4, 1])?)?.mean(..)? * -1.0),
    ("binary_cross_entropy", |_, x, y| ((y * x.log()?)? + ((1.0 - y)? * (1.0 - x)?.log()?)?)?.mean(..)? * -1.0),
    ("normalize", |_, x, _| x / x.square()?.sum_keep(-1)?.sqrt()?),
    ("cosine_similarity", |_, x, y| {
        let [of_x, of_y] = [x.square()?.sum(-1)?, y.square()?.sum(-1)?];
        (x * y)?.sum(-1)? / (of_x * of_y)?.sqrt()?
    }),
    ("pairwise_distance", |_, x, y| (x - y)?.square()?.sum(-1)?.sqrt()),
    ("cdist", |_, x, y| (x.unsqueeze(1)? - y.unsqueeze(0)?)?.square()?.sum(-1)?.sqrt()),
    ("scaled_dot_product_attention", |_, x, y| (x * (1.0 / 6f32.sqrt()))?.attend(y, y)),
    ("batch_norm", |_, x, _| (x - x.mean_keep(0)?)? * (x.variance(0, 0)?.unsqueeze(0)? + 1e-5)?.rsqrt()?),
    ("conv1d", |_, x, _| {
        x.unsqueeze(1)?.unsqueeze(2)?.conv2d(&x.reshape([8, 1, 1, 3])?, ops::ConvolutionConfig::default())?.squeeze(2)
    }),
    ("conv2d", |_, x, y| x.reshape([1, 1, 4, 6])?.conv2d(&y.reshape([4, 1, 2, 3])?, ops::ConvolutionConfig::default())),
    ("conv_transpose2d", |_, x, y| {
        x.reshape([1, 1, 4, 6])?.conv_transpose2d(&y.reshape([1, 4, 2, 3])?, ops::ConvolutionConfig::default(), [0, 0])
    }),
    ("max_pool2d", |_, x, _| x.reshape([1, 1, 4, 6])?.max_pool2d([2, 2])),
    ("avg_pool2d", |_, x, _| x.reshape([1, 1, 4, 6])?.mean_pool2d([2, 2])),
    ("adaptive_avg_pool2d", |_, x, _| x.reshape([1, 1, 4, 6])?.mean([2, 3])),
    ("pixel_shuffle", |_, x, _| x.reshape([1, 2, 2, 2, 3])?.permute([0, 3, 1, 4, 2])?.reshape([1, 1, 4, 6])),
];

/// The functions in the table's first column, other than those that it says are missing. They stand
/// in the page as code, perhaps with arguments.
fn listed() -> BTreeSet<String> {
    let page = include_str!("../../docs/from-pytorch.md");
    let (_, table) = page.split_once("## Functions of torch").expect("the section");
    let (table, _) = table.split_once("\n## ").expect("a section after it");
    let rows = table.lines().filter(|line| line.starts_with("| `") && !line.contains("| no |"));
    let columns = rows.filter_map(|row| row.split('|').nth(1));
    let spans = columns.flat_map(|column| column.split('`').skip(1).step_by(2));
    spans.map(|span| span.split('(').next().unwrap().trim_start_matches("F.").to_owned()).collect()
}

#[test]
fn table_lists_what_runs() {
    let written = POINTWISE.iter().map(|&(name, ..)| name).chain(OTHERS.iter().map(|&(name, _)| name));
    let written: BTreeSet<String> = written.map(str::to_owned).collect();
    let layers = [
        "linear",
        "embedding",
        "dropout",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "cross_entropy",
        "binary_cross_entropy_with_logits",
    ];
    let all: BTreeSet<String> = written.into_iter().chain(layers.map(str::to_owned)).collect();
    let listed = listed();
    assert_eq!(all.difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new(), "not in the page");
    assert_eq!(listed.difference(&all).collect::<Vec<_>>(), Vec::<&String>::new(), "not in the test");
}

on_each_device! {
    fn functions_of_torch_run(device: &Device) {
        let parameters = unused(device);
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
        let mut random = Random::new(3);
        let [of_x, of_y] = [(); 2].map(|()| random.uniforms(24, 0.1, 0.9));
        arena.step(|step| {
            let tape = Tape::new(step, &parameters);
            let [x, y] = [&of_x, &of_y].map(|values| step.upload(values, [4, 6]).map(|values| tape.input(values)));
            let (x, y) = (x?, y?);
            for (name, op, want) in POINTWISE {
                let got = step.read(op(&tape, &x, &y)?.value())?;
                for ((got, &x), &y) in got.iter().zip(&of_x).zip(&of_y) {
                    let (got, want) = (f64::from(*got), want(x.into(), y.into()));
                    assert!((got - want).abs() <= 1e-6 * (1.0 + want.abs()), "{name} of {x} and {y}: {got}, not {want}");
                }
            }
            for (name, op) in OTHERS {
                let got = step.read(op(&tape, &x, &y)?.value())?;
                assert!(!got.is_empty() && got.iter().all(|value| value.is_finite()), "{name}: {got:?}");
            }
            Ok(())
        }).unwrap();
    }
}
