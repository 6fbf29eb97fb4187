#!/usr/bin/env python3
"""Exchanges arrays between stepscope and NumPy, with and without copies: numpy_peer.py LIBRARY.

LIBRARY is the result of `cargo build --features dlpack --example dlpack`. Exit code 0: every element
arrived. cargo xtask oracle runs this.
"""

import ctypes
import sys

import numpy

VERSIONED, USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"
LEGACY, USED_LEGACY = b"dltensor", b"used_dltensor"
CPU = (1, 0)

# PyDLL keeps the interpreter's lock, which NumPy's deleter needs when the library calls it.
library = ctypes.PyDLL(sys.argv[1])
library.give_halves.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
library.give_halves.restype = ctypes.c_void_p
for take in (library.take, library.take_legacy):
    take.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    take.restype = ctypes.c_ssize_t
python = ctypes.pythonapi
python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Halves:
    """A stepscope tensor that any library's `from_dlpack` accepts."""

    def __init__(self, rows, cols):
        self.tensor = library.give_halves(rows, cols)
        assert self.tensor, "the library made no tensor"

    def __dlpack_device__(self):
        return CPU

    def __dlpack__(self, **_):
        return python.PyCapsule_New(self.tensor, VERSIONED, None)


def through_stepscope(array, versioned=True):
    """Returns the array's elements in index order after a copy through a buffer, or None if
    refused."""
    name, used = (VERSIONED, USED_VERSIONED) if versioned else (LEGACY, USED_LEGACY)
    capsule = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    tensor = python.PyCapsule_GetPointer(capsule, name)
    python.PyCapsule_SetName(capsule, used)  # the library owns the tensor now
    out = numpy.empty(array.size, numpy.float32)
    taken = (library.take if versioned else library.take_legacy)(tensor, out.ctypes.data)
    return out if taken == array.size else None


expected = numpy.arange(12, dtype=numpy.float32).reshape(3, 4) / 2
array = numpy.from_dlpack(Halves(3, 4))
assert array.dtype == numpy.float32 and numpy.array_equal(array, expected), array
array[1, 2] = expected[1, 2] = -7  # in the buffer's own memory
for versioned in (True, False):
    views = [array, array.T, array[::-1, ::2], array[1], array[1:2, 3]]
    if versioned:  # legacy capsules cannot express read-only
        views.append(numpy.broadcast_to(array[0, 1], (2, 5)))
    for view in views:
        references = sys.getrefcount(view)
        got = through_stepscope(view, versioned)
        assert numpy.array_equal(got, view.ravel()), (view, got)
        assert sys.getrefcount(view) == references, "the array was not released exactly once"
assert not numpy.array_equal(through_stepscope(array[::-1]), array.ravel()), "elements in another order compared equal"
assert through_stepscope(numpy.arange(3)) is None, "int64 was accepted as float32"
assert numpy.array_equal(array, expected)
print(f"NumPy {numpy.__version__}: every element arrived in both directions")
