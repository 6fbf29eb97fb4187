"""PyTorch's kernels that memory bounds: nanoseconds a call, a JSON value a line; benches/kernels.rs runs it.

Each case of benches/kernels/cases.rs has a function of the same name here. It gets a set of tensors and returns a call
that returns its outputs. The calls of all sets, round after round, are one CUDA graph; a sample is several replays and one
wait. The outputs of a round stand side by side in memory, as ours do. A case that fails says so on its own line, and the
others go on; after DEADLINE_S the process ends.
"""

import argparse
import contextlib
import json
import signal
import sys
import time

import torch
import torch.nn.functional as F

WARM_UP, DEADLINE_S, EPSILON = 5, 120, 1e-6


class Set:
    """The tensors of one call: [n / columns, columns], normal, and what belongs to their rows and columns."""

    def __init__(self, plan, columns, device):
        rows = plan["elements"] // columns
        self.columns = columns
        self.x, self.dy = (torch.randn(rows, columns, device=device) for _ in range(2))
        self.labels = torch.arange(rows, device=device) * 7 % columns
        self.gain = torch.ones(columns, device=device)
        self.tensors = plan["tensors"]


def copy(s):
    return lambda: torch.empty_like(s.x).copy_(s.x)


def fill(s):
    return lambda: torch.empty_like(s.x).fill_(1.0)


def tanh(s):
    return lambda: torch.tanh(s.x)


def tanh_backward(s):
    return lambda: torch.ops.aten.tanh_backward(s.dy, s.x)


def gelu(s):
    return lambda: F.gelu(s.x, approximate="tanh")


def gelu_backward(s):
    return lambda: torch.ops.aten.gelu_backward(s.dy, s.x, approximate="tanh")


def softmax(s):
    return lambda: torch.softmax(s.x, 1)


def rms_norm(s):
    return lambda: F.rms_norm(s.x, (s.columns,), s.gain, EPSILON)


def rms_norm_backward(s):
    inputs = s.x.detach().requires_grad_(), s.gain.detach().requires_grad_()
    with torch.enable_grad():
        y = F.rms_norm(inputs[0], (s.columns,), inputs[1], EPSILON)
    return lambda: torch.autograd.grad(y, inputs, s.dy, retain_graph=True)


def cross_entropy_and_gradient(s):
    logits = s.x.detach().requires_grad_()

    def call():
        with torch.enable_grad():
            loss = F.cross_entropy(logits, s.labels)
        return loss.detach(), torch.autograd.grad(loss, logits)

    return call


def sum(s):
    return lambda: s.x.sum()


def sum_columns(s):
    return lambda: s.x.sum(1)


def sum_rows(s):
    return lambda: s.x.sum(0)


def squared_norm(s):
    return lambda: torch.linalg.vector_norm(s.x)


def adamw(s):
    # The kernel alone, without what torch.optim does around it; ours is timed so too.
    weights, gradients = ([*x.view(s.tensors, -1)] for x in (s.x, s.dy))
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    steps = [torch.ones((), device=s.x.device) for _ in weights]
    settings = dict(lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)
    return lambda: torch._fused_adamw_(weights, gradients, first, second, [], steps, **settings)


CASES = {
    case.__name__: case
    for case in (
        copy, fill, tanh, tanh_backward, gelu, gelu_backward, softmax, rms_norm, rms_norm_backward,
        cross_entropy_and_gradient, sum, sum_columns, sum_rows, squared_norm, adamw,
    )
}  # fmt: skip


def work_of(calls, rounds, stream):
    """A function that queues all calls: one graph on a GPU, one by one on the CPU."""

    def run():
        for _ in range(rounds):
            # Held to the round's end, so that each call has outputs of its own; then their places are free again.
            outputs = [call() for call in calls]
            del outputs

    if stream is None:
        return run
    # What is captured has run before, on the stream that is captured.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def samples(work, wait, plan):
    """Nanoseconds of one call, by the host's clock."""
    for _ in range(WARM_UP):
        work()
    wait()
    taken = []
    for _ in range(plan["samples"]):
        start = time.perf_counter_ns()
        for _ in range(plan["replays"]):
            work()
        wait()
        taken.append((time.perf_counter_ns() - start) / (plan["replays"] * plan["rounds"] * plan["sets"]))
    return taken


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--columns", type=int, required=True)
    parser.add_argument("--plans", type=json.loads, required=True)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU")
    signal.alarm(DEADLINE_S)
    print(f"the deadline is {DEADLINE_S} s", file=sys.stderr, flush=True)
    torch.manual_seed(0)

    def tell(**line):
        print(json.dumps(line), flush=True)

    tell(
        peer=f"PyTorch {torch.__version__}",
        device=torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
    )
    stream = torch.cuda.Stream() if cuda else None
    wait = torch.cuda.synchronize if cuda else lambda: None
    for plan in args.plans:
        sets = [Set(plan, args.columns, args.device) for _ in range(plan["sets"])]
        wait()
        for name in plan["kernels"]:
            about = dict(elements=plan["elements"], kernel=name, contender="PyTorch")
            try:
                with torch.no_grad(), torch.cuda.stream(stream) if cuda else contextlib.nullcontext():
                    calls = [CASES[name](s) for s in sets]
                wait()
                with torch.no_grad():
                    work = work_of(calls, plan["rounds"], stream)
                tell(**about, nanoseconds=samples(work, wait, plan))
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                tell(**about, reason=reason)
            work = calls = None
        del sets
        if cuda:
            torch.cuda.empty_cache()


main()
