// The exchanges of docs/SYNC.md as kernels small enough to run thousands of times, in the form that a HIP kernel has them.
//
//     all_gather     words with a phase bit, two buffers: every block's to all blocks
//     publish        what a whole block wrote, by plain stores: drain, barrier, fence, flag; epochs that grow
//     rank_words     words with a phase bit, every rank's to all ranks
//     rank_publish   what a whole block wrote, every rank's to all ranks
//
// Compiled with NO_... or WEAK_SCOPE, each lacks what its name says: what is known to be wrong.
typedef unsigned u32;
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256))) void
#define DEVICE inline __attribute__((device)) __attribute__((always_inline))
#define T __builtin_amdgcn_workitem_id_x()
#define B __builtin_amdgcn_workgroup_id_x()
#define SHARED __attribute__((shared)) static
constexpr u32 THREADS = 256, APART = 32, MOST_RANKS = 8;

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
// What all threads of the block wrote is there for whoever sees what the thread that gets true then tells: drain per
// wave, barrier, fence.
template <int SCOPE> DEVICE bool release_block() {
    drain();
    meet();
    if (T == 0) release<SCOPE>();
    return T == 0;
}
template <int SCOPE> DEVICE void publish_block(u32* flag, u32 epoch) {
    if (release_block<SCOPE>()) store_shared<SCOPE>(flag, epoch);
}
// All of `count` words, 128 bytes apart, have come to `epoch`.
template <int SCOPE> DEVICE void await(const u32* words, u32 epoch, u32 count = 1) {
    if (T < count) {
        u32 seen;
        do seen = load_shared<SCOPE>(words + T * APART);
        while (seen < epoch);
    }
    meet();
}
template <int SCOPE> DEVICE void await_block(const u32* flags, u32 epoch, u32 count = 1) {
    await<SCOPE>(flags, epoch, count);
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

// data [2][256]; words: the flag, and behind it the count of arrivals; out [blocks][steps][256]
KERNEL publish(u32* data, u32* words, u32* out, u32 blocks, u32 steps) {
    u32 *flag = words, *arrived = words + APART;
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

// Where all ranks' memories are: addresses of their own kind, else LLVM does not know that they are no LDS.
struct Ranks {
    __attribute__((address_space(1))) u32* memory[MOST_RANKS];
    DEVICE u32* operator[](u32 rank) const { return (u32*)memory[rank]; }
};
#define EACH_RANK(r) \
    _Pragma("clang loop unroll(disable) vectorize(disable) interleave(disable)") for (u32 r = 0; r < ranks; r++)

// inboxes: every rank's [2][ranks][256], a place for each sender; out [steps][256]: the sums of all ranks' values
KERNEL rank_words(Ranks inboxes, u32* out, u32 rank, u32 ranks, u32 steps) {
    __builtin_assume(ranks > 0);
    for (u32 step = 0; step < steps; step++) {
        u32 buffer = (step & 1) * ranks * THREADS, phase = phase_of(step), mine = step * 31 + T * 7 + rank * 100000;
        EACH_RANK(r)
            store_shared<RANKS_SCOPE>(inboxes[r] + buffer + rank * THREADS + T, mine << 1 | phase);
        u32 from = (T + 65) % THREADS, sum = 0;  // what another wave's thread has sent: a barrier orders them
        EACH_RANK(r)
            sum += await_word<RANKS_SCOPE>(inboxes[rank] + buffer + r * THREADS + from, phase) >> 1;
        out[step * THREADS + T] = sum;
        meet();
    }
}

// As `publish`, all ranks at once. inboxes: every rank's [ranks][2][256], a place for each sender; flags: every rank's
// [2][ranks], by sender that its data is there, by reader that it has read
KERNEL rank_publish(Ranks inboxes, Ranks flags, u32* out, u32 rank, u32 ranks, u32 steps) {
    __builtin_assume(ranks > 0);
    u32 *come = flags[rank], *read = come + ranks * APART;
    for (u32 epoch = 1; epoch <= steps; epoch++) {
        await<RANKS_SCOPE>(read, epoch - 1, ranks);
        EACH_RANK(r) {
            u32* data = inboxes[r] + rank * 2 * THREADS;
            data[T] = epoch * 1000003 + T * 17 + rank;
            data[THREADS + T] = epoch * 7919 + T;
        }
        if (release_block<RANKS_SCOPE>())
            EACH_RANK(r) store_shared<RANKS_SCOPE>(flags[r] + rank * APART, epoch);
        await_block<RANKS_SCOPE>(come, epoch, ranks);
        u32 sum = 0;
        EACH_RANK(r) {
            const u32* data = inboxes[rank] + r * 2 * THREADS;
            sum += (data[T] + 3 * data[THREADS + (T ^ 64)]) * (r + 1);
        }
        out[(epoch - 1) * THREADS + T] = sum;
        meet();
        if (T == 0)
            EACH_RANK(r) store_shared<RANKS_SCOPE>(flags[r] + (ranks + rank) * APART, epoch);
    }
}
