// W4A16 linear for many tokens on Hopper: weights are dequantized in registers, straight into the A operand of
// wgmma; activations are the B operand in shared memory.
//
// A tile is 128 rows and TOKENS tokens. Two warpgroups own 64 rows each; two more warps copy ahead of them: one the
// activations, a piece of 64 columns at a time through a tensor map (which fills what lies outside with zeros), the
// other the codes, scales and zero points of 256 columns. Products are issued 16 columns at a time, so that the
// tensor cores work on some while the next are dequantized; AHEAD of them may be under way.
//
// SPLIT blocks of a cluster share a tile's columns and add their sums through distributed shared memory. With SPLIT = 1
// each block takes an equal run of the list of tiles, or, where tiles would fill the GPU badly, an equal run of the list
// of all their chunks of columns. A tile that so ends up in several blocks is summed by the block with its last chunk,
// from float32 sums of the others in global memory. A block works through its tiles backwards: it hands over the
// beginning of its last tile at once, and comes to its first tile when the sums for that have long been there. Blocks
// wait only for blocks of lower index, which were started before them: the wait ends whatever else runs on the GPU.
// Sums are added in a fixed order. A flag that tells of sums is lowered again by the one block that waits for it.

#include "linear_hopper.cuh"

// The barriers of the two rings: a place is full when its copy has arrived, empty when all WARPS have read it.
template <int STAGES, int CHUNKS> struct Rings {
    u32 full, empty, weights_full, weights_empty;

    __device__ __forceinline__ explicit Rings(const u64 *barriers) {
        full = kept(shared_address(barriers)), empty = full + 8 * STAGES;
        weights_full = empty + 8 * STAGES, weights_empty = weights_full + 8 * CHUNKS;
    }
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + s * 8, 1);
            barrier_init(empty + s * 8, WARPS);
        }
        for (int s = 0; s < CHUNKS; ++s) {
            barrier_init(weights_full + s * 8, 1);
            barrier_init(weights_empty + s * 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// One thread copies the activations of all pieces of the block's run.
template <typename Place, int TOKENS, int STAGES, int CHUNKS>
__device__ __forceinline__ void copy_inputs(
    const TensorMap &input, const Run &run, const Rings<STAGES, CHUNKS> &rings, u32 ring_at, int token_tiles) {
    int stage = 0, phase = 1;
    for (int tile = run.last_tile; tile >= run.first_tile; --tile) {
        const int token = tile % token_tiles * TOKENS;
        for (int piece = run.begin(tile) * CHUNK; piece < run.end(tile) * CHUNK; ++piece) {
            const u32 full = rings.full + stage * 8;
            barrier_wait(rings.empty + stage * 8, phase);
            barrier_expect(full, Place::INPUT);
            tensor_copy_in(ring_at + stage * Place::INPUT, input, piece * 64, token, full);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        }
    }
}

// A warp copies the weights of all chunks of the block's run: a lane the codes, the scales or the zero points of 16
// rows. Rows beyond the matrix are those of its last block.
template <typename Place, int STAGES, int CHUNKS, int GROUP, bool ZEROS>
__device__ __forceinline__ void copy_weights(
    const u8 *qweight, const u8 *scales, const u8 *zeros, const Run &run, const Rings<STAGES, CHUNKS> &rings,
    u32 weights_at, int token_tiles, int rows, int columns) {
    const int pieces = (columns + 63) / 64, blocks = (rows + 15) / 16;
    const int groups = GROUP == 32 ? 2 * pieces : columns / GROUP;
    const int kind = threadIdx.x % 32 / 8, local = threadIdx.x % 8;
    const u32 to = kind == 0   ? local * CHUNK * 512
                   : kind == 1 ? Place::CODES + local * Place::GROUPS * 32
                               : Place::CODES + Place::SCALES + local * Place::GROUPS * 16;
    int stage = 0, phase = 1;
    for (int tile = run.last_tile; tile >= run.first_tile; --tile) {
        const long block = min(tile / token_tiles * (ROWS / 16) + local, blocks - 1);
        for (int chunk = run.begin(tile); chunk < run.end(tile); ++chunk) {
            const int here = min(CHUNK, pieces - chunk * CHUNK);
            const int here_groups = min(Place::GROUPS, groups - chunk * Place::GROUPS);
            const u8 *from = kind == 0   ? qweight + (block * pieces + chunk * CHUNK) * 512
                             : kind == 1 ? scales + (block * groups + chunk * Place::GROUPS) * 32
                                         : zeros + (block * groups + chunk * Place::GROUPS) * 16;
            const u32 bytes = kind == 0 ? here * 512 : kind == 1 ? here_groups * 32 : here_groups * 16;
            const u32 full = rings.weights_full + stage * 8;
            barrier_wait(rings.weights_empty + stage * 8, phase);
            if (threadIdx.x % 32 == 0) barrier_expect(full, WARPS * (here * 512 + here_groups * (ZEROS ? 48 : 32)));
            __syncwarp();
            if (kind < (ZEROS ? 3 : 2)) copy_in(weights_at + stage * Place::WEIGHTS + to, from, bytes, full);
            stage = stage + 1 == CHUNKS ? 0 : stage + 1;
            phase ^= stage == 0;
        }
    }
}

// The eight warps that multiply: all tiles of the block's run, from the rings to the output or to `sums`. What a piece
// needs later is asked for early: the next piece's codes are read and put in order while this one is multiplied, and
// barriers are tested one step before they are needed. No branch may stand between products, or the compiler waits for
// each: hence barriers without visible branches.
template <typename T, int TOKENS, int SPLIT, int STAGES, int CHUNKS, int GROUP, bool ZEROS>
__device__ __forceinline__ void multiply(
    const Run &run, const Rings<STAGES, CHUNKS> &rings, u8 *shared, const u16 *bias, u16 *out, float *sums, u32 *flags,
    int tokens, int rows) {
    using Place = Shared<TOKENS, STAGES, CHUNKS, GROUP, ZEROS>;
    constexpr int PIECE_GROUPS = GROUP == 32 ? 2 : 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const int token_tiles = (tokens + TOKENS - 1) / TOKENS;
    const u32 ring_at = kept(shared_address(shared)), weights_at = ring_at + Place::WEIGHTS_AT;
    const Reorder reorder(lane);
    const bool speaks = lane == 0;
    const u32 first_descriptor = kept((u32)descriptor(ring_at));
    const u32 codes_at = kept(weights_at + warp * CHUNK * 512 + lane * 16);
    const u32 scales_at = kept(weights_at + Place::CODES + warp * Place::GROUPS * 32 + g * 4);
    const u32 zeros_at = kept(weights_at + Place::CODES + Place::SCALES + warp * Place::GROUPS * 16 + g * 2);
    int set = 0, phase = 0, weights_stage = 0, weights_phase = 0;  // a set is CHUNK stages of activations
    Piece<PIECE_GROUPS, ZEROS> next;
    auto load = [&](int place) {  // piece `place` of the chunk at weights_stage
        const u32 offset = weights_stage * Place::WEIGHTS;
        next.codes = load_shared(codes_at + offset + place * 512);
#pragma unroll
        for (int i = 0; i < PIECE_GROUPS; ++i) {
            const int group = place * 64 / GROUP + i;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(next.scales[i]) : "r"(scales_at + offset + group * 32));
            if (ZEROS) {
                u16 pair;
                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(zeros_at + offset + group * 16));
                next.zeros[i] = pair;
            }
        }
    };
    auto load_next_chunk = [&](bool there, u32 ready) {
        if (there) {
            barrier_wait_unless(ready, rings.weights_full + weights_stage * 8, weights_phase);
            load(0);
        }
    };
    for (int tile = run.last_tile; tile >= run.first_tile; --tile) {
        const int first_chunk = run.begin(tile), end_chunk = run.end(tile);
        float sum[TOKENS / 2];
        u32 a[AHEAD + 1][4];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sum[i] = 0.0f;
        u32 before = 0, input_ready = 0, weights_ready = 0;
        load_next_chunk(first_chunk < end_chunk, 0);
        reorder(next.codes);
        for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
            const u32 full = rings.full + set * CHUNK * 8, empty = rings.empty + set * CHUNK * 8, full_phase = phase;
            const u32 inputs = first_descriptor + set * CHUNK * (Place::INPUT / 16);
            set = set + 1 == STAGES / CHUNK ? 0 : set + 1;
            phase ^= set == 0;
            const u32 next_full = rings.full + set * CHUNK * 8;
#pragma unroll
            for (int place = 0; place < CHUNK; ++place) {
                const Piece<PIECE_GROUPS, ZEROS> now = next;
                if (place + 1 < CHUNK) {
                    load(place + 1);
                } else {
                    // All codes of this chunk are in registers: its place may be filled again.
                    __syncwarp();
                    barrier_arrive_if(speaks, rings.weights_empty + weights_stage * 8);
                    weights_stage = weights_stage + 1 == CHUNKS ? 0 : weights_stage + 1;
                    weights_phase ^= weights_stage == 0;
                    load_next_chunk(chunk + 1 < end_chunk, weights_ready);
                }
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    u32(&operands)[4] = a[(place * 4 + step) % (AHEAD + 1)];
                    now.template dequantize<T>(step, operands);
                    if (step == 0) barrier_wait_unless(input_ready, full + place * 8, full_phase);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                    const u32 columns_at = inputs + place * (Place::INPUT / 16) + step * 2;
                    Wgmma<T, TOKENS>::multiply(sum, operands, (u64)DESCRIPTOR_HIGH << 32 | columns_at);
                    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD)
                                 : "memory");
                    // The products of the piece before are done.
                    if (step == AHEAD - 1) {
                        if (place > 0) {
                            barrier_arrive_if(speaks, empty + (place - 1) * 8);
                        } else {
                            barrier_arrive_if(speaks && before, before);
                        }
                    }
                    if (step == 1 && place + 2 == CHUNK) {
                        const bool around = weights_stage + 1 == CHUNKS;
                        weights_ready = barrier_test(
                            rings.weights_full + (around ? 0 : weights_stage + 1) * 8, weights_phase ^ (u32)around);
                    }
                    if (step == 2) {
                        reorder(next.codes);
                        input_ready = place + 1 < CHUNK ? barrier_test(full + (place + 1) * 8, full_phase)
                                                        : barrier_test(next_full, phase);
                    }
                }
            }
            before = empty + (CHUNK - 1) * 8;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        barrier_arrive_if(speaks && before, before);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");

        const int first_row = tile / token_tiles * ROWS, first_token = tile % token_tiles * TOKENS;
        if constexpr (SPLIT > 1) {
            store_cluster_tile<T, TOKENS, SPLIT>(sum, shared, bias, out, first_row, first_token, tokens, rows);
        } else if (end_chunk < run.chunks) {
            put_sums(sum, sums, flags);
        } else {
            if (first_chunk > 0) {
                int other = blockIdx.x;
                do add_sums(sum, sums, flags, --other);
                while (run.begin_of(other, tile) > 0);
            }
            u8 *staging = shared + Place::STAGED_AT;
            store_tile<T, TOKENS>(sum, staging, bias, out, first_row, first_token, tokens, rows);
        }
    }
}

template <typename T, int TOKENS, int SPLIT, int STAGES, int CHUNKS, int GROUP, bool ZEROS>
__device__ __forceinline__ void hopper(
    const TensorMap &input, const u32 *qweight, const u16 *scales, const u8 *zeros, const u16 *bias, u16 *out,
    float *sums, u32 *flags, int tokens, int rows, int columns, bool share_tiles) {
    using Place = Shared<TOKENS, STAGES, CHUNKS, GROUP, ZEROS>;
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * (STAGES + CHUNKS)];
    const Rings<STAGES, CHUNKS> rings(barriers);
    const int warp = threadIdx.x / 32, chunks = (columns + 64 * CHUNK - 1) / (64 * CHUNK);
    const int token_tiles = (tokens + TOKENS - 1) / TOKENS, tiles = (rows + ROWS - 1) / ROWS * token_tiles;
    const Run run = SPLIT == 1 ? Run::of_block(tiles, chunks, share_tiles) : Run::of_cluster(chunks, SPLIT);

    if (threadIdx.x == 0) rings.init();
    // Of a last chunk that is not whole, some pieces have no weights; activations beyond the matrix are zeros, and
    // what they meet there has to be finite.
    for (int i = threadIdx.x; i < CHUNKS * Place::SCALES / 4; i += blockDim.x) {
        const int in_stage = i % (Place::SCALES / 4), of_stage = i / (Place::SCALES / 4);
        *(u32 *)(shared + Place::WEIGHTS_AT + of_stage * Place::WEIGHTS + Place::CODES + in_stage * 4) = 0;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    let_next_start();

    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const u32 ring_at = shared_address(shared);
        if (threadIdx.x == WARPS * 32) {
            wait_for_previous();
            copy_inputs<Place, TOKENS>(input, run, rings, ring_at, token_tiles);
        } else if (warp == WARPS + 1) {
            copy_weights<Place, STAGES, CHUNKS, GROUP, ZEROS>(
                (const u8 *)qweight, (const u8 *)scales, zeros, run, rings, ring_at + Place::WEIGHTS_AT, token_tiles,
                rows, columns);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_for_previous();
        multiply<T, TOKENS, SPLIT, STAGES, CHUNKS, GROUP, ZEROS>(
            run, rings, shared, bias, out, sums, flags, tokens, rows);
    }
}

#define KERNEL(NAME, T, TOKENS, SPLIT, STAGES, CHUNKS, GROUP, ZEROS)                                                   \
    extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(SPLIT, 1, 1) NAME(                           \
        const __grid_constant__ TensorMap input, const u32 *qweight, const u16 *scales, const u8 *zeros,               \
        const u16 *bias, u16 *out, float *sums, u32 *flags, int tokens, int rows, int columns, int share_tiles,        \
        int /* blocks */) {                                                                                            \
        hopper<T, TOKENS, SPLIT, STAGES, CHUNKS, GROUP, ZEROS>(                                                        \
            input, qweight, scales, zeros, bias, out, sums, flags, tokens, rows, columns, share_tiles);                \
    }
