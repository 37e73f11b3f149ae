// What CUDA C++ has beyond C++, as far as our kernels use it.

#pragma once

#include <cmath>
#include <type_traits>

#include "ptx.h"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)

using machine::blockDim, machine::blockIdx, machine::gridDim, machine::threadIdx;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float __expf(float x) { return std::exp(x); }
template <typename T> T __ldcg(const T *from) { return *from; }
template <typename T> void __stcg(T *to, T value) { *to = value; }

inline unsigned __cvta_generic_to_shared(const void *pointer) { return machine::shared_address(pointer); }
inline void __threadfence() {}
inline void __syncthreads() { machine::named_barrier(0, blockDim.x); }
inline void __syncwarp() { machine::meet({}); }
