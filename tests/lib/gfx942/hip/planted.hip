// A kernel that passes every gate (../gates.py), and with -DPLANT_... one that fails one of them.
typedef unsigned u32;
typedef float f4 __attribute__((ext_vector_type(4)));
typedef _Float16 h2 __attribute__((ext_vector_type(2)));
typedef _Float16 h4 __attribute__((ext_vector_type(4)));
typedef u32 u4 __attribute__((ext_vector_type(4)));
#define T __builtin_amdgcn_workitem_id_x()
#ifdef PLANT_SPILLS
#define FEW __attribute__((amdgpu_waves_per_eu(8, 8)))
#else
#define FEW
#endif

extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256))) FEW
void planted(const u4* weights, u32* words, float* out, u32 count) {
    u4 w[8];
    for (int k = 0; k < 8; k++)
#ifdef PLANT_NON_TEMPORAL
        w[k] = weights[k * 256 + T];
#else
        asm volatile("global_load_dwordx4 %0, %1, off sc0 nt" : "=v"(w[k]) : "v"(weights + k * 256 + T));
    asm volatile("s_waitcnt vmcnt(0)" : "+v"(w[0]), "+v"(w[1]), "+v"(w[2]), "+v"(w[3]), "+v"(w[4]), "+v"(w[5]), "+v"(w[6]),
                 "+v"(w[7]));
#endif
#ifdef PLANT_NARROW
    asm volatile("global_load_dword %0, %1, off sc0 nt\ns_waitcnt vmcnt(0)" : "=v"(w[0].x) : "v"(weights + T));
#endif
    float sum = 0;
    f4 tile = {};
    for (int k = 0; k < 8; k++) {
#ifndef PLANT_DOT2
        for (int j = 0; j < 4; j++) {
            u32 x = w[k][j];
            sum = __builtin_amdgcn_fdot2(__builtin_bit_cast(h2, x), __builtin_bit_cast(h2, x), sum, false);
        }
#endif
#ifndef PLANT_MFMA
        unsigned long pair = (unsigned long)w[k].x << 32 | w[k].y;
        tile = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(h4, pair), __builtin_bit_cast(h4, pair), tile, 0, 0, 0);
#endif
        sum += (float)w[k].z;
    }
#ifdef PLANT_SPILLS
    u4 more[40];  // alive at once, with 64 registers
#pragma unroll
    for (int k = 0; k < 40; k++) asm volatile("; %0" : "=v"(more[k]));
#pragma unroll
    for (int k = 0; k < 40; k++) asm volatile("; %0" ::"v"(more[k]));
#endif
#ifdef PLANT_SCRATCH
    volatile u32 kept[16];
    for (u32 k = 0; k < 16; k++) kept[(k + count) % 16] = k;
    sum += kept[count % 16];
#endif
#ifdef PLANT_REGISTERS
    asm volatile("" ::: "v255", "a100");
#endif
#ifdef PLANT_SCOPES
    constexpr int SCOPE = __HIP_MEMORY_SCOPE_AGENT;
#else
    constexpr int SCOPE = __HIP_MEMORY_SCOPE_SYSTEM;
#endif
#ifdef PLANT_LOADS
    while (*words < count) {}
#else
    while (__hip_atomic_load(words, __ATOMIC_RELAXED, SCOPE) < count) {}
#endif
    out[T] = sum + tile.x;
#ifdef PLANT_STORES
    words[T + 1] = count;
#else
    __hip_atomic_store(words + T + 1, count, __ATOMIC_RELAXED, SCOPE);
#endif
}
