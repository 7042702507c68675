// Products of at most 64 tokens with a weight that is read once, in bf16, fp16 or lossless codes; rows
// restored from codes. kernels/arguments.py says how codes are laid out, products.py which shape runs.
//
// Both kinds of weights pass the same registers in the same order, so their results have equal bits.
// A source is compiled with KERNEL (the entry), THREADS and, where they apply, HALF (fp16) and HOPPER.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Args {
  const u16* x;        // [tokens, inputs]; ids of `rows`: u64 [tokens]
  const u16* weight;   // [rows, inputs], or codes:
  const u32* bytes;
  const u32* codes;
  const u8* first;
  const int* offsets;
  const u16* table;
  const u16* bias;     // may be null
  u16* out;            // [tokens, rows]
  int tokens, rows;    // rows of gates alone where there are gates and ups
  int inputs;
  int x_stride, weight_stride;  // elements
  int is_gelu;
};

// ---- Instructions

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }

template <int N> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

__device__ __forceinline__ uint4 load16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

__device__ __forceinline__ uint2 load8(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}

__device__ __forceinline__ void load_matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

#ifdef HALF
#define TYPES "f16.f16"
#else
#define TYPES "bf16.bf16"
#endif

__device__ __forceinline__ void multiply(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Programmatic dependent launch: what lies before wait_for_earlier() reads weights alone.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ float to_float(u16 v) {
#ifdef HALF
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
#else
  return __uint_as_float((u32)v << 16);
#endif
}

__device__ __forceinline__ u16 rounded(float v) {
  u16 h;
#ifdef HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
#endif
  return h;
}

// Where 16 bytes of a row of 128 lie: eight rows of one chunk, and eight chunks of one row, are in different banks.
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// ---- Codes

__device__ __forceinline__ u32 swap_bytes(u32 w) { return __byte_perm(w, 0, 0x2301); }

// Sign and mantissa of two weights, with their exponents added.
__device__ __forceinline__ u32 merged(u32 w, u32 exponents) {
  u32 r;
  asm("lop3.b32 %0, %1, 0x807f807f, %2, 0xEA;" : "=r"(r) : "r"(w), "r"(exponents));
  return r;
}

__device__ __forceinline__ u32 escaped(u32 bytes, int half, const u16* table) {
  const u32 v = bytes >> (16 * half);
  return __ldg(table + (((v >> 8) & 0x80u) | (v & 0x7fu)));
}

// Restore eight weights: the registers of one product. `low_row`, `high_row`: first exponents of rows g and g + 8, in both halves.
__device__ __forceinline__ void restore8(u32 b0, u32 b1, u32 codes, u32 low_row, u32 high_row, const u16* table, u32* r) {
  const u32 s0 = swap_bytes(b0), s1 = swap_bytes(b1), upper = codes >> 8;
  r[0] = merged(b0, (codes & 0x000f000fu) * 128u + low_row);
  r[1] = merged(s0, (codes & 0x00f000f0u) * 8u + high_row);
  r[2] = merged(b1, (upper & 0x000f000fu) * 128u + low_row);
  r[3] = merged(s1, (upper & 0x00f000f0u) * 8u + high_row);
  if ((~codes - 0x11111111u) & codes & 0x88888888u) {  // one of the eight codes is 15
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 bytes = i == 0 ? b0 : i == 1 ? s0 : i == 2 ? b1 : s1;
      if (((codes >> (4 * i)) & 0xf) == 0xf) r[i] = (r[i] & 0xffff0000u) | escaped(bytes, 0, table);
      if (((codes >> (16 + 4 * i)) & 0xf) == 0xf) r[i] = (r[i] & 0x0000ffffu) | (escaped(bytes, 1, table) << 16);
    }
  }
}

constexpr u32 EXPONENT = 0x00800080u;  // 1 in the exponents of both halves

// ---- The weights of one warp: tiles of 16 rows x 64 inputs, copied ahead into shared memory

template <bool CODES> struct Tile {
  static constexpr int BYTES = CODES ? 1536 : 2048;
  const u8* from;
  const u8* from_codes;
  const u16* table;
  u32 low_row, high_row;

  __device__ __forceinline__ void start(const Args& a, int tile, int steps, int step, int lane) {
    if (CODES) {
      const size_t at = (size_t)tile * steps + step;
      from = (const u8*)a.bytes + at * 1024 + lane * 16;
      from_codes = (const u8*)a.codes + at * 512 + lane * 16;
      low_row = a.first[tile * 16 + (lane >> 2)] * EXPONENT;
      high_row = a.first[tile * 16 + 8 + (lane >> 2)] * EXPONENT;
      table = a.table + a.offsets[tile];
    } else {
      from = (const u8*)(a.weight + (size_t)(tile * 16 + (lane >> 3)) * a.weight_stride + step * 64 + (lane & 7) * 8);
    }
  }

  // Copy a step and go on by `stride` of them.
  __device__ __forceinline__ void copy(const Args& a, u32 to, int stride, int lane) {
    if (CODES) {
      copy16(to + lane * 16, from);
      copy16(to + 512 + lane * 16, from + 512);
      copy16(to + 1024 + lane * 16, from_codes);
      from += stride * 1024;
      from_codes += stride * 512;
    } else {
#pragma unroll
      for (int q = 0; q < 4; q++) copy16(to + swizzled(q * 4 + (lane >> 3), lane & 7), from + (size_t)q * 8 * a.weight_stride);
      from += stride * 128;
    }
  }

  // The registers of two products, 32 inputs.
  __device__ __forceinline__ void load(u32 at, int half, int lane, u32* w0, u32* w1) const {
    if (CODES) {
      const uint4 bytes = load16(at + half * 512 + lane * 16);
      const uint2 codes = load8(at + 1024 + lane * 16 + half * 8);
      restore8(bytes.x, bytes.y, codes.x, low_row, high_row, table, w0);
      restore8(bytes.z, bytes.w, codes.y, low_row, high_row, table, w1);
    } else {
      load_matrices(w0, at + swizzled(lane & 15, half * 4 + (lane >> 4)));
      load_matrices(w1, at + swizzled(lane & 15, half * 4 + 2 + (lane >> 4)));
    }
  }
};

// ---- Results

__device__ __forceinline__ float activated(float v, int is_gelu) {
  if (is_gelu) return 0.5f * v * (1.f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
  return v / (1.f + __expf(-v));
}

// Gate and up are rounded as the product alone would be, so that the result is that of both operators.
template <bool GATED> __device__ __forceinline__ void finish(const Args& a, float gate, float up, int token, int row) {
  if (a.bias) {
    gate += to_float(a.bias[row]);
    if (GATED) up += to_float(a.bias[a.rows + row]);
  }
  if (GATED) gate = activated(to_float(rounded(gate)), a.is_gelu) * to_float(rounded(up));
  a.out[(size_t)token * a.rows + row] = rounded(gate);
}

// ---- Any card from compute capability 8.0 on

// A warp multiplies R tiles of 16 rows (gates and ups in turn where GATED) by one of SPLITS shares of the inputs, which
// are added up in order; ROWS warps have the same share, of whose tokens they copy a part each. NT: tiles of 8 tokens.
// STAGES - 1 steps of 64 inputs are copied ahead.
template <int NT, int SPLITS, int ROWS, int R, int STAGES, bool CODES, bool GATED> __device__ __forceinline__ void narrow(const Args& a) {
  typedef Tile<CODES> Weight;
  constexpr int X_BYTES = NT * 1024, STAGE_BYTES = ROWS * R * Weight::BYTES + X_BYTES, Q = GATED ? 2 : 1, WARP_TILES = R / Q;
  extern __shared__ __align__(1024) u8 shared[];
  release_next();
  const int lane = threadIdx.x & 31, split = (threadIdx.x >> 5) / ROWS, place = (threadIdx.x >> 5) % ROWS, g = lane >> 2, t = lane & 3;
  const int all_steps = a.inputs / 64, tiles = a.rows / 16, steps = (all_steps - split + SPLITS - 1) / SPLITS;
  const int first_tile = ((int)blockIdx.x * ROWS + place) * WARP_TILES;
  const u32 base = shared_address(shared) + split * STAGES * STAGE_BYTES, mine = X_BYTES + place * R * Weight::BYTES;
  auto meet = [&]() {  // warps with the same tokens
    if (ROWS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(split + 1), "n"(ROWS * 32) : "memory");
  };

  Weight weight[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int tile = min(first_tile + r / Q, tiles - 1);
    weight[r].start(a, GATED && (r & 1) ? tile + tiles : tile, all_steps, split, lane);
  }
  auto copy_weights = [&](int i) {
    if (i < steps) {
#pragma unroll
      for (int r = 0; r < R; r++) weight[r].copy(a, base + (i % STAGES) * STAGE_BYTES + mine + r * Weight::BYTES, SPLITS, lane);
    }
  };
  const u16* from_x = a.x + (size_t)(lane >> 3) * a.x_stride + split * 64 + (lane & 7) * 8;
  auto copy_tokens = [&](int i) {  // rows beyond the last token keep what was there: their results are not stored
    if (i < steps) {
#pragma unroll
      for (int part = 0; part < (NT * 2 + ROWS - 1) / ROWS; part++) {
        const int q = part * ROWS + place, row = q * 4 + (lane >> 3);
        if (NT * 2 % ROWS && q >= NT * 2) continue;
        if (row < a.tokens) copy16(base + (i % STAGES) * STAGE_BYTES + swizzled(row, lane & 7), from_x + (size_t)q * 4 * a.x_stride);
      }
      from_x += SPLITS * 64;
    }
  };

  float sums[R][NT][4];
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[r][n][i] = 0.f;

#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) copy_weights(i);
  wait_for_earlier();
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    copy_tokens(i);
    commit();
  }
  for (int i = 0; i < steps; i++) {
    wait_copies<STAGES - 2>();
    meet();
    copy_weights(i + STAGES - 1);
    copy_tokens(i + STAGES - 1);
    commit();
    const u32 x_at = base + (i % STAGES) * STAGE_BYTES, at = x_at + mine;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 x[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++) load_matrices(x[n], x_at + n * 1024 + swizzled(lane & 7, half * 4 + (lane >> 3)));
#pragma unroll
      for (int r = 0; r < R; r++) {
        u32 w0[4], w1[4];
        weight[r].load(at + r * Weight::BYTES, half, lane, w0, w1);
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(sums[r][n], w0, x[n][0], x[n][1]);
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(sums[r][n], w1, x[n][2], x[n][3]);
      }
    }
  }
  wait_copies<0>();

  float* parts = (float*)shared;  // [ROWS][Q][SPLITS][tokens][16 rows, padded to 20]
#pragma unroll
  for (int b = 0; b < WARP_TILES; b++) {
    __syncthreads();
#pragma unroll
    for (int q = 0; q < Q; q++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          parts[(((place * Q + q) * SPLITS + split) * NT * 8 + n * 8 + t * 2 + (i & 1)) * 20 + g + (i >> 1) * 8] = sums[b * Q + q][n][i];
    __syncthreads();
    for (int e = threadIdx.x; e < NT * 128 * ROWS; e += SPLITS * ROWS * 32) {
      const int from = e / (NT * 128), token = e % (NT * 128) >> 4, row = (((int)blockIdx.x * ROWS + from) * WARP_TILES + b) * 16 + (e & 15);
      if (token >= a.tokens || row >= a.rows) continue;
      float v[2] = {0.f, 0.f};
#pragma unroll
      for (int q = 0; q < Q; q++)
#pragma unroll
        for (int k = 0; k < SPLITS; k++) v[q] += parts[(((from * Q + q) * SPLITS + k) * NT * 8 + token) * 20 + (e & 15)];
      finish<GATED>(a, v[0], v[1], token, row);
    }
  }
}

// ---- Hopper, more than 32 tokens and many rows

#ifdef HOPPER
// K-major, swizzled by 128 bytes: eight rows are 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

#define SUMS(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
// 64 rows of 16 inputs, from registers and from shared memory, times 64 tokens.
#define GROUP_SUMS SUMS(c, 0), SUMS(c, 8), SUMS(c, 16), SUMS(c, 24)
#define GROUP_PRODUCT "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES \
  " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
__device__ __forceinline__ void multiply_group(float (&c)[32], const u32* a, u64 b) {
  asm volatile(GROUP_PRODUCT " {%32,%33,%34,%35}, %36, 1, 1, 1, 0;" : GROUP_SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void multiply_group(float (&c)[32], u64 a, u64 b) {
  asm volatile(GROUP_PRODUCT " %32, %33, 1, 1, 1, 0, 0;" : GROUP_SUMS : "l"(a), "l"(b));
}

// A group of four warps multiplies 64 rows (32 of gates and 32 of ups where GATED) by one of SPLITS shares of the inputs,
// which are added up in order; ROWS groups have the same share. Codes are restored into registers, plain weights and 64
// tokens are read in shared memory: the same products in the same order.
template <int SPLITS, int ROWS, int STAGES, bool CODES, bool GATED> __device__ __forceinline__ void wide(const Args& a) {
  typedef Tile<CODES> Weight;
  constexpr int NT = 8, X_BYTES = NT * 1024, STAGE_BYTES = ROWS * 4 * Weight::BYTES + X_BYTES, Q = GATED ? 2 : 1, GROUP_ROWS = 64 / Q, THREADS_OF_SPLIT = ROWS * 128;
  extern __shared__ __align__(1024) u8 shared[];
  release_next();
  const int thread = threadIdx.x % THREADS_OF_SPLIT, split = threadIdx.x / THREADS_OF_SPLIT, place = thread >> 7;
  const int lane = threadIdx.x & 31, warp = thread >> 5 & 3, g = lane >> 2, t = lane & 3;
  const int all_steps = a.inputs / 64, tiles = a.rows / 16, steps = (all_steps - split + SPLITS - 1) / SPLITS;
  const u32 base = shared_address(shared) + split * STAGES * STAGE_BYTES, mine = X_BYTES + (place * 4 + warp) * Weight::BYTES;

  Weight weight;
  const int tile = min(((int)blockIdx.x * ROWS + place) * (4 / Q) + (GATED ? warp & 1 : warp), tiles - 1);
  weight.start(a, GATED && warp >= 2 ? tile + tiles : tile, all_steps, split, lane);
  auto copy_weights = [&](int i) {
    if (i < steps) weight.copy(a, base + (i % STAGES) * STAGE_BYTES + mine, SPLITS, lane);
  };
  const u16* from_x = a.x + (size_t)(thread >> 3) * a.x_stride + split * 64 + (lane & 7) * 8;
  auto copy_tokens = [&](int i) {
    if (i < steps) {
#pragma unroll
      for (int q = 0; q < (NT * 8 + ROWS * 16 - 1) / (ROWS * 16); q++) {
        const int row = q * ROWS * 16 + (thread >> 3);
        if (row < a.tokens) copy16(base + (i % STAGES) * STAGE_BYTES + swizzled(row, lane & 7), from_x + (size_t)q * ROWS * 16 * a.x_stride);
      }
      from_x += SPLITS * 64;
    }
  };

  float sums[NT * 4];
#pragma unroll
  for (int i = 0; i < NT * 4; i++) sums[i] = 0.f;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) copy_weights(i);
  wait_for_earlier();
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    copy_tokens(i);
    commit();
  }
  u32 w[2][4][4];
  for (int pair = 0; pair < steps; pair += 2) {
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const int i = pair + p;
      if (i < steps) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        const u32 x_at = base + (i % STAGES) * STAGE_BYTES, at = x_at + mine, group_at = x_at + X_BYTES + place * 4 * Weight::BYTES;
        if (CODES) {  // beside the products of the step before
          weight.load(at, 0, lane, w[p][0], w[p][1]);
          weight.load(at, 1, lane, w[p][2], w[p][3]);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, %1;" ::"r"(split + 1), "n"(THREADS_OF_SPLIT) : "memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int m = 0; m < 4; m++) {
          if (CODES) multiply_group(sums, w[p][m], descriptor(x_at + m * 32));
          else multiply_group(sums, descriptor(group_at + m * 32), descriptor(x_at + m * 32));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // Into the slot of the step before, which every warp of the share has left.
        copy_weights(i + STAGES - 1);
        copy_tokens(i + STAGES - 1);
        commit();
      }
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  wait_copies<0>();

  float* parts = (float*)shared;  // [ROWS][SPLITS][tokens][64 rows, padded to 68]
  __syncthreads();
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) parts[((place * SPLITS + split) * NT * 8 + n * 8 + t * 2 + (i & 1)) * 68 + warp * 16 + g + (i >> 1) * 8] = sums[n * 4 + i];
  __syncthreads();
  for (int e = threadIdx.x; e < ROWS * NT * 8 * GROUP_ROWS; e += SPLITS * THREADS_OF_SPLIT) {
    const int from = e / (NT * 8 * GROUP_ROWS), token = e / GROUP_ROWS % (NT * 8), row = ((int)blockIdx.x * ROWS + from) * GROUP_ROWS + e % GROUP_ROWS;
    if (token >= a.tokens || row >= a.rows) continue;
    float v[2] = {0.f, 0.f};
#pragma unroll
    for (int q = 0; q < Q; q++)
#pragma unroll
      for (int k = 0; k < SPLITS; k++) v[q] += parts[((from * SPLITS + k) * NT * 8 + token) * 68 + q * 32 + e % GROUP_ROWS];
    finish<GATED>(a, v[0], v[1], token, row);
  }
}
#endif

// ---- Restoring

// A warp: 16 rows x 256 inputs, written 512 bytes of a row at a time through shared memory. From the last row to the
// first, which the product that follows reads first: what was written last is still in the cache. It neither starts
// early nor lets the next kernel do so, which may read weights before it waits.
__device__ __forceinline__ void restore(const Args& a) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int ROW = 528;  // padded: rows of a tile start in different banks
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int steps = a.inputs / 64, groups = (steps + 3) / 4, job = a.rows / 16 * groups - 1 - ((int)blockIdx.x * (THREADS / 32) + warp);
  const int tile = job / groups, first = job % groups * 4;
  if (job < 0) return;
  uint4 bytes[4][2], codes[4];
#pragma unroll
  for (int u = 0; u < 4; u++) {
    const size_t at = (size_t)tile * steps + min(first + u, steps - 1);
    bytes[u][0] = __ldcs((const uint4*)(a.bytes + at * 256) + lane);
    bytes[u][1] = __ldcs((const uint4*)(a.bytes + at * 256) + 32 + lane);
    codes[u] = __ldcs((const uint4*)(a.codes + at * 128) + lane);
  }
  const u32 low = a.first[tile * 16 + g] * EXPONENT, high = a.first[tile * 16 + 8 + g] * EXPONENT;
  const u16* table = a.table + a.offsets[tile];
  u8* mine = shared + warp * 16 * ROW;
#pragma unroll
  for (int u = 0; u < 4; u++)
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const uint4 b = bytes[u][m / 2];
      u32 w[4];
      restore8(m & 1 ? b.z : b.x, m & 1 ? b.w : b.y, m == 0 ? codes[u].x : m == 1 ? codes[u].y : m == 2 ? codes[u].z : codes[u].w, low, high, table, w);
      u8* to = mine + g * ROW + u * 128 + m * 32 + t * 4;
      *(u32*)to = w[0];
      *(u32*)(to + 16) = w[2];
      *(u32*)(to + 8 * ROW) = w[1];
      *(u32*)(to + 8 * ROW + 16) = w[3];
    }
  __syncwarp();
  const int column = first * 64 + lane * 8;
  if (column >= a.inputs) return;
#pragma unroll
  for (int r = 0; r < 16; r++)
    *(uint4*)(a.out + (size_t)(tile * 16 + r) * a.inputs + column) = *(const uint4*)(mine + r * ROW + lane * 16);
}

// Single rows by their numbers, which are u64 [tokens] at `x`: a thread 2 columns of each quarter of 64.
__device__ __forceinline__ void rows(const Args& a) {
  release_next();
  wait_for_earlier();
  const u64 row = ((const u64*)a.x)[blockIdx.x];
  const int tile = (int)(row / 16), g = (int)(row % 8), second = (int)(row / 8 % 2), steps = a.inputs / 64;
  const u32 exponent = a.first[row] * EXPONENT;
  const u16* table = a.table + a.offsets[tile];
  for (int e = threadIdx.x; e < steps * 16; e += blockDim.x) {
    const int step = e / 16, m = e / 4 % 4, t = e % 4, lane = g * 4 + t;
    const size_t at = (size_t)tile * steps + step;
    const uint2 b = *(const uint2*)(a.bytes + at * 256 + (m / 2) * 128 + lane * 4 + (m % 2) * 2);
    u32 w[4];
    restore8(b.x, b.y, a.codes[at * 128 + lane * 4 + m], exponent, exponent, table, w);
    u32* to = (u32*)(a.out + (size_t)blockIdx.x * a.inputs + step * 64 + m * 16 + t * 2);
    to[0] = w[second];
    to[4] = w[2 + second];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) kernel(const __grid_constant__ Args a) { KERNEL(a); }
