"""Operands of the peers that measure products and attention."""

import torch


def uniform(shape, device, dtype):
    """Returns values in [-1, 1), drawn as f32 and then rounded; benches/harness/values.rs says why.

    `torch.rand` of BF16 draws multiples of 2^-8, whose products need less power.
    """
    return torch.rand(shape, device=device).mul_(2).sub_(1).to(dtype)
