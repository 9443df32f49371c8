// Operations of a wave that are in flight: performed at any moment after they were issued, a register filled when a wait
// (or the room for them) says so. Those on the same bytes keep their order; no others do. One instruction's lanes and
// words are performed in any order too: only 8 bytes that are aligned so are never torn.
#pragma once
#include <algorithm>
#include "machine.h"

void perform_lds(Wave&, Flight&);
bool perform_atomic(Machine&, Wave&, Flight&, bool all);

constexpr size_t MOST_VECTOR = 62, MOST_SCALAR = 14;
constexpr i32 EVEN = 1 << 15;  // a chance

inline bool in_memory(const Flight& f) {
    return f.kind == Flight::LOAD || f.kind == Flight::STORE || f.kind == Flight::ATOMIC;
}

inline int words_of(const Flight& f) { return std::max(1, f.bytes / 4); }

template <int COUNT> inline void load_or_store(Machine& m, Wave& w, Flight& f, int lane, int from) {
    u32 words[MOST_WORDS] = {};
    int first = from / 4;
    constexpr int MANY = (COUNT + 3) / 4;
    if (f.kind == Flight::LOAD) {
        m.read(*w.group, f.addresses[lane] + from, reinterpret_cast<u8*>(words), COUNT, f.scope);
        for (int k = 0; k < MANY; k++) f.data[first + k][lane] = words[k];
    } else {
        for (int k = 0; k < MANY; k++) words[k] = f.data[first + k][lane];
        m.write(*w.group, f.addresses[lane] + from, reinterpret_cast<const u8*>(words), COUNT, f.scope);
    }
    m.touch(f.inst);
}

inline void load_or_store(Machine& m, Wave& w, Flight& f, int lane, int from, int count) {
    switch (count) {
    case 1: return load_or_store<1>(m, w, f, lane, from);
    case 2: return load_or_store<2>(m, w, f, lane, from);
    case 4: return load_or_store<4>(m, w, f, lane, from);
    case 8: return load_or_store<8>(m, w, f, lane, from);
    case 12: return load_or_store<12>(m, w, f, lane, from);
    case 16: return load_or_store<16>(m, w, f, lane, from);
    default: throw Fault("an access to " + std::to_string(count) + " bytes is not known");
    }
}

// What is left of a load or store: all, or every piece with an even chance. Whether nothing is left then.
inline bool move_bytes(Machine& m, Wave& w, Flight& f, bool all) {
    int words = words_of(f);
    bool done = true;
    for (int l = 0; l < LANES; l++) {
        if (!f.left[l]) continue;
        if (all && f.left[l] == (1 << words) - 1) {
            load_or_store(m, w, f, l, 0, f.bytes);
            f.left[l] = 0;
            continue;
        }
        for (int k = 0, count; k < words; k += count) {
            count = k + 1 < words && (f.addresses[l] + 4 * k) % 8 == 0 ? 2 : 1;
            if (!(f.left[l] >> k & 1) || !(all || m.random.chance(EVEN))) continue;
            load_or_store(m, w, f, l, 4 * k, std::min(f.bytes, 4 * count));
            f.left[l] &= ~(((1 << count) - 1) << k);
        }
        done &= !f.left[l];
    }
    return done;
}

// All of it, or a random part of what has several pieces.
inline void perform(Machine& m, Wave& w, Flight& f, bool all = true) {
    if (f.performed) return;
    f.performed = true;
    bool local_store = f.kind == Flight::STORE && f.local();
    all |= (f.mask & (f.mask - 1)) == 0 && f.bytes <= 4;
    Workgroup& g = *w.group;
    switch (f.kind) {
    case Flight::LOAD:
    case Flight::STORE: f.performed = move_bytes(m, w, f, all); break;
    case Flight::ATOMIC: f.performed = perform_atomic(m, w, f, all); break;
    case Flight::WRITE_BACK: m.write_back(g, f.scope); break;
    case Flight::LDS: perform_lds(w, f); break;
    case Flight::SCALAR_LOAD: break;  // read when issued: nothing that it may read changes
    }
    g.local_stores -= local_store && f.performed;
}

// Bring what was found into the registers.
void arrive(Wave& w, Flight& f);

inline void land_one(Machine& m, Wave& w, Queue& queue, size_t k) {
    perform(m, w, queue[k]);
    arrive(w, queue[k]);
    queue.remove(m.landed, k);
    if (w.vector_queue.empty() && w.scalar_queue.empty()) w.group->flying &= ~(u64(1) << w.index);
}

inline void land(Machine& m, Wave& w, Queue& queue, size_t keep) {
    while (queue.size() > keep) land_one(m, w, queue, 0);
}

// lgkmcnt: LDS lands in order, scalar loads in any: of these none is certain before nothing is left, and what has left
// the count may be they, so that of LDS only what is more than `keep` by itself is certain.
inline void land_scalar(Machine& m, Wave& w, size_t keep) {
    Queue& queue = w.scalar_queue;
    if (keep == 0) return land(m, w, queue, 0);
    auto in_lds = [](const auto& f) { return f->kind == Flight::LDS; };
    for (auto left = size_t(std::count_if(queue.begin(), queue.end(), in_lds)); left > keep; left--)
        land_one(m, w, queue, size_t(std::find_if(queue.begin(), queue.end(), in_lds) - queue.begin()));
}

inline bool overlap(const std::vector<u64>& a, const std::vector<u64>& b) {  // both sorted
    if (a.empty() || b.empty() || a.back() < b.front() || b.back() < a.front()) return false;
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i] == b[j]) return true;
        a[i] < b[j] ? i++ : j++;
    }
    return false;
}

inline bool same_bytes(const Flight& a, const Flight& b) {
    if (!overlap(a.lines, b.lines)) return false;
    const u64 some = b.addresses[__builtin_ctzll(b.mask)], reach = u64(a.bytes) + u64(b.bytes) - 1;
    u64 of_b[LANES];  // no mask in the loop of all pairs, nor a way out: for vectors of them
    for (int o = 0; o < LANES; o++) of_b[o] = b.mask >> o & 1 ? b.addresses[o] : some;
    for (u64 left = a.mask; left; left &= left - 1) {
        const u64 last = a.addresses[__builtin_ctzll(left)] + u64(a.bytes) - 1;
        bool any = false;
        for (u64 first : of_b) any |= last - first < reach;
        if (any) return true;
    }
    return false;
}

// Waves of a workgroup share a compute unit, which takes their own loads and stores in the order in which they are
// issued: LLVM's fences of a workgroup wait for none of them.
inline void finish_older(Machine& m, Wave& w, const Flight& f) {
    Workgroup& g = *w.group;
    if (!f.local() || (f.kind == Flight::LOAD && g.local_stores == 0)) return;
    for (Wave& other : g.waves) {
        if (&other == &w) continue;
        for (auto& older : other.vector_queue)
            if (!older->performed && older->local() && (older->kind == Flight::STORE || f.kind == Flight::STORE) &&
                same_bytes(*older, f))
                perform(m, other, *older);
    }
}

inline bool may_overtake(const Queue& queue, size_t k) {
    for (size_t o = 0; o < k; o++) {
        const Flight& older = queue[o];
        if (!older.performed && same_bytes(older, queue[k])) return false;
    }
    return true;
}

// Perhaps perform one operation that nobody waits for yet.
inline void stir(Machine& m, Wave& w) {
    if (!w.vector_queue.empty() && m.random.chance(m.options.early)) {
        size_t k = m.random.below(u32(w.vector_queue.size()));
        Flight& f = w.vector_queue[k];
        if (f.kind == Flight::WRITE_BACK) {
            for (size_t o = 0; o <= k; o++) perform(m, w, w.vector_queue[o]);
        } else if (!f.performed && may_overtake(w.vector_queue, k)) {
            perform(m, w, f, m.random.chance(EVEN));
        }
    }
    if (!w.scalar_queue.empty() && m.random.chance(m.options.early))
        for (auto& f : w.scalar_queue)
            if (!f->performed) {
                perform(m, w, *f);
                break;
            }
}

// Loads of the wave itself that it has not waited for may have found their lines ahead of the invalidation, and bring
// them behind it: LLVM's code for an acquire waits first. It does not wait for other waves' loads, which share the
// caches, so those bring nothing old.
inline void invalidate(Machine& m, Wave& w, int scope) {
    std::vector<std::pair<Line, Line>> old;
    for (size_t k = 0; k < w.vector_queue.size(); k++) {
        Flight& f = w.vector_queue[k];
        if (f.kind != Flight::LOAD || !f.local() || f.lines.empty() || !m.random.chance(EVEN)) continue;
        if (!f.performed && !may_overtake(w.vector_queue, k)) continue;
        perform(m, w, f);
        u64 address = f.addresses[size_t(__builtin_ctzll(f.mask))];
        for (u64 number : f.lines) old.push_back(m.held(*w.group, number, m.range_of(address, f.bytes).shared));
    }
    m.invalidate(*w.group, scope);
    for (const auto& lines : old) m.bring(*w.group, lines, scope);
}

inline void find_lines(Flight& f) {
    auto add = [&](u64 line) {
        if (f.lines.empty() || f.lines.back() != line) f.lines.push_back(line);
    };
    for (int l = 0; l < LANES; l++)
        if (f.mask >> l & 1) {
            add(f.addresses[l] / LINE);
            add((f.addresses[l] + f.bytes - 1) / LINE);
        }
    if (!std::is_sorted(f.lines.begin(), f.lines.end())) std::sort(f.lines.begin(), f.lines.end());
    f.lines.erase(std::unique(f.lines.begin(), f.lines.end()), f.lines.end());
}

// The queue's next.
inline void launch(Machine& m, Wave& w, Queue& queue, size_t most, Flight& f) {
    if (!m.options.adversarial) {
        perform(m, w, f);
        arrive(w, f);
        return;
    }
    land(m, w, queue, most - 1);
    if (in_memory(f)) find_lines(f);
    finish_older(m, w, f);
    w.group->local_stores += f.kind == Flight::STORE && f.local();
    queue.push();
    w.group->flying |= u64(1) << w.index;
    stir(m, w);
}
