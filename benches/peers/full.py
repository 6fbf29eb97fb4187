"""Full fine-tuning of Llama-3.1-8B's shape in transformers, with optimizers of 7 and 5 bytes a weight.

python3 full.py [--cases flashoptim,flashoptim-released,torchao] [--batch 4] [--tokens 2048]

Random weights in BF16, SDPA, gradient checkpointing, every position counted. `flashoptim` is
FlashAdamW with its defaults: masters of 24 bits, moments in 8 bits. `flashoptim-released` updates
in the backward pass, without clipping. `torchao` is AdamW8bit with stochastic rounding of BF16
weights. Each case prints one line of JSON; `update_ms` is the optimizer's part of a step.
"""

import argparse
import gc
import json
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
)


def model_of():
    config = LlamaConfig(**SHAPE)
    config._attn_implementation = "sdpa"
    config.use_cache = False
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def run(case, batch, tokens, steps):
    torch.manual_seed(1)
    model = model_of()
    parameters = list(model.parameters())
    released = case.endswith("-released")
    if case.startswith("flashoptim"):
        from flashoptim import FlashAdamW, cast_model, enable_gradient_release

        cast_model(model, dtype=torch.bfloat16)
        optimizer = FlashAdamW(model.parameters(), lr=1e-5)
        if released:
            enable_gradient_release(model, optimizer)
    else:
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(parameters, lr=1e-5, bf16_stochastic_round=True)
    ids = torch.randint(0, SHAPE["vocab_size"], (batch, tokens), device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if not released:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        events[0].record()
        optimizer.step()
        events[1].record()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(3):
        loss = step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    samples, updates = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
        updates.append(events[0].elapsed_time(events[1]))
    median = sorted(samples)[len(samples) // 2]
    free, total = torch.cuda.mem_get_info()
    return dict(
        case=case,
        batch=batch,
        tokens=tokens,
        tokens_per_s=round(batch * tokens / median),
        seconds=samples,
        update_ms=None if released else updates,
        weights=sum(weight.numel() for weight in parameters),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30,
        used_gib=(total - free) / 2**30,
        loss=loss.item(),
    )


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--cases", default="flashoptim,flashoptim-released,torchao")
    arguments.add_argument("--batch", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=2048)
    arguments.add_argument("--steps", type=int, default=8)
    arguments = arguments.parse_args()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for case in arguments.cases.split(","):
        try:
            result = run(case, arguments.batch, arguments.tokens, arguments.steps)
        except Exception as error:  # one case must not take the others with it
            result = dict(case=case, error=str(error).splitlines()[0][:300])
        print(json.dumps(result), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


main()
