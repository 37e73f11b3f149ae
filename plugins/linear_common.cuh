// Half precision as packed 32-bit words, INT4 codes to 16-bit floats, loads, and dependent launch: what the INT4
// linears in CUDA C++ share. NVRTC has no headers, so everything is built from PTX.

#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Words4 {
    u32 v[4];
};

__device__ __forceinline__ Words4 load_once(const void *p) {
    Words4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "l"(p));
    return r;
}

__device__ __forceinline__ Words4 load_shared_by_blocks(const void *p) {
    Words4 r;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "l"(p));
    return r;
}

template <u32 MASK, u32 MAGIC> __device__ __forceinline__ u32 pick(u32 word) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(word), "n"(MASK), "n"(MAGIC));
    return r;
}

// A 16-bit float type: how codes become (code - zero), exactly, and how products are formed.
struct Fp16 {
    // 0x6400 | code is 1024 + code; 0x6400 | code << 4 is 1024 + 16 code. `low` and `high` are the negated
    // zero points of the rows that use the first and the second form: -(1024 + zero) and -(64 + zero).
    static __device__ __forceinline__ u32 low_shift(u32 zero) { return (0xE400u + zero) * 0x10001u; }
    static __device__ __forceinline__ u32 high_shift(u32 zero) { return (0xD400u + (zero << 4)) * 0x10001u; }
    static __device__ __forceinline__ void unpack(u32 word, u32 low, u32 high, u32 a[4]) {
        u32 next = word >> 8;
        u32 sixteenth = 0x2C002C00u;
        asm("add.f16x2 %0, %1, %2;" : "=r"(a[0]) : "r"(pick<0x000F000Fu, 0x64006400u>(word)), "r"(low));
        asm("fma.rn.f16x2 %0, %1, %2, %3;"
            : "=r"(a[1]) : "r"(pick<0x00F000F0u, 0x64006400u>(word)), "r"(sixteenth), "r"(high));
        asm("add.f16x2 %0, %1, %2;" : "=r"(a[2]) : "r"(pick<0x000F000Fu, 0x64006400u>(next)), "r"(low));
        asm("fma.rn.f16x2 %0, %1, %2, %3;"
            : "=r"(a[3]) : "r"(pick<0x00F000F0u, 0x64006400u>(next)), "r"(sixteenth), "r"(high));
    }
    // Multiply the A fragment of 16 rows by their scales: row g's in the low half of `pair`, row g + 8's in the high.
    static __device__ __forceinline__ void scale(u32 a[4], u32 pair) {
        u32 first = (pair & 0xFFFF) * 0x10001u, second = (pair >> 16) * 0x10001u;
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = product(a[i], i % 2 ? second : first);
    }
    static __device__ __forceinline__ u32 product(u32 x, u32 y) {
        asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
        return x;
    }
    static __device__ __forceinline__ void mma(float d[4], const u32 a[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ u16 from_float(float f) {
        u16 r;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f));
        return r;
    }
    static __device__ __forceinline__ float to_float(u16 h) {
        float r;
        asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h));
        return r;
    }
};

struct Bf16 {
    // 0x4300 | code is 128 + code.
    static __device__ __forceinline__ u32 low_shift(u32 zero) { return (0xC300u + zero) * 0x10001u; }
    static __device__ __forceinline__ u32 high_shift(u32 zero) { return low_shift(zero); }
    static __device__ __forceinline__ u32 shifted(u32 code, u32 shift) {
        u32 r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(code), "r"(0x3F803F80u), "r"(shift));
        return r;
    }
    static __device__ __forceinline__ void unpack(u32 word, u32 low, u32 high, u32 a[4]) {
        a[0] = shifted(pick<0x000F000Fu, 0x43004300u>(word), low);
        a[1] = shifted(pick<0x000F000Fu, 0x43004300u>(word >> 4), high);
        a[2] = shifted(pick<0x000F000Fu, 0x43004300u>(word >> 8), low);
        a[3] = shifted(pick<0x000F000Fu, 0x43004300u>(word >> 12), high);
    }
    static __device__ __forceinline__ void scale(u32 a[4], u32 pair) {
        u32 first = (pair & 0xFFFF) * 0x10001u, second = (pair >> 16) * 0x10001u;
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = product(a[i], i % 2 ? second : first);
    }
    static __device__ __forceinline__ u32 product(u32 x, u32 y) {
        asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(0x80008000u));
        return x;
    }
    static __device__ __forceinline__ void mma(float d[4], const u32 a[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ u16 from_float(float f) {
        u16 r;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f));
        return r;
    }
    static __device__ __forceinline__ float to_float(u16 h) { return __uint_as_float((u32)h << 16); }
};

// Programmatic dependent launch: the next kernel may start, and this one may read what the previous one wrote.
// Both do nothing where the launch did not ask for it, and before SM 90.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
