// Matrix products of a wave: 16 rows by 16 columns over 16 values of K, which are four of each of four groups. Thread l
// has row l % 16 of one operand and column l % 16 of the other, of group l / 16. Of a wave's two fragments of R rows (8
// or 4) and a column set of as many:
//
//   row, column   [16 / R of a warp's eights of K][R]    group   [warp][the others of its eights of K]
//
// so where row and column are of the same eights, what comes out is a sum of theirs; other products are of nobody and
// dropped. Thread l then has column l % 16 and rows 4 * (l / 16) on. The sums of the eights that fall to one warp are
// one part of K's, as if that warp had made them alone.
#pragma once
#include <kog/operands.h>

namespace kog {

// Of one unit, a matrix a set.
template <class Stage>
struct UnitSums {
  Matrix of[OperandLayout<Stage>::kSets];
};
template <class Stage>
KOG_DEVICE void clear(UnitSums<Stage>& c) {
  c = {};
}

// One fragment of weights by its operands: eight values of K, four at once.
template <class Stage>
KOG_DEVICE void multiply_fragment(const uint4& w, const typename Operands<Stage>::Row& x, UnitSums<Stage>& c) {
#pragma unroll
  for (int set = 0; set < OperandLayout<Stage>::kSets; set++) {
    const u32* columns = x.w + set * kPieceValueWords;
    multiply_add<kF16>(c.of[set], {w.x, w.y}, {columns[0], columns[1]});
    multiply_add<kF16>(c.of[set], {w.z, w.w}, {columns[2], columns[3]});
  }
}

// The sums of one unit and part of K to shared memory; `to` is the warp's rows of the unit.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, UnitSums<Stage>& c, float* to) {
  using S = OperandLayout<Stage>;
  // Ahead of all that follows, which may write the summands' registers: three wait states (docs/AMD.md, Wait states).
  for (Matrix& one : c.of) settle(one);
  keep_order();
  constexpr int kRows = S::kSetColumns;
  int group = b.warp % 2 * 2 + b.in_warp / 16, which = b.in_warp % 16, column = which % kRows;
  bool mine = which / kRows == 4 * group / kRows;
  int row = kRows == 8 ? b.in_warp / 16 * 4 : 0;
#pragma unroll
  for (int set = 0; set < S::kSets; set++) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = c.of[set].v[i];
      if constexpr (kRows == 4) {  // a warp's other eights, 16 threads on and four columns
        v[i] = mine ? v[i] : 0;
        v[i] += shuffle_xor(v[i], 16);
        v[i] += shuffle_xor(v[i], 4);
      }
      if constexpr (Stage::kWide) v[i] += shuffle_xor(v[i], 1);
    }
    int token = column / S::kCopies;
    bool puts = mine && (kRows == 8 || b.in_warp < 16) && column % S::kCopies == 0 && token < S::kTokens;
    if (puts)
      *reinterpret_cast<float4*>(to + (set * S::kTokens + token) * Stage::kUnitRows + row) = {v[0], v[1], v[2], v[3]};
  }
}

}  // namespace kog
