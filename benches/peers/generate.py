"""Text generation by transformers and by stepscope, in turn: the time to the first token, and tokens/s.

python3 -P benches/peers/generate.py PROGRAM [--rounds 3] [--prompt 2000] [--tokens 128]     one line of JSON a round

A Llama of the shape of Llama-3.2-1B with random weights in BF16, greedy, one text. transformers runs as its users run it: SDPA
attention and its default cache, warmed up by one text. stepscope is a new process each round, so its first launches count; loading
the weights counts for neither.
"""
import argparse, json, pathlib, re, subprocess, tempfile, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

SHAPE = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
             tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)


class Clock(BaseStreamer):
    def __init__(self):
        self.times = []

    def put(self, value):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def end(self):
        pass


def theirs(model, ids, tokens):
    torch.cuda.synchronize()
    clock, start = Clock(), time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                             do_sample=False, streamer=clock, pad_token_id=0)
    # The streamer gets the prompt first.
    first = clock.times[1]
    return dict(first_s=first - start, tokens_per_s=(tokens - 1) / (clock.times[-1] - first), new=out[0, ids.shape[1]:].tolist())


def ours(program, folder, prompt, tokens):
    command = [program, "generate", "--device", "cuda", "--precision", "bf16", "--weights", str(folder), "--temperature", "0",
               "--tokens", str(tokens), "--prompt", prompt]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, first, written, rate = re.search(r"(\d+) tokens read in ([\d.]+) s, (\d+) written in [\d.]+ s \(([\d.]+) tokens", done.stderr).groups()
    assert int(written) == tokens, done.stderr
    return dict(read=int(read), first_s=float(first), tokens_per_s=float(rate), new=[int(word[1:]) for word in done.stdout.split()])


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("program")
    for name, default in (("--rounds", 3), ("--prompt", 2000), ("--tokens", 128)):
        arguments.add_argument(name, type=int, default=default)
    args = arguments.parse_args()
    torch.manual_seed(1)
    config = LlamaConfig(**SHAPE)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    folder = pathlib.Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    # A word of the tokenizer is a token, so that both read the same numbers.
    vocabulary = {f"t{number}": number for number in range(config.vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None, pre_tokenizer=dict(type="WhitespaceSplit"),
        post_processor=None, decoder=None, model=dict(type="WordLevel", vocab=vocabulary, unk_token="t0"))))
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, config.vocab_size, (1, args.prompt), device="cuda")
    prompt = " ".join(f"t{number}" for number in ids[0].tolist())
    theirs(model, ids, 8)
    for number in range(args.rounds):
        rounds = dict(transformers=theirs(model, ids, args.tokens), stepscope=ours(args.program, folder, prompt, args.tokens))
        new = [rounds[name].pop("new") for name in rounds]
        same = next((at for at, pair in enumerate(zip(*new)) if pair[0] != pair[1]), args.tokens)
        print(json.dumps(dict(round=number, prompt=args.prompt, tokens=args.tokens, equal_tokens=same, **rounds)), flush=True)


main()
