// x * input_scale, rounded to x's type: what the Hopper linear multiplies where a layer has an input scale, since its
// copy engine takes activations as they lie. One thread has 8 columns; columns are a multiple of 8. The grid has one
// dimension, since tokens may be more than the others hold.

#include "linear_common.cuh"

template <typename T>
__device__ __forceinline__ void scale(const u16 *x, const u16 *input_scale, u16 *scaled, int columns) {
    const int blocks = (columns + 8 * blockDim.x - 1) / (8 * blockDim.x);  // of a token
    const int column = (blockIdx.x % blocks * blockDim.x + threadIdx.x) * 8;
    const long at = (long)(blockIdx.x / blocks) * columns + column;
    let_next_start();
    wait_for_previous();
    if (column >= columns) return;
    const Words4 words = load_shared_by_blocks(x + at), factors = load_shared_by_blocks(input_scale + column);
    u32 product[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) product[i] = T::product(words.v[i], factors.v[i]);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(scaled + at), "r"(product[0]), "r"(product[1]),
                 "r"(product[2]), "r"(product[3])
                 : "memory");
}

#define KERNEL(NAME, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                            \
        const u16 *x, const u16 *input_scale, u16 *scaled, int tokens, int columns) {                                  \
        scale<T>(x, input_scale, scaled, columns);                                                                     \
    }
