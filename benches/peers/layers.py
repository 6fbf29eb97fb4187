"""Times a training step of layers in PyTorch; run by benches/layers.rs, which has the same cases.

Prints one JSON value per line: nanoseconds of a step, and the peak of the allocator above what
weights, gradients and optimizer take; it includes the inputs, as that of our captured step does. A
step reads inputs that are on the device, takes the mean square of the output as its loss, and updates
with fused AdamW. The contenders are eager, a CUDA graph of eager, and torch.compile with a CUDA graph.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from graphs import in_a_row

SAMPLES, ROW, EXPERTS, CHOSEN, HEADS = 20, 10, 8, 2, 4


class Lstm(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.layer = nn.LSTM(x[2], x[2], batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class ConvNet(nn.Sequential):
    def __init__(self, x):
        channels = x[1]
        super().__init__(
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )


class Denoiser(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(x[1]) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(x[1], x[1]) for _ in range(3))

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears):
            x = x + linear(F.silu(norm(x)))
        return x


class CrossAttention(nn.Module):
    def __init__(self, x, other):
        super().__init__()
        width = x[2]
        self.q, self.k, self.v = (nn.Linear(inputs, width) for inputs in (width, other[2], other[2]))
        self.output = nn.Linear(width, width)

    def forward(self, x, other):
        q, k, v = (
            linear(z).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for linear, z in ((self.q, x), (self.k, other), (self.v, other))
        )
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Each expert computes all tokens: the usual form that torch.compile and graphs accept."""

    def __init__(self, x):
        super().__init__()
        width = x[2]
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x):
        rows = x.flatten(0, 1)
        probabilities = self.router(rows).softmax(-1)
        best, ids = probabilities.topk(CHOSEN, -1)
        gates = torch.zeros_like(probabilities).scatter(1, ids, best / best.sum(-1, keepdim=True))
        outputs = torch.bmm(F.silu(torch.bmm(rows.expand(EXPERTS, *rows.shape), self.up)), self.down)
        return torch.einsum("te,etd->td", gates, outputs).view_as(x)


NETS = {
    "lstm": Lstm,
    "convnet": ConvNet,
    "denoiser": Denoiser,
    "cross-attention": CrossAttention,
    "mixture": Mixture,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="f32")
    parser.add_argument("--case", required=True)
    parser.add_argument("shapes", nargs="+")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    name = torch.cuda.get_device_name() if cuda else "the CPU"
    print(json.dumps({"peer": f"PyTorch {torch.__version__}", "device": name}), flush=True)
    shapes = [[int(extent) for extent in shape.split(",")] for shape in args.shapes]
    inputs = [torch.rand(*shape, device=args.device) for shape in shapes]
    wait = torch.cuda.synchronize if cuda else lambda: None
    contenders = [("eager", False, 1), ("eager, graph", False, ROW), ("compiled, graph", True, ROW)]
    for contender, compiled, row in contenders if cuda else contenders[:1]:
        torch.manual_seed(7)
        net = NETS[args.case.split(",")[0]](*shapes).to(args.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True, capturable=cuda)
        forward = torch.compile(net, dynamic=False) if compiled else net

        def step():
            optimizer.zero_grad(set_to_none=False)
            forward(*inputs).square().mean().backward()
            optimizer.step()

        try:
            for _ in range(3):
                step()
            wait()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step()
                wait()
            of_inputs = sum(x.nbytes for x in inputs)
            step_bytes = torch.cuda.max_memory_allocated() - before + of_inputs if cuda else 0
            work = in_a_row(step, row) if row > 1 else step
            samples = []
            for number in range(5 + SAMPLES):
                start = time.perf_counter_ns()
                for _ in range(1 if row > 1 else ROW):
                    work()
                wait()
                samples.append((time.perf_counter_ns() - start) / ROW)
        except Exception as error:
            print(f"{contender}: {error}", file=sys.stderr)
            sys.exit(1)
        line = {"case": args.case, "contender": f"PyTorch {contender}", "nanoseconds": samples[5:]}
        print(json.dumps(line | {"step_bytes": step_bytes}), flush=True)
        del net, optimizer, forward, work


if __name__ == "__main__":
    main()
