// Products of a warpgroup (wgmma), each computed as late as it may be. See machine.h.

#include "state.h"

namespace machine {

namespace {

// Addresses of B's 16 columns by its descriptor: row and half of the columns. Fails where it is not of the one kind
// that our kernels use: 128-byte swizzle, rows of 128 bytes from multiples of 1024.
u32 operand_address(u64 descriptor, u32 row, u32 half) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) fail("wgmma: a descriptor of another kind of swizzle");
    const u32 stride = (u32)(descriptor >> 32 & 0x3FFF) << 4;
    const u32 start = (u32)(descriptor & 0x3FFF) << 4;
    return swizzled(start + row / 8 * stride + row % 8 * 128 + half * 16);
}

template <typename Real> void compute(Block &block, const Product &product) {
    float rows[16][16], columns[16][256], result[16][256] = {};
    fragment_rows<Real>([&](u32 lane, int i) { return product.fragments[lane][i]; }, rows);
    for (u32 column = 0; column < product.columns; ++column)
        for (u32 half = 0; half < 2; ++half) {
            u16 values[8];
            std::memcpy(values, settled(block, operand_address(product.descriptor, column, half), 16), 16);
            for (u32 k = 0; k < 8; ++k) columns[half * 8 + k][column] = Real::to_float(values[k]);
        }
    for (u32 row = 0; row < 16; ++row)
        for (u32 k = 0; k < 16; ++k)
            for (u32 column = 0; column < product.columns; ++column)
                result[row][column] += rows[row][k] * columns[k][column];
    for (u32 lane = 0; lane < 32; ++lane)
        for (u32 i = 0; i < product.columns / 2; ++i)
            product.sums[lane][i] += result[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
}

}  // namespace

void issue_product(bool brain, u32 columns, float *sums, const u32 *fragment, u64 descriptor) {
    Warp &mine = warp();
    u32 committed = 0;
    for (const u32 group : mine.groups) committed += group;
    const u32 place = committed + mine.issued[lane()]++;
    if (place == mine.products.size()) {
        mine.products.push_back({brain, columns, descriptor, {}, {}});
        ++mine.all_issued;
        for (u32 row = 0; row < columns; ++row)
            for (u32 half = 0; half < 2; ++half)
                settled(*current->block, operand_address(descriptor, row, half), 16);
    }
    Product &product = mine.products[place];
    if (product.descriptor != descriptor) fail("wgmma: lanes have different descriptors");
    product.sums[lane()] = sums, product.fragments[lane()] = fragment;
}

void commit_products() {
    meet_and([] {
        Warp &mine = warp();
        for (u32 lane = 0; lane < 32; ++lane)
            if (mine.issued[lane] != mine.issued[0]) fail("wgmma: lanes issued different numbers of products");
        mine.groups.push_back(mine.issued[0]);
        std::memset(mine.issued, 0, sizeof mine.issued);
    });
}

void wait_for_products(u32 groups) {
    meet_and([groups] {
        Warp &mine = warp();
        for (; mine.groups.size() > groups; mine.groups.pop_front())
            for (u32 i = 0; i < mine.groups.front(); ++i, mine.products.pop_front()) {
                const Product &product = mine.products.front();
                product.brain ? compute<Brain>(*mine.block, product) : compute<Half>(*mine.block, product);
            }
    });
}

}  // namespace machine
