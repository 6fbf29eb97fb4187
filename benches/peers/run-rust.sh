#!/usr/bin/env bash
# run-rust.sh PROGRAM ARGUMENT...: finds CUDA's libraries and headers, and runs a Rust peer.
#
#   benches/peers/run-rust.sh peer-burn step --device cuda --batch 256 --samples 30 --row 10 \
#       --precision tf32
#   benches/peers/run-rust.sh peer-candle gpt2 --device cuda --batch 16 --precision f32
#
# The libraries (NVRTC, cuBLAS, cuRAND, the runtime) come from the NVIDIA wheels of PyTorch's python3,
# else from a toolkit. burn compiles its kernels at run time, and needs headers too. They come from a
# toolkit (CUDA_PATH or /usr/local/cuda), else from the wheels. Headers that the wheels lack (crt,
# cccl) come from a folder `include` next to the program, if there is one.
set -euo pipefail
fail() { printf 'run-rust.sh: %s\n' "$*" >&2; exit 1; }
[ $# -ge 1 ] || fail "usage: run-rust.sh PROGRAM ARGUMENT..."
program=$(realpath "$1")
shift
[ -x "$program" ] || fail "$program is not a program"

cuda=$(mktemp -d)
trap 'rm -rf "$cuda"' EXIT
mkdir "$cuda/include" "$cuda/lib64"
toolkit=${CUDA_PATH:-/usr/local/cuda}
# The folders of NVIDIA's wheels: one for all packages in CUDA 13, one per package before.
wheels=$(python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null || true)

# link FOLDER INTO: links each file of FOLDER; existing links stay.
link() {
    local file
    for file in "$1"/*; do
        [ ! -e "$file" ] || [ -e "$2/$(basename "$file")" ] || ln -s "$file" "$2/"
    done
}
while IFS= read -r wheel; do
    for folder in "$wheel"/*/lib; do link "$folder" "$cuda/lib64"; done
done <<< "$wheels"
for folder in "$toolkit"/lib64 "$toolkit"/targets/x86_64-linux/lib; do link "$folder" "$cuda/lib64"; done
if [ -e "$toolkit/include/crt/host_defines.h" ]; then
    link "$toolkit/include" "$cuda/include"
else
    while IFS= read -r wheel; do
        for folder in "$wheel"/*/include; do link "$folder" "$cuda/include"; done
    done <<< "$wheels"
    link "$(dirname "$program")/include" "$cuda/include"
fi
# Some programs load a library without its version.
for file in "$cuda"/lib64/*.so.*; do
    name=${file##*/}
    [ ! -e "$file" ] || [ -e "$cuda/lib64/${name%%.so.*}.so" ] || ln -s "$(readlink "$file")" "$cuda/lib64/${name%%.so.*}.so"
done

# burn caches its tuning, which would make later runs differ from the first.
export XDG_CACHE_HOME=$cuda/cache CUDA_PATH=$cuda LD_LIBRARY_PATH=$cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
cd "$cuda"
"$program" "$@"
