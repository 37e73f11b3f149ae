// Decode attention as a stream: what `attention_decode.py` computes, each warp on its own.
//
// A warp takes 16 keys at a time, which it copies to its own ring in shared memory, DEPTH steps ahead; no warp waits
// for another before its run is over. Keys, then elements of V, are the 16 rows of an m16n8k16 product, the query
// heads of one KV head its 8 columns. Which lane holds which key and which element is free as long as the other
// operand agrees, and it is chosen so that a lane reads up to 16 contiguous bytes. Lane (g, t) = (lane / 4, lane % 4)
// holds
//   K: keys 2g and 2g+1, a quarter of their elements; scores: those keys, heads 2t and 2t+1,
//   V: keys 4t..4t+3, an eighth of their elements; out: those elements (by g), heads 2t and 2t+1.
//
// Defined by the compiler: NAME, HEAD_DIM (64, 128, 256), FORMAT, BF16 (of qkv and out), POOL_BF16, DEPTH (steps of 16
// keys in the ring), BLOCKS (blocks that a multiprocessor is to hold), TOKEN_MAJOR (a tile is [tokens, kv_heads,
// HEAD_DIM], not [kv_heads, tokens, HEAD_DIM]: the order that SITS tiles are compared with). Dynamic shared memory:
// RING_BYTES, at least that of `Shared`.

#include "attention_stream.cuh"

constexpr int WARPS = 4, ROWS = 8, STEP = 16, UNIT = WARPS * STEP;
constexpr float NO_SCORE = -1.0e30f;
constexpr int ROW_BYTES = FORMAT == NATIVE ? 2 * HEAD_DIM : FORMAT == INT4 ? HEAD_DIM / 2 : HEAD_DIM;
constexpr int K_WORDS = ROW_BYTES / 16, V_WORDS = ROW_BYTES / 32;  // of a row in a lane
constexpr int K_CHUNK = K_WORDS < 4 ? K_WORDS : 4, V_CHUNK = V_WORDS < 4 ? V_WORDS : 4;  // words of one load
constexpr int PRODUCTS = HEAD_DIM / 16, PER_LANE = HEAD_DIM / 8;  // elements of a V row in a lane
constexpr int PAIRS = HEAD_DIM / 64;  // of a row in a lane of 32
constexpr bool WIDE = FORMAT == NATIVE && POOL_BF16;  // products in bfloat16; codes are exact in float16
constexpr int COMBINED = 64;  // partials whose weights are held at a time
typedef Real<BF16> R;
typedef Codes<FORMAT> C;

// First of the four elements of product `p` that lane t holds; element `i` of those of a V row that lane g holds.
__device__ __forceinline__ int q_element(int p, int t) {
    constexpr int PER = K_CHUNK * (FORMAT == NATIVE ? 2 : 4);  // elements of a chunk
    int low = FORMAT == INT4 ? p % K_WORDS : p, quads = PER / 4;
    int element = low / quads * 4 * PER + t * PER + low % quads * 4;
    return FORMAT == INT4 && p >= K_WORDS ? element + HEAD_DIM / 2 : element;
}
__device__ __forceinline__ int v_element(int i, int g) {
    constexpr int PER = V_CHUNK * (FORMAT == NATIVE ? 2 : 4);
    int low = FORMAT == INT4 ? i % (V_WORDS * 4) : i;
    int element = low / PER * 8 * PER + g * PER + low % PER;
    return FORMAT == INT4 && i >= V_WORDS * 4 ? element + HEAD_DIM / 2 : element;
}

struct Place {  // one sequence's keys of one KV head; in a tile's bytes and scales, V lies `v_rows` rows behind K
    u8 *pool;
    u16 *scales;
    const int *table;
    u32 tile_rows, v_rows;  // rows of a whole tile, all layers and heads; rows from K to V
    int tile_shift, context, kv_heads;
    __device__ __forceinline__ int stride() const { return TOKEN_MAJOR ? kv_heads : 1; }  // rows from key to key
    __device__ __forceinline__ long row(int tile, int position) const {
        return (long)tile * tile_rows + (position & ((1 << tile_shift) - 1)) * stride();
    }
};

// One step of a warp in shared memory: 16 rows of K, 16 of V, their scales. 16-byte pieces of a row are exchanged so
// that the lanes that read together meet different banks.
constexpr int V_AT = STEP * ROW_BYTES, SCALES_AT = 2 * V_AT, STAGE_BYTES = SCALES_AT + (FORMAT == NATIVE ? 0 : 128);
constexpr int RING_BYTES = WARPS * DEPTH * STAGE_BYTES;

__device__ __forceinline__ int swizzled(int row, int byte) {
    row += byte / ROW_BYTES, byte %= ROW_BYTES;
    int by = ROW_BYTES < 64 ? (row >> 2 & 3) << 5 : (row >> 2 & 1) << 5 | ((row >> 3 ^ row >> 1) & 1) << 6;
    return (row * ROW_BYTES + byte) ^ by;
}

// Where a lane finds its pieces of a step, and where it puts those that it copies.
struct Lanes {
    static constexpr int COPIES = V_AT / 512, V_PLACES = ROW_BYTES >= 128 ? 2 : 4;
    u32 copy[COPIES], k[2], v[V_PLACES];
    __device__ __forceinline__ Lanes(int lane, int g, int t) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) copy[i] = swizzled(0, i * 512 + lane * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            k[i] = ROW_BYTES >= 128 ? swizzled(2 * g, t * 4 * K_CHUNK + i * 16 * K_CHUNK)
                                    : swizzled(2 * g + i, t * 4 * K_CHUNK);
#pragma unroll
        for (int i = 0; i < V_PLACES; ++i) v[i] = V_AT + swizzled(4 * t + i * (4 / V_PLACES), g * 4 * V_CHUNK);
    }
    __device__ __forceinline__ u32 key(int j, int c) const {
        return ROW_BYTES >= 128 ? k[c % 2] + j * ROW_BYTES + c / 2 * 128 : k[j];
    }
    __device__ __forceinline__ u32 value(int j, int c) const {
        return ROW_BYTES >= 128 ? v[j / 2] + j % 2 * ROW_BYTES + c * 128 : v[j];
    }
};

__device__ __forceinline__ void fetch(u32 stage, const Lanes &lanes, const Place &place, int tile, int start,
                                      int lane) {
    const long row = place.row(tile, start);
    const u8 *k = place.pool + row * ROW_BYTES, *v = k + (long)place.v_rows * ROW_BYTES;
    const int left = place.context - start - lane * 16 / ROW_BYTES;
#pragma unroll
    for (int i = 0; i < Lanes::COPIES; ++i) {
        const int byte = i * 512 + lane * 16;
        const int from = TOKEN_MAJOR ? byte / ROW_BYTES * place.stride() * ROW_BYTES + byte % ROW_BYTES : byte;
        copy_16(stage + lanes.copy[i], k + from, true);
        // What lies behind the context may be no number, and 0 * NaN is NaN.
        copy_16(stage + lanes.copy[i] + V_AT, v + from, i * 512 / ROW_BYTES < left);
    }
    static_assert(FORMAT == NATIVE || !TOKEN_MAJOR, "scales have the order of SITS tiles");
    if (FORMAT != NATIVE && lane < 16)
        copy_4(stage + SCALES_AT + lane * 4, place.scales + row + (lane < 8 ? 0 : place.v_rows) + lane % 8 * 2);
}

struct State {  // of heads 2t and 2t+1: maxima, this lane's parts of the sums, this lane's elements
    float top[2], norm[2], out[PER_LANE / 2][4];  // out[i]: element 2i for both heads, then element 2i+1
};

__device__ __forceinline__ void raise(State &state, float top0, float top1) {
    if (__any_sync(~0u, top0 > state.top[0] || top1 > state.top[1])) {
        float keep0 = exp2_fast(state.top[0] - top0), keep1 = exp2_fast(state.top[1] - top1);
        state.norm[0] *= keep0, state.norm[1] *= keep1;
#pragma unroll
        for (int i = 0; i < PER_LANE / 2; ++i) {
            state.out[i][0] *= keep0, state.out[i][1] *= keep1;
            state.out[i][2] *= keep0, state.out[i][3] *= keep1;
        }
        state.top[0] = top0, state.top[1] = top1;
    }
}

// Scores of keys 2g (s[0], s[1]) and 2g+1 for heads 2t and 2t+1, BIAS times the heads' sums too large.
__device__ __forceinline__ void score(float s[4], const u32 q[PRODUCTS][2], u32 stage, const Lanes &lanes) {
    float other[4] = {};  // two chains of products wait less for each other
#pragma unroll
    for (int c = 0; c < K_WORDS / K_CHUNK; ++c) {
        u32 one[K_CHUNK], two[K_CHUNK];
        read_words<K_CHUNK>(one, stage + lanes.key(0, c));
        read_words<K_CHUNK>(two, stage + lanes.key(1, c));
#pragma unroll
        for (int w = 0; w < K_CHUNK; ++w) {
            const int p = c * K_CHUNK + w;
            if constexpr (FORMAT == NATIVE) {
                if (w % 2 == 0)
                    multiply<WIDE>(p % 4 ? other : s, one[w], two[w], one[w + 1], two[w + 1], q[p / 2]);
            } else if constexpr (FORMAT == INT4) {
                u32 low1 = one[w] & 0x0F0F0F0Fu, low2 = two[w] & 0x0F0F0F0Fu;
                u32 high1 = one[w] >> 4 & 0x0F0F0F0Fu, high2 = two[w] >> 4 & 0x0F0F0F0Fu;
                multiply<WIDE>(s, C::along(low1, 0), C::along(low2, 0), C::along(low1, 1), C::along(low2, 1), q[p]);
                multiply<WIDE>(other, C::along(high1, 0), C::along(high2, 0), C::along(high1, 1), C::along(high2, 1),
                               q[p + K_WORDS]);
            } else {
                multiply<WIDE>(p % 2 ? other : s, C::along(one[w], 0), C::along(two[w], 0), C::along(one[w], 1),
                               C::along(two[w], 1), q[p]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) s[j] += other[j];
}

__device__ __forceinline__ void add_pair(float out[4], const u32 p[2], const u32 w[4], int byte) {
    multiply<WIDE>(out, C::across(w[0], w[2], byte), C::across(w[0], w[2], byte + 1), C::across(w[1], w[3], byte),
                   C::across(w[1], w[3], byte + 1), p);
}

__device__ __forceinline__ void add_values(State &state, const u32 p[2], u32 stage, const Lanes &lanes) {
#pragma unroll
    for (int c = 0; c < V_WORDS / V_CHUNK; ++c) {
        u32 row[4][V_CHUNK];
#pragma unroll
        for (int j = 0; j < 4; ++j) read_words<V_CHUNK>(row[j], stage + lanes.value(j, c));
#pragma unroll
        for (int w = 0; w < V_CHUNK; ++w) {
            const int at = c * V_CHUNK + w;
            u32 word[4] = {row[0][w], row[1][w], row[2][w], row[3][w]};
            if constexpr (FORMAT == NATIVE) {
                const u32 low1 = __byte_perm(word[0], word[2], 0x5410), high1 = __byte_perm(word[0], word[2], 0x7632);
                const u32 low2 = __byte_perm(word[1], word[3], 0x5410), high2 = __byte_perm(word[1], word[3], 0x7632);
                multiply<WIDE>(state.out[at], low1, high1, low2, high2, p);
            } else if constexpr (FORMAT == INT4) {
                u32 high[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) high[j] = word[j] >> 4 & 0x0F0F0F0Fu, word[j] &= 0x0F0F0F0Fu;
                add_pair(state.out[2 * at], p, word, 0), add_pair(state.out[2 * at + 1], p, word, 2);
                add_pair(state.out[2 * (V_WORDS + at)], p, high, 0);
                add_pair(state.out[2 * (V_WORDS + at) + 1], p, high, 2);
            } else {
                add_pair(state.out[2 * at], p, word, 0), add_pair(state.out[2 * at + 1], p, word, 2);
            }
        }
    }
}

__device__ __forceinline__ float over_keys(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

// Take in 16 keys from position `start` on; those below `low` or from the context's end on do not count.
// excess: BIAS times the sums of heads 2t and 2t+1.
__device__ __forceinline__ void attend(State &state, const u32 q[PRODUCTS][2], const float excess[2], u32 stage,
                                       const Lanes &lanes, int start, int low, int context, float score_scale, int g) {
    float s[4] = {};
    score(s, q, stage, lanes);
    const bool edge = start < low || start + STEP > context;
    float v_scale[2];
    u32 k_scales, v_scales;
    if constexpr (FORMAT != NATIVE) {
        read_words<1>(&k_scales, stage + SCALES_AT + g * 4);
        read_words<1>(&v_scales, stage + SCALES_AT + 32 + g * 4);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float scale = score_scale;
        if constexpr (FORMAT != NATIVE) {
            scale *= half_to_float((u16)(k_scales >> (16 * j)));
            v_scale[j] = half_to_float((u16)(v_scales >> (16 * j)));
        }
        s[2 * j] = (s[2 * j] - excess[0]) * scale, s[2 * j + 1] = (s[2 * j + 1] - excess[1]) * scale;
        const int key = start + 2 * g + j;
        if (edge && (key < low || key >= context)) s[2 * j] = s[2 * j + 1] = -1.0f / 0.0f, v_scale[j] = 0;
    }
    raise(state, fmaxf(state.top[0], over_keys(fmaxf(s[0], s[2]))), fmaxf(state.top[1], over_keys(fmaxf(s[1], s[3]))));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        s[j] = exp2_fast(s[j] - state.top[j % 2]);
        state.norm[j % 2] += s[j];
        if constexpr (FORMAT != NATIVE) s[j] *= v_scale[j / 2];
    }
    u32 p[2] = {transpose(Real<WIDE>::pack(s[0], s[1])), transpose(Real<WIDE>::pack(s[2], s[3]))};
    add_values(state, p, stage, lanes);
}

// Element `at` of a row of qkv, turned by its position's angles.
__device__ __forceinline__ float turned(const u16 *row, const float *angles, int at) {
    constexpr int HALF = HEAD_DIM / 2;
    float cosine = angles[at % HALF], sine = angles[at % HALF + HALF];
    return at < HALF ? R::to_float(row[at]) * cosine - R::to_float(row[at + HALF]) * sine
                     : R::to_float(row[at]) * cosine + R::to_float(row[at - HALF]) * sine;
}

// The same of four elements from `at` on, a multiple of four.
__device__ __forceinline__ void turn_four(float x[4], const u16 *row, const float *angles, int at) {
    constexpr int HALF = HEAD_DIM / 2;
    const uint2 own = *(const uint2 *)(row + at), other = *(const uint2 *)(row + (at + HALF) % HEAD_DIM);
    const float4 cosine = *(const float4 *)(angles + at % HALF), sine = *(const float4 *)(angles + at % HALF + HALF);
    const float sign = at < HALF ? -1.f : 1.f;
    x[0] = R::to_float((u16)own.x) * cosine.x + sign * R::to_float((u16)other.x) * sine.x;
    x[1] = R::to_float((u16)(own.x >> 16)) * cosine.y + sign * R::to_float((u16)(other.x >> 16)) * sine.y;
    x[2] = R::to_float((u16)own.y) * cosine.z + sign * R::to_float((u16)other.y) * sine.z;
    x[3] = R::to_float((u16)(own.y >> 16)) * cosine.w + sign * R::to_float((u16)(other.y >> 16)) * sine.w;
}

// A row of new K or V, in lane l elements PAIRS*l.. of its first half (x[0]) and of its second (x[1]): put its codes
// into the warp's stage, and to the pool where `row` is given.
__device__ __forceinline__ void put_row(float x[2][PAIRS], u32 stage, int stage_row, u32 scale_at, u8 *row,
                                        u16 *scale_to, int lane) {
    u32 bits[2][PAIRS];
    float largest = 0, scale = 1;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) largest = fmaxf(largest, fmaxf(fabsf(x[0][i]), fabsf(x[1][i])));
    if constexpr (FORMAT != NATIVE) {
#pragma unroll
        for (int mask = 16; mask; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
        scale = row_scale<FORMAT>(largest);
        if (lane == 0) {
            write_half(scale_at, float_to_half(scale));
            if (row) *scale_to = float_to_half(scale);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if constexpr (FORMAT == NATIVE) bits[half][i] = Real<WIDE>::from_float(x[half][i]);
            else bits[half][i] = encode<FORMAT>(x[half][i], scale);
        }
#pragma unroll
    for (int half = 0; half < (FORMAT == INT4 ? 1 : 2); ++half)
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int at = half * (HEAD_DIM / 2) + lane * PAIRS + i;
            if constexpr (FORMAT == NATIVE) {
                write_half(stage + swizzled(stage_row, at * 2), (u16)bits[half][i]);
                if (row) ((u16 *)row)[at] = (u16)bits[half][i];
            } else {
                const u32 byte = FORMAT == INT4 ? bits[0][i] | bits[1][i] << 4 : bits[half][i];
                write_byte(stage + swizzled(stage_row, at), byte);
                if (row) row[at] = (u8)byte;
            }
        }
}

// Make a step of up to 16 of a sequence's new tokens, those of rows first..last of qkv, in one stage; write the one at
// `position` to the pool.
__device__ __forceinline__ void fetch_new(u32 stage, const Place &place, const u16 *qkv, const float *rope_table,
                                          int first, int last, int start, int position, int kv_heads, int group,
                                          int head, int lane) {
#pragma unroll
    for (int i = 0; i < V_AT; i += 512)
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(stage + V_AT + i + lane * 16), "r"(0) : "memory");
    __syncwarp();
    for (int r = first; r <= last; ++r) {
        const u16 *k = qkv + (((long)r * (group + 2) + group) * kv_heads + head) * HEAD_DIM;
        const u16 *v = k + kv_heads * HEAD_DIM;
        const int at = start + r - first;
        const float *angles = rope_table + (long)at * HEAD_DIM;
        u8 *k_row = nullptr, *v_row = nullptr;
        u16 *k_scale = nullptr, *v_scale = nullptr;
        if (at == position) {
            const long row = place.row(place.table[at >> place.tile_shift], at);
            k_row = place.pool + row * ROW_BYTES, v_row = k_row + (long)place.v_rows * ROW_BYTES;
            k_scale = place.scales + row, v_scale = k_scale + place.v_rows;
        }
        float x[2][PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            x[0][i] = turned(k, angles, lane * PAIRS + i), x[1][i] = turned(k, angles, HEAD_DIM / 2 + lane * PAIRS + i);
        put_row(x, stage, r - first, stage + SCALES_AT + 2 * (r - first), k_row, k_scale, lane);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            x[0][i] = R::to_float(v[lane * PAIRS + i]), x[1][i] = R::to_float(v[HEAD_DIM / 2 + lane * PAIRS + i]);
        put_row(x, stage + V_AT, r - first, stage + SCALES_AT + 32 + 2 * (r - first), v_row, v_scale, lane);
    }
    __syncwarp();
}

#include "attention_stream_sum.cuh"

// Units of each of the lanes' sequences: 64 keys of one new token and one KV head each (`attention_decode._spans`).
__device__ __forceinline__ int spans(int context, int fresh, int window, int decode_limit, int &first) {
    first = (window > 0 ? max(context + 1 - window, 0) : 0) / UNIT;
    return fresh > 0 && fresh <= decode_limit ? max((context + UNIT - 1) / UNIT - first, 1) : 0;
}

__device__ __forceinline__ int batch_units(const int *context_lens, const int *query_starts, int sequence, int batch,
                                           int window, int decode_limit, int kv_heads) {
    if (sequence >= batch) return 0;
    int first, fresh = query_starts[sequence + 1] - query_starts[sequence];
    return spans(context_lens[sequence], fresh, window, decode_limit, first) * fresh * kv_heads;
}

// Arguments as of `attention_decode`, partials and arrivals too. Only qkv may come from the kernel before this one:
// everything else must have been written before that one began.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(
    const u16 *qkv, u16 *out, u8 *pool, u16 *pool_scales, const int *tile_table, const int *context_lens,
    const int *query_starts, const float *rope_table, float *partial_out, float *partial_stats, int *arrivals,
    int batch, int table_width, int num_layers, int layer, int kv_heads, int group, int tile_shift, int window,
    int decode_limit, float softmax_scale) {
    extern __shared__ __align__(128) u8 memory[];
    Shared &shared = *(Shared *)memory;  // in the ring's place once it is empty
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int program = blockIdx.x, programs = gridDim.x;
    const float score_scale = softmax_scale * 1.4426950408889634f;
    const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * DEPTH * STAGE_BYTES;
    const u32 ring_end = ring + (DEPTH - 1) * STAGE_BYTES;
    const Lanes lanes(lane, g, t);

    int total = 0;
    for (int start = 0; start < batch; start += 32)
        total += batch_units(context_lens, query_starts, start + lane, batch, window, decode_limit, kv_heads);
#pragma unroll
    for (int mask = 16; mask; mask /= 2) total += __shfl_xor_sync(~0u, total, mask);
    const int run = max((total + programs - 1) / programs, 1), end = min((program + 1) * run, total);
    int unit = program * run, sequence = 0, before = 0, passed = 0;
    if (unit >= end) {
        wait_for_inputs();  // or this kernel could end before the one before it, and the next one rely on both
        return;
    }
    for (int start = 0; start < batch; start += 32) {
        int reached = batch_units(context_lens, query_starts, start + lane, batch, window, decode_limit, kv_heads);
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            int other = __shfl_up_sync(~0u, reached, by);
            if (lane >= by) reached += other;
        }
        reached += passed;
        const u32 behind = __ballot_sync(~0u, reached <= unit && start + lane < batch);
        const int count = __popc(behind);
        if (count) before = __shfl_sync(~0u, reached, count - 1);
        sequence += count;
        passed = __shfl_sync(~0u, reached, 31);
        if (passed > unit) break;
    }

    let_next_start();
    while (unit < end) {
        int first;
        const int context = context_lens[sequence], row = query_starts[sequence];
        const int fresh = query_starts[sequence + 1] - row;
        const int steps = spans(context, fresh, window, decode_limit, first);
        const int offset = unit - before;
        if (offset >= steps * fresh * kv_heads) {
            before += steps * fresh * kv_heads;
            ++sequence;
            continue;
        }
        const int pair = offset / steps, step = offset - pair * steps, stop = min(step + end - unit, steps);
        const int token = pair / kv_heads, head = pair % kv_heads, position = context + token;
        const int low = window > 0 ? position - window + 1 : 0;
        const long layer_row = (long)layer * 2 * kv_heads << tile_shift;
        const long head_row = layer_row + (TOKEN_MAJOR ? head : (long)head << tile_shift);
        const int *table = tile_table + (long)sequence * table_width;
        const Place place{pool + head_row * ROW_BYTES, pool_scales + head_row, table,
                          (u32)num_layers * 2 * kv_heads << tile_shift, (u32)kv_heads << tile_shift,
                          tile_shift, context, kv_heads};

        // Tile ids of 32 tiles at a time, one a lane.
        int id_base = 0, id = 0, held = 0, next = step;
        u32 filled = ring;
        auto bring = [&] {
            if (next < stop) {
                const int start = (first + next) * UNIT + warp * STEP, index = start >> tile_shift;
                if (index >= id_base + held) {
                    id_base = index, held = 32;
                    id = index + lane < table_width ? place.table[index + lane] : 0;
                }
                fetch(filled, lanes, place, __shfl_sync(~0u, id, index - id_base), start, lane);
                filled = filled == ring_end ? ring : filled + STAGE_BYTES;
                ++next;
            }
            commit_copies();
        };
#pragma unroll
        for (int d = 0; d < DEPTH - 1; ++d) bring();

        wait_for_inputs();
        u32 q[PRODUCTS][2];
        float sum = 0;
        const u16 *q_row = qkv + ((long)(row + token) * (group + 2) * kv_heads + head * group + g) * HEAD_DIM;
        const float *angles = rope_table + (long)position * HEAD_DIM;
#pragma unroll
        for (int p = 0; p < PRODUCTS; ++p) {
            float x[4] = {};
            if (g < group) turn_four(x, q_row, angles, q_element(p, t));
            q[p][0] = Real<WIDE>::pack(x[0], x[1]), q[p][1] = Real<WIDE>::pack(x[2], x[3]);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                sum += Real<WIDE>::to_float((u16)q[p][j]) + Real<WIDE>::to_float((u16)(q[p][j] >> 16));
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float excess[2] = {__shfl_sync(~0u, sum, 8 * t) * C::BIAS, __shfl_sync(~0u, sum, 8 * t + 4) * C::BIAS};
        State state = {{NO_SCORE, NO_SCORE}};
        u32 stage = ring;
        for (int start = (first + step) * UNIT + warp * STEP; start < (first + stop) * UNIT; start += UNIT) {
            wait_copies<DEPTH - 2>();
            __syncwarp();
            bring();
            attend(state, q, excess, stage, lanes, start, low, context, score_scale, g);
            stage = stage == ring_end ? ring : stage + STAGE_BYTES;
            __syncwarp();
        }

        if (stop == steps && warp == 0)
            for (int begin = 0; begin <= token; begin += STEP) {
                const int last = row + min(begin + STEP - 1, token);
                fetch_new(ring, place, qkv, rope_table, row + begin, last, context + begin,
                          position, kv_heads, group, head, lane);
                attend(state, q, excess, ring, lanes, context + begin, low, position + 1, score_scale, g);
                __syncwarp();
            }

        u16 *target = out + ((long)(row + token) * kv_heads + head) * group * HEAD_DIM;
        const bool whole = stop - step == steps;
        const int slot = program * 2 + (unit == program * run ? 0 : 1);
        __syncthreads();
        finish(shared, state, target, whole ? nullptr : partial_out + (long)slot * group * HEAD_DIM,
               partial_stats + (long)slot * 2 * group, group, warp, g, t);
        if (!whole) {
            const int begin = before + pair * steps, earliest = begin / run;
            const int sharers = (begin + steps - 1) / run - earliest + 1;
            int *counter = arrivals + (row + token) * kv_heads + head;
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();
                shared.last = atomicAdd(counter, 1) == sharers - 1;
                __threadfence();
            }
            __syncthreads();
            if (shared.last) {
                combine(shared, partial_out, partial_stats, target, earliest, sharers, begin == earliest * run ? 0 : 1,
                        group, warp, lane);
                if (threadIdx.x == 0) *counter = 0;
            }
        }
        __syncthreads();
        unit += stop - step;
    }
}
