// Runs every block of the kernel on a CPU thread of its own, each as fibers (fibers.h). A program, not
// a library: ThreadSanitizer has to be there from the start.
//
//     threads IMAGE SEED MOST [BEGIN END]...
//
// IMAGE is a file that is memory: the argument of each rank, whose pointers are offsets in the file, then
// what they point at, and between each two BEGIN and END nothing, which AddressSanitizer watches. The kernel works in
// the file itself. Exit code 0, 1 if the blocks did not end within MOST rounds each, or the judge's.
#include "fibers.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <thread>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)0)
#endif

using namespace kog::host;

Shared kog::host::shared;
thread_local void* kog::host::scheduler;

constexpr int kStalls = 200, kStallMs = 20;  // one round in so many, a block stands still that long

static kog::u8* open_image(const char* path, size_t& bytes) {
  int file = open(path, O_RDWR);
  struct stat about {};
  if (file < 0 || fstat(file, &about) != 0) abort();
  bytes = static_cast<size_t>(about.st_size);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) abort();
  return static_cast<kog::u8*>(at);
}

// Where every thread of a block writes what every thread has computed.
static void excuse(const kog::Small& small) {
  auto alike = [](const auto& member) {
    AnnotateBenignRaceSized(__FILE__, __LINE__, &member, sizeof member, "written alike");
  };
  alike(small.cursors), alike(small.slot), alike(small.token), alike(small.position);
  alike(small.chosen);
}

// Offsets in the image become addresses. A template, since the argument of one rank has no peers.
template <class OfRank>
static void relocate(OfRank& rank, kog::u64 image) {
  auto* pointers = reinterpret_cast<kog::u64*>(&rank);
  for (size_t i = 0; i < offsetof(Argument, limit) / sizeof(kog::u64); i++) pointers[i] += image;
  if constexpr (kog::kRanks > 1)
    for (int i = 0; i < kog::kRanks; i++) {
      rank.peers[i] = reinterpret_cast<kog::u32*>(reinterpret_cast<kog::u64>(rank.peers[i]) + image);
      rank.errors[i] = reinterpret_cast<kog::u32*>(reinterpret_cast<kog::u64>(rank.errors[i]) + image);
    }
}

static void run_block(int index, int seed, long most, bool* ended) {
  auto* block = new BlockRunner(index / kog::kBlocks, index % kog::kBlocks);  // until the process ends: to the judge, freeing is a write
  auto* judged = new Witness;
  block->state().witness = judged;
  judged->dice = static_cast<kog::u32>(seed) * 977u + static_cast<kog::u32>(index);
  excuse(block->small());
  judged->copies = __tsan_create_fiber(0);
  for (int i = 0; i < kBlockWarps; i++) judged->warps[i].judged = __tsan_create_fiber(0);
  Dice dice(seed * 131 + index);
  while (!block->ended() && ticks < most) {
    ticks++;
    block->round(&dice, seed % 2 != 0);
    land_words(*judged, false);
    if (dice.below(kStalls) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(kStallMs));
    std::this_thread::yield();
  }
  land_words(*judged, true);
  *ended = block->ended();
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  size_t bytes = 0;
  kog::u8* image = open_image(argv[1], bytes);
  auto* ranks = reinterpret_cast<Argument*>(image);
  for (int i = 0; i < kog::kRanks; i++) relocate(ranks[i], reinterpret_cast<kog::u64>(image));
  for (int i = 4; i + 1 < argc; i += 2)
    ASAN_POISON_MEMORY_REGION(image + atol(argv[i]), static_cast<size_t>(atol(argv[i + 1]) - atol(argv[i])));
  argument = ranks;
  shared.base = image;
  shared.fences = static_cast<kog::u32*>(calloc(bytes / 4 + 1, sizeof(kog::u32)));
  constexpr int kBlocks = kog::kRanks * kog::kBlocks;
  bool ended[kBlocks] = {};
  std::vector<std::thread> threads;
  for (int i = 0; i < kBlocks; i++)
    threads.emplace_back(run_block, i, atoi(argv[2]), atol(argv[3]), &ended[i]);
  for (auto& thread : threads) thread.join();
  for (bool one : ended)
    if (!one) return 1;
  return 0;
}
