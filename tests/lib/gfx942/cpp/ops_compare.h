// Vector comparisons: a mask of lanes in an SGPR pair.
#pragma once
#include "operands.h"

#define COMPARE(NAME, T, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { compare_op<T>(w, i, [](T a, T b) { return EXPR; }); }}
#define COMPARE_INTEGERS(SUFFIX, T) \
    COMPARE(V_CMP_EQ_##SUFFIX, T, a == b), COMPARE(V_CMP_NE_##SUFFIX, T, a != b), \
        COMPARE(V_CMP_LT_##SUFFIX, T, a < b), COMPARE(V_CMP_LE_##SUFFIX, T, a <= b), \
        COMPARE(V_CMP_GT_##SUFFIX, T, a > b), COMPARE(V_CMP_GE_##SUFFIX, T, a >= b)
// LG: less or greater; the names with an N are their contraries, true of a NaN; O: both are numbers, U: one is none.
#define COMPARE_FLOATS(SUFFIX, T) \
    COMPARE(V_CMP_EQ_##SUFFIX, T, a == b), COMPARE(V_CMP_LT_##SUFFIX, T, a < b), \
        COMPARE(V_CMP_LE_##SUFFIX, T, a <= b), COMPARE(V_CMP_GT_##SUFFIX, T, a > b), \
        COMPARE(V_CMP_GE_##SUFFIX, T, a >= b), COMPARE(V_CMP_LG_##SUFFIX, T, a < b || a > b), \
        COMPARE(V_CMP_O_##SUFFIX, T, a == a && b == b), COMPARE(V_CMP_U_##SUFFIX, T, a != a || b != b), \
        COMPARE(V_CMP_NEQ_##SUFFIX, T, !(a == b)), COMPARE(V_CMP_NLT_##SUFFIX, T, !(a < b)), \
        COMPARE(V_CMP_NLE_##SUFFIX, T, !(a <= b)), COMPARE(V_CMP_NGT_##SUFFIX, T, !(a > b)), \
        COMPARE(V_CMP_NGE_##SUFFIX, T, !(a >= b)), COMPARE(V_CMP_NLG_##SUFFIX, T, !(a < b || a > b))

static const Operation COMPARE_OPERATIONS[] = {
    COMPARE_INTEGERS(I16, i16), COMPARE_INTEGERS(U16, u16), COMPARE_INTEGERS(I32, i32),
    COMPARE_INTEGERS(U32, u32), COMPARE_INTEGERS(I64, i64), COMPARE_INTEGERS(U64, u64),
    COMPARE_FLOATS(F32, float),  COMPARE_FLOATS(F64, double),
};
