// PTX instructions as functions, each named as the instruction with '_' for '.' and '::'; vectors are lists of operands.

#pragma once

#include "machine.h"

namespace ptx {

using machine::u16, machine::u32, machine::u64, machine::u8;

// Moving and choosing bits.

inline void mov_u32(u32 &to, u32 from) { to = from; }
inline void setp_ne_u32(bool &to, u32 a, u32 b) { to = a != b; }
inline void setp_eq_u32(bool &to, u32 a, u32 b) { to = a == b; }
inline void selp_u32(u32 &to, u32 a, u32 b, bool first) { to = first ? a : b; }

inline void lop3_b32(u32 &to, u32 a, u32 b, u32 c, u32 table) {
    u32 result = 0;
    for (u32 row = 0; row < 8; ++row)
        if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    to = result;
}

inline void prmt_b32(u32 &to, u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (u32)(u8)(bytes >> 8 * (selector >> 4 * i & 7)) << 8 * i;
    to = result;
}

// Arithmetic of 16-bit floats. Double holds products and sums of them, so that there is one rounding.

template <typename Real> u32 fma_of_halves(u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const double product = (double)Real::to_float(u16(a >> shift)) * Real::to_float(u16(b >> shift));
        result |= (u32)Real::from_double(product + Real::to_float(u16(c >> shift))) << shift;
    }
    return result;
}

constexpr u32 HALF_ONES = 0x3C003C00, HALF_NEGATIVE_ZEROS = 0x80008000;

inline void add_f16x2(u32 &to, u32 a, u32 b) { to = fma_of_halves<machine::Half>(a, HALF_ONES, b); }
inline void mul_rn_f16x2(u32 &to, u32 a, u32 b) { to = fma_of_halves<machine::Half>(a, b, HALF_NEGATIVE_ZEROS); }
inline void fma_rn_f16x2(u32 &to, u32 a, u32 b, u32 c) { to = fma_of_halves<machine::Half>(a, b, c); }
inline void fma_rn_bf16x2(u32 &to, u32 a, u32 b, u32 c) { to = fma_of_halves<machine::Brain>(a, b, c); }
inline void cvt_rn_f16_f32(u16 &to, float from) { to = machine::Half::from_double(from); }
inline void cvt_rn_bf16_f32(u16 &to, float from) { to = machine::Brain::from_double(from); }
inline void cvt_f32_f16(float &to, u16 from) { to = machine::Half::to_float(from); }

// Global memory.

inline void load_words(u32 &a, u32 &b, u32 &c, u32 &d, const void *from) {
    machine::check_aligned((u64)from, 16, "a load of 16 bytes");
    u32 words[4];
    std::memcpy(words, from, 16);
    a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void ld_global_v4_u32(u32 &a, u32 &b, u32 &c, u32 &d, const void *from) { load_words(a, b, c, d, from); }
inline void ld_global_nc_L1_no_allocate_v4_u32(u32 &a, u32 &b, u32 &c, u32 &d, const void *from) {
    load_words(a, b, c, d, from);
}
inline void st_global_v2_u32(void *to, u32 a, u32 b) {
    machine::check_aligned((u64)to, 8, "a store of 8 bytes");
    const u32 words[2] = {a, b};
    std::memcpy(to, words, 8);
}
inline void st_global_v4_u32(void *to, u32 a, u32 b, u32 c, u32 d) {
    machine::check_aligned((u64)to, 16, "a store of 16 bytes");
    const u32 words[4] = {a, b, c, d};
    std::memcpy(to, words, 16);
}
inline void st_release_gpu_global_u32(u32 *to, u32 value) { *to = value; }
// Only ever polled for something that is not zero: the thread sleeps until it may be there.
inline void ld_acquire_gpu_global_u32(u32 &to, const u32 *from) {
    machine::wait_while(from, 0, "a flag in global memory");
    to = *from;
}

// Shared memory.

inline void ld_shared_u16(u16 &to, u32 from) { std::memcpy(&to, machine::readable(from, 2), 2); }
inline void ld_shared_u32(u32 &to, u32 from) { std::memcpy(&to, machine::readable(from, 4), 4); }
inline void ld_shared_v4_u32(u32 &a, u32 &b, u32 &c, u32 &d, u32 from) {
    load_words(a, b, c, d, machine::readable(from, 16));
}
inline void ld_shared_cluster_v4_f32(float &a, float &b, float &c, float &d, u32 from) {
    float values[4];
    std::memcpy(values, machine::readable(from, 16), 16);
    a = values[0], b = values[1], c = values[2], d = values[3];
}
inline void mapa_shared_cluster_u32(u32 &to, u32 address, u32 rank) { to = machine::address_in_block(address, rank); }

// Four 8 by 8 matrices whose rows the lanes hold as mma's; lane 8 i + r has the address of row r of transposed matrix i.
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 to, u32 a, u32 b, u32 c, u32 d) {
    const machine::LaneWords *lanes = machine::meet({to, a, b, c, d});
    const u32 lane = machine::lane(), matrix = lane / 8, column = lane % 8;
    u16 row[8];
    for (u32 from = 0; from < 8; ++from) row[from] = u16(lanes[from * 4 + column / 2][1 + matrix] >> column % 2 * 16);
    std::memcpy(machine::writable(to, 16), row, 16);
}

// Warps and blocks.

inline void shfl_sync_idx_b32(u32 &to, u32 value, u32 from, u32 clamp, u32 members) {
    if (clamp != 31 || members != ~0u) machine::fail("shfl.sync is known for whole warps alone");
    to = machine::meet({value})[from % 32][0];
}
inline void bar_sync(u32 barrier, u32 threads) { machine::named_barrier(barrier, threads); }
inline void barrier_cluster_arrive_release_aligned() { machine::cluster_arrive(); }
inline void barrier_cluster_wait_acquire_aligned() { machine::cluster_wait(); }

// The next kernel starts when this one has ended, registers are not scarce, and stores are seen at once.
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
inline void setmaxnreg_dec_sync_aligned_u32(u32) {}
inline void setmaxnreg_inc_sync_aligned_u32(u32) {}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}

// Barriers in shared memory, and copies that arrive on them.

inline void mbarrier_init_shared_cta_b64(u32 barrier, u32 count) { machine::barrier_init(barrier, count); }
inline void mbarrier_arrive_shared_cta_b64(u32 barrier) { machine::barrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(u32 barrier, u32 bytes) {
    machine::barrier_arrive(barrier, bytes);
}
inline void mbarrier_test_wait_parity_shared_cta_b64(bool &done, u32 barrier, u32 parity) {
    done = machine::barrier_done(barrier, parity);
}
inline void mbarrier_try_wait_parity_shared_cta_b64(bool &done, u32 barrier, u32 parity) {
    machine::barrier_wait(barrier, parity);
    done = true;
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, const void *from, u32 bytes, u32 barrier) {
    machine::copy(to, from, bytes, barrier);
}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, const void *map, int column, int row, u32 barrier) {
    machine::copy_box(to, *(const machine::MatrixMap *)map, column, row, barrier);
}

// Products.

template <typename Real> void multiply_add(float *(&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const machine::LaneWords *lanes = machine::meet({a[0], a[1], a[2], a[3], b[0], b[1]});
    float rows[16][16], columns[8][16];
    machine::fragment_rows<Real>([&](u32 lane, int i) { return lanes[lane][i]; }, rows);
    for (u32 column = 0; column < 8; ++column)
        for (u32 k = 0; k < 16; ++k)
            columns[column][k] = Real::to_float(u16(lanes[column * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16));
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = machine::lane() / 4 + i / 2 * 8, column = machine::lane() % 4 * 2 + i % 2;
        for (u32 k = 0; k < 16; ++k) *d[i] += rows[row][k] * columns[column][k];
    }
}

// c is the same registers as d in our kernels.
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float &d0, float &d1, float &d2, float &d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float, float, float,
    float) {
    float *d[4] = {&d0, &d1, &d2, &d3};
    multiply_add<machine::Half>(d, {a0, a1, a2, a3}, {b0, b1});
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float &d0, float &d1, float &d2, float &d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float, float, float,
    float) {
    float *d[4] = {&d0, &d1, &d2, &d3};
    multiply_add<machine::Brain>(d, {a0, a1, a2, a3}, {b0, b1});
}

// Half of the operands but for the last nine are sums: N / 2 of them, four words of A, a descriptor of B, and whether to
// add to the sums, signs and order, which are always the same in our kernels.
template <bool BRAIN, typename... Operands> void wgmma(const Operands &...operands) {
    const void *const at[] = {&operands...};
    constexpr int SUMS = sizeof...(Operands) - 9;
    for (int i = 0; i < SUMS; ++i)
        if (at[i] != (const float *)at[0] + i) machine::fail("wgmma: the sums are to be one array");
    for (int i = 0; i < 4; ++i)
        if (at[SUMS + i] != (const u32 *)at[SUMS] + i) machine::fail("wgmma: the words of A are to be one array");
    machine::issue_product(BRAIN, 2 * SUMS, (float *)at[0], (const u32 *)at[SUMS], *(const u64 *)at[SUMS + 4]);
}
template <typename... Operands>
inline void wgmma_mma_async_sync_aligned_f32_f16_f16(const Operands &...operands) {
    wgmma<false>(operands...);
}
template <typename... Operands>
inline void wgmma_mma_async_sync_aligned_f32_bf16_bf16(const Operands &...operands) {
    wgmma<true>(operands...);
}
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { machine::commit_products(); }
inline void wgmma_wait_group_sync_aligned(u32 groups) { machine::wait_for_products(groups); }

}  // namespace ptx
