"""Updates the tables of docs/predict.md in place, and the counts of lines within 10 % and 20 %.

    cargo run --release -- predict --against benches/runs |
        python3 host/cli/src/predict/tables.py docs/predict.md

The rows stay; only their figures change. Lists the lines without a row in the page, and fails if a
row has no line.
"""

import pathlib
import re
import sys

# The columns of the products table, which are the endings of its lines' names.
FACTORS = ["ieee", "tf32", "bf16", "BF16 tensors"]
GROUPS = {"Products": "product", "Kernels that memory bounds": "kernel", "Attention of BF16 tensors": "attention"}


def read(report):
    """Parses the report.

    Returns {line: (predicted, measured, error in %, bound)} and
    {group: (lines, within 10 %, within 20 %)}.
    """
    rows = re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+) % \| (.+) \|$", report, flags=re.M)
    groups = re.findall(r"^(\w+): (\d+) lines, (\d+) within 10 %, (\d+) within 20 %$", report, flags=re.M)
    return {name: line for name, *line in rows}, {name: counts for name, *counts in groups}


def rewrite(page, lines, groups):
    """Returns the page with these figures, and the names of the lines that it shows."""
    shown = set()

    def cell(name):
        if name not in lines:
            return ""
        shown.add(name)
        predicted, measured, error, _ = lines[name]
        whole = f"{float(error):+.0f}"
        return f"{predicted} / {measured} ({f'**{whole}**' if abs(float(error)) > 20 else whole})"

    def step(name):
        shown.add(name)
        predicted, measured, error, bound = lines[name]
        return [*(f"{float(time) / 1e3:.4g}" for time in (predicted, measured)), f"{error} %", bound]

    section, sizes, written = "", [], []
    for row in page.splitlines():
        if row.startswith("#"):
            section = row.lstrip("# ")
        first, *rest = [text.strip() for text in row.strip("|").split("|")]
        cells = None
        if section == "Against the H200" and re.match(r"(CrossAsset|GPT-2).*(ieee|tf32|bf16)$", first):
            cells = step(first) if first in lines else []
        elif section == "Products" and ", k " in first:
            cells = [cell(f"{first}, {factors}") for factors in FACTORS]
        elif section == "Kernels that memory bounds" and first == "kernel":
            sizes = rest
        elif section == "Kernels that memory bounds" and first.startswith("`"):
            kernel = first.strip("`")
            others = [f"{size}: " + cell(f"{kernel}, {size}") for size in re.findall(r"(\S+): ", rest[-1])]
            cells = [*(cell(f"{kernel}, {size}") for size in sizes[:-1]), "; ".join(others)]
        elif section == "Attention of BF16 tensors" and re.search(r"heads of .*(forward|both)$", first):
            cells = [cell(first)]
        if cells is not None:
            if not any(cells):
                raise SystemExit(f"no line of {first}")
            row = "| " + " | ".join([first, *cells]) + " |"
        elif section in GROUPS:
            all_lines, ten, twenty = groups[GROUPS[section]]
            within = f"{all_lines} lines, {ten} within 10 %, {twenty} within 20 %"
            row = re.sub(r"\d+ lines, \d+ within 10 %, \d+ within 20 %", within, row)
        else:
            row = re.sub(r"\d+ of \d+ are within it", "{1} of {0} are within it".format(*groups["step"]), row)
        written.append(row)
    return "\n".join(written) + "\n", shown


def main(path):
    page = pathlib.Path(path)
    lines, groups = read(sys.stdin.read())
    text, shown = rewrite(page.read_text(), lines, groups)
    page.write_text(text)
    for name in lines.keys() - shown:
        print(f"no row of {name}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
