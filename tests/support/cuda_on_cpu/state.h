// What the emulated GPU consists of, for its own parts alone.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "machine.h"

namespace machine {

constexpr u32 SHARED_BYTES = 228 * 1024, RESERVED_BYTES = 1024, STATIC_BYTES = 48 * 1024;
constexpr u8 POISON = 0xFF;  // not a number in every float type

struct Block;

struct Thread {
    ucontext_t first;
    jmp_buf here;
    u32 index = 0;
    Block *block = nullptr;
    bool started = false, ended = false;
    const u32 *watched = nullptr;  // sleeps while this has `value`
    u32 value = 0;
    const char *reason = "";

    bool runnable() const { return !ended && (!watched || *watched != value); }
};

// Where a fixed number of threads wait for each other, again and again.
struct Meeting {
    u32 arrived = 0, generation = 0, threads = 0;
};

struct Product {
    bool brain;
    u32 columns;
    u64 descriptor;
    float *sums[32];
    const u32 *fragments[32];
};

struct Warp {
    Block *block = nullptr;
    u32 first = 0, lanes = 0;
    u32 sloth = 0;  // of 16 turns, so many are passed
    Meeting meeting;
    LaneWords words[2][32];
    std::deque<Product> products;
    std::deque<u32> groups;  // products of each
    u32 issued[32] = {};     // by each lane since the last group
    u64 all_issued = 0;
};

struct Barrier {
    u32 count = 0, phase = 0;
    int pending = 0;
    long bytes = 0;
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    u32 arrived = 0, alive = 0, generation = 0;

    void settle() {
        if (arrived && arrived >= alive) arrived = 0, ++generation;
    }
};

struct Block {
    Cluster *cluster = nullptr;
    Dimensions index{};
    u32 alive = 0, static_end = 0;
    u8 *stacks = nullptr;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<u32> cluster_generation;  // that a thread arrived in
    std::vector<u8> memory, in_flight;    // the latter a flag for each 16 bytes
    std::map<u32, Barrier> barriers;
    std::map<u32, Meeting> named;
    std::map<u32, u32> variables;
    u32 copies = 0;
};

extern Launch launch;
extern Thread *current;  // null while the scheduler runs
extern u64 round_number;
extern u32 longest_delay;  // of a copy, in rounds

u32 random_below(u32 end);

inline Warp &warp() { return current->block->warps[current->index / 32]; }

// Where an address of shared memory leads, own or of the cluster's, after checks.
std::pair<Block *, u32> located(u32 address, u32 bytes, u32 alignment);

// Memory that is read: fails where a copy to it is under way.
const u8 *settled(Block &block, u32 own, u32 bytes);

// The 128-byte swizzle: 16-byte parts of a row of 128 bytes change places, differently in each of 8 rows.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// Meet the warp's lanes; the last one does `action` before all go on.
template <typename Action> u32 meet_and(Action action) {
    Meeting &meeting = warp().meeting;
    const u32 generation = meeting.generation;
    if (++meeting.arrived == warp().lanes) {
        action();
        meeting.arrived = 0;
        ++meeting.generation;
    } else {
        wait_while(&meeting.generation, generation, "its warp");
    }
    return generation;
}

// Copies of all blocks that are under way.
bool any_copy();
void skip_to_next_copy();
void deliver_copies();
void forget_copies();

}  // namespace machine
