// The machine: what all workgroups share, the scheduler's random numbers, and memory as a workgroup sees it.
#pragma once
#include <algorithm>
#include <memory>
#include <set>
#include "caches.h"

constexpr u32 NEAR = 4;  // lines behind one that was loaded, any of which may come with it

struct Range {
    u64 first, last;
    i32 shared;  // with another GPU or the host: only system scope reaches them
    i32 least;   // the narrowest scope with which they may be touched
    i32 pairs;   // of two words of 8 bytes: who sees a pair's first word finds the second there
};

struct Options {
    u64 seed;
    i32 adversarial;           // 0: every access is performed at once, in memory itself
    i32 early, evict, hold;    // chances in 65,536: that an operation in flight is performed before anybody waits for it,
                               // that an access evicts a line or brings one more, that a workgroup is held back
    i32 quantum;               // most instructions of a wave before another goes on
    i32 trace;                 // whether `passed` is kept
};

class Random {
  public:
    explicit Random(u64 seed) : state_(seed * 2 + 1) { next(), next(); }
    u32 next() {  // PCG
        u64 old = state_;
        state_ = old * 6364136223846793005ull + 1442695040888963407ull;
        u32 mixed = u32(((old >> 18) ^ old) >> 27), by = u32(old >> 59);
        return mixed >> by | mixed << (-by & 31);
    }
    u32 below(u32 n) { return u32(u64(next()) * n >> 32); }
    bool chance(i32 of_65536) { return i32(next() & 0xFFFF) < of_65536; }

  private:
    u64 state_;
};

struct Machine {
    std::vector<Inst> code;
    std::vector<u64> executed;  // how often each instruction was
    std::vector<u64> awaited;   // how often each wait found something in flight
    struct InFlight {
        u32 vector, scalar;  // operations that vmcnt and lgkmcnt count
    };
    std::vector<InFlight> most;  // what a wave had in flight at most when it came to each wait, in adversarial memory
    struct Passed {
        u32 group, wave, at, before, behind;
    };
    std::vector<Passed> passed;  // executor.py
    std::vector<u64> touched;   // a bit for each range that its loads and stores were in
    std::vector<Range> ranges;
    std::vector<bool> stored;  // plainly, to each range
    u64 code_at = 0;  // where the kernel's first instruction would lie: behind its constants, which code finds from there
    std::vector<Workgroup> groups;
    Queue::Flights landed;
    Options options;
    Random random;
    u64 steps = 0;
    bool waits = false;  // the wave whose turn it is, at an instruction that it will begin again
    std::string error;
    std::vector<std::unique_ptr<Cache>> l1, scalar, l2, gpu;
    size_t last_range = 0;
    std::set<u64> seconds;  // of pairs whose first word has not landed since

    explicit Machine(const Options& o) : options(o), random(o.seed) {}

    const Range& range_of(u64 address, int bytes) {
        const Range& range = ranges[last_range];
        if (address >= range.first && address + bytes <= range.last) [[likely]]
            return range;
        return other_range(address, bytes);
    }
    [[gnu::noinline]] const Range& other_range(u64 address, int bytes) {
        for (size_t k = 0; k < ranges.size(); k++)
            if (address >= ranges[k].first && address + bytes <= ranges[k].last) return last_range = k, ranges[k];
        throw Fault("an access to " + std::to_string(bytes) + " bytes at " + std::to_string(address) +
                    ", which no buffer holds");
    }

    // The instruction that lies at an address.
    i32 index_of(u64 address) const {
        auto before = [](const Inst& i, u64 at) { return u64(i.at) < at; };
        auto found = std::lower_bound(code.begin(), code.end(), address - code_at, before);
        if (found == code.end() || u64(found->at) != address - code_at) throw Fault("a jump to no instruction");
        return i32(found - code.begin());
    }

    void touch(const Inst* i) { touched[i - code.data()] |= u64(1) << (last_range & 63); }

    bool checked(u64 address, int bytes, int scope) {
        const Range& range = range_of(address, bytes);
        if (scope < range.least)
            throw Fault("an access of scope " + std::to_string(scope) + " to words that need " + std::to_string(range.least));
        return range.shared;
    }

    static u8* home(u64 number) { return reinterpret_cast<u8*>(number * LINE); }
    static u64 first_written(const Line& line) {
        for (u64 k = 0; k < LINE; k++)
            if (line.written(k)) return line.number * LINE + k;
        return line.number * LINE;
    }

    // A store to words of pairs lands.
    void pair_lands(const Range& range, u64 address, u64 bytes) {
        for (u64 word = (address - range.first) / 8; word * 8 < address + bytes - range.first; word++) {
            u64 pair = range.first + word / 2 * 16;
            if (word % 2) seconds.insert(pair);
            else if (!seconds.erase(pair))
                throw Fault("the first word of a pair lands ahead of its second");
        }
    }

    // ---- what lies below an XCD's L2 ----

    void write_home(const Line& line) {
        u8* to = home(line.number);
        for (u64 k = 0; k < LINE; k++)
            if (line.written(k)) to[k] = line.bytes[k];
    }
    Line& gpu_line(const Workgroup& g, u64 number) {
        Cache& cache = *gpu[g.gpu];
        if (Line* line = cache.find(number)) return *line;
        Line& line = cache.claim(number, [&](Line& old) { write_home(old); });
        std::memcpy(line.bytes, home(number), LINE);
        return line;
    }
    const u8* below(const Workgroup& g, u64 number, int scope, bool shared) {
        if (!shared) return home(number);
        if (scope < SYSTEM_SCOPE) return gpu_line(g, number).bytes;
        if (Line* line = gpu[g.gpu]->find(number)) {
            if (line->dirty) write_home(*line);
            gpu[g.gpu]->drop(number);
        }
        return home(number);
    }
    void write_below(const Workgroup& g, u64 address, const u8* data, u64 count, int scope, bool shared) {
        u64 number = address / LINE, at = address % LINE;
        if (shared && scope < SYSTEM_SCOPE) {
            Line& line = gpu_line(g, number);
            std::memcpy(line.bytes + at, data, count);
            gpu[g.gpu]->mark(line, at, count);
            return;
        }
        std::memcpy(home(number) + at, data, count);
        if (shared)
            if (Line* line = gpu[g.gpu]->find(number)) {
                std::memcpy(line->bytes + at, data, count);
                line->unmark(at, count);
            }
    }
    void write_line_below(const Workgroup& g, const Line& line) {
        for (u64 k = 0; k < LINE; k++)
            if (line.written(k)) {
                u64 address = line.number * LINE + k;
                write_below(g, address, line.bytes + k, 1, AGENT_SCOPE, range_of(address, 1).shared);
            }
    }

    // ---- loads, stores, fences of a workgroup ----

    void refresh(const Workgroup& g, Line& line, int scope, bool shared) {
        line.refresh(below(g, line.number, scope, shared));
    }
    Line& l2_line(const Workgroup& g, u64 number, bool shared) {
        Cache& cache = *l2[g.xcd];
        if (Line* line = cache.find(number)) return *line;
        Line& line = cache.claim(number, [&](Line& old) { write_line_below(g, old); });
        std::memcpy(line.bytes, below(g, number, AGENT_SCOPE, shared), LINE);
        return line;
    }
    [[gnu::noinline]] const u8* view_beyond(const Workgroup& g, u64 number, int scope, bool shared) {
        l1[g.index]->drop(number);
        Line* line = l2[g.xcd]->find(number);
        if (!line) return below(g, number, scope, shared);
        refresh(g, *line, scope, shared);
        return line->bytes;
    }
    const u8* view(const Workgroup& g, u64 number, int scope, bool shared) {
        if (scope >= AGENT_SCOPE) return view_beyond(g, number, scope, shared);
        if (Line* line = l1[g.index]->find(number)) [[likely]]
            return line->bytes;
        return brought(g, number, shared);
    }
    // Into the L1.
    [[gnu::noinline]] const u8* brought(const Workgroup& g, u64 number, bool shared) {
        Line& line = l1[g.index]->claim(number, [](Line&) {});
        std::memcpy(line.bytes, l2_line(g, number, shared).bytes, LINE);
        return line.bytes;
    }
    [[gnu::always_inline]] inline void read(const Workgroup& g, u64 address, u8* to, u64 bytes, int scope) {
        bool shared = checked(address, int(bytes), scope);
        if (!options.adversarial) {
            std::memcpy(to, reinterpret_cast<u8*>(address), bytes);
            return;
        }
        if (address % LINE + bytes <= LINE) {
            std::memcpy(to, view(g, address / LINE, scope, shared) + address % LINE, bytes);
        } else {
            for (u64 done = 0, count; done < bytes; done += count) {
                u64 at = (address + done) % LINE;
                count = std::min(bytes - done, LINE - at);
                std::memcpy(to + done, view(g, (address + done) / LINE, scope, shared) + at, count);
            }
        }
        if (random.chance(options.evict)) fetch_near(g, address / LINE, ranges[last_range]);
    }
    // What nobody asked for: a line near one that was loaded, if it is of the same buffer.
    void fetch_near(const Workgroup& g, u64 number, const Range& range) {
        u64 near = number + 1 + random.below(NEAR);
        if (near * LINE >= range.first && (near + 1) * LINE <= range.last) view(g, near, WAVE_SCOPE, range.shared);
    }
    void write(const Workgroup& g, u64 address, const u8* from, u64 bytes, int scope) {
        bool shared = checked(address, int(bytes), scope);
        if (const Range& range = ranges[last_range]; range.pairs) pair_lands(range, address, bytes);
        if (!options.adversarial) {
            std::memcpy(reinterpret_cast<u8*>(address), from, bytes);
            return;
        }
        for (u64 done = 0, count; done < bytes; done += count) {
            u64 number = (address + done) / LINE, at = (address + done) % LINE;
            count = std::min(bytes - done, LINE - at);
            if (Line* line = l1[g.index]->find(number)) std::memcpy(line->bytes + at, from + done, count);
            if (scope < AGENT_SCOPE) {
                Line& line = l2_line(g, number, shared);
                std::memcpy(line.bytes + at, from + done, count);
                l2[g.xcd]->mark(line, at, count);
            } else {
                if (Line* line = l2[g.xcd]->find(number)) {
                    std::memcpy(line->bytes + at, from + done, count);
                    line->unmark(at, count);
                }
                write_below(g, address + done, from + done, count, scope, shared);
            }
        }
        if (random.chance(options.evict))
            l2[g.xcd]->evict_one(random.next(), [&](Line& line) { write_line_below(g, line); });
        if (shared && random.chance(options.evict))
            gpu[g.gpu]->evict_one(random.next(), [&](Line& line) { write_home(line); });
    }
    // The bytes at which an atomic acts, and what is to be told after it has.
    u8* atomic_place(const Workgroup& g, u64 address, int bytes, int scope) {
        bool shared = checked(address, bytes, scope);
        u64 number = address / LINE;
        if (!options.adversarial) return reinterpret_cast<u8*>(address);
        l1[g.index]->drop(number);
        if (Line* line = l2[g.xcd]->find(number)) {
            if (line->dirty) write_line_below(g, *line);
            l2[g.xcd]->drop(number);
        }
        if (!shared || scope == SYSTEM_SCOPE) {
            below(g, number, SYSTEM_SCOPE, shared);
            return reinterpret_cast<u8*>(address);
        }
        Line& line = gpu_line(g, number);
        gpu[g.gpu]->mark(line, address % LINE, bytes);
        return line.bytes + address % LINE;
    }
    void write_back(const Workgroup& g, int scope) {
        if (!options.adversarial) return;
        if (scope >= AGENT_SCOPE) l2[g.xcd]->write_back([&](Line& line) { write_line_below(g, line); });
        if (scope == SYSTEM_SCOPE) gpu[g.gpu]->write_back([&](Line& line) { write_home(line); });
    }
    void invalidate(const Workgroup& g, int scope) {
        if (!options.adversarial) return;
        if (scope >= WORKGROUP_SCOPE) l1[g.index]->invalidate([](Line&) {});
        if (scope == SYSTEM_SCOPE)
            gpu[g.gpu]->invalidate([&](Line& line) {
                line.refresh(home(line.number));
            });
        if (scope >= AGENT_SCOPE)
            l2[g.xcd]->invalidate([&](Line& line) {
                refresh(g, line, AGENT_SCOPE, range_of(first_written(line), 1).shared);
            });
    }
    // A line as a workgroup's plain loads find it, in its L1 and in the L2.
    std::pair<Line, Line> held(const Workgroup& g, u64 number, bool shared) {
        view(g, number, WAVE_SCOPE, shared);
        Line first = *l1[g.index]->find(number);
        return {first, l2_line(g, number, shared)};
    }
    // Behind an invalidation such a line comes in once more, as old as it was.
    void bring(const Workgroup& g, const std::pair<Line, Line>& old, int scope) {
        u64 number = old.first.number;
        if (scope >= WORKGROUP_SCOPE)
            std::memcpy(l1[g.index]->claim(number, [](Line&) {}).bytes, old.first.bytes, LINE);
        if (scope < AGENT_SCOPE) return;
        Line* line = l2[g.xcd]->find(number);
        if (!line) line = &l2[g.xcd]->claim(number, [&](Line& other) { write_line_below(g, other); });
        line->refresh(old.second.bytes);
    }
    // What the end of a kernel does.
    void flush() {
        if (!options.adversarial) return;
        for (Workgroup& g : groups) l2[g.xcd]->write_back([&](Line& line) { write_line_below(g, line); });
        for (auto& cache : gpu) cache->write_back([&](Line& line) { write_home(line); });
    }
};
