//! The ops of a random expression.
//!
//! Invariant: an op is chosen only where its value and its gradient are well-defined. BF16 has only
//! smooth ops, because its roundings make equal elements likely.

use super::{Graph, Made};
use crate::case::Traced;
use stepscope::ops::{Cast, Extents, GemmElement};
use stepscope::tensor::Shape;
use stepscope::{Result, Var};

/// Makes an op, or none if no value fits the chosen one.
type Maker<S> = for<'g, 's> fn(&mut Graph<'g, 's, S>) -> Result<Option<Made<'s, S>>>;

/// Returns an op of random values, if they fit a random choice.
pub(super) fn make<'s, S: Traced + Cast + GemmElement<S>>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let makers: [Maker<S>; 15] = [
        of_one,
        of_one,
        of_two,
        of_two,
        of_number,
        reduced,
        einsum,
        moved,
        part,
        joined,
        cumulated,
        selected,
        of_one_with_corners,
        of_two_with_corners,
        extreme,
    ];
    let smooth = makers.len() - 3;
    let maker = makers[graph.below(if S::IS_ROUNDED { smooth } else { makers.len() })];
    maker(graph)
}

/// A function of one variable, with the limits of its operand.
type One<S> = for<'s> fn(&Var<'s, S>) -> Result<Var<'s, S>>;

fn one_of<'s, S: Traced>(
    graph: &mut Graph<'_, 's, S>,
    all: &[(&str, [f32; 2], One<S>)],
) -> Result<Option<Made<'s, S>>> {
    let (formula, [least, most], op) = all[graph.below(all.len())];
    let Some(a) = graph.pick_if(|a| a.least >= least && a.most <= most) else { return Ok(None) };
    Ok(Some((op(&graph.values[a].var)?, formula.into(), vec![a])))
}

const ANY: [f32; 2] = [f32::MIN, f32::MAX];
const POSITIVE: [f32; 2] = [0.25, f32::MAX];

fn of_one<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    one_of(
        graph,
        &[
            ("exp(a)", [-8.0, 2.5], |x| x.exp()),
            ("log(a)", POSITIVE, |x| x.log()),
            ("log1p(a)", [-0.5, f32::MAX], |x| x.log1p()),
            ("sqrt(a)", POSITIVE, |x| x.sqrt()),
            ("a**-0.5", POSITIVE, |x| x.rsqrt()),
            ("a * a", ANY, |x| x.square()),
            ("sin(a)", ANY, |x| x.sin()),
            ("cos(a)", ANY, |x| x.cos()),
            ("erf(a)", ANY, |x| x.erf()),
            ("tanh(a)", ANY, |x| x.tanh()),
            ("sigmoid(a)", ANY, |x| x.sigmoid()),
            ("log1p(exp(a))", ANY, |x| x.softplus()),
            ("a * sigmoid(a)", ANY, |x| x.silu()),
            ("a * 0.5 * (1 + erf(a * 0.5**0.5))", ANY, |x| x.gelu_exact()),
            ("-a", ANY, |x| -x),
        ],
    )
}

fn of_one_with_corners<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    one_of(graph, &[("abs(a)", ANY, |x| x.abs()), ("relu(a)", ANY, |x| x.relu())])
}

/// Returns a value that broadcasts with another, in either order.
fn broadcasting<S: Traced>(graph: &mut Graph<'_, '_, S>) -> Option<[usize; 2]> {
    let a = graph.pick();
    let of_a = graph.shape(a);
    let b = graph.pick_if(|b| {
        let shape = b.var.shape();
        of_a.iter().rev().zip(shape.extents().iter().rev()).all(|(&a, &b)| a == b || a == 1 || b == 1)
    })?;
    Some(if graph.chance() { [a, b] } else { [b, a] })
}

fn of_two<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let Some([a, b]) = broadcasting(graph) else { return Ok(None) };
    let (of_a, of_b) = (graph.values[a], graph.values[b]);
    let (x, y) = (of_a.var, of_b.var);
    let (y, formula) = match graph.below(5) {
        0 => ((x + y)?, "a + b"),
        1 => ((x - y)?, "a - b"),
        2 => ((x * y)?, "a * b"),
        3 if of_b.nearest >= 0.25 => ((x / y)?, "a / b"),
        4 if of_a.least >= 0.25 && of_b.least >= -2.0 && of_b.most <= 2.0 => (x.pow(y)?, "a**b"),
        _ => return Ok(None),
    };
    Ok(Some((y, formula.into(), vec![a, b])))
}

fn of_two_with_corners<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let Some([a, b]) = broadcasting(graph) else { return Ok(None) };
    let (x, y) = (graph.values[a].var, graph.values[b].var);
    let limit = graph.random.uniform(0.0, 1.0);
    let (y, formula) = match graph.below(6) {
        0 => (x.minimum(y)?, "minimum(a, b)".into()),
        1 => (x.maximum(y)?, "maximum(a, b)".into()),
        2 => (x.less(y)?.choose(x, 0.5)?, "where(a < b, a, 0.5)".into()),
        3 => (x.greater(limit)?.choose(y, x)?, format!("where(a > {limit}, b, a)")),
        4 => (x.less_or_equal(limit)?.mul(y)?, format!("where(a <= {limit}, b, 0.0)")),
        _ => (y.clamp(-limit, limit + 0.5)?, format!("clamp(b, {}, {})", -limit, limit + 0.5)),
    };
    Ok(Some((y, formula, vec![a, b])))
}

fn of_number<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let a = graph.pick();
    // Eighths have few digits.
    let number = graph.random.extent(1, 24) as f32 / 8.0;
    let x = &graph.values[a].var;
    let (y, formula) = match graph.random.below(5) {
        0 => ((x * number)?, format!("a * {number}")),
        1 => ((x + number)?, format!("a + {number}")),
        2 => ((number - x)?, format!("{number} - a")),
        3 => ((x / number)?, format!("a / {number}")),
        _ if graph.values[a].least >= 0.25 => (x.pow(number - 1.0)?, format!("a**({number} - 1)")),
        _ => return Ok(None),
    };
    Ok(Some((y, formula, vec![a])))
}

/// Returns some of the extents of a shape, in order.
fn some_extents<S: Traced>(graph: &mut Graph<'_, '_, S>, of: usize) -> Vec<i32> {
    (0..graph.shape(of).len() as i32).filter(|_| graph.chance()).collect()
}

/// Returns numbers as a tuple in Python.
fn tuple<T: ToString>(numbers: &[T]) -> String {
    let numbers: String = numbers.iter().map(|number| number.to_string() + ", ").collect();
    format!("({numbers})")
}

fn reduced<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let a = graph.pick();
    let numbers = some_extents(graph, a);
    let (x, axes, extents) = (graph.values[a].var, tuple(&numbers), Extents::from(numbers.clone()));
    let count: usize = numbers.iter().map(|&number| x.shape().extents()[number as usize]).product();
    let (y, formula) = match graph.below(6) {
        0 => (x.sum(extents)?, format!("sum(a, axis={axes})")),
        1 => (x.sum_keep(extents)?, format!("sum(a, axis={axes}, keepdims=True)")),
        2 => (x.mean(extents)?, format!("mean(a, axis={axes})")),
        3 => (x.mean_keep(extents)?, format!("mean(a, axis={axes}, keepdims=True)")),
        4 => (x.logsumexp(extents)?, format!("log(sum(exp(a), axis={axes}))")),
        _ if count > 1 => (x.variance(extents, 1)?, format!("var(a, axis={axes}, ddof=1)")),
        _ => return Ok(None),
    };
    Ok(Some((y, formula, vec![a])))
}

fn extreme<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let a = graph.pick();
    let numbers = some_extents(graph, a);
    let (x, axes, extents) = (graph.values[a].var, tuple(&numbers), Extents::from(numbers));
    let (y, formula) = match graph.below(3) {
        0 => (x.max(extents)?, format!("max(a, axis={axes})")),
        1 => (x.min_keep(extents)?, format!("min(a, axis={axes}, keepdims=True)")),
        _ => match x.shape().extents().last() {
            None => return Ok(None),
            Some(&cols) => {
                let count = 1 + graph.below(cols);
                (x.top_k(count)?.0, format!("top_k(a, {count})"))
            }
        },
    };
    Ok(Some((y, formula, vec![a])))
}

/// Multiplies two values whose extents get letters: the same letter only for equal extents.
fn einsum<'s, S: Traced + GemmElement<S>>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let (a, b) = (graph.pick(), graph.pick());
    let (of_a, of_b) = (graph.shape(a), graph.shape(b));
    let letters: Vec<char> = "ijkl".chars().take(of_a.len()).collect();
    let mut others: Vec<char> = Vec::new();
    for (at, extent) in of_b.iter().enumerate() {
        let free = (0..letters.len()).find(|&of| of_a[of] == *extent && !others.contains(&letters[of]));
        others.push(free.filter(|_| graph.below(4) > 0).map_or(char::from(b'p' + at as u8), |of| letters[of]));
    }
    let new = others.iter().filter(|letter| !letters.contains(letter));
    let mut result: Vec<char> = letters.iter().chain(new).copied().filter(|_| graph.below(3) > 0).collect();
    if result.len() > 3 || of_a.len() > 4 || of_a.is_empty() || of_b.is_empty() {
        return Ok(None);
    }
    for at in (1..result.len()).rev() {
        let other = graph.below(at + 1);
        result.swap(at, other);
    }
    let text = |letters: &[char]| letters.iter().collect::<String>();
    let formula = format!("{},{}->{}", text(&letters), text(&others), text(&result));
    let y = graph.values[a].var.einsum(&formula, &graph.values[b].var)?;
    Ok(Some((y, format!("einsum('{formula}', a, b)"), vec![a, b])))
}

fn moved<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let a = graph.pick();
    let (x, shape) = (graph.values[a].var, graph.shape(a));
    let rank = shape.len();
    let (y, formula) = match graph.below(5) {
        0 => {
            let mut order: Vec<i32> = (0..rank as i32).collect();
            order.rotate_left(graph.below(rank.max(1)));
            (x.permute(order.clone())?, format!("transpose(a, {})", tuple(&order)))
        }
        1 if rank > 1 => (x.transpose(-1, -2)?, "swapaxes(a, -1, -2)".into()),
        2 if rank < 4 => {
            let at = graph.below(rank + 1);
            (x.unsqueeze(at as i32)?, format!("expand_dims(a, {at})"))
        }
        3 if rank > 1 => {
            let all = [&[shape[0] * shape[1]][..], &shape[2..]].concat();
            (x.reshape(Shape::of("graph", &all)?)?, format!("reshape(a, {})", tuple(&all)))
        }
        4 if rank < 4 => {
            let mut to = vec![graph.random.extent(1, 3)];
            to.extend(shape.iter().map(|&extent| if extent == 1 { 2 } else { extent }));
            (x.broadcast_to(Shape::of("graph", &to)?)?, format!("a + zeros({})", tuple(&to)))
        }
        _ => return Ok(None),
    };
    Ok(Some((y, formula, vec![a])))
}

/// Returns an op of a part of an extent.
fn part<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let Some(a) = graph.pick_if(|a| !a.var.shape().extents().is_empty()) else { return Ok(None) };
    let (x, shape) = (graph.values[a].var, graph.shape(a));
    let extent = graph.below(shape.len());
    let (number, before) = (extent as i32, ":, ".repeat(extent));
    let (first, more) = (graph.below(shape[extent]), graph.below(3));
    let (y, formula) = match graph.below(4) {
        0 => {
            let end = first + 1 + graph.below(shape[extent] - first);
            (x.narrow(number, first..end)?, format!("a[{before}{first}:{end}]"))
        }
        1 => (x.flip(number)?, format!("a[{before}::-1]")),
        2 => (x.pad(number, [first, more], 0.25)?, format!("pad(a, {extent}, {first}, {more}, 0.25)")),
        _ => {
            // The first part goes to the end.
            let parts = x.split(number, first + 1)?;
            let turned = [&parts[1..], &parts[..1]].concat();
            let (head, tail) = (format!("a[{before}:{}]", first + 1), format!("a[{before}{}:]", first + 1));
            (Var::cat(&turned, number)?, format!("concatenate([{tail}, {head}], {extent})"))
        }
    };
    Ok(Some((y, formula, vec![a])))
}

fn joined<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let a = graph.pick();
    let shape = graph.values[a].var.shape();
    let Some(b) = graph.pick_if(|b| b.var.shape() == shape) else { return Ok(None) };
    let (parts, rank) = ([graph.values[a].var, graph.values[b].var], shape.extents().len());
    let extent = graph.below(rank + 1);
    let (y, formula) = if extent < rank && graph.chance() {
        (Var::cat(&parts, extent as i32)?, format!("concatenate([a, b], {extent})"))
    } else if rank < 4 {
        (Var::stack(&parts, extent as i32)?, format!("stack([a, b], {extent})"))
    } else {
        return Ok(None);
    };
    Ok(Some((y, formula, vec![a, b])))
}

fn cumulated<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let Some(a) = graph.pick_if(|a| !a.var.shape().extents().is_empty()) else { return Ok(None) };
    let extent = graph.below(graph.shape(a).len());
    let y = graph.values[a].var.cumulative_sum(extent as i32)?;
    Ok(Some((y, format!("cumsum(a, {extent})"), vec![a])))
}

/// Gathers or adds along an extent, whole slices or by an id for each element.
fn selected<'s, S: Traced>(graph: &mut Graph<'_, 's, S>) -> Result<Option<Made<'s, S>>> {
    let Some(a) = graph.pick_if(|a| !a.var.shape().extents().is_empty()) else { return Ok(None) };
    let (x, shape) = (graph.values[a].var, graph.shape(a));
    let extent = graph.below(shape.len());
    let mut of_ids = shape.clone();
    of_ids[extent] = 1 + graph.below(4);
    if graph.chance() {
        of_ids = vec![of_ids[extent]];
    }
    let ids = graph.random.belows(of_ids.iter().product(), shape[extent] as u32);
    let indices = graph.step.upload_indices(&ids, Shape::of("graph", &of_ids)?)?;
    let text = format!("{extent}, {}, {}", tuple(&of_ids), tuple(&ids));
    let gathered = x.gather(extent as i32, &indices)?;
    if graph.chance() {
        return Ok(Some((gathered, format!("gather(a, {text})"), vec![a])));
    }
    let shape = gathered.shape();
    let Some(b) = graph.pick_if(|b| b.var.shape() == shape) else { return Ok(None) };
    let y = x.scatter_add(extent as i32, &indices, &graph.values[b].var)?;
    Ok(Some((y, format!("scatter_add(a, {text}, b)"), vec![a, b])))
}
