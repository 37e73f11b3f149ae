// W4A16 linear for many tokens on Hopper: weights are dequantized in registers, straight into the A operand of
// wgmma; activations, packed by `linear_pack.cu`, are the B operand in shared memory.
//
// A block computes 128 rows and TOKENS tokens. Two warpgroups own 64 rows each and stream their own codes from
// global memory into registers, DEPTH pieces of 64 columns ahead; one thread copies the activations of each
// piece, which lie in one run, into a ring of STAGES buffers. SPLIT blocks of a cluster share the columns and add
// their sums through distributed shared memory, in a fixed order.

#include "linear_wgmma.cuh"

constexpr int ROWS = 128, THREADS = 256, WARPS = THREADS / 32, PITCH = ROWS + 4;

template <typename T, int TOKENS, int SPLIT, int STAGES, int DEPTH, int GROUP, bool ZEROS>
__device__ __forceinline__ void hopper(
    const u16 *packed, const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *bias, u16 *out, int tokens,
    int rows, int columns) {
    static_assert(DEPTH % 2 == 0, "operands alternate between two sets of registers");
    constexpr int GROUPS = GROUP == 32 ? 2 : 1, STAGE_BYTES = TOKENS * 128;
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    const int pieces = (columns + 63) / 64, blocks = (rows + 15) / 16;
    const int rank = SPLIT == 1 ? 0 : blockIdx.x % SPLIT, token_tile = blockIdx.x / SPLIT;
    const int first_piece = (int)((long)pieces * rank / SPLIT), end_piece = (int)((long)pieces * (rank + 1) / SPLIT);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    const u32 full_at = shared_address(full), empty_at = shared_address(empty), ring_at = shared_address(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full_at + s * 8, 1);
            barrier_init(empty_at + s * 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();

    const int count = end_piece - first_piece;
    const u8 *input_at = (const u8 *)packed + ((long)token_tile * pieces + first_piece) * STAGE_BYTES;
    auto copy = [&](int stage) {
        barrier_expect(full_at + stage * 8, STAGE_BYTES);
        copy_in(ring_at + stage * STAGE_BYTES, input_at, STAGE_BYTES, full_at + stage * 8);
        input_at += STAGE_BYTES;
    };
    const int groups = GROUP == 32 ? 2 * pieces : columns / GROUP;
    const long block = min((int)blockIdx.y * (ROWS / 16) + warp, blocks - 1);
    const char *codes_at = (const char *)qweight + (block * pieces * 32 + lane) * 16;
    const char *scales_at = (const char *)scales + (block * groups * 8 + g) * 4;
    const char *zeros_at = (const char *)zeros + (block * groups * 8 + g) * 2;
    Piece<GROUPS, ZEROS> ring[DEPTH];
    auto fetch = [&](Piece<GROUPS, ZEROS> &to, int piece) {
        to.codes = load_once(codes_at + (long)piece * 512);
        int group = piece * 64 / GROUP;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            to.scales[i] = *(const u32 *)(scales_at + (group + i) * 32);
            if (ZEROS) to.zeros[i] = *(const u16 *)(zeros_at + (group + i) * 16);
        }
    };
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (first_piece + d < end_piece) fetch(ring[d], first_piece + d);
    float sum[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sum[i] = 0.0f;
    wait_for_previous();
    if (threadIdx.x == 0)
        for (int i = 0; i < min(STAGES, count); ++i) copy(i);
    __syncwarp();

    // Operands of this piece and of the one before, which wgmma may still be reading.
    u32 a[2][4][4];
    const u64 first_descriptor = descriptor(ring_at);
    int stage = 0, phase = 0, last = 0, free = 0, free_phase = 0;
    for (int base = 0; base < count; base += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int i = base + d;
            if (i < count) {
                u32(&operands)[4][4] = a[d % 2];
                ring[d].template dequantize<T>(operands);
                if (i + DEPTH < count) fetch(ring[d], first_piece + i + DEPTH);
                barrier_wait(full_at + stage * 8, phase);
                const u64 b = first_descriptor + stage * (STAGE_BYTES / 16);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int step = 0; step < 4; ++step) Wgmma<T, TOKENS>::multiply(sum, operands[step], b + step * 2);
                asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 1;" ::: "memory");
                // The last piece's products are done, so its buffer is free here; where all warps say so, refill the
                // one before it, for which nobody has to wait long.
                if (i >= 1 && lane == 0) barrier_arrive(empty_at + last * 8);
                if (threadIdx.x == 0 && i >= 2) {
                    if (i - 2 + STAGES < count) {
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
            }
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");
    // Every warp has read its last buffer; only then do sums overwrite the ring.
    __syncthreads();
    float *at = (float *)shared + 2 * t * PITCH + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        at[(8 * i) * PITCH] = sum[4 * i];
        at[(8 * i + 1) * PITCH] = sum[4 * i + 1];
        at[(8 * i) * PITCH + 8] = sum[4 * i + 2];
        at[(8 * i + 1) * PITCH + 8] = sum[4 * i + 3];
    }
    if (SPLIT == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }

    const int row = blockIdx.y * ROWS + lane * 4;
    float shift[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) shift[i] = bias && row + i < rows ? T::to_float(bias[row + i]) : 0.0f;
    for (int token = rank * (TOKENS / SPLIT) + warp; token < (rank + 1) * (TOKENS / SPLIT); token += WARPS) {
        int global_token = token_tile * TOKENS + token;
        if (global_token >= tokens) break;
        float value[4] = {shift[0], shift[1], shift[2], shift[3]};
#pragma unroll
        for (int peer = 0; peer < SPLIT; ++peer) {
            u32 address = shared_address((float *)shared + token * PITCH + lane * 4);
            float part[4];
            if (SPLIT > 1) address = in_block(address, peer);
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                         : "r"(address));
#pragma unroll
            for (int i = 0; i < 4; ++i) value[i] += part[i];
        }
        u16 *to = out + (long)global_token * rows + row;
        if (rows % 4 == 0) {
            u32 low = (u32)T::from_float(value[0]) | (u32)T::from_float(value[1]) << 16;
            u32 high = (u32)T::from_float(value[2]) | (u32)T::from_float(value[3]) << 16;
            if (row < rows) asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (row + i < rows) to[i] = T::from_float(value[i]);
        }
    }
    if (SPLIT > 1) cluster_sync();
}

#define KERNEL(NAME, T, TOKENS, SPLIT, STAGES, DEPTH, RESIDENT, GROUP, ZEROS)                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) __cluster_dims__(SPLIT, 1, 1) NAME(                \
        const u16 *packed, const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *bias, u16 *out,          \
        int tokens, int rows, int columns) {                                                                           \
        hopper<T, TOKENS, SPLIT, STAGES, DEPTH, GROUP, ZEROS>(                                                         \
            packed, qweight, scales, zeros, bias, out, tokens, rows, columns);                                         \
    }
