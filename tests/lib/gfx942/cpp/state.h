// What a gfx942 executor holds: instructions as decoded (../decode.py fills the same record), waves, workgroups.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using f16 = _Float16;

constexpr int LANES = 64, WAVE_SGPRS = 128, WAVE_ROWS = 512;
constexpr u64 ALL = ~u64(0);  // lanes
constexpr int VCC = 106, M0 = 124, EXEC = 126, LITERAL = 255, ROW = 256;  // operand codes of the ISA
constexpr u32 UNSET = 0x7FC07FC0;  // what a register holds that nothing has written: a NaN in every format

enum Scope { WAVE_SCOPE = 0, WORKGROUP_SCOPE = 1, AGENT_SCOPE = 2, SYSTEM_SCOPE = 3 };  // sc0 | sc1 << 1
enum Flag { OFFEN = 1, IDXEN = 2, RETURNS = 4 };

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One instruction; a field that its encoding lacks is 0, a register that it lacks -1.
struct Inst {
    i32 op, at, target;      // index in the table of operations, byte in the code, index of a branch's target
    i32 dst, sdst, src[3];   // operand codes; 256 up are vector registers, 512 up accumulators
    i32 addr, saddr, data;   // of memory
    i32 literal, offset, offset1;
    i32 scope, flags;
    i32 neg, abs, opsel, opsel_hi, neg_hi;
    i32 dpp, row_mask, bank_mask, bound;  // dpp -1: none
    i32 sdwa, dst_sel, dst_unused, sel[2], sext[2];
};

struct alignas(64) Row {
    u32 lane[LANES];
};

struct Workgroup;

constexpr int MOST_WORDS = 4;  // that a lane's operation is about

// A memory operation that was issued and that no wait has covered yet.
struct Flight {
    enum Kind { LOAD, STORE, ATOMIC, WRITE_BACK, SCALAR_LOAD, LDS } kind;
    const Inst* inst;
    bool performed = false;
    int scope = 0, bytes = 0;
    u64 mask = 0;
    int rows = 0;            // registers from its destination on that it is to fill
    u64 fills = 0;           // in these lanes
    int what = 0, step = 0;  // of LDS; how a load extends
    int operands = 0;        // of an atomic
    u64 (*modify)(u64, u64, u64) = nullptr;
    std::vector<u64> lines;  // sorted, in adversarial memory
    u8 left[LANES];          // of each lane's words, a bit each: those that memory has not seen yet
    u64 addresses[LANES];
    // What it brings, and what it finds in place of that: words of each lane; of a scalar load one behind the other.
    u32 data[MOST_WORDS][LANES];

    // As good as new, but for the last three, which are the maker's to fill.
    void clear() {
        performed = false;
        scope = bytes = rows = what = step = operands = 0;
        mask = fills = 0;
        modify = nullptr;
        lines.clear();
    }

    // For this compute unit alone; and not even atomically so.
    bool local() const { return (kind == LOAD || kind == STORE) && scope < AGENT_SCOPE; }
    bool plain() const { return local() && scope == WAVE_SCOPE; }
};

// Operations in flight in the order of their issue. Those that have landed leave their room to others, of any wave:
// what was used last is still in the processor's caches.
class Queue {
  public:
    using Flights = std::vector<std::unique_ptr<Flight>>;

    size_t size() const { return flying_.size(); }
    bool empty() const { return flying_.empty(); }
    Flight& operator[](size_t k) const { return *flying_[k]; }
    Flights::const_iterator begin() const { return flying_.begin(); }
    Flights::const_iterator end() const { return flying_.end(); }

    // What is issued next: in no order yet before `push`.
    Flight& next(Flights& landed, Flight::Kind kind, const Inst& i) {
        if (!next_ && landed.empty()) next_ = std::make_unique<Flight>();
        if (!next_) next_ = std::move(landed.back()), landed.pop_back();
        next_->clear();
        next_->kind = kind;
        next_->inst = &i;
        return *next_;
    }
    void push() { flying_.push_back(std::move(next_)); }
    void remove(Flights& landed, size_t k) {
        landed.push_back(std::move(flying_[k]));
        flying_.erase(flying_.begin() + long(k));
    }

  private:
    Flights flying_;
    std::unique_ptr<Flight> next_;
};

// In a row's lanes of the mask these values.
inline void put(Row& row, const u32* value, u64 mask) {
    if (mask == ALL) {
        std::memcpy(row.lane, value, sizeof row.lane);
        return;
    }
    for (int first = 0; first < LANES; first += 32) {  // masks as wide as the lanes, for vectors of them
        u32 half = u32(mask >> first);
        for (int l = 0; l < 32; l++) row.lane[first + l] = half >> l & 1 ? value[first + l] : row.lane[first + l];
    }
}

struct Wave {
    enum State { RUNNING, AT_BARRIER, ENDED } state = RUNNING;
    Workgroup* group = nullptr;
    int index = 0;  // in its workgroup
    i32 pc = 0;  // index into the code
    bool scc = false;
    Queue vector_queue, scalar_queue;  // what vmcnt and lgkmcnt count

    Wave() {
        for (u32& s : sgpr_) s = UNSET;
        for (Row& row : row_)
            for (u32& lane : row.lane) lane = UNSET;
    }

    // Instructions read and write registers through these alone, by operand codes: a fault if a load is to fill one of
    // them, in any of these lanes, which no wait has covered yet, whatever it holds meanwhile.
    u32 word(int code) const {
        touch(code, ALL);
        return sgpr_[code];
    }
    u64 pair(int code) const { return word(code) | u64(word(code + 1)) << 32; }
    void set_word(int code, u32 value) {
        touch(code, ALL);
        sgpr_[code] = value;
    }
    void set_pair(int code, u64 value) {
        set_word(code, u32(value));
        set_word(code + 1, u32(value >> 32));
    }
    u64 exec() const { return pair(EXEC); }
    // A lane that is off gives 0: what most often reads it is code whose threads a compiler has parted for longer than was
    // meant. So in adversarial memory it is a fault.
    bool gives(u64 exec, int lane, int from) const;
    const u32* row(int code, u64 lanes) const {
        touch(code, lanes);
        return row_[code - ROW].lane;
    }
    void set_row(int code, const u32* value, u64 lanes) {
        touch(code, lanes);
        put(row_[code - ROW], value, lanes);
    }

    // A load is issued that is to fill so many registers. Another load may still be to fill one of them only where they
    // come in order: those of one counter do, but for scalar loads.
    void await(Flight& f, int rows, u64 lanes) {
        f.rows = rows;
        f.fills = lanes;
        const Queue* in_order = f.kind == Flight::LDS ? &scalar_queue : &vector_queue;
        if (f.kind == Flight::SCALAR_LOAD) in_order = nullptr;
        for (int code = f.inst->dst; code < f.inst->dst + rows; code++) {
            if (due_[code]) must_not_fill(code, lanes, in_order);
            due_[code]++;
        }
    }
    // Register r of those has come.
    void fill(const Flight& f, int r, const u32* value) {
        int code = f.inst->dst + r;
        due_[code]--;
        if (code < ROW) sgpr_[code] = *value;
        else put(row_[code - ROW], value, f.fills);
    }

  private:
    u32 sgpr_[WAVE_SGPRS];
    u16 due_[ROW + WAVE_ROWS] = {};  // in flight to fill each register
    Row row_[WAVE_ROWS];

    void touch(int code, u64 lanes) const {
        if (due_[code]) [[unlikely]]
            must_not_fill(code, lanes, nullptr);
    }
    // Kept out of `touch`, which is in every instruction.
    [[gnu::noinline]] void must_not_fill(int code, u64 lanes, const Queue* in_order) const {
        for (const Queue* queue : {&vector_queue, &scalar_queue})
            for (const auto& f : *queue)
                if (queue != in_order && code >= f->inst->dst && code < f->inst->dst + f->rows && f->fills & lanes)
                    throw Fault("register " + std::to_string(code) + " is touched while a load is to fill it: no wait");
    }
};

// Who touched a byte of LDS last, and between which barriers of the workgroup.
struct LdsUse {
    u32 written = 0, read = 0;    // barriers before, + 1
    u32 agreed = 0;               // waves that wrote the same value behind the writer: they read their own
    i8 writer = -1, reader = -1;  // -2: several waves
    bool added = false;           // all that was written between these barriers, by atomics
    bool operator==(const LdsUse&) const = default;
};

// Of all bytes. Nearly all accesses are of whole words: one has one record, until a part of it is used.
class LdsUses {
  public:
    void resize(size_t bytes) {
        words_.resize((bytes + 3) / 4);
        parted_.resize(words_.size());
    }
    // F(use, where it begins) of all that these bytes have.
    template <class F> void each(u32 first, u32 bytes, F f) {
        for (u32 at = first, end = first + bytes; at < end;) {
            u32 word = at / 4, whole = at % 4 == 0 && at + 4 <= end;
            if (whole && !parted_[word]) {
                f(words_[word], at);
                at += 4;
                continue;
            }
            part(word);
            for (u32 last = std::min(end, 4 * word + 4); at < last; at++) f(bytes_[at], at);
            if (whole) join(word);
        }
    }

  private:
    void part(u32 word) {
        if (parted_[word]) return;
        parted_[word] = true;
        bytes_.resize(4 * words_.size());
        std::fill_n(bytes_.begin() + 4 * word, 4, words_[word]);
    }
    void join(u32 word) {
        const LdsUse* of = &bytes_[4 * word];
        parted_[word] = !(of[0] == of[1] && of[0] == of[2] && of[0] == of[3]);
        words_[word] = of[0];
    }
    std::vector<LdsUse> words_, bytes_;
    std::vector<u8> parted_;
};

// The same of a byte of memory that plain stores reach.
struct MemoryUse {
    u32 written = 0, read = 0;
    int writer = -1, reader = -1;
    u64 agreed = 0;
    u8 value = 0;
};

struct Workgroup {
    int index = 0, gpu = 0, xcd = 0;  // xcd: which L2 it has, unique over all GPUs
    u32 barriers = 1;  // + 1
    std::vector<Wave> waves;
    u64 running = 0, flying = 0;  // waves by their index: those that run, and that have anything in flight
    std::vector<u8> lds;
    LdsUses lds_use;
    std::unordered_map<u64, MemoryUse> memory_use;
    int local_stores = 0;  // in flight
    bool lanes_meet = false;  // no lane may read what one holds that is off
};

inline bool Wave::gives(u64 exec, int lane, int from) const {
    bool on = exec >> from & 1;
    if (!on && (exec >> lane & 1) && group->lanes_meet)
        throw Fault("lane " + std::to_string(lane) + " reads lane " + std::to_string(from) + ", which is off");
    return on;
}

struct Machine;
using Handler = void (*)(Machine&, Wave&, const Inst&);

struct Operation {
    const char* name;
    Handler run;
};
