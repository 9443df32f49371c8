// Runs gfx942 instructions: all workgroups resident, waves scheduled at random from a seed. Called from ../executor.py.
#include <map>
#include "ops_compare.h"
#include "ops_memory.h"
#include "ops_packed.h"
#include "ops_scalar.h"

namespace {

constexpr size_t L1_LINES = 1 << 10, L2_LINES = 1 << 13, GPU_LINES = 1 << 12, SCALAR_LINES = 64;
constexpr int XCC_ID = 20;  // hardware register

std::vector<Operation> all_operations() {
    std::vector<Operation> all;
    auto add = [&](const auto& table) { all.insert(all.end(), std::begin(table), std::end(table)); };
    add(INTEGER_OPERATIONS);
    add(FLOAT_OPERATIONS);
    add(COMPARE_OPERATIONS);
    add(PACKED_OPERATIONS);
    add(SCALAR_OPERATIONS);
    add(MEMORY_OPERATIONS);
    return all;
}
const std::vector<Operation> OPERATIONS = all_operations();

std::string where(const Machine& m) {
    std::string out;
    for (const Workgroup& g : m.groups)
        for (size_t k = 0; k < g.waves.size(); k++) {
            const Wave& w = g.waves[k];
            if (w.state == Wave::ENDED) continue;
            char text[64];
            snprintf(text, sizeof text, "%s%d.%zu at %#x%s", out.empty() ? "" : ", ", g.index, k,
                     unsigned(m.code[w.pc].at), w.state == Wave::AT_BARRIER ? " (barrier)" : "");
            if (out.size() < 600) out += text;
        }
    return out;
}

// Of a workgroup whose waves have ended: perhaps perform what one has in flight. Whether nothing is left.
bool settled(Machine& m, Workgroup& g) {
    for (Wave& w : g.waves)
        for (auto& f : w.vector_queue)
            if (!f->performed) {
                perform(m, w, *f, m.random.chance(EVEN));
                return false;
            }
    return true;
}

void halt(Wave& w, Wave::State state) {
    w.state = state;
    w.group->running &= ~(u64(1) << w.index);
}

// All that are at a barrier.
void go_on(Workgroup& g) {
    for (Wave& w : g.waves)
        if (w.state == Wave::AT_BARRIER) {
            w.state = Wave::RUNNING;
            g.running |= u64(1) << w.index;
        }
}

// The n-th of those that run.
Wave& running(Workgroup& g, u32 n) {
    u64 left = g.running;
    for (; n; n--) left &= left - 1;
    return g.waves[__builtin_ctzll(left)];
}

// A wave's turn: as many instructions as the quantum allows.
void run_wave(Machine& m, Wave& w) {
    bool adversarial = m.options.adversarial;
    if (adversarial)
        for (u64 left = w.group->flying; left; left &= left - 1) stir(m, w.group->waves[__builtin_ctzll(left)]);
    for (u32 left = 1 + m.random.below(u32(m.options.quantum)); left && w.state == Wave::RUNNING; left--) {
        const Inst& i = m.code[w.pc];
        m.executed[w.pc]++;
        m.steps++;
        w.pc++;
        OPERATIONS[i.op].run(m, w, i);
        if (m.waits) break;
    }
    m.waits = false;
}

void note_passed(Machine& m, const Wave& w, size_t left, u32 met) {
    if (!m.options.trace) return;
    auto wide = [](const auto& f) { return f->kind == Flight::LOAD && f->bytes == 16; };
    auto last = [&](size_t n) { return u32(std::count_if(w.vector_queue.end() - long(n), w.vector_queue.end(), wide)); };
    m.passed.push_back({u32(w.group->index), u32(w.index), u32(w.pc - 1), last(w.vector_queue.size()), last(left) + met});
}

}  // namespace

u64 clock_of(Machine& m) { return m.steps; }

u32 hardware_register(Machine&, const Wave& w, int id) {
    if (id != XCC_ID) throw Fault("hardware register " + std::to_string(id) + " is not known");
    return u32(w.group->xcd & 7);
}

void meet_at_barrier(Machine& m, Wave& w) {
    note_passed(m, w, w.vector_queue.size(), 1);
    halt(w, Wave::AT_BARRIER);
    if (w.group->running) return;
    for (const Wave& other : w.group->waves)  // a barrier is convergent: compilers never put two in place of one
        if (other.state == Wave::AT_BARRIER && other.pc != w.pc)
            throw Fault("waves of a workgroup meet at different barriers: their branches differ");
    w.group->barriers++;
    go_on(*w.group);
}

namespace {
void note_in_flight(Machine& m, const Wave& w, int vector) {
    auto& most = m.most[w.pc - 1];
    most.vector = std::max(most.vector, u32(w.vector_queue.size()));
    most.scalar = std::max(most.scalar, u32(w.scalar_queue.size()));
    if (w.vector_queue.size() > size_t(vector)) note_passed(m, w, size_t(vector), 0);
}
}  // namespace

void wait_for(Machine& m, Wave& w, int vector, int scalar) {
    if (!m.options.adversarial) return;
    auto under_way = [](const auto& f) { return !f->performed; };
    if (w.vector_queue.size() > size_t(vector) && m.random.chance(m.options.early) &&
        std::any_of(w.vector_queue.begin(), w.vector_queue.end() - vector, under_way)) {
        w.pc--;  // others go on meanwhile
        m.waits = true;
        return;
    }
    note_in_flight(m, w, vector);
    m.awaited[w.pc - 1] += w.vector_queue.size() > size_t(vector) || (scalar < 15 && w.scalar_queue.size() > size_t(scalar));
    land(m, w, w.vector_queue, size_t(vector));
    if (scalar < 15) land_scalar(m, w, size_t(scalar));
}

// What the wave has in flight outlives it.
void end_wave(Machine&, Wave& w) {
    halt(w, Wave::ENDED);
    if (!w.group->running) go_on(*w.group);
}

extern "C" {

const char* gfx_operation(int index) { return size_t(index) < OPERATIONS.size() ? OPERATIONS[index].name : nullptr; }

int gfx_inst_bytes() { return sizeof(Inst); }

Machine* gfx_machine(const Inst* code, int count, const Options* options, const Range* ranges, int num_ranges) {
    auto* m = new Machine(*options);
    m->code.assign(code, code + count);
    m->executed.assign(count, 0);
    m->awaited.assign(count, 0);
    m->most.assign(count, {});
    m->touched.assign(count, 0);
    m->ranges.assign(ranges, ranges + num_ranges);
    m->stored.assign(num_ranges, false);
    return m;
}

void gfx_reserve(Machine* m, int groups) { m->groups.reserve(groups); }
void gfx_code_at(Machine* m, u64 address) { m->code_at = address; }

// A workgroup whose waves begin at instruction `entry` with these SGPRs; v0 packs a thread's three indices.
void gfx_workgroup(Machine* m, int gpu, int xcd, const i32* block, int lds_bytes, int entry, const u32* sgprs, int count) {
    m->groups.emplace_back();
    Workgroup& g = m->groups.back();
    g.lanes_meet = m->options.adversarial;
    g.index = int(m->groups.size()) - 1;
    g.gpu = gpu;
    g.xcd = xcd;
    g.lds.assign(lds_bytes, 0xEE);
    g.lds_use.resize(lds_bytes);
    int threads = block[0] * block[1] * block[2];
    g.waves.resize((threads + LANES - 1) / LANES);
    for (size_t k = 0; k < g.waves.size(); k++) {
        Wave& w = g.waves[k];
        w.group = &g;
        w.index = int(k);
        g.running |= u64(1) << k;
        w.pc = entry;
        for (int s = 0; s < count; s++) w.set_word(s, sgprs[s]);
        u64 exec = 0;
        Lanes<u32> indices;
        for (int l = 0; l < LANES; l++) {
            int t = int(k) * LANES + l;
            exec |= u64(t < threads) << l;
            indices.lane[l] = u32(t % block[0] | (t / block[0] % block[1]) << 10 | (t / block[0] / block[1]) << 20);
        }
        w.set_row(ROW, indices.lane, ALL);
        w.set_pair(EXEC, exec);
    }
    if (m->options.adversarial) {
        m->l1.push_back(std::make_unique<Cache>(L1_LINES));
        m->scalar.push_back(std::make_unique<Cache>(SCALAR_LINES));
        while (int(m->l2.size()) <= xcd) m->l2.push_back(std::make_unique<Cache>(L2_LINES));
        while (int(m->gpu.size()) <= gpu) m->gpu.push_back(std::make_unique<Cache>(GPU_LINES));
    }
}

// Go on for about `budget` instructions: 0 when all waves have ended, 1 if some have not, 2 after a fault.
int gfx_run(Machine* m, u64 budget) {
    std::vector<Workgroup*> live;
    for (Workgroup& g : m->groups) live.push_back(&g);
    u64 until = m->steps + budget, held_until = 0;
    Workgroup* held = nullptr;
    Wave* now = nullptr;
    try {
        while (!live.empty() && m->steps < until) {
            if (m->random.chance(m->options.hold)) {
                held = live[m->random.below(u32(live.size()))];
                held_until = m->steps + 4096 + m->random.below(1 << 15);
            }
            size_t k = m->random.below(u32(live.size()));
            if (live[k] == held && m->steps < held_until && live.size() > 1) k = (k + 1) % live.size();
            Workgroup& g = *live[k];
            if (!g.running) {
                if (settled(*m, g)) live.erase(live.begin() + long(k));
                continue;
            }
            now = &running(g, m->random.below(u32(__builtin_popcountll(g.running))));
            run_wave(*m, *now);
        }
        if (!live.empty()) {
            m->error = "no end after " + std::to_string(m->steps) + " instructions: " + where(*m);
            return 1;
        }
        m->flush();
        return 0;
    } catch (const Fault& fault) {
        const Inst& i = m->code[now->pc - 1];
        char at[96];
        snprintf(at, sizeof at, "%s at %#x, workgroup %d: ", OPERATIONS[i.op].name, unsigned(i.at), now->group->index);
        m->error = at + std::string(fault.what());
        return 2;
    }
}

const char* gfx_error(Machine* m) { return m->error.c_str(); }
u64 gfx_steps(Machine* m) { return m->steps; }
const u64* gfx_executed(Machine* m) { return m->executed.data(); }
const u64* gfx_touched(Machine* m) { return m->touched.data(); }
const u64* gfx_awaited(Machine* m) { return m->awaited.data(); }
const Machine::InFlight* gfx_in_flight(Machine* m) { return m->most.data(); }
const Machine::Passed* gfx_passed(Machine* m) { return m->passed.data(); }
u64 gfx_passed_bytes(Machine* m) { return m->passed.size() * sizeof m->passed[0]; }
void gfx_free(Machine* m) { delete m; }
}
