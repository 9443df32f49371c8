// Operations of a wave that are in flight: performed at any moment after they were issued, a register filled when a wait
// (or the room for them) says so. Those on one line keep their order; no others do.
#pragma once
#include <algorithm>
#include "machine.h"

void perform_lds(Wave&, Flight&);
void perform_atomic(Machine&, Wave&, Flight&);

constexpr size_t MOST_VECTOR = 62, MOST_SCALAR = 14;

inline void perform(Machine& m, Wave& w, Flight& f) {
    if (f.performed) return;
    f.performed = true;
    Workgroup& g = *w.group;
    switch (f.kind) {
    case Flight::LOAD:
        for (int l = 0; l < LANES; l++)
            if (f.mask >> l & 1) m.read(g, f.addresses[l], &f.bytes_of[l * f.bytes], f.bytes, f.scope), m.touch(f.inst);
        break;
    case Flight::STORE:
        for (int l = 0; l < LANES; l++)
            if (f.mask >> l & 1) m.write(g, f.addresses[l], &f.bytes_of[l * f.bytes], f.bytes, f.scope), m.touch(f.inst);
        break;
    case Flight::ATOMIC: perform_atomic(m, w, f); break;
    case Flight::WRITE_BACK: m.write_back(g, f.scope); break;
    case Flight::LDS: perform_lds(w, f); break;
    case Flight::SCALAR_LOAD: break;  // read when issued: nothing that it may read changes
    }
}

// Bring what was found into the registers.
void arrive(Wave& w, Flight& f);

inline void land(Machine& m, Wave& w, std::deque<Flight>& queue, size_t keep) {
    while (queue.size() > keep) {
        perform(m, w, queue.front());
        arrive(w, queue.front());
        queue.pop_front();
    }
}

// lgkmcnt: LDS lands in order, scalar loads in any, so that those are only certain once nothing is left.
inline void land_scalar(Machine& m, Wave& w, size_t keep) {
    std::deque<Flight>& queue = w.scalar_queue;
    for (size_t k = 0; keep > 0 && queue.size() > keep && k < queue.size();) {
        if (queue[k].kind == Flight::SCALAR_LOAD) {
            k++;
            continue;
        }
        perform(m, w, queue[k]);
        arrive(w, queue[k]);
        queue.erase(queue.begin() + k);
    }
    if (keep == 0) land(m, w, queue, 0);
}

inline bool overlap(const std::vector<u64>& a, const std::vector<u64>& b) {  // both sorted
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i] == b[j]) return true;
        a[i] < b[j] ? i++ : j++;
    }
    return false;
}

inline bool may_overtake(const std::deque<Flight>& queue, size_t k) {
    for (size_t o = 0; o < k; o++) {
        const Flight& older = queue[o];
        if (!older.performed && overlap(older.lines, queue[k].lines)) return false;
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
            perform(m, w, f);
        }
    }
    if (!w.scalar_queue.empty() && m.random.chance(m.options.early))
        for (Flight& f : w.scalar_queue)
            if (!f.performed) {
                perform(m, w, f);
                break;
            }
}

inline void launch(Machine& m, Wave& w, std::deque<Flight>& queue, size_t most, Flight&& f) {
    if (!m.options.adversarial) {
        perform(m, w, f);
        arrive(w, f);
        return;
    }
    land(m, w, queue, most - 1);
    for (u64& line : f.lines) line /= LINE;
    std::sort(f.lines.begin(), f.lines.end());
    f.lines.erase(std::unique(f.lines.begin(), f.lines.end()), f.lines.end());
    queue.push_back(std::move(f));
    stir(m, w);
}
