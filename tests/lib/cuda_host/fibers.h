// The blocks of a kernel as fibers: where a GPU thread begins and ends, and in what order the warps of
// a block run. The generated header is included first; STAGE makes it the kernel of one stage,
// COLUMNS that of several requests a step, HEAD_STEPS and HEAD_STEP those of first tokens. PASS names a source of a
// prompt's pass, whose function ENTRY takes a CALL in blocks of THREADS with SHARED bytes. An ENTRY of
// one CALL alone stands behind the header.
#pragma once
#include GENERATED
#ifdef PASS
#include <kog/prompt/hopper.h>
#include PASS
#elif defined(ENTRY)
#elif defined(STAGE)
#include <kog/stage_roles.h>
#elif defined(HEAD_STEP)
#include <kog/columns/head_step.h>
#include <kog/roles.h>
#elif defined(COLUMNS)
#include <kog/columns/decode.h>
#include <kog/columns/produce.h>
#include <kog/roles.h>
#else
#include <kog/head_steps.h>
#include <kog/roles.h>
#endif
#include <sys/mman.h>

#include <vector>

namespace kog::host {

KOG_OWN Fiber* current;
KOG_OWN i64 ticks;
static KOG_OWN void* scheduler_stack;
#ifdef CALL
using Argument = CALL;
#elif defined(STAGE)
using Argument = StageCall;
#else
using Argument = Pointers;
#endif
#ifdef HEAD_STEP
namespace walk = kog::columns::head_step;
#elif defined(COLUMNS)
namespace walk = kog::columns;
#elif defined(HEAD_STEPS)
namespace walk = kog::head_steps;
#else
namespace walk = kog;
#endif
static const Argument* argument;  // of each rank
constexpr int kPasses = 24, kLooks = 3;  // of a warp in one round: collectives; looks at a flag
constexpr size_t kStackBytes = 128 << 10;
#ifdef PASS
constexpr int kBlockThreads = THREADS;
constexpr size_t kSharedMemory = SHARED;
#else
constexpr int kBlockThreads = kThreads;
constexpr size_t kSharedMemory =
    kRingSlots * (kRingSlotBytes + 16) + kPartialBytes + kScratchBytes + kSmallBytes;
#endif
constexpr int kBlockWarps = kBlockThreads / 32;

// Saves the callee-saved registers and swaps stacks (System V x86-64).
extern "C" void kog_switch(void** save, void* load);
asm(R"(
.text
.globl kog_switch
kog_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

KOG_EMULATED void yield_fiber() { kog_switch(&current->stack_top, scheduler_stack); }
void yield() { yield_fiber(); }

// The whole block meets once after the ring is set up.
KOG_EMULATED void sync_all(BlockState& b) {
  u64 mine = b.generation;
  note_arrival(mine);
  if (++b.arrived == kBlockThreads) {
    b.arrived = 0;
    b.generation++;
  }
  while (b.generation == mine) yield();
  note_leaving(mine);
}

static void run_thread() {
#ifdef PASS
  ENTRY(*argument);
#elif defined(ENTRY)
  ENTRY(argument[current->rank]);
#elif defined(STAGE)
  Block b(argument->p);
  init_ring(b);
  sync_all(*current->block);
  run_stage(b, *argument);
#else
  Block b(argument[current->rank]);
  init_ring(b);
  load_cursors(b);
  sync_all(*current->block);
  run_roles(b, [&] { walk::consume(b); }, [&] { walk::produce(b); });
#endif
}
KOG_EMULATED void body() {
  run_thread();
  current->done = true;
  yield();
  __builtin_trap();
}

// Numbers that a seed sets: xorshift. (<random> would take a fifth of the time that compiling takes.)
class Dice {
 public:
  explicit Dice(int seed) : state_(0x9e3779b97f4a7c15ull * static_cast<u64>(2 * i64{seed} + 1)) {}
  int below(int sides) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<int>((state_ >> 32) % static_cast<u64>(sides));
  }

 private:
  u64 state_;
};

// One block, and which of its warps runs next.
class BlockRunner {
 public:
  explicit BlockRunner(int rank, int index) : fibers_(kBlockThreads), shared_(kSharedMemory, 0xff) {
    stacks_ = static_cast<u8*>(mmap(nullptr, kStackBytes * kBlockThreads, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    state_.shared = shared_.data();
    for (int i = 0; i < kBlockThreads; i++) {
      fibers_[i] = {nullptr, &state_, rank, index, i};
      start(fibers_[i], stacks_ + kStackBytes * static_cast<size_t>(i));
    }
  }
  ~BlockRunner() { munmap(stacks_, kStackBytes * kBlockThreads); }
  BlockRunner(const BlockRunner&) = delete;

  BlockState& state() { return state_; }
#ifndef PASS
  const Small& small() const {
    return *reinterpret_cast<const Small*>(&shared_[kSharedMemory - kSmallBytes]);
  }
#endif
  bool ended() const { return ended_ == kBlockThreads; }

  // Every warp goes on for a while, in an order that `dice` set unless they are null; with `holds`
  // single warps do not, for many rounds.
  void round(Dice* dice, bool holds) {
    int first = dice ? dice->below(kBlockWarps) : 0;
    if (holds) hold(*dice);
    for (int w = 0; w < kBlockWarps; w++) {
      int warp = (w + first) % kBlockWarps;
      if (warp != held_) run_warp(warp);
    }
  }

 private:
  KOG_EMULATED static void start(Fiber& f, u8* stack) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);
    *--top = nullptr;  // where a call would have left its return address: keeps the stack aligned
    *--top = reinterpret_cast<void*>(&body);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.stack_top = top;
  }
  void hold(Dice& dice) {
    if (held_rounds_-- > 0) return;
    bool begins = dice.below(40) == 0;
    held_ = begins ? dice.below(kBlockWarps) : -1;
    held_rounds_ = begins ? dice.below(60) : 0;
  }
  // Let a warp go on for a few of its collectives, or less where it waits.
  KOG_EMULATED void run_warp(int index) {
    Fiber* threads = &fibers_[32 * index];
    Warp& warp = state_.warps[index];
    if (warp.blocked == 32 && warp.barrier == state_.generation) return;
    begin_warp(state_, index);
    int looks = 0;
    for (int pass = 0; pass < kPasses && looks < kLooks; pass++) {
      u64 generation = warp.generation;
      warp.looked = false;
      for (int thread = 0; thread < 32; thread++) {
        if (threads[thread].done) continue;
        current = &threads[thread];
        kog_switch(&scheduler_stack, current->stack_top);
        ended_ += threads[thread].done;
      }
      looks += warp.looked;
      if (warp.generation == generation) break;
    }
    end_warp(state_);
  }

  std::vector<Fiber> fibers_;
  std::vector<u8> shared_;
  BlockState state_;
  u8* stacks_;
  int ended_ = 0;
  int held_ = -1, held_rounds_ = 0;
};

KOG_EMULATED void land_copy(const Copy& c) {
  copy_in_bulk(c);
  host_barrier(c.barrier)->state -= c.bytes;
  barrier_complete(host_barrier(c.barrier));
}
KOG_EMULATED void land_due_copies(BlockState& block) {
  int kept = 0;
  for (int i = 0; i < block.num_copies; i++) {
    Copy c = block.copies[i];
    if (c.delay-- > 0)
      block.copies[kept++] = c;
    else
      land_copy(c);
  }
  block.num_copies = kept;
}
void land_copies(BlockState& block) { land_due_copies(block); }

}  // namespace kog::host
