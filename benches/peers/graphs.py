"""Repeats work in CUDA graphs and times them; shared by the peers that measure products, attention
and steps."""

import json
import sys
import time

import torch

# Time of the runs before a round's first sample; benches/harness/samples.rs has the same.
SUSTAINED_NS = 200_000_000


def in_a_row(work, row):
    """Returns a function that replays a CUDA graph with `row` repetitions of the work, and returns
    the last one's result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(row):
            result = work()

    def replay():
        graph.replay()
        return result

    return replay


def sustained(work, row, count, wait):
    """Returns nanoseconds of a repetition, measured once the work has run for 200 ms."""

    def sample():
        start = time.perf_counter_ns()
        work()
        wait()
        return (time.perf_counter_ns() - start) / row

    start = time.perf_counter_ns()
    while time.perf_counter_ns() - start < SUSTAINED_NS:
        sample()
    return [sample() for _ in range(count)]


def answer(prepare, count, cuda):
    """Answers each case of the standard input with a JSON list of nanoseconds. `prepare` returns a
    case's work and its repetitions. A case that is read again is measured again."""
    last = work = None
    for case in sys.stdin:
        if case != last:
            last, work = case, None  # Frees the memory of the case before.
            work, row = prepare(case)
            work = in_a_row(work, row) if cuda else work
        print(json.dumps(sustained(work, row, count, torch.cuda.synchronize if cuda else lambda: None)), flush=True)
