// Who survives min_p, top_k and top_p (kog_triton/sampling/definition.py, survivors): exact, in a
// few exchanges of histograms, for tokens that a top-p check leaves open (top_p_check.h).
//
// All three rules are cuts on the logit. An id's depth is how many floats lie between its logit and
// the largest one; a cut is found by bins of depths, then bins within the bin that holds it, until
// that has one id or one depth. Counts and weights are integers: their sums have no order.
//
//   histogram   a block's own ids -> its part of every bin -> a bin's owner adds all parts -> all
//   levels      0: bins as wide as an eighth of their depth or less; below: 256th parts of a bin
#pragma once
#include <kog/exchange.h>

namespace kog {

constexpr int kLevels = 5;
// The number of a token's first exchange of levels: peaks and top-p checks come before.
constexpr int kFirstLevel = 3;
static_assert(kFirstLevel + 2 * kLevels < kExchanges, "a cut takes the exchange of logprobs");

// The depths first .. first + 2^shift - 1.
struct Bin {
  u32 first;
  int shift;
};

struct Sums {
  u64 weight = 0;
  u32 count = 0;

  KOG_DEVICE Sums plus(const Sums& s) const { return {weight + s.weight, count + s.count}; }
  KOG_DEVICE Sums minus(const Sums& s) const { return {weight - s.weight, count - s.count}; }
  KOG_DEVICE Sums of_thread(int thread) const {
    return {shuffle(weight, thread), shuffle(count, thread)};
  }
};

// One histogram, in shared memory.
struct Level {
  u64 weights[kBins];
  u32 counts[kBins];
  u32 first;  // bin 0 begins here
  int shift;  // of every bin; level 0 has none

  KOG_DEVICE Sums sums(int bin) const { return {weights[bin], counts[bin]}; }
};
static_assert(kLevels * sizeof(Level) <= kSamplingBytes, "the levels outgrew the partial sums");

// What a thread adds of a level, and what all threads add.
constexpr int kOwnBins = kBins / kWarpThreads;
KOG_DEVICE Sums own_sums(const Block& b, const Level& level) {
  Sums sum;
#pragma unroll 1
  for (int i = 0; i < kOwnBins; i++) sum = sum.plus(level.sums(kOwnBins * b.in_warp + i));
  return sum;
}
KOG_DEVICE Sums total_of(const Block& b, const Level& level) {
  Sums own = own_sums(b, level);
  return {sum_of_warp(own.weight), sum_of_warp(own.count)};
}

KOG_DEVICE int coarse_bin(u32 depth) {
  int top = bit_length(static_cast<u64>(depth)) - 1;
  return depth < 16 ? static_cast<int>(depth)
                    : 16 + 8 * (top - 4) + static_cast<int>(depth >> (top - 3) & 7);
}
KOG_DEVICE Bin coarse_depths(int bin) {
  if (bin < 16) return {static_cast<u32>(bin), 0};
  int shift = (bin - 16) / 8 + 1;
  return {static_cast<u32>(8 + bin % 8) << shift, shift};
}

// The ids that a cut is searched among.
struct Field {
  Rows rows;
  const float* logits;
  float top;
  double scale, limit;  // of distances; where min_p ends

  KOG_DEVICE bool holds(float logit) const {
    return logit > -float_of(kInfinity) && distance_of(top, logit, scale) < limit;
  }
  KOG_DEVICE u32 depth(float logit) const { return ordered(top) - ordered(logit); }
};

// What a logit is above that lies no deeper than a cut, as an ordered integer.
KOG_DEVICE u32 bound_of(const Field& f, u32 cut) {
  return cut < ordered(f.top) ? ordered(f.top) - cut - 1 : 0;
}

struct Search {
  Field field;
  Level* levels;
  int heads;
  int known = 0;      // levels that are filled
  int exchanges = kFirstLevel;  // of this token so far
};

// One id of each thread into its bin, kBins for none. Threads of one bin add together first: most ids
// of a vocabulary fall into few bins, and 64-bit additions to shared memory are loops that collide.
KOG_DEVICE void add_to_bins(const Block& b, Level& level, u32 bin, u64 weight) {
  constexpr int kLow = 21, kCountAt = 25;  // 2^40 in two parts, whose sums over a warp fit
  u32 low = static_cast<u32>(weight) & ((1u << kLow) - 1);
  u32 high = static_cast<u32>(weight >> kLow) | 1u << kCountAt;
  while (true) {
    u32 next = largest_of_warp(bin < kBins ? bin + 1 : 0);
    if (next == 0) return;
    bool mine = bin + 1 == next;
    u32 lows = sum_of_warp(mine ? low : 0), highs = sum_of_warp(mine ? high : 0);
    if (mine) bin = kBins;
    if (b.in_warp == 0) {
      u64 sum = (static_cast<u64>(highs & ((1u << kCountAt) - 1)) << kLow) + lows;
      add_shared(&level.counts[next - 1], highs >> kCountAt);
      if (sum != 0) add_shared(&level.weights[next - 1], sum);
    }
    rejoin();  // else the others may be a pass ahead, where they look at what thread 0 has
  }
}

// This block's ids in the bins of a level; ids of other depths are left out.
KOG_DEVICE void count_own(Block& b, const Field& f, Level& level, bool coarse) {
  for (int i = b.thread; i < kBins; i += kConsumers) level.weights[i] = 0, level.counts[i] = 0;
  sync_consumers();
  for (int first = f.rows.first + b.warp * kWarpThreads; first < f.rows.last; first += kConsumers) {
    int id = first + b.in_warp;
    float logit = id < f.rows.last ? f.logits[id] : -float_of(kInfinity);
    u32 bin = kBins;
    u64 weight = 0;
    if (f.holds(logit)) {
      u32 depth = f.depth(logit);
      if (coarse)
        bin = static_cast<u32>(coarse_bin(depth));
      else if (depth >= level.first)
        bin = (depth - level.first) >> level.shift;
      if (bin < kBins) weight = weight_at(distance_of(f.top, logit, f.scale));
    }
    add_to_bins(b, level, bin, weight);
  }
  sync_consumers();
}

KOG_DEVICE Sums poll_sums(Block& b, Step step, u64 number, const u64* at, bool there) {
  u64 v[2];
  poll_pairs(b, step, number, [&](int i) { return at + 2 * i; }, [&](int) { return there; }, v);
  return {v[0], static_cast<u32>(v[1] >> 32)};
}

// From this block's bins to those of all blocks.
KOG_DEVICE void add_blocks(Block& b, Level& level, u64 number) {
  u64* parts = pairs_of<BinPartWords>(b);
  u64* totals = pairs_of<BinWords>(b);
  auto put = [&](int rank, u64* to, const Sums& s) {
    put_pair_at_rank(b, rank, to, number, static_cast<u32>(s.weight >> 32), static_cast<u32>(s.weight));
    put_pair_at_rank(b, rank, to + 2, number, s.count, 0);
  };
  for (int bin = b.thread; bin < kBins; bin += kConsumers)
    put(bin % kAllBlocks / kBlocks, parts + 4 * (bin * kAllBlocks + block_of_all(b)), level.sums(bin));
  for (int bin = block_of_all(b) + kAllBlocks * b.warp; bin < kBins; bin += kAllBlocks * kWarps) {
    Sums sum;
    for (int first = 0; first < kAllBlocks; first += kWarpThreads) {
      const u64* at = parts + 4 * (bin * kAllBlocks + first + b.in_warp);
      sum = sum.plus(poll_sums(b, Step::kHistogram, number, at, first + b.in_warp < kAllBlocks));
    }
    sum.weight = sum_of_warp(sum.weight);
    sum.count = sum_of_warp(sum.count);
    if (b.in_warp == 0)
#pragma unroll
      for (int rank = 0; rank < kRanks; rank++) put(rank, totals + 4 * bin, sum);
    rejoin();
  }
  for (int first = b.warp * kWarpThreads; first < kBins; first += kConsumers) {
    Sums sum = poll_sums(b, Step::kCut, number, totals + 4 * (first + b.in_warp), true);
    level.weights[first + b.in_warp] = sum.weight;
    level.counts[first + b.in_warp] = sum.count;
  }
  sync_consumers();
}

// Level n as the histogram of a bin of the level above, unless it is that already.
KOG_DEVICE Level& level_of(Block& b, Search& s, int n, Bin bin) {
  Level& level = s.levels[n];
  if (n < s.known && level.first == bin.first) return level;
  sync_consumers();  // nobody reads it any more
  if (b.thread == 0) level.first = bin.first, level.shift = bin.shift > 8 ? bin.shift - 8 : 0;
  count_own(b, s.field, level, n == 0);
  add_blocks(b, level, exchange_number(s.heads, s.exchanges++));
  s.known = n + 1;
  return level;
}

// The first bin with which the sums before it reach the target, and those sums joined to `before`.
// Lane i adds bins 8 i .. 8 i + 7; every warp finds the same.
KOG_DEVICE int find_bin(const Block& b, const Level& level, bool by_count, u64 target,
                        Sums& before) {
  auto reached = [&](const Sums& s) { return (by_count ? s.count : s.weight) >= target; };
  Sums own = own_sums(b, level), to_here = own;
#pragma unroll 1
  for (int by = 1; by < kWarpThreads; by *= 2) {
    Sums left = to_here.of_thread(b.in_warp >= by ? b.in_warp - by : 0);
    if (b.in_warp >= by) to_here = to_here.plus(left);
  }
  u32 reversed = reached(before.plus(to_here)) ? static_cast<u32>(kWarpThreads - 1 - b.in_warp) : 0u;
  int thread = kWarpThreads - 1 - static_cast<int>(largest_of_warp(reversed));
  before = before.plus(to_here.minus(own).of_thread(thread));
  int bin = kOwnBins * thread;
#pragma unroll 1
  for (; bin < kOwnBins * thread + kOwnBins - 1; bin++) {
    Sums with = before.plus(level.sums(bin));
    if (reached(with)) break;
    before = with;
  }
  return bin;
}

// ceil(total * share / 2^32), at least 1.
KOG_DEVICE u64 share_of(u64 total, u32 share) {
  u64 high = (total >> 32) * share, low = (total & 0xffffffffu) * share;
  u64 out = high + ((low + 0xffffffffu) >> 32);
  return out > 0 ? out : 1;
}

// The depth to which ids of the field survive top_k and top_p, or one beyond it that no id has.
// Each rule walks down the levels to the least depth whose counts or weights reach its target; what
// the first leaves is what the second takes its share of. In one loop, so that its code is fetched
// once.
KOG_DEVICE u32 cut_depth(Block& b, Search& s) {
  u32 k = b.request[Request::kTopK], cut = 0xffffffffu;
  bool top_p = (b.request[Request::kFlags] & kTopP) != 0;
  Sums left;  // of the ids that are still in; none before level 0 is known
#pragma unroll 1
  for (int rule = k != 0 ? 0 : 1; rule < (top_p ? 2 : 1); rule++) {
    bool by_count = rule == 0;
    u64 target = 0;
    Sums before;
    Bin bin = {0, 32};
#pragma unroll 1
    for (int n = 0; n < kLevels; n++) {
      Level& level = level_of(b, s, n, bin);
      if (n == 0) {
        if (left.count == 0) left = total_of(b, level);
        if (left.count <= (by_count ? k : 0)) break;  // the rule takes nobody out
        target = by_count ? k : share_of(left.weight, b.request[Request::kTopP]);
      }
      int i = find_bin(b, level, by_count, target, before);
      bin = n == 0 ? coarse_depths(i)
                   : Bin{level.first + (static_cast<u32>(i) << level.shift), level.shift};
      Sums with = before.plus(level.sums(i));
      bool exact = by_count && with.count == target;
      if (!exact && level.counts[i] > 1 && bin.shift != 0 && n < kLevels - 1) continue;
      left = with;
      cut = bin.first + ((1u << bin.shift) - 1);
      break;
    }
  }
  return cut;
}

}  // namespace kog
