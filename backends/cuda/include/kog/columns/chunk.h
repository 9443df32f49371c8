// A chunk of a prompt: the columns of a step are positions in a row of one request, so that a
// column sees what those ahead of it append. Their keys and values come to it as its own do: as
// words of qkv_proj, rotated and rounded by each KV task for itself. No step waits for the cache, and
// each column computes what a kernel of one token does at its position, bit for bit.
//
//   [0, first)          in the cache, by steps or launches before this one
//   [first, position]   words of the columns up to the KV task's own, of this step
#pragma once
#include <kog/attention.h>
#include <kog/columns/flags.h>
#include <kog/columns/position.h>

namespace kog::columns {

// What is not in the cache yet, of a column's view (../attention.h, Newest).
struct ChunkRows {
  int first;  // the position of the step's first column
  int first_query = 0, queries = kQueries;

  // The first of a span's positions that are in words, and how many there are.
  KOG_DEVICE int start(const Span& span) const { return span.start > first ? span.start : first; }
  KOG_DEVICE int count(const Span& span) const {
    return span.end > start(span) ? span.end - start(span) : 0;
  }
  KOG_DEVICE int cached(const Span& span) const { return span.end < first ? span.end : first; }

  // What a warp receives, by its number: a query, then key and value of a new position.
  KOG_DEVICE int position_of_item(const Span& span, int position, int item) const {
    int row = start(span) + item - queries;
    // A warp without one loads a rotation that exists, and that nobody takes.
    return item < queries || row > position ? position : row;
  }
  KOG_DEVICE Rotation rotation(const Block& b, const Span& span, int position) const {
    int item = first_received(b);
    return load_rotation(b, position_of_item(span, position, item), item >= queries);
  }

  KOG_DEVICE void receive(Block& b, const Span& span, int position, u32 phase,
                          const AttentionScratch& scratch, Rotation rotation) const {
    for (int item = first_received(b); item < queries + count(span); item += kWarps) {
      bool is_query = item < queries;
      int at = position_of_item(span, position, item);
      if (item >= kWarps) rotation = load_rotation(b, at, !is_query);
      Head head, value;
      receive_pair(b, is_query ? b.column : at - first,
                   is_query ? span.head * kQueries + first_query + item : kHeads + span.head, !is_query, phase,
                   head, value);
      head.rotate(b, rotation, is_query ? query_scale() : 1.f);
      if (is_query) {
        put_query(b, head, item, scratch.queries);
        continue;
      }
      // Each position is appended once: not by columns behind it, nor by those that repeat it.
      bool own = at == position && at - first == b.column && first_query == 0;
      int row = (item - queries) * kRowDim;
      u16* cache = cache_of(b, span.head) + static_cast<u64>(at) * kRowDim;
      append(b, head, scratch.key + row, cache, own);
      append(b, value, scratch.value + row, cache + static_cast<u64>(kMaxContext) * kRowDim, own);
    }
  }

  // A head of a column's words and, if `paired`, the one that lies kKvHeads behind it: the value of
  // a key. Both in one wait.
  KOG_DEVICE static void receive_pair(Block& b, int column, int head, bool paired, u32 phase,
                                      Head& first, Head& second) {
    constexpr int kOne = 2 * kQuads;  // words of a head, a thread
    const u32* words =
        lane_words<QkvWords>(b) + column * QkvWords::kStride + head * (kHeadDim / 2);
    u32 w[2 * kOne];
    poll_words(
        b, Step::kAttentionQkv,
        [&](int n) {
          return Head::word_at(b, words + n / kOne * kKvHeads * (kHeadDim / 2), n % kOne);
        },
        [&](int n) { return (n < kOne || paired) && Head::has_word(b, n % kOne); }, phase, w);
    first.unpack(w);
    second.unpack(w + kOne);
  }
  // Where among the new rows, from position `from` on, that of a span's position begins, in words; below 0
  // if it is none of them.
  KOG_DEVICE int from(const Span& all) const { return start(all); }
  KOG_DEVICE static int word_of_row(int from, int end, int position) {
    return position < end ? (position - from) * (kRowDim / 2) : -1;
  }
  KOG_DEVICE static void patch(const Block& b, int from, int end, int, int at,
                               const AttentionScratch& scratch, Keys& key, Values& value) {
    if (at + kTileRows <= from) return;
    auto word_of = [&](int row) { return word_of_row(from, end, at + row); };
    key.patch(b, scratch.key, word_of);
    value.patch(b, scratch.value, word_of);
  }
};

// Of a KV task with so many queries from one on.
KOG_DEVICE auto fresh_rows(const Block& b, int steps, int first_query, int queries) {
  if constexpr (kChunk)
    return ChunkRows{position_of(b, 0, steps), first_query, queries};
  else
    return Newest{first_query, queries};
}

// The tokens of a chunk's columns: the host's states tell that of the first. By the first warp,
// ahead of a barrier.
KOG_DEVICE void spread_cursors(const Block& b) {
  if (b.thread >= b.p.num_requests) return;
  RequestCursor& cursor = b.small->cursors[b.thread];
  cursor.token = prompt_token(b, cursor, position_of(b, b.thread, 0));
}

// Where the request stands behind `steps` chunks, for the next launch; by one thread.
KOG_DEVICE void save_chunks(const Block& b, int steps) {
  const RequestCursor& cursor = b.small->cursors[0];
  int next = ahead_of(b, 0, steps), last = cursor.first_head;
  // Behind the prompt comes the token of the column that stood at its end.
  int column = next > last ? (last - cursor.first) % kColumns : 0;
  b.p.states[2 * cursor.slot] = next > last ? last + 1 : next;
  b.p.states[2 * cursor.slot + 1] = b.small->cursors[column].token;
}

}  // namespace kog::columns
