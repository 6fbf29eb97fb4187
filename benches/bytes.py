"""Measures with `ncu` the bytes that a training step moves from and to the GPU's memory.

    cargo build --release --features cuda --bin stepscope --example crossasset
    python3 benches/bytes.py gpt bf16 -- target/release/stepscope train --device cuda --size 124m \
        --data train.bin --precision bf16 --batch 16 --updates 5 --evaluate-every 100 --eager
    python3 benches/bytes.py crossasset f32 256 -- target/release/examples/crossasset \
        --device cuda --batch 256 --folds 1 --epochs 12 --capture off

Compares ours with PyTorch's compiled step. Prints a table and writes every kernel's bytes to
`benches/runs/DATE-GPU-bytes-WHAT.json`. A step of ours is the launches from one AdamW to the next,
in eager steps, because `ncu` does not see kernels inside graphs. Nothing is replayed and caches are
left unchanged, so a kernel finds in the L2 cache what the previous one left there. Needs `ncu` and
the permission to read counters (`docs/platforms.md`).
"""

import csv
import datetime
import io
import json
import os
import pathlib
import subprocess
import sys

METRICS = ["dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"]
# Launches to skip and to profile. The profiled ones include the ends of two steps. A step of GPT-2
# 124M has 443 launches, and ncu takes about 50 ms for each.
WINDOW = {"gpt": (560, 900), "crossasset": (300, 300)}


def kernels(options, command):
    """Returns [(kernel, bytes read, bytes written, nanoseconds)] of each profiled launch."""
    ncu = ["ncu", "--csv", "--print-units", "base", "--target-processes", "application-only", "--clock-control", "none", "--cache-control", "none"]
    ncu += ["--metrics", ",".join(METRICS)]
    done = subprocess.run(ncu + options + command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise SystemExit(f"ncu counted nothing ({done.returncode}): {(done.stderr or done.stdout)[-2000:]}")
    launches = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        name, values = launches.setdefault(int(row["ID"]), (row["Kernel Name"].split("(")[0], {}))
        values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return [(name, *(values[metric] for metric in METRICS)) for _, (name, values) in sorted(launches.items())]


def one_step(launches):
    """Returns the launches after one AdamW up to the next, from a pair without an evaluation
    between."""
    ends = [at for at, (name, *_) in enumerate(launches) if name.startswith("adamw")]
    if len(ends) < 2:
        names = ", ".join(sorted({name for name, *_ in launches}))
        raise SystemExit(f"{len(ends)} launches of AdamW among {len(launches)}: not a whole step, only {names}")
    _, first, last = min((last - first, first, last) for first, last in zip(ends, ends[1:]))
    return launches[first + 1 : last + 1]


def largest(launches, count):
    """Returns the kernels that move the most bytes, with their launches and bytes."""
    sums = {}
    for name, read, written, _ in launches:
        times, moved = sums.get(name, (0, 0))
        sums[name] = (times + 1, moved + read + written)
    return sorted(((moved, times, name) for name, (times, moved) in sums.items()), reverse=True)[:count]


def main():
    if "--" not in sys.argv:
        raise SystemExit(__doc__)
    at = sys.argv.index("--")
    what, precision, *batch = sys.argv[1:at]
    peer = ["python3", "benches/peers/gpt2.py", "--precision", precision, "--updates", "1", "--profile"]
    if what == "crossasset":
        peer = ["python3", "benches/peers/step.py", "--device", "cuda", "--batch", *batch, "--samples", "1", "--row", "1", "--precision", precision, "--profile"]
    before, count = WINDOW[what]
    ours = one_step(kernels(["--launch-skip", str(before), "--launch-count", str(count), "--kill", "yes"], sys.argv[at + 1 :]))
    theirs = kernels(["--profile-from-start", "off"], peer)
    names = {"stepscope": ours, "PyTorch, compiled": theirs}
    totals = {name: sum(read + written for _, read, written, _ in launches) for name, launches in names.items()}
    print(f"{' '.join(sys.argv[1:at])}: bytes from and to memory in a step")
    for name, launches in names.items():
        print(f"{name:<20}{totals[name] / 1e9:>9.3f} GB in {len(launches)} launches")
        for moved, times, kernel in largest(launches, 12):
            print(f"    {moved / 1e9:>9.3f} GB {times:>5}  {kernel[:100]}")
    print(f"ours / PyTorch's: {totals['stepscope'] / totals['PyTorch, compiled']:.2f}")
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
    device, driver = (gpu.split(", ") + [""])[:2]
    run = {"date": str(datetime.date.today()), "device": device, "driver": driver, "commit": os.environ.get("STEPSCOPE_COMMIT"), "command": sys.argv}
    folder = pathlib.Path(os.environ.get("STEPSCOPE_RUNS", "benches/runs"))
    folder.mkdir(parents=True, exist_ok=True)
    short = device.removeprefix("NVIDIA ").lower().replace(" ", "-")
    path = folder / f"{run['date']}-{short}-bytes-{'-'.join(sys.argv[1:at])}.json"
    path.write_text(json.dumps(run | {"lines": names}))
    print(f"all in {path}")


main()
