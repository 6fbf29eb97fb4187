"""examples/mixture.rs in PyTorch: a small GPT whose feed-forward layers are mixtures of experts."""

import argparse
import json
import sys
import time
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

CONTEXT, WIDTH, HEADS, LAYERS, EXPERTS, CHOSEN, BATCH, UPDATES = 64, 64, 4, 2, 4, 2, 8, 400


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH, bias=False),
                nn.SiLU(),
                nn.Linear(2 * WIDTH, WIDTH, bias=False),
            )
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        """Returns the result, and a loss that is 1 if the tokens are spread evenly."""
        rows = x.flatten(0, -2)
        probabilities = self.router(rows).softmax(-1)
        gates, ids = probabilities.topk(CHOSEN)
        gates = gates / gates.sum(-1, keepdim=True)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(ids == number)
            y = y.index_add(0, token, gates[token, place, None] * expert(rows[token]))
        share = F.one_hot(ids, EXPERTS).float().mean((0, 1))
        return y.view_as(x), EXPERTS * (share * probabilities.mean(0)).sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mixture = Mixture()

    def forward(self, x, mask):
        z = self.norm1(x)
        x = x + self.attention(z, z, z, need_weights=False, attn_mask=mask, is_causal=True)[0]
        y, loss = self.mixture(self.norm2(x))
        return x + y, loss


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, ids):
        """Returns the logits of the next bytes, and the sum of the mixtures' losses."""
        x, losses = self.tokens(ids) + self.positions.weight, 0
        for block in self.blocks:
            x, loss = block(x, self.mask)
            losses = losses + loss
        return self.head(self.norm(x)), losses


def cross_entropy(logits, windows):
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path)
text = torch.tensor(list(parser.parse_args().text.read_bytes()))
parts = text.tensor_split([len(text) // 10 * 9])
training, held_out = (part.unfold(0, CONTEXT + 1, CONTEXT) for part in parts)

torch.manual_seed(7)
loader = DataLoader(training, BATCH, shuffle=True, drop_last=True)
model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
losses = 0
started = time.perf_counter()
for windows in islice(chain.from_iterable(repeat(loader)), UPDATES):
    logits, balance = model(windows[:, :-1])
    loss = cross_entropy(logits, windows) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses += loss.item()
seconds = time.perf_counter() - started

with torch.no_grad():
    loss = cross_entropy(model(held_out[:, :-1])[0], held_out).item()
    print(f"loss {losses / UPDATES:.3f}, held out {loss:.3f} nats a byte")
    written = parts[1][:CONTEXT]
    for _ in range(200):
        logits = model(written[None, -CONTEXT:])[0][0, -1]
        written = torch.cat([written, (logits / 0.8).softmax(-1).multinomial(1)])
print(bytes(written.tolist()).decode(errors="replace"))
line = {"example": "mixture", "framework": "PyTorch", "seconds": seconds, "result": loss}
print(json.dumps(line))
sys.exit(loss > 2.6)
