// The memory of one or more gfx942 GPUs as weak as its documents allow (LLVM's AMDGPUUsage, "Memory Model gfx942"):
//
//   L1 of a compute unit    here one a workgroup; written through
//   L2 of an XCD            keeps what plain stores wrote until it is written back
//   cache of a GPU          of ranges that others share with it: what agent scope reaches. It stands for all that keeps
//                           a peer or the host from seeing an agent's stores, and the agent from seeing theirs
//   home                    the bytes themselves, in this process: what system scope reaches
//   scalar cache            one a workgroup: never refreshed while the kernel runs
//
// A load takes what the nearest cache below its scope holds, however old, and may bring a line near it that nobody asked
// for. Lines are 128 bytes, dirty by byte.
#pragma once
#include "state.h"

constexpr u64 LINE = 128;

class Line {
  public:
    u64 number = 0, epoch = 0;  // valid while the epoch is the cache's
    bool dirty = false;
    u8 bytes[LINE];

    bool written(u64 k) const { return written_ >> k & 1; }
    void mark(u64 first, u64 count) { written_ |= bits(first, count); }
    void unmark(u64 first, u64 count) { written_ &= ~bits(first, count); }
    void unmark() { written_ = 0; }
    // All but what was written here.
    void refresh(const u8* now) {
        if (!written_) {
            std::memcpy(bytes, now, LINE);
            return;
        }
        for (u64 k = 0; k < LINE; k++)
            if (!written(k)) bytes[k] = now[k];
    }

  private:
    using u128 = unsigned __int128;
    static u128 bits(u64 first, u64 count) { return ((u128(1) << count) - 1) << first; }  // of less than a line
    u128 written_ = 0;  // a bit for each byte
};

class Cache {
  public:
    explicit Cache(size_t lines) : lines_(lines), mask_(lines - 1) {
        if (lines & mask_) throw Fault("lines of a cache are a power of two");
    }
    Line* find(u64 number) {
        Line& line = at(number);
        return line.epoch == epoch_ && line.number == number ? &line : nullptr;
    }
    // The place for a line; what stood there goes to `evict` if it is dirty.
    template <class Evict> Line& claim(u64 number, Evict evict) {
        Line& line = at(number);
        if (line.epoch == epoch_ && line.number != number && line.dirty) evict(line);
        line.number = number;
        line.epoch = epoch_;
        line.dirty = false;
        line.unmark();
        return line;
    }
    void mark(Line& line, u64 first, u64 count) {
        line.mark(first, count);
        if (!line.dirty) dirty_.push_back(size_t(&line - lines_.data()));
        line.dirty = true;
    }
    void drop(u64 number) {
        if (Line* line = find(number)) line->epoch = 0, line->dirty = false;
    }
    template <class Write> void write_back(Write write) {
        for (size_t k : dirty_) {
            Line& line = lines_[k];
            if (line.epoch == epoch_ && line.dirty) clean(line, write);
        }
        dirty_.clear();
    }
    template <class Write> void clean(Line& line, Write write) {
        write(line);
        line.dirty = false;
        line.unmark();
    }
    // Forget every byte that was not written here; `refresh` brings the others of a dirty line up to date.
    template <class Refresh> void invalidate(Refresh refresh) {
        epoch_++;
        std::vector<size_t> still;
        for (size_t k : dirty_) {
            Line& line = lines_[k];
            if (line.epoch != epoch_ - 1 || !line.dirty) continue;
            line.epoch = epoch_;
            refresh(line);
            still.push_back(k);
        }
        dirty_ = still;
    }
    // Write back one of the dirty lines, and forget it.
    template <class Write> void evict_one(u64 random, Write write) {
        if (dirty_.empty()) return;
        size_t k = random % dirty_.size();
        Line& line = lines_[dirty_[k]];
        dirty_[k] = dirty_.back();
        dirty_.pop_back();
        if (line.epoch != epoch_ || !line.dirty) return;
        clean(line, write);
        line.epoch = 0;
    }

  private:
    Line& at(u64 number) { return lines_[(number * 0x9E3779B97F4A7C15ull >> 20) & mask_]; }
    std::vector<Line> lines_;
    size_t mask_;
    std::vector<size_t> dirty_;
    u64 epoch_ = 1;
};
