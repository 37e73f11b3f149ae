// Threads that wait for each other, and the shared memory that they see. See machine.h.

#include "state.h"

namespace machine {

namespace {

constexpr u32 OWN_BITS = 24;

}  // namespace

std::pair<Block *, u32> located(u32 address, u32 bytes, u32 alignment) {
    Block *block = current->block;
    if (const u32 rank = address >> OWN_BITS) {
        if (rank > block->cluster->blocks.size()) fail("the cluster has no block %u", rank - 1);
        block = block->cluster->blocks[rank - 1].get();
        if (!block->alive) fail("touches shared memory of a block that has ended");
    }
    const u32 own = address & ((1u << OWN_BITS) - 1);
    if (own < RESERVED_BYTES || own + bytes > block->static_end)
        fail("%u bytes at shared address %u are outside of the block's memory", bytes, own);
    check_aligned(own, alignment, "shared memory");
    return {block, own};
}

const u8 *settled(Block &block, u32 own, u32 bytes) {
    for (u32 i = own / 16; i <= (own + bytes - 1) / 16; ++i)
        if (block.in_flight[i]) fail("reads shared address %u while a copy to it is under way", own);
    return block.memory.data() + own;
}

u32 lane() { return current->index % 32; }

u8 *dynamic_shared() { return current->block->memory.data() + RESERVED_BYTES; }

u8 *static_shared(u32 variable, u32 bytes) {
    Block &block = *current->block;
    const auto [found, added] = block.variables.try_emplace(variable, block.static_end);
    if (added) block.static_end += (bytes + 15) / 16 * 16;
    if (block.static_end > block.memory.size()) fail("more static shared memory than 48 KiB");
    return block.memory.data() + found->second;
}

u32 shared_address(const void *pointer) {
    const std::ptrdiff_t own = (const u8 *)pointer - current->block->memory.data();
    if (own < 0 || own > (std::ptrdiff_t)current->block->memory.size()) fail("an address is not of shared memory");
    return (u32)own;
}

u32 address_in_block(u32 address, u32 rank) { return (rank + 1) << OWN_BITS | address; }

const u8 *readable(u32 address, u32 bytes) {
    const auto [block, own] = located(address, bytes, bytes);
    return settled(*block, own, bytes);
}

u8 *writable(u32 address, u32 bytes) {
    const auto [block, own] = located(address, bytes, bytes);
    settled(*block, own, bytes);
    return block->memory.data() + own;
}

void check_aligned(u64 address, u32 bytes, const char *what) {
    if (address % bytes) fail("%s at address %llu, which is no multiple of %u", what, address, bytes);
}

const LaneWords *meet(std::initializer_list<u32> words) {
    Warp &mine = warp();
    LaneWords *const sets[] = {mine.words[0], mine.words[1]};
    std::size_t i = 0;
    for (const u32 word : words) sets[mine.meeting.generation % 2][lane()][i++] = word;
    return sets[meet_and([] {}) % 2];
}

void named_barrier(u32 barrier, u32 threads) {
    Meeting &meeting = current->block->named[barrier];
    if (threads % 32 || (meeting.arrived && meeting.threads != threads))
        fail("barrier %u is waited for by %u threads, but by %u before", barrier, threads, meeting.threads);
    meeting.threads = threads;
    const u32 generation = meeting.generation;
    if (++meeting.arrived == threads)
        meeting.arrived = 0, ++meeting.generation;
    else
        wait_while(&meeting.generation, generation, "a barrier of its block");
}

void cluster_arrive() {
    Cluster &cluster = *current->block->cluster;
    current->block->cluster_generation[current->index] = cluster.generation;
    ++cluster.arrived;
    cluster.settle();
}

void cluster_wait() {
    const u32 generation = current->block->cluster_generation[current->index];
    wait_while(&current->block->cluster->generation, generation, "its cluster");
}

}  // namespace machine
