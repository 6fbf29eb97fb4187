#!/usr/bin/env bash
# build-rust.sh [DIR]: builds the Rust peers for a GPU machine, which then needs neither cargo nor nvcc
# (default target/peers-rust).
#
# The programs are DIR/peer-burn, DIR/peer-candle and DIR/candle-layers. run-rust.sh finds the CUDA
# headers that PyTorch's wheels lack in DIR/include. The build needs neither a driver nor a CUDA
# library. burn loads them at run time. candle links them, so it is linked with stubs of the same
# names. nvcc from PyPI compiles its kernels for CUDA_COMPUTE_CAP (default 90).
set -euo pipefail
source "$(dirname "$0")/../../ci/setup"

out=${1:-$target/peers-rust}
mkdir -p "$out"
out=$(realpath "$out")
need cargo "install Rust: https://rustup.rs"
need python3 "install Python 3"
c_compiler
command -v c++ >/dev/null || apt_install g++
export CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=$out/target CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}

say "CUDA 13.0 from PyPI"
venv=$out/nvidia
if ! [ -f "$venv/done" ]; then
    python_venv "$venv"
    packages=(nvidia-cuda-{nvcc,crt,cccl,runtime} nvidia-nvvm)
    "$venv/bin/pip" install --quiet --no-deps "${packages[@]/%/==13.0.*}" || fail "could not fetch NVIDIA's packages from PyPI"
    touch "$venv/done"
fi
cuda=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)
[ -x "$cuda/bin/nvcc" ] || fail "no nvcc in $cuda/bin"
mkdir -p "$out/include/cccl"
cp -r "$cuda/include/crt" "$out/include/"
cp -r "$cuda"/include/cccl/{cuda,nv} "$out/include/cccl/"

say "burn"
cargo build --release --locked --manifest-path benches/peers/burn/Cargo.toml

say "stubs of CUDA's libraries"
manifest=benches/peers/candle/Cargo.toml
cudarc=$(cargo metadata --format-version 1 --locked --manifest-path "$manifest" --features cuda |
    python3 -c 'import json, sys; print(*(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
stubs=$out/stubs/lib64
mkdir -p "$stubs"
# stub NAME MODULE VERSION: creates a library with every function that cudarc names.
stub() {
    grep -hoE 'fn (cu|nvrtc)[A-Za-z0-9_]+\(' "${cudarc%/*}/src/$2/sys/mod.rs" | tr -d '(' | sort -u |
        awk '{ print "int " $2 "(void) { return 34; }" }' > "$out/stubs/$1.c"
    cc -shared -fPIC -w -Wl,-soname,"lib$1.so.$3" -o "$stubs/lib$1.so" "$out/stubs/$1.c"
}
stub cuda driver 1
stub nvrtc nvrtc 13
stub curand curand 10
stub cublas cublas 13
stub cublasLt cublaslt 13
ln -sf "$cuda/lib/libcudart.so.13" "$stubs/libcudart.so"

say "candle"
NVCC=$cuda/bin/nvcc CUDA_HOME=$out/stubs cargo build --release --locked --manifest-path "$manifest" --features cuda --bins --example layers

cp "$CARGO_TARGET_DIR"/release/peer-{burn,candle} "$out/"
cp "$CARGO_TARGET_DIR/release/examples/layers" "$out/candle-layers"
ls -l "$out"/{peer-*,candle-layers}
