#!/usr/bin/env python3
"""Fills the tables of docs/performance.md from the samples in benches/runs.

    python3 benches/tables.py docs/performance.md            updates the page
    python3 benches/tables.py docs/performance.md --check    fails if the page and the files disagree
    python3 benches/tables.py docs/performance.md --against FOLDER
        prints each figure that differs by more than 5 % in a newer run; fails if there is any
    python3 benches/tables.py self-test                      checks that only a wrong page is refused

A marker `<!-- KIND: FILE, FILE .. -->`, which may take several lines, precedes the sources and a
table. Both are generated. In the table, the columns "ours" and "best peer" are filled by the case
in the first column; all others are handwritten and stay. If several files have a line, the first
counts. For a FOLDER, the newest file of the same bench counts: `DATE-GPU-step.json` with any date
and GPU.
"""

import json
import pathlib
import re
import sys
import tempfile
import textwrap

from figures import KINDS, NAME, Missing, Run

RUNS = pathlib.Path(__file__).resolve().parent / "runs"
MARKER = re.compile(r"^<!-- ([\w-]+): (.+) -->$")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
NEAR = 0.05


def cells_of(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def tables(lines):
    """Yields (line, kind, file names, lines of the rows, columns) of each marker, with lines as
    indices."""
    for at, line in enumerate(lines):
        if not line.endswith(" -->"):
            continue
        # A marker may take several lines.
        start = next(place for place in range(at, -1, -1) if place == 0 or lines[place].startswith("<!-- "))
        if not (marker := MARKER.match(" ".join(lines[start : at + 1]))):
            continue
        if marker[1] not in KINDS:
            raise SystemExit(f"line {at + 1}: no kind {marker[1]}; there are {', '.join(KINDS)}")
        head = next((place for place in range(at, len(lines)) if lines[place].startswith("|")), None)
        columns = [] if head is None else [re.match("ours|best peer|limit|", cell)[0] for cell in cells_of(lines[head])]
        if not {"ours", "best peer", "limit"} <= set(columns):
            raise SystemExit(f"line {at + 1}: no table with ours, best peer and limit below the marker")
        end = next((place for place in range(head, len(lines)) if not lines[place].startswith("|")), len(lines))
        yield at, marker[1], marker[2].split(", "), range(head + 2, end), columns


def rows(lines, places, columns, kind, runs):
    """Yields (line, cells, [(column, figure from the runs)]) of each row; None if the runs lack
    it."""
    for place in places:
        cells = cells_of(lines[place])
        limit = NUMBER.match(cells[columns.index("limit")])
        try:
            figures = KINDS[kind](cells[0], float(limit[0].replace(",", "")) if limit else None, runs)
        except Missing:
            figures = None
        yield place, cells, figures and list(zip((columns.index("ours"), columns.index("best peer")), figures))


def rewritten(text, folder):
    """Returns the page with the figures of the runs in a folder."""
    lines = text.splitlines()
    # From the last, because the sources may take more or fewer lines.
    for at, kind, names, places, columns in reversed(list(tables(lines))):
        runs = [Run(folder / name) for name in names]
        sources = {}
        for run in runs:
            sources.setdefault(run.source(), []).append(f"`benches/runs/{run.path.name}`")
        end = next(place for place in range(at + 1, places.start) if not lines[place] or place + 1 == places.start)
        if end == at + 1 or lines[end]:
            raise SystemExit(f"line {at + 1}: the marker must be followed by the sources and an empty line")
        for place, cells, figures in rows(lines, places, columns, kind, runs):
            if figures is None:
                raise SystemExit(f"line {place + 1}: no line of {cells[0]} in {', '.join(names)}")
            for column, figure in figures:
                cells[column] = figure
            lines[place] = "| " + " | ".join(cells) + " |"
        told = "; ".join(f"{source}: {', '.join(files)}" for source, files in sources.items()) + "."
        lines[at + 1 : end] = textwrap.wrap(told, 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def newest(name, folder):
    """Returns the newest file of the same bench, on the same number of GPUs or also on the
    emulator."""
    known = NAME.fullmatch(name)
    several = re.search(r"-x\d+$", known[1])
    alike = lambda path: ("-emulated-" in path.name) == (known[1] == "emulated") and (not several or several[0] + "-" in path.name)
    found = [path for path in sorted(folder.glob(f"*-{known[2]}.json")) if NAME.fullmatch(path.name) and alike(path)]
    return found[-1] if found else None


def compared(text, folder):
    """Returns the figures that differ in a folder's runs, and those that the runs lack."""
    lines, elsewhere, absent = text.splitlines(), [], []
    for _, kind, names, places, columns in tables(lines):
        files = {name: newest(name, folder) for name in names}
        absent += [f"{kind}: no run like {name}" for name, file in files.items() if not file]
        runs = [Run(file) for file in files.values() if file]
        if not runs:
            continue
        for _, cells, figures in rows(lines, places, columns, kind, runs):
            if figures is None:
                absent.append(f"{kind}: no line of {cells[0]}")
                continue
            for column, figure in figures:
                before, now = ([float(number.replace(",", "")) for number in NUMBER.findall(cell)] for cell in (cells[column], figure))
                if len(before) != len(now):
                    absent.append(f"{kind}: {cells[0]}, {columns[column]}: {figure or 'nothing'} instead of {cells[column]}")
                elif far := [f"{b:g} -> {n:g} ({n / b - 1:+.1%})" for b, n in zip(before, now) if abs(n - b) > NEAR * b]:
                    elsewhere.append(f"{kind}: {cells[0]}, {columns[column]}: {', '.join(far)}")
    return elsewhere, absent


def self_test():
    """Fails if a wrong page passes or a right one does not."""
    table = "<!-- {} -->\n{}\n\n| case | goal | ours | best peer | limit | what binds it |\n|---|---|---|---|---|---|\n"
    page = table.format("step: 2026-01-01-h200-step.json", "-") + "| f32, batch 1, captured, in a row | 0.2 |  |  |  | latency |\n"
    line = {"batch": 1, "measure": "resident"}

    def planted(folder, name, ours):
        lines = [line | {"contender": who, "nanoseconds": [time]} for who, time in (("stepscope captured", ours), ("PyTorch compiled", 7e5))]
        run = {"date": name[:10], "device": "NVIDIA H200", "driver": "1", "commit": "abcdef0123", "lines": lines}
        (folder / name).write_text(json.dumps(run))

    def refused(what, page, folder):
        try:
            rewritten(page, folder)
        except (SystemExit, OSError):
            print(f"refused: {what}")
        else:
            raise SystemExit(f"passed {what}")

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        planted(folder, "2026-01-01-h200-step.json", 2e5)
        right = rewritten(page, folder)
        if "| 0.2 | 0.200 | 0.700 (compiled) |  | latency |" not in right or rewritten(right, folder) != right:
            raise SystemExit(f"wrong: {right}")
        if rewritten(right.replace("0.200", "0.201"), folder) != right or "commit abcdef0: `benches/runs/2026" not in right:
            raise SystemExit(f"a wrong figure or source stays: {right}")
        print("refused: a figure that differs from the file's")
        wrapped = right.replace("<!-- step: ", "<!-- step:\n")
        if rewritten(wrapped.replace("0.200", "0.201"), folder) != wrapped:
            raise SystemExit("a wrong figure below a marker of two lines stays")
        refused("a row without a line", right.replace("batch 1", "batch 2"), folder)
        refused("an unknown kind", right.replace("<!-- step", "<!-- steps"), folder)
        refused("a missing file", right.replace("-h200-step", "-h100-step"), folder)
        refused("a marker without a table", page.splitlines()[0] + "\n", folder)
        for ours, found in ((2.08e5, 0), (2.12e5, 1), (1.88e5, 1)):
            planted(folder, "2026-02-02-gb10-step.json", ours)
            elsewhere, absent = compared(right, folder)
            if (len(elsewhere), absent) != (found, []):
                raise SystemExit(f"{ours} against 2e5: {elsewhere}, {absent}")
        print("reported: a figure that is 6 % away, and none that is 4 %")


def main(given):
    match given:
        case ["self-test"]:
            self_test()
        case [page]:
            path = pathlib.Path(page)
            before, after = path.read_text(), rewritten(path.read_text(), RUNS)
            if after != before:
                path.write_text(after)
                print(f"{page}: updated")
        case [page, "--check"]:
            before = pathlib.Path(page).read_text()
            wrong = [f"{page}: {line}\n  is: {now}" for line, now in zip(before.splitlines(), rewritten(before, RUNS).splitlines()) if line != now]
            if wrong:
                raise SystemExit("\n".join([*wrong, "ci/generate figures updates it"]))
        case [page, "--against", folder]:
            elsewhere, absent = compared(pathlib.Path(page).read_text(), pathlib.Path(folder))
            print("\n".join(absent), end="\n" if absent else "", file=sys.stderr)
            print("\n".join(elsewhere), end="\n" if elsewhere else "")
            raise SystemExit(1 if elsewhere else 0)
        case _:
            raise SystemExit(__doc__)


main(sys.argv[1:])
