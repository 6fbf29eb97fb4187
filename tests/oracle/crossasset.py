#!/usr/bin/env python3
"""Checks a trace of examples/crossasset against an independent float64 computation.

    cargo run --release --example crossasset -- --trace trace.safetensors
    python3 tests/oracle/crossasset.py trace.safetensors

The trace holds the first step's `input` [B, 12, 193], `label` [B] and `loss`, and `weight.NAME` and `gradient.NAME` for
the 50 tensors. This script computes the loss and all 50 gradients from the input and the weights in float64, with JAX's
automatic differentiation, and prints the relative L2 error of each: |traced - reference| / |reference|. It shares no
code and no derivation with the library.

Exit code 0: the loss and all gradients agree to 1e-5. 1: one does not. 2: the trace cannot be read or is incomplete.

JAX, numpy and safetensors are installed into target/oracle-venv at the first run when they are missing.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TOLERANCE = 1e-5
PACKAGES = ["jax==0.10.2", "numpy==2.4.6", "safetensors==0.8.0"]
SCALES, FEATURES, WIDTH, HEADS, HIDDEN, CLASSES = 12, 193, 256, 4, 1024, 3
HEAD_WIDTH = WIDTH // HEADS
EPSILON = 1e-6


def shapes():
    """The name and shape of every weight tensor, `[in, out]`."""
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


class BadTrace(Exception):
    """The trace cannot be read or lacks something."""


def read_trace(path):
    """Input, label, loss, weights and gradients of the trace, numbers as float64."""
    import numpy
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except Exception as error:  # the reader raises several kinds
        raise BadTrace(f"{path}: cannot be read as safetensors: {error}") from error

    def take(name, shape, kinds):
        if name not in tensors:
            raise BadTrace(f"{path}: has no tensor {name} (it has {len(tensors)} tensors)")
        tensor = tensors[name]
        if len(shape) != tensor.ndim or any(want not in (None, got) for want, got in zip(shape, tensor.shape)):
            raise BadTrace(f"{path}: {name} has shape {tensor.shape}, expected {shape}")
        if tensor.dtype.kind not in kinds:
            raise BadTrace(f"{path}: {name} has type {tensor.dtype}")
        return tensor

    def number(name, shape):
        tensor = take(name, shape, "f").astype(numpy.float64)
        if not numpy.isfinite(tensor).all():
            raise BadTrace(f"{path}: {name} holds a number that is not finite")
        return tensor

    inputs = number("input", (None, SCALES, FEATURES))
    if len(inputs) == 0:
        raise BadTrace(f"{path}: input has no sample")
    label = take("label", (len(inputs),), "iu").astype(numpy.int64)
    if ((label < 0) | (label >= CLASSES)).any():
        raise BadTrace(f"{path}: a label is outside 0..{CLASSES}")
    if "loss" in tensors:
        tensors["loss"] = tensors["loss"].reshape(-1)
    loss = number("loss", (1,))[0]
    weights = {name: number(f"weight.{name}", shape) for name, shape in shapes().items()}
    # A gradient may be anything: that is what is judged here.
    gradients = {name: take(f"gradient.{name}", shape, "f").astype(numpy.float64) for name, shape in shapes().items()}
    known = {"input", "label", "loss"} | {f"{kind}.{name}" for kind in ("weight", "gradient") for name in weights}
    if unknown := sorted(set(tensors) - known):
        raise BadTrace(f"{path}: has tensors that the model does not: {', '.join(unknown)}")
    return inputs, label, loss, weights, gradients


def model_loss(weights, inputs, label):
    """Mean cross-entropy of the model."""
    import jax
    import jax.numpy as jnp

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


def relative_error(got, reference):
    """|got - reference| / |reference|; a reference of zero is met by zero alone."""
    import numpy

    difference, size = numpy.linalg.norm(got - reference), numpy.linalg.norm(reference)
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(difference / size)


def check(path):
    """Prints the table; True when all agree."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import numpy

    inputs, label, loss, weights, gradients = read_trace(path)
    reference_loss, reference = jax.jit(jax.value_and_grad(model_loss))(weights, inputs, label)
    if reference_loss.dtype != numpy.float64:
        raise SystemExit("JAX did not compute in float64")
    errors = {"loss": relative_error(loss, numpy.float64(reference_loss))}
    rows = {"loss": abs(float(reference_loss))}
    for name in shapes():
        wanted = numpy.asarray(reference[name])
        errors[f"gradient.{name}"] = relative_error(gradients[name], wanted)
        rows[f"gradient.{name}"] = float(numpy.linalg.norm(wanted))
    print(f"{'tensor':<32} {'reference L2':>14} {'relative error':>16}")
    for name, error in errors.items():
        failed = "" if error <= TOLERANCE else "  <- above the tolerance"  # a NaN fails too
        print(f"{name:<32} {rows[name]:>14.6e} {error:>16.3e}{failed}")
    weights_count = sum(tensor.size for tensor in weights.values())
    print(f"{len(inputs)} samples, {len(weights)} tensors, {weights_count:,} weights; loss {loss:.8f}, "
          f"reference {float(reference_loss):.8f}")
    failed = [name for name, error in errors.items() if not error <= TOLERANCE]
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    print(f"worst: {worst} {errors[worst]:.3e}, tolerance {TOLERANCE:.0e}: {'FAIL' if failed else 'pass'}")
    return not failed


def install_and_rerun():
    """Makes target/oracle-venv with the packages and runs this script in it."""
    folder = Path(__file__).resolve().parents[2] / "target" / "oracle-venv"
    python = folder / "bin" / "python"
    if Path(sys.prefix).resolve() == folder.resolve():
        raise SystemExit(f"{folder} lacks the packages: remove it and run this again")
    try:
        if not (folder / "ready").exists():
            print(f"installing {', '.join(PACKAGES)} into {folder}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
            (folder / "ready").touch()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot make {folder}: {error}\ninstall {' '.join(PACKAGES)} yourself", file=sys.stderr)
        raise SystemExit(2) from error
    os.execv(python, [str(python), *sys.argv])


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0 if "-h" in sys.argv or "--help" in sys.argv else 2
    if any(importlib.util.find_spec(name) is None for name in ("jax", "numpy", "safetensors")):
        install_and_rerun()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return 0 if check(sys.argv[1]) else 1
    except BadTrace as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
