"""Writes examples/finetune: a tiny model as transformers saves it, and chats to fine-tune it on.

    pip install torch transformers tokenizers
    python3 examples/finetune/make.py

The model is a Llama with random weights in BF16. Its tokenizer is a byte-level BPE that was trained
on the chats.
"""
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
TOKENS = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
VOCABULARY = 384
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = ["red", "green", "blue", "white", "black", "brown", "grey", "pink"]


def chats():
    """Returns questions about sums, opposites of case and lists, with their answers."""
    for number in range(60):
        yield f"What is {number % 10}+{number // 10}?", f"It is {number % 10 + number // 10}."
    for number, word in enumerate(WORDS):
        yield f"Write {word} in capitals.", word.upper() + "."
        yield f"Which color follows {word}?", f"After {word} comes {WORDS[(number + 1) % len(WORDS)]}."


def main():
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in chats()
    ]
    (HERE / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pairs.train_from_iterator((text for chat in chats() for text in chat), trainer)
    pairs.add_special_tokens(TOKENS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, bos_token=TOKENS[0], eos_token=TOKENS[1], pad_token=TOKENS[1])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(HERE / "tiny")

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(HERE / "tiny")


main()
