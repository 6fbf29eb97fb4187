#!/usr/bin/env bash
# run-rust.sh PROGRAM ARGUMENT...: runs a peer in Rust on a GPU, with CUDA's libraries and headers from where they are found.
#
#   benches/peers/run-rust.sh peer-burn step --device cuda --batch 256 --samples 30 --row 10 --precision tf32
#   benches/peers/run-rust.sh peer-candle gpt2 --device cuda --batch 16 --precision ieee
#
# Libraries (NVRTC, cuBLAS, cuRAND, the runtime) come from the wheels that PyTorch's python3 has, or else from a toolkit. burn compiles its kernels
# when it runs, and needs headers too: a toolkit's (CUDA_PATH, or /usr/local/cuda), or else the wheels', with what those lack (crt, cccl) from
# a folder `include` beside the program, where there is one.
set -euo pipefail
fail() { printf 'run-rust.sh: %s\n' "$*" >&2; exit 1; }
[ $# -ge 1 ] || fail "usage: run-rust.sh PROGRAM ARGUMENT..."
program=$(realpath "$1")
shift
[ -x "$program" ] || fail "$program is no program"

cuda=$(mktemp -d)
trap 'rm -rf "$cuda"' EXIT
mkdir "$cuda/include" "$cuda/lib64"
toolkit=${CUDA_PATH:-/usr/local/cuda}
# The folder of NVIDIA's wheels: of CUDA 13 one for all packages, before that one for each.
wheels=$(python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null || true)

# link FOLDER INTO: links to what is in it; the first to be linked stays.
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
# Some look for a library without its version.
for file in "$cuda"/lib64/*.so.*; do
    name=${file##*/}
    [ ! -e "$file" ] || [ -e "$cuda/lib64/${name%%.so.*}.so" ] || ln -s "$(readlink "$file")" "$cuda/lib64/${name%%.so.*}.so"
done

# What burn has tuned is kept in a cache, which would make the second run another than the first.
export XDG_CACHE_HOME=$cuda/cache CUDA_PATH=$cuda LD_LIBRARY_PATH=$cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
cd "$cuda"
"$program" "$@"
