"""Times CrossAsset's training step in PyTorch; run by benches/step.rs.

Prints nanoseconds per step, one JSON value per line. A step copies a batch to the device, clears the
gradients, runs forward, cross-entropy and backward, clips by the global norm 1.0, and updates with
fused AdamW, in f32. `--precision`: f32 disables TF32, tf32 enables it, and bf16 runs forward under
autocast. The model is that of examples/crossasset/model.rs. A failed part reports its error on its
own line, and the others continue. After DEADLINE_S the process ends.
"""

import argparse
import json
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from graphs import in_a_row

SCALES, FEATURES, WIDTH, HEADS, HIDDEN, LAYERS, CLASSES = 12, 193, 256, 4, 1024, 2, 3
LEARNING_RATE, WARM_UP, DEADLINE_S = 1e-5, 5, 170


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2))
        self.ffn1, self.ffn2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, h):
        z = self.norm1(h)
        q, k, v = (linear(z).unflatten(2, (HEADS, -1)) for linear in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + self.wo(mixed)
        return h + self.ffn2(F.gelu(self.ffn1(self.norm2(h)), approximate="tanh"))


class CrossAsset(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ModuleList(nn.Linear(FEATURES, WIDTH) for _ in range(SCALES))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        tokens = [linear(x[:, scale]) for scale, linear in enumerate(self.scales)]
        return self.head(self.blocks(torch.stack(tokens, 1)).mean(1))


class Bench:
    """A batch on the host, its copy on the device, and the measures."""

    def __init__(self, args):
        self.args = args
        self.host = torch.randn(args.batch, SCALES, FEATURES), torch.randint(0, CLASSES, (args.batch,))
        self.inputs = [tensor.to(args.device) for tensor in self.host]

    @property
    def cuda(self):
        return self.args.device == "cuda"

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def trainer(self, compiled):
        """Returns a function that trains fresh weights by one step, and returns the device's
        loss."""
        net = CrossAsset().to(self.args.device)
        weights = list(net.parameters())
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=True, capturable=self.cuda)

        def forward(x, labels):
            with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.precision == "bf16"):
                return F.cross_entropy(net(x), labels)

        if compiled:
            forward = torch.compile(forward, dynamic=False)

        def step():
            optimizer.zero_grad()
            loss = forward(*self.inputs)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            return loss

        for _ in range(WARM_UP):
            step()
        return step

    def upload(self, host, non_blocking):
        for place, tensor in zip(self.inputs, host):
            place.copy_(tensor, non_blocking=non_blocking)

    def samples(self, each, work):
        """Returns the host's nanoseconds per run of the work, with `each` runs per sample."""
        for _ in range(WARM_UP):
            work()
        self.wait()
        taken = []
        for _ in range(self.args.samples):
            start = time.perf_counter_ns()
            for _ in range(each):
                work()
            self.wait()
            taken.append((time.perf_counter_ns() - start) / each)
        return taken

    def queueing(self, work):
        """Returns the nanoseconds to queue the work on an idle device."""
        taken = []
        for number in range(WARM_UP + self.args.samples):
            self.wait()
            start = time.perf_counter_ns()
            work()
            taken.append(time.perf_counter_ns() - start)
        return taken[WARM_UP:]

    def events(self, step):
        """Returns the nanoseconds of a step between two device events."""
        taken = []
        for _ in range(self.args.samples):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            step()
            after.record()
            after.synchronize()
            taken.append(before.elapsed_time(after) * 1e6)
        return taken

    def measures(self, step):
        """Yields the names of measures, as in benches/step.rs, with their samples."""
        def round_trip():
            self.upload(self.host, False)
            step().item()

        def queued():
            self.upload(self.host, False)
            step()

        yield "round_trip", self.samples(1, round_trip)
        yield "host", self.queueing(queued)
        yield "queued", self.samples(self.args.row, queued)
        yield "resident", self.samples(self.args.row, step)
        if self.cuda:
            pinned = [tensor.pin_memory() for tensor in self.host]

            def queued_from_pinned():
                self.upload(pinned, True)
                step()

            yield "host_pinned", self.queueing(queued_from_pinned)
            yield "pinned", self.samples(self.args.row, queued_from_pinned)
            yield "events", self.events(step)

    def contenders(self):
        """Yields names, and functions that create the step."""
        for name, compiled in (("PyTorch eager", False), ("PyTorch compiled", True)):
            yield name, lambda: self.trainer(compiled)
            if self.cuda:
                yield f"{name}, CUDA graph", lambda: in_a_row(self.trainer(compiled), 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--row", type=int, required=True, help="consecutive steps")
    parser.add_argument("--precision", choices=("f32", "tf32", "bf16"), default="f32")
    parser.add_argument("--profile", action="store_true", help="run only one compiled step, for a profiler; for benches/bytes.py")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU")
    signal.alarm(DEADLINE_S)
    print(f"the deadline is {DEADLINE_S} s", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"

    def tell(**line):
        print(json.dumps(line), flush=True)

    if args.profile:
        step = Bench(args).trainer(compiled=True)
        torch.cuda.profiler.start()
        step()
        torch.cuda.profiler.stop()
        return

    shapes = [weight.shape for weight in CrossAsset().parameters()]
    tell(
        peer=f"PyTorch {torch.__version__}",
        device=torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads",
        tensors=len(shapes),
        weights=sum(shape.numel() for shape in shapes),
    )
    bench = Bench(args)
    for contender, make in bench.contenders():
        try:
            for measure, nanoseconds in bench.measures(make()):
                tell(batch=args.batch, contender=contender, measure=measure, nanoseconds=nanoseconds)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            tell(batch=args.batch, contender=contender, reason=reason)


if __name__ == "__main__":
    main()
