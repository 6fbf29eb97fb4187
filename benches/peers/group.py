"""Times PyTorch's all-reduce by two ranks, with and without fused AdamW; run by benches/group.rs.

Prints nanoseconds, one JSON value per line. Each argument is a number of f32. Ranks are processes,
with NCCL on two GPUs or gloo on the CPU. A sample is rank 0's time by the host's clock.
"""

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WARM_UP = 5


def rank_main(rank, port, args):
    cuda = args.device == "cuda"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=2)
    wait = torch.cuda.synchronize if cuda else lambda: None
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    if rank == 0:
        print(json.dumps({"peer": f"PyTorch {torch.__version__}", "device": f"2 x {name}"}), flush=True)
    for elements in args.elements:
        weights = torch.zeros(elements, device=device, requires_grad=True)
        weights.grad = torch.randn(elements, device=device) * 1e-3
        optimizer = torch.optim.AdamW([weights], fused=cuda)

        def update():
            dist.all_reduce(weights.grad)
            optimizer.step()

        for work, what in ((lambda: dist.all_reduce(weights.grad), "all_reduce"), (update, "all_reduce and fused AdamW")):
            taken = []
            for number in range(WARM_UP + args.samples):
                dist.barrier()
                wait()
                start = time.perf_counter_ns()
                work()
                wait()
                if number >= WARM_UP:
                    taken.append(time.perf_counter_ns() - start)
            if rank == 0:
                line = {"elements": elements, "contender": "PyTorch", "work": what, "samples": taken}
                print(json.dumps(line), flush=True)
        del weights, optimizer
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("elements", type=int, nargs="*")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit("PyTorch finds fewer than two GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(port, args), nprocs=2)


if __name__ == "__main__":
    main()
