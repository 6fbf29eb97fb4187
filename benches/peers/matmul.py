"""Times matrix multiplies with cuBLAS through PyTorch; run by benches/matmul.rs.

Reads cases, `m,n,k,batches,form,row` as in benches/matmul/case.rs, and answers each with a JSON
list of nanoseconds. A case that is read again is measured again. On a GPU, one CUDA graph repeats
the multiply `row` times, and a sample is the time of a replay by the host's clock, divided by
`row`. `--precision`: f32 is f32 without TF32, tf32 is f32 with TF32, and bf16 has BF16 operands
and output.
"""

import argparse
import json

import torch

from graphs import answer
from values import uniform


def operands(m, n, k, batches, form, device, dtype):
    """Returns A, B and the output as views `[batches, ..]`, stored in the given layout."""

    def matrix(rows, cols, transposed, side_by_side):
        rows, cols = (cols, rows) if transposed else (rows, cols)
        if side_by_side:
            stored = uniform((rows, batches, cols), device, dtype).transpose(0, 1)
        else:
            stored = uniform((batches, rows, cols), device, dtype)
        return stored.transpose(1, 2) if transposed else stored

    many = batches > 1
    a = matrix(m, k, form[0] == "T", many)
    b = matrix(k, n, form[1] == "T", many and form == "TN")
    return a, b, torch.empty(batches, m, n, device=device, dtype=dtype)


def multiply(a, b, out):
    if len(a) == 1:
        a, b, out = a[0], b[0], out[0]
        return lambda: torch.mm(a, b, out=out)
    return lambda: torch.bmm(a, b, out=out)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--precision", choices=("f32", "tf32", "bf16"), default="f32")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU")
    torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    print(json.dumps({"peer": f"PyTorch {torch.__version__}", "device": name}), flush=True)

    def prepare(case):
        *extents, form, row = case.split(",")
        return multiply(*operands(*map(int, extents), form, args.device, dtype)), int(row)

    answer(prepare, args.samples, cuda)


main()
