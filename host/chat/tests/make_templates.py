"""Writes published.json, tokenizer-bytes.json and tokenizer-pieces.json: chats as transformers renders
them with the templates of published models (templates/), and the tokens that TRL counts.

    pip install transformers trl tokenizers
    python3 host/chat/tests/make_templates.py

A text and a list of token numbers are written as their hash (FNV-1a, 64 bits). A template with the tag
`generation` counts what transformers' mask of assistant tokens has. For others, each answer is a
completion of the messages before it, and counts from where TRL lets a completion begin.
"""
import datetime
import json
import re
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from trl.chat_template_utils import has_generation_markers
from trl.data_utils import common_prefix_length

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"


class Date(datetime.datetime):
    """A clock that always shows midnight of the same day."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 3, 5)


chat_template_utils.datetime = Date

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds <a> & 'b'.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer", "description": "A number"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}},
    {"type": "function", "function": {"name": "weather", "description": "Returns the weather of a place.", "parameters": {
        "type": "object", "properties": {"place": {"type": "string", "enum": ["Köln", "Rome"]}}, "required": ["place"]}}},
]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, id="call_0001"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, name, id="call_0001"):
    return {"role": "tool", "content": text, "name": name, "tool_call_id": id}


SYSTEM = {"role": "system", "content": "You are terse. Answer in one sentence."}
TURNS = [
    user("What is 2+2?"), answer("It is 4."),
    user("Name a tree,\nand \"quote\" it."), answer("\"Oak\", or 'Eiche' in German."),
    user("Größer als <3> & kleiner?"), answer("  Ja: 4 > 3.\n\n- äöü 🌳\n"),
    user(" And in code? "), answer("```rust\nfn main() {\n    println!(\"{}\", 2 + 2);\n}\n```"),
    user("Thanks!"), answer("You are welcome."),
]
THOUGHT = "<think>\nTwo and two.\n\nThat makes 4.\n</think>\n\nIt is 4."
CHATS = {
    "one turn": ([*TURNS[:2]], None),
    "two turns": ([*TURNS[:4]], None),
    "five turns": ([*TURNS], None),
    "system": ([SYSTEM, *TURNS[:4]], None),
    "ends with the user": ([*TURNS[:5]], None),
    "assistant first": ([answer("Welcome."), *TURNS[:2]], None),
    "reasoning": ([
        TURNS[0], answer("It is 4.", reasoning_content="Two and two make 4."), TURNS[2], answer("Oak.", reasoning_content="An oak is a tree.\nSo is a lime."),
    ], None),
    "thoughts": ([TURNS[0], answer(THOUGHT), TURNS[2], answer("<think>\nA tree.\n</think>\n\nOak.")], None),
    "tools": ([TURNS[0], answer("", tool_calls=[call("add", {"a": 2, "b": 2})]), result("4", "add"), TURNS[1]], TOOLS),
    "tools, no content": ([
        SYSTEM, TURNS[0], answer(None, tool_calls=[call("add", {"a": 2, "b": 2})]), result('{"sum": 4}', "add"), TURNS[1],
        user("Weather in Köln?"), answer("I look.", tool_calls=[call("weather", {"place": "Köln"}, "call_0002")]),
        result("rain", "weather", "call_0002"), answer("It rains."),
    ], TOOLS),
    "two calls": ([
        user("2+2, and the weather?"), answer("", tool_calls=[call("add", {"a": 2, "b": 2}), call("weather", {"place": "Rome"}, "call_0002")]),
        result("4", "add"), result("sun", "weather", "call_0002"), answer("4, and sun."),
    ], TOOLS),
    "tools unused": ([*TURNS[:2]], TOOLS),
    "arguments as text": ([TURNS[0], answer("", tool_calls=[call("add", '{"a": 2, "b": 2}')]), result("4", "add"), TURNS[1]], TOOLS),
}


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{value:016x}"


def special_tokens(sources):
    found = {"<unk>"}
    for name, source in sources.items():
        found |= {source[key] for key in ("bos_token", "eos_token") if key in source}
        text = (TEMPLATES / f"{name}.jinja").read_text()
        found |= set(re.findall(r"<\|\w+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]|<\|[A-Z_]+\|>", text))
    found |= {f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
    return sorted(found)


def corpus():
    for messages, _ in CHATS.values():
        yield from (str(message["content"]) for message in messages)
    yield from (path.read_text() for path in sorted(TEMPLATES.glob("*.jinja")))


def tokenizers_of(special):
    """Makes a byte-level tokenizer as GPT-2's, and one of pieces with bytes as Llama 2's."""
    by_bytes = Tokenizer(models.BPE())
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    by_bytes.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=640, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    pieces = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=640, special_tokens=["<unk>", *bytes_], limit_alphabet=90, show_progress=False))
    entry = json.loads(pieces.to_str())
    entry["added_tokens"], entry["pre_tokenizer"] = [], None
    pieces = Tokenizer.from_str(json.dumps(entry))
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for name, tokenizer in [("bytes", by_bytes), ("pieces", pieces)]:
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        path = HERE / f"tokenizer-{name}.json"
        path.write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
        yield name, path


def runs(mask):
    edges = [at for at, (before, now) in enumerate(zip([0, *mask], [*mask, 0])) if before != now]
    return list(zip(edges[::2], edges[1::2]))


def answers(tokenizer, messages, tools):
    """Returns the tokens that count, a list for each answer or for the chat up to its last one."""
    def encode(messages, **more):
        return tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, **more)

    def entry(ids, counted):
        return [fnv(b"".join(id.to_bytes(4, "little") for id in ids)), len(ids), counted]

    if has_generation_markers(tokenizer.chat_template):
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        whole = encode(messages[:last + 1], return_assistant_tokens_mask=True)
        yield entry(whole["input_ids"], runs(whole["assistant_masks"]))
        return
    for number, message in enumerate(messages):
        # TRL has no completion without a prompt.
        if message["role"] == "assistant" and number > 0:
            prompt = encode(messages[:number], add_generation_prompt=True)["input_ids"]
            whole = encode(messages[:number + 1])["input_ids"]
            yield entry(whole, [(common_prefix_length(prompt, whole), len(whole))])


def attempt(compute):
    try:
        return compute()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main():
    sources = json.loads((TEMPLATES / "sources.json").read_text())
    paths = dict(tokenizers_of(special_tokens(sources)))
    cases = {}
    for name, source in sources.items():
        special = {key: source[key] for key in ("bos_token", "eos_token") if key in source}
        template = (TEMPLATES / f"{name}.jinja").read_bytes().decode()
        known = {kind: PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template, **special) for kind, path in paths.items()}
        cases[name] = {}
        for chat, (messages, tools) in CHATS.items():
            render = lambda prompt: fnv(known["bytes"].apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt).encode())
            case = {"text": attempt(lambda: render(False)), "prompt": attempt(lambda: render(True))}
            for kind, tokenizer in known.items():
                case[kind] = attempt(lambda: list(answers(tokenizer, messages, tools)))
            cases[name][chat] = case
    lines = ",\n".join(f"  {json.dumps(name)}: {{\n" + ",\n".join(
        f"   {json.dumps(chat)}: {json.dumps(case, ensure_ascii=False)}" for chat, case in chats.items()) + "\n  }" for name, chats in cases.items())
    chats = ",\n".join(f"  {json.dumps(name)}: {json.dumps({'messages': messages, 'tools': tools}, ensure_ascii=False)}" for name, (messages, tools) in CHATS.items())
    (HERE / "published.json").write_text(
        f'{{\n "transformers": "{transformers.__version__}",\n "chats": {{\n{chats}\n }},\n "cases": {{\n{lines}\n }}\n}}\n')


main()
