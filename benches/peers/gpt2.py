"""Trains GPT-2 with PyTorch on random tokens.

Prints a line of JSON with tokens per second and the allocator's peak in bytes.

    python3 benches/peers/gpt2.py [--precision bf16] [--size 350m --batch 8]    # one GPU
    python3 -m torch.distributed.run --nproc-per-node 4 benches/peers/gpt2.py   # DDP

It uses what PyTorch's documentation recommends: compilation, flash attention, fused AdamW, clipping
by the global norm 1.0, and for bf16 autocast over f32 weights. A sample has 1024 tokens, and an
update of GPT-2 124M 16 samples per GPU.
"""

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, TOKENS = 50304, 1024
# Width, heads, layers.
SIZES = {"124m": (768, 12, 12), "350m": (1024, 16, 24)}
WARM_UP = 8


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, h):
        heads = self.attention(self.norm1(h)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        h = h + self.output(mixed.transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm2(h))


class Gpt2(nn.Module):
    def __init__(self, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width, heads) for _ in range(layers))), nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids, targets):
        h = self.tokens(ids) + self.positions.weight
        logits = self.norm(self.blocks(h)) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["f32", "tf32", "bf16"], default="bf16")
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="let a profiler see only the last update; for benches/bytes.py")
    given = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = given.precision == "tf32"
    torch.manual_seed(7 + rank)
    model = Gpt2(*SIZES[given.size]).cuda()
    if ranks > 1:
        dist.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    step = torch.compile(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=True)
    cast = torch.autocast("cuda", torch.bfloat16) if given.precision == "bf16" else contextlib.nullcontext()
    seconds = []
    for number in range(WARM_UP + given.updates):
        if given.profile and number + 1 == WARM_UP + given.updates:
            torch.cuda.profiler.start()
        ids = torch.randint(VOCABULARY, (given.batch, TOKENS + 1), device="cuda")
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with cast:
            loss = step(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    if given.profile:
        torch.cuda.profiler.stop()
    median = statistics.median(seconds[WARM_UP:])
    if rank == 0:
        told = {"ranks": ranks, "size": given.size, "precision": given.precision}
        told["tokens_per_second"] = ranks * given.batch * TOKENS / median
        print(json.dumps(told | {"peak_bytes": torch.cuda.max_memory_allocated(), "seconds": seconds[WARM_UP:]}), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


main()
