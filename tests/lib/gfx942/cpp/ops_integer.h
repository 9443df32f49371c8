// Vector instructions on integers and bits.
#pragma once
#include "operands.h"

#define V1(NAME, R, A, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { vector_op<R, A>(w, i, [](A a) -> R { return EXPR; }); }}
#define V2(NAME, R, A, B, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { vector_op<R, A, B>(w, i, [](A a, B b) -> R { return EXPR; }); }}
#define V3(NAME, R, A, B, C, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         vector_op<R, A, B, C>(w, i, [](A a, B b, C c) -> R { return EXPR; }); \
     }}
#define CARRY(NAME, BODY) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         carry_op(w, i, [](u32 a, u32 b, [[maybe_unused]] u32 in, bool& carry) -> u32 { BODY }); \
     }}

inline u32 reverse_bits(u32 x) {
    u32 out = 0;
    for (int k = 0; k < 32; k++) out |= (x >> k & 1) << (31 - k);
    return out;
}
inline u32 low_bits(u32 width) { return width >= 32 ? ~0u : (1u << width) - 1; }
inline i32 extract_signed(u32 x, u32 shift, u32 width) {
    if (!width) return 0;
    u32 part = (x >> shift) & low_bits(width);
    return part >> (width - 1) & 1 ? i32(part | ~low_bits(width)) : i32(part);
}
inline i32 signed24(u32 x) { return i32(x << 8) >> 8; }
inline u8 permuted_byte(u64 both, u32 selector) {
    if (selector < 8) return u8(both >> 8 * selector);
    if (selector < 12) return both >> (16 * (selector - 8) + 15) & 1 ? 0xFF : 0;
    return selector == 12 ? 0 : 0xFF;
}
inline u32 permute_bytes(u32 high, u32 low, u32 selectors) {
    u64 both = u64(high) << 32 | low;
    u32 out = 0;
    for (int k = 0; k < 4; k++) out |= u32(permuted_byte(both, selectors >> 8 * k & 0xFF)) << 8 * k;
    return out;
}
template <class T> inline T middle(T a, T b, T c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }
template <class T> inline T least(T a, T b) { return a < b ? a : b; }
template <class T> inline T most(T a, T b) { return a < b ? b : a; }

// D and its carry = S0 * S1 + S2, 64 bits wide
template <class Wide, class Narrow> inline void multiply_add_64(Wave& w, const Inst& i) {
    Lanes<Narrow> ra, rb;
    Lanes<Wide> rc, out;
    const Narrow *a = fetch<Narrow>(w, i, 0, ra), *b = fetch<Narrow>(w, i, 1, rb);
    const Wide* c = fetch<Wide>(w, i, 2, rc);
    u64 carries = 0;
    for (int l = 0; l < LANES; l++) {
        __int128 product = __int128(a[l]) * b[l], sum = product + c[l];
        out.lane[l] = Wide(sum);
        carries |= u64(sum != __int128(Wide(sum))) << l;
    }
    u64 exec = w.exec();
    store<Wide>(w, i, out.lane, exec);
    w.set_pair(i.sdst, carries & exec);
}

static const Operation INTEGER_OPERATIONS[] = {
    V1(V_MOV_B32, u32, u32, a),
    V1(V_MOV_B64, u64, u64, a),
    V1(V_NOT_B32, u32, u32, ~a),
    V1(V_BFREV_B32, u32, u32, reverse_bits(a)),
    V1(V_FFBH_U32, u32, u32, a ? __builtin_clz(a) : ~0u),
    V1(V_FFBL_B32, u32, u32, a ? __builtin_ctz(a) : ~0u),
    V1(V_ACCVGPR_READ, u32, u32, a),
    V1(V_ACCVGPR_WRITE, u32, u32, a),
    V1(V_ACCVGPR_MOV_B32, u32, u32, a),
    V2(V_ADD_U32, u32, u32, u32, a + b),
    V2(V_SUB_U32, u32, u32, u32, a - b),
    V2(V_SUB_U32_CLAMP, u32, u32, u32, a > b ? a - b : 0),
    V2(V_SUBREV_U32, u32, u32, u32, b - a),
    V2(V_AND_B32, u32, u32, u32, a & b),
    V2(V_OR_B32, u32, u32, u32, a | b),
    V2(V_XOR_B32, u32, u32, u32, a ^ b),
    V2(V_XNOR_B32, u32, u32, u32, ~(a ^ b)),
    V2(V_LSHLREV_B32, u32, u32, u32, b << (a & 31)),
    V2(V_LSHRREV_B32, u32, u32, u32, b >> (a & 31)),
    V2(V_ASHRREV_I32, i32, u32, i32, b >> (a & 31)),
    V2(V_LSHLREV_B64, u64, u32, u64, b << (a & 63)),
    V2(V_LSHRREV_B64, u64, u32, u64, b >> (a & 63)),
    V2(V_ASHRREV_I64, i64, u32, i64, b >> (a & 63)),
    V2(V_LSHRREV_B16, u16, u16, u16, u16(b >> (a & 15))),
    V2(V_LSHLREV_B16, u16, u16, u16, u16(b << (a & 15))),
    V2(V_ASHRREV_I16, u16, u16, u16, u16(i16(b) >> (a & 15))),
    V2(V_ADD_U16, u16, u16, u16, u16(a + b)),
    V2(V_SUB_U16, u16, u16, u16, u16(a - b)),
    V2(V_SUBREV_U16, u16, u16, u16, u16(b - a)),
    V2(V_MUL_LO_U16, u16, u16, u16, u16(u32(a) * b)),
    V2(V_MAX_U16, u16, u16, u16, most(a, b)),
    V2(V_MIN_U16, u16, u16, u16, least(a, b)),
    V2(V_MAX_I16, i16, i16, i16, most(a, b)),
    V2(V_MIN_I16, i16, i16, i16, least(a, b)),
    V2(V_MAX_I32, i32, i32, i32, most(a, b)),
    V2(V_MIN_I32, i32, i32, i32, least(a, b)),
    V2(V_MAX_U32, u32, u32, u32, most(a, b)),
    V2(V_MIN_U32, u32, u32, u32, least(a, b)),
    V2(V_MUL_U32_U24, u32, u32, u32, (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    V2(V_MUL_HI_U32_U24, u32, u32, u32, u32(u64(a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32)),
    V2(V_MUL_I32_I24, u32, u32, u32, u32(i64(signed24(a)) * signed24(b))),
    V2(V_MUL_LO_U32, u32, u32, u32, a * b),
    V2(V_MUL_HI_U32, u32, u32, u32, u32(u64(a) * b >> 32)),
    V2(V_MUL_HI_I32, i32, i32, i32, i32(i64(a) * b >> 32)),
    V2(V_BCNT_U32_B32, u32, u32, u32, __builtin_popcount(a) + b),
    V3(V_ADD3_U32, u32, u32, u32, u32, a + b + c),
    V3(V_ADD_LSHL_U32, u32, u32, u32, u32, (a + b) << (c & 31)),
    V3(V_LSHL_ADD_U32, u32, u32, u32, u32, (a << (b & 31)) + c),
    V3(V_LSHL_ADD_U64, u64, u64, u32, u64, (a << (b & 7)) + c),
    V3(V_LSHL_OR_B32, u32, u32, u32, u32, (a << (b & 31)) | c),
    V3(V_AND_OR_B32, u32, u32, u32, u32, (a & b) | c),
    V3(V_OR3_B32, u32, u32, u32, u32, a | b | c),
    V3(V_XAD_U32, u32, u32, u32, u32, (a ^ b) + c),
    V3(V_ALIGNBIT_B32, u32, u32, u32, u32, u32((u64(a) << 32 | b) >> (c & 31))),
    V3(V_ALIGNBYTE_B32, u32, u32, u32, u32, u32((u64(a) << 32 | b) >> 8 * (c & 3))),
    V3(V_BFE_U32, u32, u32, u32, u32, (a >> (b & 31)) & low_bits(c & 31)),
    V3(V_BFE_I32, i32, u32, u32, u32, extract_signed(a, b & 31, c & 31)),
    V3(V_BFI_B32, u32, u32, u32, u32, (a & b) | (~a & c)),
    V3(V_PERM_B32, u32, u32, u32, u32, permute_bytes(a, b, c)),
    V3(V_MAX3_I32, i32, i32, i32, i32, most(most(a, b), c)),
    V3(V_MIN3_I32, i32, i32, i32, i32, least(least(a, b), c)),
    V3(V_MED3_I32, i32, i32, i32, i32, middle(a, b, c)),
    V3(V_MAX3_U32, u32, u32, u32, u32, most(most(a, b), c)),
    V3(V_MIN3_U32, u32, u32, u32, u32, least(least(a, b), c)),
    V3(V_MED3_U32, u32, u32, u32, u32, middle(a, b, c)),
    V3(V_MAD_LEGACY_U16, u16, u16, u16, u16, u16(u32(a) * b + c)),  // clears the upper half
    V3(V_MAD_U32_U24, u32, u32, u32, u32, (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    V3(V_MAD_I32_I24, u32, u32, u32, u32, u32(i64(signed24(a)) * signed24(b)) + c),
    CARRY(V_ADD_CO_U32, carry = (u64(a) + b) >> 32; return a + b;),
    CARRY(V_ADDC_CO_U32, carry = (u64(a) + b + in) >> 32; return a + b + in;),
    CARRY(V_SUB_CO_U32, carry = a < b; return a - b;),
    CARRY(V_SUBREV_CO_U32, carry = b < a; return b - a;),
    CARRY(V_SUBB_CO_U32, carry = a < u64(b) + in; return a - b - in;),
    CARRY(V_SUBBREV_CO_U32, carry = b < u64(a) + in; return b - a - in;),
    {"V_MAD_U64_U32", [](Machine&, Wave& w, const Inst& i) { multiply_add_64<u64, u32>(w, i); }},
    {"V_MAD_I64_I32", [](Machine&, Wave& w, const Inst& i) { multiply_add_64<i64, i32>(w, i); }},
    {"V_CNDMASK_B32", [](Machine&, Wave& w, const Inst& i) {
         Lanes<u32> ra, rb, out;
         const u32 *a = fetch<u32>(w, i, 0, ra), *b = fetch<u32>(w, i, 1, rb);
         u64 mask = scalar_bits<u64>(w, i.src[2], 0);
         for (int l = 0; l < LANES; l++) out.lane[l] = mask >> l & 1 ? b[l] : a[l];
         store<u32>(w, i, out.lane, written_lanes(w, i));
     }},
};
