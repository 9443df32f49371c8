// Attention of one new token: a block takes one key/value head and one split of the context.
//
//   before the wait   the first keys and values of the split, rotation and gains
//   the wait          one poll a warp: a query head each, then the new key, then the new value
//   walk              16 warps over the positions, online softmax (arXiv 2205.14135), a lane kVec
//   values of a row merge             over the warps in shared memory; the split's output, maximum
//   and sum become words (join.h)
//
// The last split takes the new key and value, which travel in words like the queries, and appends
// them.
#pragma once
#include <kog/words.h>

namespace kog {

constexpr int kQueries = kHeads / kKvHeads;  // query heads of one key/value head
constexpr int kVec = kHeadDim % 8 == 0 ? 8 : kHeadDim % 4 == 0 ? 4 : 2;
constexpr int kRowLanes = kHeadDim / kVec;  // lanes that hold one row of the cache
constexpr int kLanesARow = kRowLanes <= 1    ? 1
                           : kRowLanes <= 2  ? 2
                           : kRowLanes <= 4  ? 4
                           : kRowLanes <= 8  ? 8
                           : kRowLanes <= 16 ? 16
                                             : 32;  // a power of two
constexpr int kRowsAWarp = 32 / kLanesARow;
constexpr int kHeadGroups = (kQueries + kHeadsAtOnce - 1) / kHeadsAtOnce;
constexpr int kWarpsAGroup = kWarps / kHeadGroups;
constexpr int kRowsAStep = kRowsAWarp * kWarpsAGroup;
constexpr int kPairs = (kHeadDim / 2 + 31) / 32;  // pairs of a head that one lane rotates
constexpr int kUnits = kKvHeads * kSplits;
constexpr float kScoreScale = 1.4426950408889634f;  // scores in powers of two

// kVec values of 16 bits.
struct Row {
  u32 w[kVec / 2];
  KOG_DEVICE float at(int j) const { return j % 2 ? second_of(w[j / 2]) : low_of(w[j / 2]); }
};
KOG_DEVICE Row load_row(const u16* p) {
  Row r;
  if constexpr (kVec == 8) {
    uint4 v = load_cache(reinterpret_cast<const uint4*>(p));
    r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  } else if constexpr (kVec == 4) {
    uint2 v = load_cache(reinterpret_cast<const uint2*>(p));
    r.w[0] = v.x, r.w[1] = v.y;
  } else {
    r.w[0] = load_cache(reinterpret_cast<const u32*>(p));
  }
  return r;
}
KOG_DEVICE Row no_row() {
  Row r;
#pragma unroll
  for (int j = 0; j < kVec / 2; j++) r.w[j] = 0;
  return r;
}

// Scratch: rotated heads as float32 [kQueries][d], the new key and value as 16-bit rows, then
// results.
struct AttentionScratch {
  float* queries;
  u16* key;
  u16* value;
  float* results;
  KOG_DEVICE explicit AttentionScratch(const Block& b) {
    queries = reinterpret_cast<float*>(b.scratch);
    key = reinterpret_cast<u16*>(queries + kQueries * kHeadDim);
    value = key + kHeadDim;
    results = queries + (kQueries + 1) * kHeadDim;
  }
};

// Which part of the context a unit walks: [start, end) of the cache; the newest position is not in
// it yet.
struct Span {
  int head, split, used, start, end;
  bool newest;
};
KOG_DEVICE int splits_in_use(int length) {
  int most = (length + kSplitLeast - 1) / kSplitLeast;
  return most < kSplits ? (most > 1 ? most : 1) : kSplits;
}
KOG_DEVICE Span span_of(int unit, int position, int window) {
  Span s;
  s.head = unit / kSplits;
  s.split = unit % kSplits;
  int first = window > 0 && position + 1 > window ? position + 1 - window : 0;
  int length = position + 1 - first;
  s.used = splits_in_use(length);
  // At most 2^8 splits of 2^23 positions: 32 bits hold the products.
  u32 parts = static_cast<u32>(length), used = static_cast<u32>(s.used),
      split = static_cast<u32>(s.split);
  s.start = first + static_cast<int>(split * parts / used);
  int end = first + static_cast<int>((split + 1) * parts / used);
  s.end = s.split < s.used ? (end < position ? end : position) : s.start;
  s.newest = s.split == s.used - 1;
  return s;
}

KOG_DEVICE u16* cache_of(const Block& b, int head) {
  u64 home = (static_cast<u64>(b.layer) * kLanes + b.lane) * kKvHeads + head;
  return b.p.cache + home * 2 * kMaxContext * kHeadDim;
}

// What a head is rotated with: this lane's pairs (i, i + d / 2).
struct Rotation {
  float cos[kPairs], sin[kPairs], gain[kPairs], gain_far[kPairs];
};
KOG_DEVICE Rotation load_rotation(const Block& b, int position, bool is_key) {
  Rotation r;
  const float* angle = b.p.rope + static_cast<u64>(position) * kHeadDim;
  const float* gains = b.p.qk_gains + (2 * b.layer + is_key) * kHeadDim;
#pragma unroll
  for (int n = 0; n < kPairs; n++) {
    int i = n * 32 + b.in_warp;
    bool inside = i < kHeadDim / 2;
    r.cos[n] = inside ? angle[i] : 0;
    r.sin[n] = inside ? angle[kHeadDim / 2 + i] : 0;
    r.gain[n] = inside && kQkNorm ? gains[i] : 1;
    r.gain_far[n] = inside && kQkNorm ? gains[kHeadDim / 2 + i] : 1;
  }
  return r;
}

// Wait for one head of q, k or v and leave it in `to` as float32; by one warp.
KOG_DEVICE void receive_head(Block& b, int row, u32 phase, float* to) {
  const u32* words = b.p.words + QkvWords::kOffset + b.lane * QkvWords::kStride + row / 2;
  u32 w[kPairs];
  poll_words(
      b, Step::kAttentionQkv,
      [&](int n) {
        return n * 32 + b.in_warp < kHeadDim / 2 ? words + n * 32 + b.in_warp : nullptr;
      },
      phase, w);
#pragma unroll
  for (int n = 0; n < kPairs; n++) {
    int i = n * 32 + b.in_warp;
    if (i < kHeadDim / 2)
      *reinterpret_cast<float2*>(to + 2 * i) = float2{first_of(w[n]), second_of(w[n])};
  }
  sync_warp();
}

// Normalize if the model asks, rotate, scale: in place; a lane owns both elements of its pairs.
KOG_DEVICE void rotate(const Block& b, const Rotation& r, float scale, float* head) {
  float norm = 1;
  if constexpr (kQkNorm) {
    float square = 0;
#pragma unroll
    for (int n = 0; n < kPairs; n++) {
      int i = n * 32 + b.in_warp;
      if (i < kHeadDim / 2)
        square += head[i] * head[i] + head[kHeadDim / 2 + i] * head[kHeadDim / 2 + i];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
    norm = rsqrt_of(square / kHeadDim + kNormEps);
  }
#pragma unroll
  for (int n = 0; n < kPairs; n++) {
    int i = n * 32 + b.in_warp;
    if (i >= kHeadDim / 2) continue;
    float near = head[i] * (norm * r.gain[n]),
          far = head[kHeadDim / 2 + i] * (norm * r.gain_far[n]);
    head[i] = (near * r.cos[n] - far * r.sin[n]) * scale;
    head[kHeadDim / 2 + i] = (far * r.cos[n] + near * r.sin[n]) * scale;
  }
  sync_warp();
}

// The new key or value, rounded as everybody will read it: to scratch and to its place in the
// cache.
KOG_DEVICE void append(const Block& b, const float* head, u16* scratch, u16* cache) {
  for (int i = b.in_warp; i < kHeadDim / 2; i += 32) {
    u32 w = round_pair<kF16>(head[2 * i], head[2 * i + 1]);
    reinterpret_cast<u32*>(scratch)[i] = w;
    reinterpret_cast<u32*>(cache)[i] = w;
  }
  sync_warp();
}

// Heads of q by warps, the new k and v by two more where this block takes the newest position.
KOG_DEVICE void receive(Block& b, const Span& span, int position, u32 phase,
                        const AttentionScratch& scratch, const Rotation& rotation) {
  u16* cache = cache_of(b, span.head) + static_cast<u64>(position) * kHeadDim;
  for (int h = b.warp; h < kQueries + 2; h += kWarps) {
    if (h >= kQueries && !span.newest) continue;
    // The new key and value pass through the results' room on their way to 16 bits.
    float* to =
        h < kQueries ? scratch.queries + h * kHeadDim : scratch.results + (h - kQueries) * kHeadDim;
    int row =
        h < kQueries ? span.head * kQueries + h : kHeads + (h - kQueries) * kKvHeads + span.head;
    receive_head(b, row * kHeadDim, phase, to);
    if (h > kQueries) {
      append(b, to, scratch.value, cache + static_cast<u64>(kMaxContext) * kHeadDim);
      continue;
    }
    bool is_key = h == kQueries;
    // Rotations were asked for before the wait, for each warp's first head.
    Rotation r = h == b.warp ? rotation : load_rotation(b, position, is_key);
    rotate(b, r, is_key ? 1.f : kScoreScale * rsqrt_of(static_cast<float>(kHeadDim)), to);
    if (is_key) append(b, to, scratch.key, cache);
  }
}

struct Weights {
  float now[kHeadsAtOnce], old[kHeadsAtOnce];
};

// One warp's softmax so far, for kHeadsAtOnce query heads: maxima are the warp's, sums and outputs
// a lane's.
struct Softmax {
  float out[kHeadsAtOnce][kVec], top[kHeadsAtOnce], sum[kHeadsAtOnce];

  KOG_DEVICE Softmax() {
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; h++) {
      top[h] = -1e30f;  // finite: a split without keys weighs nothing
      sum[h] = 0;
#pragma unroll
      for (int j = 0; j < kVec; j++) out[h][j] = 0;
    }
  }
  // Scores of one row a lane group, made weights against the maximum so far; `old` is what that
  // takes from what was summed before. `queries`: this lane's columns of the first head, read anew:
  // registers are for the outputs.
  KOG_DEVICE void weigh(const float* queries, const Row& key, bool valid, Weights& w) {
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; h++) {
      float score = 0;
#pragma unroll
      for (int j = 0; j < kVec; j++) score += queries[h * kHeadDim + j] * key.at(j);
#pragma unroll
      for (int mask = kLanesARow / 2; mask; mask >>= 1) score += shuffle_xor(score, mask);
      float best = valid ? score : -1e30f;
#pragma unroll
      for (int mask = 16; mask >= kLanesARow; mask >>= 1) {
        float other = shuffle_xor(best, mask);
        best = other > best ? other : best;
      }
      best = best > top[h] ? best : top[h];
      w.now[h] = valid ? exp2_fast(score - best) : 0;
      w.old[h] = exp2_fast(top[h] - best);
      sum[h] = sum[h] * w.old[h] + w.now[h];
      top[h] = best;
    }
  }
  KOG_DEVICE void add(const Row& value, const Weights& w) {
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; h++)
#pragma unroll
      for (int j = 0; j < kVec; j++) out[h][j] = out[h][j] * w.old[h] + w.now[h] * value.at(j);
  }
  // Sum over the rows that the warp walked side by side.
  KOG_DEVICE void reduce() {
#pragma unroll
    for (int mask = kLanesARow; mask < 32; mask <<= 1)
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; h++) {
        sum[h] += shuffle_xor(sum[h], mask);
#pragma unroll
        for (int j = 0; j < kVec; j++) out[h][j] += shuffle_xor(out[h][j], mask);
      }
  }
};

// A warp's result among the results: [warp][kHeadsAtOnce][d], then maxima and sums
// [warp][kHeadsAtOnce][2].
KOG_DEVICE void put_result(const Block& b, const Softmax& s, int column, float* results) {
  float* out = results + b.warp * kHeadsAtOnce * kHeadDim;
  float* top = results + kWarps * kHeadsAtOnce * kHeadDim + b.warp * kHeadsAtOnce * 2;
#pragma unroll
  for (int h = 0; h < kHeadsAtOnce; h++) {
    if (b.in_warp < kRowLanes)
#pragma unroll
      for (int j = 0; j < kVec; j++) out[h * kHeadDim + column + j] = s.out[h][j];
    if (b.in_warp == 0) {
      top[2 * h] = s.top[h];
      top[2 * h + 1] = s.sum[h];
    }
  }
}

// Merge the warps' results in order and publish the split's: outputs, maxima, sums. Every split
// publishes every time, in use or not, so that all phases keep step.
KOG_DEVICE void merge_warps(const Block& b, const Span& span, int walked, u32 phase,
                            const float* results) {
  int at = (b.lane * kKvHeads + span.head) * kSplits + span.split;
  u32* words = b.p.words + SplitsWords::kOffset + at * SplitsWords::kStride;
  const float* tops = results + kWarps * kHeadsAtOnce * kHeadDim;
  for (int i = b.thread; i < kQueries * kHeadDim; i += 32 * kWarps) {
    int head = i / kHeadDim, h = head % kHeadsAtOnce, first = head / kHeadsAtOnce * kWarpsAGroup;
    float top = -1e30f, out = 0, sum = 0;
    for (int w = first; w < first + walked; w++) {
      float t = tops[(w * kHeadsAtOnce + h) * 2];
      top = t > top || t != t ? t : top;
    }
    for (int w = first; w < first + walked; w++) {
      float share = exp2_fast(tops[(w * kHeadsAtOnce + h) * 2] - top);
      out += share * results[(w * kHeadsAtOnce + h) * kHeadDim + i % kHeadDim];
      sum += share * tops[(w * kHeadsAtOnce + h) * 2 + 1];
    }
    store_relaxed(words + i, pack_f32(out, phase));
    if (i % kHeadDim == 0) {
      store_relaxed(words + kQueries * kHeadDim + head, pack_f32(top, phase));
      store_relaxed(words + kQueries * (kHeadDim + 1) + head, pack_f32(sum, phase));
    }
  }
}

// One unit: a key/value head over one split.
KOG_DEVICE void walk_split(Block& b, int unit, int position, int window, u32 phase) {
  Span span = span_of(unit, position, window);
  AttentionScratch scratch(b);
  const u16* keys = cache_of(b, span.head);
  const u16* values = keys + static_cast<u64>(kMaxContext) * kHeadDim;
  int head_group = b.warp / kWarpsAGroup, walker = b.warp % kWarpsAGroup;
  bool walks = head_group < kHeadGroups;
  int column = b.in_warp % kLanesARow * kVec, row = walker * kRowsAWarp + b.in_warp / kLanesARow;
  auto valid = [&](int at) { return walks && at < span.end && column < kHeadDim; };
  auto load = [&](const u16* from, int at) {
    return valid(at) ? load_row(from + static_cast<u64>(at) * kHeadDim + column) : no_row();
  };
  // Nothing here depends on other blocks: on its way while we wait for the queries.
  int at = span.start + row;
  Row key = load(keys, at), value = load(values, at);
  Rotation rotation = load_rotation(b, position, b.warp == kQueries);
  receive(b, span, position, phase, scratch, rotation);
  sync_consumers();

  // Warps with positions, and one more for the newest if there is one idle.
  int length = span.end - span.start, active = (length + kRowsAWarp - 1) / kRowsAWarp;
  int newest = active < kWarpsAGroup ? active : kWarpsAGroup - 1;
  int walked = active < kWarpsAGroup ? active + span.newest : kWarpsAGroup;
  if (walks && walker < walked) {
    Softmax softmax;
    // Lanes and heads that a head group has too many read what is there; their results are not
    // used.
    const float* queries = scratch.queries + head_group * kHeadsAtOnce * kHeadDim + column;
    Weights weights;
    for (int n = span.start + walker * kRowsAWarp; n < span.end; n += kRowsAStep) {
      softmax.weigh(queries, key, at < span.end, weights);
      at += kRowsAStep;
      key = load(keys, at);  // on its way while the values are added
      softmax.add(value, weights);
      value = load(values, at);
    }
    if (span.newest && walker == newest) {
      bool mine = b.in_warp < kRowLanes;
      key = value = no_row();
#pragma unroll
      for (int j = 0; j < kVec / 2; j++) {
        if (mine) key.w[j] = reinterpret_cast<const u32*>(scratch.key + column)[j];
        if (mine) value.w[j] = reinterpret_cast<const u32*>(scratch.value + column)[j];
      }
      softmax.weigh(queries, key, b.in_warp < kLanesARow, weights);
      softmax.add(value, weights);
    }
    softmax.reduce();
    put_result(b, softmax, column, scratch.results);
  }
  sync_consumers();
  merge_warps(b, span, walked, phase, scratch.results);
  sync_consumers();  // the scratch is free again
}

}  // namespace kog
