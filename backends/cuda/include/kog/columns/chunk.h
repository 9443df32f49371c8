// A chunk of a prompt: the columns of a step are positions in a row of one request, so that what one
// column appends the columns behind it already see. Its keys and values come to them as they do to
// its own block: as words of qkv_proj, rotated and rounded by each unit for itself. No step waits for
// the cache, and every column computes what a kernel of one token does at its position, bit for bit.
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
  KOG_DEVICE int new_row(int head) const { return (head - kQueries) / 2; }
  KOG_DEVICE static bool is_key(int head) { return (head - kQueries) % 2 == 0; }

  KOG_DEVICE Rotation rotation_of(const Block& b, const Span& span, int position, int head) const {
    if (head < kQueries) return load_rotation(b, position, false);
    // A warp without a head loads a rotation that exists, and that nobody takes.
    int row = start(span) + new_row(head);
    return load_rotation(b, row < position ? row : position, true);
  }
  KOG_DEVICE Rotation rotation(const Block& b, const Span& span, int position) const {
    return rotation_of(b, span, position, first_received(b));
  }

  KOG_DEVICE void receive(Block& b, const Span& span, int position, u32 phase,
                          const AttentionScratch& scratch, const Rotation& rotation) const {
    int heads = kQueries + 2 * count(span);
    for (int h = first_received(b); h < heads; h += kWarps) {
      Rotation r = h < kWarps ? rotation : rotation_of(b, span, position, h);
      Head head;
      if (h < kQueries) {
        head.receive(b, b.column, (span.head * kQueries + h) * kHeadDim, phase);
        head.rotate(b, r, query_scale());
        put_query(b, head, h, scratch.queries);
        continue;
      }
      int row = new_row(h), at = start(span) + row;
      int of = kHeads + (is_key(h) ? 0 : kKvHeads) + span.head;
      head.receive(b, at - first, of * kHeadDim, phase);
      if (is_key(h)) head.rotate(b, r, 1.f);
      // Each position is appended once: not by the columns behind it, nor by those that repeat it.
      bool own = at == position && at - first == b.column;
      u64 behind = static_cast<u64>(at) + (is_key(h) ? 0 : kMaxContext);
      u32* cache = reinterpret_cast<u32*>(cache_of(b, span.head) + behind * kRowDim);
      u32* to = reinterpret_cast<u32*>((is_key(h) ? scratch.key : scratch.value) + row * kRowDim);
      head.each(b, [&](int word, float2 v) {
        u32 kept = cached_pair(v);
        to[word] = kept;
        if (own) cache[word] = kept;
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

// The tokens of a chunk's columns: the host's states tell that of the first. By the first warp, ahead
// of a barrier.
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
