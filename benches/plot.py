#!/usr/bin/env python3
"""Plots the benches' results, by default the newest of each: `benches/plot.py [FILE.json ..]`.

Reads the files of `cargo bench` in `benches/runs/` and writes `docs/plots/GROUP.png`. A point is the
median of a line's samples, and its bar the 10th to 90th percentile. Without a file it also draws
`docs/plots/beside-pytorch.svg`, at the top of the README. Everything drawn is in the files. Needs
matplotlib.
"""

import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot, ticker  # noqa: E402

pyplot.rcParams |= {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}

ROOT = Path(__file__).resolve().parents[1]
OURS = "stepscope"
# The files that the README shows, by precision.
FRONT = {
    "f32": "2026-11-25-h200-step.json",
    "TF32": "2026-11-21-h200-step-tf32.json",
    "BF16": "2026-11-21-h200-step-bf16.json",
}
# Legible on both white and black pages.
FRONT_INK, FRONT_OURS, FRONT_PEER = "#7a8088", "#1f83d6", "#d9822b"


class Run:
    """A file of samples."""

    def __init__(self, path):
        self.content = json.loads(path.read_text())
        self.lines = [line for line in self.content["lines"] if "nanoseconds" in line]

    def title(self, what):
        content = self.content
        return f"{what}\n{content['device']}, driver {content['driver']}, {content['date']}, commit {content['commit']}"


def spread(nanoseconds):
    """Median, 10th and 90th percentile."""
    if len(nanoseconds) < 2:
        return (nanoseconds[0],) * 3
    tenths = statistics.quantiles(nanoseconds, n=10, method="inclusive")
    return statistics.median(nanoseconds), tenths[0], tenths[-1]


def with_bars(axes, places, samples, **style):
    """A line through the medians, with their spread."""
    spreads = [spread(nanoseconds) for nanoseconds in samples]
    medians = [median / 1e3 for median, _, _ in spreads]
    errors = [[(median - low) / 1e3 for median, low, _ in spreads], [(high - median) / 1e3 for median, _, high in spreads]]
    axes.errorbar(places, medians, yerr=errors, marker="o", markersize=3, capsize=2, linewidth=1, **style)


def logarithmic(axes):
    """Sets a scale with powers of two along x and powers of ten along y."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(ticker.NullLocator())


def kernels(run):
    """Draws the time of one call by size, one panel per kernel."""
    panels = defaultdict(lambda: defaultdict(list))
    for line in run.lines:
        panels[line["kernel"]][line["contender"]].append((line["elements"], line["nanoseconds"]))
    columns = 4
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(12, 2.4 * rows), squeeze=False)
    for axes in grid.flat[len(panels):]:
        axes.set_axis_off()
    for axes, (kernel, contenders) in zip(grid.flat, panels.items()):
        for contender, points in contenders.items():
            sizes, samples = zip(*sorted(points, key=lambda point: point[0]))
            with_bars(axes, sizes, samples, label=contender)
        axes.set(title=kernel)
        logarithmic(axes)
    grid.flat[0].legend()
    figure.supxlabel("elements")
    figure.supylabel("us a call")
    return figure, run.title("Kernels that memory bounds")


def matmul(run):
    """Draws the rate by shape, ours next to the peer's."""
    shapes = defaultdict(dict)
    for line in run.lines:
        batches, m, n, k = (line[name] for name in ("batches", "m", "n", "k"))
        name = f"{m} x {n} x {k} {line['form']}" + (f", {batches} batches" if batches > 1 else "")
        shapes[name][line["contender"]] = (2 * batches * m * n * k, line["nanoseconds"])
    contenders = list(dict.fromkeys(line["contender"] for line in run.lines))
    # Runs with --tiles name others "stepscope ROWSxCOLS"; users get the op's choice.
    contenders = [name for name in contenders if not re.search(r"\d+x\d+", name)]
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(shapes) + 1.5))
    height = 0.8 / len(contenders)
    for at, contender in enumerate(contenders):
        places, rates = [], []
        for place, by_contender in enumerate(shapes.values()):
            if contender in by_contender:
                operations, nanoseconds = by_contender[contender]
                places.append(place + at * height)
                rates.append(operations / statistics.median(nanoseconds) / 1e3)
        axes.barh(places, rates, height, label=contender)
    axes.set_yticks([place + height * (len(contenders) - 1) / 2 for place in range(len(shapes))], shapes)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("TFLOP/s")
    axes.legend()
    return figure, run.title("Matrix products")


def step(run):
    """Draws the time of a training step by batch, one panel per measure."""
    names = {
        "round_trip": "one step: upload, loss read back",
        "queued": "steps in a row, uploads included",
        "resident": "steps in a row, inputs on the device",
        "host": "the host's part",
    }
    colours = {name: f"C{at}" for at, name in enumerate(dict.fromkeys(line["contender"] for line in run.lines))}
    figure, grid = pyplot.subplots(1, len(names), figsize=(14, 3.8), sharey=True)
    for axes, (measure, title) in zip(grid, names.items()):
        contenders = defaultdict(list)
        for line in run.lines:
            if line["measure"] == measure:
                contenders[line["contender"]].append((line["batch"], line["nanoseconds"]))
        for contender, points in contenders.items():
            batches, samples = zip(*sorted(points, key=lambda point: point[0]))
            style = "-" if contender.startswith(OURS) else "--"
            with_bars(axes, batches, samples, label=contender, linestyle=style, color=colours[contender])
        axes.set(title=title, xlabel="batch")
        logarithmic(axes)
    grid[0].set_ylabel("us a step")
    grid[0].legend()
    return figure, run.title("A training step of CrossAsset")


def bars(run, what, name):
    """Draws one bar per line on a logarithmic axis."""
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(run.lines) + 1.5))
    for place, line in enumerate(run.lines):
        median, low, high = (value / 1e3 for value in spread(line["nanoseconds"]))
        axes.barh(place, median, xerr=[[median - low], [high - median]], capsize=2, color=f"C{place % 10}")
    axes.set_yticks(range(len(run.lines)), [name(line) for line in run.lines])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="us")
    return figure, run.title(what)


def arena(run):
    """Draws the times of an allocation and of a reset."""
    return bars(run, "Allocation", lambda line: line["name"])


def upload(run):
    """Draws the time of an upload."""
    return bars(run, "Uploads", lambda line: f"{line['tensors']:,} x {line['tensor_bytes']:,} bytes, {line['contender']}")


GROUPS = {function.__name__: function for function in (kernels, matmul, step, arena, upload)}


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
    device = f"{content['device']}, driver {content['driver']}, {content['date']}"
    figure.suptitle(f"Milliseconds per training step, less is better: {device}", fontsize=12)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def draw_front():
    """Writes the picture without a background, with real text, and with reproducible bytes."""
    inks = ("text.color", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {name: FRONT_INK for name in inks} | {"font.size": 11, "font.sans-serif": ["DejaVu Sans", "sans-serif"]}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "front"}
    path = ROOT / "docs/plots/beside-pytorch.svg"
    with pyplot.rc_context(style):
        figure = front({precision: Run(ROOT / "benches/runs" / name) for precision, name in FRONT.items()})
        figure.savefig(path, transparent=True, metadata={"Date": None})
    print(f"{', '.join(FRONT.values())} -> {path.relative_to(ROOT)}")


def newest():
    """Returns the newest file of each group, `DATE-DEVICE-GROUP.json`, from a GPU if there is
    one."""
    found = {}
    for path in sorted((ROOT / "benches/runs").glob("*.json"), key=lambda path: ("emulated" not in path.name, path.name)):
        if match := re.fullmatch(r"\d{4}-\d\d-\d\d-\w+?-(\w+)\.json", path.name):
            if match[1] in GROUPS:
                found[match[1]] = path
    return found


def main():
    paths = [Path(name) for name in sys.argv[1:]]
    files = {path.stem.rsplit("-", 1)[-1]: path for path in paths} or newest()
    if unknown := files.keys() - GROUPS.keys():
        sys.exit(f"no group {', '.join(unknown)}: files are named DATE-DEVICE-GROUP.json, and the groups are {', '.join(GROUPS)}")
    plots = ROOT / "docs/plots"
    plots.mkdir(exist_ok=True)
    for group, path in files.items():
        figure, title = GROUPS[group](Run(path))
        figure.suptitle(title, fontsize=10)
        figure.tight_layout()
        figure.savefig(plots / f"{group}.png", dpi=90)
        print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path} -> docs/plots/{group}.png")
    if not paths:
        draw_front()


if __name__ == "__main__":
    main()
