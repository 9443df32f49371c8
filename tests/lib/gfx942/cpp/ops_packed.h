// Packed arithmetic (VOP3P), dot products and matrix instructions.
#pragma once
#include "ops_float.h"

// Two float32 a lane: bit k of opsel picks the source's half for the low result, of opsel_hi for the high one.
template <class F> inline void packed_f32(Wave& w, const Inst& i, int sources, F f) {
    Lanes<u64> room[3];
    const u64* in[3];
    Inst plain = i;
    plain.neg = plain.abs = 0;
    for (int k = 0; k < sources; k++) {
        // An inline constant or a scalar pair: both halves of a pair, a constant is one of 32 bits in each half.
        if (i.src[k] >= 128 && i.src[k] < ROW) {
            u64 one = constant_bits<float>(i.src[k], i.literal);
            for (u64& lane : room[k].lane) lane = one | one << 32;
            in[k] = room[k].lane;
        } else {
            in[k] = fetch<u64>(w, plain, k, room[k]);
        }
    }
    Lanes<u64> out;
    for (int l = 0; l < LANES; l++) {
        u64 both = 0;
        for (int half = 0; half < 2; half++) {
            float value[3] = {};
            int select = half ? i.opsel_hi : i.opsel, negate = half ? i.neg_hi : i.neg;
            for (int k = 0; k < sources; k++) {
                u32 bits = u32(in[k][l] >> (select >> k & 1 ? 32 : 0));
                value[k] = bits_to<float>(bits ^ u32(negate >> k & 1) << 31);
            }
            both |= u64(bits_to<u32>(f(value[0], value[1], value[2]))) << 32 * half;
        }
        out.lane[l] = both;
    }
    store<u64>(w, i, out.lane, w.exec());
}

// Source k, of which float16 values are halves: a constant of the ISA is one in the low half.
inline const u32* fetch_halves(Wave& w, const Inst& i, int k, Lanes<u32>& room) {
    const u32* in = fetch<u32>(w, i, k, room);
    if (i.src[k] >= 240 && i.src[k] <= 248)
        for (u32& lane : room.lane) lane = u32(constant_bits<f16>(i.src[k], 0));
    return in;
}

template <class F> inline void packed_f16(Wave& w, const Inst& i, int sources, F f) {
    Lanes<u32> room[3], out;
    const u32* in[3];
    Inst plain = i;
    plain.neg = plain.abs = plain.opsel = 0;
    for (int k = 0; k < sources; k++) in[k] = fetch_halves(w, plain, k, room[k]);
    for (int l = 0; l < LANES; l++) {
        u32 both = 0;
        for (int half = 0; half < 2; half++) {
            f16 value[3] = {};
            int select = half ? i.opsel_hi : i.opsel, negate = half ? i.neg_hi : i.neg;
            for (int k = 0; k < sources; k++)
                value[k] = bits_to<f16>(u16(u16(in[k][l] >> (select >> k & 1 ? 16 : 0)) ^ (negate >> k & 1) << 15));
            both |= u32(bits_to<u16>(f(value[0], value[1], value[2]))) << 16 * half;
        }
        out.lane[l] = both;
    }
    store<u32>(w, i, out.lane, w.exec());
}

// float32 c + products of two float16 pairs, the products exact, one rounding a sum.
inline void dot2(Wave& w, const Inst& i) {
    Lanes<u32> ra, rb;
    Lanes<float> rc, out;
    Inst plain = i;
    plain.neg = i.neg & 4;
    const u32 *a = fetch_halves(w, plain, 0, ra), *b = fetch_halves(w, plain, 1, rb);
    const float* c = fetch<float>(w, plain, 2, rc);
    for (int l = 0; l < LANES; l++) {
        double product[2];
        for (int half = 0; half < 2; half++) {
            int select = half ? i.opsel_hi : i.opsel, negate = half ? i.neg_hi : i.neg;
            f16 x = bits_to<f16>(u16(a[l] >> (select & 1 ? 16 : 0))), y = bits_to<f16>(u16(b[l] >> (select & 2 ? 16 : 0)));
            product[half] = widened(x) * widened(y) * (negate & 1 ? -1 : 1) * (negate & 2 ? -1 : 1);
        }
        out.lane[l] = float(double(float(double(c[l]) + product[0])) + product[1]);
    }
    store<float>(w, i, out.lane, w.exec());
}

// fma of sources that are each float32 or half of a register as float16 (opsel_hi says which, opsel which half).
inline void mixed_fma(Wave& w, const Inst& i, int half) {
    Lanes<u32> room[3], out;
    const u32* in[3];
    Inst plain = i;
    plain.neg = plain.abs = plain.opsel = 0;
    for (int k = 0; k < 3; k++)
        in[k] = i.opsel_hi >> k & 1 ? fetch_halves(w, plain, k, room[k]) : fetch<u32>(w, plain, k, room[k]);
    const u32* old = w.row(i.dst, w.exec());
    for (int l = 0; l < LANES; l++) {
        float value[3];
        for (int k = 0; k < 3; k++) {
            bool is_half = i.opsel_hi >> k & 1;
            float x = is_half ? float(bits_to<f16>(u16(in[k][l] >> (i.opsel >> k & 1 ? 16 : 0)))) : bits_to<float>(in[k][l]);
            if (i.neg_hi >> k & 1) x = std::fabs(x);  // of these instructions the field means |x|
            value[k] = i.neg >> k & 1 ? -x : x;
        }
        float sum = std::fma(value[0], value[1], value[2]);
        if (half < 0) out.lane[l] = bits_to<u32>(sum);
        else {
            u32 bits = bits_to<u16>(f16(sum));
            out.lane[l] = half ? bits << 16 | (old[l] & 0xFFFF) : bits | (old[l] & 0xFFFF0000);
        }
    }
    store<u32>(w, plain, out.lane, w.exec());
}

inline double bf16_value(u16 bits) { return bits_to<float>(u32(bits) << 16); }
inline double f16_value(u16 bits) { return widened(bits_to<f16>(bits)); }

// D[M][N] = A[M][K] B[K][N] + C, one block, over all lanes whatever EXEC says. Lane l holds row l % M of A (column of B)
// and K / (64 / M) neighbouring values of it from (l / M) on; of D, column l % N and rows in groups of four.
template <int M, int K, class Value> inline void matrix_op(Wave& w, const Inst& i, Value value) {
    constexpr int PER = M * K / LANES, OUT = M * M / LANES;
    static_assert(M == 16 || M == 32);
    double a[M][K], b[K][M];
    for (int j = 0; j < PER; j++) {
        const u32 *of_a = w.row(i.src[0] + j / 2, ALL), *of_b = w.row(i.src[1] + j / 2, ALL);
        for (int l = 0; l < LANES; l++) {
            int k = PER * (l / M) + j;
            a[l % M][k] = value(u16(of_a[l] >> 16 * (j & 1)));
            b[k][l % M] = value(u16(of_b[l] >> 16 * (j & 1)));
        }
    }
    Lanes<u32> out[OUT];
    for (int r = 0; r < OUT; r++) {
        const u32* c = i.src[2] >= ROW ? w.row(i.src[2] + r, ALL) : nullptr;
        u32 constant = c ? 0 : u32(scalar_bits<float>(w, i.src[2], 0));
        for (int first = 0; first < LANES; first += M) {  // lanes of one row of D
            int row = M == 32 ? 8 * (r / 4) + first / 8 + r % 4 : first / 4 + r;
            double sum[M];
            for (int n = 0; n < M; n++) sum[n] = bits_to<float>(c ? c[first + n] : constant);
            for (int k = 0; k < K; k++)
                for (int n = 0; n < M; n++) sum[n] += a[row][k] * b[k][n];
            for (int n = 0; n < M; n++) out[r].lane[first + n] = bits_to<u32>(float(sum[n]));
        }
    }
    for (int r = 0; r < OUT; r++) w.set_row(i.dst + r, out[r].lane, ALL);
}

#define PACKED32(NAME, SOURCES, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         packed_f32(w, i, SOURCES, [](float a, float b, [[maybe_unused]] float c) -> float { return EXPR; }); \
     }}
#define PACKED16(NAME, SOURCES, EXPR) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { \
         packed_f16(w, i, SOURCES, [](f16 a, f16 b, [[maybe_unused]] f16 c) -> f16 { return EXPR; }); \
     }}
#define MATRIX(NAME, M, K, VALUE) \
    {#NAME, [](Machine&, Wave& w, const Inst& i) { matrix_op<M, K>(w, i, [](u16 bits) { return VALUE(bits); }); }}

static const Operation PACKED_OPERATIONS[] = {
    PACKED32(V_PK_ADD_F32, 2, a + b),
    PACKED32(V_PK_MUL_F32, 2, a* b),
    PACKED32(V_PK_FMA_F32, 3, std::fma(a, b, c)),
    V2(V_PACK_B32_F16, u32, f16, f16, bits_to<u16>(a) | u32(bits_to<u16>(b)) << 16),
    PACKED16(V_PK_ADD_F16, 2, f16(a + b)),
    PACKED16(V_PK_MUL_F16, 2, f16(a* b)),
    PACKED16(V_PK_FMA_F16, 3, narrowed(widened(a) * widened(b) + widened(c))),
    PACKED16(V_PK_MAX_F16, 2, max_num(a, b)),
    PACKED16(V_PK_MIN_F16, 2, min_num(a, b)),
    {"V_PK_MOV_B32", [](Machine&, Wave& w, const Inst& i) {
         Lanes<u64> ra, rb, out;
         const u64 *a = fetch<u64>(w, i, 0, ra), *b = fetch<u64>(w, i, 1, rb);
         for (int l = 0; l < LANES; l++)
             out.lane[l] = u32(a[l] >> (i.opsel & 1 ? 32 : 0)) | u64(u32(b[l] >> (i.opsel & 2 ? 32 : 0))) << 32;
         store<u64>(w, i, out.lane, w.exec());
     }},
    {"V_DOT2_F32_F16", [](Machine&, Wave& w, const Inst& i) { dot2(w, i); }},
    {"V_DOT2C_F32_F16", [](Machine&, Wave& w, const Inst& i) {
         Inst whole = i;
         whole.opsel = 0;
         whole.opsel_hi = 3;
         dot2(w, whole);
     }},
    {"V_FMA_MIX_F32", [](Machine&, Wave& w, const Inst& i) { mixed_fma(w, i, -1); }},
    {"V_FMA_MIXLO_F16", [](Machine&, Wave& w, const Inst& i) { mixed_fma(w, i, 0); }},
    {"V_FMA_MIXHI_F16", [](Machine&, Wave& w, const Inst& i) { mixed_fma(w, i, 1); }},
    MATRIX(V_MFMA_F32_16X16X16_BF16, 16, 16, bf16_value),
    MATRIX(V_MFMA_F32_32X32X8_BF16, 32, 8, bf16_value),
    MATRIX(V_MFMA_F32_16X16X16_F16, 16, 16, f16_value),
    MATRIX(V_MFMA_F32_32X32X8_F16, 32, 8, f16_value),
};
