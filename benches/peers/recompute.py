"""Measures the memory of PyTorch's training step by tokens: `python3 benches/peers/recompute.py`.

It needs a GPU, and uses the model of examples/recompute.rs with flash attention, with and without
activation checkpointing. The blocks are those of a small Llama in BF16. f32 master weights are not
counted. It prints the peak allocation during forward and backward, minus the allocation before.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, HIDDEN = 12, 768, 12, 2048


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(rms_norm(x, (WIDTH,), self.norms[0])).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        h = rms_norm(x, (WIDTH,), self.norms[1])
        return x + self.down(silu(self.gate(h)) * self.up(h))


def peak(model, tokens, recompute):
    x = torch.randn(1, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    target = torch.randn_like(x)
    angles = torch.arange(tokens, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, WIDTH // HEADS, 2, device="cuda") / (WIDTH // HEADS))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        h = x
        for block in model:
            h = checkpoint(block, h, cos, sin, use_reentrant=False) if recompute else block(h, cos, sin)
        mse_loss(h, target).backward()
        most = torch.cuda.max_memory_allocated() - before
    return most / 2**20


def main():
    model = nn.ModuleList(Block() for _ in range(LAYERS)).cuda().bfloat16()
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}")
    for tokens in (1024, 2048, 4096, 8192, 16384, 32768):
        all_kept, recompute = (peak(model, tokens, recompute) for recompute in (False, True))
        print(f"{tokens:>8} {all_kept:>9.0f} MiB {recompute:>9.0f} MiB")


main()
