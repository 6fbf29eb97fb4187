"""The handwritten digits of examples/digits/digits.bin, whose format data.py there documents."""

from pathlib import Path

import numpy as np
import torch

CLASSES, PIXELS, VALIDATION = 10, 64, 360
FILE = Path(__file__).parents[3] / "examples/digits/digits.bin"


def load():
    """Returns pixels of 0 to 1 and digits, of the training and of the validation images."""
    records = np.frombuffer(FILE.read_bytes(), np.uint8).reshape(-1, 1 + PIXELS * 5 // 8)
    bits = np.unpackbits(records[:, 1:], axis=1).reshape(-1, PIXELS, 5)
    pixels = torch.tensor(bits @ (16, 8, 4, 2, 1), dtype=torch.float32) / 16
    digits = torch.tensor(records[:, 0], dtype=torch.long)
    order = torch.randperm(len(digits))
    return [(pixels[part], digits[part]) for part in (order[VALIDATION:], order[:VALIDATION])]
