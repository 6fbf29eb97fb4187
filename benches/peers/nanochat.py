"""A training step of nanochat's own model and optimizer, compiled, in PyTorch.

PYTHONPATH=CHECKOUT python3 nanochat.py [--depth 12,24] [--batch 16] [--tokens 2048] [--updates 12]

CHECKOUT is a clone of https://github.com/karpathy/nanochat. The model has the extents that
`scripts.base_train` gives a depth, the pattern of windows `--windows`, a vocabulary of 32,768, and
random tokens. Weights of products are f32 and multiplied in BF16, as nanochat does it, and an
update has one step. Each depth prints one line of JSON.
"""

import argparse
import gc
import json
import time

import torch
from nanochat.flash_attention import HAS_FA3
from nanochat.gpt import GPT, GPTConfig

HEAD = 128


def run(depth, batch, tokens, updates, windows, warmups=4):
    width = -(-depth * 64 // HEAD) * HEAD
    heads = width // HEAD
    config = GPTConfig(tokens, 32768, depth, heads, heads, width, windows)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cuda")
    torch.manual_seed(1)
    model.init_weights()
    optimizer = model.setup_optimizer()
    weights = sum(parameter.numel() for parameter in model.parameters())
    model = torch.compile(model, dynamic=False)
    ids = torch.randint(0, config.vocab_size, (batch, tokens + 1), device="cuda")

    def update():
        model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    for _ in range(warmups):
        update()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(updates):
        start = time.time()
        update()
        seconds.append(time.time() - start)
    rate, peak = round(batch * tokens * updates / sum(seconds)), torch.cuda.max_memory_allocated()
    line = dict(depth=depth, windows=windows, batch=batch, tokens=tokens, weights=weights, flash_attention_3=HAS_FA3)
    print(json.dumps(line | dict(tokens_per_second=rate, peak_bytes=peak, seconds=seconds)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", default="12,24")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--windows", default="L")
    arguments = parser.parse_args()
    for depth in arguments.depth.split(","):
        run(int(depth), arguments.batch, arguments.tokens, arguments.updates, arguments.windows)
        gc.collect()
        torch.cuda.empty_cache()
