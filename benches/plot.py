#!/usr/bin/env python3
"""Draws docs/plots/beside-pytorch.svg from the newest runs of the step bench, and
docs/plots/memory-losses.svg and docs/plots/muon.svg from the newest losses by --memory and by
--optimizer. Needs matplotlib.

A bar is the median of a line's samples. A point of a curve is the mean of 25 updates.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402

pyplot.rcParams |= {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}

ROOT = Path(__file__).resolve().parents[1]
OURS = "stepscope"
# The subjects, by precision.
SUBJECTS = {"f32": "h200-step", "TF32": "h200-step-tf32", "BF16": "h200-step-stored-bf16"}
# Legible on both white and black pages.
FRONT_INK, FRONT_OURS, FRONT_PEER = "#7a8088", "#1f83d6", "#d9822b"


class Run:
    """A file of samples."""

    def __init__(self, path):
        self.content = json.loads(path.read_text())
        self.lines = [line for line in self.content["lines"] if "nanoseconds" in line]


def front(runs):
    """Draws our captured step next to PyTorch's fastest, with inputs on the device.

    One panel per batch, and one pair of bars per precision.
    """
    steps, fastest = defaultdict(dict), set()
    for precision, run in runs.items():
        medians = defaultdict(dict)
        for line in run.lines:
            if line["measure"] == "resident":
                medians[line["batch"]][line["contender"]] = statistics.median(line["nanoseconds"]) / 1e6
        for batch, by_contender in medians.items():
            ours = by_contender[f"{OURS} captured"]
            peers = {name: median for name, median in by_contender.items() if not name.startswith(OURS)}
            best = min(peers, key=peers.get)
            fastest.add(best)
            steps[batch][precision] = (ours, peers[best])
    figure, grid = pyplot.subplots(1, len(steps), figsize=(9.6, 2.9))
    for axes, (batch, by_precision) in zip(grid, steps.items()):
        longest = max(max(pair) for pair in by_precision.values())
        for place, pair in enumerate(by_precision.values()):
            for side, (median, colour) in enumerate(zip(pair, (FRONT_OURS, FRONT_PEER))):
                at = place + 0.38 * (side - 0.5)
                axes.barh(at, median, 0.34, color=colour)
                weight = "bold" if median == min(pair) else "normal"
                axes.text(median + 0.02 * longest, at, f"{median:#.3g}", va="center", weight=weight)
        axes.set_yticks(range(len(by_precision)), by_precision)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        axes.set(title=f"batch {batch}", xlim=(0, 1.2 * longest))
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    names = (f"{OURS}, captured", f"{' or '.join(sorted(fastest))} (its fastest)")
    bars = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (FRONT_OURS, FRONT_PEER)]
    figure.legend(bars, names, loc="lower center", ncols=2, frameon=False)
    content = next(iter(runs.values())).content
    dates = sorted(run.content["date"] for run in runs.values())
    device = f"{content['device']}, driver {content['driver']}, {dates[0]} to {dates[-1]}"
    figure.suptitle(f"Milliseconds per training step, less is better: {device}", fontsize=12)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def newest(name):
    return max((ROOT / "benches/runs").glob(f"????-??-??-{name}.json"))


def means(losses, together=25):
    """Returns numbers of updates, and the mean loss of the updates up to each."""
    ends = range(together, len(losses) + 1, together)
    return list(ends), [statistics.mean(losses[end - together : end]) for end in ends]


def memory(content):
    """Draws the loss of each setting of --memory, and how far it is from that of full memory."""
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9.6, 5), sharex=True, height_ratios=(2, 1))
    _, full = means(content["losses"]["full"])
    for setting, losses in content["losses"].items():
        updates, own = means(losses)
        above.plot(updates, own, linewidth=1, label=setting)
        below.plot(updates, [one - other for one, other in zip(own, full)], linewidth=1)
    above.set(ylabel="loss, nats a token", ylim=(1.2, 4))
    above.legend(frameon=False)
    below.set(xlabel="updates", ylabel="minus full", ylim=(-0.1, 0.1))
    figure.suptitle(f"GPT-2 124M, BF16, by --memory: {content['gpu']}, {content['date']}")
    figure.tight_layout()
    return figure


def optimizers(content):
    """Draws the loss by optimizer and learning rate."""
    figure, axes = pyplot.subplots(figsize=(9.6, 4))
    for name, run in content["runs"].items():
        axes.plot(*means(run["losses"]), linewidth=1, label=name, linestyle="-" if "muon" in name else "--")
    axes.set(xlabel="updates", ylabel="loss, nats a token", ylim=(0.8, 5))
    axes.legend(frameon=False)
    figure.suptitle(f"GPT-2 124M, BF16, by --optimizer: {content['gpu']}, {content['date']}")
    figure.tight_layout()
    return figure


def save(name, draw):
    """Writes a picture without a background, with real text, and with reproducible bytes."""
    inks = ("text.color", "axes.titlecolor", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style = {name: FRONT_INK for name in inks} | {"font.size": 11, "font.sans-serif": ["DejaVu Sans", "sans-serif"]}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "front"}
    with pyplot.rc_context(style):
        draw().savefig(ROOT / "docs/plots" / name, transparent=True, metadata={"Date": None})
    print(f"docs/plots/{name}")


if __name__ == "__main__":
    save("beside-pytorch.svg", lambda: front({precision: Run(newest(name)) for precision, name in SUBJECTS.items()}))
    save("memory-losses.svg", lambda: memory(json.loads(newest("h200-memory-losses").read_text())))
    save("muon.svg", lambda: optimizers(json.loads(newest("h200-muon").read_text())))
