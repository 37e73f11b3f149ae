// Threads as fibers, and the order in which they run. See machine.h.

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "state.h"

namespace machine {

Dimensions threadIdx, blockIdx, blockDim, gridDim;
Launch launch;
Thread *current;
u64 round_number;
u32 longest_delay;

namespace {

constexpr u32 STACK_BYTES = 1 << 17;

void (*kernel)(void **);
void **arguments;
jmp_buf scheduler, outside;  // where a thread that waits, and where a launch that failed goes on
char message[4096];
u64 random_state;
std::deque<std::unique_ptr<Cluster>> running;
std::vector<u8 *> free_stacks;

void leave() {
    if (!_setjmp(current->here)) _longjmp(scheduler, 1);
}

void thread_main() {
    kernel(arguments);
    current->ended = true;
    --current->block->alive;
    Cluster &cluster = *current->block->cluster;
    --cluster.alive;
    cluster.settle();
    _longjmp(scheduler, 1);
}

// Let a thread run until it waits, ends or fails.
__attribute__((noinline)) void resume(Thread &thread) {
    current = &thread;
    thread.watched = nullptr;
    threadIdx = {thread.index, 0, 0};
    blockIdx = thread.block->index;
    if (_setjmp(scheduler)) {
        current = nullptr;
        return;
    }
    if (thread.started) _longjmp(thread.here, 1);
    thread.started = true;
    setcontext(&thread.first);
}

void start(Cluster &cluster, u32 number) {
    const u32 threads = launch.threads;
    auto owner = std::make_unique<Block>();
    Block &block = *owner;
    cluster.blocks.push_back(std::move(owner));
    block.cluster = &cluster;
    block.index = {number % launch.grid_x, number / launch.grid_x % launch.grid_y,
                   number / launch.grid_x / launch.grid_y};
    block.memory.assign(RESERVED_BYTES + launch.shared_bytes + STATIC_BYTES, POISON);
    block.in_flight.assign(block.memory.size() / 16 + 1, 0);
    block.static_end = RESERVED_BYTES + (launch.shared_bytes + 15) / 16 * 16;
    block.alive = threads;
    cluster.alive += threads;
    if (free_stacks.empty())
        free_stacks.push_back((u8 *)mmap(nullptr, (std::size_t)threads * STACK_BYTES, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    block.stacks = free_stacks.back();
    free_stacks.pop_back();
    block.threads = std::vector<Thread>(threads);
    block.cluster_generation.assign(threads, 0);
    for (u32 i = 0; i < threads; ++i) {
        Thread &thread = block.threads[i];
        thread.index = i, thread.block = &block;
        getcontext(&thread.first);
        thread.first.uc_stack.ss_sp = block.stacks + (std::size_t)i * STACK_BYTES;
        thread.first.uc_stack.ss_size = STACK_BYTES;
        thread.first.uc_link = nullptr;
        makecontext(&thread.first, thread_main, 0);
    }
    block.warps = std::vector<Warp>((threads + 31) / 32);
    for (u32 i = 0; i < block.warps.size(); ++i) {
        Warp &warp = block.warps[i];
        warp.block = &block, warp.first = i * 32;
        warp.lanes = threads - warp.first < 32 ? threads - warp.first : 32;
        // Most warps keep pace; some fall far behind.
        warp.sloth = random_below(4) ? random_below(4) : 15;
    }
}

// Whether any thread ran.
bool run_round() {
    std::vector<Warp *> warps;
    for (auto &cluster : running)
        for (auto &block : cluster->blocks)
            for (Warp &warp : block->warps) warps.push_back(&warp);
    for (std::size_t i = warps.size(); i > 1; --i) std::swap(warps[i - 1], warps[random_below((u32)i)]);
    bool ran = false;
    for (Warp *warp : warps) {
        if (random_below(16) < warp->sloth) continue;
        const u32 begin = random_below(warp->lanes);
        for (u32 i = 0; i < warp->lanes; ++i) {
            Thread &thread = warp->block->threads[warp->first + (begin + i) % warp->lanes];
            if (!thread.runnable()) continue;
            resume(thread);
            ran = true;
        }
    }
    return ran;
}

void check_ended(const Block &block) {
    if (block.copies) fail("block %u ended while %u copies into it were under way", block.index.x, block.copies);
    for (const Warp &warp : block.warps) {
        if (!warp.products.empty()) fail("a warp of block %u ended with products under way", block.index.x);
        if (warp.all_issued != block.warps[warp.first / 128 * 4].all_issued)
            fail("the warps of a warpgroup issued different numbers of products");
    }
}

void retire() {
    for (auto at = running.begin(); at != running.end();) {
        if ((*at)->alive) {
            ++at;
            continue;
        }
        for (auto &block : (*at)->blocks) check_ended(*block);
        for (auto &block : (*at)->blocks) free_stacks.push_back(block->stacks);
        at = running.erase(at);
    }
}

bool any_runnable() {
    for (auto &cluster : running)
        for (auto &block : cluster->blocks)
            for (const Thread &thread : block->threads)
                if (thread.runnable()) return true;
    return false;
}

void report_deadlock() {
    std::map<std::pair<u32, const char *>, u32> waiting;
    for (auto &cluster : running)
        for (auto &block : cluster->blocks)
            for (const Thread &thread : block->threads)
                if (!thread.ended) ++waiting[{block->index.x, thread.reason}];
    char text[2048] = "";
    int at = 0;
    for (const auto &[where, threads] : waiting)
        if (at < (int)sizeof text)
            at += std::snprintf(text + at, sizeof text - at, " %u threads of block %u wait for %s;", threads,
                                where.first, where.second);
    fail("deadlock:%s", text);
}

void run_blocks() {
    const u32 blocks = launch.grid_x * launch.grid_y * launch.grid_z;
    u32 next = 0;
    while (next < blocks || !running.empty()) {
        const u32 clusters = launch.resident > launch.cluster ? launch.resident / launch.cluster : 1;
        while (next < blocks && running.size() < clusters) {
            running.push_back(std::make_unique<Cluster>());
            for (u32 i = 0; i < launch.cluster; ++i) start(*running.back(), next++);
        }
        ++round_number;
        if (!run_round() && !any_runnable()) {
            if (!any_copy()) report_deadlock();
            skip_to_next_copy();
        }
        deliver_copies();
        retire();
    }
}

}  // namespace

u32 random_below(u32 end) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (u32)((random_state >> 16) % end);
}

const char *run(const Launch &wanted, void (*entry)(void **), void **values) {
    launch = wanted, kernel = entry, arguments = values;
    gridDim = {launch.grid_x, launch.grid_y, launch.grid_z}, blockDim = {launch.threads, 1, 1};
    current = nullptr, round_number = 0, random_state = launch.seed * 0x9E3779B97F4A7C15ull + 1;
    longest_delay = 1u << random_below(11);
    const bool failed = _setjmp(outside);
    if (!failed) {
        if (launch.shared_bytes + RESERVED_BYTES > SHARED_BYTES) fail("more shared memory than a block can have");
        run_blocks();
    }
    for (auto &cluster : running)
        for (auto &block : cluster->blocks) free_stacks.push_back(block->stacks);
    for (u8 *stacks : free_stacks) munmap(stacks, (std::size_t)launch.threads * STACK_BYTES);
    free_stacks.clear();
    running.clear();
    forget_copies();
    return failed ? message : nullptr;
}

void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    int at = 0;
    if (current)
        at = std::snprintf(message, sizeof message, "thread %u of block %u: ", current->index, current->block->index.x);
    std::vsnprintf(message + at, sizeof message - at, format, values);
    va_end(values);
    _longjmp(outside, 1);
}

void wait_while(const u32 *word, u32 value, const char *reason) {
    if (*word != value) return;
    current->watched = word, current->value = value, current->reason = reason;
    leave();
}

}  // namespace machine
