"""Writes the cases of tests/models/lora.rs: for each case an adapter as PEFT saves it, and what PEFT computes
with it in float64, on a model of tests/models/cases.

    pip install torch transformers peft safetensors
    python3 tests/models/make_lora.py tests/models/cases tests/models/lora [case ..]

Cases of experts are written with transformers 4.57, in which each matrix of an expert is a module. With
transformers 5, which holds all experts of a layer in two parameters, PEFT converts such adapters when it loads them.

With --load FOLDER, it loads adapters and merged models that STEPSCOPE_LORA=FOLDER has made the tests
write, and compares their logits with those of PEFT's own.
"""
import argparse
import json
import shutil
from pathlib import Path

import torch
import transformers as T
from make import EAGER, VERSION
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

VOCABULARY, TOKENS, UPDATES = 40, 14, 100
# The model, and the settings of its adapters.
CASES = {
    "llama": ("llama31", dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "llama_saved": ("llama_biases", dict(
        r=8, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "qwen2": ("qwen2", dict(
        r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
        rank_pattern={"k_proj": 3, "layers.1.self_attn.o_proj": 2}, alpha_pattern={"o_proj": 5})),
    "gpt2": ("gpt2", dict(r=4, lora_alpha=8, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True)),
    "phi3": ("phi3", dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "gate_up_proj"])),
    "gpt_neox": ("gpt_neox", dict(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["dense_4h_to_h"])),
    "mixtral": ("mixtral", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "w1", "w2", "w3"])),
    "qwen3_moe": ("qwen3_moe", dict(
        r=8, lora_alpha=8, target_modules=["o_proj", "gate_proj", "up_proj", "down_proj"], rank_pattern={"down_proj": 3},
        alpha_pattern={"up_proj": 5}, modules_to_save=["gate"])),
}
# The cases of experts.
EXPERTS = ["mixtral", "qwen3_moe"]


def base(models, name, dtype):
    config, renamed = json.loads((models / name / "config.json").read_text()), {}
    if config["model_type"] == "qwen3_moe" and VERSION < 5 and "num_local_experts" in config:
        # The number of experts has another name in transformers 4.
        renamed = dict(num_experts=config["num_local_experts"])
    return T.AutoModelForCausalLM.from_pretrained(models / name, dtype=dtype, **EAGER, **renamed)


def file_name(key):
    return key.replace(".default", "").replace(".modules_to_save", "").replace(".base_layer", "")


def loss_of(model, inputs, labels):
    logits = model(input_ids=inputs, use_cache=False).logits
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def write(models, folder, name):
    of, settings = CASES[name]
    torch.manual_seed(list(CASES).index(name) + 100)
    model = get_peft_model(base(models, of, torch.float32), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    shutil.rmtree(folder / name, ignore_errors=True)
    model.save_pretrained(folder / name)
    (folder / name / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / name / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = of
    (folder / name / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ids = torch.randint(1, VOCABULARY, (2, TOKENS + 1))
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def load(dtype):
        loaded = PeftModel.from_pretrained(base(models, of, dtype), folder / name, is_trainable=True, autocast_adapter_dtype=False)
        return loaded.to(dtype).eval()

    def results(dtype):
        model = load(dtype)
        logits, loss = loss_of(model, inputs, labels)
        loss.backward()
        trained = {file_name(key): p for key, p in model.named_parameters() if p.requires_grad}
        gradients = {f"gradient.{key}": p.grad.double() for key, p in trained.items()}
        found = {"logits": logits.detach().double(), "loss": loss.detach().double().reshape(1)} | gradients
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
        losses = []
        for _ in range(UPDATES):
            # An expert without a token has a gradient of zero in each form of the experts.
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, inputs, labels)[1]
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().double())
        return found, torch.stack(losses)

    (rounded, rounded_losses), (exact, exact_losses) = results(torch.float32), results(torch.float64)
    errors = {f"f32.{key}": ((rounded[key] - exact[key]).norm() / exact[key].norm()).reshape(1) for key in exact}
    before = base(models, of, torch.float64).state_dict()
    merged = load(torch.float64).merge_and_unload().state_dict()
    changed = {f"merged.{key}": value for key, value in merged.items() if not torch.equal(value, before[key])}
    if of == "gpt_neox":
        changed = {key.replace("lm_head", "embed_out"): value for key, value in changed.items()}
    saved = {"ids": inputs.int(), "labels": labels.int()}
    saved |= {key: value.float().contiguous() for key, value in (exact | errors | changed).items()}
    # Losses need more than f32 to tell an error of 1e-6.
    saved |= {"losses": exact_losses, "f32.losses": rounded_losses}
    save_file(saved, folder / name / "expected.safetensors")
    print(name, sum(f.stat().st_size for f in (folder / name).iterdir()), f"{(rounded_losses / exact_losses - 1).abs().max():.1e}")


def check(models, folder, written, name):
    of, _ = CASES[name]
    expected = load_file(folder / name / "expected.safetensors")
    inputs = expected["ids"].long()
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base(models, of, torch.float64), written / name / "adapter", autocast_adapter_dtype=False)
        merged = base(written / name, "merged", torch.float64)
        for what, model in [("adapter", adapted.double()), ("merged", merged)]:
            logits = model.eval()(input_ids=inputs, use_cache=False).logits
            difference = ((logits - expected["logits"]).norm() / expected["logits"].norm()).item()
            print(f"{name}: {what}: logits differ by {difference:.1e}")
            assert difference < 2e-6, (name, what, difference)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    T.utils.logging.set_verbosity_error()
    for case in arguments.cases or [case for case in CASES if arguments.load or (case in EXPERTS) == (VERSION < 5)]:
        if arguments.load:
            check(arguments.models, arguments.folder, arguments.load, case)
        else:
            write(arguments.models, arguments.folder, case)
