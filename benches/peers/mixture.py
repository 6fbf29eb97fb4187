"""Adapters of attention in Qwen3-30B-A3B's shape with fewer layers, by transformers and PEFT.

python3 mixture.py [--layers 12] [--experts grouped_mm,eager] [--batch 4] [--tokens 2048]

Random weights in BF16, SDPA, gradient checkpointing, adapters of rank 16 on the four projections
of attention, every position counted. Experts stay in BF16: transformers 5 keeps them in one
parameter, which bitsandbytes does not quantize. Each implementation of the experts prints one line
of JSON.
"""

import argparse
import gc
import json
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.initialization import no_init_weights

SHAPE = dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)


def model_of(layers, experts):
    config = Qwen3MoeConfig(num_hidden_layers=layers, **SHAPE)
    config._attn_implementation = "sdpa"
    config._experts_implementation = experts
    config.use_cache = False
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), no_init_weights():
        model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def run(experts, layers, batch, tokens, steps=6):
    model = model_of(layers, experts)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(0, SHAPE["vocab_size"], (batch, tokens), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        start = time.time()
        step()
        seconds.append(time.time() - start)
    rate, peak = round(batch * tokens * steps / sum(seconds)), torch.cuda.max_memory_allocated()
    print(json.dumps(dict(name=experts, tokens_per_second=rate, peak_bytes=peak, seconds=seconds)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", default="grouped_mm,eager")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    for experts in arguments.experts.split(","):
        run(experts, arguments.layers, arguments.batch, arguments.tokens)
        gc.collect()
        torch.cuda.empty_cache()
