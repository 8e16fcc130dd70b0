// What ranks compute between messages. kernels.rs has the same kernels for the simulated GPU.
typedef unsigned long long u64;

// to[i] = first + i * step
extern "C" __global__ void together_fill(u64 to, u64 count, u64 first, u64 step) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) ((u64 *)to)[i] = first + i * step;
}

// to[i] += from[i]. The HCA writes `from`, so it must bypass L1, which is not coherent with it.
extern "C" __global__ void together_add(u64 to, u64 from, u64 count) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        ((u64 *)to)[i] += __ldcg(&((const u64 *)from)[i]);
}
