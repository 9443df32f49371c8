// Weight @ activations of kColumns tokens: a warp multiplies each fragment of the stream
// (../matvec.h) with a set of tokens an instruction, which are columns of the other operand:
//
//   wide     2 tokens: [high even, low even, high odd, low odd] of one, then of the other
//   narrow   up to 4 tokens: [even, odd] of each
//
// or, of fragments of four rows, which are two steps of K long, with half as many: even of the first
// step, of the second, then odd, each of high and low (wide) or of both tokens (narrow).
//
// Every token's sums are made by the operations, in the order, of a kernel of one token: who shares
// the step does not change a bit of them. Operands of a step of K, in memory or in scratch, are
// [set][lane][word] (wide: as fragments of eight rows take them, for those of four pick theirs) or
// [lane][set][word] (narrow). A warp holds those of its first steps in registers; those of its last
// ones (kRead), where scratch has no room, stay in memory and are read for each unit, some chunks ahead.
//
//   partial sums [part of K][unit][token][row]; a warp adds and finishes a piece of a unit
#pragma once
#include <kog/columns/flags.h>
#include <kog/columns/kept.h>
#include <kog/matvec.h>

namespace kog::columns {

constexpr int kOperandWords = kLaneWords / 2;  // of one lane, step and set
// A wide operand's word of a step lies in scratch at its place exclusive or this: the lanes of a warp
// that stages four steps at once meet banks of their own.
KOG_DEVICE int wide_turn(int step) { return step % 4 * 8; }

template <class Stage>
struct Cut {
  static constexpr int kHalves = 8 / Stage::kFragmentRows;  // ../matvec.h
  static constexpr int kStepValues = kHalves * kFragK;  // of K
  static constexpr int kMostTokens = (Stage::kWide ? 2 : 4) / kHalves;
  static constexpr int kTokens = kColumns < kMostTokens ? kColumns : kMostTokens;  // of a set
  static constexpr int kSets = kColumns / kTokens;
  static constexpr int kSetWords = kTokens * kStepValues / 2 * (Stage::kWide ? 2 : 1);
  static constexpr int kLanes = kSetWords / kOperandWords;  // the others repeat them
  static constexpr int kRowWords = kSets * kOperandWords;   // of one lane and step
  static constexpr int kLaneStride = Stage::kWide ? kOperandWords : kRowWords;
  static constexpr int kStepWords = kSets * kSetWords;
  static constexpr int kUnitWords = Stage::kUnitRows * kColumns;  // sums
  // A warp finishes a piece of a unit at a time, two sums a lane if it has so many.
  static constexpr int kMostRows = 64 / kColumns > 8 ? 64 / kColumns : 8;
  static constexpr int kPieceRows = Stage::kUnitRows < kMostRows ? Stage::kUnitRows : kMostRows;
  static constexpr int kPieces = Stage::kUnitRows / kPieceRows;
  static_assert(kPieces * kPieceRows == Stage::kUnitRows);
  static constexpr int kItems = (kPieceRows * kColumns + 31) / 32;  // of a lane
  static constexpr int kRounds = (Stage::kBatch * kPieces + kWarps - 1) / kWarps;  // of a batch
  // Partial sums lie in scratch behind the operands, or in the place of those that are held, each
  // part's in that of its own.
  static constexpr int kPartStride =
      Stage::kSumsInPlace ? Stage::kSteps * kStepWords : Stage::kBatch * kUnitWords;
  static_assert(Stage::kBatch * kUnitWords <= kPartStride);

  // The first value of K that a warp multiplies, and how many there are.
  KOG_DEVICE static int first_value(const Block& b) {
    return b.warp % Stage::kParts * kPartValues;
  }
  static constexpr int kPartValues = Stage::kSteps * kStepValues;

  // Where among a part's sums value n of a batch's piece lies.
  KOG_DEVICE static int place_of_sum(int piece, int n) {
    if constexpr (kPieces == 1) return piece * kUnitWords + n;
    return piece / kPieces * kUnitWords + piece % kPieces * kPieceRows +
           n / kPieceRows * Stage::kUnitRows + n % kPieceRows;
  }

  // Which narrow operands a lane has: of which token of a set, and the first value of a step.
  KOG_DEVICE static int token(int lane) { return kHalves == 1 ? lane / 8 : lane / 4 % 2; }
  KOG_DEVICE static int value(int lane) {
    int odd = kHalves == 1 ? lane / 4 % 2 : lane / 16, half = kHalves == 1 ? 0 : lane / 8 % 2;
    return half * kFragK + lane % 4 * (kFragK / 4) + 2 * odd;
  }
  // The lane that has word `word` (two values) of a step, of a token of a set.
  KOG_DEVICE static int lane_of(int word, int token) {
    int in_half = word % (kFragK / 2), odd = in_half % 2, half = word / (kFragK / 2);
    int column = kHalves == 1 ? 2 * token + odd : 4 * odd + 2 * half + token;
    return 4 * column + in_half / kLaneWords;
  }
};

// A lane's words of a step, as another block has stored them; and in shared memory.
template <int N>
KOG_DEVICE void load_row(const u32* from, Words<N>& v) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      uint4 w = load_relaxed4(from + i);
      v.w[i] = w.x, v.w[i + 1] = w.y, v.w[i + 2] = w.z, v.w[i + 3] = w.w;
    }
  } else if constexpr (N == 2) {
    uint2 w = load_relaxed2(from);
    v.w[0] = w.x, v.w[1] = w.y;
  } else {
    v.w[0] = load_relaxed(from);
  }
}
template <int N>
KOG_DEVICE void store_row(u32* to, const Words<N>& v) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      *reinterpret_cast<uint4*>(to + i) = {v.w[i], v.w[i + 1], v.w[i + 2], v.w[i + 3]};
  } else if constexpr (N == 2) {
    *reinterpret_cast<uint2*>(to) = {v.w[0], v.w[1]};
  } else {
    to[0] = v.w[0];
  }
}

// How wide operands lie, whatever the stage.
struct Wide {
  static constexpr bool kWide = true, kSumsInPlace = false;
  static constexpr int kUnitRows = 8, kSteps = 1, kParts = kWarps, kFragmentRows = 8, kHeld = 0,
                       kBatch = 1;
};

// What a warp's part of K is multiplied with.
template <class Stage>
struct Operands {
  using S = Cut<Stage>;
  using Row = Words<S::kRowWords>;                                // a lane's words of a step
  static constexpr int kFirst = Stage::kWide ? 0 : Stage::kHeld;  // step in scratch
  static constexpr int kLast = Stage::kSteps - Stage::kRead;      // behind those
  // Fragments of four rows pick each token's words from among those of two, and of two steps.
  static constexpr bool kPicks = Stage::kWide && S::kHalves > 1;
  Row held[Stage::kHeld > 0 ? Stage::kHeld : 1];
  u32* staged;           // words of step kFirst
  const u32* in_memory;  // this lane's words of step 0, where some steps are read
  int lane;              // where this lane's begin in a step
  int first;             // wide: how the first step is turned

  KOG_DEVICE explicit Operands(const Block& b) {
    int part = b.warp % Stage::kParts;
    staged = reinterpret_cast<u32*>(b.scratch) + part * (kLast - kFirst) * S::kStepWords;
    lane = b.in_warp % S::kLanes * S::kLaneStride;
    first = part * Stage::kSteps;
    if constexpr (kPicks) {
      int column = b.in_warp / 4, odd = column / 4, half = column / 2 % 2, low = column % 2;
      lane = (4 * (2 * odd + low) + b.in_warp % 4) * kOperandWords;
      staged += half * Cut<Wide>::kStepWords;
      first = S::kHalves * first + half;
    }
  }
  KOG_DEVICE u32* place(int step) const {
    int at = Stage::kWide ? lane ^ wide_turn(first + step) : lane;
    return staged + (step - kFirst) * S::kStepWords + at;
  }
  // Of one token, among those of two.
  KOG_DEVICE const u32* place_picked(int step, int token) const {
    int at = lane ^ wide_turn(first + S::kHalves * step) ^ token % 2 * (16 * kOperandWords);
    return staged + step * S::kStepWords + token / 2 * Cut<Wide>::kSetWords + at;
  }
  KOG_DEVICE Row load(int step) const {
    // A lane's words of all sets lie side by side, or of one.
    constexpr int kRun = Stage::kWide ? kOperandWords : S::kRowWords < 4 ? S::kRowWords : 4;
    constexpr int kStride = Stage::kWide ? S::kSetWords : kRun;
    Row row;
#pragma unroll
    for (int i = 0; i < S::kRowWords / kRun; i++) {
      const u32* from;
      if constexpr (kPicks)
        from = place_picked(step, i);
      else
        from = place(step) + i * kStride;
      auto v = Words<kRun>::load(reinterpret_cast<const u8*>(from));
#pragma unroll
      for (int j = 0; j < kRun; j++) row.w[i * kRun + j] = v.w[j];
    }
    return row;
  }
  KOG_DEVICE Row at(int step) const { return step < Stage::kHeld ? held[step] : load(step); }
  KOG_DEVICE void store(int step, const Row& v) const { store_row(place(step), v); }
  // Wide operands, which all come by the scratch, into registers if that is where they belong.
  KOG_DEVICE void hold() {
#pragma unroll
    for (int step = 0; step < Stage::kHeld; step++) held[step] = load(step);
  }
};
// A row's words of one set, as the tensor core takes them.
template <int N>
KOG_DEVICE Activation of_set(const Words<N>& row, int set) {
  Activation v;
#pragma unroll
  for (int j = 0; j < kOperandWords; j++) v.w[j] = row.w[set * kOperandWords + j];
  return v;
}

// Where word `word` (two values) of Stage's inputs is for a token, in words from the first step.
template <class Stage>
KOG_DEVICE int narrow_place(int word, int token) {
  using S = Cut<Stage>;
  int in_step = word % (S::kStepValues / 2);
  return word / (S::kStepValues / 2) * S::kStepWords +
         S::lane_of(in_step, token % S::kTokens) * S::kLaneStride +
         token / S::kTokens * kOperandWords + in_step % kLaneWords / 2;
}

// The sums of one unit and part of K to shared memory; `to` is the warp's rows of the unit.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, const float (&c)[Cut<Stage>::kSets][2][4],
                         float* to) {
  constexpr int kSets = Cut<Stage>::kSets, kTokens = Cut<Stage>::kTokens;
  int quarter = b.in_warp % 4, row = b.in_warp / 4;
  if constexpr (Stage::kWide && Cut<Stage>::kHalves == 1) {
    // Of two sets at once, so that every lane has one to store.
    constexpr int kAtOnce = kSets < 2 ? 1 : 2;
#pragma unroll
    for (int first = 0; first < kSets; first += kAtOnce) {
      float sum[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        auto& v = c[first + i];
        float even = v[0][0] + v[1][0], odd = v[0][2] + v[1][2];
        even += v[0][1] + v[1][1];
        odd += v[0][3] + v[1][3];
        sum[i] = quarter % 2 == 0 ? even : odd;
        sum[i] += shuffle_xor(sum[i], 1);
      }
      int set = first + (kAtOnce > 1 ? quarter % 2 : 0);
      // One of two values, not the value at one of two places: registers have no index.
      float even = sum[0], odd = sum[kAtOnce - 1], mine = quarter % 2 == 0 ? even : odd;
      if (kAtOnce > 1 || quarter % 2 == 0)
        to[(2 * set + quarter / 2) * Stage::kUnitRows + row] = mine;
    }
  } else if constexpr (Cut<Stage>::kHalves == 1) {
#pragma unroll
    for (int set = 0; set < kSets; set++) {
      auto& v = c[set];
      float even = v[0][0] + v[1][0], odd = v[0][3] + v[1][3];
      if (quarter < kTokens) to[(kTokens * set + quarter) * Stage::kUnitRows + row] = even + odd;
    }
  } else {
    // Sums of even words in the first two quarters, of odd ones in the others; of the first step of
    // a fragment in the first of two, of the second in the other and four rows on (../matvec.h).
#pragma unroll
    for (int set = 0; set < kSets; set++)
#pragma unroll
      for (int token = 0; token < kTokens; token++) {
        auto& v = c[set];
        float even = v[0][token] + v[1][token], odd = v[0][2 + token] + v[1][2 + token];
        if constexpr (Stage::kWide) {
          even += v[0][1] + v[1][1];
          odd += v[0][3] + v[1][3];
        }
        float sum = quarter % 2 == row / 4 ? (quarter < 2 ? even : odd) : 0;
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        sum += shuffle_xor(sum, 16);
        if (row < 4 && quarter == 0) to[(kTokens * set + token) * Stage::kUnitRows + row] = sum;
      }
  }
}

// Sums of one unit, or of the one in hand of a period: of each set in two chains.
template <class Stage>
using Sums = float[Cut<Stage>::kSets][2][4];

// One fragment by operands `row`, as the f-th of its chunk.
template <class Stage>
KOG_DEVICE void multiply_fragment(const Fragment& w, const Words<Cut<Stage>::kRowWords>& row, int f,
                                  Sums<Stage>& c) {
#pragma unroll
  for (int set = 0; set < Cut<Stage>::kSets; set++)
    multiply_add<kF16>(c[set][f & 1], w.w, of_set(row, set).w);
}

// Multiply the period's chunk i. kKnown: i is, and so are the operands' registers.
template <class Stage, bool kKnown>
KOG_DEVICE void multiply_chunk(Block& b, const Fragment (&w)[kFragments], const Operands<Stage>& x,
                               int i, int left, Sums<Stage>& c, float* to) {
  using S = Cut<Stage>;
  constexpr int kSteps = Stage::kSteps, kPeriod = Stage::kPeriod;
#pragma unroll
  for (int f = 0; f < kFragments; f++) {
    int at = i * kFragments + f, step = kPeriod == 1 ? at : at % kSteps;
    auto row = kKnown ? x.at(step) : x.load(step);
    multiply_fragment<Stage>(w[f], row, f, c);
    if (kPeriod > 1 && step == kSteps - 1) {
      int done = at / kSteps;
      if (done < left) put_sums<Stage>(b, c, to + done * S::kUnitWords);
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
#pragma unroll
        for (int j = 0; j < 4; j++) c[set][0][j] = c[set][1][j] = 0;
    }
  }
}

// Operands in memory, of a unit's last chunks: some chunks are on their way while others are
// multiplied. All of them have been received (layer.h), and no block overwrites them meanwhile: for
// that it waits for the rows that this one sends behind them.
template <class Stage>
struct Reads {
  using Row = typename Operands<Stage>::Row;
  static constexpr int kFirst = Operands<Stage>::kLast / kFragments;  // chunk
  static_assert(Operands<Stage>::kLast % kFragments == 0);
  static_assert(Stage::kRead % (kReadChunks * kFragments) == 0);
  Row rows[kReadChunks][kFragments];

  KOG_DEVICE explicit Reads(const Operands<Stage>& x) {
#pragma unroll
    for (int n = 0; n < kReadChunks; n++) ask(x, n, kFirst + n);
  }
  KOG_DEVICE void ask(const Operands<Stage>& x, int n, int chunk) {
    const u32* from = x.in_memory + chunk * kFragments * Cut<Stage>::kStepWords;
#pragma unroll
    for (int f = 0; f < kFragments; f++) load_row(from + f * Cut<Stage>::kStepWords, rows[n][f]);
  }
  KOG_DEVICE void multiply(Block& b, Ring& ring, const Operands<Stage>& x, Sums<Stage>& c) {
#pragma unroll 1
    for (int first = kFirst; first < kPeriodChunks<Stage>; first += kReadChunks) {
#pragma unroll
      for (int n = 0; n < kReadChunks; n++) {
        Chunk<Stage> chunk;
        chunk.take(b, ring);
#pragma unroll
        for (int f = 0; f < kFragments; f++) {
          Row row = rows[n][f];
#pragma unroll
          for (int j = 0; j < Cut<Stage>::kRowWords; j++) row.w[j] = operand_of(row.w[j]);
          multiply_fragment<Stage>(chunk.w[f], row, f, c);
        }
        int next = first + n + kReadChunks;
        if (next < kPeriodChunks<Stage>) ask(x, n, next);
      }
    }
  }
};

// The sums of one period, of whose units `left` are there.
template <class Stage>
KOG_DEVICE void multiply_period(Block& b, Ring& ring, const Operands<Stage>& x, int left,
                                float* to) {
  constexpr int kPeriod = Stage::kPeriod, kChunks = kPeriodChunks<Stage>;
  // Operands in registers need steps that are known, and so does a period of several units.
  constexpr int kKnown =
      kPeriod > 1 ? kChunks : (Stage::kHeld + kFragments - 1) / kFragments;  // chunks
  Sums<Stage> c = {};
#pragma unroll
  for (int i = 0; i < kKnown; i++) {
    if (kPeriod > 1 && i * kFragments / Stage::kSteps >= left) break;
    Chunk<Stage> chunk;
    chunk.take(b, ring);
    multiply_chunk<Stage, true>(b, chunk.w, x, i, left, c, to);
  }
  constexpr int kHere = Stage::kRead > 0 ? Operands<Stage>::kLast / kFragments : kChunks;
  auto rest = [&] {
#pragma unroll 1
    for (int i = kKnown; i < kHere; i++) {
      Chunk<Stage> chunk;
      chunk.take(b, ring);
      multiply_chunk<Stage, false>(b, chunk.w, x, i, left, c, to);
    }
  };
  if constexpr (Stage::kRead > 0) {
    static_assert(kPeriod == 1);
    Reads<Stage> reads(x);
    rest();
    reads.multiply(b, ring, x, c);
  } else {
    rest();
  }
  if constexpr (kPeriod == 1) put_sums<Stage>(b, c, to);
}

// Weights that a warp takes from the ring before its activations are there (../matvec.h says why):
// the first units of a wide stage whose operands are all held.
template <int kCount, int kUnitChunks>
struct Taken {
  static constexpr int kUnits = kCount;
  Chunk<Wide> chunks[kUnits > 0 ? kUnits * kUnitChunks : 1];

  KOG_DEVICE void take(Block& b, Ring& ring) {
#pragma unroll
    for (int i = 0; i < kUnits * kUnitChunks; i++) chunks[i].take(b, ring);
  }
  template <class Stage>
  KOG_DEVICE void multiply(Block& b, const Operands<Stage>& x, float* to) const {
#pragma unroll
    for (int unit = 0; unit < kUnits; unit++) {
      Sums<Stage> c = {};
#pragma unroll
      for (int i = 0; i < kUnitChunks; i++)
        multiply_chunk<Stage, true>(b, chunks[unit * kUnitChunks + i].w, x, i, 1, c, to);
      put_sums<Stage>(b, c, to + unit * Cut<Stage>::kUnitWords);
    }
  }
};
using NothingTaken = Taken<0, 0>;

// One value of a piece: its row, of the stage, and whose token it is of. `there`: neither padding
// nor a column without a request.
struct Item {
  int row, column;
  bool there;
};
template <class Stage>
KOG_DEVICE Item item_of(const Block& b, int piece, int i) {
  constexpr int kRows = Cut<Stage>::kPieceRows;
  int n = i * 32 + b.in_warp;
  Item item = {piece * kRows + n % kRows, n / kRows, false};
  item.there = item.row < Stage::kRows && item.column < b.p.num_seats;
  return item;
}

// One batch of units: a warp finishes a piece. before(item) -> what its owner asks for early, then
// after(i, item, sum, asked) by whole warps, rows side by side in lanes, then done(piece).
// Batches take turns with `room` where there are two: then only the last one's sums are waited for.
// which() says which units: it is asked again behind the barrier, or what is known of them would be kept,
// and spilled, while the warp multiplies.
template <class Stage, class Which, class Ahead, class Before, class After, class Done>
KOG_DEVICE void run_batch(Block& b, Which which, const Operands<Stage>& x, const Ahead& ahead,
                          int room, bool last, Before before, After after, Done done) {
  using S = Cut<Stage>;
  float* partials = reinterpret_cast<float*>(b.scratch + Stage::kSumsAt);
  if constexpr (Stage::kRooms > 1) partials += room * (Stage::kParts * S::kPartStride);
  Units units = which();
  int count = units.last - units.first;
  // Of the batch's pieces.
  int pieces = count * S::kPieces, from_piece = units.first * S::kPieces;
  int mine = (b.warp + kWarps - from_piece % kWarps) % kWarps;
  // Unless it begins on every path, registers are kept for it throughout the layer.
  decltype(before(Item{})) asked[S::kRounds][S::kItems] = {};
#pragma unroll
  for (int r = 0; r < S::kRounds; r++)
    if (mine + r * kWarps < pieces)
#pragma unroll
      for (int i = 0; i < S::kItems; i++)
        asked[r][i] = before(item_of<Stage>(b, from_piece + mine + r * kWarps, i));
  float* to = partials + b.warp % Stage::kParts * S::kPartStride +
              b.warp / Stage::kParts * Stage::kFragmentRows;
  Ring ring = take_back(b);
  ahead.multiply(b, x, to);
#pragma unroll 1
  for (int n = Ahead::kUnits; n < count; n += Stage::kPeriod)
    multiply_period<Stage>(b, ring, x, count - n, to + n * S::kUnitWords);
  put_away(b, ring);
  sync_consumers();
  b.begin_stage();
  units = which();
  pieces = (units.last - units.first) * S::kPieces, from_piece = units.first * S::kPieces;
  mine = (b.warp + kWarps - from_piece % kWarps) % kWarps;
#pragma unroll
  for (int r = 0; r < S::kRounds; r++) {
    int piece = mine + r * kWarps;
    if (piece >= pieces) break;
#pragma unroll
    for (int i = 0; i < S::kItems; i++) {
      Item item = item_of<Stage>(b, from_piece + piece, i);
      const float* from = partials + S::place_of_sum(piece, i * 32 + b.in_warp);
      float sum = 0;
      if (item.there)
#pragma unroll
        for (int part = 0; part < Stage::kParts; part++) sum += from[part * S::kPartStride];
      after(i, item, sum, asked[r][i]);
    }
    done(from_piece + piece);
  }
  if (Stage::kRooms == 1 || last) sync_consumers();  // the sums have been read
}

// All units of the block, batch by batch; the first begins with what was taken ahead.
template <class Stage, class Which, class Ahead, class Before, class After, class Done>
KOG_DEVICE void run_units(Block& b, Which which, const Operands<Stage>& x, const Ahead& ahead,
                          Before before, After after, Done done) {
  // What a stage staged is never overtaken; where warps share a part, all hold theirs before one
  // of them puts its sums there.
  constexpr bool kShared = Stage::kSumsInPlace && Stage::kParts != kWarps;
  Units units = which();
  if (kShared || units.first == units.last) sync_consumers();
  constexpr bool kOneBatch = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup <= Stage::kBatch;
  if constexpr (kOneBatch) {
    // No loop: what each turn of one needs would be found ahead of it and kept while it multiplies.
    if (Ahead::kUnits > 0 || units.first < units.last)
      run_batch<Stage>(b, which, x, ahead, Ahead::kUnits > 0, true, before, after, done);
  } else {
    int first = units.first;
    auto left = [&] { return which().last - first; };
    auto batch = [&] {
      int count = left();
      return Units{first, first + (count < Stage::kBatch ? count : Stage::kBatch)};
    };
    if constexpr (Ahead::kUnits > 0) {
      run_batch<Stage>(b, batch, x, ahead, 1, left() <= Stage::kBatch, before, after, done);
      first += Stage::kBatch;
    }
#pragma unroll 1
    for (int room = 0; left() > 0; first += Stage::kBatch, room ^= 1)
      run_batch<Stage>(b, batch, x, NothingTaken(), room, left() <= Stage::kBatch, before, after,
                       done);
  }
}

}  // namespace kog::columns
