// The exchanges of docs/SYNC.md as kernels small enough to run thousands of times, in the form that a HIP kernel has them.
//
//     all_gather     words with a phase bit, two buffers: every block's to all blocks
//     publish        what a whole block wrote, by plain stores: drain, barrier, fence, flag; epochs that grow
//     rank_words     words with a phase bit, from rank to rank
//     rank_publish   what a whole block wrote, from rank to rank
//
// Compiled with NO_... or WEAK_SCOPE, each lacks what its name says: what is known to be wrong.
typedef unsigned u32;
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256))) void
#define DEVICE static inline __attribute__((device)) __attribute__((always_inline))
#define T __builtin_amdgcn_workitem_id_x()
#define B __builtin_amdgcn_workgroup_id_x()
#define SHARED __attribute__((shared)) static
constexpr u32 THREADS = 256;

// ---- AMD's instructions for what sync.py and ptx.h name ----

template <int SCOPE> DEVICE u32 load_shared(const u32* p) {
#ifdef NO_WAIT
    u32 x;  // compilers wait for no load that they do not know of
    asm volatile("global_load_dword %0, %1, off sc0 sc1" : "=v"(x) : "v"(p) : "memory");
    return x;
#else
    return __hip_atomic_load(p, __ATOMIC_RELAXED, SCOPE);
#endif
}
template <int SCOPE> DEVICE void store_shared(u32* p, u32 x) { __hip_atomic_store(p, x, __ATOMIC_RELAXED, SCOPE); }
constexpr int GPU = __HIP_MEMORY_SCOPE_AGENT, SYSTEM = __HIP_MEMORY_SCOPE_SYSTEM;

DEVICE void drain() {
#ifndef NO_DRAIN
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#endif
}
// All threads are here and see what any of them wrote to shared memory.
DEVICE void meet() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
#ifndef NO_BARRIER
    __builtin_amdgcn_s_barrier();
#endif
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
template <int SCOPE> DEVICE void release() {
#ifndef NO_RELEASE
    if (SCOPE == GPU) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    else __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");  // LLVM before 2026 leaves it out where nothing else is in flight
#endif
}
template <int SCOPE> DEVICE void acquire() {
#ifndef NO_ACQUIRE
    if (SCOPE == GPU) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    else __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
#endif
}
// What all threads of the block wrote is there for whoever has seen the flag: drain per wave, barrier, fence, flag.
template <int SCOPE> DEVICE void publish_block(u32* flag, u32 epoch) {
    drain();
    meet();
    if (T == 0) {
        release<SCOPE>();
        store_shared<SCOPE>(flag, epoch);
    }
}
template <int SCOPE> DEVICE void await(const u32* counter, u32 epoch) {
    if (T == 0) {
        u32 seen;
        do seen = load_shared<SCOPE>(counter);
        while (seen < epoch);
    }
    meet();
}
template <int SCOPE> DEVICE void await_block(const u32* flag, u32 epoch) {
    await<SCOPE>(flag, epoch);
    acquire<SCOPE>();
}

#ifdef WEAK_SCOPE
#define WORDS_SCOPE __HIP_MEMORY_SCOPE_WORKGROUP
#define RANKS_SCOPE GPU
#else
#define WORDS_SCOPE GPU
#define RANKS_SCOPE SYSTEM
#endif

// ---- exchanges ----

DEVICE u32 phase_of(u32 step) { return ((step >> 1) + 1) & 1; }

template <int SCOPE> DEVICE u32 await_word(const u32* p, u32 phase) {
    u32 w;
    do w = load_shared<SCOPE>(p);
    while ((w & 1) != phase);
    return w;
}

// words [2][blocks], zero; out [blocks][steps]: the sum of all blocks' values
KERNEL all_gather(u32* words, u32* out, u32 blocks, u32 steps) {
    SHARED u32 seen[THREADS / 32];
    for (u32 step = 0; step < steps; step++) {
        u32 *buffer = words + (step & 1) * blocks, phase = phase_of(step);
        if (T == 0) store_shared<WORDS_SCOPE>(buffer + B, (step * 31 + B * 7 + 1) << 1 | phase);
        u32 word = T / 32;  // every other wave waits
        if (T % 32 == 0 && word < blocks) seen[word] = await_word<WORDS_SCOPE>(buffer + word, phase) >> 1;
        meet();
        if (T == 0) {
            u32 sum = 0;
#pragma clang loop unroll(disable)
            for (u32 i = 0; i < blocks; i++) sum += seen[i] * (i + 1);
            out[B * steps + step] = sum;
        }
        meet();
    }
}

// data [2][256]; words: the flag, and 32 words on the count of arrivals; out [blocks][steps][256]
KERNEL publish(u32* data, u32* words, u32* out, u32 blocks, u32 steps) {
    u32 *flag = words, *arrived = words + 32;
    for (u32 epoch = 1; epoch <= steps; epoch++) {
        if (B == epoch % blocks) {
            await<WORDS_SCOPE>(arrived, blocks * (epoch - 1));
            data[T] = epoch * 1000003 + T * 17;
            data[THREADS + T] = epoch * 7919 + T;
            publish_block<WORDS_SCOPE>(flag, epoch);
        }
        await_block<WORDS_SCOPE>(flag, epoch);
        u32 x = data[T] + 3 * data[THREADS + (T ^ 64)];
        out[(B * steps + epoch - 1) * THREADS + T] = x;
        meet();  // the values were needed for what is stored: they have been read
        if (T == 0) __hip_atomic_fetch_add(arrived, 1, __ATOMIC_RELAXED, WORDS_SCOPE);
    }
}

// Two ranks: inbox [2][256] of this rank and of the other; out [steps][256]: the sums of both ranks' values
KERNEL rank_words(u32* inbox, u32* other, u32* out, u32 rank, u32 steps) {
    for (u32 step = 0; step < steps; step++) {
        u32 at = (step & 1) * THREADS, phase = phase_of(step), mine = step * 31 + T * 7 + rank * 100000;
        store_shared<RANKS_SCOPE>(other + at + T, mine << 1 | phase);
        u32 from = (T + 65) % THREADS;  // what another wave's thread has sent: a barrier orders them
        out[step * THREADS + T] = mine + (await_word<RANKS_SCOPE>(inbox + at + from, phase) >> 1);
        meet();
    }
}

// As `publish`, two ranks in turn: data [2][256] and flag are the other's, which it reads; done says that it has
KERNEL rank_publish(u32* inbox, u32* other, u32* flags, u32* others, u32* out, u32 rank, u32 steps) {
    for (u32 epoch = 1; epoch <= steps; epoch++) {
        await<RANKS_SCOPE>(flags + 32, epoch - 1);
        other[T] = epoch * 1000003 + T * 17 + rank;
        other[THREADS + T] = epoch * 7919 + T;
        publish_block<RANKS_SCOPE>(others, epoch);
        await_block<RANKS_SCOPE>(flags, epoch);
        out[(epoch - 1) * THREADS + T] = inbox[T] + 3 * inbox[THREADS + (T ^ 64)];
        meet();
        if (T == 0) store_shared<RANKS_SCOPE>(others + 32, epoch);
    }
}
