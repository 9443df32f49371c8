// Attention of one new token a column: the units in use (column, key/value head, split) are dealt
// out to the blocks, each walked as in a kernel of one token (../attention.h).
//
//   few splits    image `split` of o_proj's operands, and the logarithms: joined by their readers
//   many splits   words, joined by the blocks that made them into image 0
//
// An image holds o_proj's inputs of all columns where its warps find them (matvec.h).
#pragma once
#include <kog/columns/stream.h>
#include <kog/join.h>

namespace kog::columns {

KOG_DEVICE int position_of(const Block& b, int column, int steps) {
  return b.small->seats[column].first + steps;
}
KOG_DEVICE int splits_of(const Block& b, int column, int steps) {
  int position = position_of(b, column, steps);
  return splits_in_use(position + 1 - first_position(position, kWindows[b.layer]));
}

KOG_DEVICE u32* image_words(const Block& b, int split) {
  return b.p.words + AttentionWords::kOffset + split * AttentionWords::kStride;
}
KOG_DEVICE u32* top_word(const Block& b, int split, int column, int query_head) {
  return b.p.words + TopsWords::kOffset + split * TopsWords::kStride + column * kHeads + query_head;
}
template <class Flags>
KOG_DEVICE int split_flag(int column, int head, int split) {
  return Flags::kOffset + (column * kKvHeads + head) * kSplits + split;
}
KOG_DEVICE void put_output(const Block& b, int split, int query_head, int pair, float2 v,
                           u32 phase) {
  int word = query_head * (kHeadDim / 2) + pair;
  store_relaxed(image_words(b, split) + narrow_place(word, b.column), pack_pair(v.x, v.y, phase));
}
KOG_DEVICE void put_top(const Block& b, int split, int query_head, float top, u32 phase) {
  store_relaxed(top_word(b, split, b.column, query_head), pack_f32(top, phase));
}

// Unit n of the layer, counted over the columns: whose it is and its span; false behind the last.
KOG_DEVICE bool find_unit(Block& b, int steps, int n, Span& span) {
  for (int c = 0; c < b.p.num_seats; c++) {
    int used = splits_of(b, c, steps);
    if (n < used * kKvHeads) {
      b.column = c;
      span = span_of(n / used, n % used, position_of(b, c, steps), kWindows[b.layer]);
      return true;
    }
    n -= used * kKvHeads;
  }
  return false;
}

// Makes the unit that was found the one in hand. Warps meet in its work before the next one's.
KOG_DEVICE void serve_unit(Block& b, int steps) {
  serve_seat(b, b.small->seats[b.column], position_of(b, b.column, steps));
}

// By all warps: the unit's words of this run are there.
template <class Flags>
KOG_DEVICE void finish_unit(const Block& b, const Span& span, u32 epoch) {
  sync_consumers();
  if (b.warp != 0) return;
  raise_flag(b, b.p.words + split_flag<Flags>(b.column, span.head, span.split), epoch);
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

KOG_DEVICE void attention(Block& b, int steps) {
  u32 phase = phase_of(iteration_of(b, steps));
  bool many = false;
  Span span;
  for (int n = b.place; find_unit(b, steps, n, span); n += kGroup) {
    serve_unit(b, steps);
    many |= span.used > kMerged;
    walk_span(b, span, position_of(b, b.column, steps), phase, [&](int query, int pair, float2 v, float top) {
      publish_unit(b, span, query, pair, v, top, phase);
    });
    if (span.used > kMerged) fence_gpu();  // words of many splits keep no step
    finish_unit<AttentionFlagsWords>(b, span, epoch_of(iteration_of(b, steps)));
  }
  if (!many) return;
  for (int n = b.place; find_unit(b, steps, n, span); n += kGroup) {
    if (span.used <= kMerged || span.split >= kQueries) continue;
    serve_unit(b, steps);
    int at[(kSplits + 31) / 32];
#pragma unroll
    for (int i = 0; i < (kSplits + 31) / 32; i++) {
      int split = i * 32 + b.in_warp;
      at[i] = split < span.used ? split_flag<AttentionFlagsWords>(b.column, span.head, split) : -1;
    }
    await(b, Step::kAttentionJoin, at, epoch_of(iteration_of(b, steps)));
    fence_gpu();  // pairs with the one before the flags
    sync_warp();
    join_many(b, span, phase, [&](int query_head, int pair, float2 v) {
      put_output(b, 0, query_head, pair, v, image_phase(b, b.column, 0));
      if (pair == 0) put_top(b, 0, query_head, 0, image_phase(b, b.column, 0));
    });
    finish_unit<JoinFlagsWords>(b, span, epoch_of(iteration_of(b, steps)));
  }
}

// Until the attention of this warp's part of Stage's inputs is there.
template <class Stage>
KOG_DEVICE void await_attention(Block& b, int steps) {
  using S = Cut<Stage>;
  constexpr int kOfHead = kQueries * kHeadDim;  // values of a key/value head
  constexpr int kMostHeads = (S::kPartValues + kOfHead - 1) / kOfHead + 1;
  constexpr int kJoiners = kSplits < kQueries ? kSplits : kQueries;
  constexpr int kMost = kMerged > kJoiners ? kMerged : kJoiners;
  int first = S::first_value(b) / kOfHead, last = S::first_value(b) + S::kPartValues;
  last = last < Stage::kCols ? last : Stage::kCols;
  constexpr int kFlags = (kColumns * kMostHeads * kMost + 31) / 32;
  int at[kFlags];
#pragma unroll
  for (int i = 0; i < kFlags; i++) {
    int n = i * 32 + b.in_warp, split = n % kMost, column = n / kMost % kColumns;
    int head = first + n / (kMost * kColumns);
    at[i] = -1;
    if (column >= b.p.num_seats || head * kOfHead >= last) continue;
    int used = splits_of(b, column, steps);
    if (used > kMerged && split < kJoiners)
      at[i] = split_flag<JoinFlagsWords>(column, head, split);
    if (used <= kMerged && split < used)
      at[i] = split_flag<AttentionFlagsWords>(column, head, split);
  }
  await(b, Step::kOProjInput, at, epoch_of(iteration_of(b, steps)));
}

// A lane's words of one step and set, joined from those of `used` splits as ../attention.h does it.
KOG_DEVICE Activation join_splits(const Activation (&w)[kMerged], const u32 (&top)[kMerged],
                                  int used) {
  float best = unpack_f32(top[0]), total = 0, sum[2 * kOperandWords] = {};
#pragma unroll
  for (int s = 1; s < kMerged; s++) {
    float other = unpack_f32(top[s]);
    if (s < used) best = other > best ? other : best;
  }
#pragma unroll
  for (int s = 0; s < kMerged; s++) {
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

// Wait for this warp's part of the attention's outputs and make it Stage's operands.
template <class Stage>
KOG_DEVICE void stage_attention(Block& b, Operands<Stage>& to, int steps) {
  using S = Cut<Stage>;
  constexpr int kAtOnce = 2;  // steps whose words are on their way
  await_attention<Stage>(b, steps);
  int lane = b.in_warp % S::kLanes;
  const u32* images =
      image_words(b, 0) + S::first_value(b) / kFragK * S::kStepWords + lane * kOperandWords;
#pragma unroll
  for (int set = 0; set < S::kSets; set++) {
    int column = set * S::kTokens + lane / 8;
    // Words of columns without a request, and of values beyond the last, are never written.
    bool mine = column < b.p.num_seats;
    int used = mine ? splits_of(b, column, steps) : 1;
    if (used > kMerged) used = 1;
    int most = static_cast<int>(largest_of_warp(static_cast<u32>(used)));
    u32 phase[kMerged];
#pragma unroll
    for (int s = 0; s < kMerged; s++) phase[s] = image_phase(b, column, s < used ? s : used - 1);
#pragma unroll
    for (int first = 0; first < Stage::kSteps; first += kAtOnce) {
      Activation w[kAtOnce][kMerged];
      u32 top[kAtOnce][kMerged] = {};
      ask_until_ready(b, Step::kOProjInput, place_of(b, images), phase[0] ^ 1, phase[0], [&] {
        u32 bad = 0;
#pragma unroll
        for (int s = 0; s < kMerged; s++) {
          if (s >= most) break;
          int split = s < used ? s : used - 1;
#pragma unroll
          for (int i = 0; i < kAtOnce && first + i < Stage::kSteps; i++) {
            int value = S::first_value(b) + (first + i) * kFragK + lane % 4 * (kFragK / 4);
            int head = value / kHeadDim;
            load_operand(images + split * AttentionWords::kStride + (first + i) * S::kStepWords +
                             set * S::kSetWords,
                         w[i][s]);
            top[i][s] = load_relaxed(top_word(b, split, column, head < kHeads ? head : 0));
          }
        }
#pragma unroll
        for (int s = 0; s < kMerged; s++) {
          if (s >= most) break;
#pragma unroll
          for (int i = 0; i < kAtOnce && first + i < Stage::kSteps; i++) {
            int value = S::first_value(b) + (first + i) * kFragK + lane % 4 * (kFragK / 4);
            // Read even of one split, which needs none: unread, its store could land after a later one.
            u32 late = top[i][s] ^ phase[s];
#pragma unroll
            for (int j = 0; j < kOperandWords; j++) {
              late |= w[i][s].w[j] ^ phase[s];
              w[i][s].w[j] = operand_of(w[i][s].w[j]);
            }
            if (mine && value < Stage::kCols) bad |= late;
          }
        }
        return any_lane((bad & 1) != 0);
      });
#pragma unroll
      for (int i = 0; i < kAtOnce && first + i < Stage::kSteps; i++) {
        Activation v = w[i][0];
        if (used > 1) v = join_splits(w[i], top[i], used);
        if (first + i < Stage::kHeld)
          to.held[first + i][set] = v;
        else
          to.store(first + i, set, v);
      }
    }
  }
  sync_warp();
}

}  // namespace kog::columns
