// Hopper's asynchronous parts: wgmma with A from registers, bulk copies into shared memory, barriers, clusters.

#pragma once

#include "linear_common.cuh"

typedef unsigned long long u64;

// d += a * b for 64 rows, N columns and 16 steps; the warpgroup's A fragments are those of mma.m16n8k16.
template <typename T, int N> struct Wgmma;

// Eight accumulators each: their names in the instruction, and their operands.
#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D(i) D4(8 * i), D4(8 * i + 4)
#define NAMES1 R0
#define NAMES2 NAMES1 ", " R1
#define NAMES3 NAMES2 ", " R2
#define NAMES4 NAMES3 ", " R3
#define NAMES5 NAMES4 ", " R4
#define NAMES6 NAMES5 ", " R5
#define NAMES7 NAMES6 ", " R6
#define NAMES8 NAMES7 ", " R7
#define NAMES9 NAMES8 ", " R8
#define NAMES10 NAMES9 ", " R9
#define NAMES11 NAMES10 ", " R10
#define NAMES12 NAMES11 ", " R11
#define NAMES13 NAMES12 ", " R12
#define NAMES14 NAMES13 ", " R13
#define NAMES15 NAMES14 ", " R14
#define NAMES16 NAMES15 ", " R15
#define OPERANDS1 D(0)
#define OPERANDS2 OPERANDS1, D(1)
#define OPERANDS3 OPERANDS2, D(2)
#define OPERANDS4 OPERANDS3, D(3)
#define OPERANDS5 OPERANDS4, D(4)
#define OPERANDS6 OPERANDS5, D(5)
#define OPERANDS7 OPERANDS6, D(6)
#define OPERANDS8 OPERANDS7, D(7)
#define OPERANDS9 OPERANDS8, D(8)
#define OPERANDS10 OPERANDS9, D(9)
#define OPERANDS11 OPERANDS10, D(10)
#define OPERANDS12 OPERANDS11, D(11)
#define OPERANDS13 OPERANDS12, D(12)
#define OPERANDS14 OPERANDS13, D(13)
#define OPERANDS15 OPERANDS14, D(14)
#define OPERANDS16 OPERANDS15, D(15)

#define WGMMA(T, TYPE, N, EIGHTS, A0, A1, A2, A3, B)                                                                   \
    template <> struct Wgmma<T, N> {                                                                                   \
        static __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b) {                 \
            asm volatile(                                                                                              \
                "{ .reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "                                              \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES##EIGHTS                     \
                "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", accumulate, 1, 1, 0; }"                         \
                : OPERANDS##EIGHTS                                                                                     \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                 \
        }                                                                                                              \
    };

#define WGMMAS(T, TYPE)                                                                                                \
    WGMMA(T, TYPE, 32, 2, 16, 17, 18, 19, 20) \
    WGMMA(T, TYPE, 48, 3, 24, 25, 26, 27, 28) \
    WGMMA(T, TYPE, 64, 4, 32, 33, 34, 35, 36) \
    WGMMA(T, TYPE, 80, 5, 40, 41, 42, 43, 44) \
    WGMMA(T, TYPE, 96, 6, 48, 49, 50, 51, 52) \
    WGMMA(T, TYPE, 112, 7, 56, 57, 58, 59, 60) \
    WGMMA(T, TYPE, 128, 8, 64, 65, 66, 67, 68) \
    WGMMA(T, TYPE, 144, 9, 72, 73, 74, 75, 76) \
    WGMMA(T, TYPE, 160, 10, 80, 81, 82, 83, 84) \
    WGMMA(T, TYPE, 176, 11, 88, 89, 90, 91, 92) \
    WGMMA(T, TYPE, 192, 12, 96, 97, 98, 99, 100) \
    WGMMA(T, TYPE, 208, 13, 104, 105, 106, 107, 108) \
    WGMMA(T, TYPE, 224, 14, 112, 113, 114, 115, 116) \
    WGMMA(T, TYPE, 240, 15, 120, 121, 122, 123, 124) \
    WGMMA(T, TYPE, 256, 16, 128, 129, 130, 131, 132)

WGMMAS(Fp16, "f16")
WGMMAS(Bf16, "bf16")

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; \n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; \n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// Without a branch that the compiler would see, so that it knows the warp to be together afterwards.
__device__ __forceinline__ void barrier_arrive_if(bool here, u32 barrier) {
    asm volatile(
        "{ .reg .pred here; setp.ne.u32 here, %1, 0; @here mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier),
        "r"((u32)here)
        : "memory");
}

// Whether a phase is complete, without waiting; and to wait for it where it was not.
__device__ __forceinline__ u32 barrier_test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

__device__ __forceinline__ void barrier_wait_unless(u32 done, u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; setp.ne.u32 done, %2, 0; \n"
        "again: @!done mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; \n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity), "r"(done) : "memory");
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

// What cuTensorMapEncodeTiled makes: a matrix in global memory, and the box that is copied of it at a time.
struct __align__(64) TensorMap {
    u64 opaque[16];
};

// Copy the box at (column, row) into shared memory; what lies outside of the matrix becomes zero.
__device__ __forceinline__ void tensor_copy_in(u32 to, const TensorMap &from, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&from), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

constexpr u32 DESCRIPTOR_HIGH = 64 | 1 << 30;

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

    template <typename T> __device__ __forceinline__ void dequantize(int step, u32 (&operands)[4]) const {
        const int part = step * GROUPS / 4;
        const u32 zero = ZEROS ? zeros[part] : 0x0808u;
        T::unpack(codes.v[step], T::low_shift(zero & 0xFF), T::high_shift(zero >> 8), operands);
        T::scale(operands, scales[part]);
    }
};
