// What the expressions are of, for both compilers. ATTRIBUTE: __attribute__((device)), or nothing.
#pragma once
typedef unsigned u32; typedef int s32; typedef unsigned long u64; typedef long s64; typedef unsigned short u16;
typedef u64 floats; typedef u32 halves;
struct Input { u32 a, b, c, d; float fa, fb, fc; _Float16 ha, hb; double da, db, dc; u64 la, lb; };
#define NAMES const u32 a = x.a, b = x.b, c = x.c, d = x.d; const s32 sa = a, sb = b, sc = c; \
  const float fa = x.fa, fb = x.fb, fc = x.fc; const double da = x.da, db = x.db, dc = x.dc; \
  const _Float16 ha = x.ha, hb = x.hb; const u64 la = x.la, lb = x.lb; const s64 sla = la, slb = lb; \
  (void)a; (void)b; (void)c; (void)d; (void)sa; (void)sb; (void)sc; (void)fa; (void)fb; (void)fc; (void)da; (void)db; \
  (void)dc; (void)ha; (void)hb; (void)la; (void)lb; (void)sla; (void)slb;
ATTRIBUTE inline float as_float(u32 x) { return __builtin_bit_cast(float, x); }
ATTRIBUTE inline u16 half_bits(_Float16 x) { return __builtin_bit_cast(u16, x); }
template <class T> ATTRIBUTE inline T within(T x, T low, T high) { return x > low ? (x < high ? x : high) : low; }
