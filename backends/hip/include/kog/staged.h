// What o_proj would multiply, as it lies in scratch; for a stage alone (stage.h).
#pragma once
#include <kog/operands.h>

namespace kog {

// Word `word` (two values) of what o_proj would multiply.
KOG_DEVICE u32 staged_word(const Block& b, int word) { return reinterpret_cast<const u32*>(b.scratch)[word]; }

}  // namespace kog
