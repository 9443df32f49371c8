// Each kernel but `aligned`, `acquired` and `met` relies on what no document of gfx942 promises: an order within one
// instruction, one line, one counter; that what nobody loaded is in no cache, and nothing old behind an invalidation;
// that a wave ends only once its stores have. Two workgroups, of which the first writes and the second reads; `out` has
// a word a lane.
typedef unsigned u32;
typedef unsigned long long u64;
typedef u32 u4 __attribute__((ext_vector_type(4)));
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(64, 128))) void
#define DEVICE static inline __attribute__((device)) __attribute__((always_inline))
#define T __builtin_amdgcn_workitem_id_x()
#define B __builtin_amdgcn_workgroup_id_x()

DEVICE u32 load(const u32* p) { return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE void store(u32* p, u32 x) { __hip_atomic_store(p, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE void wait_for(const u32* p) { while (load(p) == 0); }
DEVICE void drain() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

// One store of a wave: the last lane's word says that all are there.
KERNEL lanes(u32* words, u32* out) {
    if (B == 0) store(words + T, 5);
    else {
        wait_for(words + 63);
        out[T] = load(words + T);
    }
}

// One store of 16 bytes: the last word says that the others are there.
KERNEL wide(u32* words, u32* out) {
    if (B == 0) {
        u4 all = {5, 5, 5, 5};
        asm volatile("global_store_dwordx4 %0, %1, off sc1" ::"v"(words + 4 * T), "v"(all) : "memory");
    } else {
        u4 all;
        do asm volatile("global_load_dwordx4 %0, %1, off sc1\ns_waitcnt vmcnt(0)" : "=v"(all) : "v"(words + 4 * T) : "memory");
        while (all[3] == 0);
        out[T] = all[0];
    }
}

// As `wide`, of 8 bytes that are aligned: these are not torn.
KERNEL aligned(u32* words, u32* out) {
    if (B == 0) __hip_atomic_store((u64*)words + T, 5ull << 32 | 5, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    else {
        u64 both;
        do both = __hip_atomic_load((u64*)words + T, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        while (both >> 32 == 0);
        out[T] = u32(both);
    }
}

// Two stores into one line of 128 bytes, no wait between.
KERNEL line(u32* words, u32* out) {
    if (B == 0) {
        if (T == 0) {
            store(words, 5);
            store(words + 1, 5);
        }
    } else {
        wait_for(words + 1);
        out[T] = load(words);
    }
}

// A plain load without an acquire, of lines that this workgroup never loaded before.
KERNEL unread(u32* words, u32* out) {
    u32 *flag = words, *data = words + 64;
    if (B == 0) {
        store(data + 64 + T, 5);
        drain();
        if (T == 0) store(flag, 1);
    } else {
        out[T] = data[T % 32];
        wait_for(flag);
        asm volatile("" ::: "memory");
        out[T] = data[64 + T];
    }
}

// As `unread` with its acquire, of a line that a load which nobody has waited for brings: behind the invalidation too.
#define ACQUIRED(name, wait) \
    KERNEL name(u32* words, u32* out) { \
        u32 *flag = words, *data = words + 64; \
        if (B == 0) { \
            store(data + T, 5); \
            drain(); \
            if (T == 0) store(flag, 1); \
        } else { \
            out[T] = data[T]; \
            wait_for(flag); \
            u32 early, x; \
            asm volatile("global_load_dword %1, %2, off\n" wait "buffer_inv sc1\nglobal_load_dword %0, %2, off\n" \
                         "s_waitcnt vmcnt(0)" \
                         : "=&v"(x), "=&v"(early) \
                         : "v"(data + T) \
                         : "memory"); \
            out[T] = x; \
        } \
    }
ACQUIRED(refilled, )
ACQUIRED(acquired, "s_waitcnt vmcnt(0)\n")

// The second wave stores and ends; the first meets nobody at the barrier, and says that all is there.
KERNEL ended(u32* words, u32* out) {
    if (B == 0) {
        if (T >= 64) {
            store(words + T, 5);
            asm volatile("s_endpgm");
        }
        __builtin_amdgcn_s_barrier();
        if (T == 0) store(words, 1);
    } else if (T < 64) {
        wait_for(words);
        out[T] = load(words + 64 + T);
    }
}

// lgkmcnt counts a scalar load, which may come before what was asked of LDS first; LDS in order.
KERNEL counters(u32* words, u32* out) {
    __attribute__((shared)) static u32 kept[64];
    kept[T] = 5;
    u32 x, read, s;
    asm volatile("ds_read_b32 %1, %3\ns_load_dword %2, %4, 0x0\ns_waitcnt lgkmcnt(1)\nv_mov_b32 %0, %1\n"
                 "s_waitcnt lgkmcnt(0)"
                 : "=&v"(x), "=&v"(read), "=&s"(s)
                 : "v"((__attribute__((address_space(3))) u32*)(kept + T)), "s"(words)
                 : "memory");
    if (B == 1) out[T] = x;
}

// What the second wave of a workgroup stores is for the first, behind a barrier: a compute unit keeps their order.
KERNEL met(u32* words, u32* out) {
    if (T >= 64) words[512 + 64 * B + T % 64] = 5;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    u32 x = words[512 + 64 * B + T % 64];
    if (B == 1 && T < 64) out[T] = x;
}

// As `met`, without the barrier.
KERNEL raced(u32* words, u32* out) {
    if (T >= 64) words[512 + 64 * B + T % 64] = 5;
    asm volatile("" ::: "memory");
    u32 x = words[512 + 64 * B + T % 64];
    if (B == 1 && T < 64) out[T] = x;
}
