"""Writes the cases of tests/models.rs: for each family a small random model as transformers saves it,
and what transformers computes with it in float64.

    pip install torch transformers safetensors
    python3 tests/models/make.py FOLDER [--dtype bfloat16] [--shard 20KB] [family ..]

The committed cases are in tests/models/cases, in F32 and in one file. Other folders are tested with
STEPSCOPE_MODELS=FOLDER.
"""
import argparse
import json
import shutil
from pathlib import Path

import torch
import transformers as T
from safetensors.torch import save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

VERSION = int(T.__version__.split(".")[0])
VOCABULARY, TOKENS, PADDING = 40, 14, 3
# The plain loops of attention and, in transformers 5, of experts, which also take float64.
EAGER = dict(attn_implementation="eager", **(dict(experts_implementation="eager") if VERSION >= 5 else {}))
LLAMA = dict(
    vocab_size=VOCABULARY, max_position_embeddings=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=24, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)


def rope(base, **scaling):
    """Returns the settings of rotary positions as this version of transformers has them."""
    if VERSION >= 5:
        return dict(rope_parameters=dict(rope_theta=base, **(scaling or dict(rope_type="default"))))
    return dict(rope_theta=base, **(dict(rope_scaling=scaling) if scaling else {}))


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
def longrope(context, before):
    """Returns a Phi-3 with this context before scaling. transformers 4 allows three keys, of which one is `type`."""
    factors = dict(short_factor=[1.0, 1.1, 1.25, 1.5], long_factor=[1.5, 2.25, 4.1, 7.9])
    scaling = factors | {"rope_type" if VERSION >= 5 else "type": "longrope"}
    settings = dict(LLAMA, max_position_embeddings=context, original_max_position_embeddings=before, pad_token_id=0)
    return T.Phi3ForCausalLM(T.Phi3Config(**settings, **rope(10000.0, **scaling)))


# Each token uses two experts.
MOE = dict(num_experts_per_tok=2)
# The routers' auxiliary loss is a part of the loss, with a factor that makes it a large one.
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.5)
NEOX = dict(rope_parameters=dict(rope_theta=10000.0, rope_type="default", partial_rotary_factor=0.5))
FAMILIES = {
    "gpt2": lambda: T.GPT2LMHeadModel(T.GPT2Config(vocab_size=VOCABULARY, n_positions=24, n_embd=16, n_layer=2, n_head=2)),
    "llama2": lambda: T.LlamaForCausalLM(T.LlamaConfig(**{**LLAMA, "num_key_value_heads": 2}, **rope(10000.0))),
    "llama31": lambda: T.LlamaForCausalLM(T.LlamaConfig(**{**LLAMA, "max_position_embeddings": 512}, **rope(10000.0, **LLAMA3))),
    "llama_linear": lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA, **rope(10000.0, rope_type="linear", factor=4.0))),
    "llama_biases": lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True, head_dim=16, **rope(10000.0))),
    "smollm2": lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA, tie_word_embeddings=True, **rope(100000.0))),
    "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**LLAMA, sliding_window=5, **rope(10000.0))),
    "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=1, **rope(1000000.0))),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True, **rope(1000000.0))),
    "qwen3_yarn": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**{**LLAMA, "max_position_embeddings": 256}, head_dim=16, **rope(10000.0, **YARN))),
    "smollm3": lambda: T.SmolLM3ForCausalLM(T.SmolLM3Config(**LLAMA, no_rope_layer_interval=2, pad_token_id=0, **rope(5000000.0))),
    "phi3": lambda: T.Phi3ForCausalLM(T.Phi3Config(**LLAMA, sliding_window=5, pad_token_id=0, **rope(10000.0))),
    "gpt_neox": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, **(NEOX if VERSION >= 5 else dict(rotary_pct=0.5)))),
    "gemma3": lambda: T.Gemma3ForCausalLM(T.Gemma3TextConfig(
        **{**LLAMA, "num_hidden_layers": 3}, head_dim=16, sliding_window=5, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], pad_token_id=0)),
    "arcee": lambda: T.ArceeForCausalLM(T.ArceeConfig(**{**LLAMA, "max_position_embeddings": 256}, **rope(10000.0, **YARN))),
    "phi3_long": lambda: longrope(64, 8),
    "phi3_short": lambda: longrope(256, 32),
    "olmo2": lambda: T.Olmo2ForCausalLM(T.Olmo2Config(**LLAMA, pad_token_id=0, **rope(500000.0))),
    "qwen3_moe": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(
        **{**LLAMA, "num_hidden_layers": 3}, **MOE, num_experts=4, head_dim=16, moe_intermediate_size=8, norm_topk_prob=True,
        mlp_only_layers=[1], pad_token_id=0, **rope(10000.0))),
    "qwen3_moe_window": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(
        **LLAMA, **MOE, num_experts=5, head_dim=16, moe_intermediate_size=12, norm_topk_prob=False, decoder_sparse_step=2,
        attention_bias=True, use_sliding_window=True, sliding_window=5, pad_token_id=0, **rope(10000.0))),
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**LLAMA, **MOE, num_local_experts=4, **rope(1000000.0))),
    "mixtral_balanced": lambda: T.MixtralForCausalLM(T.MixtralConfig(
        **LLAMA, **MOE, num_local_experts=4, **BALANCED, **rope(1000000.0))),
    "qwen3_moe_balanced": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(
        **{**LLAMA, "num_hidden_layers": 3}, **MOE, num_experts=6, head_dim=16, moe_intermediate_size=8, norm_topk_prob=True,
        mlp_only_layers=[1], pad_token_id=0, **BALANCED, **rope(10000.0))),
}


def in_file(name, key, parameter):
    """Returns the gradient of a parameter as the tensors of a file. transformers 5 holds all experts of a layer in two
    parameters, and its files have the matrices of each expert, as those of transformers 4."""
    gradient = parameter.grad.double()
    if name == "gpt_neox":
        key = key.replace("lm_head", "embed_out")
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if name.startswith("mixtral"):
        gate, up, down = "w1", "w3", "w2"
        key = key.replace(".mlp.", ".block_sparse_moe.")
    before = key.partition(".experts.")[0]
    if key.endswith("experts.gate_up_proj"):
        halves = zip((gate, up), gradient.chunk(2, dim=1))
        return [(f"{before}.experts.{e}.{part}.weight", half[e]) for part, half in halves for e in range(len(half))]
    if key.endswith("experts.down_proj"):
        return [(f"{before}.experts.{e}.{down}.weight", gradient[e]) for e in range(len(gradient))]
    return [(key, gradient)]


def write(folder, name, dtype, shard):
    torch.manual_seed(list(FAMILIES).index(name))
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    shutil.rmtree(folder / name, ignore_errors=True)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder / name, max_shard_size=shard)
    (folder / name / "generation_config.json").unlink(missing_ok=True)
    # Token 0 is padding for some families, whose row of the table then has no gradient.
    ids = torch.randint(1, VOCABULARY, (2, TOKENS + 1))
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def results(dtype):
        model = T.AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype, **EAGER).eval()
        results, more = model(inputs, use_cache=False), {}
        logits = results.logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if getattr(model.config, "output_router_logits", False):
            loss += model.config.router_aux_loss_coef * results.aux_loss
            # The same loss if the last tokens of each sample are padding.
            real = (torch.arange(TOKENS) < TOKENS - PADDING).repeat(len(inputs), 1)
            experts = results.router_logits[0].shape[1]
            masked = load_balancing_loss_func(results.router_logits, experts, model.config.num_experts_per_tok, real)
            more = {"masked": model.config.router_aux_loss_coef * masked.detach().double().reshape(1)}
        loss.backward()
        gradients = {f"gradient.{key}": value for p in model.named_parameters() for key, value in in_file(name, *p)}
        return {"logits": logits.detach().double(), "loss": loss.detach().double().reshape(1)} | gradients | more

    rounded, exact = results(torch.float32), results(torch.float64)
    # The relative error of transformers itself in f32.
    errors = {f"f32.{key}": ((rounded[key] - exact[key]).norm() / exact[key].norm()).reshape(1) for key in exact}
    saved = {"ids": inputs.int(), "labels": labels.int()} | {key: value.float() for key, value in (exact | errors).items()}
    save_file(saved, folder / name / "expected.safetensors")
    print(name, sum(f.stat().st_size for f in (folder / name).iterdir()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shard", default="50GB")
    parser.add_argument("families", nargs="*")
    arguments = parser.parse_args()
    T.utils.logging.set_verbosity_error()
    for family in arguments.families or FAMILIES:
        write(arguments.folder, family, arguments.dtype, arguments.shard)
