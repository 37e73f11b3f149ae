// Activations into the order that `linear_hopper.cu` copies: for each tile of TOKENS tokens and each piece of 64
// columns one run of TOKENS rows of 128 bytes, columns in the order of the weights' fragments, 16-byte chunks
// swizzled. Tokens and columns beyond the matrix become zeros. The input scale is multiplied in here, and the flags
// of `linear_balanced.cu`, which runs next, are cleared.

#include "linear_common.cuh"

template <typename T>
__device__ __forceinline__ void pack(
    const u16 *x, const u16 *input_scale, u32 *packed, u32 *flags, int num_flags, int tokens, int columns,
    int tile_tokens) {
    const int pieces = (columns + 63) / 64;
    const int chunk = threadIdx.x % 8, token = blockIdx.x * 4 + threadIdx.x / 8 % 4;
    const int piece = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    let_next_start();
    wait_for_previous();
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (int i = threadIdx.x; i < num_flags; i += blockDim.x) flags[i] = 0;
    if (piece >= pieces) return;
    const int column = piece * 64 + chunk / 4 * 32 + chunk / 2 % 2 * 4 + chunk % 2 * 2;
    u32 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        bool inside = token < tokens && column + 8 * t < columns;
        u32 word = inside ? *(const u32 *)(x + (long)token * columns + column + 8 * t) : 0;
        if (inside && input_scale) {
            u32 pair = *(const u32 *)(input_scale + column + 8 * t);
            word = (u32)T::from_float(T::to_float(word & 0xFFFF) * T::to_float(pair & 0xFFFF)) |
                   (u32)T::from_float(T::to_float(word >> 16) * T::to_float(pair >> 16)) << 16;
        }
        words[t] = word;
    }
    const int row = token % tile_tokens;
    const long run = (long)(token / tile_tokens) * pieces + piece;
    u32 *to = packed + (run * tile_tokens + row) * 32 + (chunk ^ row % 8) * 4;
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

#define KERNEL(NAME, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                            \
        const u16 *x, const u16 *input_scale, u32 *packed, u32 *flags, int num_flags, int tokens, int columns,         \
        int tile_tokens, int /* padded_tokens */) {                                                                    \
        pack<T>(x, input_scale, packed, flags, num_flags, tokens, columns, tile_tokens);                               \
    }
