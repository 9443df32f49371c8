// What lies between the products of a pass of short prompts (short_pass.cu): sums of parts, residual and norm, heads'
// norms and RoPE, attention, the gate. Tokens of several prompts stand one behind the other. Of several GPUs each has its
// heads and its part of the FFN; what they add to the residual goes to all of them (`send`, `meet`).
//
// A product leaves the float32 sums of each part of a tile of kTileRows rows, K cut in an order that its matrix alone sets;
// whoever needs them adds them in that order. So a token's bits do not depend on who shares its pass.
#pragma once
#include <kog/prompt/hopper.h>
#include <kog/threads.h>

namespace kog {

constexpr float kLog2E = 1.44269504f;

// Of a product: at[part][padded tokens][kTileRows]; of each tile, its first part and how many it has.
struct Parts {
  const float* at;
  const int2* tiles;
};

// How a product takes its x: K in the order of the stream's registers (prompt.cu).
struct Order {
  int parts, steps;  // K parts of 32 values each a step
};

struct Token {
  int id, position, slot;
  int last;  // of its prompt
};
struct Tile {  // queries of one prompt
  int first, count, position, slot;
};
// The cache of a layer, in values of 16 bits.
struct Cache {
  u16* at;
  i64 slot, head, kind, position;
  KOG_DEVICE u16* row(int of_slot, int of_head, int of_kind, int of_position) const {
    return at + of_slot * slot + of_head * head + of_kind * kind + of_position * position;
  }
};

KOG_DEVICE float widen(u32 half) {
  if constexpr (kF16)
    return widen_f16(static_cast<u16>(half));
  else
    return float_of(half << 16);
}
KOG_DEVICE float4 widen4(const u16* p) {
  uint2 v = *reinterpret_cast<const uint2*>(p);
  return {widen(v.x & 0xffff), widen(v.x >> 16), widen(v.y & 0xffff), widen(v.y >> 16)};
}
KOG_DEVICE void add(float& a, float b) { a += b; }
KOG_DEVICE void add(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

// A token's row, or (float4) four of one tile.
template <class Rows>
KOG_DEVICE Rows sum_of(const Parts& parts, int row, int token) {
  int2 tile = parts.tiles[row / kTileRows];
  const float* from = parts.at + (static_cast<i64>(tile.x) * kTokens + token) * kTileRows + row % kTileRows;
  Rows sum = *reinterpret_cast<const Rows*>(from);
#pragma unroll 4
  for (int i = 1; i < tile.y; i++) add(sum, *reinterpret_cast<const Rows*>(from + i * kTokens * kTileRows));
  return sum;
}
// Values k and k + 1 of a token's x, k even.
KOG_DEVICE void store_x(u8* x, const Order& order, int token, int k, u32 pair) {
  int natural = k / 32, block = natural % order.steps * order.parts + natural / order.steps;
  int piece = (block % 2 * 4 + k % 8 / 2) ^ token % 8;
  u8* row = x + (static_cast<i64>(block / 2) * kTokens + token) * 128;
  *reinterpret_cast<u32*>(row + piece * 16 + k % 32 / 8 * 4) = pair;
}

// ---- residual and norm: a block a token ----

struct Join {
  const Token* tokens;
  float* x;          // [tokens, hidden]
  const u16* embed;  // rows of the tokens' ids, or null: x and the parts
  i64 embed_step;
  Parts parts;
  const u16* bias;
  const float* gain;  // null: of no product, but
  float* streams;     // of each slot, where a prompt's last token is put
  i64 streams_step;
  u8* out;
  Order order;
  int hidden;
  float eps;
};
constexpr int kJoinThreads = 256, kJoined = 8;  // times 4 values of a thread: up to 8,192

// `add_to` adds to x what stands behind the product: four values of a token from `k` on.
template <class AddTo>
KOG_DEVICE void join_token(const Join& p, Token own, AddTo add_to) {
  int token = block_index(), thread = thread_index();
  float4 held[kJoined];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kJoined; i++) {
    int k = (i * kJoinThreads + thread) * 4;
    if (k >= p.hidden) break;
    float4* x = reinterpret_cast<float4*>(p.x + static_cast<i64>(token) * p.hidden + k);
    float4 v;
    if (p.embed != nullptr) {
      v = widen4(p.embed + own.id * p.embed_step + k);
    } else {
      v = add_to(*x, k);
    }
    *x = held[i] = v;
    squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  if (p.gain == nullptr) {
    if (!own.last) return;
#pragma unroll
    for (int i = 0; i < kJoined; i++) {
      int k = (i * kJoinThreads + thread) * 4;
      if (k >= p.hidden) break;
      *reinterpret_cast<float4*>(p.streams + own.slot * p.streams_step + k) = held[i];
    }
    return;
  }
  float* of_warps = reinterpret_cast<float*>(shared_memory());
  squares = sum_of_threads(squares);
  if (thread % 32 == 0) of_warps[thread / 32] = squares;
  sync_block();
  squares = 0;
  for (int i = 0; i < kJoinThreads / 32; i++) squares += of_warps[i];
  float scale = rsqrt_of(squares / static_cast<float>(p.hidden) + p.eps);
#pragma unroll
  for (int i = 0; i < kJoined; i++) {
    int k = (i * kJoinThreads + thread) * 4;
    if (k >= p.hidden) break;
    float4 gain = *reinterpret_cast<const float4*>(p.gain + k), v = held[i];
    store_x(p.out, p.order, token, k, round_pair<kF16>(v.x * scale * gain.x, v.y * scale * gain.y));
    store_x(p.out, p.order, token, k + 2, round_pair<kF16>(v.z * scale * gain.z, v.w * scale * gain.w));
  }
}

KOG_DEVICE float4 sum_and_bias(const Parts& parts, const u16* bias, int k, int token) {
  float4 v = sum_of<float4>(parts, k, token);
  if (bias != nullptr) add(v, widen4(bias + k));
  return v;
}
KOG_DEVICE void join(const Join& p) {
  int token = block_index();
  Token own = p.tokens[token];
  if (own.id < 0) return;
  join_token(p, own, [&](float4 x, int k) {
    float4 v = sum_and_bias(p.parts, p.bias, k, token);
    add(v, x);
    return v;
  });
}

// ---- of several GPUs: a product's sums to all of them, and those of all to the residual; a block a token ----
//
// A rank writes a token's sums into a place of its own in every rank's memory, and behind them a word of the token: the
// number of the exchange, which grows from one to the next and from pass to pass. Places are two: a rank that writes into
// one again has read, in the exchange between, what all others wrote behind their reading of it.

constexpr int kMostRanks = 8;
struct Exchange {
  const u32* pass;  // its number
  int index, count;  // of the exchange; exchanges of a pass
  int ranks;
  KOG_DEVICE u64 number() const { return static_cast<u64>(*pass) * static_cast<u64>(count) + static_cast<u64>(index) + 1; }
};

struct Send {
  const Token* tokens;
  Parts parts;
  const u16* bias;
  float* sums[kMostRanks];   // this rank's place in the memory of each: [tokens, hidden]
  u64* arrived[kMostRanks];  // likewise its words: [tokens]
  Exchange exchange;
  int hidden;
};
KOG_DEVICE void send(const Send& p) {
  int token = block_index(), thread = thread_index();
  if (p.tokens[token].id < 0) return;
  for (int k = thread * 4; k < p.hidden; k += kJoinThreads * 4) {
    float4 v = sum_and_bias(p.parts, p.bias, k, token);
    for (int rank = 0; rank < p.exchange.ranks; rank++)
      *reinterpret_cast<float4*>(p.sums[rank] + static_cast<i64>(token) * p.hidden + k) = v;
  }
  sync_block();
  if (thread < p.exchange.ranks) store_release_system(p.arrived[thread] + token, p.exchange.number());
}

struct Meet {
  Join join;
  const float* sums;   // of all ranks, [ranks, kMostTokens, hidden]
  const u64* arrived;  // [ranks, kMostTokens]
  u64* gave_up;        // number of the last exchange that a wait was given up in; its token and the rank it was for
  i64 limit;           // nanoseconds of a wait
  Exchange exchange;
};
// Whether a rank's sums of a token are there. Once a wait of a pass was in vain no other one of that pass is begun: what
// it leaves is void, and no number.
KOG_DEVICE bool arrived(const Meet& p, int token, int rank) {
  u64 number = p.exchange.number(), first = number - static_cast<u64>(p.exchange.index);
  i64 since = 0;
  while (load_acquire_system(p.arrived + rank * kMostTokens + token) < number) {
    i64 now = static_cast<i64>(nanoseconds());
    if (since == 0) since = now;
    if (load_acquire_system(p.gave_up) >= first) return false;
    if (now - since <= p.limit) continue;
    store_release_system(p.gave_up + 1, static_cast<u64>(token) << 8 | static_cast<u64>(rank));
    store_release_system(p.gave_up, number);
    return false;
  }
  return true;
}
KOG_DEVICE void meet(const Meet& p) {
  int token = block_index(), thread = thread_index();
  Token own = p.join.tokens[token];
  if (own.id < 0) return;
  u32* all = reinterpret_cast<u32*>(shared_memory()) + kJoinThreads / 32;  // behind the warps' sums
  if (thread == 0) *all = 1;
  sync_block();
  if (thread < p.exchange.ranks && !arrived(p, token, thread)) *all = 0;
  sync_block();
  float void_or_zero = load_volatile(all) != 0 ? 0.0f : float_of(0x7fc00000);
  join_token(p.join, own, [&](float4 x, int k) {
    const float* from = p.sums + static_cast<i64>(token) * p.join.hidden + k;
    float4 v = *reinterpret_cast<const float4*>(from);
    for (int rank = 1; rank < p.exchange.ranks; rank++)
      add(v, *reinterpret_cast<const float4*>(from + static_cast<i64>(rank) * kMostTokens * p.join.hidden));
    v.x += void_or_zero;
    add(v, x);
    return v;
  });
}

// ---- queries, keys and values: a warp a token's head ----

struct Heads {
  const Token* tokens;
  Parts parts;
  const u16* bias;
  const float* norms;  // [heads + kv_heads, d], or null
  const float* rope;   // [positions, 2, d / 2]
  u16* q;              // [tokens, heads, d]
  Cache cache;
  int heads, kv_heads, half;  // of d
  float eps;
};
constexpr int kHeadThreads = 128, kMostHalf = 128;

KOG_DEVICE void heads(const Heads& p) {
  int warps = kHeadThreads / 32, of_token = p.heads + 2 * p.kv_heads, per = (of_token + warps - 1) / warps;
  int token = block_index() / per, lane = thread_index() % 32;
  int head = block_index() % per * warps + thread_index() / 32;
  Token own = p.tokens[token];
  if (own.id < 0 || head >= of_token) return;
  bool rotates = head < p.heads + p.kv_heads;
  float a[kMostHalf / 32], b[kMostHalf / 32], squares = 0;
#pragma unroll
  for (int i = 0; i < kMostHalf / 32; i++) {
    int j = lane + 32 * i, row = head * 2 * p.half + j;
    a[i] = b[i] = 0;
    if (j >= p.half) continue;
    a[i] = sum_of<float>(p.parts, row, token), b[i] = sum_of<float>(p.parts, row + p.half, token);
    if (p.bias != nullptr) a[i] += widen(p.bias[row]), b[i] += widen(p.bias[row + p.half]);
    squares += a[i] * a[i] + b[i] * b[i];
  }
  float scale = 1;
  bool normed = p.norms != nullptr && rotates;
  if (normed) scale = rsqrt_of(sum_of_threads(squares) / static_cast<float>(2 * p.half) + p.eps);
  int kv = head - p.heads;
  u16* to = kv < 0 ? p.q + (static_cast<i64>(token) * p.heads + head) * 2 * p.half
                   : p.cache.row(own.slot, kv % p.kv_heads, kv / p.kv_heads, own.position);
#pragma unroll
  for (int i = 0; i < kMostHalf / 32; i++) {
    int j = lane + 32 * i;
    if (j >= p.half) continue;
    float low = a[i], high = b[i];
    if (normed) {
      const float* gain = p.norms + head * 2 * p.half + j;
      low *= scale * gain[0], high *= scale * gain[p.half];
    }
    if (rotates) {
      const float* angle = p.rope + static_cast<i64>(own.position) * 2 * p.half + j;
      float cosine = angle[0], sine = angle[p.half], before = low;
      low = before * cosine - high * sine, high = high * cosine + before * sine;
    }
    u32 both = round_pair<kF16>(low, high);
    to[j] = static_cast<u16>(both & 0xffff), to[j + p.half] = static_cast<u16>(both >> 16);
  }
}

// ---- attention: a block a head's 16 queries ----

struct Attend {
  const Tile* tiles;
  const u16* q;
  Cache cache;
  u8* out;
  Order order;
  int heads, kv_heads, d, window;  // 0: no window
  float scale;                     // of scores, times log2(e)
};
constexpr int kAttendThreads = 128, kQueries = 16, kKeys = kTokens + 8;
constexpr int kAttendShared = kQueries * kKeys * 6 + kQueries * 4;
constexpr int kMostOut = 8;  // tiles of 8 of d, of a warp

KOG_DEVICE u32 pair_at(const u16* p, bool there) { return there ? *reinterpret_cast<const u32*>(p) : 0; }

KOG_DEVICE void attend(const Attend& p) {
  int head = block_index() % p.heads, warp = thread_index() / 32, lane = thread_index() % 32;
  int row = lane / 4, column = 2 * (lane % 4), warps = kAttendThreads / 32;
  Tile tile = p.tiles[block_index() / p.heads];
  if (tile.count == 0) return;
  int keys = tile.position + tile.count, kv = head / (p.heads / p.kv_heads);
  float* scores = reinterpret_cast<float*>(shared_memory());  // [kQueries][kKeys]
  u16* weights = reinterpret_cast<u16*>(scores + kQueries * kKeys);
  float* sums = reinterpret_cast<float*>(weights + kQueries * kKeys);
  const u16* q = p.q + (static_cast<i64>(tile.first + row) * p.heads + head) * p.d + column;
  i64 below = static_cast<i64>(8) * p.heads * p.d;
  for (int n = warp * 8; n < keys; n += warps * 8) {
    float c[4] = {};
    const u16* k = p.cache.row(tile.slot, kv, 0, n + row) + column;
    bool there = n + row < keys, upper = row < tile.count, lower = row + 8 < tile.count;
    for (int at = 0; at < p.d; at += 16) {
      u32 a[4] = {pair_at(q + at, upper), pair_at(q + below + at, lower), pair_at(q + at + 8, upper),
                  pair_at(q + below + at + 8, lower)};
      u32 b[2] = {pair_at(k + at, there), pair_at(k + at + 8, there)};
      multiply_add<kF16>(c, a, b);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) scores[(row + i / 2 * 8) * kKeys + n + column + i % 2] = c[i];
  }
  sync_block();
  for (int i = warp; i < kQueries; i += warps) {
    int last = tile.position + i, first = p.window != 0 && last >= p.window ? last - p.window + 1 : 0;
    float most = -1e30f, sum = 0;
    if (last >= keys) last = keys - 1;  // of a row without a query
    for (int key = lane; key <= last; key += 32)
      if (key >= first) most = most > scores[i * kKeys + key] ? most : scores[i * kKeys + key];
    most = over_threads(most, [](float a, float b) { return a > b ? a : b; });
    for (int key = lane; key < (keys + 15) / 16 * 16; key += 32) {
      bool seen = key >= first && key <= last;
      float weight = seen ? exp2_fast((scores[i * kKeys + key] - most) * p.scale) : 0;
      sum += weight;
      weights[i * kKeys + key] = static_cast<u16>(round_pair<kF16>(weight, 0) & 0xffff);
    }
    sum = sum_of_threads(sum);
    if (lane == 0) sums[i] = sum;
  }
  sync_block();
#pragma unroll
  for (int i = 0; i < kMostOut; i++) {
    int n = (i * warps + warp) * 8;
    if (n >= p.d) break;
    float c[4] = {};
    for (int key = 0; key < keys; key += 16) {
      const u16* own = weights + row * kKeys + key + column;
      u32 a[4] = {pair_at(own, true), pair_at(own + 8 * kKeys, true), pair_at(own + 8, true),
                  pair_at(own + 8 * kKeys + 8, true)}, b[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int from = key + half * 8 + column;
        const u16* v = p.cache.row(tile.slot, kv, 1, from) + n + row;
        u32 even = from < keys ? v[0] : 0, odd = from + 1 < keys ? v[p.cache.position] : 0;
        b[half] = even | odd << 16;
      }
      multiply_add<kF16>(c, a, b);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int query = row + 8 * half;
      if (query >= tile.count) continue;
      float low = divide(c[2 * half], sums[query]), high = divide(c[2 * half + 1], sums[query]);
      store_x(p.out, p.order, tile.first + query, head * p.d + n + column, round_pair<kF16>(low, high));
    }
  }
}

// ---- the gate: two outputs of a token a thread ----

struct Gate {
  const Token* tokens;
  Parts parts;
  const u16* bias;
  u8* out;
  Order order;
  int width;
};
constexpr int kGateThreads = 256;

KOG_DEVICE float gated(float gate, float up) {
  return divide(gate, 1 + exp2_fast(-gate * kLog2E)) * up;
}
KOG_DEVICE void gate(const Gate& p) {
  int per = (p.width / 2 + kGateThreads - 1) / kGateThreads, token = block_index() / per;
  int k = (block_index() % per * kGateThreads + thread_index()) * 2;
  if (k >= p.width || p.tokens[token].id < 0) return;
  float4 v = sum_of<float4>(p.parts, 2 * k, token);  // gate and up of k, then of k + 1
  if (p.bias != nullptr) add(v, widen4(p.bias + 2 * k));
  store_x(p.out, p.order, token, k, round_pair<kF16>(gated(v.x, v.y), gated(v.z, v.w)));
}

// ---- requests into their slots: a block a piece ----

struct Piece {
  u32* to;
  int from, count;
};
struct Place {
  const u32* words;  // [0]: how many pieces; they begin at [4], and behind them lies what they bring
};
constexpr int kPlaceThreads = 128, kPlaceBlocks = 24;

KOG_DEVICE void place(const Place& p) {
  const Piece* pieces = reinterpret_cast<const Piece*>(p.words + 4);
  for (u32 i = static_cast<u32>(block_index()); i < p.words[0]; i += kPlaceBlocks)
    for (int n = thread_index(); n < pieces[i].count; n += kPlaceThreads)
      pieces[i].to[n] = p.words[pieces[i].from + n];
}

}  // namespace kog
