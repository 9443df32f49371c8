// Scalar instructions, branches, and vector instructions that read or write single lanes.
#pragma once
#include "ops_integer.h"

struct Machine;
u64 clock_of(Machine&);
u32 hardware_register(Machine&, const Wave&, int id);
void meet_at_barrier(Machine&, Wave&);
void end_wave(Machine&, Wave&);
void wait_for(Machine&, Wave&, int vector, int scalar);

template <class T> inline void set_scalar(Wave& w, int code, T value) {
    if constexpr (sizeof(T) == 8) w.set_pair(code, bits_to<u64>(value));
    else w.set_word(code, bits_to<u32>(value));
}

#define S1(NAME, R, A, EXPR, SCC) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         A a = scalar<A>(w, i, 0); \
         R d = EXPR; \
         [[maybe_unused]] bool scc = w.scc; \
         w.scc = SCC; \
         set_scalar<R>(w, i.dst, d); \
     }}
#define S2(NAME, R, A, B, EXPR, SCC) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         A a = scalar<A>(w, i, 0); \
         B b = scalar<B>(w, i, 1); \
         [[maybe_unused]] bool scc = w.scc; \
         R d = EXPR; \
         w.scc = SCC; \
         set_scalar<R>(w, i.dst, d); \
     }}
#define S_COMPARE(NAME, A, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         A a = scalar<A>(w, i, 0), b = scalar<A>(w, i, 1); \
         w.scc = EXPR; \
     }}
// With the 16 bits of the instruction as b, and the destination as a.
#define S_SHORT(NAME, BODY) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         [[maybe_unused]] i32 a = i32(w.word(i.dst)), b = i16(i.offset); \
         BODY \
     }}
// D = the lanes that were on; those that go on are `EXPR` of the operand a and them.
#define SAVE_EXEC(NAME, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         u64 a = scalar<u64>(w, i, 0), exec = w.exec(), next = EXPR; \
         w.set_pair(i.dst, exec); \
         w.set_pair(EXEC, next); \
         w.scc = next != 0; \
     }}
#define BRANCH(NAME, CONDITION) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         if (CONDITION) w.pc = i.target; \
     }}
#define NOTHING(NAME) {#NAME, [](Machine&, Wave&, const Inst&) {}}

inline bool overflows_add(u32 a, u32 b) { return __builtin_add_overflow_p(i32(a), i32(b), i32(0)); }
inline bool overflows_sub(u32 a, u32 b) { return __builtin_sub_overflow_p(i32(a), i32(b), i32(0)); }
inline int first_lane(u64 exec) { return exec ? __builtin_ctzll(exec) : 0; }
// D = S1 and the bits of S0, a half of a mask from lane `first` on, that are of lanes below.
inline void count_lower_lanes(Wave& w, const Inst& i, int first) {
    Lanes<u32> ra, rb, out;
    const u32 *a = fetch<u32>(w, i, 0, ra), *b = fetch<u32>(w, i, 1, rb);
    for (int l = 0; l < LANES; l++) out.lane[l] = b[l] + __builtin_popcount(a[l] & low_bits(u32(most(l - first, 0))));
    store<u32>(w, i, out.lane, w.exec());
}

static const Operation SCALAR_OPERATIONS[] = {
    S1(S_MOV_B32, u32, u32, a, scc),
    S1(S_MOV_B64, u64, u64, a, scc),
    S1(S_NOT_B32, u32, u32, ~a, d != 0),
    S1(S_NOT_B64, u64, u64, ~a, d != 0),
    S1(S_ABS_I32, u32, u32, i32(a) < 0 ? 0 - a : a, d != 0),
    S1(S_BREV_B32, u32, u32, reverse_bits(a), scc),
    S1(S_BCNT1_I32_B32, u32, u32, u32(__builtin_popcount(a)), d != 0),
    S1(S_BCNT1_I32_B64, u32, u64, u32(__builtin_popcountll(a)), d != 0),
    S1(S_FF1_I32_B32, u32, u32, a ? u32(__builtin_ctz(a)) : ~0u, scc),
    S1(S_FF1_I32_B64, u32, u64, a ? u32(__builtin_ctzll(a)) : ~0u, scc),
    S1(S_FLBIT_I32_B32, u32, u32, a ? u32(__builtin_clz(a)) : ~0u, scc),
    S1(S_SEXT_I32_I8, u32, u32, u32(i32(int8_t(a))), scc),
    S1(S_SEXT_I32_I16, u32, u32, u32(i32(i16(a))), scc),
    S2(S_ADD_U32, u32, u32, u32, a + b, d < a),
    S2(S_SUB_U32, u32, u32, u32, a - b, a < b),
    S2(S_ADD_I32, u32, u32, u32, a + b, overflows_add(a, b)),
    S2(S_SUB_I32, u32, u32, u32, a - b, overflows_sub(a, b)),
    S2(S_ADDC_U32, u32, u32, u32, a + b + scc, (u64(a) + b + scc) >> 32),
    S2(S_SUBB_U32, u32, u32, u32, a - b - scc, a < u64(b) + scc),
    S2(S_AND_B32, u32, u32, u32, a & b, d != 0),
    S2(S_AND_B64, u64, u64, u64, a & b, d != 0),
    S2(S_OR_B32, u32, u32, u32, a | b, d != 0),
    S2(S_OR_B64, u64, u64, u64, a | b, d != 0),
    S2(S_XOR_B32, u32, u32, u32, a ^ b, d != 0),
    S2(S_XOR_B64, u64, u64, u64, a ^ b, d != 0),
    S2(S_ANDN2_B32, u32, u32, u32, a & ~b, d != 0),
    S2(S_ANDN2_B64, u64, u64, u64, a & ~b, d != 0),
    S2(S_ORN2_B32, u32, u32, u32, a | ~b, d != 0),
    S2(S_ORN2_B64, u64, u64, u64, a | ~b, d != 0),
    S2(S_NAND_B64, u64, u64, u64, ~(a & b), d != 0),
    S2(S_NOR_B64, u64, u64, u64, ~(a | b), d != 0),
    S2(S_XNOR_B32, u32, u32, u32, ~(a ^ b), d != 0),
    S2(S_XNOR_B64, u64, u64, u64, ~(a ^ b), d != 0),
    S2(S_LSHL_B32, u32, u32, u32, a << (b & 31), d != 0),
    S2(S_LSHL_B64, u64, u64, u32, a << (b & 63), d != 0),
    S2(S_LSHR_B32, u32, u32, u32, a >> (b & 31), d != 0),
    S2(S_LSHR_B64, u64, u64, u32, a >> (b & 63), d != 0),
    S2(S_ASHR_I32, i32, i32, u32, a >> (b & 31), d != 0),
    S2(S_ASHR_I64, i64, i64, u32, a >> (b & 63), d != 0),
    S2(S_BFM_B32, u32, u32, u32, ((1u << (a & 31)) - 1) << (b & 31), scc),
    S2(S_BFE_U32, u32, u32, u32, (a >> (b & 31)) & low_bits(b >> 16 & 127), d != 0),
    S2(S_BFE_I32, i32, u32, u32, extract_signed(a, b & 31, least(b >> 16 & 127, 32u)), d != 0),
    S2(S_LSHL1_ADD_U32, u32, u32, u32, (a << 1) + b, ((u64(a) << 1) + b) >> 32 != 0),
    S2(S_LSHL2_ADD_U32, u32, u32, u32, (a << 2) + b, ((u64(a) << 2) + b) >> 32 != 0),
    S2(S_LSHL3_ADD_U32, u32, u32, u32, (a << 3) + b, ((u64(a) << 3) + b) >> 32 != 0),
    S2(S_LSHL4_ADD_U32, u32, u32, u32, (a << 4) + b, ((u64(a) << 4) + b) >> 32 != 0),
    S2(S_MUL_I32, u32, u32, u32, a* b, scc),
    S2(S_MUL_HI_U32, u32, u32, u32, u32(u64(a) * b >> 32), scc),
    S2(S_MUL_HI_I32, u32, i32, i32, u32(u64(i64(a) * b) >> 32), scc),
    S2(S_MAX_I32, i32, i32, i32, most(a, b), a >= b),
    S2(S_MIN_I32, i32, i32, i32, least(a, b), a < b),
    S2(S_MAX_U32, u32, u32, u32, most(a, b), a >= b),
    S2(S_MIN_U32, u32, u32, u32, least(a, b), a < b),
    S2(S_CSELECT_B32, u32, u32, u32, scc ? a : b, scc),
    S2(S_CSELECT_B64, u64, u64, u64, scc ? a : b, scc),
    S2(S_PACK_LL_B32_B16, u32, u32, u32, (a & 0xFFFF) | b << 16, scc),
    S_COMPARE(S_CMP_EQ_U32, u32, a == b),
    S_COMPARE(S_CMP_LG_U32, u32, a != b),
    S_COMPARE(S_CMP_LT_U32, u32, a < b),
    S_COMPARE(S_CMP_LE_U32, u32, a <= b),
    S_COMPARE(S_CMP_GT_U32, u32, a > b),
    S_COMPARE(S_CMP_GE_U32, u32, a >= b),
    S_COMPARE(S_CMP_EQ_I32, i32, a == b),
    S_COMPARE(S_CMP_LG_I32, i32, a != b),
    S_COMPARE(S_CMP_LT_I32, i32, a < b),
    S_COMPARE(S_CMP_LE_I32, i32, a <= b),
    S_COMPARE(S_CMP_GT_I32, i32, a > b),
    S_COMPARE(S_CMP_GE_I32, i32, a >= b),
    S_COMPARE(S_CMP_EQ_U64, u64, a == b),
    S_COMPARE(S_CMP_LG_U64, u64, a != b),
    S_COMPARE(S_BITCMP0_B32, u32, !(a >> (b & 31) & 1)),
    S_COMPARE(S_BITCMP1_B32, u32, a >> (b & 31) & 1),
    {"S_BITSET1_B32",
     [](Machine&, Wave& w, const Inst& i) { w.set_word(i.dst, w.word(i.dst) | 1u << (scalar<u32>(w, i, 0) & 31)); }},
    S_SHORT(S_MOVK_I32, w.set_word(i.dst, u32(b));),
    S_SHORT(S_ADDK_I32, w.scc = overflows_add(u32(a), u32(b)); w.set_word(i.dst, u32(a) + u32(b));),
    S_SHORT(S_MULK_I32, w.set_word(i.dst, u32(a) * u32(b));),
    S_SHORT(S_CMPK_EQ_I32, w.scc = a == b;),
    S_SHORT(S_CMPK_LG_I32, w.scc = a != b;),
    S_SHORT(S_CMPK_LT_I32, w.scc = a < b;),
    S_SHORT(S_CMPK_LE_I32, w.scc = a <= b;),
    S_SHORT(S_CMPK_GT_I32, w.scc = a > b;),
    S_SHORT(S_CMPK_GE_I32, w.scc = a >= b;),
    S_SHORT(S_CMPK_EQ_U32, w.scc = u32(a) == u16(b);),
    S_SHORT(S_CMPK_LG_U32, w.scc = u32(a) != u16(b);),
    S_SHORT(S_CMPK_LT_U32, w.scc = u32(a) < u16(b);),
    S_SHORT(S_CMPK_LE_U32, w.scc = u32(a) <= u16(b);),
    S_SHORT(S_CMPK_GT_U32, w.scc = u32(a) > u16(b);),
    S_SHORT(S_CMPK_GE_U32, w.scc = u32(a) >= u16(b);),
    SAVE_EXEC(S_AND_SAVEEXEC_B64, a & exec),
    SAVE_EXEC(S_OR_SAVEEXEC_B64, a | exec),
    SAVE_EXEC(S_ANDN2_SAVEEXEC_B64, a & ~exec),
    BRANCH(S_BRANCH, true),
    BRANCH(S_CBRANCH_SCC0, !w.scc),
    BRANCH(S_CBRANCH_SCC1, w.scc),
    BRANCH(S_CBRANCH_VCCZ, w.pair(VCC) == 0),
    BRANCH(S_CBRANCH_VCCNZ, w.pair(VCC) != 0),
    BRANCH(S_CBRANCH_EXECZ, w.exec() == 0),
    BRANCH(S_CBRANCH_EXECNZ, w.exec() != 0),
    NOTHING(S_NOP),
    NOTHING(S_SETPRIO),
    NOTHING(S_SLEEP),
    {"S_BARRIER", [](Machine& m, Wave& w, const Inst&) { meet_at_barrier(m, w); }},
    {"S_ENDPGM", [](Machine& m, Wave& w, const Inst&) { end_wave(m, w); }},
    {"S_WAITCNT", [](Machine& m, Wave& w, const Inst& i) {
         wait_for(m, w, (i.offset & 15) | (i.offset >> 14 & 3) << 4, i.offset >> 8 & 15);
     }},
    {"S_GETREG_B32", [](Machine& m, Wave& w, const Inst& i) {
         int id = i.offset & 63, shift = i.offset >> 6 & 31, width = (i.offset >> 11 & 31) + 1;
         w.set_word(i.dst, hardware_register(m, w, id) >> shift & low_bits(u32(width)));
     }},
    {"V_READFIRSTLANE_B32", [](Machine&, Wave& w, const Inst& i) {
         int from = first_lane(w.exec());
         w.set_word(i.dst, i.src[0] < ROW ? scalar<u32>(w, i, 0) : w.row(i.src[0], u64(1) << from)[from]);
     }},
    {"V_READLANE_B32", [](Machine&, Wave& w, const Inst& i) {
         int from = scalar<u32>(w, i, 1) & 63;
         w.set_word(i.dst, w.row(i.src[0], u64(1) << from)[from]);
     }},
    {"V_WRITELANE_B32", [](Machine&, Wave& w, const Inst& i) {
         int to = scalar<u32>(w, i, 1) & 63;
         Lanes<u32> value = {};
         value.lane[to] = scalar<u32>(w, i, 0);
         w.set_row(i.dst, value.lane, u64(1) << to);
     }},
    {"V_MBCNT_LO_U32_B32", [](Machine&, Wave& w, const Inst& i) { count_lower_lanes(w, i, 0); }},
    {"V_MBCNT_HI_U32_B32", [](Machine&, Wave& w, const Inst& i) { count_lower_lanes(w, i, 32); }},
};
