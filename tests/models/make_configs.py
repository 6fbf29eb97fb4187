"""Adds to each line of tests/models/configs.jsonl what transformers makes of its `config.json`.

    pip install torch transformers
    python3 tests/models/make_configs.py tests/models/configs.jsonl

A line is an object with the model, the source of its `config.json`, and the keys and values as published. Sources
"written from knowledge" have no public copy at hand. `refused` lists words of the error if the file is refused.
`expected` has the number of weights, the context, the norms' epsilon, the factor of attention's scores, and for each
kind of layer its window and four numbers of a head of ones at position 100, rotated, also for a text that is longer
than LongRoPE's first context. `layers` has a digit for each layer: its kind.
"""
import copy
import json
import sys

import torch
import transformers as T

POSITION = 100


def rotated(rotary, positions, kind):
    """Returns the first, second and third quarter and the last of the first half of a rotated head of ones."""
    extra = (kind,) if kind else ()
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([positions]), *extra)
    values = (cos - sin)[0, 0].tolist()
    half = len(values) // 2
    return [values[at] for at in (0, half // 4, half // 2, half - 1)]


def expected(config):
    config = T.AutoConfig.for_model(**copy.deepcopy(config))
    with torch.device("meta"):
        model = T.AutoModelForCausalLM.from_config(config)
    base = model.base_model
    blocks = base.h if config.model_type == "gpt2" else base.layers
    rotary = type(base.rotary_emb)(config) if hasattr(base, "rotary_emb") else None
    scaling = (getattr(config, "rope_parameters", None) or {})
    kinds, layers = [], ""
    for number, block in enumerate(blocks):
        attention = next(getattr(block, name) for name in ("self_attn", "attention", "attn") if hasattr(block, name))
        everywhere = config.model_type in ("mistral", "phi3")
        kind = {"window": config.sliding_window if everywhere else getattr(attention, "sliding_window", None)}
        layer_type = config.layer_types[number] if config.model_type == "gemma3_text" else None
        if rotary is not None and getattr(attention, "use_rope", True):
            kind["rotated"] = rotated(rotary, [POSITION], layer_type)
            if scaling.get("rope_type") == "longrope":
                kind["long"] = rotated(rotary, [POSITION, scaling["original_max_position_embeddings"]], layer_type)
        if kind not in kinds:
            kinds.append(kind)
        layers += str(kinds.index(kind))
    norm = next(module for name, module in base.named_modules() if name.split(".")[-1] in ("norm", "ln_f", "final_layer_norm"))
    scale = getattr(attention, "scaling", None) or (config.hidden_size // config.num_attention_heads) ** -0.5
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()), "context": config.max_position_embeddings,
        "epsilon": next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)),
        "scale": scale, "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "kinds": kinds, "layers": layers,
    }


if __name__ == "__main__":
    T.utils.logging.set_verbosity_error()
    lines = [json.loads(line) for line in open(sys.argv[1])]
    for line in lines:
        line.pop("expected", None)
        if line["config"]["model_type"] != "gemma3":
            line["expected"] = expected(line["config"])
    with open(sys.argv[1], "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
