#!/usr/bin/env python3
"""Records the README's first command. Run it on an idle machine that has built the command.

Runs the command in its own terminal and draws that terminal to `docs/plots/gpt.svg`, as an animation
of evenly spaced moments and the end. Everything drawn was shown. A viewer without animation shows
the end. Runs on Unix; needs pyte.
"""

import fcntl
import itertools
import os
import pty
import shlex
import struct
import sys
import termios
import time
from html import escape
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "cargo run --release -- train"
FILE = ROOT / "docs/plots/gpt.svg"
LIMIT_BYTES = 100_000
COLUMNS, ROWS = 116, 60

# The seconds that each moment and the end are shown, and the number of moments.
MOMENT, END, MOMENTS = 0.8, 8.0, 14

WIDTH, HEIGHT, MARGIN = 8.0, 19, 16
# A dark terminal, with an edge that is visible on a dark page too.
PAPER, EDGE, INK = "#161b22", "#57606a", "#d0d7de"
COLOURS = {"green": "#56d364", "red": "#ff7b72", "brown": "#e3b341", "blue": "#79c0ff", "cyan": "#76e3ea", "magenta": "#d2a8ff"}


def record(command):
    """Runs the command and returns (seconds, bytes) of all its output."""
    start = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        # Set before the program reads it.
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    written = []
    while True:
        try:
            content = os.read(terminal, 1 << 16)
        except OSError:  # raised on Linux once the child has exited
            content = b""
        if not content:
            break
        written.append((time.monotonic() - start, content))
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{shlex.join(command)}: expected exit code 0, got {status}")
    return written


def rows(screen):
    """Returns a screen's rows, each as runs of one style (column, text, color, bold)."""

    def runs(row):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        for style, run in itertools.groupby(enumerate(cells), lambda cell: (cell[1].fg.removeprefix("bright"), cell[1].bold)):
            run = list(run)
            text = "".join(cell.data for _, cell in run)
            if text.strip():
                indent = len(text) - len(text.lstrip())
                yield run[0][0] + indent, text.strip(), *style

    return [tuple(runs(row)) for row in range(ROWS)]


def moments(written):
    """Returns the terminal's contents at evenly spaced moments, and at the end."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {COMMAND}\r\n".encode())
    shown, end = [], written[-1][0]
    for seconds, content in written:
        while len(shown) < MOMENTS and seconds > (len(shown) + 0.5) * end / MOMENTS:
            shown.append(rows(screen))
        stream.feed(content)
    return [*shown, rows(screen)]


def draw(frames):
    """Returns the frames as an animated SVG. Without animation, the last is shown."""
    lines = max(at for frame in frames for at, row in enumerate(frame) if row) + 1
    width, height = COLUMNS * WIDTH + 2 * MARGIN, lines * HEIGHT + 2 * MARGIN
    total = (len(frames) - 1) * MOMENT + END
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img"'
        f' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13" fill="{INK}" xml:space="preserve">',
        f"<title>{COMMAND}</title>",
        "<style>text { white-space: pre } .moment { visibility: hidden }",
        f"@keyframes moment {{ 0% {{ visibility: visible }} {100 * MOMENT / total:.3f}% {{ visibility: hidden }} }}",
        f"@keyframes end {{ 0% {{ visibility: hidden }} {100 - 100 * END / total:.3f}% {{ visibility: visible }} }}",
        "@media (prefers-reduced-motion: no-preference) {",
        f".moment {{ animation: moment {total:.1f}s step-end infinite }} .end {{ animation: end {total:.1f}s step-end infinite }} }}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{EDGE}"/>',
    ]
    for number, frame in enumerate(frames):
        last = number == len(frames) - 1
        delay = "" if last else f' style="animation-delay: {number * MOMENT:.1f}s"'
        svg.append(f'<g class="{"end" if last else "moment"}"{delay}>')
        for at, row in enumerate(frame):
            y = MARGIN + at * HEIGHT + 14
            for column, text, colour, bold in row:
                x, length = MARGIN + column * WIDTH, len(text) * WIDTH
                style = f' fill="{COLOURS[colour]}"' if colour in COLOURS else ""
                style += ' font-weight="bold"' if bold else ""
                svg.append(f'<text x="{x:.0f}" y="{y}" textLength="{length:.0f}"{style}>{escape(text)}</text>')
        svg.append("</g>")
    return "\n".join([*svg, "</svg>", ""])


def main():
    os.chdir(ROOT)
    svg = draw(moments(record(shlex.split(COMMAND))))
    if len(svg.encode()) > LIMIT_BYTES:
        sys.exit(f"{FILE.name} has {len(svg.encode())} bytes; the limit is {LIMIT_BYTES}")
    FILE.write_text(svg)
    print(f"{COMMAND} -> {FILE.relative_to(ROOT)}, {len(svg.encode())} bytes")


if __name__ == "__main__":
    main()
