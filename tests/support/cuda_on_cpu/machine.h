// A GPU as far as our kernels can tell: blocks of threads that run one at a time, in random order, until they wait.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

namespace machine {

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

struct Dimensions {
    u32 x, y, z;
};

// Of the thread that runs now.
extern Dimensions threadIdx, blockIdx, blockDim, gridDim;
u32 lane();

struct Launch {
    u32 grid_x, grid_y, grid_z, threads, shared_bytes;
    u32 cluster;   // blocks of a cluster
    u32 resident;  // blocks that run at a time
    u32 seed;      // of the order of threads and the delays of copies
};

// Run a kernel's blocks, started in the order of their index. Returns null, or what went wrong.
const char *run(const Launch &launch, void (*kernel)(void **arguments), void **arguments);

// End the launch with a message. The thread does not go on.
[[noreturn]] void fail(const char *format, ...);

// Let others run until a word in memory, which another thread or a copy changes, has another value.
void wait_while(const u32 *word, u32 value, const char *reason);

// Call a kernel with arguments as the CUDA driver takes them: the address of each.
template <typename T> T argument(void *from) {
    T value;
    std::memcpy((void *)&value, from, sizeof value);
    return value;
}
template <typename... Arguments, std::size_t... PLACES>
void call(void (*kernel)(Arguments...), void **arguments, std::index_sequence<PLACES...>) {
    kernel(argument<Arguments>(arguments[PLACES])...);
}
template <typename... Arguments> void call(void (*kernel)(Arguments...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<Arguments...>());
}

// 16-bit floats.

struct Half {
    static float to_float(u16 bits) {
        _Float16 value;
        std::memcpy(&value, &bits, 2);
        return value;
    }
    static u16 from_double(double value) {
        // The processor converts float32 alone; what is none takes a function of the compiler's.
        const float single = (float)value;
        const _Float16 rounded = single == value ? (_Float16)single : (_Float16)value;
        u16 bits;
        std::memcpy(&bits, &rounded, 2);
        return bits;
    }
};

struct Brain {
    static float to_float(u16 half) {
        const u32 bits = (u32)half << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    // To the nearest, ties to even. Our kernels' sums of two products and their products have 24 bits at most, or are
    // float32 before.
    static u16 from_double(double value) {
        const float single = (float)value;
        u32 bits;
        std::memcpy(&bits, &single, 4);
        if (single != single) return 0x7FFF;
        return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

// The 16 by 16 matrix A of a warp: word i of a lane as in mma.m16n8k16.
template <typename Real, typename Words> void fragment_rows(Words word, float (&rows)[16][16]) {
    for (u32 lane = 0; lane < 32; ++lane)
        for (u32 i = 0; i < 4; ++i) {
            const u32 pair = word(lane, i), row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
            rows[row][column] = Real::to_float(u16(pair));
            rows[row][column + 1] = Real::to_float(u16(pair >> 16));
        }
}

// Shared memory. A block's own is at addresses below 2**24; that of block `rank` of the cluster has rank + 1 above them.

u8 *dynamic_shared();
u8 *static_shared(u32 variable, u32 bytes);
template <typename T, u32 VARIABLE> T &shared_variable() { return *(T *)static_shared(VARIABLE, sizeof(T)); }
u32 shared_address(const void *pointer);
u32 address_in_block(u32 address, u32 rank);
const u8 *readable(u32 address, u32 bytes);  // fails where a copy is under way
u8 *writable(u32 address, u32 bytes);
void check_aligned(u64 address, u32 bytes, const char *what);

// Threads that wait for each other.

typedef u32 LaneWords[8];

// Wait for all lanes of the warp and return what each brought. Valid until this lane meets them again.
const LaneWords *meet(std::initializer_list<u32> words);
void named_barrier(u32 barrier, u32 threads);
void cluster_arrive();
void cluster_wait();

// Barriers in shared memory (mbarrier), and copies that complete on them after a while.

void barrier_init(u32 address, u32 count);
void barrier_arrive(u32 address, u32 expected_bytes);
bool barrier_done(u32 address, u32 parity);
void barrier_wait(u32 address, u32 parity);
void copy(u32 to, const void *from, u32 bytes, u32 barrier);

// The fields of `sits_plugins.tensor_map.MatrixMap`, in the place of what the driver would make of them.
struct MatrixMap {
    std::int64_t address, rows, columns, box_rows;
};
void copy_box(u32 to, const MatrixMap &map, int column, int row, u32 barrier);

// Products of a warpgroup (wgmma) are computed as late as they may be: when the warp waits for them.

void issue_product(bool brain, u32 columns, float *sums, const u32 *fragment, u64 descriptor);
void commit_products();
void wait_for_products(u32 groups);

}  // namespace machine
