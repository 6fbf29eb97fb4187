#!/usr/bin/env python3
"""Fills the tables of docs/performance.md from the newest samples in benches/runs.

    python3 benches/tables.py docs/performance.md            updates the page
    python3 benches/tables.py docs/performance.md --check    fails if the page is not current, or if no
                                                             file of the repository names a run
    python3 benches/tables.py self-test                      checks that only a wrong page is refused

A marker `<!-- KIND: SUBJECT, SUBJECT; SUBJECT -->`, which may take several lines, precedes the names
of the runs and a table. Both are generated, except the table's head and its first column, which
names the cases. A semicolon separates pairs of columns, ours and the peer's: a subject's newest run
`DATE-SUBJECT.json` that has the case fills a pair. `A + B` takes ours from A's newest run and the
peer from B's. A pair without a run gets "not run", and a row without any run is an error.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

from figures import KINDS, Missing, Run

ROOT = pathlib.Path(__file__).resolve().parents[1]
MARKER = re.compile(r"^<!-- ([\w-]+): (.+) -->$")
ABSENT = ("not run", "")


def cells_of(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def tables(lines):
    """Yields (line, kind, pairs of columns as lists of subjects, lines of the rows) of each marker."""
    for at, line in enumerate(lines):
        if not line.endswith(" -->"):
            continue
        # A marker may take several lines.
        start = next(place for place in range(at, -1, -1) if place == 0 or lines[place].startswith("<!-- "))
        if not (marker := MARKER.match(" ".join(lines[start : at + 1]))):
            continue
        if marker[1] not in KINDS:
            raise SystemExit(f"line {at + 1}: no kind {marker[1]}; there are {', '.join(KINDS)}")
        pairs = [pair.split(", ") for pair in marker[2].split("; ")]
        head = next((place for place in range(at, len(lines)) if lines[place].startswith("|")), None)
        if head is None or len(cells_of(lines[head])) != 1 + 2 * len(pairs):
            raise SystemExit(f"line {at + 1}: no table with a case and {2 * len(pairs)} more columns below the marker")
        end = next((place for place in range(head, len(lines)) if not lines[place].startswith("|")), len(lines))
        yield at, marker[1], pairs, range(head + 2, end)


def candidates(subject, folder):
    """Returns lists of runs, of which the first that has a case counts."""
    found = [sorted(folder.glob(f"????-??-??-{name}.json*"), reverse=True) for name in subject.split(" + ")]
    if not all(found):
        raise SystemExit(f"no run DATE-{subject}.json in {folder}")
    if len(found) > 1:
        return [[Run(paths[0]) for paths in found]]
    return [[Run(path)] for path in found[0]]


def filled(case, kind, pair, folder):
    """Returns the figures of a case in a pair of columns, and the runs that they are from."""
    for subject in pair:
        for runs in candidates(subject, folder):
            try:
                return KINDS[kind](case, runs), runs
            except Missing:
                pass
    return ABSENT, []


def rewritten(text, folder):
    """Returns the page with the figures of the newest runs in a folder."""
    lines = text.splitlines()
    # From the last, because the names of runs may take more or fewer lines.
    for at, kind, pairs, places in reversed(list(tables(lines))):
        end = next(place for place in range(at + 1, places.start) if not lines[place] or place + 1 == places.start)
        if end == at + 1 or lines[end]:
            raise SystemExit(f"line {at + 1}: the marker must be followed by the names of runs and an empty line")
        sources = {}
        for place in places:
            case, cells = cells_of(lines[place])[0], []
            for pair in pairs:
                figures, runs = filled(case, kind, pair, folder)
                cells += figures
                sources |= {run.path.name: run.source() for run in runs}
            if cells == [*ABSENT] * len(pairs):
                raise SystemExit(f"line {place + 1}: no run has {case}")
            lines[place] = "| " + " | ".join([case, *cells]) + " |"
        named = "; ".join(f"{source}: `benches/runs/{name}`" for name, source in sources.items()) + "."
        lines[at + 1 : end] = textwrap.wrap(named, 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def unnamed(folder):
    """Returns the runs that no tracked file outside their folder names."""
    grep = ["git", "-C", ROOT, "grep", "-qF"]
    return [path.name for path in folder.iterdir() if subprocess.run([*grep, path.name, "--", ".", ":!benches/runs"]).returncode]


def self_test():
    """Fails if a wrong page passes or a right one does not."""
    page = "<!-- step: h200-step; h200-step-mma-sync -->\n-\n\n| case | ours | peer | ours | peer |\n|---|---|---|---|---|\n"
    page += "| f32, batch 1, captured, in a row |  |  |  |  |\n"
    line = {"batch": 1, "measure": "resident"}

    def planted(folder, name, ours, batch=1):
        lines = [line | {"batch": batch, "contender": who, "nanoseconds": [time]} for who, time in (("stepscope captured", ours), ("PyTorch compiled", 7e5))]
        run = {"date": name[:10], "device": "NVIDIA H200", "driver": "1", "commit": "abcdef0123", "lines": lines}
        (folder / name).write_text(json.dumps(run))

    def refused(what, page, folder):
        try:
            rewritten(page, folder)
        except SystemExit:
            print(f"refused: {what}")
        else:
            raise SystemExit(f"passed {what}")

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        planted(folder, "2026-01-01-h200-step.json", 2e5)
        planted(folder, "2026-01-02-h200-step.json", 4e5, batch=2)
        planted(folder, "2026-01-01-h200-step-mma-sync.json", 3e5, batch=2)
        right = rewritten(page, folder)
        if "| f32, batch 1, captured, in a row | 0.200 | 0.700 (compiled) | not run |  |" not in right or rewritten(right, folder) != right:
            raise SystemExit(f"wrong: {right}")
        if rewritten(right.replace("0.200", "0.201"), folder) != right or "commit abcdef0: `benches/runs/2026-01-01" not in right:
            raise SystemExit(f"a wrong figure or source stays: {right}")
        print("refused: a figure that differs from the file's")
        wrapped = right.replace("<!-- step: ", "<!-- step:\n")
        if rewritten(wrapped.replace("0.200", "0.201"), folder) != wrapped:
            raise SystemExit("a wrong figure below a marker of two lines stays")
        planted(folder, "2026-01-03-h200-step.json", 3e5)
        if "| 0.300 |" not in rewritten(right, folder):
            raise SystemExit("a newer run does not replace an older one")
        print("refused: an older run")
        refused("a row without a run", right.replace("batch 1", "batch 3"), folder)
        refused("an unknown kind", right.replace("<!-- step", "<!-- steps"), folder)
        refused("a missing subject", right.replace("h200-step;", "h100-step;"), folder)
        refused("a marker without a table", page.splitlines()[0] + "\n", folder)


def main(given):
    runs = ROOT / "benches/runs"
    match given:
        case ["self-test"]:
            self_test()
        case [page]:
            path = pathlib.Path(page)
            before, after = path.read_text(), rewritten(path.read_text(), runs)
            if after != before:
                path.write_text(after)
                print(f"{page}: updated")
        case [page, "--check"]:
            before = pathlib.Path(page).read_text()
            wrong = [f"{page}: {line}\n  is: {now}" for line, now in zip(before.splitlines(), rewritten(before, runs).splitlines()) if line != now]
            if wrong:
                raise SystemExit("\n".join([*wrong, "cargo xtask generate figures updates it"]))
            if names := unnamed(runs):
                raise SystemExit(f"no file names these runs, so remove them from benches/runs: {', '.join(names)}")
        case _:
            raise SystemExit(__doc__)


main(sys.argv[1:])
