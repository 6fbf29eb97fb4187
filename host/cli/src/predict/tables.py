"""Updates the tables of docs/predict.md in place.

    python3 host/cli/src/predict/tables.py docs/predict.md PROGRAM ARGUMENT...

PROGRAM runs `stepscope`, as `cargo run --release -p stepscope-cli --` does. The test RECORDED prints
the steps against the H200, and the counts of lines within 10 % and 20 %. A row
of a GB10 names its arguments; its columns f32, TF32, BF16 and tokens/s (BF16) get predictions, except
for empty cells. Fails if a row has no line, or a line of a step no row.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

RECORDED = "predict::tests::recorded_predictions_stay_close"


def cells_of(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


class Predictions:
    """What the program and the test print."""

    def __init__(self, program):
        self.program = program
        test = ["cargo", "test", "--quiet", "-p", "stepscope-cli", "--lib", "--", "--exact", "--nocapture", RECORDED]
        report = subprocess.run(test, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows = re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+) % \| (.+) \|$", report, flags=re.M)
        groups = re.findall(r"^(\w+): (\d+) lines, (\d+) within 10 %, (\d+) within 20 %$", report, flags=re.M)
        self.lines = {name: line for name, *line in rows}
        self.groups = {name: counts for name, *counts in groups}

    def run(self, *arguments):
        return subprocess.run([*self.program, "predict", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout

    def on_gb10(self, arguments, column):
        """Returns the cell of a column: the time of a step and what binds it, or its tokens/s."""
        precision = {"f32": "f32", "TF32": "tf32"}.get(column, "bf16")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "prediction.json")
            self.run("--gpu", "gb10", "--precision", precision, "--json", str(file), *arguments)
            forecast = json.loads(file.read_text())["forecast"]
        if column.startswith("tokens/s"):
            options = dict(zip(arguments[::2], arguments[1::2]))
            rate = int(options["--batch"]) * int(options["--context"]) / forecast["microseconds"] * 1e6
            return f"{rate:,.0f}"
        milliseconds = forecast["microseconds"] / 1e3
        digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
        return f"{milliseconds:,.{digits}f} ms, {forecast['bound']}"


def rewrite(page, found):
    """Returns the page with these predictions, and the names of the steps that it shows."""
    shown, written, columns = set(), [], []
    for row in page.splitlines():
        first = cells_of(row)[0]
        if not row.startswith("|"):
            columns = []
        elif not columns:
            columns = cells_of(row)
        if re.match(r"\| (CrossAsset|GPT-2).*, (f32|tf32|bf16) \|", row):
            if first not in found.lines:
                raise SystemExit(f"no line of {first}")
            predicted, measured, error, bound = found.lines[first]
            times = (f"{float(time) / 1e3:.4g}" for time in (predicted, measured))
            row = "| " + " | ".join([first, *times, f"{error} %", bound]) + " |"
            shown.add(first)
        elif counted := re.match(r"\| (\w+) \| \d+ \| \d+ \| \d+ \|", row):
            row = "| " + " | ".join([counted[1], *found.groups[counted[1]]]) + " |"
        elif named := re.match(r"\| `(--(?:model|config) [^`]+)` \|", row):
            cells = cells_of(row)
            for place, column in enumerate(columns):
                if cells[place] and re.match(r"(f32|TF32|BF16|tokens/s)\b", column):
                    cells[place] = found.on_gb10(named[1].split(), column)
            row = "| " + " | ".join(cells) + " |"
        written.append(row)
    return "\n".join(written) + "\n", shown


def main(path, *program):
    page, found = pathlib.Path(path), Predictions(program)
    text, shown = rewrite(page.read_text(), found)
    steps = {name for name in found.lines if re.match(r"(CrossAsset|GPT-2)", name)}
    if steps != shown:
        raise SystemExit(f"no row of {', '.join(sorted(steps - shown))}")
    page.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
