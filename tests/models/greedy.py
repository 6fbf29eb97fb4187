"""Compares greedy samples of exported models: `stepscope finetune` trains each model of a folder that make.py
wrote, and exports it. `stepscope generate` and transformers then continue the same prompt.

    python3 tests/models/greedy.py FOLDER STEPSCOPE
"""
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers as T

# transformers chooses Phi-3's factors by the length so far, stepscope by --context. Both take the long ones here
# from the prompt on if the model had a context of 8, and the short ones if it had at least 25.
PROMPT, TOKENS = 9, 16
VOCABULARY = 40


def tokenizer(folder):
    """Writes a tokenizer of one word per token."""
    words = {f"t{token}": token for token in range(VOCABULARY)}
    model = dict(type="WordLevel", vocab=words, unk_token="t0")
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    content = dict(version="1.0", added_tokens=[], pre_tokenizer=dict(type="WhitespaceSplit"), model=model) | rest
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="t2")))


def words(tokens):
    return " ".join(f"t{token}" for token in tokens)


def run(program, *arguments):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{program} {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def exported(folder, program, out):
    """Trains the model, and returns the folder of the export."""
    tokenizer(folder)
    numbers = random.Random(folder.name)
    rows = [words(numbers.choices(range(3, VOCABULARY), k=16)) for _ in range(8)]
    data = out / "data.jsonl"
    data.write_text("".join(json.dumps(dict(text=row)) + "\n" for row in rows))
    run(program, "finetune", "--weights", folder, "--data", data, "--out", out, "--device", "emulated", "--context", 16,
        "--batch", 2, "--epochs", 2, "--learning-rate", 1e-2)
    return out / "transformers"


def check(folder, program):
    """Returns the number of tokens that both wrote."""
    with tempfile.TemporaryDirectory() as out:
        model = exported(folder, program, Path(out))
        theirs = T.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
        count = min(TOKENS, theirs.config.max_position_embeddings - PROMPT)
        prompt = random.Random(folder.name + "prompt").choices(range(3, VOCABULARY), k=PROMPT)
        ours = run(program, "generate", "--weights", model, "--device", "emulated", "--prompt", words(prompt),
                   "--temperature", 0, "--tokens", count, "--context", PROMPT + count)
    ids = torch.tensor([prompt])
    written = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    written = written[0, PROMPT:].tolist()
    ends = theirs.generation_config.eos_token_id
    if written and written[-1] in (ends if isinstance(ends, list) else [ends]):
        written.pop()
    if ours.strip() != words(written):
        sys.exit(f"{folder.name}: after {words(prompt)}\nstepscope:    {ours.strip()}\ntransformers: {words(written)}")
    return len(written)


if __name__ == "__main__":
    T.utils.logging.set_verbosity_error()
    folders = sorted(Path(sys.argv[1]).iterdir())
    counts = {folder.name: check(folder, sys.argv[2]) for folder in folders}
    # A model may end its text at once, but not all of them.
    if sum(counts.values()) < TOKENS * len(counts) // 2:
        sys.exit(f"too few tokens to compare: {counts}")
    print("  equal greedy tokens:", ", ".join(f"{name} {count}" for name, count in counts.items()))
