"""Prints one-minute bars for the lstm examples.

The logarithms of the ranges of quarters of an hour follow a process with a memory of some hours,
as in tests/programs/models.rs.
"""

import math
import random

MEMORY, QUARTERS, MINUTES = 0.9, 2000, 15

random.seed(3)
state = 0.0
print("high,low")
for _ in range(QUARTERS):
    state = MEMORY * state + math.sqrt(1 - MEMORY**2) * random.gauss(0, 1)
    spread = 1e-3 * math.exp(state + 0.3 * random.gauss(0, 1))
    print(f"{100 * (1 + spread):.6f},100\n" * MINUTES, end="")
