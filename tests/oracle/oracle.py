#!/usr/bin/env python3
"""Checks traces of the library against an independent float64 computation with JAX on the CPU.

    cargo xtask oracle                                       # creates the traces and runs this
    cargo run --release --example crossasset -- --trace trace.safetensors
    cargo run --release --example trace_ops -- ops.safetensors
    cargo run --release --example trace_ops -- --graphs 10000 graphs.safetensors
    python3 tests/oracle/oracle.py ops.safetensors graphs.safetensors trace.safetensors ...

A trace of `examples/trace_ops` has every op's operands and results, or those of random expressions. A
trace of `examples/crossasset` has three updates of a training run. Each check must also refuse planted
errors. JAX, autograd, numpy and safetensors are installed into target/oracle-venv at the first run.

Exit code 0: all agree. 1: something differs, or a planted error passed. 2: a trace cannot be read or
is incomplete.
"""

import os
import sys
from pathlib import Path

import environment

PACKAGES = ["autograd==1.9.1", "jax==0.10.2", "numpy==2.4.6", "safetensors==0.8.0"]


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    environment.run_in("oracle-venv", PACKAGES)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_enable_x64", True)
    import comparison
    import crossasset
    import graphs
    import ops

    paths = [Path(path) for path in sys.argv[1:]]
    try:
        notes = {path: comparison.read(path)[1] for path in paths}
        runs = [path for path in paths if "learning_rate" in notes[path]]
        checks = {path: graphs.check if "graph 0" in notes[path] else ops.check for path in paths if path not in runs}
        agreed = [check(path) for path, check in checks.items()]
        if runs:
            crossasset.find_plants(runs[0])
            agreed.append(crossasset.check(runs))
        return 0 if all(agreed) else 1
    except comparison.BadTrace as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
