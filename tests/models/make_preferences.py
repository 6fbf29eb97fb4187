"""Writes examples/finetune/pairs.jsonl, rows with two answers, and tests/models/preferences.json: what TRL's
DPOTrainer, ORPOTrainer and KTOTrainer compute with them from the model of examples/finetune/tiny, in float64.
TRL rounds log-probabilities to float32. The token that fills up batches also ends messages, so its embedding
has a gradient here, unlike in transformers.

    pip install torch transformers trl
    python3 tests/models/make_preferences.py

Each update has all rows, so that their order does not matter. KTOTrainer makes two rows of each.
"""
import json
import os
import tempfile
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers as T
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

HERE = Path(__file__).parent
EXAMPLE = HERE / "../../examples/finetune"
UPDATES, RATE, BETA = 12, 1e-3, 0.3
REWARDS = ["rewards/chosen", "rewards/rejected", "rewards/margins"]
LOSSES = {
    "dpo": (DPOTrainer, DPOConfig, {}, [*REWARDS, "rewards/accuracies"]),
    "orpo": (ORPOTrainer, ORPOConfig, {}, [*REWARDS, "rewards/accuracies"]),
    "kto": (KTOTrainer, KTOConfig, {"desirable_weight": 1.5, "undesirable_weight": 0.5}, [*REWARDS, "kl"]),
}


def rows():
    """Returns sums with a right and a wrong answer. Some answers have several words."""
    for a in range(4):
        for b in range(4):
            prompt = [{"role": "user", "content": f"What is {a}+{b}?"}]
            right, wrong = f"It is {a + b}.", f"It is {(a * b + 5) % 10}, I think." if (a + b) % 3 else "No."
            yield {"prompt": prompt} | {
                key: [{"role": "assistant", "content": text}] for key, text in [("chosen", right), ("rejected", wrong)]
            }


class Norms(T.TrainerCallback):
    """Keeps the norm of all gradients of each update, before it is clipped."""

    def __init__(self):
        self.norms = []

    def on_log(self, args, state, control, logs=None, **_):
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


def trained(folder, data, dtype, trainer, config, settings, names):
    """Returns the loss, the norm and the metrics of each update, which the log rounds."""
    recorded = []

    class Recorder(trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            metrics = self._stored_metrics if trainer is ORPOTrainer else self._metrics
            recorded.append([loss.item(), *(float(metrics["train"][name][-1]) for name in names)])
            return loss

    model = T.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    tokenizer = T.AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as out:
        config = config(
            out, beta=BETA, learning_rate=RATE, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
            per_device_train_batch_size=2 * len(data), num_train_epochs=UPDATES, max_grad_norm=1.0, logging_steps=1,
            gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
            optim="adamw_torch", disable_dropout=True, max_length=64, seed=0, **settings,
        )
        norms = Norms()
        Recorder(model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[norms]).train()
    assert len(recorded) == UPDATES == len(norms.norms)
    return [[loss, norm, *rest] for (loss, *rest), norm in zip(recorded, norms.norms)]


if __name__ == "__main__":
    T.utils.logging.set_verbosity_error()
    data = list(rows())
    (EXAMPLE / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    expected = {"beta": BETA, "rate": RATE}
    for name, (trainer, config, settings, metrics) in LOSSES.items():
        exact, rounded = (
            trained(EXAMPLE / "tiny", Dataset.from_list(data), dtype, trainer, config, settings, metrics)
            for dtype in [torch.float64, torch.float32]
        )
        expected[name] = settings | {"names": ["loss", "gradient_norm", *metrics], "float64": exact}
        differs = max(abs(a - b) for one, other in zip(exact, rounded) for a, b in zip(one, other))
        print(f"{name}: loss {exact[0][0]:.6f} to {exact[-1][0]:.6f}; float32 differs by {differs:.1e}")
    (HERE / "preferences.json").write_text(json.dumps(expected, indent=1) + "\n")
