"""CrossAsset in float64: loss, all 50 gradients by JAX's automatic differentiation, and AdamW.

Written from the model's description in DESIGN and papers, not from the library. It shares no code and
no derivation with it. A trace of three updates is checked link by link. Each loss and gradient is
checked at the weights that the run had then. The weights after each update are checked with float64's
AdamW from the run's first weights and its gradients. If every link holds, so does the chain.
"""

import math

import jax
import jax.numpy as jnp
import numpy

from comparison import BadTrace, as_float64, read, relative_l2, worst

# The largest allowed relative L2 error of any loss, gradient or weight, for every batch.
LIMIT = 2e-6
UPDATES = 3
SCALES, FEATURES, WIDTH, HEADS, HIDDEN, CLASSES = 12, 193, 256, 4, 1024, 3
HEAD_WIDTH = WIDTH // HEADS
EPSILON = 1e-6


def shapes():
    """Returns the name and shape of every weight tensor, `[in, out]`."""
    names = {}
    for scale in range(SCALES):
        names[f"scale{scale}.weight"] = (FEATURES, WIDTH)
        names[f"scale{scale}.bias"] = (WIDTH,)
    for layer in (f"layer{index}" for index in range(2)):
        for matrix in ("wq", "wk", "wv", "wo"):
            names[f"{layer}.{matrix}.weight"] = (WIDTH, WIDTH)
        for gain, width in (("q_norm", HEAD_WIDTH), ("k_norm", HEAD_WIDTH), ("norm1", WIDTH), ("norm2", WIDTH)):
            names[f"{layer}.{gain}.gain"] = (width,)
        names[f"{layer}.ffn1.weight"] = (WIDTH, HIDDEN)
        names[f"{layer}.ffn1.bias"] = (HIDDEN,)
        names[f"{layer}.ffn2.weight"] = (HIDDEN, WIDTH)
        names[f"{layer}.ffn2.bias"] = (WIDTH,)
    names["head.weight"] = (WIDTH, CLASSES)
    names["head.bias"] = (CLASSES,)
    return names


def model_loss(weights, inputs, label):
    """Returns the mean cross-entropy of the model."""

    def rms(x, gain):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * gain

    def heads(x):
        return x.reshape(*x.shape[:2], HEADS, HEAD_WIDTH)

    batch = len(inputs)
    tokens = [inputs[:, s] @ weights[f"scale{s}.weight"] + weights[f"scale{s}.bias"] for s in range(SCALES)]
    h = jnp.stack(tokens, axis=1)
    for layer in ("layer0", "layer1"):
        of = lambda name: weights[f"{layer}.{name}"]  # noqa: E731
        z = rms(h, of("norm1.gain"))
        q = rms(heads(z @ of("wq.weight")), of("q_norm.gain"))
        k = rms(heads(z @ of("wk.weight")), of("k_norm.gain"))
        v = heads(z @ of("wv.weight"))
        score = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", score, v).reshape(batch, SCALES, WIDTH)
        h = h + mixed @ of("wo.weight")
        z = rms(h, of("norm2.gain"))
        inner = z @ of("ffn1.weight") + of("ffn1.bias")
        inner = 0.5 * inner * (1.0 + jnp.tanh(jnp.sqrt(2.0 / jnp.pi) * (inner + 0.044715 * inner**3)))
        h = h + inner @ of("ffn2.weight") + of("ffn2.bias")
    logits = h.mean(axis=1) @ weights["head.weight"] + weights["head.bias"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), label[:, None], axis=-1)
    return -jnp.mean(chosen)


LOSS_AND_GRADIENTS = jax.jit(jax.value_and_grad(model_loss))


class AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

    The gradients' global norm is clipped (Pascanu et al., 2013). The learning rate has a linear
    warm-up and half a cosine.
    """

    def __init__(self, notes):
        rounded = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "clip")
        self.__dict__ = {name: float(numpy.float32(notes[name])) for name in rounded}
        self.warmup, self.total, self.floor = int(notes["warmup"]), int(notes["total"]), float(notes["floor"])
        self.updates, self.first, self.second = 0, {}, {}

    def rate(self):
        """Returns the learning rate of the current update."""
        if self.updates <= self.warmup:
            return self.learning_rate * self.updates / self.warmup
        done = min((self.updates - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        return self.learning_rate * (self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done)))

    def update(self, weights, gradients):
        """Returns the weights after one more update."""
        self.updates += 1
        norm = math.sqrt(sum(float(numpy.sum(gradient**2)) for gradient in gradients.values()))
        clip = min(1.0, self.clip / (norm + 1e-6))
        updated = {}
        for name, weight in weights.items():
            gradient = clip * gradients[name]
            first = self.beta1 * self.first.get(name, 0.0) + (1.0 - self.beta1) * gradient
            second = self.beta2 * self.second.get(name, 0.0) + (1.0 - self.beta2) * gradient**2
            self.first[name], self.second[name] = first, second
            mean = first / (1.0 - self.beta1**self.updates)
            spread = numpy.sqrt(second / (1.0 - self.beta2**self.updates)) + self.epsilon
            updated[name] = weight - self.rate() * (self.weight_decay * weight + mean / spread)
        return updated


class Trace:
    """The tensors of a trace file, checked for completeness."""

    def __init__(self, path):
        self.tensors, self.notes = read(path)
        self.path = path
        names = set()
        for update in range(UPDATES + 1):
            names |= {f"{update}.weight.{name}" for name in shapes()}
            if update < UPDATES:
                names |= {f"{update}.{name}" for name in ("input", "label", "loss")}
                names |= {f"{update}.gradient.{name}" for name in shapes()}
        if missing := sorted(names - set(self.tensors)):
            raise BadTrace(f"{path}: lacks {len(missing)} tensors of {UPDATES} updates, the first is {missing[0]}: "
                           "train on more samples")
        if unknown := sorted(set(self.tensors) - names):
            raise BadTrace(f"{path}: has tensors that the model lacks: {', '.join(unknown)}")
        for update in range(UPDATES):
            label = self.tensors[f"{update}.label"]
            if self.tensors[f"{update}.input"].shape != (len(label), SCALES, FEATURES) or (label >= CLASSES).any():
                raise BadTrace(f"{path}: input or label of update {update} is malformed")

    def all(self, update, kind):
        """Returns the 50 weights or gradients at an update."""
        return {name: as_float64(self.tensors[f"{update}.{kind}.{name}"]) for name in shapes()}

    def samples(self):
        """Returns the number of samples in a batch."""
        return len(self.tensors["0.label"])


class Reference:
    """The float64 values of a trace, under the trace's names."""

    def __init__(self, trace):
        self.values = {}
        optimizer, weights = AdamW(trace.notes), trace.all(0, "weight")
        for update in range(UPDATES):
            inputs, label = (as_float64(trace.tensors[f"{update}.{name}"]) for name in ("input", "label"))
            loss, gradients = LOSS_AND_GRADIENTS(trace.all(update, "weight"), inputs, label)
            if loss.dtype != numpy.float64:
                raise SystemExit("JAX did not compute in float64")
            weights = optimizer.update(weights, trace.all(update, "gradient"))
            self.values[f"{update}.loss"] = numpy.asarray(loss).reshape(1)
            self.values |= {f"{update}.gradient.{name}": numpy.asarray(gradients[name]) for name in shapes()}
            self.values |= {f"{update + 1}.weight.{name}": weights[name] for name in shapes()}

    def errors(self, trace):
        """Returns the relative L2 error of every loss, gradient and updated weight of a trace."""
        return {name: relative_l2(trace.tensors[name], value) for name, value in self.values.items()}


def plants(trace):
    """Returns planted errors: changes of a trace that are small or that no loss shows."""
    rate = AdamW(trace.notes)
    decayed = 0.0
    for rate.updates in range(1, UPDATES + 1):
        decayed += rate.rate() * rate.weight_decay
    last, name = UPDATES - 1, "layer1.ffn2.weight"
    return {
        "one gradient of 50 larger by 1e-5": (f"{last}.gradient.head.bias", lambda x: x * numpy.float32(1 + 1e-5)),
        "the head's gradient gone, the loss right": (f"{last}.gradient.head.weight", lambda x: x * 0),
        "a sample's label": ("0.label", lambda x: (x + (numpy.arange(len(x)) == 0)).astype(x.dtype) % CLASSES),
        "no weight decay": (f"{UPDATES}.weight.{name}", lambda x: x * numpy.float32(1 + decayed)),
        "one NaN": (f"{last}.gradient.{name}", lambda x: numpy.where(numpy.arange(x.size).reshape(x.shape) == 9, numpy.nan, x)),
    }


def find_plants(path):
    """Checks that each planted error is refused; raises if one passes."""
    for what, (name, change) in plants(Trace(path)).items():
        trace = Trace(path)
        trace.tensors[name] = change(trace.tensors[name])
        errors = Reference(trace).errors(trace)
        if all(error <= LIMIT for error in errors.values()):
            raise SystemExit(f"the check passed a trace with a planted error: {what}")
        print(f"refused: {what} ({worst(errors)}: {errors[worst(errors)]:.1e})")


def check(paths):
    """Prints a line per trace; returns True if all errors are within the limit."""
    print(f"{'trace':<24} {'samples':>8} {'loss':>10} {'weights':>10} {'gradients':>10}  worst gradient")
    all_errors = {}
    for path in paths:
        trace = Trace(path)
        errors = Reference(trace).errors(trace)
        columns = []
        for kind in ("loss", "weight", "gradient"):
            of_kind = {name: error for name, error in errors.items() if name.split(".")[1] == kind}
            columns.append((worst(of_kind), of_kind[worst(of_kind)]))
        figures = " ".join(f"{error:>10.2e}" for _, error in columns)
        print(f"{path.stem:<24} {trace.samples():>8} {figures}  {columns[-1][0]}", flush=True)
        all_errors |= {(path.stem, name): error for name, error in errors.items()}
    last = worst(all_errors)
    passed = all(error <= LIMIT for error in all_errors.values())
    print(f"{len(paths)} traces, {UPDATES} updates each, {len(all_errors)} tensors: worst relative L2 error "
          f"{all_errors[last]:.3e} ({', '.join(last)}), limit {LIMIT:.0e}: {'pass' if passed else 'FAIL'}")
    return passed
