//! Products of two variables: matrices with batches that broadcast, and Einstein's notation.
//!
//! Invariant: an element is one chain of fused multiply-adds over ascending k, as
//! [`matmul`](super::matmul()) documents.

use super::broadcast::broadcast;
use super::fold::sum_to;
use super::matmul::{Gemm, GemmElement, gemm_into};
use super::pieces::{part, part_mut, pieces};
use super::reductions::Extents;
use super::views::repeated;
use crate::elementary;
use crate::error::{Error, Result};
use crate::params::Parameter;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Saved, Shape, Source, Stored, Target, Tensor};

/// Returns the batch, the rows and the columns of matrices, transposed if `transposed`.
fn matrices(op: &'static str, shape: Shape, transposed: bool) -> Result<(Vec<usize>, [usize; 2])> {
    match shape.extents() {
        [batch @ .., rows, cols] => Ok((batch.to_vec(), if transposed { [*cols, *rows] } else { [*rows, *cols] })),
        _ => Err(Error::misuse(op, "at least two extents", shape.to_string())),
    }
}

const OP: &str = "matmul";

/// Returns the products of matrices. Their batches broadcast.
pub(super) fn product<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    (a, transpose_a): (&impl Source<'s, S>, bool),
    (b, transpose_b): (&impl Source<'s, S>, bool),
) -> Result<Tensor<'s, S>> {
    let (a_batch, [m, k]) = matrices(OP, a.shape(), transpose_a)?;
    let (b_batch, [inner, n]) = matrices(OP, b.shape(), transpose_b)?;
    if k != inner {
        return Err(Error::misuse(OP, "equal inner extents", format!("{} and {}", a.shape(), b.shape())));
    }
    let batch = broadcast(OP, &[Some(Shape::of(OP, &a_batch)?), Some(Shape::of(OP, &b_batch)?)])?;
    let whole = |extents: &[usize]| Shape::of(OP, &[batch.extents(), extents].concat());
    // One matrix serves every batch. Batches that repeat in another way are copied.
    let flat = |x: Saved<'s, S>, own: &[usize]| {
        let shape = x.shape();
        let matrix = &shape.extents()[own.len()..];
        let (count, all) = (own.iter().product::<usize>(), batch.elements());
        let x = if count == 1 || count == all { x } else { repeated(step, &x, whole(matrix)?)?.save() };
        x.reshape([if count == 1 { 1 } else { all }, matrix[0], matrix[1]])
    };
    let a = flat(Saved::new(a.memory(), a.shape()), &a_batch)?;
    let b = flat(Saved::new(b.memory(), b.shape()), &b_batch)?;
    let mut out = step.empty([batch.elements(), m, n])?;
    product_into(step, (&a, transpose_a), (&b, transpose_b), &mut out)?;
    out.reshape(whole(&[m, n])?)
}

/// Writes the products of matrices to `out`, `[matrices, m, n]`. An operand is as many matrices, or
/// one that serves all. Operands that are copied or rounded first are so for a piece at a time.
pub(super) fn product_into<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    (a, transpose_a): (&impl Source<'s, S>, bool),
    (b, transpose_b): (&impl Source<'s, S>, bool),
    out: &mut impl Target<'s, S>,
) -> Result<()> {
    let (a_batch, [m, k]) = matrices(OP, a.shape(), transpose_a)?;
    let (b_batch, [_, n]) = matrices(OP, b.shape(), transpose_b)?;
    if out.shape().elements() == 0 || k == 0 {
        return elementary::fill_into(step, out, 0.0);
    }
    let [stride_a, stride_b] =
        [(a_batch, m * k), (b_batch, k * n)].map(|(batch, of)| if batch == [1] { 0 } else { of });
    let form = Gemm::new(m, n, k);
    let form = if transpose_a { form.transpose_a() } else { form };
    let form = if transpose_b { form.transpose_b() } else { form };
    let all = out.shape().extents()[0];
    for piece in pieces(all, (stride_a + stride_b) * size_of::<S>(), &[stride_a, stride_b, m * n]) {
        let form = Gemm { batches: piece.len(), stride_a, stride_b, stride_c: m * n, ..form };
        let [of_a, of_b] = [stride_a, stride_b].map(|stride| if stride == 0 { 0..1 } else { piece.clone() });
        let mut out = part_mut(out, &piece);
        gemm_into(step, &form, &part(a, &of_a), &part(b, &of_b), None::<&Tensor<'s>>, &mut out)?;
    }
    Ok(())
}

impl<'s, S: GemmElement<S>> Var<'s, S> {
    /// The matrix product; this variable: `[.., m, k]`, `other`: `[.., k, n]`, result:
    /// `[.., m, n]`. The extents before the last two broadcast.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes; [`Error::ArenaFull`].
    #[track_caller]
    pub fn matmul(&self, other: &Self) -> Result<Self> {
        self.matmul_with(other, [false, false])
    }

    /// The product of matrices of which either may be stored transposed: this variable as
    /// `[.., k, m]`, the other as `[.., n, k]`. It copies neither. See [`Var::matmul`].
    #[track_caller]
    pub fn matmul_with(&self, other: &Self, [transpose_a, transpose_b]: [bool; 2]) -> Result<Self> {
        let (batch, [m, k]) = matrices(OP, self.shape(), transpose_a)?;
        let (b_batch, [_, n]) = matrices(OP, other.shape(), transpose_b)?;
        let rows = batch.iter().product::<usize>();
        if !transpose_a && rows > 1 && b_batch.is_empty() {
            // One product of all rows.
            let y = self.reshape([rows * m, k])?.matmul_with(other, [false, transpose_b])?;
            return y.reshape(self.shape().with_last(n));
        }
        let op = self.op(OP, &[self, other])?;
        let y = product(op.step(), (self.value(), transpose_a), (other.value(), transpose_b))?;
        let (a, b) = (self.keep(), other.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let (a, b, step) = (a.var(back)?, b.var(back)?, back.step());
            // b's first: it is the last to read a, whose memory can then be used for a's.
            if b.wants_gradient() {
                let db = match transpose_b {
                    false => product(step, (a.value(), !transpose_a), (&dy, false))?,
                    true => product(step, (&dy, true), (a.value(), transpose_a))?,
                };
                let db = summed(step, db, b.shape())?;
                back.add(&b, db)?;
            }
            if a.wants_gradient() {
                let da = match transpose_a {
                    false => product(step, (&dy, false), (b.value(), !transpose_b))?,
                    true => product(step, (b.value(), transpose_b), (&dy, true))?,
                };
                let da = summed(step, da, a.shape())?;
                back.add(&a, da)?;
            }
            step.free(dy);
            Ok(())
        }))
    }

    /// A product in Einstein's notation, such as `"bqd,bkd->bqk"`: a letter names an extent, and
    /// letters that the result lacks are summed. The operands are permuted if necessary, and
    /// multiplied as matrices.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a formula that does not describe two operands and a result, for a
    /// letter that occurs twice in one, or for extents that differ; [`Error::ArenaFull`].
    #[track_caller]
    pub fn einsum(&self, formula: &str, other: &Self) -> Result<Self> {
        let Formula { a, b, result } = Formula::parse(formula)?;
        let extents = Formula::extents(&[(&a, self.shape()), (&b, other.shape())])?;
        let of = |letters: &[char]| letters.iter().map(|letter| extents(*letter)).product::<usize>();
        let pick = |from: &[char], keep: &dyn Fn(&char) -> bool| from.iter().copied().filter(keep).collect::<Vec<_>>();
        // Letters of one operand that nothing else has are summed first.
        let (mut x, mut y) = (*self, *other);
        let own_a = pick(&a, &|letter| !b.contains(letter) && !result.contains(letter));
        let own_b = pick(&b, &|letter| !a.contains(letter) && !result.contains(letter));
        if !own_a.is_empty() {
            x = x.sum(places(&a, &own_a))?;
        }
        if !own_b.is_empty() {
            y = y.sum(places(&b, &own_b))?;
        }
        let (a, b) = (pick(&a, &|letter| !own_a.contains(letter)), pick(&b, &|letter| !own_b.contains(letter)));
        let batch = pick(&a, &|letter| b.contains(letter) && result.contains(letter));
        let inner = pick(&a, &|letter| b.contains(letter) && !result.contains(letter));
        let rows = pick(&a, &|letter| !b.contains(letter));
        let cols = pick(&b, &|letter| !a.contains(letter));
        let x = x.ordered(&a, &[&batch[..], &rows, &inner].concat())?.reshape([of(&batch), of(&rows), of(&inner)])?;
        let y = y.ordered(&b, &[&batch[..], &inner, &cols].concat())?.reshape([of(&batch), of(&inner), of(&cols)])?;
        let made = [&batch[..], &rows, &cols].concat();
        let all: Vec<usize> = made.iter().map(|letter| extents(*letter)).collect();
        x.matmul(&y)?.reshape(Shape::of("einsum", &all)?)?.ordered(&made, &result)
    }

    /// Permutes extents with these letters to another order.
    fn ordered(&self, from: &[char], to: &[char]) -> Result<Self> {
        if from == to { Ok(*self) } else { self.permute(places(from, to)) }
    }
}

/// Returns the numbers of letters among others.
fn places(among: &[char], letters: &[char]) -> Extents {
    let place = |letter| among.iter().position(|other| other == letter).unwrap_or(among.len()) as i32;
    letters.iter().map(place).collect::<Vec<_>>().into()
}

/// The letters of a product in Einstein's notation.
struct Formula {
    a: Vec<char>,
    b: Vec<char>,
    result: Vec<char>,
}

impl Formula {
    fn parse(formula: &str) -> Result<Self> {
        let refused =
            || Error::misuse("einsum", "a formula such as \"bqd,bkd->bqk\", without repeated letters", formula);
        let letters = |text: &str| -> Result<Vec<char>> {
            let letters: Vec<char> = text.trim().chars().collect();
            let is_distinct = (0..letters.len()).all(|at| !letters[..at].contains(&letters[at]));
            if is_distinct && letters.iter().all(char::is_ascii_alphabetic) { Ok(letters) } else { Err(refused()) }
        };
        let (operands, result) = formula.split_once("->").ok_or_else(refused)?;
        let (a, b) = operands.split_once(',').ok_or_else(refused)?;
        let formula = Self { a: letters(a)?, b: letters(b)?, result: letters(result)? };
        let is_known = |letter| formula.a.contains(letter) || formula.b.contains(letter);
        if formula.result.iter().all(is_known) { Ok(formula) } else { Err(refused()) }
    }

    /// Returns the extent of each letter.
    fn extents(operands: &[(&Vec<char>, Shape)]) -> Result<impl Fn(char) -> usize + use<>> {
        let mut known: Vec<(char, usize)> = Vec::new();
        for (letters, shape) in operands {
            if letters.len() != shape.extents().len() {
                return Err(Error::misuse("einsum", format!("{} extents", letters.len()), shape.to_string()));
            }
            for (&letter, &extent) in letters.iter().zip(shape.extents()) {
                match known.iter().find(|(other, _)| *other == letter) {
                    Some(&(_, before)) if before != extent => {
                        let shapes: Vec<String> = operands.iter().map(|(_, shape)| shape.to_string()).collect();
                        return Err(Error::misuse("einsum", format!("one extent `{letter}`"), shapes.join(" and ")));
                    }
                    Some(_) => {}
                    None => known.push((letter, extent)),
                }
            }
        }
        Ok(move |letter| known.iter().find(|(other, _)| *other == letter).map_or(1, |&(_, extent)| extent))
    }
}

/// Returns the sum over the batches that repeated.
fn summed<'s, S: Stored>(step: &Step<'s>, x: Tensor<'s, S>, shape: Shape) -> Result<Tensor<'s, S>> {
    if x.shape() == shape {
        return Ok(x);
    }
    let sum = sum_to(step, &x, shape)?;
    step.free(x);
    Ok(sum)
}

impl<'s> Tape<'_, 's> {
    /// A trained or frozen parameter as a variable, for ops that are called on variables; result:
    /// the parameter's shape. It is a copy of the weights. Its gradient is added to the
    /// parameter's.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the weights are on another device, or the handle belongs to another
    /// parameter spec; [`Error::ArenaFull`].
    #[track_caller]
    pub fn parameter(&self, parameter: Parameter) -> Result<Var<'s>> {
        let op = self.op("parameter", [])?;
        let value = elementary::copy(self.step(), &op.weights(parameter)?)?.save();
        Ok(op.record(value, move |back, dy| {
            let step = back.step();
            if let Some((mut gradient, accumulate)) = back.gradient_if_trained(parameter)? {
                match accumulate {
                    true => elementary::add_assign(step, &mut gradient, &dy)?,
                    false => elementary::copy_into(step, &dy, &mut gradient)?,
                }
            }
            step.free(dy);
            Ok(())
        }))
    }
}
