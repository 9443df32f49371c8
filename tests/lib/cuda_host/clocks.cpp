// The ping-pong of clocks (kccl/clocks.h) between CPU threads whose clocks are put wrong on purpose.
//
//     clocks RANKS ROUNDS SEED LIMIT ABSENT FILE OFFSET... DRIFT...   a rank each; twice, 50 ms apart
//
// LIMIT: milliseconds of a wait. FILE: u64 [2, ranks, ranks, rounds, 2], what each rank wrote.
#include <kccl/clocks.h>

#include <cstdio>
#include <cstdlib>

using namespace kccl;

int main(int argc, char** argv) {
  int ranks = argc > 1 ? atoi(argv[1]) : 0;
  if (ranks < 1 || argc != 7 + 2 * ranks) return 2;
  u32 rounds = static_cast<u32>(atoi(argv[2])), seed = static_cast<u32>(atoi(argv[3]));
  int absent = atoi(argv[5]);
  size_t each = 2 * static_cast<size_t>(ranks) * rounds;
  std::vector<u64> readings(2 * ranks * each);
  bool left = false;
  for (int run = 0; run < 2 && !left; run++) {
    if (run > 0) usleep(50000);
    struct Line {
      alignas(16) u32 w[kClockWords + kReportWords];
    };
    std::vector<Line> memory(ranks, Line{});
    std::vector<std::thread> threads;
    std::vector<int> ended(ranks, 1);
    for (int rank = 0; rank < ranks; rank++) {
      if (rank == absent) continue;
      threads.emplace_back([&, rank] {
        Comm comm{};
        comm.limit = strtoull(argv[4], nullptr, 10) * 1000000u;
        comm.ranks = ranks, comm.rank = rank;
        for (int i = 0; i < ranks; i++) comm.words[i] = memory[i].w, comm.reports[i] = memory[i].w + kClockWords;
        host::dice = (seed * 64 + static_cast<u32>(rank)) * 2654435761u + 1;
        host::clock_offset = atoll(argv[7 + rank]), host::clock_drift = atof(argv[7 + ranks + rank]);
        ended[rank] = read_clocks(comm, rounds, readings.data() + (run * ranks + rank) * each, true);
        host::land_stores(true);
      });
    }
    for (auto& thread : threads) thread.join();
    for (int one : ended) left |= one == 0;
  }
  FILE* file = fopen(argv[6], "wb");
  if (file == nullptr || fwrite(readings.data(), 8, readings.size(), file) != readings.size()) return 2;
  return fclose(file) != 0 ? 2 : left ? 1 : 0;
}
