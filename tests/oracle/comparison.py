"""Code shared by both checks: reading a trace, comparing with a reference, and a trace's errors."""

import json

import numpy
from safetensors import safe_open


class BadTrace(Exception):
    """A trace that cannot be read or is incomplete."""


def read(path):
    """Returns the tensors of a safetensors file by name, and its notes."""
    try:
        with safe_open(path, framework="numpy") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            return {name: file.get_tensor(name) for name in file.keys()}, notes
    except Exception as error:  # the reader raises several kinds
        raise BadTrace(f"{path}: is not a trace: {error!r}") from error


def as_float64(tensor):
    """Converts floating-point numbers to float64, and whole numbers to int64."""
    return tensor.astype(numpy.float64) if tensor.dtype.kind == "f" else tensor.astype(numpy.int64)


def relative_l2(got, reference):
    """Returns |got - reference| / |reference|. Only zero matches a reference of zero. NaN if either
    is."""
    got, reference = as_float64(numpy.asarray(got)), numpy.asarray(reference)
    if got.shape != reference.shape:
        raise BadTrace(f"shape {got.shape}, expected {reference.shape}")
    difference, size = numpy.linalg.norm(got - reference), numpy.linalg.norm(reference)
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(difference / size)


def worst(errors):
    """Returns the key of the largest error; NaN counts as the largest."""
    return max(errors, key=lambda key: (errors[key] != errors[key], errors[key]))
