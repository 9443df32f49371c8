// Attention of one new token a column: the units in use (column, key/value head, split) of a lane
// are dealt out to its blocks, each walked as in a kernel of one token (../attention.h).
//
//   few splits    image `split` of o_proj's operands, and the logarithms: joined by their readers
//   many splits   words, joined by the blocks that made them into image 0
//
// An image holds o_proj's inputs of all columns where its warps find them (matvec.h).
#pragma once
#include <kog/columns/chunk.h>
#include <kog/columns/stream.h>
#include <kog/join.h>
#include <kog/produce.h>

namespace kog::columns {

KOG_DEVICE int splits_of(const Block& b, int column, int steps) {
  int position = position_of(b, column, steps);
  return splits_in_use(position + 1 - first_position(position, kWindows[b.layer]));
}

constexpr int kImageStride = AttentionWords::kRows * AttentionWords::kStride;
KOG_DEVICE u32* image_words(const Block& b, int split) {
  return lane_words<AttentionWords>(b) + split * kImageStride;
}
// Those of a head lie together: many warps of all blocks wait for the same ones, and what they ask
// for meanwhile is few sectors.
KOG_DEVICE u32* top_word(const Block& b, int split, int column, int query_head) {
  return lane_words<TopsWords>(b) + (query_head * kMerged + split) * kColumns + column;
}
KOG_DEVICE int split_flag(const Block& b, int column, int head, int split) {
  return lane_place<AttentionFlagsWords>(b) + (column * kKvHeads + head) * kSplits + split;
}
KOG_DEVICE void put_output(const Block& b, int split, int query_head, int pair, float2 v,
                           u32 phase) {
  int word = query_head * (kHeadDim / 2) + pair;
  store_relaxed(image_words(b, split) + narrow_place<OProj>(word, b.column),
                pack_pair(v.x, v.y, phase));
}
KOG_DEVICE void put_top(const Block& b, int split, int query_head, float top, u32 phase) {
  store_relaxed(top_word(b, split, b.column, query_head), pack_f32(top, phase));
}

// The splits in use of every column, column c's in lane c.
KOG_DEVICE u32 splits_by_lane(const Block& b, int steps) {
  return b.in_warp < b.p.num_seats ? static_cast<u32>(splits_of(b, b.in_warp, steps)) : 0;
}
// Unit n of the layer, counted over the columns: whose it is and its span; false behind the last.
// By whole warps.
KOG_DEVICE bool find_unit(Block& b, int steps, u32 by_lane, int n, Span& span) {
  int used = 0, before = 0, first = 0;
  b.column = 0;  // or the last one's would be kept throughout the layer
#pragma unroll
  for (int c = 0; c < kColumns; c++) {
    int splits = static_cast<int>(shuffle(by_lane, c));
    if (n >= before && n < before + splits * kKvHeads) b.column = c, used = splits, first = before;
    before += splits * kKvHeads;
  }
  if (used == 0) return false;
  n -= first;
  span = span_of(n / used, n % used, position_of(b, b.column, steps), kWindows[b.layer]);
  return true;
}

// Bring what this block's warps ask for first in a layer's attention into the L2 (../produce.h); by
// the thread that fills the ring.
KOG_DEVICE void fetch_units(const Block& b, int layer, int steps) {
  int n = b.place;
#pragma unroll 1
  for (int c = 0; c < b.p.num_seats; c++) {
    int position = position_of(b, c, steps);
    if (position >= kMaxContext) continue;  // ahead of the end of a request
    int length = position + 1 - first_position(position, kWindows[layer]);
    int used = splits_in_use(length);
#pragma unroll 1
    for (; n < used * kKvHeads; n += kGroup)
      fetch_span(b, b.small->seats[c].slot, layer,
                 span_of(n / used, n % used, position, kWindows[layer]));
    n -= used * kKvHeads;
  }
}

// Makes the unit that was found the one in hand. Warps meet in its work before the next one's.
KOG_DEVICE void serve_unit(Block& b, int steps) {
  serve_seat(b, b.small->seats[b.column], position_of(b, b.column, steps));
}

// Words of an image change with each layer that has the split, not with each layer: what nobody
// reads would not be ordered before the next block's store to it.
KOG_DEVICE u32 image_phase(const Block& b, int column, int split) {
  return phase_of(static_cast<int>(b.small->uses[column * kMerged + split]));
}
// At the end of a layer: the next one reads it behind a barrier.
KOG_DEVICE void count_uses(const Block& b, int steps) {
  static_assert(kColumns * kMerged <= 32);
  int column = b.in_warp / kMerged, split = b.in_warp % kMerged;
  if (b.warp != 0 || column >= b.p.num_seats) return;
  int used = splits_of(b, column, steps);
  if (split < (used > kMerged ? 1 : used)) b.small->uses[b.in_warp]++;
}

// What a unit has found.
KOG_DEVICE void publish_unit(const Block& b, const Span& span, int query, int pair, float2 v,
                             float top, u32 phase) {
  int query_head = span.head * kQueries + query;
  if (span.used > kMerged)
    return publish_split(b, span, query, pair, v, top, phase);
  phase = image_phase(b, b.column, span.split);
  put_output(b, span.split, query_head, pair, v, phase);
  if (pair == 0) put_top(b, span.split, query_head, top, phase);
}

// By all warps: the words of one of many splits are there. They keep no step.
KOG_DEVICE void finish_split(const Block& b, const Span& span, u32 epoch) {
  fence_gpu();
  sync_consumers();
  if (b.warp == 0) raise_flag(b, b.p.words + split_flag(b, b.column, span.head, span.split), epoch);
}
KOG_DEVICE void await_splits(Block& b, const Span& span, u32 epoch) {
  int at[(kSplits + 31) / 32];
#pragma unroll
  for (int i = 0; i < (kSplits + 31) / 32; i++) {
    int split = i * 32 + b.in_warp;
    at[i] = split < span.used ? split_flag(b, b.column, span.head, split) : -1;
  }
  await(b, Step::kAttentionJoin, at, epoch);
  fence_gpu();  // pairs with the one before the flags
  sync_warp();
}

KOG_DEVICE void attention(Block& b, int steps) {
  u32 phase = phase_of(iteration_of(b, steps)), epoch = epoch_of(iteration_of(b, steps));
  u32 splits = splits_by_lane(b, steps);
  Span span;
  for (int n = b.place; find_unit(b, steps, splits, n, span); n += kGroup) {
    serve_unit(b, steps);
    walk_span(b, span, position_of(b, b.column, steps), phase, fresh_rows(b, steps),
              [&](int query, int pair, float2 v, float top) {
                publish_unit(b, span, query, pair, v, top, phase);
              });
    if (span.used > kMerged) finish_split(b, span, epoch);
  }
  if (!any_lane(splits > kMerged)) return;
  for (int n = b.place; find_unit(b, steps, splits, n, span); n += kGroup) {
    if (span.used <= kMerged || span.split >= kQueries) continue;
    serve_unit(b, steps);
    await_splits(b, span, epoch);
    join_many(b, span, phase, [&](int query_head, int pair, float2 v) {
      put_output(b, 0, query_head, pair, v, image_phase(b, b.column, 0));
      if (pair == 0) put_top(b, 0, query_head, 0, image_phase(b, b.column, 0));
    });
    sync_consumers();  // what the warps joined in is free
  }
}

// Images of a column that are in use.
KOG_DEVICE int images_of(const Block& b, int column, int steps) {
  int used = splits_of(b, column, steps);
  return used > kMerged ? 1 : used;
}

// Until the logarithms of the heads in this warp's part of Stage's inputs are there: as a hint, the
// outputs are stored at the same time. Lane kColumns * split + column asks for its own. They are
// read even of one split, which needs none: unread, a store of theirs could land after a later one.
template <class Stage>
KOG_DEVICE void await_attention(Block& b, int steps) {
  using S = Cut<Stage>;
  constexpr bool kWholeHeads = S::kPartValues % kHeadDim == 0;
  constexpr int kCount = S::kPartValues / kHeadDim + (kWholeHeads ? 0 : 2);
  int first = S::first_value(b) / kHeadDim, last = S::first_value(b) + S::kPartValues;
  last = last < Stage::kCols ? last : Stage::kCols;
  int split = b.in_warp / kColumns, column = b.in_warp % kColumns;
  bool mine = column < b.p.num_seats && split < images_of(b, column, steps);
  u32 phase = mine ? image_phase(b, column, split) : 0;
  const u32* from = top_word(b, mine ? split : 0, column, first);
  ask_until_ready(b, Step::kOProjInput, place_of(b, from), phase ^ 1, phase, [&] {
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if (mine && (first + i) * kHeadDim < last)
        bad |= load_relaxed(from + i * kMerged * kColumns) ^ phase;
    return any_lane((bad & 1) != 0);
  });
}

// A lane's words of one step and set, joined from those of `used` splits as ../attention.h does it.
template <int kMost>
KOG_DEVICE Activation join_splits(const Activation (&w)[kMost], const u32 (&top)[kMost], int used) {
  float best = unpack_f32(top[0]), total = 0, sum[2 * kOperandWords] = {};
#pragma unroll
  for (int s = 1; s < kMost; s++) {
    float other = unpack_f32(top[s]);
    if (s < used) best = other > best ? other : best;
  }
#pragma unroll
  for (int s = 0; s < kMost; s++) {
    float share = exp2_fast(unpack_f32(top[s]) - best);
    if (s >= used) continue;
    total += share;
#pragma unroll
    for (int j = 0; j < kOperandWords; j++) {
      sum[2 * j] += share * low_of(w[s].w[j]);
      sum[2 * j + 1] += share * high_of(w[s].w[j]);
    }
  }
  float scale = divide(1.f, total);
  Activation out;
#pragma unroll
  for (int j = 0; j < kOperandWords; j++)
    out.w[j] = round_pair<kF16>(sum[2 * j] * scale, sum[2 * j + 1] * scale);
  return out;
}

// What a lane of Stage's operands knows of the columns whose words it has, set by set.
template <class Stage>
struct Images {
  using S = Cut<Stage>;
  bool mine[S::kSets];  // whether the column has a request: else its words are never written
  int used[S::kSets];
  u32 phases[S::kSets];  // bit s: that of split s

  KOG_DEVICE Images(const Block& b, int steps) {
#pragma unroll
    for (int set = 0; set < S::kSets; set++) {
      int column = column_of(b, set);
      mine[set] = column < b.p.num_seats;
      used[set] = mine[set] ? images_of(b, column, steps) : 1;
      phases[set] = 0;
#pragma unroll
      for (int s = 0; s < kMerged; s++) phases[set] |= image_phase(b, column, s) << s;
    }
  }
  KOG_DEVICE static int column_of(const Block& b, int set) {
    return set * S::kTokens + S::token(b.in_warp % S::kLanes);
  }
  KOG_DEVICE int most() const {
    int all = used[0];
#pragma unroll
    for (int set = 1; set < S::kSets; set++) all = used[set] > all ? used[set] : all;
    return static_cast<int>(largest_of_warp(static_cast<u32>(all)));
  }
};

// Steps [first, first + kAtOnce) of Stage's operands, of up to kMost splits.
template <class Stage, int kAtOnce, int kMost>
KOG_DEVICE void stage_splits(Block& b, Operands<Stage>& to, const Images<Stage>& images,
                             int first) {
  using S = Cut<Stage>;
  using Row = Words<S::kRowWords>;
  int lane = b.in_warp % S::kLanes;
  int k = S::first_value(b) + first * S::kStepValues;
  const u32* from = image_words(b, 0) + k / S::kStepValues * S::kStepWords + lane * S::kLaneStride;
  int value = k + S::value(lane);  // all that the lane has of a step lies in its head
  // Steps that share their heads, which is to say their logarithms.
  constexpr bool kAligned = kHeadDim % S::kStepValues == 0 && S::kPartValues % kHeadDim == 0 &&
                            kAtOnce * S::kStepValues % kHeadDim == 0 &&
                            Stage::kSteps % kAtOnce == 0;
  constexpr int kAlike = kAligned ? kHeadDim / S::kStepValues : 1;
  Row w[kAtOnce][kMost];
  u32 top[kAtOnce / kAlike][S::kSets][kMost] = {};
  ask_until_ready(b, Step::kOProjInput, place_of(b, from), 1, 0, [&] {
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      int head = (value + i * S::kStepValues) / kHeadDim;
      const u32* tops = top_word(b, 0, images.column_of(b, 0), head < kHeads ? head : 0);
#pragma unroll
      for (int s = 0; s < kMost; s++) {
        // Also of splits that a column has not: places of each one's own to ask at would take registers.
        if (kMost > 1 && i % kAlike == 0)  // one split needs none
#pragma unroll
          for (int set = 0; set < S::kSets; set++)
            top[i / kAlike][set][s] = load_relaxed(tops + s * kColumns + set * S::kTokens);
        load_row(from + s * kImageStride + i * S::kStepWords, w[i][s]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int s = 0; s < kMost; s++)
#pragma unroll
        for (int j = 0; j < S::kRowWords; j++) {
          int set = j / kOperandWords;
          u32 phase = images.phases[set] >> s, late = w[i][s].w[j] ^ phase;
          if (kMost > 1) late |= top[i / kAlike][set][s] ^ phase;
          bool inside =
              Stage::kPaddedK == Stage::kCols || value + i * S::kStepValues < Stage::kCols;
          bad |= images.mine[set] && s < images.used[set] && inside ? late : 0;
          w[i][s].w[j] = operand_of(w[i][s].w[j]);
        }
    return any_lane((bad & 1) != 0);
  });
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    Row row = w[i][0];
#pragma unroll
    for (int set = 0; set < S::kSets && kMost > 1; set++) {
      Activation of_split[kMost];
#pragma unroll
      for (int s = 0; s < kMost; s++) of_split[s] = of_set(w[i][s], set);
      if (images.used[set] == 1) continue;
      Activation v = join_splits<kMost>(of_split, top[i / kAlike][set], images.used[set]);
#pragma unroll
      for (int j = 0; j < kOperandWords; j++) row.w[set * kOperandWords + j] = v.w[j];
    }
    if (first + i < Stage::kHeld)
      to.held[first + i] = row;
    else
      to.store(first + i, row);
  }
}

// All steps, kRoom of a split at once.
template <class Stage, int kRoom, int kMost>
KOG_DEVICE void stage_all(Block& b, Operands<Stage>& to, const Images<Stage>& images) {
  constexpr int kAtOnce = Stage::kSteps < kRoom ? Stage::kSteps : kRoom;
  constexpr int kLast = Stage::kSteps - kAtOnce;
#pragma unroll
  for (int first = 0; first < Stage::kSteps; first += kAtOnce)
    stage_splits<Stage, kAtOnce, kMost>(b, to, images, first < kLast ? first : kLast);
}

// Wait for this warp's part of the attention's outputs and make it Stage's operands.
template <class Stage>
KOG_DEVICE void stage_attention(Block& b, Operands<Stage>& to, int steps) {
  await_attention<Stage>(b, steps);
  Images<Stage> images(b, steps);
  int most = images.most();
  // Code for as few splits as there are, which is shorter and asks for more of them at once.
  if (most == 1)
    stage_all<Stage, 4, 1>(b, to, images);
  else if (most == 2)
    stage_all<Stage, 4, 2>(b, to, images);
  else
    stage_all<Stage, 2, kMerged>(b, to, images);
  sync_warp();
}

}  // namespace kog::columns
