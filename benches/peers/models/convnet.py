"""examples/convnet.rs in PyTorch: a convolutional net that classifies handwritten digits."""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import digits

SIDE, CHANNELS, BATCH, EPOCHS, RATE, WANTED = 8, (16, 32), 32, 8, 3e-3, 0.95

torch.manual_seed(7)
training, (pixels, labels) = digits.load()
loader = DataLoader(TensorDataset(*training), BATCH, shuffle=True)
model = nn.Sequential(
    nn.Unflatten(1, (1, SIDE, SIDE)),
    nn.Conv2d(1, CHANNELS[0], 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(CHANNELS[0], CHANNELS[1], 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(CHANNELS[1] * (SIDE // 4) ** 2, digits.CLASSES),
)
optimizer = torch.optim.AdamW(model.parameters(), RATE)
total = EPOCHS * len(loader)
warmup = total // 20
rising = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
falling = CosineAnnealingLR(optimizer, total - warmup, 0.05 * RATE)
schedule = SequentialLR(optimizer, [rising, falling], [warmup - 1])

started = time.perf_counter()
for epoch in range(EPOCHS):
    losses = 0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses += loss.item() * len(y)
    with torch.no_grad():
        accuracy = (model(pixels).argmax(1) == labels).double().mean().item()
    mean = losses / len(loader.dataset)
    print(f"epoch {epoch}: loss {mean:.4f}, accuracy {100 * accuracy:.1f} %")
seconds = time.perf_counter() - started

line = {"example": "convnet", "framework": "PyTorch", "seconds": seconds, "result": accuracy}
print(json.dumps(line))
sys.exit(accuracy < WANTED)
