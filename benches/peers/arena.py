"""torch.empty of 48 KiB on the GPU: nanoseconds each, a JSON list on standard output; benches/arena.rs runs it."""

import json
import time

import torch

if not torch.cuda.is_available():
    raise SystemExit("PyTorch sees no GPU")
SAMPLES, PER_SAMPLE, ELEMENTS = 50, 2000, 12 * 1024


def sample():
    start = time.perf_counter_ns()
    for _ in range(PER_SAMPLE):
        torch.empty(ELEMENTS, device="cuda")
    return (time.perf_counter_ns() - start) / PER_SAMPLE


sample()
print(json.dumps([sample() for _ in range(SAMPLES)]))
