// W4A16 linear for very many tokens on Hopper: the products of `linear_hopper.cu`, shared out evenly.
//
// The work is the list of all pieces (64 columns) of all output tiles (128 rows by TOKENS tokens), tile by tile, and
// each block takes an equal run of it, however many tiles that is. A tile that ends up in several blocks is summed
// from their float32 partial sums by the block with its last piece. A block works through its tiles backwards: so it
// hands over the beginning of its last tile at once, and finishes its first tile when the sums for it have long been
// there. Blocks wait only for blocks of lower index, which were started before them: the wait ends whatever else runs
// on the GPU. Partial sums are added in a fixed order.

#include "linear_wgmma.cuh"

constexpr int ROWS = 128, THREADS = 256, WARPS = THREADS / 32, PITCH = ROWS + 8;

template <typename T, int TOKENS, int STAGES, int DEPTH, int GROUP, bool ZEROS>
__device__ __forceinline__ void balanced(
    const u16 *packed, const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *bias, u16 *out,
    float *partial, u32 *ready, int tokens, int rows, int columns) {
    static_assert(DEPTH % 2 == 0, "operands alternate between two sets of registers");
    constexpr int GROUPS = GROUP == 32 ? 2 : 1, STAGE_BYTES = TOKENS * 128;
    constexpr int STORED_TOKENS = TOKENS % 64 == 0 ? 64 : 32;  // go through shared memory at a time
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    const u32 full_at = shared_address(full), empty_at = shared_address(empty), ring_at = shared_address(shared);
    u16 *const staging = (u16 *)(shared + STAGES * STAGE_BYTES);
    const int pieces = (columns + 63) / 64, blocks = (rows + 15) / 16;
    const int token_tiles = (tokens + TOKENS - 1) / TOKENS;
    const long units = (long)((rows + ROWS - 1) / ROWS) * token_tiles * pieces;
    const long begin = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
    const int count = (int)(end - begin);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full_at + s * 8, 1);
            barrier_init(empty_at + s * 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();

    const int first_tile = (int)(begin / pieces), last_tile = (int)((end - 1) / pieces);
    auto piece_begin = [&](int tile) { return tile == first_tile ? (int)(begin - (long)tile * pieces) : 0; };
    auto piece_end = [&](int tile) { return tile == last_tile ? (int)(end - (long)tile * pieces) : pieces; };

    // Where the next piece of activations lies, and how many of its tile follow.
    int copy_tile = last_tile, copy_left;
    const u8 *copy_from;
    auto aim_copy = [&]() {
        const long first = (long)(copy_tile % token_tiles) * pieces + piece_begin(copy_tile);
        copy_from = (const u8 *)packed + first * STAGE_BYTES;
        copy_left = piece_end(copy_tile) - piece_begin(copy_tile);
    };
    auto copy = [&](int stage) {
        barrier_expect(full_at + stage * 8, STAGE_BYTES);
        copy_in(ring_at + stage * STAGE_BYTES, copy_from, STAGE_BYTES, full_at + stage * 8);
        copy_from += STAGE_BYTES;
        if (--copy_left == 0 && copy_tile > first_tile) {
            --copy_tile;
            aim_copy();
        }
    };
    aim_copy();
    const int groups = GROUP == 32 ? 2 * pieces : columns / GROUP;
    const char *codes_at, *scales_at, *zeros_at;
    auto aim = [&](int tile, int piece) {
        const long block = min(tile / token_tiles * (ROWS / 16) + warp, blocks - 1);
        const int group = piece * 64 / GROUP;
        codes_at = (const char *)qweight + ((block * pieces + piece) * 32 + lane) * 16;
        scales_at = (const char *)scales + ((block * groups + group) * 8 + g) * 4;
        zeros_at = (const char *)zeros + ((block * groups + group) * 8 + g) * 2;
    };
    Piece<GROUPS, ZEROS> ring[DEPTH];
    auto fetch = [&](Piece<GROUPS, ZEROS> &to, int ahead, int odd) {
        to.codes = load_once(codes_at + ahead * 512);
        const int group = (ahead * 64 + odd) / GROUP;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            to.scales[i] = *(const u32 *)(scales_at + (group + i) * 32);
            if (ZEROS) to.zeros[i] = *(const u16 *)(zeros_at + (group + i) * 16);
        }
    };

    float sum[TOKENS / 2];
    // Partial sums lie as the threads hold them, one tile a block.
    auto slot = [&](int block) { return (float4 *)partial + ((long)block * (TOKENS / 8) * THREADS + threadIdx.x); };
    auto put_partial = [&]() {
        float4 *to = slot(blockIdx.x);
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i)
            __stcg(to + i * THREADS, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(ready + blockIdx.x) : "memory");
    };
    auto add_partial = [&](int block) {
        if (threadIdx.x == 0) {
            u32 done;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(ready + block) : "memory");
            while (!done);
        }
        __syncthreads();
        const float4 *from = slot(block);
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
            float4 part = __ldcg(from + i * THREADS);
            sum[4 * i] += part.x;
            sum[4 * i + 1] += part.y;
            sum[4 * i + 2] += part.z;
            sum[4 * i + 3] += part.w;
        }
    };
    auto add_other_parts = [&](int tile) {
        int other = blockIdx.x;
        do add_partial(--other);
        while (units * other / gridDim.x > (long)tile * pieces);
    };
    auto store_tile = [&](int tile) {
        const int first_row = tile / token_tiles * ROWS, first_token = tile % token_tiles * TOKENS;
        const int row = first_row + warp * 16 + g;
        const float shift0 = bias && row < rows ? T::to_float(bias[row]) : 0.0f;
        const float shift1 = bias && row + 8 < rows ? T::to_float(bias[row + 8]) : 0.0f;
#pragma unroll
        for (int part = 0; part < TOKENS / STORED_TOKENS; ++part) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < STORED_TOKENS / 8; i += 2) {
                u32 words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = 4 * (part * STORED_TOKENS / 8 + i + j / 2) + j % 2 * 2;
                    const float shift = j % 2 ? shift1 : shift0;
                    words[j] = (u32)T::from_float(sum[at] + shift) | (u32)T::from_float(sum[at + 1] + shift) << 16;
                }
                const u32 to = shared_address(
                    staging + (8 * (i + lane / 16) + lane % 8) * PITCH + warp * 16 + lane / 8 % 2 * 8);
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                             "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                             : "memory");
            }
            __syncthreads();
            const int column = first_row + lane % 16 * 8;
            for (int local = warp * 2 + lane / 16; local < STORED_TOKENS; local += WARPS * 2) {
                const int token = first_token + part * STORED_TOKENS + local;
                const u16 *from = staging + local * PITCH + lane % 16 * 8;
                u16 *to = out + (long)token * rows + column;
                if (token >= tokens) break;
                if (rows % 8 == 0) {
                    if (column < rows) *(uint4 *)to = *(const uint4 *)from;
                } else {
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (column + i < rows) to[i] = from[i];
                }
            }
        }
    };

    int tile = last_tile, piece = piece_begin(tile), length = piece_end(tile) - piece, odd = piece * 64 % GROUP;
    aim(tile, piece);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (d < length) fetch(ring[d], d, odd);
    wait_for_previous();
    if (threadIdx.x == 0)
        for (int i = 0; i < min(STAGES, count); ++i) copy(i);
    __syncwarp();

    int done = 0, stage = 0, phase = 0, last = 0, free = 0, free_phase = 0;
    const u64 first_descriptor = descriptor(ring_at);
    while (true) {
        // Operands of this piece and of the one before, which wgmma may still be reading.
        u32 a[2][4][4];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sum[i] = 0.0f;
        for (int base = 0; base < length; base += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (base + d < length) {
                    u32(&operands)[4][4] = a[d % 2];
                    ring[d].template dequantize<T>(operands);
                    if (base + d + DEPTH < length) fetch(ring[d], base + d + DEPTH, odd);
                    barrier_wait(full_at + stage * 8, phase);
                    u64 b = first_descriptor + stage * (STAGE_BYTES / 16);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int step = 0; step < 4; ++step) Wgmma<T, TOKENS>::multiply(sum, operands[step], b + step * 2);
                    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    // The last piece's products are done, so its buffer is free here; where all warps say so, refill
                    // the one before it, for which nobody has to wait long.
                    if (done >= 1 && lane == 0) barrier_arrive(empty_at + last * 8);
                    if (threadIdx.x == 0 && done >= 2) {
                        if (done - 2 + STAGES < count) {
                            barrier_wait(empty_at + free * 8, free_phase);
                            copy(free);
                        }
                        free = free + 1 == STAGES ? 0 : free + 1;
                        free_phase ^= free == 0;
                    }
                    __syncwarp();
                    last = stage;
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                    phase ^= stage == 0;
                    ++done;
                }
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");

        const int this_tile = tile, this_piece = piece, this_end = piece + length;
        const bool more = tile > first_tile;
        if (more) {
            --tile;
            piece = piece_begin(tile);
            length = piece_end(tile) - piece;
            odd = piece * 64 % GROUP;
            aim(tile, piece);
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                if (d < length) fetch(ring[d], d, odd);
        }
        if (this_end < pieces) {
            put_partial();
        } else {
            if (this_piece > 0) add_other_parts(this_tile);
            store_tile(this_tile);
        }
        if (!more) break;
    }
}

#define KERNEL(NAME, T, TOKENS, STAGES, DEPTH, GROUP, ZEROS)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(                                                     \
        const u16 *packed, const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *bias, u16 *out,          \
        float *partial, u32 *ready, int tokens, int rows, int columns, int /* blocks */) {                             \
        balanced<T, TOKENS, STAGES, DEPTH, GROUP, ZEROS>(                                                              \
            packed, qweight, scales, zeros, bias, out, partial, ready, tokens, rows, columns);                         \
    }
