// Instructions of Hopper that only products of prompts use, one wrapper each.
#pragma once
#include <kog/ptx.h>

namespace kog {

// One thread of a whole warp. The compiler then knows that copies are issued by one thread: no loop over threads.
KOG_DEVICE bool elected() {
  u32 one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one;
}
KOG_DEVICE void bulk_copy(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// 16 bytes by each thread, and its arrival at the barrier once they are there.
KOG_DEVICE void copy_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
KOG_DEVICE void arrive_behind_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// What comes before on the stream has ended; what comes behind may start.
KOG_DEVICE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
KOG_DEVICE void start_launch_behind() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
KOG_DEVICE uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}
// Four matrices of 8 x 8, transposed.
KOG_DEVICE void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
      "r"(c), "r"(d)
      : "memory");
}
KOG_DEVICE void sync_block() { __syncthreads(); }
template <int kThreads>
KOG_DEVICE void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// ---- words of other GPUs ----

// Of a thread behind a barrier of its block: what the block has stored before is there for whoever reads `v`.
KOG_DEVICE void store_release_system(u64* p, u64 v) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
KOG_DEVICE u64 load_acquire_system(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// ---- products of a warpgroup ----

KOG_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KOG_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
KOG_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Rows of 128 bytes whose 16-byte pieces are swizzled within eight rows; 8 rows are 1,024 bytes.
KOG_DEVICE u64 swizzled_rows(u32 at) {
  return static_cast<u64>((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

}  // namespace kog
