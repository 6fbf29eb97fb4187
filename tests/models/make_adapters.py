"""Writes the adapters of tests/models/adapters.rs: kinds of settings and files that PEFT saves, each with the logits
that PEFT computes with it in float64, on a model of tests/models/cases.

    pip install torch transformers peft safetensors
    python3 tests/models/make_adapters.py tests/models

adapters.jsonl has a line for each kind: the model and the adapter_config.json. adapters.safetensors has the tensors of
each kind, `KIND/NAME`, the ids, `KIND/logits`, and the relative error of PEFT's logits in f32, `KIND/f32`.
"""
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers as T
from make_lora import TOKENS, VOCABULARY, base
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|out_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|v_proj)))")
QV = ["q_proj", "v_proj"]
# The keys of the first versions of PEFT.
FIRST = ["base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "lora_alpha", "lora_dropout", "modules_to_save",
         "peft_type", "r", "target_modules", "task_type"]


def first(config, tensors):
    kept = {key: config[key] for key in FIRST} | {"enable_lora": None, "merge_weights": False}
    return kept, tensors


def named(config, tensors):
    rename = lambda name: name.replace(".weight", ".default.weight") if "lora_" in name else name
    return config, {rename(name): tensor for name, tensor in tensors.items()}


def stored(dtype):
    return lambda config, tensors: (config, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def more(**keys):
    return lambda config, tensors: (config | keys, tensors)


# The model, the settings, and a change of what PEFT has saved.
KINDS = {
    "regex_of_unsloth": ("llama31", dict(target_modules=UNSLOTH)),
    "regex_with_lookahead": ("llama31", dict(target_modules=r"^(?!.*\.0\.).*(q_proj|v_proj)$")),
    "regex_of_parts": ("qwen2", dict(target_modules=r".*\.mlp\.(up|down)_proj")),
    "one_layer": ("llama31", dict(target_modules=QV, layers_to_transform=[1])),
    "layer_as_number": ("qwen3", dict(target_modules=QV, layers_to_transform=0)),
    "layers_of_pattern": ("mistral", dict(target_modules=["o_proj"], layers_to_transform=[1], layers_pattern="layers")),
    "layers_of_patterns": ("gpt2", dict(target_modules=["c_attn"], layers_to_transform=[0], layers_pattern=["layers", "h"])),
    "excluded_names": ("llama31", dict(target_modules=QV, exclude_modules=["layers.0.self_attn.q_proj"])),
    "excluded_regex": ("llama31", dict(target_modules=QV, exclude_modules=r".*layers\.0\..*")),
    "all_linear": ("olmo2", dict(target_modules="all-linear")),
    "all_linear_without": ("gpt_neox", dict(target_modules="all-linear", exclude_modules=["dense"])),
    "ranks_of_regex": ("llama31", dict(target_modules=QV, rank_pattern={r"layers\.0\..*\.q_proj": 2, "v_proj": 3})),
    "alphas_of_regex": ("llama31", dict(target_modules=QV, alpha_pattern={r".*\.1\.self_attn\.[qv]_proj": 16})),
    "rslora_with_ranks": ("llama31", dict(target_modules=QV, use_rslora=True, rank_pattern={"q_proj": 8})),
    "names_of_other_models": ("llama31", dict(target_modules=["q_proj", "c_attn", "query_key_value", "qkv_proj"])),
    "whole_names": ("llama31", dict(target_modules=["model.layers.1.mlp.up_proj", "o_proj"], layers_to_transform=[0])),
    "saved_head": ("llama2", dict(target_modules=QV, modules_to_save=["lm_head"])),
    "saved_tables": ("llama2", dict(target_modules=QV, modules_to_save=["embed_tokens", "lm_head"])),
    "saved_norms": ("llama31", dict(target_modules=QV, modules_to_save=["input_layernorm", "norm"])),
    "saved_target": ("llama31", dict(target_modules=["q_proj", "down_proj"], modules_to_save=["down_proj"])),
    "embedding": ("llama2", dict(target_modules=["embed_tokens", "q_proj"])),
    "head": ("llama2", dict(target_modules=["lm_head", "q_proj"])),
    "embedding_and_head": ("llama2", dict(target_modules=["embed_tokens", "lm_head"], use_rslora=True)),
    "stored_embeddings": ("llama2", dict(target_modules=QV), None, True),
    "stored_tied_embeddings": ("smollm2", dict(target_modules=QV), None, True),
    "adapter_in_names": ("llama31", dict(target_modules=QV), named),
    "first_version": ("llama31", dict(target_modules=QV), first),
    "newer_keys": ("llama31", dict(target_modules=QV), more(use_new_thing=False, new_config=None, new_list=[])),
    "unused_settings": ("llama31", dict(target_modules=QV), more(loftq_config={"loftq_bits": 4}, eva_config={"rho": 2.0})),
    "gaussian": ("llama31", dict(target_modules=QV, init_lora_weights="gaussian")),
    "orthogonal": ("llama31", dict(target_modules=QV, init_lora_weights="orthogonal")),
    "conv1d": ("gpt2", dict(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=False)),
    "bf16": ("llama31", dict(target_modules=QV), stored(torch.bfloat16)),
    "f16": ("llama31", dict(target_modules=QV), stored(torch.float16)),
    "dropout": ("gemma3", dict(target_modules="all-linear", lora_dropout=0.1)),
    "parts_of_phi3": ("phi3", dict(target_modules=["qkv_proj", "o_proj", "down_proj"])),
}


def write(here, kind):
    of, settings, change, stores = (*KINDS[kind], None, None)[:4]
    torch.manual_seed(list(KINDS).index(kind) + 1)
    model = get_peft_model(base(here / "cases", of, torch.float32), LoraConfig(task_type="CAUSAL_LM", **dict(r=4, lora_alpha=8) | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or stores and ("embed_tokens" in name or "lm_head" in name):
                parameter.add_(0.05 * torch.randn(parameter.shape))
    ids = torch.randint(1, VOCABULARY, (2, TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model.save_pretrained(folder, **(dict(save_embedding_layers=True) if stores else {}))
        config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": of}
        tensors = load_file(folder / "adapter_model.safetensors")
        if change:
            config, tensors = change(config, tensors)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")

        def logits(dtype):
            loaded = PeftModel.from_pretrained(base(here / "cases", of, dtype), folder, autocast_adapter_dtype=False)
            with torch.no_grad():
                return loaded.to(dtype).eval()(input_ids=ids, use_cache=False).logits.double()

        exact = logits(torch.float64)
        error = ((logits(torch.float32) - exact).norm() / exact.norm()).reshape(1)
    all_tensors = tensors | {"ids": ids.int(), "logits": exact.float(), "f32": error.float()}
    line = {"kind": kind, "model": of, "config": config}
    return line, {f"{kind}/{name}": tensor.contiguous() for name, tensor in all_tensors.items()}


if __name__ == "__main__":
    T.utils.logging.set_verbosity_error()
    here = Path(sys.argv[1])
    lines, tensors = zip(*(write(here, kind) for kind in KINDS))
    (here / "adapters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_file({name: tensor for kind in tensors for name, tensor in kind.items()}, here / "adapters.safetensors")
