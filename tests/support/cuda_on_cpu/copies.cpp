// Barriers in shared memory, and copies that complete on them. See machine.h.

#include <algorithm>

#include "state.h"

namespace machine {

namespace {

struct Copy {
    Block *block;
    u32 barrier;
    std::vector<std::pair<u32, u32>> places;  // 16 bytes each: where in shared memory, and in `bytes`
    std::vector<u8> bytes;
    u64 due;
};

std::deque<Copy> copies;

void settle(Barrier &barrier) {
    if (barrier.pending < 0) fail("more arrivals than the %u of a barrier's phase", barrier.count);
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1;
    barrier.pending = (int)barrier.count;
}

Barrier &barrier_at(Block &block, u32 address) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("there is no barrier at shared address %u", address);
    return found->second;
}

void begin_copy(Block &block, u32 barrier, std::vector<std::pair<u32, u32>> places, std::vector<u8> bytes) {
    for (const auto &[to, from] : places) {
        if (block.in_flight[to / 16]) fail("copies to shared address %u, to which another copy is under way", to);
        block.in_flight[to / 16] = 1;
        std::memset(block.memory.data() + to, POISON, 16);
    }
    barrier_at(block, barrier);
    ++block.copies;
    const u64 due = round_number + random_below(longest_delay);
    copies.push_back({&block, barrier, std::move(places), std::move(bytes), due});
}

}  // namespace

bool any_copy() { return !copies.empty(); }

void forget_copies() { copies.clear(); }

void skip_to_next_copy() {
    const auto earlier = [](const Copy &a, const Copy &b) { return a.due < b.due; };
    round_number = std::max(round_number, std::min_element(copies.begin(), copies.end(), earlier)->due);
}

void deliver_copies() {
    for (std::size_t i = 0; i < copies.size();) {
        if (copies[i].due > round_number) {
            ++i;
            continue;
        }
        Copy copy = std::move(copies[i]);
        copies[i] = std::move(copies.back());
        copies.pop_back();
        for (const auto &[to, from] : copy.places) {
            std::memcpy(copy.block->memory.data() + to, copy.bytes.data() + from, 16);
            copy.block->in_flight[to / 16] = 0;
        }
        --copy.block->copies;
        Barrier &barrier = barrier_at(*copy.block, copy.barrier);
        barrier.bytes -= (long)copy.bytes.size();
        settle(barrier);
    }
}

void barrier_init(u32 address, u32 count) {
    const auto [block, own] = located(address, 8, 8);
    block->barriers[own] = {count, 0, (int)count, 0};
}

void barrier_arrive(u32 address, u32 expected_bytes) {
    Barrier &barrier = barrier_at(*current->block, address);
    barrier.bytes += expected_bytes;
    --barrier.pending;
    settle(barrier);
}

bool barrier_done(u32 address, u32 parity) { return barrier_at(*current->block, address).phase != parity; }

void barrier_wait(u32 address, u32 parity) {
    wait_while(&barrier_at(*current->block, address).phase, parity, "a barrier in shared memory");
}

void copy(u32 to, const void *from, u32 bytes, u32 barrier) {
    const auto [block, own] = located(to, bytes, 16);
    check_aligned((u64)from, 16, "a bulk copy from global memory");
    check_aligned(bytes, 16, "the size of a bulk copy");
    std::vector<std::pair<u32, u32>> places;
    for (u32 at = 0; at < bytes; at += 16) places.push_back({own + at, at});
    begin_copy(*block, barrier, std::move(places), {(const u8 *)from, (const u8 *)from + bytes});
}

void copy_box(u32 to, const MatrixMap &map, int column, int row, u32 barrier) {
    constexpr u32 ROW_BYTES = 128;
    const u32 bytes = (u32)map.box_rows * ROW_BYTES;
    const auto [block, own] = located(to, bytes, 1024);
    check_aligned((u64)map.address | (u64)map.columns * 2, 16, "a matrix of a tensor map");
    std::vector<std::pair<u32, u32>> places;
    std::vector<u8> box(bytes, 0);
    for (u32 i = 0; i < map.box_rows; ++i) {
        for (u32 at = 0; at < ROW_BYTES; at += 16)
            places.push_back({swizzled(own + i * ROW_BYTES + at), i * ROW_BYTES + at});
        const std::int64_t here = row + i, left = (map.columns - column) * 2;
        if (here >= map.rows || left <= 0) continue;
        std::memcpy(box.data() + i * ROW_BYTES, (const u8 *)map.address + (here * map.columns + column) * 2,
                    left < ROW_BYTES ? left : ROW_BYTES);
    }
    begin_copy(*block, barrier, std::move(places), std::move(box));
}

}  // namespace machine
