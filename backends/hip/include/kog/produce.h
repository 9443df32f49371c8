// No warp produces: weights come to those who multiply them (ring.h).
#pragma once
#include <kog/attention.h>
