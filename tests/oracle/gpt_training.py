#!/usr/bin/env python3
"""Trains GPT-2 with `stepscope train` and with PyTorch, and compares the losses.

    python3 tests/oracle/gpt_training.py PROGRAM [--updates N] [--limit LOSS] [-- ARGUMENTS of the program]

Both start from the same weights and train on the same samples. PROGRAM is the built `stepscope`.
Without arguments it trains the tiny model in f32 on this repository's Rust sources, as bytes, with
PyTorch on the CPU. For a GPU, with a file of GPT-2's tokens:

    ... gpt_training.py PROGRAM --updates 500 --limit 0.01 -- --device cuda --size 124m \
        --precision bf16 --batch 16 --data train.bin

BF16 is autocast in PyTorch. Prints the mean difference of the loss over each hundred updates. The last
must be at most the limit. For comparison, it also prints the difference between PyTorch and PyTorch
from weights that are each larger by 2^-23, one rounding. Where training is chaotic, as with a high
learning rate, no two roundings agree better. PyTorch and NumPy are installed into target/torch-venv if
missing.

Exit code 0: within the limit. 1: above the limit. 2: the example failed.
"""

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

WORD = (1 << 64) - 1
# The learning rate of the tiny model without arguments; higher ones are chaotic within some hundred
# updates.
RATE = "3e-4"


def mix(word):
    """Computes SplitMix64's output function, as in host/core/src/random.rs."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & WORD
    return word ^ word >> 31


def window(number, tokens, context, seed):
    """Returns the first token of a sample, as in host/train/src/windows.rs."""
    count = (tokens - 1) // context
    run, place = divmod(number, count)
    key = mix(seed ^ mix(run))
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            left, right = right, left ^ mix(key ^ mix(right << 8 | turn)) & mask
        place = left << half | right
        if place < count:
            return mix(key) % ((tokens - 1) % context + 1) + place * context


def weights(path):
    """Returns the tensors of a safetensors file of f32."""
    import torch

    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = bytearray(data[8 + length :])
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found[name] = torch.frombuffer(body[start:end], dtype=torch.float32).reshape(entry["shape"]).clone()
    return found


def loss_of(w, heads, layers, ids, labels):
    """Returns GPT-2's loss of a batch, for weights under transformers' names."""
    import torch
    import torch.nn.functional as F

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    (samples, tokens), width = ids.shape, w["transformer.wte.weight"].shape[1]
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:tokens]
    for layer in range(layers):
        at = f"transformer.h.{layer}"
        qkv = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").split(width, dim=2)
        q, k, v = (part.view(samples, tokens, heads, width // heads).transpose(1, 2) for part in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(samples, tokens, width)
        x = x + linear(mixed, f"{at}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh"), f"{at}.mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def trained(first, config, tokens, options, factor=1.0):
    """Returns PyTorch's losses with the example's settings, from the first weights times a
    factor."""
    import torch

    device = "cuda" if options.device == "cuda" else "cpu"
    w = {name: (tensor * factor).to(device).requires_grad_() for name, tensor in first.items()}
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    groups = [
        {"params": [p for p in w.values() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in w.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    highest = options.learning_rate or {"tiny": 2e-3, "124m": 6e-4, "350m": 3e-4, "774m": 2.5e-4, "1558m": 2e-4}[options.size]
    optimizer = torch.optim.AdamW(groups, lr=highest, betas=(0.9, 0.95))
    warmup, context = min(options.updates // 10, 700), config["n_positions"]
    held_out = max(len(tokens) // 20, context + 1)
    length = len(tokens) - held_out
    losses = []
    for update in range(1, options.updates + 1):
        done = (update - warmup) / max(options.updates - warmup, 1)
        rate = update / warmup if update <= warmup else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = highest * rate
        numbers = range((update - 1) * options.batch, update * options.batch)
        starts = [window(number, length, context, 7) for number in numbers]
        batch = torch.stack([tokens[start : start + context + 1] for start in starts]).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = loss_of(w, config["n_head"], config["n_layer"], batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(arguments):
    done = subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise SystemExit(2)


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--limit", type=float, default=1e-3)
    own = parser.parse_args(sys.argv[1:split])
    try:
        import torch
    except ImportError:
        import environment
        import gpt

        environment.run_in("torch-venv", gpt.PACKAGES)
    import numpy

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        theirs = sys.argv[split + 1 :]
        if not theirs:
            sources = sorted((Path(__file__).resolve().parents[2] / "host").rglob("*.rs"))
            text = b"".join(path.read_bytes() for path in sources)
            numpy.frombuffer(text, dtype=numpy.uint8).astype("<u2").tofile(folder / "text.bin")
            theirs = ["--data", folder / "text.bin", "--tokenizer", "bytes", "--batch", "4", "--context", "64"]
            theirs += ["--learning-rate", RATE, "--device", "emulated"]
        parser = argparse.ArgumentParser()
        for name, default in [("--data", None), ("--size", "tiny"), ("--precision", "f32"), ("--device", "auto")]:
            parser.add_argument(name, default=default)
        parser.add_argument("--batch", type=int, default=8)
        parser.add_argument("--learning-rate", type=float)
        options, _ = parser.parse_known_args([str(argument) for argument in theirs])
        options.updates = own.updates
        arguments = [own.program, "train", *theirs, "--updates", own.updates, "--sample-tokens", "1", "--out", folder]
        run([*arguments, "--trace", folder / "trace.safetensors"])
        first = weights(folder / "transformers/model.safetensors")
        config = json.loads((folder / "transformers/config.json").read_text())
        run(arguments)
        ours = json.loads((folder / "report.json").read_text())["losses"]
        tokens = torch.from_numpy(numpy.fromfile(options.data, dtype="<u2").astype(numpy.int64))
        if int(tokens[0]) == 20240520 & 0xFFFF and len(tokens) > 512:
            tokens = tokens[512:]
        theirs = trained(first, config, tokens, options)
        near = trained(first, config, tokens, options, 1 + 2**-23)
    print("| updates | our mean loss | PyTorch's | difference | PyTorch's from itself |\n|---|---|---|---|---|")
    for start in range(0, own.updates, 100):
        parts = (losses[start : start + 100] for losses in (ours, theirs, near))
        one, other, again = (sum(part) / len(part) for part in parts)
        difference = one - other
        print(f"| {start + 1} to {min(start + 100, own.updates)} | {one:.6f} | {other:.6f} | {difference:+.1e} | {again - other:+.1e} |")
    print(f"\nthe last difference may be {own.limit:.0e}")
    return 0 if abs(difference) <= own.limit else 1


if __name__ == "__main__":
    sys.exit(main())
