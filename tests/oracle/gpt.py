#!/usr/bin/env python3
"""Checks `stepscope train` against Hugging Face's transformers: PyTorch on the CPU, in float64.

    python3 tests/oracle/gpt.py PROGRAM [--device auto|emulated|cuda]

PROGRAM is the built `stepscope`. For GPT-2 and Llama, transformers writes random weights, in one file and
in shards. The example loads them, and traces the logits, the loss and every gradient of an f32 batch.
transformers computes the same in float64 from the same weights. Each tensor may be off by LIMIT of
its largest element. Then transformers loads the weights that the example wrote, and each logit must
have the same bits. The comparison must also refuse planted errors: a weight, and a gradient, that are
off by 1e-4.

PyTorch and transformers are installed into target/torch-venv at the first run, about 6 GB.

Exit code 0: all agree. 1: something differs, or a planted error passed. 2: the example failed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import environment

PACKAGES = ["torch==2.15.0", "transformers==5.23.0", "numpy==2.4.6", "safetensors==0.8.0"]
# The allowed error, as a share of a tensor's largest element.
LIMIT = 2e-6
PLANTED = 1e-4
VOCABULARY, CONTEXT, BATCH, WIDTH = 300, 40, 3, 64


def models():
    """Yields (name, model, shard size): small models with heads of 16 columns, for Llama in groups
    of two."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    gpt2 = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=3, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )
    sizes = dict(
        vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=160, rms_norm_eps=1e-5,
    )
    yield "gpt2", GPT2LMHeadModel(gpt2), "50MB"
    yield "llama", LlamaForCausalLM(LlamaConfig(**sizes)), "50MB"
    yield "llama, tied, in shards", LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)), "200KB"


def trace(program, device, folder):
    """Returns the example's trace of a batch with the weights in a folder."""
    import numpy
    from safetensors.numpy import load_file

    tokens = numpy.random.default_rng(3).integers(0, 256, 4000).astype("<u2")
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    words = {"type": "WordLevel", "vocab": {f"w{word}": word for word in range(VOCABULARY)}, "unk_token": "w0"}
    (folder / "words.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    arguments = [
        program, "train", "--weights", folder / "theirs", "--tokenizer", folder / "words.json", "--data", folder / "tokens.bin", "--batch", str(BATCH),
        "--out", folder / "ours", "--trace", folder / "trace.safetensors", "--device", device,
    ]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise SystemExit(2)
    return load_file(folder / "trace.safetensors")


def computed(model, traced):
    """Computes the same trace with transformers in float64."""
    import torch

    model = model.double()
    model.zero_grad()
    ids, labels = (torch.tensor(traced[name]).long() for name in ("ids", "labels"))
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    found = {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters()}
    found = {**found, "logits": logits.detach(), "loss": loss.detach().reshape(1)}
    return {name: value.numpy() for name, value in found.items()}


def errors(got, want):
    """Returns each tensor's largest difference divided by its largest element, for equal sets of
    tensors."""
    import numpy

    extra = set(got) ^ set(want) ^ {"ids", "labels"}
    if extra:
        return {name: numpy.inf for name in extra}
    return {
        name: float(numpy.abs(got[name] - value).max() / numpy.abs(value).max()) if got[name].shape == value.shape else numpy.inf
        for name, value in want.items()
    }


def check(program, device, name, model, shard):
    """Checks one model; returns True if everything agrees."""
    import copy

    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and gains too, because their initial values are all equal.
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model.save_pretrained(folder / "theirs", max_shard_size=shard)
        got = trace(program, device, folder)
        want = computed(copy.deepcopy(model), got)
        found = errors(got, want)
        worst = max((tensor for tensor in found if tensor.startswith("gradient.")), key=found.get)
        agree = max(found.values()) <= LIMIT

        # Planted errors: one weight, and one gradient.
        other = copy.deepcopy(model)
        with torch.no_grad():
            next(other.parameters()).mul_(1 + PLANTED)
        changed = dict(want)
        changed["loss"] = want["loss"] * (1 + PLANTED)
        plants = [computed(other, got), changed]
        for tensor in (worst, "gradient." + list(model.named_parameters())[-1][0]):
            wrong = dict(want)
            wrong[tensor] = want[tensor] * (1 + PLANTED)
            plants.append(wrong)
        refused = sum(max(errors(got, wrong).values()) > LIMIT for wrong in plants)

        ids = torch.tensor(got["ids"]).long()
        back, info = AutoModelForCausalLM.from_pretrained(folder / "ours" / "transformers", output_loading_info=True, dtype=torch.float32)
        lost = [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]
        with torch.no_grad():
            equal = torch.equal(back.eval()(ids).logits, model(ids).logits)
    print(
        f"| {name} | {found['logits']:.1e} | {found['loss']:.1e} | {found[worst]:.1e} | {len(found) - 2} | {refused} of {len(plants)} | "
        f"{'equal' if equal and not lost else f'differ {lost}'} |"
    )
    return agree and refused == len(plants) and equal and not lost


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    environment.run_in("torch-venv", PACKAGES)
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    program, device = sys.argv[1], sys.argv[3] if sys.argv[2:3] == ["--device"] else "auto"
    torch.manual_seed(7)
    print(f"largest error of a tensor, divided by its largest element; at most {LIMIT:.0e}\n")
    print("| weights | logits | loss | worst gradient | gradients | planted errors refused | logits of the written weights |")
    print("|---|---|---|---|---|---|---|")
    agreed = [check(program, device, *model) for model in models()]
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
