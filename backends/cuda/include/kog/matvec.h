// Weight @ activations: activations staged once a stage, weights multiplied as their chunks arrive.
//
// A fragment is 8 rows by kFragK values of K; a lane holds a row's quarter of them, kFragK / 8 words.
// It is the 16-row operand of the tensor core: rows 0-7 multiply the even words of each quarter, rows
// 8-15 the odd ones, each against columns of its own. Of the other operand's columns
//
//     0, 1   what the even words meet, high and low part        2, 3   what the odd words meet
//
// Or it is 4 rows by two such steps of K, the first in lanes 0-15, the second in lanes 16-31: rows 0-3
// and 4-7 multiply the even words of each, 8-11 and 12-15 the odd ones, and columns 0 to 7 hold what
// they meet in the same order.
//
// float32 activations come as two 16-bit parts, x = high + low, and keep 16 bits of mantissa or more;
// values that came as 16-bit words have no low part and still carry their factor (words.h). Scratch
// holds, a fragment, one such column after the other: [high even, low even, high odd, low odd] (wide)
// or [even, odd] (narrow).
//
//   partial sums [part of K][row], summed over the parts by the thread that owns the row
#pragma once
#include <kog/ring.h>
#include <kog/words.h>

namespace kog {

// The residual stream, a copy in every block. Warp w holds elements [w * kSlice, (w + 1) * kSlice),
// a lane four side by side; kSlice is what warp w multiplies where K is cut in 16 parts, so that it
// stages for itself.
constexpr int kGroups = (kSlice + 127) / 128;
constexpr int kHeld = 4 * kGroups;
constexpr int kColumnWords = kFragK / 4;  // of a fragment's scratch: a word is two values
constexpr int kHiddenStride = (kHidden + 3) / 4 * 4;

// Index of the first element of a lane's group i; kHidden or more if it has none.
KOG_DEVICE int element(const Block& b, int i) {
  int local = i * 128 + b.in_warp * 4;
  return local < kSlice ? b.warp * kSlice + local : kHiddenStride;
}

template <bool kOwnSlice>
KOG_DEVICE void sync_staged() {
  if constexpr (kOwnSlice)
    sync_warp();
  else
    sync_consumers();
}

// Stage x * gain for Stage, and leave the warps' sums of squares for `inverse_rms`.
template <class Stage>
KOG_DEVICE void stage_x(Block& b, const float (&x)[kHeld], const float (&gain)[kHeld]) {
  static_assert(Stage::kWide);
  // What the warps stage is what they multiply; their own parts, where no barrier follows. (The head
  // of concatenated lanes is staged elsewhere.)
  static_assert(Stage::kCols != kHidden || (Stage::kParts == kWarps
                                                ? Stage::kPaddedK == kWarps * kSlice
                                                : Stage::kPaddedK <= kWarps * kSlice));
  float square = 0;
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = i * 128 + b.in_warp * 4, e = b.warp * kSlice + local;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      square = fused(x[4 * i + j], x[4 * i + j], square);
      v[j] = product(x[4 * i + j], gain[4 * i + j]);
    }
    if (local < kSlice && e < Stage::kPaddedK)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        u32 high = round_pair<kF16>(v[2 * odd], v[2 * odd + 1]);
        u32 low = round_pair<kF16>(v[2 * odd] - low_of(high), v[2 * odd + 1] - high_of(high));
        u32* to = reinterpret_cast<u32*>(b.scratch) + e / kFragK * (4 * kColumnWords) +
                  e % kFragK / 4 + odd * 2 * kColumnWords;
        to[0] = high;
        to[kColumnWords] = low;
      }
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
  if (b.in_warp == 0) b.small->squares[b.warp] = square;
  sync_staged<Stage::kParts == kWarps>();
}

// v[0] + v[1] + ... in pairs, then pairs of pairs: a sum that waits for log2(N) additions.
template <int N>
KOG_DEVICE float sum_of(float (&v)[N]) {
#pragma unroll
  for (int by = 1; by < N; by *= 2)
#pragma unroll
    for (int i = 0; i + by < N; i += 2 * by) v[i] += v[i + by];
  return v[0];
}
// The sums of all parts of K, `stride` apart, as one.
template <class Stage>
KOG_DEVICE float sum_of_parts(const float* from, int stride) {
  float v[Stage::kParts];
#pragma unroll
  for (int i = 0; i < Stage::kParts; i++) v[i] = from[i * stride];
  return sum_of(v);
}

// 1 / rms(x) of the x staged last, of one column; after a barrier that all warps have passed since.
KOG_DEVICE float inverse_rms(const Block& b, int column = 0) {
  float v[kWarps];
#pragma unroll
  for (int i = 0; i < kWarps; i += 4) {
    float4 q = *reinterpret_cast<const float4*>(b.small->squares + column * kWarps + i);
    v[i] = q.x, v[i + 1] = q.y, v[i + 2] = q.z, v[i + 3] = q.w;
  }
  return rsqrt_of(sum_of(v) * (1.f / kHidden) + kNormEps);
}

// Stage's inputs as they come in 16-bit words, kValues (8 or 4) a vector: which of them a thread stages.
template <class Stage, int kValues = 8>
struct Inputs {
  static_assert(!Stage::kWide);
  static constexpr bool kOwnSlice = Stage::kParts == kWarps;
  static constexpr int kPart =
      kOwnSlice ? Stage::kPaddedK / kWarps : Stage::kPaddedK;  // values of one warp, or of all
  static constexpr int kStride = kValues * 32 * (kOwnSlice ? 1 : kWarps);
  static constexpr int kCount = (kPart + kStride - 1) / kStride;
  int first, lane;

  KOG_DEVICE explicit Inputs(const Block& b) {
    first = kOwnSlice ? b.warp * kPart : 0;
    lane = kOwnSlice ? b.in_warp : b.thread;
  }
  // The first value of vector i; kPaddedK or more where there is none.
  KOG_DEVICE int value(int i) const {
    int local = i * kStride + lane * kValues;
    return local < kPart ? first + local : Stage::kPaddedK;
  }
  KOG_DEVICE void put(const Block& b, int i, const u32 (&w)[kValues / 2]) const {
    int at = value(i);
    if (at >= Stage::kPaddedK) return;
    u32* to = reinterpret_cast<u32*>(b.scratch) + at / kFragK * (2 * kColumnWords) + at % kFragK / 4;
    if constexpr (kValues == 8) {
      *reinterpret_cast<uint2*>(to) = {w[0], w[2]};
      *reinterpret_cast<uint2*>(to + kColumnWords) = {w[1], w[3]};
    } else {
      to[0] = w[0], to[kColumnWords] = w[1];
    }
  }
};

// Wait for Stage's inputs, pair words at `base`, and stage them.
template <class Stage>
KOG_DEVICE void stage_words(Block& b, Step step, const u32* base, u32 phase) {
  constexpr int kCount = Inputs<Stage>::kCount, kWords = (Stage::kCols + 1) / 2;
  Inputs<Stage> in(b);
  int at[kCount];
  uint4 q[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    int value = in.value(i);
    at[i] = value < Stage::kPaddedK ? value / 2 : kWords;
  }
  poll<kWords>(b, step, base, at, phase, q);
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = at[i] + j < kWords ? operand_of(word_of(q[i], j)) : 0;
    in.put(b, i, w);
  }
  sync_staged<Inputs<Stage>::kOwnSlice>();
}

// N words that one lane reads side by side.
template <int N>
struct Words {
  u32 w[N];
  KOG_DEVICE static Words load(const u8* p) {
    if constexpr (N == 4) {
      uint4 v = *reinterpret_cast<const uint4*>(p);
      return {{v.x, v.y, v.z, v.w}};
    } else if constexpr (N == 2) {
      uint2 v = *reinterpret_cast<const uint2*>(p);
      return {{v.x, v.y}};
    } else {
      return {{*reinterpret_cast<const u32*>(p)}};
    }
  }
};
constexpr int kLaneWords = kFragK / 8;
constexpr int kFragmentBytes = kChunkBytes / kFragments / kWarps;
using Fragment = Words<kLaneWords>;
using Activation = Words<kLaneWords / 2>;  // what a fragment meets in one lane's column

template <class Stage>
constexpr int kBatchRows = Stage::kBatch * Stage::kUnitRows;  // rows of a batch
template <class Stage>
constexpr int kStepBytes = kColumnWords * 4 * (Stage::kWide ? 4 : 2);  // of kFragK values of K

// How the lanes share a fragment of Stage: which step of K, of the kSteps in one, and where in memory.
template <class Stage>
struct Shape {
  static constexpr int kHalves = 8 / Stage::kFragmentRows;  // steps of kFragK values in a fragment

  // Of a fragment, row by row, this lane's bytes.
  KOG_DEVICE static int at(const Block& b) {
    if constexpr (kHalves == 1) return b.in_warp * (kLaneWords * 4);
    return (b.in_warp / 4 % 4 * 8 + b.in_warp / 16 * 4 + b.in_warp % 4) * (kLaneWords * 4);
  }
  // The step of K and the column of scratch, of those it has, that meet this lane's column of the operand.
  KOG_DEVICE static int half(const Block& b) { return kHalves == 1 ? 0 : b.in_warp / 8 % 2; }
  KOG_DEVICE static int column(const Block& b) {
    int odd = kHalves == 1 ? b.in_warp / 8 % 2 : b.in_warp / 16, low = b.in_warp / 4 % 2;
    return Stage::kWide ? 2 * odd + low : odd;
  }
};

// The sums of one unit and one part of K to shared memory. Of 8 rows, lane 4 * row + 0 holds those of
// even words, + 1 those of odd ones; of 4, they lie in lanes 4 * row, 4 * (row + 4) + 1, 4 * row + 2
// and 4 * (row + 4) + 3.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, const float (&c)[2][4], float* to) {
  float even = c[0][0] + c[1][0], odd = c[0][2] + c[1][2];
  if constexpr (Stage::kWide) {
    even += c[0][1] + c[1][1];
    odd += c[0][3] + c[1][3];
  }
  if constexpr (Shape<Stage>::kHalves == 1) {
    float sum = b.in_warp % 2 == 0 ? even : odd;
    sum += shuffle_xor(sum, 1);
    if (b.in_warp % 4 == 0) to[b.in_warp / 4] = sum;
  } else {
    float sum = b.in_warp % 4 < 2 ? even : odd;
    sum = b.in_warp % 2 == b.in_warp / 16 ? sum : 0;
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    sum += shuffle_xor(sum, 16);
    if (b.in_warp < 16 && b.in_warp % 4 == 0) to[b.in_warp / 4] = sum;
  }
}

// What a warp's part of K is multiplied with: in registers where that is little.
template <class Stage>
struct Staged {
  static constexpr bool kHeldAll = Stage::kSteps <= 8;
  static constexpr int kHalves = Shape<Stage>::kHalves;
  const u8* from;
  Activation held[kHeldAll ? Stage::kSteps : 1];

  KOG_DEVICE explicit Staged(const Block& b) {
    from = b.scratch +
           (b.warp % Stage::kParts * Stage::kSteps * kHalves + Shape<Stage>::half(b)) *
               kStepBytes<Stage> +
           (Shape<Stage>::column(b) * kColumnWords + b.in_warp % 4 * (kLaneWords / 2)) * 4;
    if constexpr (kHeldAll)
#pragma unroll
      for (int i = 0; i < Stage::kSteps; i++)
        held[i] = Activation::load(from + i * kHalves * kStepBytes<Stage>);
  }
  KOG_DEVICE Activation operator[](int step) const {
    if constexpr (kHeldAll) return held[step];
    return Activation::load(from + step * kHalves * kStepBytes<Stage>);
  }
};

// Units and chunks end together every kPeriod units: one period of a stage's stream
// (schedule/cuda.py keeps these short).
template <class Stage>
constexpr int kPeriodChunks = Stage::kPeriod * Stage::kSteps / kFragments;
// A held vector needs indices that are known, and so does a period of several units.
template <class Stage>
constexpr bool kUnrolledPeriod = Stage::kPeriod > 1 || Staged<Stage>::kHeldAll;

// One warp's part of the next chunk. Fragments behind a stage's last one are whatever the ring held
// before: what is computed of them goes nowhere.
template <class Stage>
struct Chunk {
  Fragment w[kFragments];

  KOG_DEVICE void take(Block& b, Ring& ring) {
    ring.wait(b);
    take_there(b, ring);
  }
  // One that is there. If it is not `mine` but the next stage's it is read all the same, and stays: loads
  // under a condition would take other registers (benchmarks/README.md).
  KOG_DEVICE void take_there(Block& b, Ring& ring, bool mine = true) {
    const u8* from = ring.chunk(b) + b.warp * kFragmentBytes + Shape<Stage>::at(b);
#pragma unroll
    for (int f = 0; f < kFragments; f++) w[f] = Fragment::load(from + f * kWarps * kFragmentBytes);
    if (mine) ring.release(b);
  }
};

// Weights that a warp takes from the ring before its activations are there: more of the stream finds
// room while all wait, and what is multiplied first need not be waited for then. At most kAheadWords
// registers: beside more of x fewer are free. `kAllOrNone`: only if they are the whole run.
constexpr int kAheadWords = kHeld <= 4 ? 64 : 36;
constexpr int kMostAhead = kAheadWords / (kFragments * kLaneWords);  // chunks
template <int kA, int kB>
constexpr int kLeast = kA < kB ? kA : kB;
template <class Stage, bool kAllOrNone = false>
struct Ahead {
  static constexpr int kSure = Stage::kUnits / Stage::kGroup;  // units of every block
  static constexpr int kLongest = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup;
  static constexpr int kSureChunks = (kSure * Stage::kSteps + kFragments - 1) / kFragments;
  static constexpr int kAllChunks = (kLongest * Stage::kSteps + kFragments - 1) / kFragments;
  static constexpr int kRoom =
      kLeast<kMostAhead, Stage::kBatch * Stage::kSteps / kFragments>;
  static constexpr bool kWhole = kAllChunks <= kRoom;
  static constexpr int kMost = kWhole ? kAllChunks : kAllOrNone ? 0 : kLeast<kRoom, kSureChunks>;
  // Part of a period only where its code is laid out chunk by chunk.
  static constexpr int kCount =
      kUnrolledPeriod<Stage> ? kMost : kMost / kPeriodChunks<Stage> * kPeriodChunks<Stage>;
  static constexpr int kPeriods = (kCount + kPeriodChunks<Stage> - 1) / kPeriodChunks<Stage>;
  static constexpr int kUnits = kPeriods * Stage::kPeriod;
  static_assert(kCount <= kRingChunks);  // all of them may be waited for at once
  Chunk<Stage> chunks[kCount ? kCount : 1];

  // All of them, for `layer`, as they come.
  KOG_DEVICE void take(Block& b, Ring& ring, int layer) { take<0, kCount, false>(b, ring, layer); }
  // Chunks [kFirst, kLast): kTogether where a ring that is full has them all.
  template <int kFirst, int kLast, bool kTogether>
  KOG_DEVICE void take(Block& b, Ring& ring, int layer) {
    if constexpr (kTogether) ring.wait_for<kLast - kFirst>(b);
#pragma unroll
    for (int i = kFirst; i < kLast; i++) {
      if constexpr (!kTogether) ring.wait(b);
      chunks[i].take_there(b, ring, is_mine(b, layer, i));
    }
  }
  KOG_DEVICE static bool is_mine(const Block& b, int layer, int i) {
    return i < kSureChunks || i * kFragments < fragments_of<Stage>(b.place, layer);
  }
};
template <class Stage>
struct NothingAhead {
  static constexpr int kCount = 0, kPeriods = 0, kUnits = 0, kSure = 0;
  Chunk<Stage> chunks[1];
};

// The sums of one period, of whose units `left` are there. next(i): chunk i of it. `kLaidOut`: the code of
// each chunk by itself, as chunks that were taken ahead need it: registers have no index.
template <class Stage, bool kLaidOut, class Next>
KOG_DEVICE void multiply_period(Block& b, const Staged<Stage>& x, int left, float* to, Next next) {
  constexpr int kSteps = Stage::kSteps, kPeriod = Stage::kPeriod;
  constexpr int kUnrolled = kLaidOut ? kPeriodChunks<Stage> : 1;
  float c[2][4] = {};
#pragma unroll kUnrolled
  for (int i = 0; i < kPeriodChunks<Stage>; i++) {
    if (kPeriod > 1 && i * kFragments / kSteps >= left) break;
    Chunk<Stage> chunk = next(i);
#pragma unroll
    for (int f = 0; f < kFragments; f++) {
      int at = i * kFragments + f, step = kPeriod == 1 ? at : at % kSteps;
      multiply_add<kF16>(c[f & 1], chunk.w[f].w, x[step].w);
      if (kPeriod > 1 && step == kSteps - 1) {
        int done = at / kSteps;
        if (done < left) put_sums<Stage>(b, c, to + done * Stage::kUnitRows);
#pragma unroll
        for (int j = 0; j < 4; j++) c[0][j] = c[1][j] = 0;
      }
    }
  }
  if constexpr (kPeriod == 1) put_sums<Stage>(b, c, to);
}

// Partial sums of `units` units, all warps together; takes whole chunks from the ring.
template <class Stage, class Taken>
KOG_DEVICE void multiply(Block& b, Ring& ring, int units, float* partials, const Taken& taken) {
  constexpr int kPeriod = Stage::kPeriod;
  Staged<Stage> x(b);
  float* to = partials + b.warp % Stage::kParts * kBatchRows<Stage> + b.warp / Stage::kParts * Stage::kFragmentRows;
  auto next_of_ring = [&] {
    Chunk<Stage> chunk;
    chunk.take(b, ring);
    return chunk;
  };
#pragma unroll
  for (int p = 0; p < Taken::kPeriods; p++) {
    int left = (p + 1) * kPeriod <= Taken::kSure ? kPeriod : units - p * kPeriod;
    multiply_period<Stage, true>(b, x, left, to + p * kPeriod * Stage::kUnitRows, [&](int i) {
      int n = p * kPeriodChunks<Stage> + i;
      return n < Taken::kCount ? taken.chunks[n] : next_of_ring();
    });
  }
  to += Taken::kUnits * Stage::kUnitRows;
  for (int unit = Taken::kUnits; unit < units; unit += kPeriod, to += kPeriod * Stage::kUnitRows)
    multiply_period<Stage, kUnrolledPeriod<Stage>>(b, x, units - unit, to,
                                                   [&](int) { return next_of_ring(); });
}

// One batch of rows: before(row) -> what a row's owner asks for early, then after(row, sum, asked)
// by whole warps, thread t with row first + t of the block's order; rows >= kRows are padding.
template <class Stage, class Taken, class Before, class After>
KOG_DEVICE void run_batch(Block& b, Ring& ring, int& turn, int first, int left, const Taken& taken,
                          Before before, After after) {
  int count = left < Stage::kBatch ? left : Stage::kBatch;
  float* partials = b.partials + (turn++ & 1) * (kPartialBytes / 8);
  int row = first * Stage::kUnitRows + b.thread;
  bool owner = b.thread < count * Stage::kUnitRows && row < Stage::kRows;
  auto asked = before(row, owner);
  multiply<Stage>(b, ring, count, partials, taken);
  sync_consumers();
  if (b.warp * 32 >= count * Stage::kUnitRows) return;
  // Threads without a row add up another's: without a branch, what `after` reads is asked for at once.
  const float* from = partials + (owner ? b.thread : 0);
  after(row, owner, sum_of_parts<Stage>(from, kBatchRows<Stage>), asked);
}

// All rows of the block, batch by batch; the first begins with what was taken ahead.
template <class Stage, class Taken, class Before, class After>
KOG_DEVICE void run_rows(Block& b, Ring& ring, int& turn, Units units, const Taken& taken,
                         Before before, After after) {
  static_assert(Taken::kUnits <= Stage::kBatch);
  constexpr bool kOneBatch = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup <= Stage::kBatch;
  int first = units.first;
  if (first == units.last) return sync_consumers();  // what a stage staged is never overtaken
  if constexpr (kOneBatch || Taken::kPeriods > 0) {
    run_batch<Stage>(b, ring, turn, first, units.last - first, taken, before, after);
    first += Stage::kBatch;
  }
  if constexpr (!kOneBatch)
    for (; first < units.last; first += Stage::kBatch)
      run_batch<Stage>(b, ring, turn, first, units.last - first, NothingAhead<Stage>(), before,
                       after);
}

}  // namespace kog
