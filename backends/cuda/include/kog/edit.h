// Logits edited before the choice: penalties, bias, bans, the host's mask
// (kog_triton/sampling/definition.py, adjust). A block edits the ids whose rows of the head it
// owns, and keeps their history for itself: nobody else reads it.
#pragma once
#include <kog/sample.h>

namespace kog {

// One list of the request.
struct List {
  const u32* at;
  int count;
};
KOG_DEVICE List list_of(const Block& b, int head) {
  return {b.request + b.request[head], static_cast<int>(b.request[head + 1])};
}

// The ids of a block.
struct Rows {
  int first, last;

  KOG_DEVICE bool hold(int id) const { return first <= id && id < last; }
};
KOG_DEVICE Rows own_rows(const Block& b) {
  Units u = head_units(b);
  int at = first_id(b), last = u.last * LmHead::kUnitRows;
  return {at + u.first * LmHead::kUnitRows, at + (last < LmHead::kRows ? last : LmHead::kRows)};
}

// Each id of a block, side by side: two or three a thread, so that a loop which takes four at once
// would be code that is compiled and never run (benchmarks/cuda-log.md#early).
template <class Each>
KOG_DEVICE void each_own_id(const Block& b, Rows rows, Each each) {
#pragma unroll 1
  for (int id = rows.first + b.thread; id < rows.last; id += kConsumers) each(id);
}

KOG_DEVICE bool has_bit(const u32* bits, int id) { return (bits[id / 32] >> id % 32 & 1) != 0; }

// Tokens that the request has made before this one.
KOG_DEVICE int tokens_made(const Block& b, int position) {
  return position + 1 - static_cast<int>(b.request[Request::kPrompt]);
}

// `token` stands at `position`. Every block writes it and reads what it wrote itself: the prompt is
// there already, and the output is, as far as bad words look back on it.
KOG_DEVICE u32* sequence_of(const Block& b) {
  return reinterpret_cast<u32*>(b.p.tokens + static_cast<u64>(b.small->slot) * (b.p.positions + 1));
}

// 0 for an id that is neither in the prompt nor in the output, else 1 + how often it was put out.
KOG_DEVICE void count_token(Block& b, Rows rows, u32* counts, int token, int made) {
  if (made > 0) {
    if (b.thread == 0 && rows.hold(token)) counts[token] += counts[token] == 0 ? 2 : 1;
    return;
  }
  const u32* sequence = sequence_of(b);
  each_own_id(b, rows, [&](int id) { counts[id] = 0; });
  sync_consumers();
  for (u32 i = b.thread; i < b.request[Request::kPrompt]; i += kConsumers)
    if (int id = static_cast<int>(sequence[i]); rows.hold(id)) counts[id] = 1;
}

// Every product is exact in double, so that it does not matter whether it is fused.
KOG_DEVICE float penalize(const u32* request, float logit, u32 seen) {
  if (seen == 0) return logit;
  double factor = static_cast<double>(float_of(request[Request::kRepetition])), wide = logit,
         step = static_cast<double>(float_of(request[Request::kFrequency]));
  logit = static_cast<float>(wide > 0 ? wide / factor : wide * factor);
  logit = static_cast<float>(static_cast<double>(logit) - step * (seen - 1));
  return seen > 1 ? logit - float_of(request[Request::kPresence]) : logit;
}

// The host's mask of this token, the words of the block's ids, once it is there. Each word crosses
// the bus once: `bits` are in shared memory, bit 0 that of the id rows.first / 32 * 32.
constexpr int kOwnMaskWords = (LmHead::kUnits / LmHead::kGroup + 1) * LmHead::kUnitRows / 32 + 2;
static_assert(kOwnMaskWords * sizeof(u32) <= kSamplingBytes, "too many ids a block");

KOG_DEVICE void stage_mask(Block& b, Rows rows, int made, u32* bits) {
  int count = (rows.last + 31) / 32 - rows.first / 32;
  const u64* words = b.p.masks + static_cast<u64>(b.small->slot) * kMaskWords + rows.first / 32;
  u64 epoch = static_cast<u64>(made + 1);
  rejoin();
  for (int first = b.warp * kWarpThreads; first < count; first += kConsumers) {
    int i = first + b.in_warp;
    u64 word = epoch << 32;
    auto ask = [&] {
      if (i < count) word = load_system(words + i);
      return any_in_wave(word >> 32 < epoch);
    };
    if (ask()) {
      if (late_itself(word >> 32 < epoch)) begin_wait(b);
      while (!give_up(b, Step::kMask, static_cast<u32>(rows.first / 32 + i),
                      static_cast<u32>(word >> 32), static_cast<u32>(epoch)) &&
             ask()) {
      }
      end_wait(b);
    }
    if (i < count) bits[i] = static_cast<u32>(word);
  }
}

// The last id of bad word i, if the output ends with the ids before it, else -1.
KOG_DEVICE int completes(const Block& b, int i, int made) {
  const u32* ends = list_of(b, Request::kBadEnds).at;
  const u32* ids = list_of(b, Request::kBadIds).at;
  int first = i == 0 ? 0 : static_cast<int>(ends[i - 1]), last = static_cast<int>(ends[i]) - 1;
  if (made < last - first) return -1;
  const u32* tail = sequence_of(b) + b.request[Request::kPrompt] + made - (last - first);
  for (int j = 0; j < last - first; j++)
    if (load_relaxed(tail + j) != ids[first + j]) return -1;
  return static_cast<int>(ids[last]);
}

// From raw to edited logits of the block's ids; `token` stands at `position`.
KOG_DEVICE void edit_logits(Block& b, Rows rows, int token, int position, const float* raw,
                            float* edited) {
  const u32* r = b.request;
  u32 flags = r[Request::kFlags];
  int made = tokens_made(b, position);
  u32* counts = b.p.counts + static_cast<u64>(b.small->slot) * kVocab;
  if ((flags & kPenalized) != 0) count_token(b, rows, counts, token, made);
  if (b.thread == 0 && made > 0)
    store_relaxed(sequence_of(b) + position, static_cast<u32>(token));
  u32* mask = reinterpret_cast<u32*>(b.partials);
  if ((flags & kMasked) != 0) stage_mask(b, rows, made, mask);
  sync_consumers();
  const u32* allowed = list_of(b, Request::kAllowed).at;
  each_own_id(b, rows, [&](int id) {
    bool banned = (flags & kMasked) != 0 && !has_bit(mask, id - rows.first / 32 * 32);
    banned |= (flags & kAllowed) != 0 && !has_bit(allowed, id);
    float v = (flags & kPenalized) != 0 ? penalize(r, raw[id], counts[id]) : raw[id];
    edited[id] = banned ? -float_of(kInfinity) : v;  // a bias leaves it there
  });
  sync_consumers();
  List ids = list_of(b, Request::kBiasIds), values = list_of(b, Request::kBiasValues);
  for (int i = b.thread; i < ids.count; i += kConsumers)
    if (int id = static_cast<int>(ids.at[i]); rows.hold(id)) edited[id] += float_of(values.at[i]);
  sync_consumers();
  auto ban = [&](int id) {
    if (rows.hold(id)) edited[id] = -float_of(kInfinity);
  };
  List ends = list_of(b, Request::kEndIds);
  for (int i = b.thread; i < ends.count && made < static_cast<int>(r[Request::kMinTokens]);
       i += kConsumers)
    ban(static_cast<int>(ends.at[i]));
  for (int i = b.thread; i < list_of(b, Request::kBadEnds).count; i += kConsumers)
    ban(completes(b, i, made));
  sync_consumers();
}

}  // namespace kog
