// What single instructions mean, in plain C++. ATTRIBUTE: as inputs.h has it.
#pragma once
#include "inputs.h"

static float two_to(int n) { return __builtin_bit_cast(float, (u32)(n + 127) << 23); }
static double two_to_d(int n) { return __builtin_bit_cast(double, (u64)(n + 1023) << 52); }
static _Float16 half(u32 x) { return __builtin_bit_cast(_Float16, (u16)x); }
static u32 both(_Float16 x, _Float16 y) { return half_bits(x) | (u32)half_bits(y) << 16; }
static float low(u64 x) { return as_float((u32)x); }
static float high(u64 x) { return as_float(x >> 32); }
static u64 pair(float x, float y) { return __builtin_bit_cast(u32, x) | (u64)__builtin_bit_cast(u32, y) << 32; }
static float rounded(double x) { return (float)x; }
static float dot(u32 x, u32 y, float z) {
  float first = (float)((double)half(x) * (double)half(y) + (double)z);
  return (float)((double)half(x >> 16) * (double)half(y >> 16) + (double)first); }
static s32 field_signed(u32 x, u32 at, u32 width) {
  if (!width) return 0; s64 y = x >> at & ((1ull << width) - 1); return y >= 1ll << (width - 1) ? y - (1ll <<
    width) : y; }
template <class T> static T least(T x, T y) { return y < x ? y : x; }
// IEEE's minNum and maxNum: the number of a number and a NaN; of two zeros by their sign
template <class T> static T lower(T x, T y) {
  return x != x ? y : y != y ? x : x < y ? x : y < x ? y : __builtin_signbit(x) ? x : y; }
template <class T> static T upper(T x, T y) { return -lower(-x, -y); }
template <class T> static T median(T x, T y, T z) {
  if (x != x || y != y || z != z) return lower(lower((float)x, (float)y), (float)z);  // as LLVM folds it
  if constexpr (T(0.5) != T(0)) {  // of zeros with several signs, as the manual and LLVM have it
    T top = upper(upper(x, y), z);
    return top == x ? upper(y, z) : top == y ? upper(x, z) : upper(x, y); }
  T small = x < y ? x : y, large = x < y ? y : x;
  return z < small ? small : z < large ? z : large; }
static u32 permuted(u32 x, u32 y, u32 by) {
  unsigned char bytes[8]; __builtin_memcpy(bytes, &y, 4); __builtin_memcpy(bytes + 4, &x, 4);
  u32 out = 0;
  for (int k = 3; k >= 0; k--) { u32 s = by >> 8 * k & 255, v = 0;
    if (s < 8) v = bytes[s]; else if (s < 12) v = bytes[2 * (s - 8) + 1] & 128 ? 255 : 0; else if (s > 12) v = 255;
    out = out << 8 | v; }
  return out; }
// The largest half not beyond x, by search.
static u16 toward_zero(float x) {
  for (u32 low = 0, sign = __builtin_bit_cast(u32, x) >> 16 & 0x8000;;) {
    if (x != x) return half_bits((_Float16)x);
    u32 high = 0x7c00; float size = __builtin_fabsf(x);
    while (high - low > 1) { u32 middle = (low + high) / 2; (float)half(middle) <= size ? low = middle : high =
    middle; }
    return sign | ((float)half(high) <= size ? high : low); } }
