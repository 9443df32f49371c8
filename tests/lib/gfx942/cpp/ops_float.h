// Vector instructions on floating-point numbers: round to nearest even, denormals kept (executor.cpp refuses other modes).
// Approximations (exp, log, rcp, rsq, sqrt) are the host's results, rounded; AMD's last bits are unknown.
#pragma once
#include "ops_integer.h"

template <class T> inline bool is_nan(T x) { return x != x; }
template <class T> inline T quiet(T x) { return is_nan(x) ? x + x : x; }

// IEEE's maxNum: of a number and a NaN the number; +0 above -0.
template <class T> inline T max_num(T a, T b) {
    if (is_nan(a)) return quiet(b);
    if (is_nan(b)) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}
template <class T> inline T min_num(T a, T b) {
    if (is_nan(a)) return quiet(b);
    if (is_nan(b)) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}
inline f16 max_num(f16 a, f16 b) { return f16(max_num(single(a), single(b))); }
inline f16 min_num(f16 a, f16 b) { return f16(min_num(single(a), single(b))); }

template <class T> inline T median(T a, T b, T c) {
    if (is_nan(a) || is_nan(b) || is_nan(c)) return min_num(min_num(a, b), c);
    T top = max_num(max_num(a, b), c);
    if (top == a) return max_num(b, c);
    if (top == b) return max_num(a, c);
    return max_num(a, b);
}

// To an integer, toward zero, clamped to its range; a NaN is 0.
template <class To, class From> inline To clamped(From x) {
    if (is_nan(x)) return 0;
    double lowest = std::numeric_limits<To>::min(), highest = std::numeric_limits<To>::max(), value = double(x);
    if (value <= lowest) return std::numeric_limits<To>::min();
    if (value >= highest) return std::numeric_limits<To>::max();
    return To(value);
}

// float16 toward zero, as v_cvt_pkrtz rounds: the nearest, or its neighbour nearer to zero.
inline u16 half_toward_zero(float x) {
    f16 nearest = f16(x);
    u16 bits = bits_to<u16>(nearest);
    if (!is_nan(x) && std::fabs(single(nearest)) > std::fabs(x)) bits--;
    return bits;
}

// ---- the parts of a division (LLVM composes them; ISA manual, V_DIV_*) ----

template <class T> struct Float;
template <> struct Float<float> {
    using Bits = u32;
    static constexpr int MANTISSA = 23, EXPONENTS = 255, NEAR_MAX = 96, TINY = 23, SCALE = 64, UNDERFLOW_AT = -150;
};
template <> struct Float<double> {
    using Bits = u64;
    static constexpr int MANTISSA = 52, EXPONENTS = 2047, NEAR_MAX = 768, TINY = 53, SCALE = 128, UNDERFLOW_AT = -1075;
};
template <class T> inline int exponent(T x) {
    return int(bits_to<typename Float<T>::Bits>(x) >> Float<T>::MANTISSA & Float<T>::EXPONENTS);
}
template <class T> inline bool denormal(T x) { return x != 0 && exponent(x) == 0; }

template <class T> inline T div_scale(T value, T denominator, T numerator, bool& scaled) {
    constexpr int BY = Float<T>::SCALE;
    scaled = false;
    if (numerator == 0 || denominator == 0) return std::numeric_limits<T>::quiet_NaN();
    bool same_denominator = value == denominator;
    if (exponent(numerator) - exponent(denominator) >= Float<T>::NEAR_MAX) {
        scaled = true;
        return same_denominator ? std::ldexp(value, BY) : value;
    }
    if (denormal(denominator)) return std::ldexp(value, BY);
    bool tiny_reciprocal = denormal(T(1) / denominator), tiny_quotient = denormal(T(numerator / denominator));
    if (tiny_reciprocal && tiny_quotient) {  // the manual scales up here, to infinity; a division comes out right so
        scaled = true;
        return same_denominator ? std::ldexp(value, -BY) : value;
    }
    if (tiny_reciprocal) return std::ldexp(value, -BY);
    if (tiny_quotient) {
        scaled = true;
        return value == numerator ? std::ldexp(value, BY) : value;
    }
    return exponent(numerator) <= Float<T>::TINY ? std::ldexp(value, BY) : value;
}

template <class T> inline void div_scale_op(Wave& w, const Inst& i) {
    Lanes<T> ra, rb, rc, out;
    const T *a = fetch<T>(w, i, 0, ra), *b = fetch<T>(w, i, 1, rb), *c = fetch<T>(w, i, 2, rc);
    u64 scaled = 0;
    for (int l = 0; l < LANES; l++) {
        bool one;
        out.lane[l] = div_scale(a[l], b[l], c[l], one);
        scaled |= u64(one) << l;
    }
    u64 exec = w.exec();
    store<T>(w, i, out.lane, exec);
    w.set_pair(i.sdst, scaled & exec);
}

// fma, and where VCC says that one operand was scaled the power of two that takes it back: rounded once.
template <class T, class Wider> inline void div_fmas_op(Wave& w, const Inst& i) {
    Lanes<T> ra, rb, rc, out;
    const T *a = fetch<T>(w, i, 0, ra), *b = fetch<T>(w, i, 1, rb), *c = fetch<T>(w, i, 2, rc);
    u64 scaled = w.pair(VCC);
    for (int l = 0; l < LANES; l++) {
        int by = exponent(c[l]) > Float<T>::EXPONENTS / 2 ? Float<T>::SCALE : -Float<T>::SCALE;
        out.lane[l] = scaled >> l & 1 ? T(std::ldexp(std::fma(Wider(a[l]), Wider(b[l]), Wider(c[l])), by))
                                      : std::fma(a[l], b[l], c[l]);
    }
    store<T>(w, i, out.lane, w.exec());
}

template <class T> inline T div_fixup(T quotient, T denominator, T numerator) {
    bool negative = std::signbit(denominator) != std::signbit(numerator);
    const T infinity = std::numeric_limits<T>::infinity();
    auto signed_as = [&](T x) { return negative ? -x : x; };
    if (is_nan(numerator)) return quiet(numerator);
    if (is_nan(denominator)) return quiet(denominator);
    if ((denominator == 0 && numerator == 0) || (std::isinf(denominator) && std::isinf(numerator)))
        return -std::numeric_limits<T>::quiet_NaN();
    if (denominator == 0 || std::isinf(numerator)) return signed_as(infinity);
    if (std::isinf(denominator) || numerator == 0) return signed_as(0);
    if (exponent(numerator) - exponent(denominator) < Float<T>::UNDERFLOW_AT)
        return signed_as(0);
    if (is_nan(quotient)) return signed_as(infinity);  // steps beyond the greatest number; the manual leaves it open
    return signed_as(std::fabs(quotient));
}

static const Operation FLOAT_OPERATIONS[] = {
    V2(V_ADD_F32, float, float, float, a + b),
    V2(V_SUB_F32, float, float, float, a - b),
    V2(V_SUBREV_F32, float, float, float, b - a),
    V2(V_MUL_F32, float, float, float, a* b),
    V2(V_MAX_F32, float, float, float, max_num(a, b)),
    V2(V_MIN_F32, float, float, float, min_num(a, b)),
    V3(V_FMA_F32, float, float, float, float, std::fma(a, b, c)),
    V3(V_FMAC_F32, float, float, float, float, std::fma(a, b, c)),
    V3(V_FMAMK_F32, float, float, float, float, std::fma(a, b, c)),
    V3(V_FMAAK_F32, float, float, float, float, std::fma(a, b, c)),
    V3(V_MAX3_F32, float, float, float, float, max_num(max_num(a, b), c)),
    V3(V_MIN3_F32, float, float, float, float, min_num(min_num(a, b), c)),
    V3(V_MED3_F32, float, float, float, float, median(a, b, c)),
    V1(V_RCP_F32, float, float, float(1.0 / double(a))),
    V1(V_RCP_IFLAG_F32, float, float, float(1.0 / double(a))),
    V1(V_RSQ_F32, float, float, float(1.0 / std::sqrt(double(a)))),
    V1(V_SQRT_F32, float, float, std::sqrt(a)),
    V1(V_EXP_F32, float, float, float(std::exp2(double(a)))),
    V1(V_LOG_F32, float, float, float(std::log2(double(a)))),
    V1(V_FLOOR_F32, float, float, std::floor(a)),
    V1(V_TRUNC_F32, float, float, std::trunc(a)),
    V1(V_CEIL_F32, float, float, std::ceil(a)),
    V1(V_RNDNE_F32, float, float, std::nearbyint(a)),
    V2(V_LDEXP_F32, float, float, i32, std::ldexp(a, b)),
    V1(V_CVT_F32_I32, float, i32, float(a)),
    V1(V_CVT_F32_U32, float, u32, float(a)),
    V1(V_CVT_F32_UBYTE0, float, u32, float(a & 0xFF)),
    V1(V_CVT_F32_UBYTE1, float, u32, float(a >> 8 & 0xFF)),
    V1(V_CVT_F32_UBYTE2, float, u32, float(a >> 16 & 0xFF)),
    V1(V_CVT_F32_UBYTE3, float, u32, float(a >> 24)),
    V1(V_CVT_I32_F32, i32, float, (clamped<i32, float>(a))),
    V1(V_CVT_U32_F32, u32, float, (clamped<u32, float>(a))),
    V1(V_CVT_F32_F16, float, f16, float(a)),
    V1(V_CVT_F16_F32, f16, float, f16(a)),
    V2(V_CVT_PKRTZ_F16_F32, u32, float, float, half_toward_zero(a) | u32(half_toward_zero(b)) << 16),
    V2(V_ADD_F16, f16, f16, f16, f16(a + b)),
    V2(V_SUB_F16, f16, f16, f16, f16(a - b)),
    V2(V_MUL_F16, f16, f16, f16, f16(a* b)),
    V2(V_MAX_F16, f16, f16, f16, max_num(a, b)),
    V2(V_MIN_F16, f16, f16, f16, min_num(a, b)),
    V2(V_ADD_F64, double, double, double, a + b),
    V2(V_MUL_F64, double, double, double, a* b),
    V2(V_MAX_F64, double, double, double, max_num(a, b)),
    V2(V_MIN_F64, double, double, double, min_num(a, b)),
    V3(V_FMA_F64, double, double, double, double, std::fma(a, b, c)),
    V3(V_FMAC_F64, double, double, double, double, std::fma(a, b, c)),
    V1(V_RCP_F64, double, double, 1.0 / a),
    V1(V_FLOOR_F64, double, double, std::floor(a)),
    V1(V_TRUNC_F64, double, double, std::trunc(a)),
    V1(V_RNDNE_F64, double, double, std::nearbyint(a)),
    V2(V_LDEXP_F64, double, double, i32, std::ldexp(a, b)),
    V1(V_CVT_F32_F64, float, double, float(a)),
    V1(V_CVT_F64_F32, double, float, double(a)),
    V1(V_CVT_F64_I32, double, i32, double(a)),
    V1(V_CVT_F64_U32, double, u32, double(a)),
    V1(V_CVT_I32_F64, i32, double, (clamped<i32, double>(a))),
    V1(V_CVT_U32_F64, u32, double, (clamped<u32, double>(a))),
    V3(V_DIV_FIXUP_F32, float, float, float, float, div_fixup(a, b, c)),
    V3(V_DIV_FIXUP_F64, double, double, double, double, div_fixup(a, b, c)),
    {"V_DIV_SCALE_F32", [](Machine&, Wave& w, const Inst& i) { div_scale_op<float>(w, i); }},
    {"V_DIV_SCALE_F64", [](Machine&, Wave& w, const Inst& i) { div_scale_op<double>(w, i); }},
    {"V_DIV_FMAS_F32", [](Machine&, Wave& w, const Inst& i) { div_fmas_op<float, double>(w, i); }},
    {"V_DIV_FMAS_F64", [](Machine&, Wave& w, const Inst& i) { div_fmas_op<double, long double>(w, i); }},
};
