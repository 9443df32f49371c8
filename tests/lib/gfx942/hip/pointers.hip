// Ways of a pointer to an access that the walk of ../addresses.py has to know, or to say that it does not.
typedef unsigned u32;
typedef unsigned long u64;
#define T __builtin_amdgcn_workitem_id_x()
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(64, 64))) void
#define LOAD(p) asm volatile("global_load_dword %0, %1, off\ns_waitcnt vmcnt(0)" : "=v"(x) : "v"(p))

KERNEL straight(u32* words, u32* own) { own[T] = words[T]; }

KERNEL generic(u32** words, u32* own) { own[T] = *words[T]; }

KERNEL from_memory(u32** words, u32* own) {
    u32 x;
    LOAD(words[T]);
    own[T] = x;
}

KERNEL through_lds(u32* words, u32* own) {
    __attribute__((shared)) static u32* held[64];
    u32 x;
    held[T] = words + T;
    __builtin_amdgcn_s_barrier();
    LOAD(held[T ^ 1]);
    own[T] = x;
}

KERNEL chosen(u32* words, u32* own) { own[T] = (T & 1 ? words : own)[T]; }

KERNEL offset_by(u32* words, u32* own) { own[T] = words[u32(u64(own)) + T]; }

// No branch: half of the lanes get another pointer while the others are off.
KERNEL masked(u32* words, u32* own) {
    u32 x;
    u32* p = words + T;
    asm volatile("v_cmp_eq_u32 vcc, 0, %2\ns_and_saveexec_b64 s[40:41], vcc\nv_mov_b64 %0, %1\ns_or_b64 exec, exec, s[40:41]"
                 : "+v"(p) : "v"(own + T), "v"(T & 1) : "vcc", "s40", "s41");
    LOAD(p);
    own[T] = x;
}

// Lanes leave the loop one by one, each with the pointer that it had then.
KERNEL left_early(u32* words, u32* own) {
    u32 x, left = T;
    u32* p = words + T;
    asm volatile("s_mov_b64 s[42:43], 0\n"
                 "again%=:\n"
                 "v_cmp_eq_u32 vcc, 0, %1\ns_or_b64 s[42:43], vcc, s[42:43]\ns_andn2_b64 exec, exec, s[42:43]\n"
                 "v_add_u32 %1, -1, %1\nv_mov_b64 %0, %2\n"
                 "s_cbranch_execnz again%=\n"
                 "s_or_b64 exec, exec, s[42:43]"
                 : "+v"(p), "+v"(left) : "v"(own + T) : "vcc", "s42", "s43");
    LOAD(p);
    own[T] = x;
}

// Both sides of a condition; the scalar register of the mask is kept in a lane meanwhile.
KERNEL otherwise(u32* words, u32* own) {
    u32 x;
    u32* p;
    asm volatile("v_cmp_eq_u32 vcc, 0, %2\ns_and_saveexec_b64 s[40:41], vcc\ns_xor_b64 s[40:41], exec, s[40:41]\n"
                 "v_writelane_b32 v60, s40, 3\nv_writelane_b32 v60, s41, 4\ns_mov_b64 s[40:41], 0\n"
                 "v_mov_b64 %0, %1\n"
                 "v_readlane_b32 s40, v60, 3\nv_readlane_b32 s41, v60, 4\ns_nop 4\n"
                 "s_or_saveexec_b64 s[40:41], s[40:41]\ns_xor_b64 exec, exec, s[40:41]\n"
                 "v_mov_b64 %0, %3\n"
                 "s_or_b64 exec, exec, s[40:41]"
                 : "=&v"(p) : "v"(words + T), "v"(T & 1), "v"(own + T) : "vcc", "s40", "s41", "v60");
    LOAD(p);
    own[T] = x;
}

KERNEL unknown_mask(u32* words, u32* own) {
    u64 mask = *(const u64*)words;
    asm volatile("s_mov_b64 exec, %0" : : "s"(mask));
    own[T] = 1;
}

// A pointer in a lane's own memory, where LLVM keeps what it spills.
typedef u32* volatile kept;
#define OWN_MEMORY \
    u32* memory[2]; \
    u32 x; \
    auto held = (__attribute__((address_space(5))) kept*)memory

KERNEL spilled(u32* words, u32* own) {
    OWN_MEMORY;
    held[1] = own + T;
    held[0] = words + T;
    LOAD(held[0]);
    own[T] = x;
}

// No branch, as of `masked`.
KERNEL spilled_by_some(u32* words, u32* own) {
    OWN_MEMORY;
    held[0] = words + T;
    asm volatile("v_cmp_eq_u32 vcc, 0, %1\ns_and_saveexec_b64 s[40:41], vcc\nscratch_store_dwordx2 off, %0, off\n"
                 "s_or_b64 exec, exec, s[40:41]"
                 : : "v"(own + T), "v"(T & 1) : "vcc", "s40", "s41", "memory");
    LOAD(held[0]);
    own[T] = x;
}

KERNEL never_spilled(u32* words, u32* own) {
    OWN_MEMORY;
    held[0] = words + T;
    LOAD(held[1]);
    own[T] = x;
}

KERNEL spilled_at_an_index(u32* words, u32* own) {
    OWN_MEMORY;
    held[T & 1] = words + T;
    LOAD(held[0]);
    own[T] = x;
}

// Jumps as LLVM writes them where a branch does not reach: over what would change the pointer, and back before it.
#define JUMP(to) \
    "s_getpc_b64 s[40:41]\nfrom" to "%=:\n" \
    "s_add_u32 s40, s40, (" to "%=-from" to "%=)&4294967295\n" \
    "s_addc_u32 s41, s41, (" to "%=-from" to "%=)>>32\n" \
    "s_setpc_b64 s[40:41]\n"

KERNEL jumped_over(u32* words, u32* own) {
    u32 x;
    u32* p = words + T;
    asm volatile(JUMP("there") "v_mov_b64 %0, %1\nthere%=:" : "+v"(p) : "v"(own + T) : "s40", "s41", "scc");
    LOAD(p);
    own[T] = x;
}

KERNEL jumped_back(u32* words, u32* own) {
    u32 x;
    u32* p = words + T;
    asm volatile("s_branch first%=\n"
                 "second%=:\nv_mov_b64 %0, %1\ns_branch third%=\n"
                 "first%=:\n" JUMP("second") "third%=:" : "+v"(p) : "v"(own + T) : "s40", "s41", "scc");
    LOAD(p);
    own[T] = x;
}

KERNEL jumped_by_a_register(u32* words, u32* own) {
    asm volatile("s_getpc_b64 s[40:41]\ns_add_u32 s40, s40, %0\ns_addc_u32 s41, s41, 0\ns_setpc_b64 s[40:41]"
                 : : "s"(*words) : "s40", "s41", "scc");
    own[T] = 1;
}

KERNEL jumped_into(u32* words, u32* own) {
    asm volatile("s_cbranch_scc1 fromthere%=\n" JUMP("there") "s_nop 0\nthere%=:" : : : "s40", "s41", "scc");
    own[T] = 1;
}
