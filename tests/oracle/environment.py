"""Installs a script's packages into a separate environment below the target folder."""

import os
import subprocess
import sys
from pathlib import Path

TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or Path(__file__).resolve().parents[2] / "target")


def run_in(name, packages):
    """Creates the environment with exactly these packages if missing, and runs the script in it."""
    folder = (TARGET / name).resolve()
    if Path(sys.prefix).resolve() == folder:
        return
    python, ready, wanted = folder / "bin" / "python", folder / "ready", " ".join(packages)
    try:
        if not ready.exists() or ready.read_text() != wanted:
            print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages], check=True)
            ready.write_text(wanted)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot create {folder}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    os.execv(python, [str(python), *sys.argv])
