"""Times PyTorch's scaled_dot_product_attention; run by benches/attention.rs.

Reads cases, JSON objects as in benches/attention.rs, and answers each with a JSON list of
nanoseconds. A case that is read again is measured again. On a GPU, one CUDA graph repeats the
passes `row` times, and a sample is the time of a replay by the host's clock, divided by `row`.
`--stored f32` disables TF32 unless `--precision tf32` is given. With `--stored bf16`, q, k, v and
everything else are BF16. `--backend flash-attention` allows only FlashAttention-2; otherwise
PyTorch chooses.
"""

import argparse
import json
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from graphs import answer
from values import uniform


def passes(case, device, dtype):
    """Returns a function that runs the forward pass or, if `backward` is set, both passes."""

    def rows(heads):
        shape = (case["batch"], case["tokens"], heads, case["width"])
        return uniform(shape, device, dtype).transpose(1, 2)

    q, k, v = (rows(case[of]).requires_grad_() for of in ("heads", "kv_heads", "kv_heads"))
    options = {"is_causal": case["causal"], "enable_gqa": case["heads"] != case["kv_heads"]}
    dout = rows(case["heads"])

    def forward():
        with torch.no_grad():
            scaled_dot_product_attention(q, k, v, **options)

    def both():
        out = scaled_dot_product_attention(q, k, v, **options)
        torch.autograd.grad(out, (q, k, v), dout)

    return both if case["backward"] else forward


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--stored", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--precision", choices=("f32", "tf32"), default="f32")
    parser.add_argument("--backend", choices=("any", "flash-attention"), default="any")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU")
    torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    dtype = torch.bfloat16 if args.stored == "bf16" else torch.float32
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    flash = args.backend == "flash-attention"
    peer = ("FlashAttention-2 of " if flash else "") + f"PyTorch {torch.__version__}"
    print(json.dumps({"peer": peer, "device": name}), flush=True)

    def prepare(text):
        case = json.loads(text)
        return passes(case, args.device, dtype), case["row"]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        answer(prepare, args.samples, cuda)


main()
