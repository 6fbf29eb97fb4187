"""The figures of a table's row, from the run files, for benches/tables.py and docs/performance.md.

Each kind of table is a function (case, runs) -> the cells of ours and of the best peer. If several
files have a line, the first counts.

Some files are not written by a bench:

- *-gpt2.json has `runs`: arguments of `gpt` -> `seconds_of_updates`, `bytes`, and `pytorch.runs`:
  precision, or size and precision -> the output of benches/peers/gpt2.py.
- *-gpt-beside-ddp.json has `gpt.seconds_of_updates` and `pytorch.tokens_per_second` by ranks, with
  16 x 1024 tokens each.
- *-finetune.json has `runs`: case -> `tokens_per_second_of_updates` and the GPU's `bytes`, and
  `transformers.runs`: case -> runs with `compiled`, `tokens_per_second`, `peak_bytes`, and the
  `name` of an optimizer that is not PyTorch's.
- *-crossasset.json has `runs`: "PRECISION, RANKS" -> `epochs`.
- *-generate.jsonl has a line for each round: the rates of `stepscope` and of `transformers`.
"""

import json
import re
from statistics import median

NAME = re.compile(r"(\d{4}-\d\d-\d\d)-([a-z0-9]+)(?:-x\d+)?-(.+)\.jsonl?")
# Older runs name f32 `ieee`.
PRECISIONS = {"f32": "f32", "ieee": "f32", "tf32": "TF32", "bf16": "BF16"}
OURS = "stepscope"


class Missing(Exception):
    """A row has no line in the files."""


class Run:
    """A file of samples."""

    def __init__(self, path):
        self.path = path
        found = NAME.fullmatch(path.name)
        if not found:
            raise SystemExit(f"{path.name}: a run is called DATE-GPU-BENCH.json")
        self.group, text = found[3], path.read_text()
        if path.suffix == ".jsonl":
            self.content = {"date": found[1], "gpu": f"NVIDIA {found[2].upper()}", "rounds": [json.loads(line) for line in text.splitlines()]}
        else:
            self.content = json.loads(text)

    @property
    def lines(self):
        return self.content["lines"]

    @property
    def stored_bf16(self):
        """Returns true if tensors were BF16 in memory, not f32 rounded before products."""
        return "stored" in self.group

    def measured(self):
        """Yields (line, precision) of each measurement.

        The precision is the one that the program reported, else the one in the file's name.
        """
        named = re.findall("tf32|bf16", self.group)
        precision = PRECISIONS[named[0] if named else "f32"]
        for line in self.lines:
            if "peer" in line:
                precision = PRECISIONS.get(line.get("precision"), precision)
            elif line.keys() & {"nanoseconds", "samples", "forward"}:
                yield line, precision

    def source(self):
        """Describes the run: date, GPU, driver, commit and peers."""
        content = self.content
        gpu = content.get("device") or content["gpu"]
        parts = [content["date"], gpu]
        if content.get("driver"):
            parts.append(f"driver {content['driver'].splitlines()[0]}")
        if commit := re.fullmatch(r"([0-9a-f]{7})[0-9a-f]*(-dirty)?", content.get("commit") or ""):
            parts.append(f"commit {commit[1]}" + (" with changes" if commit[2] else ""))
        lines = content.get("lines", [])
        peers = dict.fromkeys(line["peer"].split("+")[0] for line in lines if isinstance(line, dict) and "peer" in line)
        return ", ".join([*parts, *(f"compared with {peer}" for peer in peers)])


def short(value):
    """Formats three digits, or all before the point; four just above one."""
    digits = 3 if value < 2 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def listed(values, text=short):
    return ", ".join(text(value) for value in values)


def share(value):
    """Formats two decimals, or three below 0.5."""
    return f"{value:.2f}" if value >= 0.5 else f"{value:.3f}"


def first(values, case):
    """Returns the first value; raises Missing if there is none."""
    for value in values:
        return value
    raise Missing(case)


def fastest(peers, wanted, text=short):
    """Returns the least of {name: time}, with its name; "" if empty. A wanted peer must be there."""
    peers = {name: time for name, time in peers.items() if not wanted or wanted in name}
    if wanted and not peers:
        raise Missing(wanted)
    if not peers:
        return ""
    name = min(peers, key=peers.get)
    return f"{text(peers[name])} ({name.removeprefix('PyTorch ')})"


def arena(case, runs):
    """Nanoseconds of an allocation."""
    times = {line["name"]: median(line["nanoseconds"]) for run in reversed(runs) for line in run.lines}
    case, _, peer = case.partition(", compared with ")
    if case not in times:
        raise Missing(case)
    peers = {name.split(",")[0].split(" ")[0]: time for name, time in times.items() if name.startswith(("torch.", "cuMem"))}
    return short(times[case]), fastest(peers if "48 KiB" in case else {}, peer)


MEASURES = {
    "in a row": "resident",
    "in a row with uploads": "queued",
    "one step": "round_trip",
    "in a row with uploads from page-locked memory": "pinned",
    "the host's part": "host",
    "the host's part from page-locked memory": "host_pinned",
    "the host's part without uploads": "host_resident",
}


def step(case, runs):
    """Milliseconds: "f32, batch 256, captured, in a row"; with activations in BF16 "BF16 tensors,
    batch 256, ..."."""
    whole, _, peer = case.partition(", compared with ")
    if len(whole.split(", ")) != 4:
        raise Missing(case)
    precision, batch, mode, measure = whole.split(", ")
    times = {}
    for run in reversed(runs):
        for line, of in run.measured():
            of = "BF16 tensors" if run.stored_bf16 else of
            if (of, f"batch {line['batch']}", line["measure"]) == (precision, batch, MEASURES.get(measure)):
                times[line["contender"]] = median(line["nanoseconds"]) / 1e6
    if f"{OURS} {mode}" not in times:
        raise Missing(case)
    return short(times[f"{OURS} {mode}"]), fastest({name: time for name, time in times.items() if not name.startswith(OURS)}, peer)


TOKENS = 1024


def arguments(text):
    """Returns {option: value} of a command line."""
    words = text.split()
    return {word: after if not after.startswith("--") else "" for word, after in zip(words, [*words[1:], "--"]) if word.startswith("--")}


def gpt_run(case, runs):
    """Returns the run of "350M, BF16, recompute, batch 64", and its arguments; defaults: 124M,
    batch 16."""
    wanted = {"--size": "124m", "--batch": "16"}
    for word in case.split(", "):
        known = {text: name for name, text in PRECISIONS.items()}
        match word.split(" "):
            case [precision] if precision in known:
                wanted["--precision"] = known[precision]
            case ["batch", samples]:
                wanted["--batch"] = samples
            case ["recompute"]:
                wanted["--recompute"] = ""
            case [size]:
                wanted["--size"] = size.lower()
            case _:
                raise Missing(case)
    found = (run for file in runs for name, run in file.content["runs"].items() if arguments(name) == wanted)
    return first(found, case), wanted


def gpt2(case, runs):
    """Tokens per second and GiB of memory: "BF16, recompute"."""
    run, wanted = gpt_run(case, runs)
    alike = wanted == {"--size": "124m", "--batch": "16", "--precision": wanted["--precision"]}
    name = wanted["--precision"] if alike else f"{wanted['--size']} {wanted['--precision']}"
    peers = [file.content["pytorch"]["runs"].get(name) for file in runs if "pytorch" in file.content]
    peer = next(filter(None, peers), None)
    text = lambda rate, size: f"{rate:,.0f} ({size / 2**30:.2f} GiB)"
    rate = int(wanted["--batch"]) * TOKENS / median(run["seconds_of_updates"])
    return text(rate, sum(run["bytes"].values())), text(peer["tokens_per_second"], peer["peak_bytes"]) if peer else ""


def finetune(case, runs):
    """Tokens per second, padding included, and GiB of the GPU: "Llama-3.2-1B, adapters"."""
    run = first((file.content["runs"][case] for file in runs if case in file.content["runs"]), case)
    text = lambda rate, size: f"{rate:,.0f} ({size / 2**30:.1f} GiB)"
    peers = [peer for file in runs for peer in file.content["transformers"]["runs"].get(case, [])]
    peer = max(peers, key=lambda peer: peer["tokens_per_second"], default=None)
    how = peer and peer.get("name", "compiled" if peer["compiled"] else "eager")
    theirs = f"{text(peer['tokens_per_second'], peer['peak_bytes'])}, {how}" if peer else ""
    return text(median(run["tokens_per_second_of_updates"]), run["bytes"]), theirs


def products(case, runs):
    """Returns each layout's operations, and nanoseconds by contender.

    Cases: "TF32, 12 of 256 x 256, k 193 (NN, NT)"; "4096 cubed (TN)".
    """
    found = re.fullmatch(r"(?:(TF32|BF16), )?(?:(\d+) of )?(?:(\d+) x (\d+), k (\d+)|(\d+) cubed) \((.+)\)", case)
    if not found:
        raise Missing(case)
    precision, batches, m, n, k, cube, forms = found.groups()
    extents = [int(extent or cube) for extent in (m, n, k)]
    for form in forms.split(", "):
        times = {}
        for run in reversed(runs):
            for line, of in run.measured():
                if (line["batches"], line["m"], line["n"], line["k"], line["form"]) != (int(batches or 1), *extents, form):
                    continue
                if of == (precision or ("BF16" if run.stored_bf16 else "f32")) and run.stored_bf16 == (not precision and of == "BF16"):
                    times[line["contender"]] = median(line["nanoseconds"])
        if OURS not in times:
            raise Missing(f"{case}, {form}")
        yield 2.0 * int(batches or 1) * extents[0] * extents[1] * extents[2], times


def product_times(case, runs):
    """Microseconds; the peer's also as a multiple of ours."""
    forms = [times for _, times in products(case, runs)]
    ours, theirs = ([times[who] / 1e3 for times in forms if who in times] for who in (OURS, "PyTorch"))
    if len(theirs) < len(ours):
        return listed(ours), ""
    return listed(ours), f"{listed(theirs)} ({listed([their / our for our, their in zip(ours, theirs)], share)})"


def product_rates(case, runs):
    """TFLOP/s."""
    forms = list(products(case, runs))
    ours, theirs = ([operations / times[who] / 1e3 for operations, times in forms if who in times] for who in (OURS, "PyTorch"))
    return listed(ours), listed(theirs)


def is_layer(line):
    return all(line[extent] % 64 == 0 for extent in "mnk")


# The same groups as in benches/matmul/case.rs.
FAMILY = {
    "all": lambda line: True,
    "rows that begin on no 16 bytes": lambda line: line["k"] < 4096 and all(line[extent] % 2 for extent in "mnk"),
    "few outputs of a long k (TN)": lambda line: line["k"] >= 4096 and max(line["m"], line["n"]) <= 256 and not is_layer(line),
    "layers, forward (NN)": lambda line: is_layer(line) and line["form"] == "NN",
    "layers, inputs' gradients (NT)": lambda line: is_layer(line) and line["form"] == "NT",
    "layers, weights' gradients (TN)": lambda line: is_layer(line) and line["form"] == "TN",
}


def family(case, runs):
    """The peer's time divided by ours: the median, the least and the largest."""
    times = {}
    for run in runs:
        for line, _ in run.measured():
            if case in FAMILY and FAMILY[case](line):
                times.setdefault((line["m"], line["n"], line["k"], line["form"]), {})[line["contender"]] = median(line["nanoseconds"])
    ratios = sorted(both["PyTorch"] / both[OURS] for both in times.values() if both.keys() >= {OURS, "PyTorch"})
    if not ratios:
        raise Missing(case)
    return share(median(ratios)), f"{share(ratios[0])} to {share(ratios[-1])}"


def attention(case, runs):
    """TFLOP/s of forward and of backward: "4 x 4096, 32/8 heads of 128, causal"."""
    found = re.fullmatch(r"(\d+) x (\d+), (\d+)/(\d+) heads of (\d+), (causal|all)", case)
    if not found:
        raise Missing(case)
    batch, tokens, heads, kv_heads, width = map(int, found.groups()[:5])
    causal = found[6] == "causal"
    operations = 4.0 * width * batch * heads * tokens * (tokens + 1 if causal else 2 * tokens) / 2
    rates = {}
    for run in reversed(runs):
        for line, _ in run.measured():
            wanted = {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "width": width, "causal": causal}
            if all(line[name] == value for name, value in wanted.items()):
                forward, both = median(line["forward"]), median(line["both"])
                rates[line["contender"]] = [operations / forward / 1e3, 2.5 * operations / (both - forward) / 1e3]
    if OURS not in rates:
        raise Missing(case)
    return listed(rates[OURS]), listed(rates.get("PyTorch", []))


LARGE = 2**28
# Bytes per element in f32, as in benches/kernels/cases.rs.
BYTES = dict.fromkeys(["fill", "sum", "sum_columns", "sum_rows", "squared_norm"], 4) | {"adamw": 28, "swiglu_backward": 20}
BYTES |= dict.fromkeys(["tanh_backward", "gelu_backward", "silu_backward", "swiglu", "rms_norm_backward", "layer_norm_backward"], 12)
EMBEDDING = {"embedding": (8, 6), "embedding_backward": (8, 6)}


def layers(case, runs):
    """Microseconds and MiB of a step, of PyTorch eager and compiled and of candle: "lstm, small, f32"."""
    name, _, precision = case.rpartition(", ")
    found = {}
    for run in reversed(runs):
        for line, of in run.measured():
            if (line["case"], of) == (name, precision):
                found[line["contender"]] = short(median(line["nanoseconds"]) / 1e3), short(line["step_bytes"] / 2**20)
    if "stepscope captured" not in found:
        raise Missing(case)
    (time, mib), (eager, of_eager) = found["stepscope captured"], found["PyTorch eager"]
    compiled, of_compiled = found["PyTorch compiled, graph"]
    candle = f"; candle {found['candle'][0]}" if "candle" in found else ""
    return f"{time} ({mib} MiB)", f"{eager} ({of_eager} MiB), {compiled} ({of_compiled} MiB){candle}"


def kernels(case, runs):
    """The share of the faster f32 copy at 2^28 elements, for f32 and, if measured, BF16: "`tanh`".

    For "`copy`, GB/s" it is the rates.
    """
    name = case.removesuffix(", GB/s").strip("`")
    wide, narrow = EMBEDDING.get(name, (BYTES.get(name, 8), BYTES.get(name, 8) / 2))
    rates = {}
    for run in reversed(runs):
        for line, _ in run.measured():
            if line["elements"] == LARGE:
                for kernel, size in ((name, wide), (f"{name}_bf16", narrow), ("copy", 8)):
                    if line["kernel"] == kernel:
                        rates[line["contender"], kernel] = size * LARGE / median(line["nanoseconds"])
    copies = [rate for (_, kernel), rate in rates.items() if kernel == "copy"]
    if (OURS, name) not in rates or not copies:
        raise Missing(case)
    unit, text = (1, "{:,.0f}".format) if case.endswith("GB/s") else (max(copies), share)
    of = lambda who: listed([rates[who, kernel] / unit for kernel in (name, f"{name}_bf16") if (who, kernel) in rates], text)
    return of(OURS), of("PyTorch")


def startup(case, runs):
    """Milliseconds of a process, or of a part of it: "cold", "warm, first step"."""
    cache, _, part = case.partition(", ")
    times = {}
    for run in reversed(runs):
        for line in run.lines:
            samples = dict(line["parts"]).get(part) if part else line["process"]
            if line["cache"] == cache and samples:
                times[line["contender"]] = median(samples) / 1e6
    if OURS not in times:
        raise Missing(case)
    return short(times[OURS]), short(times["PyTorch"]) if "PyTorch" in times else ""


def moved(case, runs):
    """GB that a step moves from and to memory; the peer's with the quotient of ours and its own.

    "crossasset ieee 256" reads *-bytes-crossasset-ieee-256.json.
    """
    found = (run for run in runs if run.group == "bytes-" + case.replace(" ", "-"))
    lines = first(found, case).content["lines"]
    totals = {name: sum(read + written for _, read, written, _ in launches) / 1e9 for name, launches in lines.items()}
    peer = min((total for name, total in totals.items() if name != OURS), default=None)
    return short(totals[OURS]), f"{short(peer)} ({totals[OURS] / peer:.2f})" if peer else ""


def ranks(case, runs):
    """Rates of several GPUs with their scaling efficiency, and microseconds per update."""
    if found := re.fullmatch(r"GPT-2 124M, BF16, (\d+) ranks?, tokens/s", case):
        content = first((run.content for run in runs if "gpt" in run.content), case)
        ours = {number: int(number) * 16 * TOKENS / median(s) for number, s in content["gpt"]["seconds_of_updates"].items()}
        return scaled(ours, found[1], case), scaled(content.get("pytorch", {}).get("tokens_per_second", {}), found[1], None)
    if found := re.fullmatch(r"CrossAsset, (\w+), (\d+) ranks?, samples/s", case):
        content = first((run.content for run in runs if any("epochs" in one for one in run.content.get("runs", {}).values())), case)
        of = {name.split(", ")[1]: one for name, one in content["runs"].items() if PRECISIONS[name.split(", ")[0]] == found[1]}
        # The first epoch includes one-time costs.
        rates = {number: median([epoch["samples_per_second"] for epoch in one["epochs"][1:]]) for number, one in of.items()}
        return scaled(rates, found[2], case), ""
    if found := re.fullmatch(r"(\d+) million weights, (an update of 1|an update of 2|the exchange), us", case):
        lines = [line for run in runs if run.group == "group" for line, _ in run.measured() if line["elements"] == int(found[1]) * 10**6]
        times = {line["work"]: median(line["samples"]) / 1e3 for line in lines}
        if found[2] == "the exchange" and times.keys() >= {"update of 1", "update of 2"}:
            times["the exchange"] = times["update of 2"] - times["update of 1"]
        peers = {"an update of 2": "all_reduce and fused AdamW", "the exchange": "all_reduce"}
        ours, theirs = times.get(found[2].removeprefix("an ")), times.get(peers.get(found[2]))
        if ours:
            return short(ours), short(theirs) if theirs else ""
    raise Missing(case)


def scaled(rates, number, case):
    """The rate of several ranks, with its scaling efficiency."""
    if number not in rates:
        if case:
            raise Missing(case)
        return ""
    text = f"{rates[number]:,.0f}"
    return text if number == "1" or "1" not in rates else f"{text} ({rates[number] / int(number) / rates['1']:.3f})"


def generate(case, runs):
    """Milliseconds to the first token, or tokens per second after it, with the range."""
    names = {"first token, ms": ("first_s", 1e3), "tokens/s after it": ("tokens_per_s", 1)}
    if case not in names:
        raise Missing(case)
    name, factor = names[case]
    rounds = runs[0].content["rounds"]

    def text(who):
        values = sorted(factor * one[who][name] for one in rounds)
        return f"{median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"

    return text(OURS), text("transformers")


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def upload(case, runs):
    """Milliseconds and GB/s: "213,304 tensors of 1 KiB"."""
    found = re.fullmatch(r"([\d,]+) tensors? of (\d+) ([KMG]iB)", case)
    if not found:
        raise Missing(case)
    tensors, size = int(found[1].replace(",", "")), int(found[2]) * UNITS[found[3]]
    lines = [line for run in runs for line in run.lines if (line["tensors"], line["tensor_bytes"]) == (tensors, size)]
    times = {line["contender"].startswith(OURS): median(line["nanoseconds"]) for line in reversed(lines)}
    if True not in times:
        raise Missing(case)
    text = lambda time: f"{short(time / 1e6)} ({short(tensors * size / time)} GB/s)"
    return text(times[True]), text(times[False]) if False in times else ""


KINDS = {
    "allocation": arena,
    "step": step,
    "gpt2": gpt2,
    "finetune": finetune,
    "generate": generate,
    "product-times": product_times,
    "product-rates": product_rates,
    "family": family,
    "attention": attention,
    "layers": layers,
    "kernels": kernels,
    "start-up": startup,
    "bytes": moved,
    "ranks": ranks,
    "upload": upload,
}
