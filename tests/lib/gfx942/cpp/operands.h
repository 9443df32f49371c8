// Operands of vector instructions as 64 values of a type, with all that an encoding may do to them on the way.
#pragma once
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include "state.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

template <class T> struct Lanes {
    alignas(64) T lane[LANES];
};

template <class To, class From> inline To bits_to(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class T> inline T from_bits(u64 bits) {
    if constexpr (sizeof(T) == 8) return bits_to<T>(bits);
    else if constexpr (sizeof(T) == 4) return bits_to<T>(u32(bits));
    else return bits_to<T>(u16(bits));
}

// By the processor's instruction, which GCC does not look into: else it compares in float16 and makes doubles at once,
// both by functions of its library, which took a twelfth of the time.
inline float single(f16 x) {
#ifdef __F16C__
    return _cvtsh_ss(bits_to<u16>(x));
#else
    return float(x);
#endif
}
inline double widened(f16 x) { return double(single(x)); }

// Rounded once: the float32 is the one nearer to zero, and odd where that is another than x.
inline f16 narrowed(double x) {
    float near = float(x);
    u32 bits = bits_to<u32>(near) - (std::fabs(double(near)) > std::fabs(x));
    return f16(bits_to<float>(bits | (double(near) != x)));
}

// Bits of an inline constant, or of the literal, as an operand of type T sees them.
template <class T> inline u64 constant_bits(int code, i32 literal) {
    static const double FLOATS[] = {0.5, -0.5, 1, -1, 2, -2, 4, -4};
    if (code >= 128 && code <= 192) return u64(code - 128);
    if (code >= 193 && code <= 208) return u64(i64(192 - code));
    if (code >= 240 && code <= 248) {
        double value = code == 248 ? 0.15915494309189532 : FLOATS[code - 240];
        if (sizeof(T) == 8) return bits_to<u64>(value);
        if (sizeof(T) == 4) return bits_to<u32>(float(value));
        return bits_to<u16>(narrowed(value));
    }
    if (code == LITERAL) {
        if (std::is_same_v<T, double>) return u64(u32(literal)) << 32;
        if (std::is_same_v<T, i64>) return u64(i64(literal));
        return u32(literal);
    }
    throw Fault("operand " + std::to_string(code) + " is not known");
}

template <class T> inline u64 scalar_bits(const Wave& w, int code, i32 literal) {
    if (code < WAVE_SGPRS) return sizeof(T) == 8 ? w.pair(code) : w.word(code);
    if (code == 251) return w.pair(VCC) == 0;
    if (code == 252) return w.exec() == 0;
    if (code == 253) return w.scc;
    return constant_bits<T>(code, literal);
}

template <class T> inline T scalar(const Wave& w, const Inst& i, int k) {
    return from_bits<T>(scalar_bits<T>(w, i.src[k], i.literal));
}

// Which lane a DPP control reads, and whether there is one (gfx9).
inline int dpp_lane(int control, int lane, bool& there) {
    int row = lane & ~15, in_row = lane & 15, n = control & 15;
    there = true;
    if (control < 0x100) return (lane & ~3) + ((control >> 2 * (lane & 3)) & 3);
    if (control >= 0x101 && control <= 0x10F) return there = in_row + n < 16, lane + n;
    if (control >= 0x111 && control <= 0x11F) return there = in_row - n >= 0, lane - n;
    if (control >= 0x121 && control <= 0x12F) return row + ((in_row - n) & 15);
    if (control == 0x130) return there = lane < 63, lane + 1;
    if (control == 0x134) return (lane + 1) & 63;
    if (control == 0x138) return there = lane > 0, lane - 1;
    if (control == 0x13C) return (lane - 1) & 63;
    if (control == 0x140) return row + 15 - in_row;
    if (control == 0x141) return (lane & ~7) + 7 - (lane & 7);
    if (control == 0x142) return there = lane >= 16, row - 1;
    if (control == 0x143) return there = lane >= 32, 31;
    if (control >= 0x150 && control <= 0x15F) return row + n;
    throw Fault("DPP control " + std::to_string(control) + " is not known");
}

// The same of all lanes.
struct Dpp {
    u64 there = 0;
    u8 from[LANES] = {};
    explicit Dpp(int control) {
        for (int l = 0; l < LANES; l++) {
            bool is;
            int lane = dpp_lane(control, l, is);
            there |= u64(is) << l;
            from[l] = u8(is ? lane : 0);
        }
    }
};
inline const Dpp& dpp_of(int control) {  // of nine bits
    thread_local std::optional<Dpp> made[512];
    std::optional<Dpp>& dpp = made[control & 511];
    if (!dpp) dpp.emplace(control);
    return *dpp;
}

// Lanes that a DPP instruction writes.
inline u64 dpp_mask(const Inst& i, u64 exec) {
    const Dpp& dpp = dpp_of(i.dpp);
    u64 mask = 0;
    for (int l = 0; l < LANES; l++) {
        bool valid = (dpp.there >> l & 1) && (exec >> dpp.from[l] & 1);
        bool chosen = (i.row_mask >> (l >> 4) & 1) && (i.bank_mask >> ((l & 15) >> 2) & 1);
        if (chosen && (valid || i.bound)) mask |= u64(1) << l;
    }
    return mask & exec;
}

inline u64 written_lanes(const Wave& w, const Inst& i) { return i.dpp < 0 ? w.exec() : dpp_mask(i, w.exec()); }

inline u32 select_bits(u32 value, int sel, bool sext) {  // SDWA
    if (sel == 6) return value;
    int width = sel < 4 ? 8 : 16, shift = sel < 4 ? 8 * sel : 16 * (sel - 4);
    u32 part = value >> shift & ((1u << width) - 1);
    return sext && (part >> (width - 1)) ? part | ~0u << width : part;
}

template <class T> inline u64 with_sign(const Inst& i, int k, u64 bits) {
    constexpr u64 SIGN = u64(1) << (8 * sizeof(T) - 1);
    if (i.abs >> k & 1) bits &= ~SIGN;
    if (i.neg >> k & 1) bits ^= SIGN;
    return bits;
}

// Whether an encoding does nothing to source k on the way.
inline bool unchanged(const Inst& i, int k) {
    return !((i.abs | i.neg) >> k & 1) && !(k == 0 && i.dpp >= 0) && !(k < 2 && i.sdwa);
}

// The register's lanes as DPP moves them.
inline const u32* moved(const Wave& w, const Inst& i, const u32* row, u64 exec, Lanes<u32>& room) {
    const Dpp& dpp = dpp_of(i.dpp);
    for (int l = 0; l < LANES; l++) {
        bool gives = (dpp.there >> l & 1) && w.gives(exec, l, dpp.from[l]);
        room.lane[l] = gives ? row[dpp.from[l]] : 0;
    }
    return room.lane;
}

template <class T> const T* fetch_changed(const Wave& w, const Inst& i, int k, Lanes<T>& room);

// Source k of all lanes: the register itself, or a copy in `room`.
template <class T> inline const T* fetch(const Wave& w, const Inst& i, int k, Lanes<T>& room) {
    if (sizeof(T) == 4 && i.src[k] >= ROW && unchanged(i, k)) return reinterpret_cast<const T*>(w.row(i.src[k], w.exec()));
    return fetch_changed(w, i, k, room);
}

template <class T> [[gnu::noinline]] const T* fetch_changed(const Wave& w, const Inst& i, int k, Lanes<T>& room) {
    int code = i.src[k];
    if (code < ROW) {
        u64 bits = scalar_bits<T>(w, code, i.literal);
        if (k < 2 && i.sdwa) bits = select_bits(u32(bits), i.sel[k], i.sext[k]);
        if (sizeof(T) == 2 && (i.opsel >> k & 1)) bits = bits >> 16;
        T value = from_bits<T>(with_sign<T>(i, k, bits));
        for (T& lane : room.lane) lane = value;
        return room.lane;
    }
    u64 exec = w.exec();
    const u32* low = w.row(code, exec);
    if constexpr (sizeof(T) == 8) {
        const u32* high = w.row(code + 1, exec);
        if (k == 0 && i.dpp >= 0) throw Fault("DPP of 64-bit operands is not known");
        for (int l = 0; l < LANES; l++) room.lane[l] = bits_to<T>(low[l] | u64(high[l]) << 32);
        if (!unchanged(i, k))
            for (T& lane : room.lane) lane = bits_to<T>(with_sign<T>(i, k, bits_to<u64>(lane)));
        return room.lane;
    }
    Lanes<u32> there;
    if (k == 0 && i.dpp >= 0) low = moved(w, i, low, exec, there);
    for (int l = 0; l < LANES; l++) {
        u32 bits = low[l];
        if (k < 2 && i.sdwa) bits = select_bits(bits, i.sel[k], i.sext[k]);
        if (sizeof(T) == 2 && (i.opsel >> k & 1)) bits >>= 16;
        room.lane[l] = from_bits<T>(with_sign<T>(i, k, sizeof(T) == 4 ? bits : bits & 0xFFFF));
    }
    return room.lane;
}

// Where SDWA puts a result, beside what the register holds.
inline void place(const Inst& i, const u32* bits, const u32* old, u32* out) {
    int width = i.dst_sel < 4 ? 8 : 16, shift = i.dst_sel < 4 ? 8 * i.dst_sel : 16 * (i.dst_sel - 4);
    u32 field = ((1u << width) - 1) << shift;
    if (i.dst_unused != 0 && i.dst_unused != 2) throw Fault("SDWA that extends a sign is not known");
    for (int l = 0; l < LANES; l++) {
        u32 placed = bits[l] << shift & field;
        out[l] = i.dst_unused == 0 ? placed : placed | (old[l] & ~field);
    }
}

template <class T> inline void store(Wave& w, const Inst& i, const T* value, u64 mask) {
    Lanes<u32> low, high;
    if constexpr (sizeof(T) == 8) {
        for (int l = 0; l < LANES; l++) {
            u64 bits = bits_to<u64>(value[l]);
            low.lane[l] = u32(bits);
            high.lane[l] = u32(bits >> 32);
        }
        w.set_row(i.dst, low.lane, mask);
        w.set_row(i.dst + 1, high.lane, mask);
        return;
    }
    const u32* old = w.row(i.dst, mask);
    if constexpr (sizeof(T) == 2) {
        bool upper = i.opsel & 8;
        for (int l = 0; l < LANES; l++) {
            u32 bits = bits_to<u16>(value[l]);
            low.lane[l] = upper ? bits << 16 | (old[l] & 0xFFFF) : bits;
        }
        value = reinterpret_cast<const T*>(low.lane);
    }
    const u32* bits = reinterpret_cast<const u32*>(value);
    if (i.sdwa && i.dst_sel != 6) {
        place(i, bits, old, low.lane);
        bits = low.lane;
    }
    w.set_row(i.dst, bits, mask);
}

// ---- shapes of vector instructions: F maps the lanes' values ----

template <class R, class... A, class F> inline void vector_op(Wave& w, const Inst& i, F f) {
    Lanes<R> out;
    auto all = [&]<int... K>(std::integer_sequence<int, K...>) {
        std::tuple<Lanes<A>...> room;
        std::tuple in(fetch<A>(w, i, K, std::get<K>(room))...);
        for (int l = 0; l < LANES; l++) out.lane[l] = f(std::get<K>(in)[l]...);
    };
    all(std::make_integer_sequence<int, sizeof...(A)>());
    store<R>(w, i, out.lane, written_lanes(w, i));
}

// Of lanes that are each 0 or 1: eight by one product, which brings byte k's bit to bit 56 + k.
inline u64 mask_of(const Lanes<u8>& is) {
    u64 mask = 0, eight;
    for (int l = 0; l < LANES; l += 8) {
        std::memcpy(&eight, is.lane + l, 8);
        mask |= (eight * 0x0102040810204080ull >> 56) << l;
    }
    return mask;
}

template <class T, class F> inline void compare_op(Wave& w, const Inst& i, F f) {
    Lanes<T> ra, rb;
    const T* a = fetch<T>(w, i, 0, ra);
    const T* b = fetch<T>(w, i, 1, rb);
    Lanes<u8> is;
    for (int l = 0; l < LANES; l++) is.lane[l] = f(a[l], b[l]);
    w.set_pair(i.sdst, mask_of(is) & w.exec());
}

// Sums with a carry in and out; F(a, b, carry in, &carry out).
template <class F> inline void carry_op(Wave& w, const Inst& i, F f) {
    Lanes<u32> ra, rb, out;
    const u32* a = fetch<u32>(w, i, 0, ra);
    const u32* b = fetch<u32>(w, i, 1, rb);
    Lanes<u8> carries;
    u64 in = i.src[2] >= 0 ? scalar_bits<u64>(w, i.src[2], 0) : 0;
    for (int l = 0; l < LANES; l++) {
        bool carry = false;
        out.lane[l] = f(a[l], b[l], u32(in >> l & 1), carry);
        carries.lane[l] = carry;
    }
    u64 exec = w.exec();
    store<u32>(w, i, out.lane, exec);
    w.set_pair(i.sdst, mask_of(carries) & exec);
}
