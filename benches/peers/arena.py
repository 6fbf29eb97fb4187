"""Times torch.empty of 48 KiB on the GPU; run by benches/arena.rs. Prints a JSON list of
nanoseconds."""

import json
import time

import torch

if not torch.cuda.is_available():
    raise SystemExit("PyTorch finds no GPU")
SAMPLES, PER_SAMPLE, ELEMENTS = 50, 2000, 12 * 1024


def sample():
    start = time.perf_counter_ns()
    for _ in range(PER_SAMPLE):
        torch.empty(ELEMENTS, device="cuda")
    return (time.perf_counter_ns() - start) / PER_SAMPLE


sample()
print(json.dumps([sample() for _ in range(SAMPLES)]))
