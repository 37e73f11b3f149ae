// INT4 weights in fragment order to a dense 16-bit matrix [rows, columns], for dense products over many tokens. The
// input scale, where there is one, is multiplied into the weight.

#include "linear_common.cuh"

template <typename T, int GROUP, bool ZEROS>
__device__ __forceinline__ void dequantize(
    const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *input_scale, u16 *out, int rows, int columns) {
    constexpr int GROUPS = GROUP == 32 ? 2 : 1;
    const int pieces = (columns + 63) / 64, groups = GROUP == 32 ? 2 * pieces : columns / GROUP;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, block = blockIdx.y;
    const int piece = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    let_next_start();
    wait_for_previous();
    if (piece >= pieces) return;
    Words4 codes = load_once(qweight + (((long)block * pieces + piece) * 32 + lane) * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const long place = ((long)block * groups + piece * 64 / GROUP + half * (GROUPS - 1)) * 8 + g;
        u32 pair = ((const u32 *)scales)[place], zero = ZEROS ? ((const u16 *)zeros)[place] : 0x0808u;
        u32 first[4], second[4];
        T::unpack(codes.v[2 * half], T::low_shift(zero & 0xFF), T::high_shift(zero >> 8), first);
        T::unpack(codes.v[2 * half + 1], T::low_shift(zero & 0xFF), T::high_shift(zero >> 8), second);
        T::scale(first, pair);
        T::scale(second, pair);
        const int column = piece * 64 + half * 32 + 8 * t;
        if (input_scale && column < columns) {
            Words4 scale = load_shared_by_blocks(input_scale + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                first[i] = T::product(first[i], scale.v[i / 2]);
                second[i] = T::product(second[i], scale.v[2 + i / 2]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = block * 16 + g + 8 * i;
            if (row < rows && column < columns)
                asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out + (long)row * columns + column),
                             "r"(first[i]), "r"(first[i + 2]), "r"(second[i]), "r"(second[i + 2])
                             : "memory");
        }
    }
}

#define KERNEL(NAME, T, GROUP, ZEROS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                            \
        const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *input_scale, u16 *out, int rows,            \
        int columns) {                                                                                                 \
        dequantize<T, GROUP, ZEROS>(qweight, scales, zeros, input_scale, out, rows, columns);                          \
    }
