"""examples/distillation.rs in PyTorch: distillation of a small GPT into a smaller one."""

import argparse
import json
import sys
import time
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

CONTEXT, BATCH, UPDATES, HEADS = 32, 16, 500, 4
# The bytes that the model tells apart. All others are the last.
CLASSES = 128


class Gpt(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(CLASSES, width), nn.Embedding(CONTEXT, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        gelu = partial(F.gelu, approximate="tanh")
        block = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0, activation=gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        return self.head(self.blocks(x, self.mask, is_causal=True))


def cross_entropy(logits, windows):
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def fit(model, teacher=None):
    """Trains the model, and returns its held-out loss."""
    order = torch.Generator().manual_seed(7)
    loader = DataLoader(training, BATCH, shuffle=True, drop_last=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for windows in islice(chain.from_iterable(repeat(loader)), UPDATES):
        logits = model(windows[:, :-1])
        loss = cross_entropy(logits, windows)
        if teacher is not None:
            with torch.no_grad():
                theirs = teacher(windows[:, :-1]).log_softmax(-1).flatten(0, 1)
            ours = logits.log_softmax(-1).flatten(0, 1)
            divergence = F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
            loss = 0.3 * loss + 0.7 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return cross_entropy(model(held_out[:, :-1]), held_out).item()


parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path)
text = torch.tensor(list(parser.parse_args().text.read_bytes())).clamp(max=CLASSES - 1)
parts = text.tensor_split([len(text) // 10 * 9])
training, held_out = (part.unfold(0, CONTEXT + 1, CONTEXT) for part in parts)

torch.manual_seed(7)
teacher = Gpt(96, 2)
started = time.perf_counter()
losses = {
    "teacher": fit(teacher),
    "student": fit(Gpt(32, 1)),
    "student, distilled": fit(Gpt(32, 1), teacher),
}
seconds = time.perf_counter() - started
for name, loss in losses.items():
    print(f"{name:<18} held out {loss:.3f} nats a byte")
line = {"example": "distillation", "framework": "PyTorch", "seconds": seconds, "result": losses}
print(json.dumps(line))
sys.exit(losses["student, distilled"] >= losses["student"])
