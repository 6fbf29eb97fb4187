"""examples/diffusion.rs in PyTorch: a denoising diffusion model that draws handwritten digits."""

import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import digits
from digits import CLASSES, PIXELS

STEPS, WIDTH, BATCH, UPDATES, WARM_UP, RATE = 60, 256, 64, 3000, 100, 1e-3


class Denoiser(nn.Module):
    """Layers whose outputs are added to their inputs."""

    def __init__(self):
        super().__init__()
        self.input, self.output = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, PIXELS)
        self.step = nn.Embedding(STEPS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, images, steps):
        x, step = self.input(images), self.step(steps)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(F.silu(norm(x) + step))
        return self.output(x)


def shares(steps):
    """Returns the factors of image and noise: 1 and 0 in the step before the first."""
    angle = (steps + 1) / STEPS * 0.98 * math.pi / 2
    return angle.cos(), angle.sin()


def distance(images, others):
    """Returns the mean over images of the squared distance to the nearest of others."""
    return (torch.cdist(images, others).amin(1).square() / PIXELS).mean().item()


torch.manual_seed(7)
training, others = (2 * pixels - 1 for pixels, _ in digits.load())
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), RATE)
rising = LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP - 1)
falling = CosineAnnealingLR(optimizer, UPDATES - WARM_UP, 0.01 * RATE)
schedule = SequentialLR(optimizer, [rising, falling], [WARM_UP - 1])

losses = 0
started = time.perf_counter()
for _ in range(UPDATES):
    clean = training[torch.randint(len(training), (BATCH,))]
    steps = torch.randint(STEPS, (BATCH,))
    signal, spread = shares(steps.unsqueeze(1))
    loss = F.mse_loss(model(signal * clean + spread * torch.randn(BATCH, PIXELS), steps), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses += loss.item()
seconds = time.perf_counter() - started
print(f"mean squared error of the images: {losses / UPDATES:.3f}")

images = torch.randn(CLASSES, PIXELS)
with torch.no_grad():
    for step in range(STEPS - 1, -1, -1):
        step = torch.tensor(step)
        clean = model(images, step.expand(CLASSES))
        (signal, spread), (next_signal, next_spread) = shares(step), shares(step - 1)
        images = next_signal * clean + next_spread * (images - signal * clean) / spread
for row in ((images + 1) * 2.5).clamp(0, 4).int().view(CLASSES, 8, 8).unbind(1):
    print(" ".join("".join(2 * " ░▒▓█"[shade] for shade in image) for image in row.tolist()))
drawn, real = distance(images, training), distance(others, training)
print(f"mean squared distance to the nearest image: {drawn:.3f}, of other real images {real:.3f}")
line = {"example": "diffusion", "framework": "PyTorch", "seconds": seconds, "result": [drawn, real]}
print(json.dumps(line))
sys.exit(drawn > 1.5 * real)
