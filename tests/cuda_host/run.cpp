// Runs every block of the kernel on one CPU thread, as fibers (kog/ptx.h). The generated header is
// included first; STAGE makes it the kernel of one stage, COLUMNS that of several requests a step.
#include GENERATED
#ifdef STAGE
#include <kog/stage.h>
#elif defined(COLUMNS)
#include <kog/columns/decode.h>
#include <kog/watchdog.h>
#else
#include <kog/decode.h>
#include <kog/watchdog.h>
#endif
#include <sys/mman.h>

#include <random>

namespace kog::host {

Fiber* current;
i64 ticks;
static void* scheduler_stack;
#ifdef STAGE
using Argument = StageCall;
#else
using Argument = Pointers;
#endif
#ifdef COLUMNS
namespace walk = kog::columns;
#else
namespace walk = kog;
#endif
static const Argument* argument;
constexpr int kPasses = 24;
constexpr size_t kStackBytes = 128 << 10;

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

void yield() { kog_switch(&current->stack_top, scheduler_stack); }

void land_copies(BlockState& block) {
  for (size_t i = 0; i < block.copies.size();) {
    Copy& c = block.copies[i];
    if (c.delay-- > 0) {
      i++;
      continue;
    }
    std::memcpy(c.to, c.from, c.bytes);
    host_barrier(c.barrier)->state -= c.bytes;
    barrier_complete(host_barrier(c.barrier));
    block.copies.erase(block.copies.begin() + static_cast<long>(i));
  }
}

// The whole block meets once after the ring is set up.
static void sync_all(BlockState& b) {
  u64 mine = b.turn;
  if (++b.arrived == kThreads) {
    b.arrived = 0;
    b.turn++;
  }
  while (b.turn == mine) yield();
}

static void body() {
  {
#ifdef STAGE
    Block b(argument->p);
    init_ring(b);
    sync_all(*current->block);
    run_stage(b, *argument);
#else
    Block b(*argument);
    init_ring(b);
    take_seats(b);
    sync_all(*current->block);
    if (b.warp < kWarps)
      walk::consume(b);
    else if (b.warp == kWarps && b.in_warp == 0)
      walk::produce(b);
    else if (b.warp == kWarps + 1)
      watch(b);
#endif
  }
  current->done = true;
  yield();
  __builtin_trap();
}

// A warp of a block that does not run for some rounds.
struct Held {
  int warp = -1, rounds = 0;

  void draw(std::mt19937& random, int warps) {
    if (rounds-- > 0) return;
    bool begins = random() % 40 == 0;
    warp = begins ? static_cast<int>(random() % warps) : -1;
    rounds = begins ? static_cast<int>(random() % 60) : 0;
  }
};

// Let a warp go on for a few of its collectives; how many of its threads ended.
static int run_warp(Fiber* lanes, const Warp& warp) {
  int ended = 0;
  for (int pass = 0; pass < kPasses; pass++) {
    u64 turn = warp.turn;
    for (int lane = 0; lane < 32; lane++) {
      if (lanes[lane].done) continue;
      current = &lanes[lane];
      kog_switch(&scheduler_stack, current->stack_top);
      ended += lanes[lane].done;
    }
    if (warp.turn == turn) break;
  }
  return ended;
}

static void start(Fiber& f, u8* stack) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);
  *--top = nullptr;  // where a call would have left its return address: keeps the stack aligned
  *--top = reinterpret_cast<void*>(&body);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  f.stack_top = top;
}

}  // namespace kog::host

// The number of rounds it took, or -1 if the blocks did not end within `most`. Warps run in an
// order that `seed` sets; in every round some blocks, drawn anew, do not run at all. Below 0 single
// warps are held back as well, for many rounds. The block `absent` (-1: none) never runs: the others
// must give up.
extern "C" long kog_run(const kog::host::Argument* call, int seed, int absent, long most) {
  using namespace kog::host;
  argument = call;
  ticks = 0;
  const int threads = kog::kThreads, count = kog::kBlocks * threads, warps = threads / 32;
  const size_t size = kStackBytes * static_cast<size_t>(count);
  auto* stacks = static_cast<kog::u8*>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  std::vector<BlockState> blocks(kog::kBlocks);
  std::vector<Fiber> fibers(static_cast<size_t>(count));
  const size_t shared =
      kog::kRingChunks * (kog::kChunkBytes + 16) + kog::kPartialBytes + kog::kScratchBytes +
      kog::kSmallBytes;
  for (auto& b : blocks) b.shared.assign(shared, 0xff);
  for (int i = 0; i < count; i++) {
    fibers[i].block = &blocks[i / threads];
    fibers[i].block_index = i / threads;
    fibers[i].thread = i % threads;
    start(fibers[i], stacks + kStackBytes * static_cast<size_t>(i));
  }
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<Held> held(kog::kBlocks);
  int left = absent < 0 ? count : count - threads;
  while (left > 0 && ticks < most) {
    ticks++;
    for (int block = 0; block < kog::kBlocks; block++) {
      if (block == absent || (seed != 0 && random() % 4 == 0)) continue;
      int first = seed != 0 ? static_cast<int>(random() % warps) : 0;
      if (seed < 0) held[block].draw(random, warps);
      for (int w = 0; w < warps; w++) {
        int warp = (w + first) % warps;
        if (warp == held[block].warp) continue;
        left -= run_warp(&fibers[block * threads + warp * 32], blocks[block].warps[warp]);
      }
    }
  }
  munmap(stacks, size);
  return left == 0 ? static_cast<long>(ticks) : -1;
}
