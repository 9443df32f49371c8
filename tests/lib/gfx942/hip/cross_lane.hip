// Kernels of instructions that move values between lanes, through LDS or in matrices; test_semantics.py says what
// each must give.
typedef unsigned u32; typedef unsigned long u64; typedef unsigned short u16;
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(64, 256))) void
#define T __builtin_amdgcn_workitem_id_x()
typedef float v4f __attribute__((ext_vector_type(4))); typedef float v16f __attribute__((ext_vector_type(16)));
typedef _Float16 v4h __attribute__((ext_vector_type(4))); typedef short v4s __attribute__((ext_vector_type(4)));
typedef u32 v2 __attribute__((ext_vector_type(2))); typedef u32 v3 __attribute__((ext_vector_type(3)));
typedef u32 v4 __attribute__((ext_vector_type(4)));

#define DPP(NAME, CONTROL) \
    KERNEL dpp_##NAME##_keep(const u32* a, u32* o) { \
        o[T] = __builtin_amdgcn_update_dpp(o[T], a[T], CONTROL, 0xf, 0xf, false); \
    } \
    KERNEL dpp_##NAME##_zero(const u32* a, u32* o) { \
        o[T] = __builtin_amdgcn_update_dpp(o[T], a[T], CONTROL, 0xf, 0xf, true); \
    } \
    KERNEL dpp_##NAME##_keep_odd(const u32* a, u32* o) { \
        if (T & 1) o[T] = __builtin_amdgcn_update_dpp(o[T], a[T], CONTROL, 0xf, 0xf, false); \
    } \
    KERNEL dpp_##NAME##_zero_odd(const u32* a, u32* o) { \
        if (T & 1) o[T] = __builtin_amdgcn_update_dpp(o[T], a[T], CONTROL, 0xf, 0xf, true); \
    }
DPP(quad_perm, 0x4e)
DPP(row_shl_3, 0x103)
DPP(row_shr_1, 0x111)
DPP(row_shr_8, 0x118)
DPP(row_ror_5, 0x125)
DPP(wave_shl, 0x130)
DPP(wave_rol, 0x134)
DPP(wave_shr, 0x138)
DPP(wave_ror, 0x13c)
DPP(row_mirror, 0x140)
DPP(row_half_mirror, 0x141)
DPP(row_bcast_15, 0x142)
DPP(row_bcast_31, 0x143)
DPP(row_newbcast_6, 0x156)

#define SWIZZLE(NAME, PATTERN) \
    KERNEL swizzle_##NAME(const u32* a, u32* o) { o[T] = __builtin_amdgcn_ds_swizzle(a[T], PATTERN); } \
    KERNEL swizzle_##NAME##_low(const u32* a, u32* o) { \
        u32 x = a[T]; \
        if (T < 40) o[T] = __builtin_amdgcn_ds_swizzle(x, PATTERN); \
    }
SWIZZLE(xor_1, 0x41f)
SWIZZLE(xor_16, 0x401f)
SWIZZLE(reverse_8, 0x1c1f)
SWIZZLE(broadcast_of_4, 0x18)
SWIZZLE(quad, 0x801b)

KERNEL dpp_masks(const u32* a, u32* o) { o[T] = __builtin_amdgcn_update_dpp(o[T], a[T], 0x121, 0x5, 0x6, false); }
KERNEL dpp_add(const u32* a, u32* o) { u32 r = a[T]; asm(
    "s_nop 1\n v_add_u32_dpp %0, %0, %0 row_shr:1 row_mask:0xf bank_mask:0xf" : "+v"(r)); o[T] = r; }
KERNEL bpermute(const u32* a, u32* o) {
    o[T] = __builtin_amdgcn_ds_bpermute(4 * (a[T] & 127), a[T]);
}
KERNEL bpermute_low(const u32* a, u32* o) {
    u32 x = a[T];
    if (T < 40) o[T] = __builtin_amdgcn_ds_bpermute(4 * (x & 63), x);
}
KERNEL readlane(const u32* a, u32* o) {
    o[T] = __builtin_amdgcn_readlane(a[T], a[1] & 63) + __builtin_amdgcn_readlane(a[T], 5);
}
KERNEL readfirstlane(const u32* a, u32* o) {
    u32 x = a[T];
    if (T > 20) o[T] = __builtin_amdgcn_readfirstlane(x);
}
KERNEL writelane(const u32* a, u32* o) {
    u32 r = a[T];
    asm("s_mov_b32 m0, %2\n s_nop 3\n v_writelane_b32 %0, %1, m0" : "+v"(r) : "s"(a[1]), "s"(a[0] & 63));
    o[T] = r;
}
KERNEL mbcnt(const u32* a, u32* o) {
    u64 m = __builtin_amdgcn_ballot_w64(a[T] & 1);
    o[T] = __builtin_amdgcn_mbcnt_hi(m >> 32, __builtin_amdgcn_mbcnt_lo(m, 7));
}
KERNEL divergent(const u32* a, u32* o) {
    u32 x = a[T], s = 0;
    while (x) { s += x & 1 ? x : 1; x >>= 1 + (T & 3); } if (T % 3 == 0) s ^= 5;
    o[T] = s;
}
KERNEL lds_words(const u32* a, u32* o) {
    __attribute__((shared)) static u32 s[256];
    s[T] = a[T];
    s[T + 64] = ~a[T];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    o[T] = s[63 - T] * 3 + s[127 - T];
}
KERNEL lds_wide(const u32* a, u32* o) {
    __attribute__((shared)) static v4 s[192];
    v4 x = {a[T], a[T] + 1, a[T] ^ 2, a[T] * 3};
    s[T] = x;
    *(v2*)((u32*)s + 4 * 64 + 2 * T) = v2{x.z, x.x};
    __builtin_amdgcn_s_barrier();
    v4 y = s[63 - T];
    v2 z = *(v2*)((u32*)s + 4 * 64 + 2 * (T ^ 1));
    o[T] = y.x + 5 * y.y + 7 * y.z + 11 * y.w + 13 * z.x + 17 * z.y;
}
KERNEL lds_threes(const u32* a, u32* o) {
    typedef u32 v3 __attribute__((ext_vector_type(3)));
    __attribute__((shared)) static v4 s[64];
    asm volatile("" :: "v"((__attribute__((address_space(3))) v4*)s));  // or LDS would have no bytes
    v4 y;
    v3 x = {a[T], ~a[T], a[T] * 3};
    asm volatile("ds_write_b128 %1, %2\n ds_write_b96 %1, %3\n s_waitcnt lgkmcnt(0)\n"
                 "ds_read_b128 %0, %4\n s_waitcnt lgkmcnt(0)"
                 : "=&v"(y) : "v"(16 * T), "v"(v4{9, 9, 9, a[T] + 1}), "v"(x), "v"(16 * (63 - T)) : "memory");
    o[T] = y.x + 5 * y.y + 7 * y.z + 11 * y.w;
}
KERNEL lds_shorts(const u32* a, u32* o) {
    __attribute__((shared)) static u16 s[64];
    __attribute__((shared)) static unsigned char b[64];
    s[T] = a[T];
    b[T] = (u32)a[T + 64];
    __builtin_amdgcn_s_barrier();
    o[T] = s[63 - T] | (u32)b[63 - T] << 16;
}
KERNEL lds_pairs(const u32* a, u32* o) {
    __attribute__((shared)) static u64 s[64 * 80];
    s[T] = a[T];
    s[T + 64 * 8] = 3ull * a[T];
    s[T + 64 * 33] = 5ull * a[T] << 13;
    __builtin_amdgcn_s_barrier();
    u64 r = s[63 - T] + s[63 - T + 64 * 8] + s[63 - T + 64 * 33];
    o[T] = r ^ r >> 32;
}
KERNEL lds_near(const u32* a, u32* o) {
    __attribute__((shared)) static u64 s[130];
    s[2 * T] = a[T];
    s[2 * T + 1] = 3ull * a[T];
    __builtin_amdgcn_s_barrier();
    u64 r = s[126 - 2 * T] ^ s[127 - 2 * T] + 1;
    o[T] = r ^ r >> 32;
}
KERNEL narrow(const unsigned char* a, u16* o) {
    o[2 * T] = a[3 * T] + ((const signed char*)a)[3 * T + 1];
    o[2 * T + 1] = ((const u16*)a)[T] + ((const short*)a)[T + 1];
    ((unsigned char*)o)[256 + T] = a[T];
}
KERNEL high_halves(const u32* a, u16* o) {
    u32 r = a[T + 1];
    asm("global_load_short_d16_hi %0, %1, off\n s_waitcnt vmcnt(0)" : "+v"(r) : "v"(a + T));
    u32 q = a[T + 1];
    asm("global_load_short_d16 %0, %1, off\n s_waitcnt vmcnt(0)" : "+v"(q) : "v"(a + T));
    o[4 * T] = r;
    asm volatile("global_store_short_d16_hi %0, %1, off" :: "v"(o + 4 * T + 1), "v"(r));
    o[4 * T + 2] = q;
    o[4 * T + 3] = q >> 16;
}
KERNEL threes(const u32* a, u32* o) {
    v3 r;
    asm("global_load_dwordx3 %0, %1, off offset:-12\n s_waitcnt vmcnt(0)" : "=v"(r) : "v"(a + 3 * T + 3));
    asm volatile("global_store_dwordx3 %0, %1, off offset:12\n s_waitcnt vmcnt(0)" :: "v"(o + 3 * T - 3), "v"
        (v3{r.z, r.x, r.y}));
}
KERNEL buffers(const u32* a, u32* o) {
    v4 d = {(u32)(u64)a, (u32)((u64)a >> 32), 100, 0x27000}, e = {(u32)(u64)o, (u32)((u64)o >> 32), 120, 0x27000};
    u32 r;
    v2 q;
    v4 p;
    u32 h;
    asm(
        "buffer_load_dword %0, %4, %5, 0 offen offset:8\n buffer_load_dwordx2 %1, %4, %5, 0 offen\n"
        "buffer_load_dwordx4 %2, %4, %5, 0 offen\n buffer_load_ushort %3, %4, %5, 0 offen offset:2\n s_waitcnt vmcnt(0)"
        : "=&v"(r), "=&v"(q), "=&v"(p), "=&v"(h) : "v"(4 * T), "s"(d));
    u32 sum = r + 3 * q.x + 5 * q.y + 7 * (p.x ^ p.y ^ p.z ^ p.w) + h;
    asm volatile("buffer_store_dword %0, %1, %2, 0 offen\n s_waitcnt vmcnt(0)" :: "v"(sum), "v"(4 * T), "s"(e));
    if (T == 63) asm volatile(
        "buffer_store_short %0, %1, %2, 0 offen offset:4\n buffer_store_dwordx2 %3, %1, %2, 0 offen offset:8\n"
        "buffer_store_dwordx4 %4, %1, %2, 0 offen offset:16\n s_waitcnt vmcnt(0)"
        :: "v"(0x1234567), "v"(0), "s"(e), "v"(q), "v"(v4{1, 2, 3, 4}));
}
KERNEL mfma_16_f16(const v4h* a, const v4h* b, v4f* o) {
    o[T] = __builtin_amdgcn_mfma_f32_16x16x16f16(a[T], b[T], o[T], 0, 0, 0);
}
KERNEL mfma_16_bf16(const v4s* a, const v4s* b, v4f* o) {
    o[T] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a[T], b[T], o[T], 0, 0, 0);
}
KERNEL mfma_32_f16(const v4h* a, const v4h* b, v16f* o) {
    o[T] = __builtin_amdgcn_mfma_f32_32x32x8f16(a[T], b[T], o[T], 0, 0, 0);
}
KERNEL mfma_32_bf16(const v4s* a, const v4s* b, v16f* o) {
    o[T] = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a[T], b[T], o[T], 0, 0, 0);
}
KERNEL accumulators(const u32* a, u32* o) {
    u32 r;
    asm("v_accvgpr_write_b32 a5, %1\n s_nop 1\n v_accvgpr_mov_b32 a7, a5\n s_nop 1\n v_accvgpr_read_b32 %0, a7"
        : "=v"(r) : "v"(a[T]) : "a5", "a7");
    o[T] = r;
}
KERNEL accumulators_in_lds(const u32* a, u32* o) {
    __attribute__((shared)) static u32 lds[128];
    u32 r, s;
    auto at = (__attribute__((address_space(3))) u32*)lds + T;
    asm volatile("v_accvgpr_write_b32 a5, %3\n ds_write_b32 %2, a5\n ds_write2st64_b32 %2, a5, a5 offset1:1\n"
        " ds_read2st64_b32 a[6:7], %2 offset1:1\n s_waitcnt lgkmcnt(0)\n"
        " v_accvgpr_read_b32 %0, a6\n v_accvgpr_read_b32 %1, a7"
        : "=&v"(r), "=&v"(s) : "v"(at), "v"(a[T]) : "a5", "a6", "a7", "memory");
    o[T] = r, o[T + 64] = s;
}
KERNEL atomics(u32* a, u32* o) {
    u64* w = (u64*)(a + 8);
    o[T] = __hip_atomic_fetch_add(a, T + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_or(a + 1, 1u << (T & 31), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_max(a + 2, T * 77 % 64, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    o[T + 64] = __hip_atomic_exchange(a + 3, T, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    u32 want = T;
    o[T + 128] = __hip_atomic_compare_exchange_strong(a + 4, &want, T + 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
        __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_add(w, (u64)T << 31, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_or(w + 1, 1ull << T, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_max(w + 2, (u64)T << 33, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_exchange(w + 3, ~(u64)T, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    u64 both = T;
    __hip_atomic_compare_exchange_strong(w + 4, &both, both + 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
        __HIP_MEMORY_SCOPE_AGENT);
}
KERNEL clocks(u64* a, u32* o) {
    u64 t = __builtin_amdgcn_s_memrealtime(), u = __builtin_amdgcn_s_memtime();
    a[T] = u - t;
    o[T] = __builtin_amdgcn_s_getreg(20 | 3 << 11);
    __builtin_amdgcn_s_sleep(1);
}
KERNEL lds_forms(const u32* a, u32* o) {
    __attribute__((shared)) static u64 s[256];
    asm volatile("" :: "v"((__attribute__((address_space(3))) u64*)s));  // or LDS would have no bytes
    u32 at = 8 * T, r, x = a[T];
    u64 q, y = (u64)~x << 32 | x;
    v4 p;
    asm volatile("ds_write_b32 %2, %3\n ds_write2_b32 %2, %3, %3 offset0:1 offset1:200\n s_waitcnt lgkmcnt(0)\n"
                 "ds_read_b32 %0, %2 offset:800\n ds_read_b64 %1, %2\n s_waitcnt lgkmcnt(0)"
                 : "=&v"(r), "=&v"(q) : "v"(at), "v"(x) : "memory");
    asm volatile("ds_write2_b64 %1, %2, %3 offset0:64 offset1:128\n s_waitcnt lgkmcnt(0)\n"
                 "ds_read2_b64 %0, %1 offset0:128 offset1:64\n s_waitcnt lgkmcnt(0)"
                 : "=&v"(p) : "v"(at), "v"(y), "v"(q) : "memory");
    u64 z;
    asm volatile("ds_read2st64_b32 %0, %1 offset0:2 offset1:4\n s_waitcnt lgkmcnt(0)" : "=&v"(z) : "v"(at + 4) : "memory");
    o[T] = r + 3 * p.x + 5 * p.y + 7 * p.z + 11 * p.w + 13 * (u32)z + 17 * (u32)(z >> 32);
}
KERNEL branches(const u32* a, u32* o) {
    u32 r;
    asm volatile("s_setprio 1\n v_cmp_eq_u32 vcc, 0, %1\n v_mov_b32 %0, 1\n s_cbranch_vccz 1f\n v_add_u32 %0, %0, 2\n"
                 "1: v_cmp_gt_u32 vcc, 5, %2\n s_cbranch_vccnz 2f\n v_add_u32 %0, %0, 4\n"
                 "2: v_cmp_gt_u32 vcc, 3, %2\n s_and_saveexec_b64 s[8:9], vcc\n v_add_u32 %0, %0, 8\n"
                 "v_cmp_gt_u32 vcc, 9, %3\n s_mov_b64 s[10:11], vcc\n s_mov_b64 exec, s[8:9]\n"
                 "v_cmp_lt_u32 vcc, 60, %3\n s_mov_b64 exec, 15\n s_or_saveexec_b64 s[12:13], vcc\n v_add_u32 %0, %0, 16\n"
                 "s_mov_b64 exec, s[8:9]"
                 : "=&v"(r) : "v"(a[T] | 1), "v"(T), "v"(T) : "vcc", "s8", "s9", "s10", "s11", "s12", "s13", "scc");
    o[T] = r;
}
// Back three times to where the program counter was read, then on over an instruction; `by` bytes beyond the label.
#define JUMPS(NAME, BY) \
    KERNEL NAME(const u32* a, u32* o) { \
        u32 r = 0; \
        asm volatile("s_mov_b32 s12, 3\n s_getpc_b64 s[8:9]\n" \
                     "v_add_u32 %0, %0, %1\n s_sub_u32 s12, s12, 1\n s_cmp_eq_u32 s12, 0\n s_cbranch_scc1 1f\n" \
                     "s_setpc_b64 s[8:9]\n" \
                     "1: s_getpc_b64 s[10:11]\n 2: s_add_u32 s10, s10, 3f-2b+" #BY "\n s_addc_u32 s11, s11, 0\n" \
                     "s_setpc_b64 s[10:11]\n v_mov_b32 %0, 0\n 3: s_nop 0" \
                     : "+v"(r) : "v"(a[T]) : "s8", "s9", "s10", "s11", "s12", "scc"); \
        o[T] = r; \
    }
JUMPS(jumps, 0)
JUMPS(jumps_astray, 2)
KERNEL eight_words(const u32* a, u32* o) {
    typedef u32 v8 __attribute__((ext_vector_type(8)));
    v8 r;
    asm volatile("s_load_dwordx8 %0, %1, 0x20\n s_waitcnt lgkmcnt(0)" : "=s"(r) : "s"(a));
    o[T] = r[0] + 3 * r[1] + 5 * r[2] + 7 * r[3] + 11 * r[4] + 13 * r[5] + 17 * r[6] + 19 * r[7];
}
KERNEL sixteen_words(const u32* a, u32* o) {
    typedef u32 v16 __attribute__((ext_vector_type(16)));
    v16 r;
    asm volatile("s_load_dwordx16 %0, %1, 0x40\n s_waitcnt lgkmcnt(0)" : "=s"(r) : "s"(a));
    u32 sum = 0;
    for (int i = 0; i < 16; i++) sum += (2 * i + 1) * r[i];
    o[T] = sum;
}
// Constants lie in the image, as far from the code as the linker has put them.
KERNEL constants(const u32* a, u32* o) {
    static __attribute__((device)) const u32 table[] = {7, 1000003, 5, 0xdeadbeef, 42, 9, 77, 3};
    o[T] = table[a[0] & 7] + T;
}
// Two waves add to the same words; `a`: what each thread adds.
KERNEL lds_sums(const u32* a, u32* o) {
    __attribute__((shared)) static u32 counts[8];
    __attribute__((shared)) static u64 sums[8];
    if (T < 8) counts[T] = 0, sums[T] = 0;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"), __builtin_amdgcn_s_barrier(), __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    __hip_atomic_fetch_add((__attribute__((address_space(3))) u32*)counts + T % 8, a[T], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    __hip_atomic_fetch_add((__attribute__((address_space(3))) u64*)sums + T % 8, (u64)a[T] << 20, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#ifdef RACE_WITH_SUMS
    if (T == 100) o[0] = counts[1];
#endif
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"), __builtin_amdgcn_s_barrier(), __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    if (T < 8) o[T] = counts[T], o[8 + T] = (u32)sums[T], o[16 + T] = (u32)(sums[T] >> 32);
}
KERNEL fences(u32* a, u32* o) {
    a[T] += 5;
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
    o[T] = a[T ^ 1];
}
