// W4A16 linear for few tokens: every weight is read once, as a stream, and multiplied on the tensor cores.
//
// Weights lie in the order of `layouts.MMA16`: one 16-byte load gives a lane its A fragments of four
// mma.m16n8k16 over 16 rows and 64 columns. Activations are the B operand, straight from global memory (L1).
// The warps of a block share its rows and take every WARPS-th piece of 64 columns; their sums meet in shared
// memory. GATED, the rows are gate rows and as many up rows, and silu(gate) * up is stored instead of both.
// Compiled by NVRTC without any header, so half precision is handled as packed 32-bit words.

#include "linear_common.cuh"

// What one warp needs of one piece of 64 columns of its ROW_BLOCKS blocks of 16 rows.
template <int ROW_BLOCKS, int GROUPS, bool ZEROS> struct Stage {
    Words4 codes[ROW_BLOCKS];
    u32 scales[ROW_BLOCKS * GROUPS];             // two of type T: row g and row g + 8
    u32 zeros[ZEROS ? ROW_BLOCKS * GROUPS : 1];  // two bytes: likewise
};

template <typename T>
__device__ __forceinline__ void scale_inputs(u32 x[8], const u16 *input_scale, int columns_left) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u16 *scale = input_scale + i / 4 * 32 + i % 4 * 2;
        if (i / 4 * 32 >= columns_left) break;
        float first = T::to_float(x[i] & 0xFFFF) * T::to_float(scale[0]);
        float second = T::to_float(x[i] >> 16) * T::to_float(scale[1]);
        x[i] = (u32)T::from_float(first) | (u32)T::from_float(second) << 16;
    }
}

// silu(gate) * up, rounded where the separate operations round.
template <typename T> __device__ __forceinline__ u16 silu_times(float gate, float up) {
    gate = T::to_float(T::from_float(gate)), up = T::to_float(T::from_float(up));
    float activated = T::to_float(T::from_float(gate / (1.0f + __expf(-gate))));
    return T::from_float(activated * up);
}

// TILES tiles of 8 tokens and ROW_BLOCKS blocks of 16 rows a block; DEPTH pieces of weights in flight a warp.
// out: [tokens, rows]; GATED [tokens, rows / 2], rows a multiple of 32, the block's second 16 rows the up rows.
template <typename T, int TILES, int ROW_BLOCKS, int WARPS, int DEPTH, int GROUP, bool ZEROS, bool GATED>
__device__ __forceinline__ void stream(
    const u16 *x, const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *bias, const u16 *input_scale,
    u16 *out, int tokens, int rows, int columns) {
    static_assert(!GATED || ROW_BLOCKS == 2, "one block of gate rows and one of up rows");
    constexpr int GROUPS = GROUP == 32 ? 2 : 1;  // scales in a piece
    constexpr int AHEAD = TILES <= 2 && DEPTH >= 2 ? 2 : 1;  // inputs of the next piece load while this one computes
    static_assert(AHEAD == 1 || DEPTH % 2 == 0, "inputs alternate between two sets of registers");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int pieces = (columns + 63) / 64, blocks = (rows + 15) / 16;
    const int groups = GROUP == 32 ? 2 * pieces : columns / GROUP;
    const int first_block = GATED ? blockIdx.x : blockIdx.x * ROW_BLOCKS, next_block = GATED ? blocks / 2 : 1;
    const int first_token = blockIdx.y * 8 * TILES;

    const char *codes_at[ROW_BLOCKS], *scales_at[ROW_BLOCKS], *zeros_at[ROW_BLOCKS], *input_at[TILES];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
        long block = min(first_block + r * next_block, blocks - 1);
        codes_at[r] = (const char *)qweight + ((block * pieces + warp) * 32 + lane) * 16;
        scales_at[r] = (const char *)scales + ((block * groups + warp * 64 / GROUP) * 8 + g) * 4;
        zeros_at[r] = (const char *)zeros + ((block * groups + warp * 64 / GROUP) * 8 + g) * 2;
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        int token = min(first_token + 8 * i + g, tokens - 1);
        input_at[i] = (const char *)x + ((long)token * columns + warp * 64 + 8 * t) * 2;
    }

    Stage<ROW_BLOCKS, GROUPS, ZEROS> ring[DEPTH];
    u32 input[AHEAD][TILES][8];
    float total[ROW_BLOCKS][TILES][4] = {};

    // A row block's part of a stage; `ahead` counts pieces of this warp from where the pointers stand.
    auto fetch = [&](Stage<ROW_BLOCKS, GROUPS, ZEROS> &stage, int r, int ahead) {
        stage.codes[r] = load_once(codes_at[r] + ahead * WARPS * 512);
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            int group = ahead * WARPS * 64 / GROUP + i;
            stage.scales[r * GROUPS + i] = *(const u32 *)(scales_at[r] + group * 32);
            if (ZEROS) stage.zeros[r * GROUPS + i] = *(const u16 *)(zeros_at[r] + group * 16);
        }
    };
    auto fetch_input = [&](u32 words[TILES][8], int ahead, int piece) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bool inside = first_token + 8 * i + g < tokens && piece * 64 + half * 32 < columns;
                Words4 loaded = {};
                if (inside) loaded = load_shared_by_blocks(input_at[i] + ahead * WARPS * 128 + half * 64);
#pragma unroll
                for (int j = 0; j < 4; ++j) words[i][4 * half + j] = loaded.v[j];
            }
        }
    };
    // Multiply a stage, and refill each row block's part as soon as its products are formed.
    auto multiply = [&](Stage<ROW_BLOCKS, GROUPS, ZEROS> &stage, u32 words[TILES][8], int piece, int ahead,
                        bool scaled) {
        if (scaled) {
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                scale_inputs<T>(words[i], input_scale + piece * 64 + 8 * t, columns - piece * 64);
        }
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
            for (int part = 0; part < GROUPS; ++part) {
                u32 pair = stage.scales[r * GROUPS + part], zero = ZEROS ? stage.zeros[r * GROUPS + part] : 0x0808u;
                u32 low = T::low_shift(zero & 0xFF), high = T::high_shift(zero >> 8);
                float sum[TILES][4] = {};
#pragma unroll
                for (int step = part * 4 / GROUPS; step < (part + 1) * 4 / GROUPS; ++step) {
                    u32 a[4];
                    T::unpack(stage.codes[r].v[step], low, high, a);
#pragma unroll
                    for (int i = 0; i < TILES; ++i) T::mma(sum[i], a, words[i][2 * step], words[i][2 * step + 1]);
                }
                float scale0 = T::to_float(pair & 0xFFFF), scale1 = T::to_float(pair >> 16);
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    total[r][i][0] += scale0 * sum[i][0];
                    total[r][i][1] += scale0 * sum[i][1];
                    total[r][i][2] += scale1 * sum[i][2];
                    total[r][i][3] += scale1 * sum[i][3];
                }
            }
            if (piece + DEPTH * WARPS < pieces) fetch(stage, r, ahead);
        }
    };

#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r)
            if (warp + d * WARPS < pieces) fetch(ring[d], r, d);
    let_next_start();
    wait_for_previous();
    // Two loops, so that without an input scale no branch stands between a piece's loads and its products.
    auto run = [&](bool scaled) {
        const bool early = AHEAD == 2 && !scaled;  // scaling takes the registers
        if (early && warp < pieces) fetch_input(input[0], 0, warp);
        for (int piece = warp; piece < pieces; piece += DEPTH * WARPS) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                int here = piece + d * WARPS, next = here + WARPS, from = early ? d % AHEAD : 0;
                if (here < pieces) {
                    if (early) {
                        if (next < pieces) fetch_input(input[(d + 1) % AHEAD], d + 1, next);
                    } else {
                        fetch_input(input[0], d, here);
                    }
                    multiply(ring[d], input[from], here, d + DEPTH, scaled);
                }
            }
#pragma unroll
            for (int r = 0; r < ROW_BLOCKS; ++r) {
                codes_at[r] += DEPTH * WARPS * 512;
                scales_at[r] += DEPTH * WARPS * 64 / GROUP * 32;
                zeros_at[r] += DEPTH * WARPS * 64 / GROUP * 16;
            }
#pragma unroll
            for (int i = 0; i < TILES; ++i) input_at[i] += DEPTH * WARPS * 128;
        }
    };
    if (input_scale) {
        run(true);
    } else {
        run(false);
    }

    constexpr int VALUES = ROW_BLOCKS * TILES * 4;
    __shared__ float partial[WARPS][VALUES][32];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) partial[warp][(r * TILES + i) * 4 + j][lane] = total[r][i][j];
    __syncthreads();
    const int here = min(tokens - first_token, 8 * TILES);
    auto summed = [&](int local, int token, int row) {
        int value = ((local / 16) * TILES + token / 8) * 4 + (local % 16 / 8) * 2 + token % 2;
        int from = (local % 8) * 4 + token % 8 / 2;
        float sum = bias ? T::to_float(bias[row]) : 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += partial[w][value][from];
        return sum;
    };
    constexpr int RESULTS = GATED ? 16 : ROW_BLOCKS * 16;  // of a token
    for (int e = threadIdx.x; e < here * RESULTS; e += WARPS * 32) {
        int local = e % RESULTS, token = e / RESULTS, row = first_block * 16 + local;
        u16 *to = out + (long)(first_token + token) * (GATED ? rows / 2 : rows) + row;
        if (GATED)
            *to = silu_times<T>(summed(local, token, row), summed(16 + local, token, row + rows / 2));
        else if (row < rows)
            *to = T::from_float(summed(local, token, row));
    }
}

// RESIDENT blocks fit a multiprocessor at once: what hides the latency of the loads.
#define KERNEL(NAME, T, TILES, ROW_BLOCKS, WARPS, DEPTH, RESIDENT, GROUP, ZEROS, GATED)                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) NAME(                                           \
        const u16 *x, const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *bias, const u16 *input_scale, \
        u16 *out, int tokens, int rows, int columns) {                                                                 \
        stream<T, TILES, ROW_BLOCKS, WARPS, DEPTH, GROUP, ZEROS, GATED>(                                               \
            x, qweight, scales, zeros, bias, input_scale, out, tokens, rows, columns);                                 \
    }
