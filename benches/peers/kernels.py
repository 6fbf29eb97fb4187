"""Times PyTorch's memory-bound kernels; run by benches/kernels.rs.

Prints nanoseconds per call, one JSON value per line. Each case of benches/kernels/cases.rs has a
function of the same name here. It takes a set of tensors and returns a call that returns its
outputs. One CUDA graph has the calls of all sets, round after round, and a sample is several replays
and one wait. The outputs of a round coexist in memory, as ours do. Cases in COMPILED are also timed
with torch.compile, and the faster version is reported. Names that end with _bf16 use BF16 tensors. A
failed case reports its error on its own line, and the others continue. After DEADLINE_S the process
ends.
"""

import argparse
import contextlib
import json
import signal
import statistics
import sys
import time

import torch
import torch.nn.functional as F

WARM_UP, DEADLINE_S, EPSILON = 5, 480, 1e-6
# The most sets whose calls are compiled, each separately; small tensors have too many sets.
MOST_COMPILED = 4


class Set:
    """The tensors of one call: normal, [n / columns, columns], and vectors for rows and columns."""

    def __init__(self, plan, columns, device, dtype=torch.float32):
        rows = plan["elements"] // columns
        self.columns = columns
        self.x, self.dy = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
        self.labels = torch.arange(rows, device=device) * 7 % columns
        self.ids = torch.arange(rows, device=device) * 7919 % rows
        self.gain = torch.ones(columns, device=device, dtype=dtype)
        self.bias = torch.ones(columns, device=device, dtype=dtype)
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


def silu(s):
    return lambda: F.silu(s.x)


def silu_backward(s):
    return lambda: torch.ops.aten.silu_backward(s.dy, s.x)


def swiglu(s):
    return lambda: F.silu(s.x) * s.dy


def swiglu_backward(s):
    # The gradients of silu(gate) up. The same tensor is up and the product's gradient, as in our
    # case.
    def call():
        gate, up = s.x.float(), s.dy.float()
        sigmoid = torch.sigmoid(gate)
        dgate = up * up * sigmoid * (1 + gate * (1 - sigmoid))
        return dgate.to(s.x.dtype), (up * gate * sigmoid).to(s.x.dtype)

    return call


def dropout(s):
    return lambda: F.dropout(s.x, 0.1, training=True)


def embedding(s):
    return lambda: F.embedding(s.ids, s.x)


def embedding_backward(s):
    return lambda: torch.ops.aten.embedding_dense_backward(s.dy, s.ids, s.x.shape[0], -1, False)


def softmax(s):
    return lambda: torch.softmax(s.x, 1)


def rms_norm(s):
    return lambda: F.rms_norm(s.x, (s.columns,), s.gain, EPSILON)


def rms_norm_backward(s):
    inputs = s.x.detach().requires_grad_(), s.gain.detach().requires_grad_()
    with torch.enable_grad():
        y = F.rms_norm(inputs[0], (s.columns,), inputs[1], EPSILON)
    return lambda: torch.autograd.grad(y, inputs, s.dy, retain_graph=True)


def layer_norm(s):
    return lambda: F.layer_norm(s.x, (s.columns,), s.gain, s.bias, EPSILON)


def layer_norm_backward(s):
    inputs = s.x.detach().requires_grad_(), s.gain.detach().requires_grad_(), s.bias.detach().requires_grad_()
    with torch.enable_grad():
        y = F.layer_norm(inputs[0], (s.columns,), inputs[1], inputs[2], EPSILON)
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
    # Only the kernel, without the work of torch.optim around it, as for ours.
    weights, gradients = ([*x.view(s.tensors, -1)] for x in (s.x, s.dy))
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    steps = [torch.ones((), device=s.x.device) for _ in weights]
    settings = dict(lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)
    return lambda: torch._fused_adamw_(weights, gradients, first, second, [], steps, **settings)


CASES = {
    case.__name__: case
    for case in (
        copy, fill, tanh, tanh_backward, gelu, gelu_backward, softmax, rms_norm, rms_norm_backward,
        cross_entropy_and_gradient, sum, sum_columns, sum_rows, squared_norm, adamw, silu, silu_backward, swiglu,
        swiglu_backward, layer_norm, layer_norm_backward, dropout, embedding, embedding_backward,
    )
}  # fmt: skip
COMPILED = {"gelu", "gelu_backward", "silu", "silu_backward", "swiglu", "swiglu_backward", "softmax", "rms_norm", "layer_norm"}


def work_of(calls, rounds, stream):
    """Returns a function that queues all calls: one graph on a GPU, one by one on the CPU."""

    def run():
        for _ in range(rounds):
            # Kept to the end of the round, so that each call has its own outputs; then freed for
            # reuse.
            outputs = [call() for call in calls]
            del outputs

    if stream is None:
        return run
    # Warm up on the stream that is captured.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def samples(work, wait, plan):
    """Returns the nanoseconds of one call, by the host's clock."""
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
        raise SystemExit("PyTorch finds no GPU")
    signal.alarm(DEADLINE_S)
    print(f"the deadline is {DEADLINE_S} s", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 256

    def tell(**line):
        print(json.dumps(line), flush=True)

    tell(
        peer=f"PyTorch {torch.__version__}",
        device=torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
    )
    stream = torch.cuda.Stream() if cuda else None
    wait = torch.cuda.synchronize if cuda else lambda: None
    for plan in args.plans:
        by_type = {
            suffix: [Set(plan, args.columns, args.device, dtype) for _ in range(plan["sets"])]
            for suffix, dtype in (("", torch.float32), ("_bf16", torch.bfloat16))
        }
        wait()
        for name in plan["kernels"]:
            about = dict(elements=plan["elements"], kernel=name, contender="PyTorch")
            base = name.removesuffix("_bf16")
            taken = []
            try:
                with torch.no_grad(), torch.cuda.stream(stream) if cuda else contextlib.nullcontext():
                    calls = [CASES[base](s) for s in by_type[name[len(base) :]]]
                wait()
                with torch.no_grad():
                    work = work_of(calls, plan["rounds"], stream)
                taken.append(samples(work, wait, plan))
                if cuda and base in COMPILED and len(calls) <= MOST_COMPILED:
                    work = None
                    calls = [torch.compile(call, dynamic=False) for call in calls]
                    with torch.no_grad():
                        work = work_of(calls, plan["rounds"], stream)
                    taken.append(samples(work, wait, plan))
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                if not taken:
                    tell(**about, reason=reason)
            if taken:
                tell(**about, nanoseconds=min(taken, key=statistics.median))
            work = calls = None
        del by_type
        if cuda:
            torch.cuda.empty_cache()


main()
