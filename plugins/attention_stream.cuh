// Decode attention's building blocks: loads, 16-bit floats, and the formats of KV rows. NVRTC has no headers, so
// everything is built from PTX. Formulas of the formats: `sits_trt/ops/kv_quant.py`.

#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

enum { NATIVE = 0, INT8 = 1, FP8 = 2, INT4 = 3 };

// 16 bytes, or 4, from global to shared memory without a register; zeros where `there` is false.
__device__ __forceinline__ void copy_16(u32 to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// COUNT words (1, 2 or 4) of shared memory.
template <int COUNT> __device__ __forceinline__ void read_words(u32 *to, u32 from) {
    if constexpr (COUNT == 4)
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
    else if constexpr (COUNT == 2)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
}

__device__ __forceinline__ void write_half(u32 to, u16 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}
__device__ __forceinline__ void write_byte(u32 to, u32 x) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// Programmatic dependent launch: what comes before `wait_for_inputs` may run beside the kernel before this one.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 floats_to_halves(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
    u32 y;
    asm("add.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// The model's 16-bit type.
template <bool B> struct Real {
    static __device__ __forceinline__ float to_float(u16 x) {
        if constexpr (B) return __uint_as_float((u32)x << 16);
        else return half_to_float(x);
    }
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 y;
        if constexpr (B) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        else y = floats_to_halves(low, high);
        return y;
    }
    static __device__ __forceinline__ u16 from_float(float x) { return (u16)pack(x, 0.f); }
};

// d += a * b, 16 by 8 by 16.
template <bool B> __device__ __forceinline__ void multiply(float d[4], u32 a0, u32 a1, u32 a2, u32 a3, const u32 b[2]) {
    if constexpr (B)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
}

// Lane (g, t) gives elements 2t, 2t+1 of row g of an 8 by 8 matrix and gets those of column g.
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Codes as pairs of float16. 0x6400 | code is 1024 + code; an INT8 byte with bit 7 flipped is code + 128.
template <int F> struct Codes {
    static constexpr float BIAS = F == INT8 ? 1152.f : F == INT4 ? 1032.f : 0.f;
    static __device__ __forceinline__ u32 fp8_pair(u32 bytes) {
        u32 y = 0;
#if __CUDA_ARCH__ >= 890
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)bytes));
#endif
        return y;
    }
    // Bytes 2*which and 2*which + 1 of a word, and BIAS more.
    static __device__ __forceinline__ u32 along(u32 word, int which) {
        if constexpr (F == FP8) return fp8_pair(which ? word >> 16 : word);
        else return __byte_perm(F == INT8 ? word ^ 0x80808080u : word, 0x64646464u, which ? 0x4342 : 0x4140);
    }
    // The same byte of two words, exactly.
    static __device__ __forceinline__ u32 across(u32 one, u32 other, int byte) {
        if constexpr (F == FP8) return fp8_pair(__byte_perm(one, other, byte | (byte + 4) << 4));
        u32 halves = __byte_perm(one, other, byte | (byte + 4) << 8);
        asm("lop3.b32 %0, %0, %1, %2, 0x6A;" : "+r"(halves)
            : "r"(0x00FF00FFu), "r"(F == INT8 ? 0x64806480u : 0x64006400u));
        return add_halves(halves, F == INT8 ? 0xE480E480u : 0xE408E408u);
    }
};

// Scale of a row and its codes, as `kv_quant.quantize_kv`; `largest` is the row's largest absolute value.
template <int F> __device__ __forceinline__ float row_scale(float largest) {
    constexpr float top = F == INT8 ? 127.f : F == FP8 ? 448.f : 7.f;
    return fmaxf(half_to_float(float_to_half(__fdiv_rn(largest, top))), 6.103515625e-5f);
}

// The code of x, as its bits.
template <int F> __device__ __forceinline__ u32 encode(float x, float scale) {
    float scaled = __fdiv_rn(x, scale);
    if constexpr (F == FP8) {
        u16 pair = 0;
#if __CUDA_ARCH__ >= 890
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(scaled));
#endif
        return pair & 0xFF;
    } else {
        constexpr float top = F == INT8 ? 127.f : 7.f;
        int code = (int)rintf(fminf(fmaxf(scaled, -top), top));
        return F == INT8 ? (u32)code & 0xFF : (u32)(code + 8);
    }
}
