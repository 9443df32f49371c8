// The expressions as functions of this machine: what the executor's results are held to.
#define ATTRIBUTE
#include "meanings.h"

#define EXPECTED(NAME, TYPE, EXPRESSION) \
    extern "C" void r_##NAME(const Input* in, TYPE* out, int count) { \
        for (int t = 0; t < count; t++) { \
            const Input x = in[t]; \
            NAMES \
            out[t] = EXPRESSION; \
        } \
    }
#define BOTH(NAME, TYPE, EXPRESSION) EXPECTED(NAME, TYPE, EXPRESSION)
#define EACH(NAME, TYPE, HERE, THERE) EXPECTED(NAME, TYPE, THERE)
#define VECTOR(NAME, TYPE, HERE, THERE) EXPECTED(NAME, TYPE, THERE)
#define SCALAR(NAME, TYPE, HERE, THERE) EXPECTED(NAME, TYPE, THERE)
#include "expressions.inc"
