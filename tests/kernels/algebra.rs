//! The ops that are called on variables, with broadcasting: values and gradients against float64,
//! special numbers, frozen and constant operands, and errors. The kernels' own tests are in
//! `declared.rs` and `fold.rs`.

use crate::gradients::{Case, ParameterValues, Roundings, leaf_as, stored_as_each};
use crate::support::{Random, on_each_device};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::ops::{Cast, Extents, GemmElement, pointwise};
use stepscope::parameters::Initializer;
use stepscope::tensor::Shape;
use stepscope::{Arena, Capacity, Device, EagerStep, ParameterSpec, Parameters, Result, Tape, Var};

/// An array in float64.
#[derive(Clone, Debug)]
struct Array {
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl Array {
    fn new(shape: &[usize], values: &[f64]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        Self { shape: shape.to_vec(), values: values.to_vec() }
    }

    /// Returns the indices of each element, row by row.
    fn places(shape: &[usize]) -> Vec<Vec<usize>> {
        shape.iter().fold(vec![Vec::new()], |places, &extent| {
            let longer = |place: &Vec<usize>, at| place.iter().copied().chain([at]).collect();
            places.iter().flat_map(|place| (0..extent).map(move |at| longer(place, at))).collect()
        })
    }

    /// Returns the element at a place of a shape to which the array broadcasts.
    fn at(&self, place: &[usize]) -> f64 {
        let place = &place[place.len() - self.shape.len()..];
        let index = place.iter().zip(&self.shape).fold(0, |index, (&at, &extent)| index * extent + at.min(extent - 1));
        self.values[index]
    }

    fn zip<const N: usize>(arrays: [&Self; N], f: impl Fn([f64; N]) -> f64) -> Self {
        let rank = arrays.iter().map(|array| array.shape.len()).max().unwrap();
        let mut shape = vec![1; rank];
        for array in arrays {
            let own = &mut shape[rank - array.shape.len()..];
            own.iter_mut().zip(&array.shape).for_each(|(extent, &of)| *extent = (*extent).max(of));
        }
        let values = Self::places(&shape).iter().map(|place| f(arrays.map(|array| array.at(place)))).collect();
        Self { shape, values }
    }

    /// Reduces extents, which remain as 1.
    fn fold(&self, extents: &[usize], start: f64, f: impl Fn(f64, f64) -> f64) -> Self {
        let kept = |at: usize, extent: usize| if extents.contains(&at) { 1 } else { extent };
        let shape: Vec<usize> = self.shape.iter().enumerate().map(|(at, &extent)| kept(at, extent)).collect();
        let mut all = Self { values: vec![start; shape.iter().product()], shape };
        for (place, &value) in Self::places(&self.shape).iter().zip(&self.values) {
            let index =
                place.iter().zip(&all.shape).fold(0, |index, (&at, &extent)| index * extent + at.min(extent - 1));
            all.values[index] = f(all.values[index], value);
        }
        all
    }

    fn sum(&self, extents: &[usize]) -> Self {
        self.fold(extents, 0.0, |a, b| a + b)
    }
}

/// Returns an operand between two numbers, which are powers of two so that BF16 has them.
fn between(random: &mut Random, shape: &[usize], low: f32, high: f32) -> ParameterValues {
    let count = shape.iter().product();
    ParameterValues { count: 1, shape: shape.to_vec(), values: random.uniforms(count, low, high) }
}

/// Checks an op of variables and its gradients.
fn check<S: Cast>(
    device: &Device,
    name: &'static str,
    roundings: Roundings,
    operands: &[(&[usize], [f32; 2])],
    on_tape: impl for<'s> Fn(&[Var<'s, S>]) -> Result<Var<'s, S>>,
    reference: impl Fn(&[Array]) -> Array,
) {
    let mut random = Random::new(name.len() as u64);
    let values: Vec<_> = operands.iter().map(|(shape, [low, high])| between(&mut random, shape, *low, *high)).collect();
    let longest = operands.iter().map(|(shape, _)| shape.iter().product::<usize>()).max().unwrap_or(1);
    let count = operands.len();
    Case::new(name, 0, 4 * longest, values).stored_as::<S>(roundings).check(
        device,
        |_, tape, p| {
            let vars = (0..count).map(|at| leaf_as::<S>(tape, p[at])).collect::<Result<Vec<_>>>()?;
            on_tape(&vars)
        },
        |p| {
            let arrays: Vec<Array> = operands.iter().zip(p).map(|((shape, _), p)| Array::new(shape, p)).collect();
            reference(&arrays).values
        },
    );
}

const NORMAL: [f32; 2] = [-2.0, 2.0];
const POSITIVE: [f32; 2] = [0.5, 2.0];
/// The roundings of an op whose backward pass reads the rounded result, or of a gradient that is
/// summed.
const TWICE: Roundings = Roundings { forward: 1.0, backward: 3.0, kept: 2.0 };
/// The roundings of a composition of a few ops.
const SEVERAL: Roundings = Roundings { forward: 6.0, backward: 8.0, kept: 8.0 };

stored_as_each! {
    fn functions_of_one<S>(device: &Device) {
        type Unary<S> = for<'s> fn(&Var<'s, S>) -> Result<Var<'s, S>>;
        type Op<S> = (&'static str, [f32; 2], Unary<S>, fn(f64) -> f64);
        let all: [Op<S>; 11] = [
            ("abs", NORMAL, |x| x.abs(), f64::abs),
            ("exp", NORMAL, |x| x.exp(), f64::exp),
            ("log", POSITIVE, |x| x.log(), f64::ln),
            ("log1p", POSITIVE, |x| x.log1p(), f64::ln_1p),
            ("sqrt", POSITIVE, |x| x.sqrt(), f64::sqrt),
            ("rsqrt", POSITIVE, |x| x.rsqrt(), |x| 1.0 / x.sqrt()),
            ("square", NORMAL, |x| x.square(), |x| x * x),
            ("sin", NORMAL, |x| x.sin(), f64::sin),
            ("cos", NORMAL, |x| x.cos(), f64::cos),
            ("erf", NORMAL, |x| x.erf(), libm::erf),
            ("neg", NORMAL, |x| -x, |x| -x),
        ];
        for (name, range, op, reference) in all {
            check::<S>(device, name, TWICE, &[(&[3, 7], range)], |x| op(&x[0]), |x| {
                Array::zip([&x[0]], |[x]| reference(x))
            });
        }
    }

    /// Every subset of three extents is broadcast in one operand or the other.
    fn functions_of_two<S>(device: &Device) {
        type Binary<S> = for<'s> fn(&Var<'s, S>, &Var<'s, S>) -> Result<Var<'s, S>>;
        type Op<S> = (&'static str, [f32; 2], Binary<S>, fn(f64, f64) -> f64);
        let all: [Op<S>; 7] = [
            ("add", NORMAL, |a, b| a + b, |a, b| a + b),
            ("sub", NORMAL, |a, b| a - b, |a, b| a - b),
            ("mul", NORMAL, |a, b| a * b, |a, b| a * b),
            ("div", POSITIVE, |a, b| a / b, |a, b| a / b),
            ("pow", POSITIVE, |a, b| a.pow(b), f64::powf),
            ("minimum", NORMAL, |a, b| a.minimum(b), f64::min),
            ("maximum", NORMAL, |a, b| a.maximum(b), f64::max),
        ];
        for (number, (name, range, op, reference)) in all.into_iter().enumerate() {
            for broadcast in 0..8 {
                let of = |flip: usize| [2, 3, 4].map(|extent| if (broadcast ^ flip) >> (extent - 2) & 1 == 1 { 1 } else { extent });
                let (a, b) = (of(0), if number % 2 == 0 { of(7) } else { [2, 3, 4] });
                check::<S>(device, name, SEVERAL, &[(&a, range), (&b, range)], |x| op(&x[0], &x[1]), |x| {
                    Array::zip([&x[0], &x[1]], |[a, b]| reference(a, b))
                });
            }
            // Fewer extents, and rows that are no vectors.
            check::<S>(device, name, SEVERAL, &[(&[5, 2, 7], range), (&[7], range)], |x| op(&x[0], &x[1]), |x| {
                Array::zip([&x[0], &x[1]], |[a, b]| reference(a, b))
            });
        }
    }

    fn numbers_are_operands<S>(device: &Device) {
        let shape: (&[usize], _) = (&[3, 5], POSITIVE);
        check::<S>(device, "numbers", SEVERAL, &[shape], |x| {
            let y = (((&x[0] * 2.0)? + 1.0)? / 4.0)?;
            ((3.0 - &y)? * (1.0 / &x[0])?)?.pow(2.0)?.sub(x[0].clamp(0.75, 1.5)?)
        }, |x| Array::zip([&x[0]], |[x]| ((3.0 - (2.0 * x + 1.0) / 4.0) / x).powi(2) - x.clamp(0.75, 1.5)));
    }

    fn masks_select<S>(device: &Device) {
        let operands: [(&[usize], _); 2] = [(&[3, 5], NORMAL), (&[5], NORMAL)];
        check::<S>(device, "masks", SEVERAL, &operands, |x| {
            let (a, b) = (&x[0], &x[1]);
            let larger = a.greater(b)?.choose(a, b)?;
            let mask = a.less(0.0)?.add(b.greater_or_equal(0.5)?)?.not_equal(0.0)?;
            mask.choose(larger, 0.25)
        }, |x| Array::zip([&x[0], &x[1]], |[a, b]| if a < 0.0 || b >= 0.5 { a.max(b) } else { 0.25 }));
    }

    fn sums_over_any_extents<S>(device: &Device) {
        let shape: (&[usize], _) = (&[4, 5, 6], NORMAL);
        for subset in 0..8_usize {
            let numbers: Vec<usize> = (0..3).filter(|at| subset >> at & 1 == 1).collect();
            let extents = Extents::from(numbers.iter().map(|&at| at as i32 - 3).collect::<Vec<_>>());
            let roundings = Roundings { kept: 8.0, ..Roundings::ONCE };
            check::<S>(device, "sum", roundings, &[shape], |x| x[0].sum(extents.clone()), |x| x[0].sum(&numbers));
            let count: usize = numbers.iter().map(|&at| [4, 5, 6][at]).product();
            check::<S>(device, "mean", SEVERAL, &[shape], |x| x[0].mean_keep(extents.clone()), |x| {
                Array::zip([&x[0].sum(&numbers)], |[sum]| sum / count as f64)
            });
            // The names are seeds with which no three extremes are equal in BF16. Each of three has
            // a third of the gradient, but half of it as a central difference.
            check::<S>(device, "max over", SEVERAL, &[shape], |x| x[0].max(extents.clone()), |x| {
                x[0].fold(&numbers, f64::NEG_INFINITY, f64::max)
            });
            check::<S>(device, "min over", SEVERAL, &[shape], |x| x[0].min_keep(extents.clone()), |x| {
                x[0].fold(&numbers, f64::INFINITY, f64::min)
            });
            check::<S>(device, "logsumexp", SEVERAL, &[shape], |x| x[0].logsumexp(extents.clone()), |x| {
                Array::zip([&Array::zip([&x[0]], |[x]| x.exp()).sum(&numbers)], |[sum]| sum.ln())
            });
        }
        let all = 120.0;
        check::<S>(device, "variance", SEVERAL, &[shape], |x| x[0].variance(.., 1), |x| {
            let mean = x[0].sum(&[0, 1, 2]).values[0] / all;
            Array::zip([&Array::zip([&x[0]], |[x]| (x - mean).powi(2)).sum(&[0, 1, 2])], |[sum]| sum / (all - 1.0))
        });
    }

    fn shapes_move_elements<S>(device: &Device) {
        let operands: [(&[usize], _); 2] = [(&[2, 3, 4], NORMAL), (&[2, 3, 4], NORMAL)];
        let at = |x: &Array, place: [usize; 3]| x.at(&place);
        check::<S>(device, "permute", Roundings::ONCE, &operands[..1], |x| x[0].permute([2, 0, 1]), |x| {
            let values = Array::places(&[4, 2, 3]).iter().map(|p| at(&x[0], [p[1], p[2], p[0]])).collect::<Vec<_>>();
            Array::new(&[4, 2, 3], &values)
        });
        check::<S>(device, "transpose", Roundings::ONCE, &operands[..1], |x| x[0].transpose(-1, -2), |x| {
            let values = Array::places(&[2, 4, 3]).iter().map(|p| at(&x[0], [p[0], p[2], p[1]])).collect::<Vec<_>>();
            Array::new(&[2, 4, 3], &values)
        });
        check::<S>(device, "narrow", Roundings::ONCE, &operands[..1], |x| x[0].narrow(-1, 1..3), |x| {
            let values = Array::places(&[2, 3, 2]).iter().map(|p| at(&x[0], [p[0], p[1], p[2] + 1])).collect::<Vec<_>>();
            Array::new(&[2, 3, 2], &values)
        });
        check::<S>(device, "flip", Roundings::ONCE, &operands[..1], |x| x[0].flip([0, 2]), |x| {
            let values = Array::places(&[2, 3, 4]).iter().map(|p| at(&x[0], [1 - p[0], p[1], 3 - p[2]])).collect::<Vec<_>>();
            Array::new(&[2, 3, 4], &values)
        });
        check::<S>(device, "broadcast_to", SEVERAL, &operands[..1], |x| {
            x[0].unsqueeze(2)?.broadcast_to([5, 2, 3, 2, 4])
        }, |x| {
            let values = Array::places(&[5, 2, 3, 2, 4]).iter().map(|p| at(&x[0], [p[1], p[2], p[4]])).collect::<Vec<_>>();
            Array::new(&[5, 2, 3, 2, 4], &values)
        });
        check::<S>(device, "pad and split", Roundings::ONCE, &operands[..1], |x| {
            let padded = x[0].pad(1, [1, 2], 0.5)?;
            let [a, b] = padded.chunks::<2>(1)?;
            let parts = a.split(0, 1)?;
            Var::cat(&[parts[0], b, parts[1]], 0)
        }, |x| {
            let padded = |p: [usize; 3]| if (1..4).contains(&p[1]) { at(&x[0], [p[0], p[1] - 1, p[2]]) } else { 0.5 };
            let values = Array::places(&[4, 3, 4]).iter().map(|p| match p[0] {
                0 => padded([0, p[1], p[2]]),
                3 => padded([1, p[1], p[2]]),
                row => padded([row - 1, p[1] + 3, p[2]]),
            }).collect::<Vec<_>>();
            Array::new(&[4, 3, 4], &values)
        });
        check::<S>(device, "stack", Roundings::ONCE, &operands, |x| Var::stack(x, 1)?.reshape([12, 4]), |x| {
            let values = Array::places(&[2, 2, 3, 4]).iter().map(|p| at(&x[p[1]], [p[0], p[2], p[3]])).collect::<Vec<_>>();
            Array::new(&[12, 4], &values)
        });
    }

    fn cumulative_sums<S>(device: &Device) {
        let roundings = Roundings { forward: 1.0, backward: 1.0, kept: 4.0 };
        check::<S>(device, "cumulative_sum", roundings, &[(&[2, 5, 3], POSITIVE)], |x| x[0].cumulative_sum(1), |x| {
            let sum = |p: &Vec<usize>| (0..=p[1]).map(|at| x[0].at(&[p[0], at, p[2]])).sum();
            Array::new(&[2, 5, 3], &Array::places(&[2, 5, 3]).iter().map(sum).collect::<Vec<f64>>())
        });
    }

    fn ids_select_and_add<S>(device: &Device) {
        for whole in [false, true] {
            let count = if whole { 4 } else { 2 * 4 * 3 };
            let ids: Vec<u32> = (0..count).map(|at| (at * 7 % 5) as u32 % 3).collect();
            let id = |p: &[usize]| if whole { ids[p[1]] } else { ids[(p[0] * 4 + p[1]) * 3 + p[2]] } as usize;
            let shape: Shape = if whole { [4].into() } else { [2, 4, 3].into() };
            let operands: [(&[usize], [f32; 2]); 2] = [(&[2, 3, 3], POSITIVE), (&[2, 4, 3], POSITIVE)];
            let mut random = Random::new(3);
            let values = operands.map(|(shape, [low, high])| between(&mut random, shape, low, high));
            let arrays = |p: &[Vec<f64>]| [Array::new(&[2, 3, 3], &p[0]), Array::new(&[2, 4, 3], &p[1])];
            Case::new("gather", 0, 16, values.to_vec()).stored_as::<S>(SEVERAL).check(device, |step, tape, p| {
                let ids = step.upload_indices(&ids, shape)?;
                leaf_as::<S>(tape, p[0])?.gather(1, &ids)?.mul(leaf_as::<S>(tape, p[1])?)
            }, |p| {
                let [x, by] = arrays(p);
                Array::places(&[2, 4, 3]).iter().map(|p| x.at(&[p[0], id(p), p[2]]) * by.at(p)).collect()
            });
            Case::new("scatter_add", 0, 16, values.to_vec()).stored_as::<S>(SEVERAL).check(device, |step, tape, p| {
                let ids = step.upload_indices(&ids, shape)?;
                leaf_as::<S>(tape, p[0])?.scatter_add(1, &ids, &leaf_as::<S>(tape, p[1])?)
            }, |p| {
                let [mut x, by] = arrays(p);
                for p in Array::places(&[2, 4, 3]) {
                    x.values[(p[0] * 3 + id(&p)) * 3 + p[2]] += by.at(&p);
                }
                x.values
            });
        }
        check::<S>(device, "top_k", Roundings::ONCE, &[(&[3, 40], NORMAL)], |x| Ok(x[0].top_k(4)?.0), |x| {
            let mut rows: Vec<Vec<f64>> = x[0].values.chunks(40).map(<[f64]>::to_vec).collect();
            rows.iter_mut().for_each(|row| row.sort_by(|a, b| b.total_cmp(a)));
            Array::new(&[3, 4], &rows.iter().flat_map(|row| row[..4].to_vec()).collect::<Vec<_>>())
        });
    }
}

/// Checks products with batches that broadcast, and either side transposed.
fn products<S: Cast + GemmElement<S>>(device: &Device) {
    let shapes: [([&[usize]; 2], [bool; 2]); 7] = [
        ([&[3, 4], &[4, 5]], [false, false]),
        ([&[4, 3], &[4, 5]], [true, false]),
        ([&[3, 4], &[5, 4]], [false, true]),
        ([&[2, 4, 3], &[2, 5, 4]], [true, true]),
        ([&[2, 3, 4], &[4, 5]], [false, false]),
        ([&[3, 4], &[2, 4, 5]], [false, false]),
        ([&[2, 1, 4], &[1, 4, 5]], [false, false]),
    ];
    for ([a, b], [transpose_a, transpose_b]) in shapes {
        let flipped = |x: &Array, flip: bool| {
            let mut shape = x.shape.clone();
            let last = shape.len();
            if flip {
                shape.swap(last - 1, last - 2);
            }
            let value = |mut place: Vec<usize>| {
                if flip {
                    place.swap(last - 1, last - 2);
                }
                x.at(&place)
            };
            Array::new(&shape, &Array::places(&shape).into_iter().map(value).collect::<Vec<_>>())
        };
        check::<S>(
            device,
            "matmul",
            SEVERAL,
            &[(a, NORMAL), (b, NORMAL)],
            |x| x[0].matmul_with(&x[1], [transpose_a, transpose_b]),
            |x| {
                let (mut a, mut b) = (flipped(&x[0], transpose_a), flipped(&x[1], transpose_b));
                // [.., m, k, 1] times [.., 1, k, n], summed over k.
                a.shape.push(1);
                b.shape.insert(b.shape.len() - 2, 1);
                let product = Array::zip([&a, &b], |[a, b]| a * b);
                let k = product.shape.len() - 2;
                product.sum(&[k])
            },
        );
    }
    let operands: [(&[usize], [f32; 2]); 2] = [(&[2, 3, 4], NORMAL), (&[2, 5, 4], NORMAL)];
    check::<S>(
        device,
        "einsum",
        SEVERAL,
        &operands,
        |x| x[0].einsum("bqd,bkd->kbq", &x[1]),
        |x| {
            let sum = |p: &Vec<usize>| (0..4).map(|d| x[0].at(&[p[1], p[2], d]) * x[1].at(&[p[1], p[0], d])).sum();
            Array::new(&[5, 2, 3], &Array::places(&[5, 2, 3]).iter().map(sum).collect::<Vec<f64>>())
        },
    );
}

/// Runs code in a step, with a tape whose parameters are not used.
fn on_tape<R>(device: &Device, run: impl for<'t, 's> Fn(&EagerStep<'s>, &Tape<'t, 's>) -> Result<R>) -> R {
    let parameters = unused(device);
    let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
    arena.step(|step| run(step, &Tape::new(step, &parameters))).unwrap()
}

/// Returns parameters of which no op reads any.
pub(crate) fn unused(device: &Device) -> Parameters {
    let mut spec = ParameterSpec::builder();
    spec.add("unused", [1], Initializer::Constant(0.0));
    Parameters::new(device, &spec.build().unwrap(), 0).unwrap()
}

/// Returns the result of ops of an input. It has no gradient.
fn on_input(device: &Device, x: &[f32], op: impl for<'s> Fn(&Var<'s>) -> Result<Var<'s>>) -> Vec<f32> {
    on_tape(device, |step, tape| {
        let y = op(&tape.input(step.upload(x, [x.len()])?))?;
        assert!(!y.wants_gradient());
        step.read(y.value())
    })
}

on_each_device! {
    fn products_in_f32(device: &Device) {
        products::<f32>(device);
    }

    fn products_in_bf16(device: &Device) {
        products::<stepscope::bf16>(device);
    }

    /// A function has the bits of its formula, for operands that broadcast and for numbers.
    fn functions_have_their_bits(device: &Device) {
        let mut random = Random::new(9);
        let (a, b) = (random.normals(6 * 20), random.normals(20));
        for op in stepscope_core::internals::POINTWISE.iter().filter(|op| op.operands.len() == 2) {
            let [one, other] = trial(device, |trial| {
                let a = trial.upload(&a, [6, 20])?;
                let everywhere = trial.upload(&b.repeat(6), [6, 20])?;
                let b = trial.upload(&b, [20])?;
                let run = |b| (op.in_f32)(trial, &[(&a).into(), b]);
                Ok([trial.output(&run((&b).into())?)?, trial.output(&run((&everywhere).into())?)?])
            });
            assert_same(op.name, &one, &other);
        }
        let half = trial(device, |trial| trial.output(&pointwise::mul(trial, &trial.upload(&a, [6, 20])?, 0.5)?));
        assert_same("number", &half, &a.iter().map(|a| 0.5 * a).collect::<Vec<_>>());
    }

    fn special_numbers(device: &Device) {
        type Op = for<'s> fn(&Var<'s>) -> Result<Var<'s>>;
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let x = [0.0, -0.0, inf, -inf, nan, -1.0];
        let ops: [(&str, Op, [f32; 6]); 9] = [
            ("log", |x| x.log(), [-inf, -inf, inf, nan, nan, nan]),
            ("sqrt", |x| x.sqrt(), [0.0, -0.0, inf, nan, nan, nan]),
            ("sin", |x| x.sin(), [0.0, -0.0, nan, nan, nan, -0.841_470_96]),
            ("maximum", |x| x.maximum(0.5), [0.5, 0.5, inf, 0.5, nan, 0.5]),
            ("minimum", |x| x.minimum(0.5), [0.0, -0.0, 0.5, -inf, nan, -1.0]),
            ("clamp", |x| x.clamp(-0.5, 0.5), [0.0, -0.0, 0.5, -0.5, nan, -0.5]),
            ("pow", |x| x.pow(0.0), [1.0; 6]),
            ("equal", |x| x.equal(x), [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]),
            ("not_equal", |x| x.not_equal(x), [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
        ];
        for (name, op, want) in ops {
            assert_same(name, &on_input(device, &x, op), &want);
        }
        assert_same("max", &on_input(device, &x, |x| x.max(..)), &[nan]);
        assert_same("max of infinities", &on_input(device, &[inf, -inf], |x| x.max(0)), &[inf]);
        assert_same("logsumexp", &on_input(device, &[-inf, -inf], |x| x.logsumexp(..)), &[-inf]);
        assert_same("logsumexp", &on_input(device, &[inf, 1.0], |x| x.logsumexp(..)), &[inf]);
        assert_same("logsumexp", &on_input(device, &[1000.0, -1000.0], |x| x.logsumexp(..)), &[1000.0]);
    }

    fn extents_of_zero(device: &Device) {
        assert_same("sum", &on_input(device, &[], |x| x.sum(..)), &[0.0]);
        assert_same("mean", &on_input(device, &[], |x| x.mean(..)), &[f32::NAN]);
        assert_same("add", &on_input(device, &[], |x| x + 1.0), &[]);
        assert_same("broadcast", &on_input(device, &[], |x| x.unsqueeze(0)?.add(x.unsqueeze(1)?)), &[]);
        assert_same("cat", &on_input(device, &[], |x| Var::cat(&[*x, *x], 0)), &[]);
        assert_same("pad", &on_input(device, &[], |x| x.pad(0, [1, 1], 2.0)), &[2.0, 2.0]);
    }

    fn extremes_are_found(device: &Device) {
        let (nan, values) = (f32::NAN, [3.0, 1.0, 3.0, -1.0, -1.0, 2.0]);
        let [largest, smallest, columns, of_nan] = on_tape(device, |step, tape| {
            let x = tape.input(step.upload(&values, [2, 3])?);
            let y = tape.input(step.upload(&[1.0, nan, 5.0, nan], [4])?);
            Ok([x.argmax(1)?, x.argmin(-1)?, x.argmax(0)?, y.argmin(0)?].map(|found| step.read(found.values()).unwrap()))
        });
        assert_eq!([largest, smallest, columns, of_nan], [vec![0, 2], vec![1, 0], vec![0, 0, 0], vec![1]]);
    }

    fn errors_name_op_and_shapes(device: &Device) {
        on_tape(device, |step, tape| {
            let (a, b) = (tape.input(step.upload(&[1.0; 6], [2, 3])?), tape.input(step.upload(&[1.0; 8], [2, 4])?));
            assert_refused(a + b, &["add", "[2, 3]", "[2, 4]"]);
            assert_refused(a.div(b), &["div", "[2, 3]", "[2, 4]"]);
            assert_refused(a.sum(2), &["sum", "[2, 3]", "2"]);
            assert_refused(a.sum([0, -2]), &["sum", "[2, 3]", "[0, -2]"]);
            assert_refused(a.permute([0]), &["permute", "[2, 3]"]);
            assert_refused(a.narrow(1, 2..4), &["narrow", "0..3", "2..4"]);
            assert_refused(Var::cat(&[a, b], 0), &["cat", "[2, 3]", "[2, 4]"]);
            assert_refused(a.broadcast_to([3]), &["broadcast_to", "[3]", "[2, 3]"]);
            assert_refused(a.top_k(4), &["top_k", "[2, 3]", "4"]);
            assert_refused(a.matmul(&b), &["matmul", "[2, 3]", "[2, 4]"]);
            assert_refused(a.einsum("ij,kj->ik", &b), &["einsum", "`j`", "[2, 3]", "[2, 4]"]);
            assert_refused(a.einsum("ii,kj->ik", &b), &["einsum", "ii,kj->ik"]);
            let parameters = unused(device);
            let other = Tape::new(step, &parameters);
            let c = other.input(step.upload(&[1.0; 6], [2, 3])?);
            assert_refused(a + c, &["add", "another tape"]);
            drop(other);
            assert_refused(c + c, &["add", "a tape whose backward pass has not begun"]);
            Ok(())
        });
    }
}
