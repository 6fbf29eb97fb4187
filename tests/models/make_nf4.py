"""Writes the cases of tests/models/nf4.rs: matrices that bitsandbytes quantises, and a model of
tests/models/cases in NF4 as transformers saves it, with adapters and what PEFT computes with them.

    pip install torch transformers peft safetensors bitsandbytes
    python3 tests/models/make_nf4.py tests/models

With transformers 4.57, whose experts are linear layers, it writes only the mixture of experts.
The models' weights in float64 are those that bitsandbytes decodes in f32.
"""
import shutil
import sys
import tempfile
from pathlib import Path

import bitsandbytes.functional as F
import make_lora
import torch
import transformers as T
from make import LLAMA, MOE, VERSION
from safetensors.torch import save_file

MODEL = "llama31"
# The router is a matrix in NF4 too.
MIXTURE = dict(LLAMA, **MOE, num_experts=8, head_dim=16, moe_intermediate_size=8, norm_topk_prob=True, pad_token_id=0)
# Outputs, inputs and type: one block, blocks across rows, several groups of scales, scales that are summed in a
# cascade, and weights that are all zero.
MATRICES = [
    (8, 8, torch.float32), (24, 24, torch.bfloat16), (16, 72, torch.float32), (24, 1400, torch.float32),
    (24, 24, torch.float16), (16, 16, torch.float32)]
# All linear layers but the head and the router.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def decoded(codes, state, dtype):
    # As one row: on the CPU, bitsandbytes decodes rows shorter than a block with wrong scales.
    state.dtype, shape = dtype, torch.Size(state.shape)
    state.shape = (shape.numel(),)
    return F.dequantize_4bit(codes, state).view(shape).clone()


def matrices(path):
    saved = {}
    torch.manual_seed(1)
    for number, (outputs, inputs, dtype) in enumerate(MATRICES):
        weight = (0.02 * torch.randn(outputs, inputs)).to(dtype)
        if number == 1:
            # A block of zeros, and one that is nothing but boundaries.
            bounds = F.get_4bit_type("nf4", device="cpu")
            weight.view(-1)[:64] = 0
            weight.view(-1)[64:79] = ((bounds[:-1] + bounds[1:]) / 2).to(dtype)
        if number == 5:
            weight.zero_()
        codes, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
        parts = {"codes": codes.view(-1), "scales": state.absmax, "factors": state.state2.absmax, "offset": state.offset.reshape(1)}
        results = {"f32": decoded(codes, state, torch.float32), "bf16": decoded(codes, state, torch.bfloat16)}
        results["weight"] = weight
        saved |= {f"{number}.{name}": tensor.clone() for name, tensor in (parts | results).items()}
    save_file(saved, path)


def model(source, folder):
    """Writes a model in NF4, and returns its decoded weights."""
    settings = T.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    quantised = T.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=settings, device_map="cpu")
    shutil.rmtree(folder, ignore_errors=True)
    quantised.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    weights = {}
    for name, parameter in quantised.state_dict(keep_vars=True).items():
        if hasattr(parameter, "quant_state"):
            weights[name] = decoded(parameter.data, parameter.quant_state, torch.float32)
    return weights


def adapter(models, name, folder, results):
    """Writes a model in NF4 to a folder, and an adapter and PEFT's results with it to another."""
    weights, plain = model(models / name, folder), make_lora.base

    def base(models, name, dtype):
        loaded = plain(models, name, dtype)
        loaded.load_state_dict(weights, strict=False)
        return loaded

    make_lora.base = base
    make_lora.CASES[results.name] = (name, dict(r=4, lora_alpha=8, target_modules=TARGETS))
    make_lora.write(models, results.parent, results.name)


if __name__ == "__main__":
    T.utils.logging.set_verbosity_error()
    here = Path(sys.argv[1])
    folder = here / "nf4"
    folder.mkdir(exist_ok=True)
    if VERSION < 5:
        with tempfile.TemporaryDirectory() as models:
            torch.manual_seed(4)
            mixture = T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**MIXTURE))
            with torch.no_grad():
                for parameter in mixture.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape))
            mixture.save_pretrained(Path(models) / "mixture")
            adapter(Path(models), "mixture", folder / "mixture", folder / "mixture_adapter")
    else:
        matrices(folder / "matrices.safetensors")
        adapter(here / "cases", MODEL, folder / "model", folder / "adapter")
