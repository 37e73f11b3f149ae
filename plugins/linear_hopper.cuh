// What the Hopper linear consists of around its products: where things lie in shared memory, which tiles a block
// computes, the order of codes, and how a tile's sums leave the block. See linear_hopper.cu.

#pragma once

#include "linear_wgmma.cuh"

constexpr int ROWS = 128, WARPS = 8, PITCH = ROWS + 4, CHUNK = 4, AHEAD = 3;
constexpr int STAGED_ROWS = 64, STAGED_PITCH = STAGED_ROWS + 8;

// Tokens that go through shared memory at a time on their way out.
__device__ constexpr int staged_tokens(int tokens) { return tokens < 64 ? tokens : 64; }

// Where a block's shared memory lies, in bytes from its beginning.
template <int TOKENS, int STAGES, int CHUNKS, int GROUP, bool ZEROS> struct Shared {
    static constexpr int INPUT = TOKENS * 128, GROUPS = CHUNK * 64 / GROUP, CODES = WARPS * CHUNK * 512;
    static constexpr int SCALES = WARPS * GROUPS * 32, WEIGHTS = CODES + SCALES + (ZEROS ? SCALES / 2 : 0);
    static constexpr int WEIGHTS_AT = STAGES * INPUT, STAGED_AT = WEIGHTS_AT + CHUNKS * WEIGHTS;
};

__device__ __forceinline__ Words4 load_shared(u32 at) {
    Words4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "r"(at));
    return r;
}

__device__ __forceinline__ void threads_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A value that the compiler keeps in a register instead of computing it anew at each use.
__device__ __forceinline__ u32 kept(u32 value) {
    asm volatile("mov.u32 %0, %0;" : "+r"(value));
    return value;
}

// Codes of one lane, from the order of `layouts.MMA16` (a lane has 8 columns in a row of each 32) to that of an A
// fragment over columns in their own order (2 columns of each 8): words change places within four lanes, and bytes
// within two words.
struct Reorder {
    u32 from_even, from_odd;  // lanes that words come from, for the first 16 columns
    u32 bytes, odd;

    __device__ __forceinline__ explicit Reorder(int lane) {
        const u32 t = lane % 4, first = t < 2 ? 0 : 4, other = 4 - first;
        odd = kept(t % 2);
        from_even = kept(lane - t + t / 2);
        from_odd = kept(lane - t + 1 - t / 2);
        bytes = kept((first + odd) | (other + odd) << 4 | (first + odd + 2) << 8 | (other + odd + 2) << 12);
    }
    __device__ __forceinline__ void operator()(Words4 &codes) const {
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
            const u32 one = odd ? codes.v[half + 1] : codes.v[half], two = odd ? codes.v[half] : codes.v[half + 1];
            codes.v[half] = pick(one, from_even, two, from_odd);
            codes.v[half + 1] = pick(one, from_even + 2, two, from_odd + 2);
        }
    }
    __device__ __forceinline__ u32 pick(u32 one, u32 from_one, u32 two, u32 from_two) const {
        u32 r;
        asm volatile(
            "{ .reg .b32 a, b; shfl.sync.idx.b32 a, %1, %2, 0x1f, 0xffffffff; "
            "shfl.sync.idx.b32 b, %3, %4, 0x1f, 0xffffffff; prmt.b32 %0, a, b, %5; }"
            : "=r"(r)
            : "r"(one), "r"(from_one), "r"(two), "r"(from_two), "r"(bytes));
        return r;
    }
};

// What a block computes: the tiles from `last_tile` down to `first_tile`, all their chunks but for the first ones of
// its first tile and the last ones of its last tile.
struct Run {
    int first_tile, last_tile, first_chunk, end_chunk, chunks;
    long units;  // chunks of all blocks

    static __device__ __forceinline__ Run of_block(int tiles, int chunks, bool share_tiles) {
        const long units = (long)tiles * chunks, block = blockIdx.x, blocks = gridDim.x;
        long first = units * block / blocks, end = units * (block + 1) / blocks;
        if (!share_tiles) first = tiles * block / blocks * chunks, end = tiles * (block + 1) / blocks * chunks;
        const int first_tile = (int)(first / chunks), last_tile = (int)((end - 1) / chunks);
        return Run{
            first_tile, last_tile, (int)(first - (long)first_tile * chunks), (int)(end - (long)last_tile * chunks),
            chunks, units};
    }
    // A cluster has one tile.
    static __device__ __forceinline__ Run of_cluster(int chunks, int blocks) {
        const int tile = blockIdx.x / blocks, rank = blockIdx.x % blocks;
        return Run{tile, tile, chunks * rank / blocks, chunks * (rank + 1) / blocks, chunks, 0};
    }
    __device__ __forceinline__ int begin(int tile) const { return tile == first_tile ? first_chunk : 0; }
    __device__ __forceinline__ int end(int tile) const { return tile == last_tile ? end_chunk : chunks; }
    // Where the run of `block` begins, from the beginning of `tile`, in chunks.
    __device__ __forceinline__ long begin_of(int block, int tile) const {
        return units * block / gridDim.x - (long)tile * chunks;
    }
};

// Sums lie as the threads hold them, one tile a block.
template <int VALUES> __device__ __forceinline__ float4 *slot(float *sums, int block) {
    return (float4 *)sums + ((long)block * (VALUES / 4) * WARPS * 32 + threadIdx.x);
}

template <int VALUES> __device__ __forceinline__ void put_sums(const float (&sum)[VALUES], float *sums, u32 *flags) {
    float4 *to = slot<VALUES>(sums, blockIdx.x);
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i)
        __stcg(to + i * WARPS * 32, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    __threadfence();
    threads_sync(3, WARPS * 32);
    if (threadIdx.x == 0)
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
}

template <int VALUES>
__device__ __forceinline__ void add_sums(float (&sum)[VALUES], float *sums, u32 *flags, int block) {
    if (threadIdx.x == 0) {
        u32 there;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flags + block) : "memory");
        while (!there);
        flags[block] = 0;
    }
    threads_sync(3, WARPS * 32);
    const float4 *from = slot<VALUES>(sums, block);
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) {
        const float4 part = __ldcg(from + i * WARPS * 32);
        sum[4 * i] += part.x;
        sum[4 * i + 1] += part.y;
        sum[4 * i + 2] += part.z;
        sum[4 * i + 3] += part.w;
    }
}

// Add the bias and store a tile, each warpgroup its own 64 rows, STAGED_TOKENS tokens at a time through `staging`, so
// that a token's rows leave in one piece.
template <typename T, int TOKENS>
__device__ __forceinline__ void store_tile(
    const float (&sum)[TOKENS / 2], u8 *staging, const u16 *bias, u16 *out, int first_row, int first_token, int tokens,
    int rows) {
    constexpr int STAGED_TOKENS = staged_tokens(TOKENS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const int group_rows = first_row + warp / 4 * STAGED_ROWS, row = first_row + warp * 16 + g;
    const float shift0 = bias && row < rows ? T::to_float(bias[row]) : 0.0f;
    const float shift1 = bias && row + 8 < rows ? T::to_float(bias[row + 8]) : 0.0f;
    u16 *const staged = (u16 *)staging + warp / 4 * STAGED_TOKENS * STAGED_PITCH;
#pragma unroll
    for (int part = 0; part < (TOKENS + STAGED_TOKENS - 1) / STAGED_TOKENS; ++part) {
        const int begin = part * STAGED_TOKENS;
        threads_sync(1 + warp / 4, 128);
#pragma unroll
        for (int i = 0; i < STAGED_TOKENS / 8; i += 2) {
            if (begin / 8 + i >= TOKENS / 8) break;
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 4 * (begin / 8 + i + j / 2) + j % 2 * 2;
                const float shift = j % 2 ? shift1 : shift0;
                words[j] = (u32)T::from_float(sum[at] + shift) | (u32)T::from_float(sum[at + 1] + shift) << 16;
            }
            const u32 to = shared_address(
                staged + (8 * (i + lane / 16) + lane % 8) * STAGED_PITCH + warp % 4 * 16 + lane / 8 % 2 * 8);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                         "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
        }
        threads_sync(1 + warp / 4, 128);
        const int column = group_rows + lane % 8 * 8;
#pragma unroll
        for (int local = warp % 4 * 4 + lane / 8; local < STAGED_TOKENS; local += 16) {
            const int token = first_token + begin + local;
            const u16 *from = staged + local * STAGED_PITCH + lane % 8 * 8;
            u16 *to = out + (long)token * rows + column;
            if (token >= tokens || begin + local >= TOKENS) break;
            if (rows % 8 == 0) {
                if (column < rows) *(uint4 *)to = *(const uint4 *)from;
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (column + i < rows) to[i] = from[i];
            }
        }
    }
}

// Add the sums of the SPLIT blocks of a cluster, which lie in their shared memory, and the bias, and store the tile:
// each block its share of the tokens.
template <typename T, int TOKENS, int SPLIT>
__device__ __forceinline__ void store_cluster_tile(
    const float (&sum)[TOKENS / 2], u8 *shared, const u16 *bias, u16 *out, int first_row, int first_token, int tokens,
    int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Every warp has read its last buffers; only then do sums overwrite them.
    threads_sync(1, WARPS * 32);
    float *at = (float *)shared + 2 * t * PITCH + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        at[(8 * i) * PITCH] = sum[4 * i];
        at[(8 * i + 1) * PITCH] = sum[4 * i + 1];
        at[(8 * i) * PITCH + 8] = sum[4 * i + 2];
        at[(8 * i + 1) * PITCH + 8] = sum[4 * i + 3];
    }
    cluster_sync();
    const int rank = blockIdx.x % SPLIT, row = first_row + lane * 4;
    float shift[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) shift[i] = bias && row + i < rows ? T::to_float(bias[row + i]) : 0.0f;
    for (int local = rank * (TOKENS / SPLIT) + warp; local < (rank + 1) * (TOKENS / SPLIT); local += WARPS) {
        const int token = first_token + local;
        if (token >= tokens) break;
        float value[4] = {shift[0], shift[1], shift[2], shift[3]};
#pragma unroll
        for (int peer = 0; peer < SPLIT; ++peer) {
            const u32 address = in_block(shared_address((float *)shared + local * PITCH + lane * 4), peer);
            float part[4];
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                         : "r"(address));
#pragma unroll
            for (int i = 0; i < 4; ++i) value[i] += part[i];
        }
        u16 *to = out + (long)token * rows + row;
        if (rows % 4 == 0) {
            const u32 low = (u32)T::from_float(value[0]) | (u32)T::from_float(value[1]) << 16;
            const u32 high = (u32)T::from_float(value[2]) | (u32)T::from_float(value[3]) << 16;
            if (row < rows)
                asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (row + i < rows) to[i] = T::from_float(value[i]);
        }
    }
    cluster_sync();
}
