// Runs KCCL's collectives with a CPU thread for every block of every rank (kccl/ptx.h), and writes down what each
// block found.
//
//     kccl COLLECTIVE BLOCKS STEPS SEED LIMIT ABSENT FILE        compiled with RANKS, POLICY, DELAY
//
// COLLECTIVE: reduce, delayed, gather, chosen. LIMIT: milliseconds of a wait. ABSENT: a rank that never runs, or -1.
// FILE receives float32 [ranks, blocks, steps, values a step]. Steps come in two launches, without anything done to
// the words between. Exit code 0, or 1 if a block left: then the reports are printed, a rank a line.
#include <kccl/collectives.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

using namespace kccl;

constexpr int kVectors = 5, kRanks = RANKS;
using Sums = AllReduce<POLICY, kRanks>;
using LateSums = DelayedAllReduce<POLICY, kRanks, DELAY>;
using Rows = AllGather<POLICY, kRanks>;
constexpr int kValues = Sums::kValues, kStep = kVectors * kValues;

// What tests/cuda/test_kccl.py calculates as well.
static float input(int rank, int step, int i, float before) {
  u32 h = static_cast<u32>(rank) * 2654435761u + static_cast<u32>(step) * 40503u + static_cast<u32>(i) * 69069u;
  h ^= h >> 16, h *= 0x45d9f3bu, h ^= h >> 16;
  if (h % 61 == 0) return float_of(0xffffffffu);  // a NaN, of the bits that are the poison
  float v = static_cast<float>(static_cast<int>(h)) * 0x1p-20f;
  return std::isfinite(before) ? v + 0x1p-5f * before : v;
}

struct Run {
  std::string what;
  int blocks, first, last, steps, seed;
  std::vector<float>* found;
};

template <class Channel, int kRows>
static bool fetch_all(const Channel& channel, int step, float* to) {
  for (int first = 0; first < kVectors; first += 2) {
    auto at = [&](int i) { return first + i < kVectors ? first + i : -1; };
    float two[kRows][2][kValues];
    bool there;
    if constexpr (kRows > 1)
      there = channel.fetch(step, at, two);
    else
      there = channel.fetch(step, at, two[0]);
    if (!there) return false;
    for (int row = 0; row < kRows; row++)
      for (int i = 0; i < 2 && first + i < kVectors; i++)
        std::memcpy(to + row * kStep + (first + i) * kValues, two[row][i], 4 * kValues);
  }
  return true;
}

static bool walk(const Run& run, const Comm& comm, int block) {
  Sums sums{comm, 0, kVectors};
  LateSums late{comm, 0, kVectors};
  Rows rows{comm, 0, kVectors};
  Broadcast<kRanks> token{comm, Sums::kWords * kVectors};
  int width = run.what == "gather" ? kRanks * kStep : kStep + 1;
  auto row = [&](int step) {
    return run.found->data() + ((comm.rank * run.blocks + block) * run.steps + step) * width;
  };
  auto send = [&](const auto& channel, int step, const float* before) {
    for (int at = block; at < kVectors; at += run.blocks) {
      float mine[kValues];
      for (int j = 0; j < kValues; j++) {
        int i = at * kValues + j;
        mine[j] = input(comm.rank, step, i, before ? before[i] : 0);
      }
      channel.clear(step, at);
      channel.send(step, at, mine);
    }
  };
  for (int step = run.first; step < run.last; step++) {
    float* out = row(step);
    const float* before = step > 0 ? row(step - 1) : nullptr;
    if (run.what == "delayed") {
      if (!fetch_all<LateSums, 1>(late, step, out)) return false;
      send(late, step, before);
      continue;
    }
    send(sums, step, before);
    if (run.what == "gather") {
      if (!fetch_all<Rows, kRanks>(rows, step, out)) return false;
      continue;
    }
    if (!fetch_all<Sums, 1>(sums, step, out)) return false;
    if (run.what == "chosen") {
      u32 chosen = 0;
      int chooses = step % kRanks;
      if (chooses == comm.rank && block == 0) token.send(step, static_cast<u32>(1000 * chooses + step));
      if (!token.fetch(step, chooses, chosen)) return false;
      out[kStep] = static_cast<float>(chosen);
    }
  }
  return true;
}

static void run_block(const Run& run, const Comm& comm, int block, int* ended) {
  host::dice = static_cast<u32>((run.seed * 64 + comm.rank) * 64 + block) * 2654435761u + 1;
  *ended = walk(run, comm, block);
  host::land_stores(true);
}

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  Run run{argv[1], atoi(argv[2]), 0, 0, atoi(argv[3]), atoi(argv[4]), nullptr};
  int absent = atoi(argv[6]);
  u32 words = std::max(Sums::kWords, LateSums::kWords) * kVectors + (Broadcast<kRanks>::kWords + 3) / 4 * 4;
  struct Line {
    alignas(16) u32 w[4];
  };
  std::vector<Line> memory[kRanks], reports[kRanks];
  Comm comm{};
  comm.limit = strtoull(argv[5], nullptr, 10) * 1000000u;
  comm.ranks = kRanks;
  for (int rank = 0; rank < kRanks; rank++) {
    u32 e = POLICY::kEmpty;
    memory[rank].assign(words / 4, Line{{e, e, e, e}});
    reports[rank].assign(kReportWords / 4, Line{});
    comm.words[rank] = memory[rank][0].w;
    comm.reports[rank] = reports[rank][0].w;
  }
  std::vector<float> found(static_cast<size_t>(kRanks * run.blocks * run.steps) *
                           (run.what == "gather" ? kRanks * kStep : kStep + 1));
  run.found = &found;
  bool left = false;
  for (int launch = 0; launch < 2 && !left; launch++) {
    run.first = run.last, run.last = launch ? run.steps : run.steps / 2;
    std::vector<std::thread> threads;
    std::vector<int> ended(kRanks * run.blocks, 1);
    std::vector<Comm> comms(kRanks, comm);
    for (int rank = 0; rank < kRanks; rank++) {
      comms[rank].rank = rank;
      for (int block = 0; block < run.blocks && rank != absent; block++)
        threads.emplace_back(run_block, std::cref(run), std::cref(comms[rank]), block,
                             &ended[rank * run.blocks + block]);
    }
    for (auto& thread : threads) thread.join();
    for (int one : ended) left |= one == 0;
  }
  for (int rank = 0; rank < kRanks && left; rank++) {
    const u32* r = comm.reports[rank];
    printf("%u %u %u %u %u %u\n", r[kLeave], r[kExpired], r[kFrom], r[kPlace], r[kSeen], r[kWanted]);
  }
  FILE* file = fopen(argv[7], "wb");
  if (file == nullptr || fwrite(found.data(), 4, found.size(), file) != found.size()) return 2;
  return fclose(file) != 0 ? 2 : left ? 1 : 0;
}
