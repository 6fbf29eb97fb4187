"""Every op in float64; backward is JAX's automatic differentiation of forward.

A case of the trace is an op and a seed, with its operands, its results, and the largest allowed
relative L2 error. The rule in `tests/support/mod.rs` derives that error from the longest sum.

An op on BF16 tensors, `OP_bf16`, computes in f32 and rounds once. So each element of a result stored
as BF16 may be off by one rounding, HALF of it. The remaining error stays within the same bound as for
f32. Operands are BF16 values. If backward reads a rounded result of forward, that is an operand in
KEPT.
"""

import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy

from comparison import BadTrace, as_float64, read, relative_l2, worst


def gelu(x):
    return 0.5 * x * (1.0 + jnp.tanh(jnp.sqrt(2.0 / jnp.pi) * (x + 0.044715 * x**3)))


# The largest relative error of a number that was rounded to BF16, whose significand has 8 bits.
HALF = 2.0**-8


def to_bf16(x):
    """Rounds x to BF16."""
    return jnp.asarray(x).astype(jnp.float32).astype(jnp.bfloat16).astype(jnp.float64)


def layer_norm(h, gain, bias, epsilon):
    centered = h - jnp.mean(h, axis=-1, keepdims=True)
    return gain * centered / jnp.sqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + epsilon) + bias


def rms_norm(x, gain, epsilon):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * gain


def attention(qkv, gains, epsilon, scale):
    q, k, v = qkv.reshape(*qkv.shape[:3], -1, 64)
    q, k = rms_norm(q, gains[0], epsilon), rms_norm(k, gains[1], epsilon)
    scores = jax.nn.softmax(scale * jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(qkv.shape[1:])


def parts(qkv, heads):
    """Returns q, k and v of a packed tensor by head, with k and v repeated for each query head."""
    heads, kv_heads = int(heads[0]), int(heads[1])
    rows = qkv.reshape(*qkv.shape[:2], heads + 2 * kv_heads, -1)
    return rows[:, :, :heads], rows[:, :, heads : heads + kv_heads], rows[:, :, heads + kv_heads :]


def flash_attention(qkv, heads, window, documents, lengths):
    q, k, v = parts(qkv, heads)
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    before = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    exists = jnp.arange(q.shape[1]) < lengths.astype(int)[:, None]
    seen = (documents[:, :, None] == documents[:, None]) & exists[:, :, None] & exists[:, None]
    if window[0] != 0:
        seen &= (before >= 0) & (before < int(window[0]))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[3])
    # Finite, so that a row without a key has the gradient 0.
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1) * seen[:, None]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*qkv.shape[:2], -1)


def attention_cached(qkv, heads, keys, values):
    q, k, v = parts(qkv, heads)
    rows = [jnp.concatenate([x.reshape(len(x), -1, q.shape[3])[:-1], new[0]]) for x, new in ((keys, k), (values, v))]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in rows)
    weights = jax.nn.softmax(jnp.einsum("hd,khd->hk", q[0, 0], k) / jnp.sqrt(q.shape[3]), axis=-1)
    return jnp.einsum("hk,khd->hd", weights, v).reshape(1, 1, -1)


def qk_norm(qkv, heads, gains, epsilon):
    q, k, v = parts(qkv, heads)
    return jnp.concatenate([rms_norm(q, gains[0], epsilon), rms_norm(k, gains[1], epsilon), v], axis=2).reshape(qkv.shape)


def rotary(qkv, heads, rotary):
    q, k, v = parts(qkv, heads)
    base, offset = float(rotary[0]), float(rotary[1])
    half = q.shape[3] // 2
    angle = (offset + jnp.arange(q.shape[1]))[:, None] * base ** (-jnp.arange(half) / half)

    def turned(x):
        a, b, (cos, sin) = x[..., :half], x[..., half:], (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return jnp.concatenate([turned(q), turned(k), v], axis=2).reshape(qkv.shape)


def cross_entropy(logits, labels, weight):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), labels[:, None], axis=-1)
    return -weight * jnp.sum(chosen)


def cross_entropy_by(logits, labels, weight, smoothing):
    counted = labels != 0xFFFFFFFF
    logs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logs, jnp.where(counted, labels, 0)[:, None], axis=-1)[:, 0]
    return -weight * jnp.sum(jnp.where(counted, (1 - smoothing) * chosen + smoothing * jnp.mean(logs, axis=-1), 0.0))


def binary_cross_entropy(x, target, weight):
    return -weight * jnp.sum(target * jax.nn.log_sigmoid(x) + (1 - target) * jax.nn.log_sigmoid(-x))


def philox(counter, key):
    """Computes Philox4x32-10 of `[.., 4]` words and a key of two."""
    low = numpy.uint64(0xFFFFFFFF)
    words, key = [counter[..., at].astype(numpy.uint64) for at in range(4)], [numpy.uint64(word) for word in key]
    for number in range(10):
        first, second = numpy.uint64(0xD2511F53) * words[0], numpy.uint64(0xCD9E8D57) * words[2]
        high = lambda product: product >> numpy.uint64(32)  # noqa: E731
        words = [high(second) ^ words[1] ^ key[0], second & low, high(first) ^ words[3] ^ key[1], first & low]
        key = [(word + numpy.uint64(step)) & low for word, step in zip(key, (0x9E3779B9, 0xBB67AE85))]
    return numpy.stack(words, axis=-1)


def dropout(x, generator, p):
    """Computes the second call of the step, whose number is 1."""
    seed, step = numpy.asarray(generator)[:2], numpy.asarray(generator)[2:]
    quads = numpy.arange((x.size + 3) // 4)
    counter = numpy.stack([quads, *(numpy.full_like(quads, word) for word in (1, *step))], axis=-1)
    words = philox(counter, seed).reshape(-1)[: x.size].reshape(x.shape)
    return jnp.where(words < numpy.uint64(float(p[0]) * 2**32), 0.0, x / (1 - p))


def linear_cross_entropy(hidden, w, labels, weight, smoothing, tied):
    return cross_entropy_by(hidden @ (w.T if int(tied[0]) else w), labels, weight, smoothing)


def linear_cross_entropy_bf16(hidden, w, labels, weight, smoothing, tied, dy):
    """Computes with logits and their gradients stored as BF16; those of hidden and w are their
    products."""
    across = w.T if int(tied[0]) else w
    loss, backward = jax.vjp(lambda logits: cross_entropy_by(logits, labels, weight, smoothing), to_bf16(hidden @ across))
    [dlogits] = backward(dy)
    dw = hidden.T @ to_bf16(dlogits)
    return {"y": loss, "dhidden": to_bf16(dlogits) @ across.T, "dw": dw.T if int(tied[0]) else dw}


def cross_entropy_of_rows(logits, labels):
    counted = labels != 0xFFFFFFFF
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), jnp.where(counted, labels, 0)[:, None], axis=-1)
    return jnp.where(counted, -chosen[:, 0], 0.0)


def linear_cross_entropy_of_rows(hidden, w, labels, tied):
    return cross_entropy_of_rows(hidden @ (w.T if int(tied[0]) else w), labels)


def linear_cross_entropy_of_rows_bf16(hidden, w, labels, tied, dy):
    """Computes like linear_cross_entropy_bf16."""
    across = w.T if int(tied[0]) else w
    losses, backward = jax.vjp(lambda logits: cross_entropy_of_rows(logits, labels), to_bf16(hidden @ across))
    [dlogits] = backward(dy)
    dw = hidden.T @ to_bf16(dlogits)
    return {"y": losses, "dhidden": to_bf16(dlogits) @ across.T, "dw": dw.T if int(tied[0]) else dw}


def linear(x, w, bias, residual):
    affine = x @ w + bias
    products = {"y": residual + affine, "product": x @ w, "affine": affine}
    return products | {"gelu": gelu(affine), "silu": jax.nn.silu(affine), "gated": jax.nn.silu(residual) * affine}


def clipped(gradients, largest):
    return gradients * clip_factor(jnp.sum(gradients**2), largest)


def clip_factor(squared_norm, largest):
    return jnp.minimum(1.0, largest / (jnp.sqrt(squared_norm) + 1e-6))


def adamw(weights, gradients, first, second, hyper):
    rate, beta1, beta2, epsilon, decay, correction1, correction2, largest = hyper
    gradients = clipped(gradients, largest)
    first = beta1 * first + (1.0 - beta1) * gradients
    second = beta2 * second + (1.0 - beta2) * gradients**2
    direction = (first / correction1) / (jnp.sqrt(second / correction2) + epsilon)
    return {"weights": weights - rate * (decay * weights + direction), "first": first, "second": second}


def sgd(weights, gradients, velocity, hyper):
    rate, momentum, decay, largest, nesterov = hyper
    gradients = clipped(gradients, largest) + decay * weights
    velocity = momentum * velocity + gradients
    direction = jnp.where(nesterov != 0, gradients + momentum * velocity, velocity)
    return {"weights": weights - rate * direction, "velocity": velocity}


def by_groups(update):
    """Returns an update with settings per element: those of the group of its run of 64."""

    def grouped(weights, hyper, groups, **operands):
        return update(weights=weights, hyper=hyper[jnp.repeat(groups, 64)[: weights.size]].T, **operands)

    return grouped


def grouped_linear(x, w, ids, experts):
    """Multiplies the rows of tokens in the order of their experts, whose columns of w stand one after another."""
    order = jnp.argsort(jnp.ravel(ids), stable=True)
    rows, matrices = x[order // ids.shape[1]], jnp.moveaxis(w.reshape(w.shape[0], int(experts[0]), -1), 1, 0)
    return {"rows": rows, "y": jnp.einsum("rk,rkn->rn", rows, matrices[jnp.ravel(ids)[order]])}


def places(ids):
    """Returns the place of each id in the stable order of all."""
    return jnp.argsort(jnp.argsort(jnp.ravel(ids), stable=True), stable=True).reshape(ids.shape)


# The function of each op without a declaration: `y`, or several results by name.
REFERENCES = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "swiglu_packed": lambda x: jax.nn.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
    "dropout": dropout,
    "embedding": lambda table, ids: table[ids],
    "embedding_of_half": lambda table, ids: table[ids],
    "gather": lambda x, ids: x[ids],
    "one_hot": lambda ids, classes: (ids[:, None] == jnp.arange(int(classes[0]))).astype(float),
    "grouped_linear": grouped_linear,
    "combine": lambda rows, gates, ids: jnp.einsum("tj,tjc->tc", gates, rows[places(ids)]),
    "add_positions": lambda x, table: x + table[: x.shape[1]],
    "slice": lambda x, range: x[:, int(range[0]) : int(range[1])],
    "concat": lambda a, b: jnp.concatenate([a, b], axis=1),
    "squared_error": lambda x, target, weight: weight * jnp.sum((x - target) ** 2),
    "binary_cross_entropy": binary_cross_entropy,
    "cross_entropy_by": cross_entropy_by,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy_of_rows": linear_cross_entropy_of_rows,
    "rms_norm_residual": lambda x, residual, gain, epsilon: {"h": x + residual, "y": rms_norm(x + residual, gain, epsilon)},
    "swap_extents": lambda x: jnp.swapaxes(x, 1, 2),
    "gelu_bias": lambda x, bias: gelu(x + bias),
    "add_assign": lambda a, b: a + b,
    "scale": lambda x, factor: factor * x,
    "scale_by": lambda x, factor: factor * x,
    "scale_by_into": lambda a, b, factor: a + factor * b,
    "add_bias": lambda x, bias: x + bias,
    "fill": lambda x, value: jnp.full(x.shape, value[0]),
    "to_bf16": to_bf16,
    "to_f32": to_bf16,
    "copy": lambda x: x,
    "sum": lambda x: jnp.sum(x),
    "scaled_sum": lambda x, factor: factor * jnp.sum(x),
    "mean": lambda x: jnp.mean(x),
    "squared_norm": lambda x: jnp.sum(x * x),
    "max": lambda x: jnp.max(x),
    "sum_columns": lambda x: jnp.sum(x, axis=1),
    "sum_rows": lambda x: {"y": jnp.sum(x, axis=0), "twice": 2 * jnp.sum(x, axis=0)},
    "max_columns": lambda x: jnp.max(x, axis=1),
    "argmax_columns": lambda x: jnp.argmax(x, axis=1),
    "cross_entropy": cross_entropy,
    "rms_norm": rms_norm,
    "layer_norm": lambda x, residual, gain, bias, epsilon: {"h": x + residual, "y": layer_norm(x + residual, gain, bias, epsilon)},
    "attention": attention,
    "flash_attention": flash_attention,
    "flash_attention_tf32": flash_attention,
    "attention_cached": attention_cached,
    "qk_norm": qk_norm,
    "rotary": rotary,
    "mean_tokens": lambda x: jnp.mean(x, axis=1),
    "transpose": lambda x: jnp.swapaxes(x, 1, 2),
    "linear": linear,
    "gemm": lambda a, b, bias, c: 0.75 * jnp.einsum("bmk,bnk->bmn", a, b) + bias[:, None] + c,
    "adamw": adamw,
    "adamw_groups": by_groups(adamw),
    "sgd": sgd,
    "sgd_groups": by_groups(sgd),
    "clip_factor": clip_factor,
    "sum_parts": lambda parts: jnp.sum(parts, axis=0),
}


def normed(norm):
    """Returns all results of a norm after a residual, whose sum h was rounded before
    normalization."""

    def results(x, residual, epsilon, h, dy, **weights):
        y, backward = jax.vjp(lambda h, weights: norm(h, epsilon=epsilon, **weights), h, weights)
        dx, gradients = backward(dy)
        return {"h": x + residual, "y": y, "dx": dx} | {f"d{name}": gradient for name, gradient in gradients.items()}

    return results


# BF16 ops whose backward reads a rounded result of forward: all results, as a function of the
# operands and of that result.
KEPT = {
    "rms_norm_residual": normed(rms_norm),
    "layer_norm": normed(layer_norm),
    "linear_cross_entropy": linear_cross_entropy_bf16,
    "linear_cross_entropy_of_rows": linear_cross_entropy_of_rows_bf16,
    # Only for BF16, and only backward.
    "gelu_linear": lambda pre, w, dy: {"dpre": jax.vjp(lambda pre: gelu(pre) @ w, pre)[1](dy)[0]},
}

# Ops that take only f32: those without a BF16 version, casts, and updates of weights, which are
# f32.
F32_ONLY = {"attention", "attention_cached", "flash_attention_tf32", "to_bf16", "to_f32", "adamw", "adamw_groups", "sgd", "sgd_groups", "clip_factor", "sum_parts"}
# Ops that round intermediate values are checked by the norm of a result, so planted errors change
# all elements.
BY_NORM = {"flash_attention_bf16", "flash_attention_tf32"}
SUFFIX = "_bf16"
# The names that a declared op's formulas use.
NAMES_OF_JAX = ("abs", "cos", "exp", "log", "log1p", "maximum", "minimum", "pi", "sign", "sin", "sqrt", "tanh", "where")
FORMULA_NAMES = {name: getattr(jnp, name) for name in NAMES_OF_JAX} | {
    "erf": jax.scipy.special.erf,
    "max": lambda x: jnp.max(x, axis=-1, keepdims=True),
    "sum": lambda x: jnp.sum(x, axis=-1, keepdims=True),
}


def declare(notes):
    """Adds the declared ops, whose formulas the trace's notes have, to REFERENCES and KEPT. Returns
    the other notes."""
    formulas = {name: text for name, text in notes.items() if " of " in name}
    for name, text in formulas.items():
        result, _, op = name.partition(" of ")
        if text.startswith("lambda "):
            REFERENCES[op] = eval(text, FORMULA_NAMES)
        elif result == "y":
            REFERENCES[op] = eval(f"lambda x: {text}", FORMULA_NAMES)
        else:
            y = formulas[f"y of {op}"]
            KEPT[op] = eval(f"lambda x, y, dy: {{'y': {y}, 'dx': {text}}}", FORMULA_NAMES)
    return {name: text for name, text in notes.items() if name not in formulas}


def expected():
    """Returns the ops that a trace must have."""
    return set(REFERENCES) | {f"{op}{SUFFIX}" for op in (set(REFERENCES) | set(KEPT)) - F32_ONLY}


class Case:
    """An op on one set of operands."""

    def __init__(self, op, limit):
        # `halves` has the names of results that were rounded to BF16.
        self.op, self.limit, self.operands, self.results, self.halves = op, limit, {}, {}, set()

    def error(self, name, got, reference):
        """Returns the relative L2 error of a result; for BF16 results, the error beyond their
        rounding."""
        got = as_float64(numpy.asarray(got))
        # Equal infinities are no error, and must not hide others.
        equal = numpy.isinf(reference) & (got == reference)
        got, reference = numpy.where(equal, 0.0, got), numpy.where(equal, 0.0, reference)
        # Copies are not rounded.
        if name not in self.halves or self.limit == 0.0 or self.op in BY_NORM:
            return relative_l2(got, reference)
        beyond = numpy.maximum(numpy.abs(got - reference) - HALF * numpy.abs(reference), 0.0)
        return relative_l2(reference + beyond, reference)

    def references(self):
        """Returns the float64 value of every result."""
        # An op's own name may have the suffix.
        op = self.op if self.op in REFERENCES else self.op.removesuffix(SUFFIX)
        by_name = lambda values: values if isinstance(values, dict) else {"y": values}  # noqa: E731
        operands = {name: as_float64(value) for name, value in self.operands.items()}
        if op != self.op and op in KEPT:
            values = KEPT[op](**operands)
        else:
            values = self.differentiated(lambda operands: by_name(REFERENCES[op](**operands)), operands)
        if set(values) != set(self.results):
            raise BadTrace(f"{self.op}: has the results {sorted(self.results)}, not {sorted(values)}")
        return {name: numpy.asarray(value).reshape(self.results[name].shape) for name, value in values.items()}

    def differentiated(self, forward, operands):
        """Returns the results of forward, and the gradients of operands that the trace has."""
        dy = operands.pop("dy", None)
        values = forward(operands)
        if dy is not None:
            wanted = {name: operands.pop(name) for name in list(operands) if f"d{name}" in self.results}
            y, backward = jax.vjp(lambda wanted: forward(operands | wanted)["y"], wanted)
            [gradients] = backward(dy.reshape(y.shape))
            values |= {f"d{name}": gradient for name, gradient in gradients.items()}
        return values


def read_cases(path):
    """Returns the cases of a trace, by name."""
    tensors, notes = read(path)
    notes = declare(notes)
    cases = {name: Case(name.split(".")[0], float(limit)) for name, limit in notes.items()}
    for name, tensor in tensors.items():
        op, seed, way, value = name.split(".")
        case = cases[f"{op}.{seed}"]
        (case.operands if way == "in" else case.results)[value] = tensor
        if way == "half":
            case.halves.add(value)
    if wrong := {case.op for case in cases.values()} ^ expected():
        raise BadTrace(f"{path}: its ops differ from those with a reference: {', '.join(sorted(wrong))}")
    return cases


def every_op_is_traced():
    """Fails if the tracing program does not call one of the library's ops.

    Roundings are exempt, because tests compare their bits, as those of updates in small memory
    (tests/kernels/small_updates.rs). So is the orthogonalization in BF16, which is as far from
    float64 as its own roundings: tests/training/muon.rs compares it with float64, with and without
    them. Declared ops are traced by their table.
    """
    root = Path(__file__).resolve().parents[2]
    text = (root / "host/core/src/ops/mod.rs").read_text()
    declared = "activation|pointwise|softmax"
    exported = rf"^ *pub use (?:(?:crate|super)::)?(?!(?:crate|super|kernels|{declared})::)\w+::([^;]*);"
    names = set(re.findall(r"\b[a-z]\w*\b", " ".join(re.findall(exported, text, re.MULTILINE))))
    names -= {"same_shape", "adamw_small", "sgd_small", "orthogonalize_assign"}
    program = "".join(file.read_text() for file in sorted((root / "examples/trace_ops").glob("*.rs")))
    missing = lambda names: sorted(name for name in names if not re.search(rf"(ops|launch)::{name}\(", program))  # noqa: E731
    if missing(names | {"planted"}) != ["planted"]:
        raise SystemExit(f"examples/trace_ops does not call {', '.join(missing(names)) or 'all ops'}")
    return len(names)


def check(path):
    """Prints a line per op; returns True if all errors are within their limits."""
    functions, cases = every_op_is_traced(), read_cases(path)
    # XLA compiles outside Python's lock.
    with ThreadPoolExecutor() as pool:
        references = dict(zip(cases, pool.map(lambda case: case.references(), cases.values())))
    planted = 0
    for name, case in cases.items():
        for result, tensor in case.results.items():
            wrong = numpy.array(tensor)
            finite = numpy.where(numpy.isfinite(wrong), numpy.abs(wrong), 0)
            largest = numpy.unravel_index(numpy.argmax(finite), wrong.shape)
            if case.op in BY_NORM:
                largest = ...
            wrong[largest] = wrong[largest] + 1 if wrong.dtype.kind == "u" else wrong[largest] * numpy.float32(1.01)
            if numpy.any(wrong[largest] != 0) and case.error(result, wrong, references[name][result]) <= case.limit:
                raise SystemExit(f"the check passed a planted error of 1 % in {name}, {result}")
            planted += 1
    print(f"refused: an error of 1 % in the largest element of each of {planted} results")
    print(f"{'op':<25} {'results':>8} {'worst error':>12} {'allowed':>10}")
    failed, by_op = [], defaultdict(list)
    for name, case in cases.items():
        for result, reference in references[name].items():
            error = case.error(result, case.results[result], reference)
            by_op[case.op].append((error, case.limit))
            if not error <= case.limit:  # a NaN fails too
                failed.append(f"{name}, {result}: {error:.2e}, allowed {case.limit:.2e}")
    for op, errors in sorted(by_op.items()):
        share = {index: error / limit if limit else error for index, (error, limit) in enumerate(errors)}
        error, limit = errors[worst(share)]
        print(f"{op:<25} {len(errors):>8} {error:>12.2e} {limit:>10.2e}")
    count = sum(len(errors) for errors in by_op.values())
    for failure in failed:
        print(failure)
    print(f"{functions} functions in {len(by_op)} ops, {count} results: {'FAIL' if failed else 'pass'}")
    return not failed
