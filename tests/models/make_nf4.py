"""Writes the cases of tests/models/nf4.rs: matrices that bitsandbytes quantises, and a model of
tests/models/cases in NF4 as transformers saves it, with adapters and what PEFT computes with them.

    pip install torch transformers peft safetensors bitsandbytes
    python3 tests/models/make_nf4.py tests/models

The model's weights in float64 are those that bitsandbytes decodes in f32.
"""
import shutil
import sys
from pathlib import Path

import bitsandbytes.functional as F
import make_lora
import torch
import transformers as T
from safetensors.torch import save_file

MODEL = "llama31"
# Outputs, inputs and type: one block, blocks across rows, several groups of scales, scales that are summed in a
# cascade, and weights that are all zero.
MATRICES = [
    (8, 8, torch.float32), (24, 24, torch.bfloat16), (16, 72, torch.float32), (24, 1400, torch.float32),
    (24, 24, torch.float16), (16, 16, torch.float32)]


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


def model(models, folder):
    """Writes the model in NF4, and returns its decoded weights."""
    settings = T.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    quantised = T.AutoModelForCausalLM.from_pretrained(
        models / MODEL, dtype=torch.float32, quantization_config=settings, device_map="cpu")
    shutil.rmtree(folder, ignore_errors=True)
    quantised.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    weights = {}
    for name, parameter in quantised.state_dict(keep_vars=True).items():
        if hasattr(parameter, "quant_state"):
            weights[name] = decoded(parameter.data, parameter.quant_state, torch.float32)
    return weights


if __name__ == "__main__":
    T.utils.logging.set_verbosity_error()
    here = Path(sys.argv[1])
    folder = here / "nf4"
    folder.mkdir(exist_ok=True)
    matrices(folder / "matrices.safetensors")
    weights = model(here / "cases", folder / "model")
    plain = make_lora.base

    def base(models, name, dtype):
        loaded = plain(models, name, dtype)
        loaded.load_state_dict(weights, strict=False)
        return loaded

    make_lora.base = base
    make_lora.CASES["adapter"] = (MODEL, dict(r=4, lora_alpha=8, target_modules="all-linear"))
    make_lora.write(here / "cases", folder, "adapter")
