// How the stream's results come together: four warps of a block, then the blocks that share a head. Part of
// `attention_stream.cu`, after its constants and its state.

#pragma once

__device__ __forceinline__ void store_four(u16 *to, const float x[4]) {
    u32 words[2] = {R::pack(x[0], x[1]), R::pack(x[2], x[3])};
    *(unsigned long long *)to = words[0] | (unsigned long long)words[1] << 32;
}

__device__ __forceinline__ void load_four(float x[4], const float *from) {
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(from));
}

__device__ __forceinline__ float load_one(const float *from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}

struct Shared {
    float out[WARPS][ROWS][HEAD_DIM], top[WARPS][ROWS], norm[WARPS][ROWS], weight[COMBINED][ROWS];
    int last;
};

// Sum the partials of `programs` blocks from `program` on, and write the heads' results to `target`.
__device__ void combine(Shared &shared, const float *partial_out, const float *partial_stats, u16 *target,
                        int program, int programs, int first_slot, int group, int warp, int lane) {
    constexpr int AHEAD = 8;  // loads of partial results under way while their weights are worked out
    auto slot = [&](int i) { return (long)((program + i) * 2 + (i == 0 ? first_slot : 0)); };
    const int size = group * HEAD_DIM, at = threadIdx.x * 4;
    float early[AHEAD][4];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (i < programs && at < size) load_four(early[i], partial_out + slot(i) * size + at);
    for (int row = warp; row < group; row += WARPS) {
        float top = NO_SCORE, norm = 0;
        for (int i = lane; i < programs; i += 32) {
            const float *stats = partial_stats + slot(i) * 2 * group + row;
            const float part = load_one(stats), sum = load_one(stats + group);
            const float higher = fmaxf(top, part);
            norm = norm * exp2_fast(top - higher) + sum * exp2_fast(part - higher);
            top = higher;
            if (i < COMBINED) shared.weight[i][row] = part;
        }
        float highest = top;
#pragma unroll
        for (int mask = 16; mask; mask /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, mask));
        norm *= exp2_fast(top - highest);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) norm += __shfl_xor_sync(~0u, norm, mask);
        for (int i = lane; i < min(programs, COMBINED); i += 32)
            shared.weight[i][row] = exp2_fast(shared.weight[i][row] - highest) / norm;
        if (lane == 0) shared.top[0][row] = highest, shared.norm[0][row] = norm;
    }
    __syncthreads();
    for (int first = 0; first < size; first += WARPS * 32 * 4) {
        const int place = first + at, row = place / HEAD_DIM;
        if (place >= size) break;
        float total[4] = {};
#pragma unroll 8
        for (int i = 0; i < programs; ++i) {
            float part[4], weight;
            if (first == 0 && i < AHEAD) {
#pragma unroll
                for (int e = 0; e < AHEAD; ++e)
                    if (e == i)
#pragma unroll
                        for (int j = 0; j < 4; ++j) part[j] = early[e][j];
            } else {
                load_four(part, partial_out + slot(i) * size + place);
            }
            if (i < COMBINED) {
                weight = shared.weight[i][row];
            } else {
                const float top = load_one(partial_stats + slot(i) * 2 * group + row);
                weight = exp2_fast(top - shared.top[0][row]) / shared.norm[0][row];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) total[j] += weight * part[j];
        }
        store_four(target + place, total);
    }
}

// Sum what the four warps have, and write it: the heads' results, or a partial for `combine`.
__device__ void finish(Shared &shared, State &state, u16 *target, float *part, float *stats, int group, int warp, int g,
                       int t) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) state.norm[j] += __shfl_xor_sync(~0u, state.norm[j], mask);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            shared.out[warp][2 * t + j][v_element(i, g)] = state.out[i / 2][i % 2 * 2 + j];
        if (g == 0) shared.top[warp][2 * t + j] = state.top[j], shared.norm[warp][2 * t + j] = state.norm[j];
    }
    __syncthreads();
    for (int at = threadIdx.x * 4; at < group * HEAD_DIM; at += WARPS * 32 * 4) {
        const int row = at / HEAD_DIM;
        float top = NO_SCORE, norm = 0, total[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared.top[w][row]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float weight = exp2_fast(shared.top[w][row] - top);
            norm += weight * shared.norm[w][row];
#pragma unroll
            for (int j = 0; j < 4; ++j) total[j] += weight * shared.out[w][row][at % HEAD_DIM + j];
        }
        if (part) {
            *(float4 *)(part + at) = make_float4(total[0], total[1], total[2], total[3]);
            if (at % HEAD_DIM == 0) stats[row] = top, stats[group + row] = norm;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) total[j] /= norm;
            store_four(target + at, total);
        }
    }
}
