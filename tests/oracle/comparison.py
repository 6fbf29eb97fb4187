"""What both checks share: reading a trace, comparing with a reference, and what is wrong with a trace."""

import json

import numpy
from safetensors import safe_open


class BadTrace(Exception):
    """A trace cannot be read or lacks something."""


def read(path):
    """The tensors of a safetensors file by name, and its notes."""
    try:
        with safe_open(path, framework="numpy") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            return {name: file.get_tensor(name) for name in file.keys()}, notes
    except Exception as error:  # the reader raises several kinds
        raise BadTrace(f"{path}: is no trace: {error!r}") from error


def as_float64(tensor):
    """Floating-point numbers as float64; whole numbers as they are."""
    return tensor.astype(numpy.float64) if tensor.dtype.kind == "f" else tensor.astype(numpy.int64)


def relative_l2(got, reference):
    """|got - reference| / |reference|; a reference of zero is met by zero alone. NaN where one of them is."""
    got, reference = as_float64(numpy.asarray(got)), numpy.asarray(reference)
    if got.shape != reference.shape:
        raise BadTrace(f"shape {got.shape}, expected {reference.shape}")
    difference, size = numpy.linalg.norm(got - reference), numpy.linalg.norm(reference)
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(difference / size)


def worst(errors):
    """The key of the largest error; a NaN is larger than any."""
    return max(errors, key=lambda key: (errors[key] != errors[key], errors[key]))
