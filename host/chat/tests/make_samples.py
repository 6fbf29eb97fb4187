"""Writes samples.json: small tokenizers of the kinds that models have, and the tokens of prompts with
completions, of which those count from which on the tokens of the prompt and of both differ. This is
TRL's rule (`common_prefix_length`).

    pip install transformers trl tokenizers
    python3 host/chat/tests/make_samples.py > host/chat/tests/samples.json
"""
import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from trl.data_utils import common_prefix_length

CODE = "def f(x):\n    if x:\n        return  1\n    return 2"
CASES = [
    ("Is it? ", "yes"), ("Is it? ", "yes it is"), ("Is it?", " yes"), ("Is it?\n", "\nIt is."), ("Is it?\n\n", "It is."), ("f(", "x)"),
    ("20", "24"), ("### Response: ", "no"), ("f?\n", CODE), ("f?\n    ", "return  1"), ("x  ", "  return"), ("An ", "\U0001f600 is it"),
    ("An", "\U0001f600\U0001f333"), ("\ufb01", "t \u2460"), ("e", "\u0301 is"), ("", "yes"), ("", "\U0001f333"), ("<|assistant|>", " yes"), ("<|assistant|>\n", "\n yes"),
    ("<|assistant|>", "yes <|end|>"), ("IS IT? ", "YES"), ("Is it? yes", "</s>"),
]
SPECIAL = ["<s>", "</s>", "<|assistant|>", "<|end|>"]
CORPUS = [prompt + completion for prompt, completion in CASES for _ in range(3)] + ["It is. Yes, it is. Yes no no no return return"] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def of_bytes(trim=False, prefix=False, normalizer=None, processor=None):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    numbers = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    if processor:
        tokenizer.post_processor = processor(numbers)
    return tokenizer


def of_pieces(normalizer=None, splits=None, rstrip=False, bos=True, model=None):
    tokenizer = Tokenizer(model or models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    if splits:
        tokenizer.pre_tokenizer = splits
    special = ["<unk>", *BYTES]
    if model:
        trainer = trainers.UnigramTrainer(vocab_size=340, special_tokens=special, unk_token="<unk>", show_progress=False)
    else:
        trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, limit_alphabet=50, show_progress=False)
    words = tokenizer.pre_tokenizer
    if not words:
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(CORPUS, trainer)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = []
    if not words:
        settings["pre_tokenizer"] = None
    if model:
        settings["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, rstrip=rstrip and token == "<|assistant|>") for token in SPECIAL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def pieces(*first):
    return normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])


def of_bos(numbers):
    return processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", numbers["<s>"])])


TOKENIZERS = {
    "bytes": of_bytes(),
    "trimmed": of_bytes(trim=True, processor=lambda _: processors.ByteLevel(trim_offsets=True)),
    "trimmed, prefix": of_bytes(trim=True, prefix=True, processor=lambda _: processors.ByteLevel(trim_offsets=True, add_prefix_space=True)),
    "trimmed, both ends": of_bytes(trim=True, processor=lambda numbers: processors.RobertaProcessing(
        ("</s>", numbers["</s>"]), ("<s>", numbers["<s>"]), trim_offsets=True, add_prefix_space=False)),
    "trimmed, beginning": of_bytes(trim=True, processor=lambda numbers: processors.Sequence([
        processors.ByteLevel(trim_offsets=True), of_bos(numbers)])),
    "normalized": of_bytes(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "composed": of_bytes(normalizer=normalizers.NFC()),
    "pieces": of_pieces(pieces(normalizers.Prepend("▁"))),
    "pieces, stripping": of_pieces(pieces(normalizers.Prepend("▁")), rstrip=True),
    "pieces, no prefix": of_pieces(pieces()),
    "metaspace": of_pieces(splits=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "unigram": of_pieces(splits=pre_tokenizers.Metaspace(prepend_scheme="always"), bos=False, model=models.Unigram()),
}


def sample(tokenizer, prompt, completion):
    whole, end = tokenizer.encode(prompt + completion).ids, tokenizer.token_to_id("</s>")
    first = common_prefix_length(tokenizer.encode(prompt).ids, whole)
    # The tokenizer's own end is not added to one in the text, and a text without one gets it.
    whole = whole[:-1] if whole[-2:] == [end, end] else whole
    whole = whole if whole[-1] == end else [*whole, end]
    return [whole, first]


cases = []
for prompt, completion in CASES:
    cases.append({"prompt": prompt, "completion": completion, "samples": {name: sample(one, prompt, completion) for name, one in TOKENIZERS.items()}})
settings = ",\n".join(f"  {json.dumps(name)}: {json.dumps(json.loads(one.to_str()), ensure_ascii=False, separators=(',', ':'))}" for name, one in TOKENIZERS.items())
lines = ",\n".join(f"  {json.dumps(case, ensure_ascii=False, separators=(',', ':'))}" for case in cases)
print(f'{{\n "tokenizers": {{\n{settings}\n }},\n "cases": [\n{lines}\n ]\n}}')
