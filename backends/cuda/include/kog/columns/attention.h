// Attention of one new token a column: the units in use (column, key/value head, split) are dealt out to
// the blocks, each walked as in a kernel of one token (../attention.h).
//
//   few splits    image `split` of o_proj's operands, and the logarithms: joined by those who read them
//   many splits   words, joined by the blocks that made them into image 0
//
// An image holds o_proj's inputs of all columns where its warps find them (matvec.h).
#pragma once
#include <kog/columns/matvec.h>
#include <kog/join.h>
#include <kog/seat.h>

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
KOG_DEVICE u32* split_flag(const Block& b, int column, int head, int split) {
  return b.p.words + Flags::kOffset + (column * kKvHeads + head) * kSplits + split;
}
KOG_DEVICE void put_output(const Block& b, int split, int query_head, int pair, float2 v) {
  int word = query_head * (kHeadDim / 2) + pair;
  store_relaxed(image_words(b, split) + narrow_place(word, b.column), pack_pair(v.x, v.y, 0));
}

// each(span) for the units of this block, with their request in hand.
template <class Each>
KOG_DEVICE void for_each_unit(Block& b, int steps, Each each) {
  int base = 0;
  for (int c = 0; c < b.p.num_seats; c++) {
    int used = splits_of(b, c, steps), count = used * kKvHeads;
    int first = base % kGroup;  // the place of the column's first unit
    for (int n = (b.place + kGroup - first) % kGroup; n < count; n += kGroup) {
      b.column = c;
      serve_seat(b, b.small->seats[c], position_of(b, c, steps));
      each(span_of(n / used, n % used, b.small->position, kWindows[b.layer]));
    }
    base += count;
  }
}

// By all warps: the unit's words of this run are there.
template <class Flags>
KOG_DEVICE void finish_unit(const Block& b, const Span& span, u32 epoch) {
  sync_consumers();
  if (b.warp == 0) raise_flag(b, split_flag<Flags>(b, b.column, span.head, span.split), epoch);
}

KOG_DEVICE void attention(Block& b, int steps, int iteration) {
  u32 phase = phase_of(iteration), epoch = static_cast<u32>(iteration) + 1;
  bool many = false;
  for_each_unit(b, steps, [&](const Span& span) {
    u32* words = split_words(b, span.head, span.split);
    many |= span.used > kMerged;
    walk_span(b, span, b.small->position, phase, [&](int query, int pair, float2 v, float top) {
      if (span.used > kMerged) return publish_split(words, query, pair, v, top, phase);
      int query_head = span.head * kQueries + query;
      put_output(b, span.split, query_head, pair, v);
      if (pair == 0)
        store_relaxed(top_word(b, span.split, b.column, query_head), pack_f32(top, 0));
    });
    finish_unit<AttentionFlagsWords>(b, span, epoch);
  });
  if (!many) return;
  for_each_unit(b, steps, [&](const Span& span) {
    if (span.used <= kMerged || span.split >= kQueries) return;
    await<(kSplits + 31) / 32>(
        b, Step::kAttentionJoin,
        [&](int i) {
          int split = i * 32 + b.in_warp;
          return split < span.used ? split_flag<AttentionFlagsWords>(b, b.column, span.head, split)
                                   : nullptr;
        },
        epoch);
    join_many(b, span, phase,
              [&](int query_head, int pair, float2 v) { put_output(b, 0, query_head, pair, v); });
    finish_unit<JoinFlagsWords>(b, span, epoch);
  });
}

// Until the attention of this warp's part of Stage's inputs is there.
template <class Stage>
KOG_DEVICE void await_attention(Block& b, int steps, u32 epoch) {
  using S = Shape<Stage>;
  constexpr int kOfHead = kQueries * kHeadDim;  // values of a key/value head
  constexpr int kMostHeads = (S::kPartValues + kOfHead - 1) / kOfHead + 1;
  constexpr int kJoiners = kSplits < kQueries ? kSplits : kQueries;
  constexpr int kMost = kMerged > kJoiners ? kMerged : kJoiners;
  int first = S::first_value(b) / kOfHead, last = S::first_value(b) + S::kPartValues;
  last = last < Stage::kCols ? last : Stage::kCols;
  await<(kColumns * kMostHeads * kMost + 31) / 32>(
      b, Step::kOProjInput,
      [&](int i) {
        int n = i * 32 + b.in_warp, split = n % kMost, column = n / kMost % kColumns;
        int head = first + n / (kMost * kColumns);
        u32* flag = nullptr;
        if (column >= b.p.num_seats || head * kOfHead >= last) return flag;
        int used = splits_of(b, column, steps);
        if (used <= kMerged) {
          if (split < used) flag = split_flag<AttentionFlagsWords>(b, column, head, split);
        } else if (split < kJoiners) {
          flag = split_flag<JoinFlagsWords>(b, column, head, split);
        }
        return flag;
      },
      epoch);
}

// A lane's words of one step and set, joined from the images of `used` splits as ../attention.h does it.
KOG_DEVICE Activation join_images(const Block& b, int place, int column, int query_head, int used) {
  Activation w[kMerged], out;
  u32 top[kMerged];
  load_operand(image_words(b, 0) + place, w[0]);
  if (used <= 1) return w[0];
#pragma unroll
  for (int s = 0; s < kMerged; s++)
    if (s < used) {
      if (s > 0) load_operand(image_words(b, s) + place, w[s]);
      top[s] = load_relaxed(top_word(b, s, column, query_head));
    }
  float best = unpack_f32(top[0]), total = 0, sum[2 * kOperandWords] = {};
#pragma unroll
  for (int s = 1; s < kMerged; s++)
    if (s < used) best = unpack_f32(top[s]) > best ? unpack_f32(top[s]) : best;
#pragma unroll
  for (int s = 0; s < kMerged; s++) {
    if (s >= used) continue;
    float share = exp2_fast(unpack_f32(top[s]) - best);
    total += share;
#pragma unroll
    for (int j = 0; j < kOperandWords; j++) {
      sum[2 * j] += share * first_of(w[s].w[j]);
      sum[2 * j + 1] += share * second_of(w[s].w[j]);
    }
  }
  float scale = divide(1.f, total);
#pragma unroll
  for (int j = 0; j < kOperandWords; j++)
    out.w[j] = round_pair<kF16>(sum[2 * j] * scale, sum[2 * j + 1] * scale);
  return out;
}

// Wait for this warp's part of the attention's outputs and make it Stage's operands.
template <class Stage>
KOG_DEVICE void stage_attention(Block& b, Operands<Stage>& to, int steps, u32 epoch) {
  using S = Shape<Stage>;
  await_attention<Stage>(b, steps, epoch);
  int used[S::kSets], lane = b.in_warp % S::kLanes;
#pragma unroll
  for (int set = 0; set < S::kSets; set++) {
    int column = set * S::kTokens + lane / 8;
    used[set] = column < b.p.num_seats ? splits_of(b, column, steps) : 0;
    if (used[set] > kMerged) used[set] = 1;
  }
#pragma unroll
  for (int step = 0; step < Stage::kSteps; step++)
#pragma unroll
    for (int set = 0; set < S::kSets; set++) {
      int value = S::first_value(b) + step * kFragK + lane % 4 * (kFragK / 4);
      int place = value / kFragK * S::kStepWords + set * S::kSetWords + lane * kOperandWords;
      Activation w{};
      if (used[set] > 0 && value < Stage::kCols)
        w = join_images(b, place, set * S::kTokens + lane / 8, value / kHeadDim, used[set]);
      if (step < Stage::kHeld)
        to.held[step][set] = w;
      else
        to.store(step, set, w);
    }
  sync_warp();
}

}  // namespace kog::columns
