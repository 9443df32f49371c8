// The expressions as kernels for gfx942: v_NAME a lane each, s_NAME a workgroup each, whose values are scalars.
#define ATTRIBUTE __attribute__((device))
#include "inputs.h"

#define KERNEL extern "C" __attribute__((global)) void
#define BY_LANE(NAME, TYPE, EXPRESSION) \
    KERNEL v_##NAME(const Input* in, TYPE* out) { \
        const int t = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x(); \
        const Input x = in[t]; \
        NAMES \
        out[t] = EXPRESSION; \
    }
#define BY_GROUP(NAME, TYPE, EXPRESSION) \
    KERNEL s_##NAME(const Input* __restrict in, TYPE* __restrict out) { \
        const int t = __builtin_amdgcn_workgroup_id_x(); \
        const Input x = in[t]; \
        NAMES \
        out[t] = EXPRESSION; \
    }
#define BOTH(NAME, TYPE, EXPRESSION) BY_LANE(NAME, TYPE, EXPRESSION) BY_GROUP(NAME, TYPE, EXPRESSION)
#define EACH(NAME, TYPE, HERE, THERE) BOTH(NAME, TYPE, HERE)
#define VECTOR(NAME, TYPE, HERE, THERE) BY_LANE(NAME, TYPE, HERE)
#define SCALAR(NAME, TYPE, HERE, THERE) BY_GROUP(NAME, TYPE, HERE)
#include "expressions.inc"
