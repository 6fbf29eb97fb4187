"""Writes examples/finetune/pairs.jsonl, rows with two answers, and tests/models/dpo.json: what TRL's
DPOTrainer computes with them from the model of examples/finetune/tiny, in float64 and in float32. TRL
rounds log-probabilities to float32 in both. The token that fills up batches also ends messages, so its
embedding has a gradient here, unlike in transformers.

    pip install torch transformers trl
    python3 tests/models/make_dpo.py

Each update has all rows, so that their order does not matter.
"""
import json
import tempfile
from pathlib import Path

import torch
import transformers as T
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

HERE = Path(__file__).parent
EXAMPLE = HERE / "../../examples/finetune"
UPDATES, RATE, BETA = 12, 1e-3, 0.3
METRICS = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]


def rows():
    """Returns sums with a right and a wrong answer. Some answers have several words."""
    for a in range(4):
        for b in range(4):
            prompt = [{"role": "user", "content": f"What is {a}+{b}?"}]
            right, wrong = f"It is {a + b}.", f"It is {(a * b + 5) % 10}, I think." if (a + b) % 3 else "No."
            yield {"prompt": prompt} | {
                key: [{"role": "assistant", "content": text}] for key, text in [("chosen", right), ("rejected", wrong)]
            }


class Recorder(DPOTrainer):
    """Keeps the loss and the metrics of each update, which the log rounds."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = found[0] if return_outputs else found
        values = [self._metrics["train"][name][-1] for name in METRICS]
        self.recorded.append([loss.item(), *values])
        return found


class Norms(T.TrainerCallback):
    """Keeps the norm of all gradients of each update, before it is clipped."""

    def __init__(self):
        self.norms = []

    def on_log(self, args, state, control, logs=None, **_):
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


def trained(folder, data, dtype):
    model = T.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    tokenizer = T.AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as out:
        config = DPOConfig(
            out, beta=BETA, learning_rate=RATE, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
            per_device_train_batch_size=len(data), num_train_epochs=UPDATES, max_grad_norm=1.0, logging_steps=1,
            gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
            optim="adamw_torch", disable_dropout=True, max_length=64, seed=0,
        )
        norms = Norms()
        trainer = Recorder(model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[norms])
        trainer.recorded = []
        trainer.train()
    assert len(trainer.recorded) == UPDATES == len(norms.norms)
    return [[loss, norm, *rest] for (loss, *rest), norm in zip(trainer.recorded, norms.norms)]


if __name__ == "__main__":
    T.utils.logging.set_verbosity_error()
    data = list(rows())
    (EXAMPLE / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    exact, rounded = (trained(EXAMPLE / "tiny", Dataset.from_list(data), dtype) for dtype in [torch.float64, torch.float32])
    expected = {"beta": BETA, "rate": RATE, "names": ["loss", "gradient norm", *METRICS], "float64": exact, "float32": rounded}
    (HERE / "dpo.json").write_text(json.dumps(expected, indent=1) + "\n")
    differences = [max(abs(a - b) for a, b in zip(one, other)) for one, other in zip(exact, rounded)]
    print(f"{UPDATES} updates, loss {exact[0][0]:.6f} to {exact[-1][0]:.6f}; float32 differs by {max(differences):.1e}")
