// Vector memory, scalar memory and LDS instructions: addresses and data are read when they are issued.
#pragma once
#include "flights.h"
#include "operands.h"

u64 clock_of(Machine&);

enum Extend { WHOLE, LOW_HALF, HIGH_HALF };  // what becomes of a value narrower than a register

// ---- where each lane's bytes are ----

inline void global_addresses(const Wave& w, const Inst& i, Flight& f) {
    const u32* low = w.row(i.addr, f.mask);
    u64 base = i.saddr >= 0 ? scalar_bits<u64>(w, i.saddr, 0) : 0;
    const u32* high = i.saddr >= 0 ? nullptr : w.row(i.addr + 1, f.mask);
    base += u64(i64(i.offset));
    if (high)
        for (int l = 0; l < LANES; l++) f.addresses[l] = base + (low[l] | u64(high[l]) << 32);
    else
        for (int l = 0; l < LANES; l++) f.addresses[l] = base + low[l];
}

// Raw and strided buffers; lanes beyond num_records are left out.
inline void buffer_addresses(const Wave& w, const Inst& i, Flight& f) {
    u64 low = w.pair(i.src[1]), high = w.pair(i.src[1] + 2), base = low & 0xFFFFFFFFFFFFull;
    u32 stride = low >> 48 & 0x3FFF, records = u32(high);
    u64 soffset = scalar_bits<u32>(w, i.src[2], 0);
    const u32* first = i.addr >= 0 ? w.row(i.addr, f.mask) : nullptr;
    const u32* second = (i.flags & IDXEN) && (i.flags & OFFEN) ? w.row(i.addr + 1, f.mask) : nullptr;
    for (int l = 0; l < LANES; l++) {
        u64 index = i.flags & IDXEN ? first[l] : 0;
        u64 offset = i.flags & OFFEN ? (second ? second[l] : first[l]) : 0;
        u64 at = u64(stride) * index + offset + u64(i.offset);
        if (at + f.bytes > records) f.mask &= ~(u64(1) << l);
        f.addresses[l] = base + soffset + at;
    }
}

using Addresses = void (*)(const Wave&, const Inst&, Flight&);

inline Flight& flight(Machine& m, Wave& w, const Inst& i, Flight::Kind kind, int bytes, Addresses addresses) {
    Flight& f = w.vector_queue.next(m.landed, kind, i);
    f.scope = i.scope;
    f.bytes = bytes;
    f.mask = w.exec();
    addresses(w, i, f);
    const u8 whole = u8((1 << words_of(f)) - 1);
    for (int l = 0; l < LANES; l++) f.left[l] = f.mask >> l & 1 ? whole : 0;
    return f;
}

// Of memory that is stored to plainly, as check_race of LDS below.
inline void check_memory_race(Machine& m, Wave& w, const Flight& f) {
    if (!f.plain()) return;
    Workgroup& g = *w.group;
    int me = w.index;
    bool stores = f.kind == Flight::STORE;
    for (int l = 0; l < LANES; l++) {
        if (!(f.mask >> l & 1)) continue;
        m.range_of(f.addresses[l], f.bytes);
        if (stores) m.stored[m.last_range] = true;
        if (!m.stored[m.last_range]) continue;
        for (int k = 0; k < f.bytes; k++) {
            MemoryUse& use = g.memory_use[f.addresses[l] + k];
            u8 value = u8(f.data[k / 4][l] >> 8 * (k % 4));
            bool others = use.written == g.barriers && use.writer != me;
            if (stores && others && use.value == value) {
                use.agreed |= u64(1) << me;
                continue;
            }
            others &= stores || !(use.agreed >> me & 1);
            bool read = use.read == g.barriers && use.reader != me;
            if (others || (stores && read))
                throw Fault("a race for memory between waves of a workgroup: no barrier between them");
            if (stores) use.written = g.barriers, use.writer = me, use.agreed = 0, use.value = value;
            else use.reader = read ? -2 : me, use.read = g.barriers;
        }
    }
}

inline void load_op(Machine& m, Wave& w, const Inst& i, int bytes, Extend extend, Addresses addresses) {
    Flight& f = flight(m, w, i, Flight::LOAD, bytes, addresses);
    u64 exec = w.exec();
    f.what = extend;
    std::memset(f.data, 0, words_of(f) * sizeof f.data[0]);  // what lanes beyond a buffer's end find
    if (extend != WHOLE) std::memcpy(f.data[1], w.row(i.dst, exec), sizeof f.data[1]);
    w.await(f, words_of(f), exec);
    check_memory_race(m, w, f);
    launch(m, w, w.vector_queue, MOST_VECTOR, f);
}

inline void store_op(Machine& m, Wave& w, const Inst& i, int bytes, int shift, Addresses addresses) {
    Flight& f = flight(m, w, i, Flight::STORE, bytes, addresses);
    for (int k = 0; k < words_of(f); k++) {
        const u32* row = w.row(i.data + k, f.mask);
        for (int l = 0; l < LANES; l++) f.data[k][l] = row[l] >> shift;
    }
    check_memory_race(m, w, f);
    launch(m, w, w.vector_queue, MOST_VECTOR, f);
}

// Read, modify, write: F(old, operand, comparand). At agent scope unless sc1 says system.
inline void atomic_op(Machine& m, Wave& w, const Inst& i, int bytes, int operands, u64 (*modify)(u64, u64, u64)) {
    Flight& f = flight(m, w, i, Flight::ATOMIC, bytes, global_addresses);
    f.scope = i.scope & 2 ? SYSTEM_SCOPE : AGENT_SCOPE;
    f.modify = modify;
    f.operands = operands;
    for (int k = 0; k < operands * bytes / 4; k++)
        std::memcpy(f.data[k], w.row(i.data + k, f.mask), sizeof f.data[k]);
    if (i.flags & RETURNS) w.await(f, bytes / 4, f.mask);
    launch(m, w, w.vector_queue, MOST_VECTOR, f);
}

// Lane by lane: what is left, or every lane with an even chance. Whether nothing is left then.
inline bool perform_atomic(Machine& m, Wave& w, Flight& f, bool all) {
    int rows = f.bytes / 4;
    bool done = true;
    for (int l = 0; l < LANES; l++) {
        if (!f.left[l]) continue;
        if (!(all || m.random.chance(EVEN))) {
            done = false;
            continue;
        }
        f.left[l] = 0;
        u64 operand[2] = {};
        for (int k = 0; k < f.operands; k++)
            for (int r = 0; r < rows; r++) operand[k] |= u64(f.data[k * rows + r][l]) << 32 * r;
        u8* place = m.atomic_place(*w.group, f.addresses[l], f.bytes, f.scope);
        m.touch(f.inst);
        u64 old = 0;
        std::memcpy(&old, place, f.bytes);
        u64 now = f.modify(old, operand[0], operand[1]);
        std::memcpy(place, &now, f.bytes);
        for (int r = 0; r < rows; r++) f.data[r][l] = u32(old >> 32 * r);
    }
    return done;
}

// ---- LDS ----

enum Lds { READ, READ_TWO, READ_U16, WRITE, WRITE_TWO, ADD, SWIZZLE, PERMUTE_FROM };

inline bool changes(Lds what) { return what == WRITE || what == WRITE_TWO || what == ADD; }

inline int swizzled_lane(i32 pattern, int lane) {
    if ((pattern & 0xFF00) == 0x8000) return (lane & ~3) | (pattern >> 2 * (lane & 3) & 3);
    if (pattern & 0x8000) throw Fault("ds_swizzle_b32 with offset " + std::to_string(pattern) + " is not known");
    int and_mask = pattern & 31, or_mask = pattern >> 5 & 31, xor_mask = pattern >> 10 & 31;
    return (lane & 32) | ((((lane & 31) & and_mask) | or_mask) ^ xor_mask);
}

// Which lane's data comes to a lane.
inline int moved_lane(const Flight& f, int lane) {
    u32 address = u32(f.addresses[lane]), offset = u32(f.inst->offset) | u32(f.inst->offset1) << 8;
    return f.what == SWIZZLE ? swizzled_lane(i32(offset), lane) : int((address + offset) / 4 & 63);
}

inline void lds_op(Machine& m, Wave& w, const Inst& i, Lds what, int bytes, int step) {
    Flight& f = w.scalar_queue.next(m.landed, Flight::LDS, i);
    f.mask = w.exec();
    f.bytes = bytes;
    f.what = what;
    f.step = step;
    bool moves = what == SWIZZLE || what == PERMUTE_FROM, writes = changes(what);
    const u32* address = w.row(i.addr, f.mask);
    for (int l = 0; l < LANES; l++) f.addresses[l] = address[l];
    int rows = words_of(f);
    auto take = [&](int first, int code) {
        for (int k = 0; k < rows; k++) std::memcpy(f.data[first + k], w.row(code + k, f.mask), sizeof f.data[0]);
    };
    if (writes || what == PERMUTE_FROM) take(0, i.data);
    if (what == SWIZZLE) take(0, i.addr);
    if (what == WRITE_TWO) take(rows, i.src[1]);
    for (int l = 0; moves && l < LANES; l++) w.gives(f.mask, l, moved_lane(f, l));
    if (!writes) w.await(f, moves ? 1 : what == READ_TWO ? 2 * rows : rows, f.mask);
    launch(m, w, w.scalar_queue, MOST_SCALAR, f);
}

// Two waves that touch the same byte without a barrier between, one of them to change it, race, unless both add.
enum Use { READS, WRITES, ADDS };

[[noreturn, gnu::noinline]] inline void race(u32 at) {
    throw Fault("a race for byte " + std::to_string(at) + " of LDS: no barrier between waves");
}

template <Use HOW> [[gnu::always_inline]] inline void note_use(LdsUse& use, u32 at, u32 now, int me) {
    bool wrote = use.written == now, other_wrote = wrote && use.writer != me && !(HOW == ADDS && use.added);
    if (HOW == READS && (use.agreed >> me & 1)) other_wrote = false;
    bool other_read = use.read == now && use.reader != me;
    if (other_wrote || (HOW != READS && other_read)) race(at);
    if (HOW == READS) {
        use.reader = i8(other_read ? -2 : me);
        use.read = now;
        return;
    }
    use.agreed = 0;
    use.added = HOW == ADDS && (!wrote || use.added);
    use.writer = i8(wrote && HOW == ADDS && use.writer != me ? -2 : me);
    use.written = now;
}

// Of what holds `old` and is to hold `next`.
template <Use HOW> inline void check_race(Wave& w, u32 first, int bytes, u64 old, u64 next) {
    Workgroup& g = *w.group;
    const u32 now = g.barriers;
    const int me = w.index;
    if (HOW != READS && old == next)  // no change, no harm
        g.lds_use.each(first, bytes, [&](LdsUse& use, u32) { use.agreed |= u32(use.written == now) << me; });
    else g.lds_use.each(first, bytes, [&](LdsUse& use, u32 at) { note_use<HOW>(use, at, now, me); });
}

// What lanes hold comes to others.
inline void move_lanes(Flight& f) {
    Lanes<u32> out;
    for (int l = 0; l < LANES; l++) {
        int from = moved_lane(f, l);
        out.lane[l] = f.mask >> from & 1 ? f.data[0][from] : 0;
    }
    std::memcpy(f.data[0], out.lane, sizeof out.lane);
}

template <Use HOW, int BYTES> inline void use_lds(Wave& w, u8* here, u32 at, u32& word) {
    u32 old = 0, next = 0;
    std::memcpy(&old, here, BYTES);
    std::memcpy(&next, &word, BYTES);
    check_race<HOW>(w, at, BYTES, old, next);
    if (HOW == WRITES) std::memcpy(here, &word, BYTES);
    else word = old;
}

inline void add_in_lds(Wave& w, u8* here, u32 at, const Flight& f, int lane) {
    u64 old = 0, sum, by = 0;
    std::memcpy(&old, here, f.bytes);
    for (int k = 0; k < words_of(f); k++) by |= u64(f.data[k][lane]) << 32 * k;
    sum = (old + by) & ALL >> (64 - 8 * f.bytes);
    check_race<ADDS>(w, at, f.bytes, old, sum);
    std::memcpy(here, &sum, f.bytes);
}

template <Use HOW> inline void move_lds(Wave& w, Flight& f) {
    const Inst& i = *f.inst;
    std::vector<u8>& lds = w.group->lds;
    const int rows = words_of(f), parts = f.what == READ_TWO || f.what == WRITE_TWO ? 2 : 1;
    const u32 whole = u32(i.offset) | u32(i.offset1) << 8;
    const u32 offsets[2] = {parts == 1 ? whole : u32(i.offset * f.step), u32(i.offset1 * f.step)};
    for (u64 left = f.mask; left; left &= left - 1) {
        const int l = __builtin_ctzll(left);
        for (int part = 0; part < parts; part++) {
            u32 at = u32(f.addresses[l]) + offsets[part];  // may wrap
            if (u64(at) + f.bytes > lds.size())
                throw Fault("an access to " + std::to_string(f.bytes) + " bytes at " + std::to_string(at) +
                            " of LDS, which has " + std::to_string(lds.size()));
            u8* here = &lds[at];
            if (HOW == ADDS) add_in_lds(w, here, at, f, l);
            else if (f.bytes == 1) use_lds<HOW, 1>(w, here, at, f.data[0][l]);
            else if (f.bytes == 2) use_lds<HOW, 2>(w, here, at, f.data[0][l]);
            else
                for (int k = 0; k < rows; k++) use_lds<HOW, 4>(w, here + 4 * k, at + 4 * k, f.data[part * rows + k][l]);
        }
    }
}

inline void perform_lds(Wave& w, Flight& f) {
    Lds what = Lds(f.what);
    if (what == SWIZZLE || what == PERMUTE_FROM) move_lanes(f);
    else if (what == ADD) move_lds<ADDS>(w, f);
    else if (changes(what)) move_lds<WRITES>(w, f);
    else move_lds<READS>(w, f);
}

// ---- scalar memory ----

inline void scalar_load(Machine& m, Wave& w, const Inst& i, int words) {
    Flight& f = w.scalar_queue.next(m.landed, Flight::SCALAR_LOAD, i);
    u64 base = scalar_bits<u64>(w, i.src[0], 0) + i64(i.offset);
    if (i.src[1] >= 0) base += scalar_bits<u32>(w, i.src[1], i.literal);
    m.range_of(base, 4 * words);
    for (int k = 0; k < words; k++) {
        u64 address = base + 4 * u64(k);
        const u8* from = reinterpret_cast<const u8*>(address);
        if (m.options.adversarial) {
            Cache& cache = *m.scalar[w.group->index];
            Line* line = cache.find(address / LINE);
            if (!line) {
                line = &cache.claim(address / LINE, [](Line&) {});
                std::memcpy(line->bytes, Machine::home(address / LINE), LINE);
            }
            from = line->bytes + address % LINE;
        }
        std::memcpy(&f.data[0][k], from, 4);
    }
    w.await(f, words, ALL);
    launch(m, w, w.scalar_queue, MOST_SCALAR, f);
}

inline void scalar_clock(Machine& m, Wave& w, const Inst& i) {
    Flight& f = w.scalar_queue.next(m.landed, Flight::SCALAR_LOAD, i);
    u64 now = clock_of(m);
    f.data[0][0] = u32(now);
    f.data[0][1] = u32(now >> 32);
    w.await(f, 2, ALL);
    launch(m, w, w.scalar_queue, MOST_SCALAR, f);
}

// Beside the half that a load has found the other one as it was.
inline void join_halves(Flight& f) {
    for (int l = 0; l < LANES; l++) {
        u32& word = f.data[0][l];
        u32 old = f.data[1][l];
        word = f.what == LOW_HALF ? (old & 0xFFFF0000) | word : (old & 0xFFFF) | word << 16;
    }
}

inline void arrive(Wave& w, Flight& f) {
    if (f.kind == Flight::LOAD && f.what != WHOLE) join_halves(f);
    for (int r = 0; r < f.rows; r++) w.fill(f, r, f.kind == Flight::SCALAR_LOAD ? &f.data[0][r] : f.data[r]);
}

#define GLOBAL_LOAD(NAME, BYTES, EXTEND) \
    {"GLOBAL_LOAD_" #NAME, [](Machine& m, Wave& w, const Inst& i) { load_op(m, w, i, BYTES, EXTEND, global_addresses); }}
#define BUFFER_LOAD(NAME, BYTES, EXTEND) \
    {"BUFFER_LOAD_" #NAME, [](Machine& m, Wave& w, const Inst& i) { load_op(m, w, i, BYTES, EXTEND, buffer_addresses); }}
#define GLOBAL_STORE(NAME, BYTES, SHIFT) \
    {"GLOBAL_STORE_" #NAME, [](Machine& m, Wave& w, const Inst& i) { store_op(m, w, i, BYTES, SHIFT, global_addresses); }}
#define BUFFER_STORE(NAME, BYTES, SHIFT) \
    {"BUFFER_STORE_" #NAME, [](Machine& m, Wave& w, const Inst& i) { store_op(m, w, i, BYTES, SHIFT, buffer_addresses); }}
#define ATOMIC(NAME, OPERANDS, EXPR) \
    {"GLOBAL_ATOMIC_" #NAME, \
     [](Machine& m, Wave& w, const Inst& i) { \
         atomic_op(m, w, i, 4, OPERANDS, [](u64 old, u64 a, [[maybe_unused]] u64 b) -> u64 { return EXPR; }); \
     }}, \
        {"GLOBAL_ATOMIC_" #NAME "_X2", [](Machine& m, Wave& w, const Inst& i) { \
             atomic_op(m, w, i, 8, OPERANDS, [](u64 old, u64 a, [[maybe_unused]] u64 b) -> u64 { return EXPR; }); \
         }}
#define LDS(NAME, WHAT, BYTES, STEP) \
    {#NAME, [](Machine& m, Wave& w, const Inst& i) { lds_op(m, w, i, WHAT, BYTES, STEP); }}
#define SCALAR_LOAD(NAME, WORDS) {#NAME, [](Machine& m, Wave& w, const Inst& i) { scalar_load(m, w, i, WORDS); }}

static const Operation MEMORY_OPERATIONS[] = {
    GLOBAL_LOAD(UBYTE, 1, WHOLE),
    GLOBAL_LOAD(USHORT, 2, WHOLE),
    GLOBAL_LOAD(SHORT_D16, 2, LOW_HALF),
    GLOBAL_LOAD(SHORT_D16_HI, 2, HIGH_HALF),
    GLOBAL_LOAD(DWORD, 4, WHOLE),
    GLOBAL_LOAD(DWORDX2, 8, WHOLE),
    GLOBAL_LOAD(DWORDX3, 12, WHOLE),
    GLOBAL_LOAD(DWORDX4, 16, WHOLE),
    BUFFER_LOAD(USHORT, 2, WHOLE),
    BUFFER_LOAD(DWORD, 4, WHOLE),
    BUFFER_LOAD(DWORDX2, 8, WHOLE),
    BUFFER_LOAD(DWORDX4, 16, WHOLE),
    GLOBAL_STORE(BYTE, 1, 0),
    GLOBAL_STORE(SHORT, 2, 0),
    GLOBAL_STORE(SHORT_D16_HI, 2, 16),
    GLOBAL_STORE(DWORD, 4, 0),
    GLOBAL_STORE(DWORDX2, 8, 0),
    GLOBAL_STORE(DWORDX3, 12, 0),
    GLOBAL_STORE(DWORDX4, 16, 0),
    BUFFER_STORE(SHORT, 2, 0),
    BUFFER_STORE(DWORD, 4, 0),
    BUFFER_STORE(DWORDX2, 8, 0),
    BUFFER_STORE(DWORDX4, 16, 0),
    ATOMIC(ADD, 1, old + a),
    ATOMIC(OR, 1, old | a),
    ATOMIC(UMAX, 1, std::max(old, a)),
    ATOMIC(SWAP, 1, (void(old), a)),
    ATOMIC(CMPSWAP, 2, old == b ? a : old),
    {"BUFFER_WBL2", [](Machine& m, Wave& w, const Inst& i) {
         Flight& f = w.vector_queue.next(m.landed, Flight::WRITE_BACK, i);
         f.scope = i.scope;
         launch(m, w, w.vector_queue, MOST_VECTOR, f);
     }},
    {"BUFFER_INV", [](Machine& m, Wave& w, const Inst& i) { invalidate(m, w, i.scope); }},
    LDS(DS_READ_B32, READ, 4, 0),
    LDS(DS_READ_B64, READ, 8, 0),
    LDS(DS_READ_B128, READ, 16, 0),
    LDS(DS_READ_U16, READ_U16, 2, 0),
    LDS(DS_READ_U8, READ_U16, 1, 0),
    LDS(DS_READ2_B32, READ_TWO, 4, 4),
    LDS(DS_READ2_B64, READ_TWO, 8, 8),
    LDS(DS_READ2ST64_B32, READ_TWO, 4, 256),
    LDS(DS_READ2ST64_B64, READ_TWO, 8, 512),
    LDS(DS_WRITE_B8, WRITE, 1, 0),
    LDS(DS_WRITE_B16, WRITE, 2, 0),
    LDS(DS_WRITE_B32, WRITE, 4, 0),
    LDS(DS_WRITE_B64, WRITE, 8, 0),
    LDS(DS_WRITE_B96, WRITE, 12, 0),
    LDS(DS_WRITE_B128, WRITE, 16, 0),
    LDS(DS_WRITE2_B32, WRITE_TWO, 4, 4),
    LDS(DS_WRITE2_B64, WRITE_TWO, 8, 8),
    LDS(DS_WRITE2ST64_B32, WRITE_TWO, 4, 256),
    LDS(DS_WRITE2ST64_B64, WRITE_TWO, 8, 512),
    LDS(DS_ADD_U32, ADD, 4, 0),
    LDS(DS_ADD_U64, ADD, 8, 0),
    LDS(DS_SWIZZLE_B32, SWIZZLE, 4, 0),
    LDS(DS_BPERMUTE_B32, PERMUTE_FROM, 4, 0),
    SCALAR_LOAD(S_LOAD_DWORD, 1),
    SCALAR_LOAD(S_LOAD_DWORDX2, 2),
    SCALAR_LOAD(S_LOAD_DWORDX4, 4),
    SCALAR_LOAD(S_LOAD_DWORDX8, 8),
    SCALAR_LOAD(S_LOAD_DWORDX16, 16),
    {"S_GETPC_B64", [](Machine& m, Wave& w, const Inst& i) { w.set_pair(i.dst, m.code_at + u64(i.at) + 4); }},
    {"S_SETPC_B64", [](Machine& m, Wave& w, const Inst& i) { w.pc = m.index_of(scalar<u64>(w, i, 0)); }},
    {"S_MEMREALTIME", [](Machine& m, Wave& w, const Inst& i) { scalar_clock(m, w, i); }},
    {"S_MEMTIME", [](Machine& m, Wave& w, const Inst& i) { scalar_clock(m, w, i); }},
};
