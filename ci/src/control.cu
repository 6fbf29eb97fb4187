// A bad kernel for each tool of compute-sanitizer, named after it, and the same without the bug.
#include <cstdio>
#include <cstring>

constexpr int THREADS = 64;

extern "C" __global__ void memcheck_bad(int *out, int n, int bad) {
    int i = threadIdx.x;
    if (i < n + bad) out[i] = i;  // one element beyond the end
}

extern "C" __global__ void racecheck_bad(int *out, int, int bad) {
    __shared__ volatile int tile[THREADS];
    tile[threadIdx.x] = threadIdx.x;
    if (!bad) __syncthreads();  // missing: another warp's element may not be there yet
    out[threadIdx.x] = tile[THREADS - 1 - threadIdx.x];
}

extern "C" __global__ void synccheck_bad(int *out, int, int bad) {
    if (!bad || threadIdx.x % 2 == 0) __syncthreads();  // half of each warp is not there
    out[threadIdx.x] = 1;
}

extern "C" __global__ void initcheck_bad(int *out, int, int bad) {
    int *input = out + THREADS;
    if (!bad) input[threadIdx.x] = 1;
    out[threadIdx.x] = input[threadIdx.x];  // nobody has written it
}

int main(int, char **arguments) {
    const char *tool = arguments[1];
    int bad = !strcmp(arguments[2], "bad");
    bool memory = !strcmp(tool, "memcheck"), race = !strcmp(tool, "racecheck"), sync = !strcmp(tool, "synccheck");
    auto kernel = memory ? memcheck_bad : race ? racecheck_bad : sync ? synccheck_bad : initcheck_bad;
    // As many elements as `memcheck_bad` may write, where it is what runs.
    int length = memory ? THREADS - 1 : 2 * THREADS, *out = nullptr;
    cudaError_t result = cudaMalloc(&out, length * sizeof(int));
    if (result == cudaSuccess) kernel<<<1, THREADS>>>(out, length, bad);
    if (result == cudaSuccess) result = cudaDeviceSynchronize();
    if (result == cudaSuccess) result = cudaFree(out);
    if (result != cudaSuccess) fprintf(stderr, "%s\n", cudaGetErrorString(result));
    return result == cudaSuccess ? 0 : 1;
}
