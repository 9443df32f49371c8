// A chunk of a prompt: the columns of a step are positions in a row of one request, so that a
// column sees what those ahead of it append. Their keys and values come to it as its own do: as
// words of qkv_proj, rotated and rounded by each unit for itself. No step waits for the cache, and
// each column computes what a kernel of one token does at its position, bit for bit.
//
//   [0, first)          in the cache, by steps or launches before this one
//   [first, position]   words of the columns up to the unit's own, of this step
#pragma once
#include <kog/attention.h>
#include <kog/columns/place.h>

namespace kog::columns {

// What is not in the cache yet, of a column's view (../attention.h, Newest).
struct ChunkRows {
  int first;  // the position of the step's first column

  // The first of a span's positions that are in words, and how many there are.
  KOG_DEVICE int start(const Span& span) const { return span.start > first ? span.start : first; }
  KOG_DEVICE int count(const Span& span) const {
    return span.end > start(span) ? span.end - start(span) : 0;
  }
  KOG_DEVICE int cached(const Span& span) const { return span.end < first ? span.end : first; }

  // Heads that a unit receives: its queries, then key and value of each new position.
  KOG_DEVICE static int new_row(int head) { return (head - kQueries) / 2; }

  // The position that a head is of.
  KOG_DEVICE int position_of_head(const Span& span, int position, int head) const {
    int row = start(span) + new_row(head);
    // A warp without a head loads a rotation that exists, and that nobody takes.
    return head < kQueries || row > position ? position : row;
  }
  KOG_DEVICE Rotation rotation(const Block& b, const Span& span, int position) const {
    int head = first_received(b);
    return load_rotation(b, position_of_head(span, position, head), head >= kQueries);
  }

  KOG_DEVICE void receive(Block& b, const Span& span, int position, u32 phase,
                          const AttentionScratch& scratch, Rotation rotation) const {
    int heads = kQueries + 2 * count(span);
    for (int h = first_received(b); h < heads; h += kWarps) {
      bool is_query = h < kQueries, is_value = !is_query && (h - kQueries) % 2 == 1;
      int at = position_of_head(span, position, h);
      if (h >= kWarps) rotation = load_rotation(b, at, !is_query);
      int row = is_query ? span.head * kQueries + h : kHeads + is_value * kKvHeads + span.head;
      Head head;
      head.receive(b, is_query ? b.column : at - first, row * kHeadDim, phase);
      if (!is_value) head.rotate(b, rotation, is_query ? query_scale() : 1.f);
      if (is_query) {
        put_query(b, head, h, scratch.queries);
        continue;
      }
      // Each position is appended once: not by the columns behind it, nor by those that repeat it.
      bool own = at == position && at - first == b.column;
      u16* rows = is_value ? scratch.value : scratch.key;
      u32* to = reinterpret_cast<u32*>(rows + new_row(h) * kRowDim);
      u64 kept = static_cast<u64>(at) + is_value * kMaxContext;
      u32* cache = reinterpret_cast<u32*>(cache_of(b, span.head) + kept * kRowDim);
      head.each(b, [&](int word, float2 v) {
        u32 w = cached_pair(v);
        to[word] = w;
        if (own) cache[word] = w;
      });
    }
  }

  // Where among the new rows a position's begins, in words; below 0 if it is none of them.
  KOG_DEVICE int place_of_row(const Span& span, int position) const {
    return position < span.end ? (position - start(span)) * (kRowDim / 2) : -1;
  }
  KOG_DEVICE void patch(const Block& b, const Span& span, int, int at,
                        const AttentionScratch& scratch, Keys& key, Values& value) const {
    if (at + kTileRows <= start(span)) return;
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++) {
      int place = place_of_row(span, at + Keys::row(b, j));
      if (place < 0) continue;
      const u32* from = reinterpret_cast<const u32*>(scratch.key) + place;
#pragma unroll
      for (int i = 0; i < kKeyWords; i++) key.w[j][i] = from[Keys::Quarter::at(b.in_warp % 4, i)];
    }
#pragma unroll
    for (int j = 0; j < kTileRows / 4; j++) {
      int place = place_of_row(span, at + Values::row(b, j));
      if (place < 0) continue;
      const u32* from = reinterpret_cast<const u32*>(scratch.value) + place;
#pragma unroll
      for (int i = 0; i < kValueWords; i++)
        value.w[j][i] = from[Values::Eighth::at(b.in_warp / 4, i)];
    }
  }
};

KOG_DEVICE auto fresh_rows(const Block& b, int steps) {
  if constexpr (kChunk)
    return ChunkRows{position_of(b, 0, steps)};
  else
    return Newest{};
}

// The tokens of a chunk's columns: the host's states tell that of the first. By the first warp,
// ahead of a barrier.
KOG_DEVICE void spread_seats(const Block& b) {
  if (b.thread >= b.p.num_seats) return;
  Seat& seat = b.small->seats[b.thread];
  const int* tokens = b.p.tokens + static_cast<u64>(seat.slot) * (kMaxContext + 1);
  seat.token = tokens[position_of(b, b.thread, 0)];
}

// Where the request stands behind `steps` chunks, for the next launch; by one thread.
KOG_DEVICE void save_chunks(const Block& b, int steps) {
  const Seat& seat = b.small->seats[0];
  int next = ahead_of(b, 0, steps), last = seat.first_head;
  // Behind the prompt comes the token of the column that stood at its end.
  int column = next > last ? (last - seat.first) % kColumns : 0;
  b.p.states[2 * seat.slot] = next > last ? last + 1 : next;
  b.p.states[2 * seat.slot + 1] = b.small->seats[column].token;
}

}  // namespace kog::columns
