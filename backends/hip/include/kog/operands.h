// What weights meet, by how many tokens share a step: of one, operands of dot products; of several, of matrix products.
#pragma once
#ifdef KOG_COLUMNS
#include <kog/mma/operands.h>
#else
#include <kog/dot/operands.h>
#endif
