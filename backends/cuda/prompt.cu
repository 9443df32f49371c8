// Products of a prompt's tokens with a matrix of the weight arena, as the decode kernel's stream has it. The generated
// header (layout/prompt.py) stands before this text: kTokens of a tile, kGroups warpgroups of 64 rows each, kBlocks K
// blocks of 32 values that are multiplied at once, kHalves of them a stage of the ring, kStages, kStored tokens that are
// stored at once, the Weights, and multiply() of 64 rows by kTokens by 16 values.
//
// One warpgroup copies, the others multiply. A thread's 16 bytes of a fragment are the registers that wgmma takes of
// two blocks of 16 values, so that K runs in the order of those registers and x is laid out in it (kog_arrange). Narrow
// weights become these registers while the products before run: each fragment of codes is kPack blocks.
#include <kog/prompt/hopper.h>
#include <kog/prompt/pieces.h>

namespace kog {

constexpr int kRows = 64 * kGroups, kThreads = 128 * kGroups;
constexpr int kScalesAt = kRows / 8 * kPieceBytes, kWeightBytes = kScalesAt + kRows / 8 * kScaleBytes;
constexpr int kXBytes = kTokens * kStageBlocks * 64, kStageBytes = kWeightBytes + kXBytes;
constexpr int kWeightWarps = 2, kPieces = kRows / 8 / kWeightWarps;  // a warp's
constexpr int kSums = kTokens / 2;                                   // of a thread
constexpr int kOutBytes = kStored * 128;                             // a warpgroup's
// Of a wait, ns: a pass on several GPUs may wait for a late one as long as a kernel does (backend.py), ahead of this.
constexpr u64 kPatience = 10000000000;
static_assert(sizeof(Product) == kProductBytes);
static_assert(kSharedBytes == kStages * (kStageBytes + 16) + kGroups * kOutBytes + 16 + 1024);

KOG_DEVICE void wait_barrier(u64* barrier, u32 parity) {
  if (barrier_try(barrier, parity)) return;
  u64 begun = nanoseconds();
  while (!barrier_try(barrier, parity))
    if (nanoseconds() - begun > kPatience) __trap();
}

struct Shared {
  u8 *x, *weights, *out;  // of each stage
  u64 *full, *empty;
  volatile int* last;
};
KOG_DEVICE Shared shared_parts() {
  u8* memory = shared_memory();
  memory += (1024 - (shared_address(memory) & 1023)) & 1023;
  u8 *weights = memory + kStages * kXBytes, *out = memory + kStages * kStageBytes;
  u64* barriers = reinterpret_cast<u64*>(out + kGroups * kOutBytes);
  return {memory, weights, out, barriers, barriers + kStages, reinterpret_cast<int*>(barriers + 2 * kStages)};
}

struct Stage {
  int index = 0;
  u32 phase = 0;
  KOG_DEVICE void next() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

KOG_DEVICE void copy_weights(const Product& p, const Walk& walk, const Shared& shared, int warp) {
  Stage stage;
  u32 reciprocal = ring_slot_reciprocal(p);
  for (int i = 0; i < walk.count; i++) {
    Segment segment = walk.at(p, i);
    const int4* groups = p.groups + (place_of(p, segment.tile).row_tile * kWeightWarps + warp) * kPieces;
    Pieces pieces[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; j++) pieces[j] = Pieces(groups[j]);
    for (int k = segment.first; k < segment.last; k++) {
      u64* full = shared.full + stage.index;
      wait_barrier(shared.empty + stage.index, stage.phase ^ 1);
      barrier_expect(full, kPieces * kPieceBytes);
#pragma unroll
      for (int j = 0; j < kPieces; j++) {
        u32 to = shared_address(shared.weights) + stage.index * kWeightBytes, piece = warp * kPieces + j;
        const u8* codes = pieces[j].codes(p, k * kFragments, reciprocal);
        bulk_copy(to + piece * kPieceBytes, codes, kPieceBytes, shared_address(full));
      }
      stage.next();
    }
  }
}

// By a whole warp: bulk copies of 16 bytes took as long as those of codes (benchmarks/cuda-log.md#narrow-prompts).
KOG_DEVICE void copy_scales(const Product& p, const Walk& walk, const Shared& shared, int lane) {
  constexpr int kEach = kScaleBytes > 0 ? kScaleBytes / 16 : 1;  // copies a piece
  constexpr int kCopies = kRows / 8 * kEach, kOwn = (kCopies + 31) / 32;
  Stage stage;
  u32 reciprocal = ring_slot_reciprocal(p);
  for (int i = 0; i < walk.count; i++) {
    Segment segment = walk.at(p, i);
    const int4* groups = p.groups + place_of(p, segment.tile).row_tile * (kRows / 8);
    Pieces pieces[kOwn];
#pragma unroll
    for (int j = 0; j < kOwn; j++) pieces[j] = Pieces(groups[(32 * j + lane) % kCopies / kEach]);
    for (int k = segment.first; k < segment.last; k++) {
      u32 full = shared_address(shared.full + stage.index);
      u32 to = shared_address(shared.weights) + stage.index * kWeightBytes + kScalesAt;
      wait_barrier(shared.empty + stage.index, stage.phase ^ 1);
#pragma unroll
      for (int j = 0; j < kOwn; j++) {
        int copy = 32 * j + lane;
        const u8* scales = pieces[j].scales(p, k * kFragments, pieces[j].codes(p, k * kFragments, reciprocal));
        if (copy < kCopies) copy_16(to + copy * 16, scales + copy % kEach * 16);
      }
      arrive_behind_copies(full);
      stage.next();
    }
  }
}

KOG_DEVICE void copy_x(const Product& p, const Walk& walk, const Shared& shared) {
  Stage stage;
  u64 step = static_cast<u64>(p.padded) * 128;  // 64 values of K
  for (int i = 0; i < walk.count; i++) {
    Segment segment = walk.at(p, i);
    const u8* from = p.x + static_cast<u64>(place_of(p, segment.tile).token_tile * kTokens) * 128;
    from += segment.first * (kStageBlocks / 2) * step;
    for (int k = segment.first; k < segment.last; k++) {
      u64* full = shared.full + stage.index;
      wait_barrier(shared.empty + stage.index, stage.phase ^ 1);
      barrier_expect(full, kXBytes);
      u32 to = shared_address(shared.x) + stage.index * kXBytes;
#pragma unroll
      for (int j = 0; j < kStageBlocks / 2; j++, from += step)
        bulk_copy(to + j * kTokens * 128, from, kTokens * 128, shared_address(full));
      stage.next();
    }
  }
}

KOG_DEVICE ThreadWords load_words(u32 at) {
  uint4 v = load_shared(at);
  return {v.x, v.y, v.z, v.w};
}

using Fragments = ThreadWords[kBlocks][2];

struct Consumer {
  const Product& p;
  const Walk& walk;
  const Shared& shared;
  int group, warp, lane;  // warp of its group
  Stage stage;
  int step = 0;  // the stage's, of K
  float row_scales[2] = {1, 1};
  float sums[kSums];

  KOG_DEVICE void load(Fragments& a, int half) {
    if (half == 0) wait_barrier(shared.full + stage.index, stage.phase);
    int piece = (group * 4 + warp) * 2, begin = stage.index * kWeightBytes;
    u32 at = shared_address(shared.weights) + begin + piece * kPieceBytes + lane * 16;
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int block = half * kBlocks + b, fragment = block / Weights::kPack;
        a[b][r] = load_words(at + r * kPieceBytes + fragment * kFragmentBytes);
        if constexpr (kNarrow) {
          const u8* scales = shared.weights + begin + kScalesAt + (piece + r) * kScaleBytes;
          a[b][r] = widen(a[b][r], scales, step, fragment, block % Weights::kPack, lane / 4, row_scales[r]);
        }
      }
  }
  KOG_DEVICE void multiply_half(Fragments& a, int half) {
    products_begin();
    u64 x = swizzled_rows(shared_address(shared.x) + stage.index * kXBytes);
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      int block = half * kBlocks + b;
      u64 at = x + block / 2 * (kTokens * 128 / 16) + block % 2 * 4;
      multiply(sums, a[b][0].w[0], a[b][1].w[0], a[b][0].w[1], a[b][1].w[1], at);
      multiply(sums, a[b][0].w[2], a[b][1].w[2], a[b][0].w[3], a[b][1].w[3], at + 2);
    }
    products_commit();
  }
  KOG_DEVICE void release(int index) {
    if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty + index);
  }
  KOG_DEVICE void clear() {
#pragma unroll
    for (int j = 0; j < kSums; j++) sums[j] = 0;
  }
  KOG_DEVICE void next() {
    stage.next();
    step++;
  }
  // The fragments of the next half are loaded while the last one's products run. In any other order, or with a way out
  // of the middle of the loop, the compiler runs one product after another.
  KOG_DEVICE void multiply_segment(int steps) {
    Fragments even, odd;
    constexpr int kSecond = kHalves - 1;  // what is odd is a stage of its own, or the second half of one
    clear();
    load(even, 0);
    multiply_half(even, 0);
    int before = stage.index, left = steps * kHalves - 1;
    if constexpr (kHalves == 1) next();
    for (; left > 1; left -= 2) {
      load(odd, kSecond);
      multiply_half(odd, kSecond);
      products_wait<1>();
      if constexpr (kHalves == 1) release(before);
      before = stage.index;
      next();
      load(even, 0);
      multiply_half(even, 0);
      products_wait<1>();
      release(before);
      before = stage.index;
      if constexpr (kHalves == 1) next();
    }
    if (left) {
      load(odd, kSecond);
      multiply_half(odd, kSecond);
      products_wait<0>();
      if constexpr (kHalves == 1) release(before);
      release(stage.index);
      next();
    } else {
      products_wait<0>();
      release(before);
    }
  }
  // Of the rows of a tile whose fragments this thread has.
  KOG_DEVICE void load_row_scales(const Segment& segment) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = place_of(p, segment.tile).row_tile * kRows + group * 64 + warp * 16 + r * 8 + lane / 4;
      row_scales[r] = row < p.rows ? p.row_scales[row] : 1.f;
    }
  }
  KOG_DEVICE float4* part(int share, int slot) const {
    return p.partials + static_cast<u64>(share * 2 + slot) * (kSums / 4) * kThreads + threadIdx.x;
  }
  // Whether this block was the last of a tile's to arrive: it then has the sum of all parts, in the order of K.
  KOG_DEVICE bool join(const Segment& segment) {
    int tile = segment.tile - p.whole, begin = tile * p.steps;
    int first = walk.share_of(begin), last = walk.share_of(begin + p.steps - 1);
    float4* own = part(walk.block, segment.slot);
#pragma unroll
    for (int j = 0; j < kSums / 4; j++)
      own[j * kThreads] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
    release_gpu();
    sync_threads<kThreads>(1);
    if (threadIdx.x == 0) {
      bool is_last = atomicAdd(p.arrived + tile, 1) == last - first;
      if (is_last) p.arrived[tile] = 0;
      *shared.last = is_last;
    }
    sync_threads<kThreads>(1);
    if (!*shared.last) return false;
    acquire_gpu();
    clear();
#pragma unroll(kSums > 32 ? 1 : 4)
    for (int share = first; share <= last; share++) {
      const float4* from = part(share, walk.slot_of(p, share, tile));
#pragma unroll
      for (int j = 0; j < kSums / 4; j++) {
        float4 v = __ldcg(from + j * kThreads);
        sums[4 * j] += v.x, sums[4 * j + 1] += v.y, sums[4 * j + 2] += v.z, sums[4 * j + 3] += v.w;
      }
    }
    return true;
  }
  // The sums of a part of a tile, to a place that no other block writes: what comes next adds them (short_pass.h).
  KOG_DEVICE void store_part(const Segment& segment) {
    int row = group * 64 + warp * 16 + lane / 4, token = 2 * (lane % 4);
    float* part = reinterpret_cast<float*>(p.partials) + static_cast<i64>(walk.block + segment.tile) * kTokens * kRows;
#pragma unroll
    for (int j = 0; j < kSums; j++)
      part[(j / 4 * 8 + token + j % 2) * kRows + row + j / 2 % 2 * 8] = sums[j];
  }
  // A warpgroup's 64 rows of a token are one line of memory.
  KOG_DEVICE void store(const Segment& segment) {
    Place place = place_of(p, segment.tile);
    u8* out = shared.out + group * kOutBytes;
    int t = threadIdx.x % 128, row = place.row_tile * kRows + group * 64 + t % 8 * 8;
    u16* y = p.y + static_cast<u64>(place.token_tile * kTokens + t / 8) * p.rows + row;
#pragma unroll
    for (int first = 0; first < kTokens; first += kStored) {
#pragma unroll
      for (int j = 0; j < kStored / 16; j++) {
        float* v = sums + (first + 16 * j) / 2;
        int token = 16 * j + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
        store_matrices(shared_address(out) + token * 128 + (piece ^ token % 8) * 16,
                       round_pair<kF16>(v[0], v[1]), round_pair<kF16>(v[2], v[3]),
                       round_pair<kF16>(v[4], v[5]), round_pair<kF16>(v[6], v[7]));
      }
      sync_threads<128>(2 + group);
#pragma unroll
      for (int j = 0; j < kStored / 16; j++) {
        int token = 16 * j + t / 8;
        uint4 v = *reinterpret_cast<uint4*>(out + token * 128 + (t % 8 ^ token % 8) * 16);
        if (row < p.rows && place.token_tile * kTokens + first + token < p.tokens)
          *reinterpret_cast<uint4*>(y + static_cast<u64>(first + 16 * j) * p.rows) = v;
      }
      sync_threads<128>(2 + group);
    }
  }
};

}  // namespace kog

KOG_KERNEL void __launch_bounds__(128 * (kog::kGroups + 1), 1)
    kog_product(const __grid_constant__ kog::Product p) {
  using namespace kog;
  Shared shared = shared_parts();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(shared.full + i, kWeightWarps + 1 + (kRecord > 0 ? 32 : 0));
      barrier_init(shared.empty + i, kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  start_launch_behind();
  Walk walk(p, blockIdx.x, gridDim.x);
  int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  if (group == kGroups) {
    if constexpr (kGroups == 2) give_registers<56>();
    // Weights are nobody's output: their copies do not wait for the launch before.
    if (warp < kWeightWarps && elected()) {
      copy_weights(p, walk, shared, warp);
    } else if (warp == kWeightWarps && elected()) {
      wait_for_launch_before();
      copy_x(p, walk, shared);
    } else if (warp > kWeightWarps) {
      if constexpr (kRecord > 0) copy_scales(p, walk, shared, threadIdx.x % 32);
    }
  } else {
    if constexpr (kGroups == 2) take_registers<224>();
    wait_for_launch_before();  // what is written here may still be read
    Consumer consumer{p, walk, shared, group, warp, static_cast<int>(threadIdx.x % 32)};
    for (int i = 0; i < walk.count; i++) {
      Segment segment = walk.at(p, i);
      if constexpr (kRowScales) consumer.load_row_scales(segment);
      consumer.step = segment.first;
      consumer.multiply_segment(segment.last - segment.first);
      if constexpr (kParts) {
        consumer.store_part(segment);
        continue;
      }
      if (segment.last - segment.first < p.steps && !consumer.join(segment)) continue;
      consumer.store(segment);
    }
  }
  __syncthreads();
}

// x [tokens, cols] as kog_product takes it: [K / 64][padded tokens][64 values], K in the order of the stream's registers,
// a row's pieces of 16 bytes swizzled. A thread takes 32 values of a token, zeros past the ends. Of each part
// of K the blocks of one fragment follow each other.
namespace kog {
struct Arrange {
  const uint4* x;
  uint4* out;
  int tokens, padded, cols, slab_shift, steps, pack_shift;
};
static_assert(sizeof(Arrange) == kArrangeBytes);
}  // namespace kog

KOG_KERNEL void __launch_bounds__(kog::kArrangeThreads) kog_arrange(const __grid_constant__ kog::Arrange p) {
  kog::start_launch_behind();
  int i = blockIdx.x * kog::kArrangeThreads + threadIdx.x, half = i % 2, token = i / 2 % p.padded, pair = i / 2 / p.padded;
  int block = 2 * pair + half, fragment = block >> p.pack_shift, slab = fragment >> p.slab_shift;
  int part = fragment - (slab << p.slab_shift), ahead = block - (fragment << p.pack_shift);
  int k = (part * p.steps + (slab << p.pack_shift) + ahead) * 32;
  if (block >= p.steps << p.slab_shift) return;
  kog::wait_for_launch_before();
  kog::u32 words[4][4];
  for (int q = 0; q < 4; q++) {
    uint4 v = {0, 0, 0, 0};
    if (token < p.tokens && k + 8 * q < p.cols)
      v = p.x[(static_cast<kog::u64>(token) * p.cols + k) / 8 + q];
    words[q][0] = v.x, words[q][1] = v.y, words[q][2] = v.z, words[q][3] = v.w;
  }
  uint4* row = p.out + (static_cast<kog::u64>(pair) * p.padded + token) * 8;
  for (int c = 0; c < 4; c++)
    row[(half * 4 + c) ^ token % 8] = {words[0][c], words[1][c], words[2][c], words[3][c]};
}
