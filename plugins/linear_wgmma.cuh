// Hopper's asynchronous parts: wgmma with A from registers, bulk copies into shared memory, barriers, clusters.

#pragma once

#include "linear_common.cuh"

typedef unsigned long long u64;

// d += a * b for 64 rows, N columns and 16 steps; the warpgroup's A fragments are those of mma.m16n8k16.
template <typename T, int N> struct Wgmma;

// Sixteen accumulators each: their names in the instruction, and their operands.
#define R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define R5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define R7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D(i) D4(16 * i), D4(16 * i + 4), D4(16 * i + 8), D4(16 * i + 12)
#define UP_TO(...) __VA_ARGS__

#define WGMMA(T, TYPE, N, NAMES, OPERANDS, A0, A1, A2, A3, B)                                                          \
    template <> struct Wgmma<T, N> {                                                                                   \
        static __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b) {                 \
            asm volatile(                                                                                              \
                "{ .reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "                                              \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES                             \
                "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", accumulate, 1, 1, 0; }"                         \
                : OPERANDS                                                                                             \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                 \
        }                                                                                                              \
    };

#define WGMMAS(T, TYPE)                                                                                                \
    WGMMA(T, TYPE, 32, R0, D(0), 16, 17, 18, 19, 20)                                                                   \
    WGMMA(T, TYPE, 64, R0 ", " R1, UP_TO(D(0), D(1)), 32, 33, 34, 35, 36)                                              \
    WGMMA(T, TYPE, 96, R0 ", " R1 ", " R2, UP_TO(D(0), D(1), D(2)), 48, 49, 50, 51, 52)                                \
    WGMMA(T, TYPE, 128, R0 ", " R1 ", " R2 ", " R3, UP_TO(D(0), D(1), D(2), D(3)), 64, 65, 66, 67, 68)                 \
    WGMMA(T, TYPE, 160, R0 ", " R1 ", " R2 ", " R3 ", " R4,                                                            \
          UP_TO(D(0), D(1), D(2), D(3), D(4)), 80, 81, 82, 83, 84)                                                     \
    WGMMA(T, TYPE, 192, R0 ", " R1 ", " R2 ", " R3 ", " R4 ", " R5,                                                    \
          UP_TO(D(0), D(1), D(2), D(3), D(4), D(5)), 96, 97, 98, 99, 100)                                              \
    WGMMA(T, TYPE, 256, R0 ", " R1 ", " R2 ", " R3 ", " R4 ", " R5 ", " R6 ", " R7,                                    \
          UP_TO(D(0), D(1), D(2), D(3), D(4), D(5), D(6), D(7)), 128, 129, 130, 131, 132)

WGMMAS(Fp16, "f16")
WGMMAS(Bf16, "bf16")

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; \n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; \n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

__device__ __forceinline__ void copy_in(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Descriptor of 16 columns of B: rows of 128 bytes, 128-byte swizzle, 8 rows every 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Codes, scales and zero points of one lane's two rows in one piece of 64 columns.
template <int GROUPS, bool ZEROS> struct Piece {
    Words4 codes;
    u32 scales[GROUPS];
    u32 zeros[ZEROS ? GROUPS : 1];

    template <typename T> __device__ __forceinline__ void dequantize(u32 (&operands)[4][4]) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const int part = step * GROUPS / 4;
            const u32 zero = ZEROS ? zeros[part] : 0x0808u;
            T::unpack(codes.v[step], T::low_shift(zero & 0xFF), T::high_shift(zero >> 8), operands[step]);
            T::scale(operands[step], scales[part]);
        }
    }
};
