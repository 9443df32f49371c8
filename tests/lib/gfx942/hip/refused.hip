// A kernel of the one instruction INSTRUCTION.
extern "C" __attribute__((global)) void refused() { asm volatile(INSTRUCTION); }
