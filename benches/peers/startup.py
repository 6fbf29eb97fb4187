"""Times the parts of a PyTorch process up to its first training step, and prints them as JSON.

Run by benches/startup.rs with the argument cuda or cpu.
"""

import time

START = time.perf_counter_ns()

import json
import sys

import torch
import torch.nn.functional as F

IMPORTED = time.perf_counter_ns()

from step import CLASSES, FEATURES, SCALES, CrossAsset  # noqa: E402

BATCH = 256


def main():
    device = sys.argv[-1]
    torch.zeros(1, device=device)
    opened = time.perf_counter_ns()
    net = CrossAsset().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    made = time.perf_counter_ns()
    x, labels = torch.randn(BATCH, SCALES, FEATURES).to(device), (torch.arange(BATCH) % CLASSES).to(device)
    loss = F.cross_entropy(net(x), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    assert torch.isfinite(loss.detach()).item()
    done = time.perf_counter_ns()
    parts = {"import": IMPORTED - START, "opening the device": opened - IMPORTED, "weights": made - opened, "first step": done - made}
    print(json.dumps(list(parts.items())))


main()
