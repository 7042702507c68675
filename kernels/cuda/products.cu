// Products of at most 64 tokens with a weight that is read once, in bf16 or fp16, lossless codes or quantised; such weights
// restored. kernels/arguments.py says how codes and quantised values are laid out, products.py which shape runs.
//
// All kinds of weights pass the same registers in the same order, so their results have equal bits.
// A source is compiled with KERNEL (the entry), THREADS, LEAST_BLOCKS (that registers leave room for) and, where they apply,
// HALF (fp16) and HOPPER.

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
  const u8* values;    // or quantised:
  const u8* high;
  const u8* scale;
  const u8* zero;
  const u8* low;
  const u8* subscale;
  const u8* sublow;
  const float* numbers;  // those of TABLE4
  const u16* bias;     // may be null
  u16* out;            // [tokens, rows] of products
  int tokens, rows;    // rows of gates alone where there are gates and ups
  int inputs;
  int x_stride, weight_stride, out_stride;  // elements
  int is_gelu;
  int offset;
  int group_units, subgroup_units;      // what 16 rows have of scales and subscales: of groups, or of steps with several
  u32 group_inverse, subgroup_inverse;  // 2^31 over the steps of a group, rounded up
  const int* slots;     // of experts: [tokens, top_k], the block of rows of each pair, -1: none
  int top_k, is_by_pair, row_blocks;    // blocks of the grid by pair, else by slot; row_blocks of them for each
  int copiers;          // of experts that the kernel before copies: all of its blocks, and ExpertCache's
  const int *missing, *num_missing, *copied;  // missing, num_missing, and the count that this product waits for; or null
  int* multiplied;
};

// ---- Instructions

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// Without a branch.
__device__ __forceinline__ void copy16_if(bool is_wanted, u32 to, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}" ::"r"(to), "l"(from), "r"((u32)is_wanted));
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

// Have a pointer as it is in a register: else loops add to it anew what was added before them.
template <class T> __device__ __forceinline__ void settle(T*& pointer) { asm volatile("" : "+l"(pointer)); }

__device__ __forceinline__ void store8(u32 to, u32 x, u32 y) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(x), "r"(y) : "memory"); }

__device__ __forceinline__ void store4(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }

__device__ __forceinline__ u32 load1(u32 at) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ u32 load2(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ u32 load4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

// The same of global memory.
__device__ __forceinline__ u32 load2(const u8* at) { return __ldcg((const u16*)at); }
__device__ __forceinline__ u32 load4(const u8* at) { return __ldcg((const u32*)at); }
__device__ __forceinline__ uint2 load8(const u8* at) { return __ldcg((const uint2*)at); }

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

// What kernels that still run have written: the thread then sees all that was written before.
__device__ __forceinline__ int acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// The other side: call it after all of a block's threads have met.
__device__ __forceinline__ void add_released(int* p, int n) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}

__device__ __forceinline__ void wait_until(const int* p, int n) {
  if (threadIdx.x == 0)
    while (acquire(p) < n) __nanosleep(50);
  __syncthreads();
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

// Two numbers, the first one in the low half.
__device__ __forceinline__ u32 rounded(float first, float second) {
  u32 r;
#ifdef HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
#endif
  return r;
}

// One of two float16.
__device__ __forceinline__ float half_of(u32 pair, int second) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)(second ? pair >> 16 : pair)));
  return f;
}

// One of two numbers of 16 bits, twice: instructions read a half twice by themselves.
__device__ __forceinline__ u32 doubled(u32 pair, int second) {
  u32 r;
  if (second) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(r) : "r"(pair));
  else asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(r) : "r"(pair));
  return r;
}

#define PAIRWISE(name, operation)                                                 \
  __device__ __forceinline__ u32 name(u32 a, u32 b) {                             \
    u32 r;                                                                        \
    asm(operation " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));                     \
    return r;                                                                     \
  }
#define PAIRWISE_SUM(name, operation)                                             \
  __device__ __forceinline__ u32 name(u32 a, u32 b, u32 c) {                      \
    u32 r;                                                                        \
    asm(operation " %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));         \
    return r;                                                                     \
  }
PAIRWISE(subtract_halves, "sub.rn.f16x2")
PAIRWISE(multiply_halves, "mul.rn.f16x2")
PAIRWISE_SUM(multiply_add_halves, "fma.rn.f16x2")
PAIRWISE_SUM(multiply_add_bf16, "fma.rn.bf16x2")

__device__ __forceinline__ u32 multiply_subtract_halves(u32 a, u32 b, u32 c) {
  u32 minus;
  asm("neg.f16x2 %0, %1;" : "=r"(minus) : "r"(c));
  return multiply_add_halves(a, b, minus);
}

__device__ __forceinline__ float inverse(float v) {  // but for the last bits
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

template <u32 MASK> __device__ __forceinline__ u32 masked_or(u32 w, u32 others) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(w), "n"(MASK), "r"(others));
  return r;
}

// Where 16 bytes of a row of 128 lie: eight rows of one chunk, and eight chunks of one row, are in different banks.
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// ---- Codes

__device__ __forceinline__ u32 swap_bytes(u32 w) { return __byte_perm(w, 0, 0x2301); }

// Sign and mantissa of two weights, with their exponents added.
__device__ __forceinline__ u32 merged(u32 w, u32 exponents) { return masked_or<0x807f807f>(w, exponents); }

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
//
// `copy` copies the step that is `ahead` steps further, `advance` goes on by so many; `load` gives the registers of two
// products, 32 inputs, and is called for half 0 of a step before half 1. Where IN_HALVES, `hold` takes tiles before, for
// the other `load`. Beside<R, STEPS, STRIDE> copies what R tiles have beside that, of STEPS steps, each STRIDE behind the
// last.
//
// What is copied at a time lies together: values of tiles, then what they have beside them, filled up to whole lines. A
// copy that lies otherwise in shared memory than in its line is two requests, which halves what a link carries.

constexpr int LINE_BYTES = 128;

template <class Weight> __device__ constexpr int chunk_bytes(int tiles) {
  return (tiles * (Weight::BYTES + Weight::BESIDE_BYTES) + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

template <int R, int STEPS, int STRIDE> struct Nothing {
  template <class TileOf> __device__ __forceinline__ void start(const Args& a, int steps, int step, int lane, TileOf tile_of) {}
  __device__ __forceinline__ void copy(u32 to) {}
};

struct Plain {
  static constexpr bool IS_RESTORED = false, IN_HALVES = false;
  struct Held {};
  static constexpr int BYTES = 2048, BESIDE_BYTES = 0;
  template <int R, int STEPS, int STRIDE> using Beside = Nothing<R, STEPS, STRIDE>;
  const u8* from;

  __device__ __forceinline__ void start(const Args& a, int tile, int steps, int step, int lane) {
    from = (const u8*)(a.weight + (size_t)(tile * 16 + (lane >> 3)) * a.weight_stride + step * 64 + (lane & 7) * 8);
  }

  __device__ __forceinline__ void copy(const Args& a, u32 to, int ahead, int lane) const {
#pragma unroll
    for (int q = 0; q < 4; q++) copy16(to + swizzled(q * 4 + (lane >> 3), lane & 7), from + (size_t)q * 8 * a.weight_stride + ahead * 128);
  }

  __device__ __forceinline__ void advance(int steps) { from += steps * 128; }
  __device__ __forceinline__ void settle() { ::settle(from); }

  __device__ __forceinline__ void load(u32 at, u32 beside, int half, int lane, u32* w0, u32* w1) {
    load_matrices(w0, at + swizzled(lane & 15, half * 4 + (lane >> 4)));
    load_matrices(w1, at + swizzled(lane & 15, half * 4 + 2 + (lane >> 4)));
  }
};

struct Codes {
  static constexpr bool IS_RESTORED = true, IN_HALVES = false;
  struct Held {};
  static constexpr int BYTES = 1536, BESIDE_BYTES = 0;
  template <int R, int STEPS, int STRIDE> using Beside = Nothing<R, STEPS, STRIDE>;
  const u8* from;
  const u8* from_codes;
  const u16* table;
  u32 low_row, high_row;

  __device__ __forceinline__ void start(const Args& a, int tile, int steps, int step, int lane) {
    const size_t at = (size_t)tile * steps + step;
    from = (const u8*)a.bytes + at * 1024 + lane * 16;
    from_codes = (const u8*)a.codes + at * 512 + lane * 16;
    low_row = a.first[tile * 16 + (lane >> 2)] * EXPONENT;
    high_row = a.first[tile * 16 + 8 + (lane >> 2)] * EXPONENT;
    table = a.table + a.offsets[tile];
  }

  __device__ __forceinline__ void copy(const Args& a, u32 to, int ahead, int lane) const {
    copy16(to + lane * 16, from + ahead * 1024);
    copy16(to + 512 + lane * 16, from + ahead * 1024 + 512);
    copy16(to + 1024 + lane * 16, from_codes + ahead * 512);
  }

  __device__ __forceinline__ void advance(int steps) {
    from += steps * 1024;
    from_codes += steps * 512;
  }

  __device__ __forceinline__ void settle() { ::settle(from), ::settle(from_codes); }

  __device__ __forceinline__ void load(u32 at, u32 beside, int half, int lane, u32* w0, u32* w1) {
    const uint4 bytes = load16(at + half * 512 + lane * 16);
    const uint2 codes = load8(at + 1024 + lane * 16 + half * 8);
    restore8(bytes.x, bytes.y, codes.x, low_row, high_row, table, w0);
    restore8(bytes.z, bytes.w, codes.y, low_row, high_row, table, w1);
  }
};

enum { UINT4, UINT5, UINT6, UINT8, FLOAT8, TABLE4 };       // VALUES
enum { IN_FLOAT16, IN_BFLOAT16, IN_FLOAT32 };              // SCALES
enum { ZERO = 1, LOW = 2, SUBSCALE = 4, SUBLOW = 8, OFFSET = 16 };  // HAS
constexpr u32 EVERY_STEP = 0x80000000u;

// GROUP, SUBGROUP: columns of a scale and of a subscale; 64 where they are a multiple of it, 0 where a scale is that of all
// columns, which is then read once. A step is its values, and what belongs to their groups. Letters are those of kernels.arguments.Quantised.
//
// A weight has the bits of float32 products rounded once. Where IN_PAIRS, two are computed at a time in 16 bits, in which
// the value less its zero is exact, and the result is rounded once: its product with the scale is exact in float32 too.
template <int VALUES, int SCALES, int GROUP, int SUBGROUP, int HAS> struct Quantised {
  static constexpr bool IS_RESTORED = true, IN_BYTES = VALUES == UINT8 || VALUES == FLOAT8;
  static constexpr int BYTES = IN_BYTES ? 1024 : 512;  // of values; what lies beside them:
  static constexpr int HIGH_BYTES = VALUES == UINT5 ? 128 : VALUES == UINT6 ? 256 : 0;
  static constexpr bool IN_ROWS = GROUP == 0;
  static constexpr int COLUMNS = IN_ROWS ? 64 : GROUP, SPAN_BYTES = IN_ROWS ? 0 : 64 / GROUP * 16, SCALE_BYTES = SPAN_BYTES * (SCALES == IN_FLOAT32 ? 4 : 2), SUBSPAN_BYTES = 64 / SUBGROUP * 16;
  static constexpr int AT_SCALE = HIGH_BYTES, AT_ZERO = AT_SCALE + SCALE_BYTES, AT_LOW = AT_ZERO + (HAS & ZERO ? SPAN_BYTES : 0);
  static constexpr int AT_SUBSCALE = AT_LOW + (HAS & LOW ? SCALE_BYTES : 0), AT_SUBLOW = AT_SUBSCALE + (HAS & SUBSCALE ? SUBSPAN_BYTES : 0);
  static constexpr int BESIDE_BYTES = AT_SUBLOW + (HAS & SUBLOW ? SUBSPAN_BYTES : 0);
  static constexpr int PIECES = BESIDE_BYTES / 16;
  static constexpr bool IS_EXACT = SCALES != IN_FLOAT32 && (VALUES != UINT8 || SCALES == IN_BFLOAT16 || !(HAS & SUBSCALE));
#ifdef HALF
  static constexpr bool IN_PAIRS = SCALES == IN_FLOAT16 && VALUES != TABLE4 && !(HAS & (LOW | SUBSCALE)), IN_BF16 = false;
#else
  static constexpr bool IN_PAIRS = (SCALES == IN_FLOAT16 ? VALUES <= UINT5 : SCALES == IN_BFLOAT16 && VALUES != TABLE4) && !(HAS & (LOW | SUBSCALE));
  static constexpr bool IN_BF16 = IN_PAIRS;  // bytes by way of float16
#endif
  // Integers that nothing is subtracted from become float32 as they are: float16 that are not normal, times 2^24.
  static constexpr bool IS_SMALL = VALUES <= UINT6 && !IN_PAIRS && !(HAS & (ZERO | OFFSET));
  // Products of two scales: a lane computes that of one row in each PART of a step's columns, for those that have the row.
  static constexpr bool IS_SHARED = HAS & SUBSCALE;
  // Products of few tokens compute such weights (Q4_K and Q5_K, which HAS_LOWS, and Q6_K) two at a time: see `halves`.
  static constexpr bool HAS_LOWS = VALUES <= UINT5 && SUBGROUP == 32 && HAS == (LOW | SUBSCALE | SUBLOW);
#ifdef HALF
  static constexpr bool IN_HALVES = SCALES == IN_FLOAT16 && GROUP == 64 && (HAS_LOWS || (VALUES == UINT6 && SUBGROUP == 16 && HAS == (SUBSCALE | OFFSET)));
#else
  static constexpr bool IN_HALVES = false;
#endif
  static constexpr int PART = COLUMNS < SUBGROUP ? COLUMNS : SUBGROUP, FACTORS = 1024 / PART, FACTOR_BYTES = HAS & LOW ? 8 : 4;
  const u8* from;
  u32 raw[4], high[2];                           // of a lane
  u32 zeros, more_zeros;                         // of its rows g and g + 8
  u32 scales[2], more_scales[2];                 // where IN_PAIRS, else:
  float scale[2], low[2];
  float number;

  __device__ __forceinline__ void start(const Args& a, int tile, int steps, int step, int lane) {
    from = a.values + ((size_t)tile * steps + step) * BYTES + lane * 16;
    if (VALUES == TABLE4) number = a.numbers[lane & 15];
    else if (VALUES != FLOAT8 && !(HAS & ZERO)) set_zeros(a.offset * 0x0101u);
    if (IN_ROWS) {
      const int row = tile * 16 + (lane >> 2) * 2;
      set_groups(a.scale + (size_t)row * (SCALES == IN_FLOAT32 ? 4 : 2), a.low + (size_t)row * (SCALES == IN_FLOAT32 ? 4 : 2), a.zero + row);
    }
  }

  __device__ __forceinline__ void copy(const Args& a, u32 to, int ahead, int lane) const {
    copy16(to + lane * 16, from + ahead * BYTES);
    if (IN_BYTES) copy16(to + 512 + lane * 16, from + ahead * BYTES + 512);
  }

  __device__ __forceinline__ void advance(int steps) { from += steps * BYTES; }
  __device__ __forceinline__ void settle() {
    ::settle(from);
    if (IN_ROWS) asm volatile("" : "+r"(zeros), "+r"(scales[0]), "+r"(scales[1]));
  }

  // What R tiles have beside the values in steps that lie one after the other, 16 bytes a lane.
  template <int R, int STEPS, int STRIDE> struct Beside {
    static constexpr int PASSES = (STEPS * R * PIECES + 31) / 32, KEPT = PASSES ? PASSES : 1;
    const u8* from[KEPT];
    u32 unit[KEPT], inverse[KEPT], place[KEPT], step[KEPT], end;

    template <class TileOf> __device__ __forceinline__ void start(const Args& a, int steps, int first, int lane, TileOf tile_of) {
      end = steps;
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        const int piece = p * 32 + lane, r = piece / PIECES, at = piece % PIECES * 16;
        const size_t tile = tile_of(r % R);
        place[p] = STEPS * R * BYTES + r * BESIDE_BYTES + at;
        step[p] = r < STEPS * R ? first + r / R * STRIDE : 0x40000000;
        auto of = [&](const u8* array, int begin, int bytes, int units, u32 over) {
          if (at < begin) return;
          from[p] = array + tile * units * bytes + (at - begin);
          unit[p] = bytes;
          inverse[p] = over;
        };
        of(HIGH_BYTES ? a.high : a.scale, 0, HIGH_BYTES, steps, EVERY_STEP);
        of(a.scale, AT_SCALE, SCALE_BYTES, a.group_units, a.group_inverse);
        if (HAS & ZERO) of(a.zero, AT_ZERO, SPAN_BYTES, a.group_units, a.group_inverse);
        if (HAS & LOW) of(a.low, AT_LOW, SCALE_BYTES, a.group_units, a.group_inverse);
        if (HAS & SUBSCALE) of(a.subscale, AT_SUBSCALE, SUBSPAN_BYTES, a.subgroup_units, a.subgroup_inverse);
        if (HAS & SUBLOW) of(a.sublow, AT_SUBLOW, SUBSPAN_BYTES, a.subgroup_units, a.subgroup_inverse);
      }
    }

    // Copies STEPS steps and goes on by as many.
    __device__ __forceinline__ void copy(u32 to) {
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        copy16_if(step[p] < end, to + place[p], from[p] + __umulhi(2 * step[p], inverse[p]) * unit[p]);
        step[p] += STEPS * STRIDE;
      }
    }
  };

  // From the zeros of both rows, a byte each, what is subtracted from pairs of values as they are put into 16 bits.
  __device__ __forceinline__ void set_zeros(u32 bytes) {
    zeros = __byte_perm(bytes, IN_BF16 && !IN_BYTES ? 0xc3c3c3c3u : 0x64646464u, 0x4140);  // -(128 + zero), 1024 + zero
    if (VALUES == UINT4 && !IN_BF16) more_zeros = subtract_halves(0x63806380u, zeros);     // -(64 + zero)
  }

  __device__ __forceinline__ float in_float(u32 pair, int u) const {
    return SCALES == IN_FLOAT16 ? half_of(pair, u) : __uint_as_float(u ? pair & 0xffff0000u : pair << 16);
  }

  template <class At> __device__ __forceinline__ void load_scales(At at, float* to) const {
    if (SCALES == IN_FLOAT32) {
      const uint2 both = load8(at);
      to[0] = __uint_as_float(both.x);
      to[1] = __uint_as_float(both.y);
    } else {
      const u32 both = load4(at);
      to[0] = in_float(both, 0);
      to[1] = in_float(both, 1);
    }
  }

  __device__ __forceinline__ float load_scale(u32 at) const {
    return SCALES == IN_FLOAT32 ? __uint_as_float(load4(at)) : in_float(load2(at), 0);
  }

  // Write the products of scales of a step over its values, which are in registers: [part][row] factor, base.
  __device__ __forceinline__ void multiply_scales(u32 at, u32 beside, int lane) const {
    float factor[(FACTORS + 31) / 32], base[(FACTORS + 31) / 32];
#pragma unroll
    for (int p = 0; p * 32 < FACTORS; p++) {
      const int row = lane & 15, column = FACTORS == 16 ? 0 : (p * 2 + (lane >> 4)) * PART, group = column / COLUMNS * 16 + row, subgroup = column / SUBGROUP * 16 + row;
      const u32 of_group = beside + AT_SCALE + group * (SCALES == IN_FLOAT32 ? 4 : 2);
      const float scale = load_scale(of_group), sub = __uint_as_float((load1(beside + AT_SUBSCALE + subgroup) ^ 0x80u) | 0x4b000000u) - 8388736.f;  // signed
      factor[p] = __fmul_rn(IS_SMALL ? scale * 0x1p24f : scale, sub);
      if (HAS & LOW) base[p] = load_scale(of_group + AT_LOW - AT_SCALE);
      if (HAS & SUBLOW) base[p] = __fmul_rn(base[p], __uint_as_float(load1(beside + AT_SUBLOW + subgroup) | 0x4b000000u) - 8388608.f);
    }
    __syncwarp();
#pragma unroll
    for (int p = 0; p * 32 < FACTORS; p++) {
      const u32 to = at + (p * 32 + lane) * FACTOR_BYTES;
      if (FACTORS == 16 && lane >= 16) continue;
      if (HAS & LOW) store8(to, __float_as_uint(factor[p]), __float_as_uint(base[p]));
      else store4(to, __float_as_uint(factor[p]));
    }
    __syncwarp();
  }

  // Two weights at a time, in float16: all but the last sum is exact, so they have the bits of float32 products rounded once.
  // For a row and the columns of one subscale, with scale d, subscale s, low l and sublow m:
  //
  // - HAS_LOWS: weight = d * (value * s - k) + r, with k = m * l / d rounded to an integer and r = d * k - m * l. It `fits`
  //   where l / d is 1/2 to 32, and s and m have 6 bits: then the integers have at most 11 bits, and r in units of the last
  //   bit of d or l, and float32 would have rounded nothing. Values are float16 that are not normal; d is scaled by 2^14.
  // - UINT6: weight = (value - 32) * f + (value - 32) * e, with f = d * s rounded and e = d * s - f, which has at most 6 bits.
  //   A zero may lack the sign that it has in float32, which no sum of products shows.
  //
  // Returns for a row of 64 columns, first for 32 and then for the others: s and s / 16, -k and r; or f, e of 16 columns each.
  __device__ __forceinline__ uint4 halves(u32 beside, int row, bool& fits) const {
    const u32 of_row = beside + row, d = load2(of_row + AT_SCALE + row);
    auto pair_of = [&](int first) { return load1(of_row + first) | load1(of_row + first + 16) << 16; };
    if (!HAS_LOWS) {
      const u32 scale = doubled(d, 0), s0 = subtract_halves(pair_of(AT_SUBSCALE) ^ 0x64806480u, 0x64806480u), s1 = subtract_halves(pair_of(AT_SUBSCALE + 32) ^ 0x64806480u, 0x64806480u);
      const u32 f0 = multiply_halves(scale, s0), f1 = multiply_halves(scale, s1);
      fits = fits && (d & 0x7fffu) < 0x6000u;  // d * 128 is finite
      return {f0, multiply_subtract_halves(scale, s0, f0), f1, multiply_subtract_halves(scale, s1, f1)};
    }
    const float scale = half_of(multiply_halves(d, SCALED), 0), low = half_of(load2(of_row + AT_LOW + row), 0) * 0x1p24f, ratio = low * inverse(scale);
    const u32 subs = pair_of(AT_SUBSCALE), sublows[2] = {load1(of_row + AT_SUBLOW), load1(of_row + AT_SUBLOW + 16)};
    fits = fits && ratio >= 0x1p9f && ratio <= 0x1p15f && !((subs | sublows[0] | sublows[1]) & 0x00c000c0u);
    u32 rest[2];
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const float sublow = half_of(sublows[p], 0), minus_k = __fadd_rn(__fmaf_rn(sublow, -ratio, 768.f), -768.f);  // a multiple of 2^-14
      rest[p] = rounded(minus_k, __fmaf_rn(minus_k, -scale, -__fmul_rn(sublow, low)));
    }
    const u32 s = subtract_halves(subs | 0x64006400u, 0x64006400u);
    return {multiply_halves(doubled(s, 0), 0x54006400u), rest[0], multiply_halves(doubled(s, 1), 0x54006400u), rest[1]};  // times 1024, 64
  }

  struct Held {
    u32 raw[4];
  };
  static constexpr u32 SCALED = 0x74007400u;  // 2^14

  // Take the values of N tiles that lie one after the other, and write over them what `halves` gives for theirs. Returns
  // whether it is exact; if not, nothing is written.
  template <int N> __device__ __forceinline__ bool hold(Held (&held)[N], u32 at, u32 beside, int lane) const {
    constexpr int PAIRS = (N + 1) / 2;  // of tiles, of which a half of the lanes has one: a row each
    uint4 found[PAIRS];
    bool fits = HAS_LOWS || zeros == 0x64206420u;
    auto tile_of = [&](int pair) { return N % 2 ? min(2 * pair + (lane >> 4), N - 1) : 2 * pair + (lane >> 4); };
#pragma unroll
    for (int i = 0; i < N; i++) {
      const uint4 v = load16(at + i * BYTES + lane * 16);
      held[i].raw[0] = v.x, held[i].raw[1] = v.y, held[i].raw[2] = v.z, held[i].raw[3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) found[i] = halves(beside + tile_of(i) * BESIDE_BYTES, lane & 15, fits);
    if (!__all_sync(0xffffffffu, fits)) return false;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const u32 to = at + tile_of(i) * BYTES + (lane & 15) * 8;
      store8(to, found[i].x, found[i].y);
      store8(to + 128, found[i].z, found[i].w);
    }
    __syncwarp();
    return true;
  }

  // Take the scales, lows and zeros of rows g and g + 8, from shared or from global memory.
  template <class At> __device__ __forceinline__ void set_groups(At from_scale, At from_low, At from_zero) {
    if (IN_PAIRS) {
      const u32 both = load4(from_scale);
#pragma unroll
      for (int u = 0; u < 2; u++) {
        if (IN_BF16 && SCALES == IN_FLOAT16) {  // 11 bits as a sum of 8 and 3
          const float whole = half_of(both, u);
          const u32 upper = __float_as_uint(whole) & 0xffff0000u;
          const u32 rest = __float_as_uint(whole - __uint_as_float(upper)) | (upper & 0x80000000u);
          scales[u] = __byte_perm(upper, 0, 0x3232);
          more_scales[u] = __byte_perm(rest, 0, 0x3232);
        } else {
          scales[u] = doubled(both, u);
        }
      }
    } else if (!IS_SHARED) {
      load_scales(from_scale, scale);
      if (IS_SMALL) scale[0] *= 0x1p24f, scale[1] *= 0x1p24f;
      if (HAS & LOW) load_scales(from_low, low);
    }
    if (HAS & ZERO) set_zeros(load2(from_zero));
  }

  // What columns 16 * m to 16 * m + 15 of a step have in common, where it is not that of the columns before.
  __device__ __forceinline__ void load_groups(u32 at, u32 beside, int m, int g) {
    if (IS_SHARED && m % (PART / 16) == 0) {
      const u32 from_part = at + (m / (PART / 16) * 16 + g * 2) * FACTOR_BYTES;
      if (HAS & LOW) {
        const uint4 v = load16(from_part);
        scale[0] = __uint_as_float(v.x), low[0] = __uint_as_float(v.y), scale[1] = __uint_as_float(v.z), low[1] = __uint_as_float(v.w);
      } else {
        const uint2 v = load8(from_part);
        scale[0] = __uint_as_float(v.x), scale[1] = __uint_as_float(v.y);
      }
    }
    if (!IN_ROWS && m % (COLUMNS / 16) == 0) {
      const u32 span = m / (COLUMNS / 16), from_scale = beside + AT_SCALE + span * SCALE_BYTES / (64 / COLUMNS) + g * (SCALES == IN_FLOAT32 ? 8 : 4);
      set_groups(from_scale, from_scale + AT_LOW - AT_SCALE, beside + AT_ZERO + span * 16 + g * 2);
    }
  }

  // The values at n of a row's word less their zero, exact: in bfloat16 where IN_BF16 and not IN_BYTES, else in float16.
  __device__ __forceinline__ u32 values_of(u32 word, int half, int q, int n, int u) const {
    const int i = 2 * q + n;
    if (VALUES == UINT4 && IS_SMALL) {
      const u32 w = q ? word >> 8 : word;
      return n ? w & 0x00f000f0u : w & 0x000f000fu;  // 16 times the value where n is 1
    }
    if (VALUES == UINT8) return subtract_halves(__byte_perm(word, 0x64006400u, n ? 0x5352 : 0x5150), doubled(zeros, u));
    if (VALUES == FLOAT8) {
      u32 r;
#if __CUDA_ARCH__ >= 890
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)(n ? word >> 16 : word)));
#else  // the bits of float16 but for the bias
      const u32 wide = __byte_perm(word, 0, n ? 0x3424 : 0x1404);
      r = multiply_halves(masked_or<0x80008000>(wide, (wide >> 1) & 0x3f803f80u), 0x5c005c00u);
      if (((wide & 0x7f007f00u) + 0x01000100u) & 0x80008000u) {  // one is not a number
        if ((wide & 0x7f00u) == 0x7f00u) r |= 0x7fffu;
        if ((wide >> 16 & 0x7f00u) == 0x7f00u) r |= 0x7fff0000u;
      }
#endif
      return r;
    }
    if (VALUES == UINT4 && !IN_BF16) {
      const u32 w = q ? word >> 8 : word;
      if (n) return multiply_add_halves(masked_or<0x00f000f0>(w, 0x64006400u), 0x2c002c00u, doubled(more_zeros, u));  // (1024 + 16 * value) / 16
      return subtract_halves(masked_or<0x000f000f>(w, 0x64006400u), doubled(zeros, u));
    }
    u32 r = masked_or<0x000f000f>(word >> 4 * i, IS_SMALL ? 0 : IN_BF16 ? 0x43004300u : 0x64006400u);
    if (VALUES == UINT5) {
      const int bit = 8 * half + 4 * u + i;
      r = masked_or<0x00100010>(bit < 4 ? high[0] << (4 - bit) : high[0] >> (bit - 4), r);
    }
    if (VALUES == UINT6) {
      const int bit = 8 * u + 2 * i;
      r = masked_or<0x00300030>(bit < 4 ? high[half] << (4 - bit) : high[half] >> (bit - 4), r);
    }
    if (IS_SMALL) return r;
    return IN_BF16 ? multiply_add_bf16(r, 0x3f803f80u, doubled(zeros, u)) : subtract_halves(r, doubled(zeros, u));
  }

  __device__ __forceinline__ float scaled(float value, float factor, float base) const {
    if (!(HAS & LOW)) return __fmul_rn(value, factor);
    return IS_EXACT ? __fmaf_rn(value, factor, -base) : __fsub_rn(__fmul_rn(value, factor), base);
  }

  __device__ __forceinline__ void load_high(u32 beside, int lane) {
    if (VALUES == UINT5) high[0] = load4(beside + lane * 4);
    if (VALUES == UINT6) {
      const uint2 v = load8(beside + lane * 8);
      high[0] = v.x, high[1] = v.y;
    }
  }

  // `load` of what is held.
  __device__ __forceinline__ void load(const Held& held, u32 at, u32 beside, int half, int lane, u32* w0, u32* w1) {
    const int g = lane >> 2;
    const uint4 v = load16(at + half * 128 + g * 16);
    if (half == 0) {
      load_high(beside, lane);
      if (HAS_LOWS) scales[0] = multiply_halves(load4(beside + AT_SCALE + g * 4), SCALED);  // of both rows
    }
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const u32 word = held.raw[2 * half + u], f = u ? v.z : v.x, rest = u ? v.w : v.y;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        if (HAS_LOWS) {
#pragma unroll
          for (int q = 0; q < 2; q++) {
            const u32 whole = multiply_add_halves(values_of(word, half, q, n, u), doubled(f, VALUES == UINT4 && n), doubled(rest, 0));
            (q ? w1 : w0)[u + 2 * n] = multiply_add_halves(whole, doubled(scales[0], u), doubled(rest, 1));
          }
        } else {  // 1024 + value, and 1024 + 16 * value
          const int bit = 8 * u + 2 * n;
          const u32 upper = bit < 4 ? high[half] << (4 - bit) : high[half] >> (bit - 4);
          const u32 one = masked_or<0x00300030>(upper, masked_or<0x000f000f>(word >> 4 * n, 0x64006400u));
          const u32 other = masked_or<0x03000300>(upper, masked_or<0x00f000f0>(word >> (4 * n + 4), 0x64006400u));
          const u32 a = subtract_halves(one, 0x64206420u), b = multiply_add_halves(other, 0x2c002c00u, 0xd600d600u);
          w0[u + 2 * n] = multiply_add_halves(a, doubled(f, 0), multiply_halves(a, doubled(rest, 0)));
          w1[u + 2 * n] = multiply_add_halves(b, doubled(f, 1), multiply_halves(b, doubled(rest, 1)));
        }
      }
    }
  }

  __device__ __forceinline__ void load(u32 at, u32 beside, int half, int lane, u32* w0, u32* w1) {
    if (IN_BYTES || half == 0) {
      const uint4 v = load16(at + (IN_BYTES ? half * 512 : 0) + lane * 16);
      raw[0] = v.x, raw[1] = v.y, raw[2] = v.z, raw[3] = v.w;
    }
    if (half == 0) load_high(beside, lane);
    if (IS_SHARED && half == 0) multiply_scales(at, beside, lane);
#pragma unroll
    for (int q = 0; q < 2; q++) {
      load_groups(at, beside, 2 * half + q, lane >> 2);
      u32* w = q ? w1 : w0;
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const u32 word = IN_BYTES ? raw[2 * u + q] : raw[2 * half + u];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          u32& r = w[u + 2 * n];
          if (VALUES == TABLE4) {  // the lane whose number's low four bits are the value
            const float first = __shfl_sync(0xffffffffu, number, word >> (8 * q + 4 * n)), second = __shfl_sync(0xffffffffu, number, word >> (8 * q + 4 * n + 16));
            r = rounded(scaled(first, scale[u], low[u]), scaled(second, scale[u], low[u]));
            continue;
          }
          const u32 values = values_of(word, half, q, n, u);
          const float factor = VALUES == UINT4 && IS_SMALL && n ? scale[u] * 0x1p-4f : scale[u];
          if (!IN_PAIRS) r = rounded(scaled(half_of(values, 0), factor, low[u]), scaled(half_of(values, 1), factor, low[u]));
          else if (!IN_BF16) r = multiply_halves(values, scales[u]);
          else if (IN_BYTES) r = multiply_add_bf16(rounded(half_of(values, 0), half_of(values, 1)), scales[u], 0x80008000u);
          else if (SCALES == IN_BFLOAT16) r = multiply_add_bf16(values, scales[u], 0x80008000u);
          else r = multiply_add_bf16(values, scales[u], multiply_add_bf16(values, more_scales[u], 0x80008000u));
        }
      }
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
  a.out[(size_t)token * a.out_stride + row] = rounded(gate);
}

// ---- Experts

constexpr int MOST_TOKENS = 64;

// Return the slot of a block, its pairs, one of each token, and how many there are: none where an earlier block has them.
__device__ __forceinline__ int slot_of(const Args& a, int number, const int** its_pairs, int& tokens) {
  const int slot = a.is_by_pair ? __ldcg(a.slots + number) : number, lane = threadIdx.x & 31;
  __shared__ int members[MOST_TOKENS], count;
  *its_pairs = members;
  bool is_used = slot >= 0;
  if (a.is_by_pair && a.tokens > 1) {
    int is_later = 0;
    for (int p = threadIdx.x; p < number; p += THREADS) is_later |= __ldcg(a.slots + p) == slot;
    is_used = !__syncthreads_or(is_later) && is_used;
  }
  if (a.is_by_pair && a.tokens == 1) {
    members[0] = number;
    count = 1;
  } else if (threadIdx.x < 32) {
    int found = 0;
    for (int first = 0; first < a.tokens; first += 32) {
      const int token = first + lane;
      int pair = -1;
      if (token < a.tokens)
        for (int i = a.top_k - 1; i >= 0; i--)
          if (__ldcg(a.slots + token * a.top_k + i) == slot) pair = token * a.top_k + i;
      const u32 has = __ballot_sync(0xffffffffu, pair >= 0);
      if (pair >= 0) members[found + __popc(has & ((1u << lane) - 1u))] = pair;
      found += __popc(has);
    }
    if (lane == 0) count = found;
  }
  __syncthreads();
  tokens = is_used ? count : 0;
  return slot;
}

// Wait until the slot of a block has its expert, if the newest claim found it missing. The kernel that copies it let this
// one start once all of its blocks ran.
__device__ __forceinline__ void wait_for_copies(const Args& a, int slot) {
  const int count = acquire(a.num_missing);
  if (count == 0) return;
  int is_missing = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) is_missing |= __ldcg(a.missing + 2 * i + 1) == slot;
  if (__syncthreads_or(is_missing)) wait_until(a.copied, a.copiers);
}

// Products that begin beside the kernel before them end after it: who waits for them waits for all that was before.
__device__ __forceinline__ void end_after_earlier(const Args& a) {
  if (a.missing && blockIdx.x == 0) wait_for_earlier();
}

// ---- Any card from compute capability 8.0 on

// Steps whose R tiles are held at a time, of at most TILES.
template <int R, int STEPS, int TILES> __device__ constexpr int held_steps() { return R >= TILES ? 1 : TILES / R < STEPS ? TILES / R : STEPS; }

template <class Weight> __device__ __forceinline__ void load_tile(Weight& weight, const typename Weight::Held* held, u32 at, u32 beside, int half, int lane, u32* w0, u32* w1) {
  if constexpr (Weight::IN_HALVES)
    if (held) return weight.load(*held, at, beside, half, lane, w0, w1);
  weight.load(at, beside, half, lane, w0, w1);
}

// Multiply COUNT steps of R tiles that lie one after the other: `multiply` is told the number of each and its tiles, if held.
template <int COUNT, int R, class Weight, class Multiply>
__device__ __forceinline__ void multiply_steps(Weight (&weight)[R], u32 at, u32 beside, int lane, Multiply multiply) {
  if constexpr (Weight::IN_HALVES) {
    typename Weight::Held held[COUNT * R];
    if (weight[0].hold(held, at, beside, lane)) {
#pragma unroll
      for (int s = 0; s < COUNT; s++) multiply(s, held + s * R);
    } else {
#pragma unroll 1
      for (int s = 0; s < COUNT; s++) multiply(s, nullptr);
    }
  } else {
#pragma unroll
    for (int s = 0; s < COUNT; s++) multiply(s, nullptr);
  }
}

// A warp multiplies R tiles of 16 rows (gates and ups in turn where GATED) by one of SPLITS shares of the inputs, which
// are added up in order; ROWS warps have the same share, of whose tokens they copy a part each. NT: tiles of 8 tokens.
// Of STAGES steps of 64 inputs, STEPS are multiplied while the others are copied.
//
// Of EXPERTS a block multiplies rows of one expert with the tokens that go there: the rows of x are those of tokens where
// GATED, else those of pairs, and so are the rows of the result.
template <int NT, int SPLITS, int ROWS, int R, int STAGES, int STEPS, class Weight, bool GATED, bool EXPERTS = false>
__device__ __forceinline__ void narrow(const Args& a) {
  constexpr int Q = GATED ? 2 : 1, WARP_TILES = R / Q, AHEAD = STAGES - STEPS, CHUNKS = STAGES / STEPS, HELD_STEPS = held_steps<R, STEPS, 2>();
  static_assert(STAGES % STEPS == 0 && AHEAD >= STEPS);
  extern __shared__ __align__(1024) u8 shared[];
  release_next();
  int slot = 0, row_block = blockIdx.x, tokens = a.tokens;
  const int* members = nullptr;
  if constexpr (EXPERTS) {
    if (!a.missing) wait_for_earlier();  // else all but weights and what is gated was written before the copies began
    row_block = (int)blockIdx.x % a.row_blocks;
    slot = slot_of(a, (int)blockIdx.x / a.row_blocks, &members, tokens);
    if (tokens == 0) return end_after_earlier(a);
    if (a.missing) wait_for_copies(a, slot);
  }
  const int lane = threadIdx.x & 31, split = (threadIdx.x >> 5) / ROWS, place = (threadIdx.x >> 5) % ROWS, g = lane >> 2, t = lane & 3;
  const int all_steps = a.inputs / 64, tiles = a.rows / 16, steps = (all_steps - split + SPLITS - 1) / SPLITS;
  const int first_tile = (row_block * ROWS + place) * WARP_TILES, expert_tile = EXPERTS ? slot * Q * tiles : 0;
  const int x_rows = NT == 1 && STEPS > 1 ? a.tokens : NT * 8;
  auto meet = [&]() {  // warps with the same tokens
    if (ROWS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(split + 1), "n"(ROWS * 32) : "memory");
  };

  // The steps of a warp's weights lie in a ring of CHUNKS with STEPS each, and those of a share's tokens in another one.
  constexpr u32 CHUNK_BYTES = chunk_bytes<Weight>(STEPS * R), RING_BYTES = CHUNKS * CHUNK_BYTES;
  const u32 x_bytes = x_rows * 128, ring = shared_address(shared) + (split * ROWS + place) * RING_BYTES;
  const u32 x_ring = shared_address(shared) + SPLITS * ROWS * RING_BYTES + split * STAGES * x_bytes;

  Weight weight[R];
  typename Weight::template Beside<R, STEPS, SPLITS> beside;
  auto tile_of = [&](int r) { return expert_tile + min(first_tile + r / Q, tiles - 1) + (GATED && (r & 1) ? tiles : 0); };
#pragma unroll
  for (int r = 0; r < R; r++) weight[r].start(a, tile_of(r), all_steps, split, lane);
  beside.start(a, all_steps, split, lane, tile_of);
  auto copy_weights = [&](u32 to, int i) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      if (i + s < steps) {
#pragma unroll
        for (int r = 0; r < R; r++) weight[r].copy(a, to + (s * R + r) * Weight::BYTES, s * SPLITS, lane);
      }
    beside.copy(to);
#pragma unroll
    for (int r = 0; r < R; r++) weight[r].advance(STEPS * SPLITS);
  };

  constexpr int PARTS = (NT * 2 + ROWS - 1) / ROWS;  // of a step's tokens, four each
  auto row_of = [&](int part) { return (part * ROWS + place) * 4 + (lane >> 3); };
  const u16* from_x = a.x + (EXPERTS ? 0 : (size_t)row_of(0) * a.x_stride) + split * 64 + (lane & 7) * 8;
  int x_row[EXPERTS ? PARTS : 1];
  if constexpr (EXPERTS) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) x_row[part] = row_of(part) >= tokens ? 0 : GATED ? members[row_of(part)] / a.top_k : members[row_of(part)];
  }
  auto copy_tokens = [&](u32 to, int i) {  // rows beyond the last token keep what was there: their results are not stored
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      if (i + s < steps) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          const int row = row_of(part);
          if (row < tokens) copy16(to + s * x_bytes + swizzled(row, lane & 7), from_x + (size_t)(EXPERTS ? x_row[part] : part * ROWS * 4) * a.x_stride + s * SPLITS * 64);
        }
      }
    from_x += STEPS * SPLITS * 64;
  };

  float sums[R][NT][4];
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[r][n][i] = 0.f;

#pragma unroll
  for (int c = 0; c < CHUNKS - 1; c++) copy_weights(ring + c * CHUNK_BYTES, c * STEPS);
  if (!EXPERTS) wait_for_earlier();
  if (EXPERTS && !GATED && a.missing) wait_until(a.multiplied + slot, a.inputs);
#pragma unroll
  for (int c = 0; c < CHUNKS - 1; c++) {
    copy_tokens(x_ring + c * STEPS * x_bytes, c * STEPS);
    commit();
  }
#pragma unroll
  for (int r = 0; r < R; r++) weight[r].settle();
  settle(from_x);
  u32 at = ring, x_at = x_ring, to = ring + RING_BYTES - CHUNK_BYTES, x_to = x_ring + AHEAD * x_bytes;
  auto multiply_step = [&](int s, const typename Weight::Held* held) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 x[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (!EXPERTS || n * 8 < tokens) load_matrices(x[n], x_at + s * x_bytes + n * 1024 + swizzled(min(lane & 7, x_rows - 1), half * 4 + (lane >> 3)));
#pragma unroll
      for (int r = 0; r < R; r++) {
        u32 w0[4], w1[4];
        const u32 tile_at = at + (s * R + r) * Weight::BYTES, beside_at = at + STEPS * R * Weight::BYTES + (s * R + r) * Weight::BESIDE_BYTES;
        load_tile(weight[r], held ? held + r : nullptr, tile_at, beside_at, half, lane, w0, w1);
#pragma unroll
        for (int n = 0; n < NT; n++)
          if (!EXPERTS || n * 8 < tokens) multiply(sums[r][n], w0, x[n][0], x[n][1]);
#pragma unroll
        for (int n = 0; n < NT; n++)
          if (!EXPERTS || n * 8 < tokens) multiply(sums[r][n], w1, x[n][2], x[n][3]);
      }
    }
  };
  int i = 0;
  for (; i + STEPS <= steps; i += STEPS) {
    wait_copies<CHUNKS - 2>();
    meet();
    copy_weights(to, i + AHEAD);
    copy_tokens(x_to, i + AHEAD);
    commit();
#pragma unroll (Weight::IN_HALVES ? 1 : STEPS)
    for (int s = 0; s < STEPS; s += HELD_STEPS)
      multiply_steps<HELD_STEPS>(weight, at + s * R * Weight::BYTES, at + STEPS * R * Weight::BYTES + s * R * Weight::BESIDE_BYTES, lane, [&](int k, const typename Weight::Held* held) { multiply_step(s + k, held); });
    to = at, x_to = x_at;
    at += CHUNK_BYTES, x_at += STEPS * x_bytes;
    if (at == ring + RING_BYTES) at = ring, x_at = x_ring;
  }
  if (STEPS > 1 && i < steps) {
    wait_copies<CHUNKS - 2>();
    meet();
#pragma unroll (Weight::IN_HALVES ? 1 : STEPS)
    for (int s = 0; s < STEPS - 1; s++)
      if (i + s < steps)
        multiply_steps<1>(weight, at + s * R * Weight::BYTES, at + STEPS * R * Weight::BYTES + s * R * Weight::BESIDE_BYTES, lane, [&](int k, const typename Weight::Held* held) { multiply_step(s + k, held); });
  }
  wait_copies<0>();

  float* parts = (float*)shared;  // [ROWS][WARP_TILES][Q][SPLITS][tokens][16 rows, padded to 20]
  __syncthreads();
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        parts[(((place * R + r) * SPLITS + split) * NT * 8 + n * 8 + t * 2 + (i & 1)) * 20 + g + (i >> 1) * 8] = sums[r][n][i];
  __syncthreads();
  constexpr int BLOCK_ROWS = ROWS * WARP_TILES * 16;
  for (int e = threadIdx.x; e < tokens * BLOCK_ROWS; e += SPLITS * ROWS * 32) {
    const int token = e / BLOCK_ROWS, from = e % BLOCK_ROWS / 16, row = row_block * BLOCK_ROWS + e % BLOCK_ROWS;
    if (row >= a.rows) continue;
    float v[2] = {0.f, 0.f};
#pragma unroll
    for (int q = 0; q < Q; q++)
#pragma unroll
      for (int k = 0; k < SPLITS; k++) v[q] += parts[(((from * Q + q) * SPLITS + k) * NT * 8 + token) * 20 + (e & 15)];
    finish<GATED>(a, v[0], v[1], EXPERTS ? members[token] : token, row);
  }
  if (EXPERTS && GATED && a.missing) {
    __syncthreads();
    if (threadIdx.x == 0) add_released(a.multiplied + slot, min(BLOCK_ROWS, a.rows - row_block * BLOCK_ROWS));
  }
  if (EXPERTS) end_after_earlier(a);
}

// Of one token, with a quantised weight: `narrow` without what several need. Each warp copies its share of the token for
// itself, a chunk at a time, so that warps wait for nothing but their own copies.
//
// Every column of a product is the token's; the first is stored.
template <int SPLITS, int ROWS, int R, int STAGES, int STEPS, class Weight, bool GATED> __device__ __forceinline__ void alone(const Args& a) {
  constexpr int Q = GATED ? 2 : 1, WARP_TILES = R / Q, AHEAD = STAGES - STEPS, CHUNKS = STAGES / STEPS, HELD_STEPS = held_steps<R, STEPS, 4>();
  static_assert(STAGES % STEPS == 0 && AHEAD >= STEPS && STEPS <= 4);
  extern __shared__ __align__(1024) u8 shared[];
  release_next();
  int lane = threadIdx.x & 31;
  asm volatile("" : "+r"(lane));  // kept, not computed anew in the loop
  const int split = (threadIdx.x >> 5) / ROWS, place = (threadIdx.x >> 5) % ROWS, g = lane >> 2, t = lane & 3;
  const int all_steps = a.inputs / 64, tiles = a.rows / 16, steps = (all_steps - split + SPLITS - 1) / SPLITS;
  const int first_tile = ((int)blockIdx.x * ROWS + place) * WARP_TILES;

  // Two rings of a warp: of weights, and of the token.
  constexpr u32 CHUNK_BYTES = chunk_bytes<Weight>(STEPS * R), RING_BYTES = CHUNKS * CHUNK_BYTES, X_BYTES = STEPS * 128;
  u32 ring = shared_address(shared) + (split * ROWS + place) * RING_BYTES;
  u32 x_ring = shared_address(shared) + SPLITS * ROWS * RING_BYTES + (split * ROWS + place) * CHUNKS * X_BYTES;
  if (Weight::IN_HALVES) asm volatile("" : "+r"(ring), "+r"(x_ring));  // as `lane`

  Weight weight[R];
  typename Weight::template Beside<R, STEPS, SPLITS> beside;
  auto tile_of = [&](int r) { return min(first_tile + r / Q, tiles - 1) + (GATED && (r & 1) ? tiles : 0); };
#pragma unroll
  for (int r = 0; r < R; r++) weight[r].start(a, tile_of(r), all_steps, split, lane);
  beside.start(a, all_steps, split, lane, tile_of);
  auto copy_weights = [&](bool is_whole, u32 to, int i) {
    beside.copy(to);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      if (is_whole || i + s < steps) {
#pragma unroll
        for (int r = 0; r < R; r++) weight[r].copy(a, to + (s * R + r) * Weight::BYTES, s * SPLITS, lane);
      }
#pragma unroll
    for (int r = 0; r < R; r++) weight[r].advance(STEPS * SPLITS);
  };
  // Eight lanes copy a step of the token.
  const u16* from_x = a.x + (split + lane / 8 * SPLITS) * 64 + (lane & 7) * 8;
  auto copy_token = [&](bool is_whole, u32 to, int i) {
    copy16_if((STEPS == 4 || lane < STEPS * 8) && (is_whole || i + lane / 8 < steps), to + lane * 16, from_x);
    from_x += STEPS * SPLITS * 64;
  };

  float sums[R][4];
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[r][i] = 0.f;
#pragma unroll
  for (int c = 0; c < CHUNKS - 1; c++) copy_weights(false, ring + c * CHUNK_BYTES, c * STEPS);
  wait_for_earlier();
#pragma unroll
  for (int c = 0; c < CHUNKS - 1; c++) {
    copy_token(false, x_ring + c * X_BYTES, c * STEPS);
    commit();
  }
#pragma unroll
  for (int r = 0; r < R; r++) weight[r].settle();
  settle(from_x);
  const u32 x_first = x_ring + (lane >> 3) * 16;  // of what a lane gives the address
  u32 at = ring, x_at = x_first, to = ring + RING_BYTES - CHUNK_BYTES, x_to = x_ring + (CHUNKS - 1) * X_BYTES;
  auto multiply_step = [&](int s, const typename Weight::Held* held) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 x[4];
      load_matrices(x, x_at + s * 128 + half * 64);
#pragma unroll
      for (int r = 0; r < R; r++) {
        u32 w0[4], w1[4];
        const u32 tile_at = at + (s * R + r) * Weight::BYTES, beside_at = at + STEPS * R * Weight::BYTES + (s * R + r) * Weight::BESIDE_BYTES;
        load_tile(weight[r], held ? held + r : nullptr, tile_at, beside_at, half, lane, w0, w1);
        multiply(sums[r], w0, x[0], x[1]);
        multiply(sums[r], w1, x[2], x[3]);
      }
    }
  };
  int i = 0;
  for (; i + STEPS <= steps; i += STEPS) {
    wait_copies<CHUNKS - 2>();
    __syncwarp();
    if (i + AHEAD + STEPS <= steps) {
      copy_weights(true, to, i + AHEAD);
      copy_token(true, x_to, i + AHEAD);
    } else if (i + AHEAD < steps) {
      copy_weights(false, to, i + AHEAD);
      copy_token(false, x_to, i + AHEAD);
    }
    commit();
#pragma unroll (Weight::IN_HALVES ? 1 : STEPS)
    for (int s = 0; s < STEPS; s += HELD_STEPS)
      multiply_steps<HELD_STEPS>(weight, at + s * R * Weight::BYTES, at + STEPS * R * Weight::BYTES + s * R * Weight::BESIDE_BYTES, lane, [&](int k, const typename Weight::Held* held) { multiply_step(s + k, held); });
    to = at, x_to = x_at - x_first + x_ring;
    at += CHUNK_BYTES, x_at += X_BYTES;
    if (at == ring + RING_BYTES) at = ring, x_at = x_first;
  }
  if (i < steps) {
    wait_copies<CHUNKS - 2>();
    __syncwarp();
#pragma unroll (Weight::IN_HALVES ? 1 : STEPS)
    for (int s = 0; s < STEPS - 1; s++)
      if (i + s < steps)
        multiply_steps<1>(weight, at + s * R * Weight::BYTES, at + STEPS * R * Weight::BYTES + s * R * Weight::BESIDE_BYTES, lane, [&](int k, const typename Weight::Held* held) { multiply_step(s + k, held); });
  }
  wait_copies<0>();

  float* parts = (float*)shared;  // [ROWS][WARP_TILES][Q][SPLITS][16 rows]
  __syncthreads();
  if (t == 0) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float* own = parts + ((place * R + r) * SPLITS + split) * 16 + g;
      own[0] = sums[r][0];
      own[8] = sums[r][2];
    }
  }
  __syncthreads();
  constexpr int BLOCK_ROWS = ROWS * WARP_TILES * 16;
  for (int e = threadIdx.x; e < BLOCK_ROWS; e += THREADS) {
    const int row = (int)blockIdx.x * BLOCK_ROWS + e;
    if (row >= a.rows) continue;
    float v[2] = {0.f, 0.f};
#pragma unroll
    for (int q = 0; q < Q; q++)
#pragma unroll
      for (int k = 0; k < SPLITS; k++) v[q] += parts[((e / 16 * Q + q) * SPLITS + k) * 16 + e % 16];
    finish<GATED>(a, v[0], v[1], 0, row);
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
// which are added up in order; ROWS groups have the same share. Weights are restored into registers, plain ones and 64
// tokens are read in shared memory: the same products in the same order.
template <int SPLITS, int ROWS, int STAGES, class Weight, bool GATED> __device__ __forceinline__ void wide(const Args& a) {
  constexpr int NT = 8, X_BYTES = NT * 1024, STEP_BYTES = chunk_bytes<Weight>(1), STAGE_BYTES = (ROWS * 4 * STEP_BYTES + 1023) / 1024 * 1024 + X_BYTES, Q = GATED ? 2 : 1, GROUP_ROWS = 64 / Q, THREADS_OF_SPLIT = ROWS * 128;
  extern __shared__ __align__(1024) u8 shared[];
  release_next();
  const int thread = threadIdx.x % THREADS_OF_SPLIT, split = threadIdx.x / THREADS_OF_SPLIT, place = thread >> 7;
  const int lane = threadIdx.x & 31, warp = thread >> 5 & 3, g = lane >> 2, t = lane & 3;
  const int all_steps = a.inputs / 64, tiles = a.rows / 16, steps = (all_steps - split + SPLITS - 1) / SPLITS;
  const u32 base = shared_address(shared) + split * STAGES * STAGE_BYTES, mine = X_BYTES + (place * 4 + warp) * STEP_BYTES;

  Weight weight;
  const int tile = min(((int)blockIdx.x * ROWS + place) * (4 / Q) + (GATED ? warp & 1 : warp), tiles - 1);
  auto tile_of = [&](int) { return GATED && warp >= 2 ? tile + tiles : tile; };
  typename Weight::template Beside<1, 1, SPLITS> beside;
  weight.start(a, tile_of(0), all_steps, split, lane);
  beside.start(a, all_steps, split, lane, tile_of);
  auto copy_weights = [&](int i) {
    if (i >= steps) return;
    weight.copy(a, base + (i % STAGES) * STAGE_BYTES + mine, 0, lane);
    weight.advance(SPLITS);
    beside.copy(base + (i % STAGES) * STAGE_BYTES + mine);
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
        const u32 x_at = base + (i % STAGES) * STAGE_BYTES, at = x_at + mine, group_at = x_at + X_BYTES + place * 4 * STEP_BYTES;
        if (Weight::IS_RESTORED) {  // beside the products of the step before
          weight.load(at, at + Weight::BYTES, 0, lane, w[p][0], w[p][1]);
          weight.load(at, at + Weight::BYTES, 1, lane, w[p][2], w[p][3]);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, %1;" ::"r"(split + 1), "n"(THREADS_OF_SPLIT) : "memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int m = 0; m < 4; m++) {
          if (Weight::IS_RESTORED) multiply_group(sums, w[p][m], descriptor(x_at + m * 32));
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
template <class Weight> __device__ __forceinline__ void restore(const Args& a) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int ROW = 528, STEP_BYTES = chunk_bytes<Weight>(1), COPIED = 4 * STEP_BYTES;  // padded: rows of a tile start in different banks
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int steps = a.inputs / 64, groups = (steps + 3) / 4, job = a.rows / 16 * groups - 1 - ((int)blockIdx.x * (THREADS / 32) + warp);
  const int tile = job / groups, first = job % groups * 4;
  if (job < 0) return;
  u8* mine = shared + warp * (COPIED + 16 * ROW);
  const u32 at = shared_address(mine);
  Weight weight;
  typename Weight::template Beside<1, 1, 1> beside;
  weight.start(a, tile, steps, first, lane);
  beside.start(a, steps, first, lane, [&](int) { return tile; });
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (first + i < steps) weight.copy(a, at + i * STEP_BYTES, i, lane);
    beside.copy(at + i * STEP_BYTES);
    commit();
  }
  auto restored = [&](int i) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 w[2][4];
      weight.load(at + i * STEP_BYTES, at + i * STEP_BYTES + Weight::BYTES, half, lane, w[0], w[1]);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        u8* to = mine + COPIED + g * ROW + i * 128 + half * 64 + q * 32 + t * 4;
        *(u32*)to = w[q][0];
        *(u32*)(to + 16) = w[q][2];
        *(u32*)(to + 8 * ROW) = w[q][1];
        *(u32*)(to + 8 * ROW + 16) = w[q][3];
      }
    }
  };
  wait_copies<3>();
  __syncwarp();
  restored(0);
  wait_copies<2>();
  __syncwarp();
  if (first + 1 < steps) restored(1);
  wait_copies<1>();
  __syncwarp();
  if (first + 2 < steps) restored(2);
  wait_copies<0>();
  __syncwarp();
  if (first + 3 < steps) restored(3);
  __syncwarp();
  const int column = first * 64 + lane * 8;
  if (column >= a.inputs) return;
#pragma unroll
  for (int r = 0; r < 16; r++)
    *(uint4*)(a.out + (size_t)(tile * 16 + r) * a.inputs + column) = *(const uint4*)(mine + COPIED + r * ROW + lane * 16);
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

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS) kernel(const __grid_constant__ Args a) { KERNEL(a); }
