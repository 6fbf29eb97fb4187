"""Random expressions and their gradients in float64, by autograd, which differentiates NumPy.

JAX would compile each op for each shape, which takes hours for 10,000 expressions.

The limit of an error follows from the expression. Each value is also computed with every operand, result
and gradient changed by up to one rounding, at random, several times. An error may be up to FACTOR times
the largest of these changes, as a norm. Where that is more than the planted error, because differences
of nearly equal numbers or a corner amplify roundings, the comparison would find little. At most
SENSITIVE of all results may be so.
"""

import math

import autograd.numpy as np
import numpy
from autograd import make_vjp
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

from comparison import BadTrace, as_float64, read

RUNS = 6
FACTOR = 16.0
FLOOR = 2.0**-20
PLANTED = {"f32": 0.01, "bf16": 0.5}
SENSITIVE = 0.02
# One rounding of a stored type. A function in f32 may be off by two units in the last place.
ROUNDING = {"f32": 2.0**-23, "bf16": 2.0**-8}

random = numpy.random.default_rng(0)
rounding = 0.0


def change(x):
    return x * (1.0 + rounding * random.uniform(-1.0, 1.0, numpy.shape(x)))


# Changes each element by up to one rounding, and so its gradient.
rounded = primitive(change)
defvjp(rounded, lambda y, x: change)

erf = primitive(lambda x: numpy.vectorize(math.erf, otypes=[float])(x))
defvjp(erf, lambda y, x: lambda dy: dy * 2.0 / math.sqrt(math.pi) * np.exp(-x * x))


def gather_places(shape, extent, of_ids, ids):
    """Returns the index in a flat array of each element that ids select along an extent."""
    ids = numpy.array(ids, int).reshape(of_ids)
    if len(of_ids) == 1:
        ids = ids.reshape([-1 if at == extent else 1 for at in range(len(shape))])
    to = [ids.shape[at] if at == extent else length for at, length in enumerate(shape)]
    places = list(numpy.indices(to))
    places[extent] = numpy.broadcast_to(ids, to)
    return numpy.ravel_multi_index(places, shape)


def gather(x, *selection):
    return np.reshape(x, (-1,))[gather_places(x.shape, *selection)]


def scatter_add(x, extent, of_ids, ids, values):
    places = gather_places(x.shape, extent, of_ids, ids)
    selects = numpy.zeros((x.size, places.size))
    selects[places.ravel(), numpy.arange(places.size)] = 1.0
    return x + np.reshape(np.dot(selects, np.reshape(values, (-1,))), x.shape)


def top_k(x, count):
    order = numpy.argsort(-getval(x), axis=-1, kind="stable")[..., :count]
    return gather(x, x.ndim - 1, order.shape, order.ravel())


def where(mask, a, b):
    mask = numpy.asarray(getval(mask), float)
    return mask * a + (1.0 - mask) * b


def pad(x, extent, before, after, value):
    around = lambda count: value + numpy.zeros(x.shape[:extent] + (count,) + x.shape[extent + 1 :])  # noqa: E731
    return np.concatenate([around(before), x, around(after)], extent)


FUNCTIONS = (
    "abs concatenate cos cumsum einsum exp expand_dims log log1p max maximum min minimum reshape sin sqrt stack "
    "sum swapaxes tanh transpose var mean"
)
NAMES = {name: getattr(np, name) for name in FUNCTIONS.split()} | {
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "erf": erf,
    "gather": gather,
    "pad": pad,
    "relu": lambda x: where(x > 0, x, 0.0),
    "scatter_add": scatter_add,
    "sigmoid": lambda x: 0.5 * (1.0 + np.tanh(0.5 * x)),
    "top_k": top_k,
    "where": where,
    "zeros": numpy.zeros,
}


class Graph:
    """An expression: its lines, its tensors by name, and its stored type."""

    def __init__(self, lines, tensors, stored):
        self.tensors, self.rounding, self.planted = tensors, ROUNDING[stored], PLANTED[stored]
        self.lines = [(formula, [int(number) for number in numbers.split()]) for formula, numbers in lines]
        self.code = [compile(formula, formula, "eval") for formula, _ in self.lines]
        self.leaves = [number for number, (formula, _) in enumerate(self.lines) if formula == "leaf"]

    def values(self, leaves):
        values = list(leaves)
        for code, (_, operands) in list(zip(self.code, self.lines))[len(leaves) :]:
            named = dict(zip("ab", (rounded(values[number]) for number in operands)))
            values.append(rounded(eval(code, NAMES, named)))
        return values

    def results(self, by):
        """Returns all values, and the gradients of leaves by the weighted sum of the last value, if
        everything is changed by up to a rounding."""
        global rounding
        rounding = by
        leaves = tuple(as_float64(self.tensors[f"in.{number}"]) for number in self.leaves)
        weights = as_float64(self.tensors["in.weights"])
        kept = []

        def loss(leaves):
            kept[:] = self.values(leaves)
            return np.sum(kept[-1] * weights)

        backward, _ = make_vjp(loss)(leaves)
        gradients = backward(1.0)
        results = {f"out.{number}": getval(value) for number, value in enumerate(kept)}
        results |= {f"out.d{number}": gradient for number, gradient in zip(self.leaves, gradients)}
        return {name: value for name, value in results.items() if name in self.tensors}

    def limits(self, reference):
        """Returns the largest allowed error of each result, as a norm: any, if a rounding decides whether
        it is a number."""
        runs = [self.results(self.rounding) for _ in range(RUNS)]
        norm = lambda x: numpy.nan_to_num(numpy.linalg.norm(x), nan=math.inf)  # noqa: E731
        return {
            name: FACTOR * max(norm(run[name] - value) for run in runs) + FLOOR * norm(value) * self.rounding * 2.0**23
            for name, value in reference.items()
        }


def graphs(path):
    """Yields the seed and each expression of a trace."""
    tensors, notes = read(path)
    by_seed = {}
    for name, tensor in tensors.items():
        seed, _, name = name.partition(".")
        by_seed.setdefault(seed, {})[name] = tensor
    for seed, own in sorted(by_seed.items(), key=lambda pair: int(pair[0])):
        lines = [line.split(";") for line in notes[f"graph {seed}"].split("\n")]
        yield seed, Graph(lines, own, notes[f"type {seed}"])


def check(path):
    """Prints the expressions that differ; returns True if there is none."""
    failed = results = sensitive = count = 0
    worst = 0.0
    for seed, graph in graphs(path):
        count += 1
        reference = graph.results(0.0)
        limits = graph.limits(reference)
        if set(reference) != {name for name in graph.tensors if name.startswith("out.")}:
            raise BadTrace(f"{path}: expression {seed} has other results than its formulas")
        for name, value in reference.items():
            got = as_float64(graph.tensors[name]).reshape(numpy.shape(value))
            error, size = numpy.linalg.norm(got - value), numpy.linalg.norm(value)
            results += 1
            sensitive += graph.planted * size <= limits[name] and size > 0.0
            worst = max(worst, error / limits[name] if limits[name] else 0.0)
            if not error <= limits[name]:  # a NaN fails too
                failed += 1
                print(f"expression {seed}, {name}: {error:.2e} of {size:.2e}, allowed {limits[name]:.2e}")
                number = name.removeprefix("out.")
                last = int(number) if number.isdigit() else len(graph.lines) - 1
                for at, (formula, operands) in enumerate(graph.lines[: last + 1]):
                    print(f"  {at} = {formula} of {operands}, {numpy.shape(reference.get(f'out.{at}', ()))}")
                break
    share = sensitive / results
    print(f"{count} expressions, {results} results, {share:.2%} of which roundings change as much as the planted error")
    print(f"the largest error is {worst:.2f} of its limit: {'FAIL' if failed or share > SENSITIVE else 'pass'}")
    return not failed and share <= SENSITIVE
