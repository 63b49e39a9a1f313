// Codecs and LoCo error feedback on a CPU, bitwise equal to codecs.py, 128 elements at a time.
//
// Without intrinsics or torch headers: the loops are plain C++ over the 128 elements of a group, which the compiler
// vectorises. Each entry point is compiled three times from the same source, for AVX-512, for AVX2 and for the
// compiler's default target (the only one on non-x86 CPUs); the caller selects one by CPU features.
// Must be compiled with -ffp-contract=off: a fused multiply-add rounds once where the reference rounds twice.
//
// codecs.py specifies the layout of a block and every rounding.

#include <cstdint>
#include <cstring>

// Inlined into each of the three versions, and thus compiled for its instruction set.
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kGroup = 128;
constexpr int kRotated = 32;
constexpr int kAlignment = 16;
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kSmallestNormal = 0x00800000u;
constexpr uint16_t kNan = 0x7FC0u;
// Adding it to a number below 2^22 rounds half to even, and leaves the integer in the lowest bits of the sum.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

INLINE uint32_t bits_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
INLINE float float_of(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
INLINE float to_float(Float16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = uint32_t(x.bits & 0x7FFFu) << 13;
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);  // rebias the exponent, normalise subnormals
    const uint32_t special = magnitude | kInfinity;
    return float_of(sign | (magnitude >= 0x0F800000u ? special : finite));
}

INLINE uint16_t rounded_bfloat16(uint32_t bits) {  // half to even; invalid for NaN
    return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

INLINE void from_float(float x, float* out) { *out = x; }
INLINE void from_float(float x, BFloat16* out) {
    const uint32_t bits = bits_of(x);
    const bool is_nan = (bits & 0x7FFFFFFFu) > kInfinity;
    out->bits = is_nan ? kNan : rounded_bfloat16(bits);
}
INLINE void from_float(float x, Float16* out) {
    const uint32_t bits = bits_of(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    // Subnormal halves: 0.5 in float32 has the same last place, so adding it rounds half to even there.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // values from 65520 round to infinity
    half = magnitude > kInfinity ? 0x7E00u : half;
    out->bits = uint16_t(sign | half);
}

// A block: the codes of all groups, the scales of all groups, zero padding.
struct Block { uint8_t* codes; uint8_t* scales; };

INLINE int64_t groups_of(int64_t num_elements) { return (num_elements + kGroup - 1) / kGroup; }
INLINE int64_t used_bytes(int64_t num_elements, int bits) { return groups_of(num_elements) * (kGroup * bits / 8 + 2); }
INLINE int64_t block_bytes(int64_t num_elements, int bits) {
    return (used_bytes(num_elements, bits) + kAlignment - 1) / kAlignment * kAlignment;
}
INLINE Block block_at(uint8_t* bytes, int64_t num_elements, int bits) {
    return {bytes, bytes + groups_of(num_elements) * (kGroup * bits / 8)};
}
INLINE void end_block(uint8_t* bytes, int64_t num_elements, int bits) {
    const int64_t used = used_bytes(num_elements, bits);
    std::memset(bytes + used, 0, size_t(block_bytes(num_elements, bits) - used));
}
INLINE float read_scale(const uint8_t* scales, int64_t group) {
    uint16_t bits; std::memcpy(&bits, scales + 2 * group, 2); return float_of(uint32_t(bits) << 16);
}
INLINE void write_scale(uint8_t* scales, int64_t group, uint16_t scale) { std::memcpy(scales + 2 * group, &scale, 2); }

// Number of groups processed together. For a single group, maximum, division and codes are a serial dependency chain;
// the chains of several groups overlap.
constexpr int kTile = 8;

// Scales of the groups in a tile.
struct Scales {
    alignas(64) float value[kTile], inverse[kTile];
    alignas(64) uint32_t bits[kTile], finite[kTile];
};

// Keys hold the magnitude above the sign: the maximum is the largest magnitude, negative on ties, or non-finite.
INLINE uint32_t largest_key(const float* h) {
    uint32_t key = 0;
    for (int i = 0; i < kGroup; ++i) {
        const uint32_t bits = bits_of(h[i]);
        const uint32_t mine = bits << 1 | bits >> 31;
        key = mine > key ? mine : key;
    }
    return key;
}

template <int kBits> INLINE void scales_of(const uint32_t* keys, Scales* scales) {
    constexpr uint32_t largest = ((256 - kBits) << 7) - 1;  // its product with the lowest code is finite
    for (int t = 0; t < kTile; ++t) {
        const uint32_t magnitude = keys[t] >> 1, sign = (~keys[t] & 1u) << 31;
        const uint32_t exact = bits_of(float_of(magnitude) * (1.0f / float(1 << (kBits - 1))));
        const uint32_t finite = magnitude < kInfinity, used = finite & uint32_t(exact >= kSmallestNormal);
        const uint32_t rounded = rounded_bfloat16(exact | sign);
        const uint32_t size = rounded & 0x7FFFu, sent = (size < largest ? size : largest) | (rounded & 0x8000u);
        const uint32_t bits = finite ? (used ? sent : 0u) : uint32_t(kNan);
        scales->value[t] = float_of(bits << 16);
        scales->inverse[t] = used ? 1.0f / float_of(rounded << 16) : 0.0f;
        scales->bits[t] = bits;
        scales->finite[t] = finite;
    }
}

// Codes of a non-finite group are 0. Codes need no lower clamp: the relative error of a scale is at most 2^-9, so
// values are less than half a code below the lowest code, and round to it.
template <int kBits> INLINE void codes_of(const float* h, float inverse, bool finite, int32_t* codes) {
    constexpr int32_t highest = (1 << (kBits - 1)) - 1;
    if (!finite) {
        for (int i = 0; i < kGroup; ++i) codes[i] = 0;
        return;
    }
    for (int i = 0; i < kGroup; ++i) {
        const int32_t code = int32_t(bits_of(h[i] * inverse + kRounder) - bits_of(kRounder));
        codes[i] = code > highest ? highest : code;
    }
}

template <int kBits> INLINE void pack(const int32_t* codes, uint8_t* out) {
    constexpr int kFields = 8 / kBits, kWidth = kGroup / kFields, kMask = (1 << kBits) - 1;
    for (int j = 0; j < kWidth; ++j) {
        int32_t byte = codes[j] & kMask;
        for (int k = 1; k < kFields; ++k) byte |= (codes[j + k * kWidth] & kMask) << (k * kBits);
        out[j] = uint8_t(byte);
    }
}

// Dequantises a group and adds it to `sum`, or to zero if it is the first.
template <int kBits, bool kFirst> INLINE void unpack(const uint8_t* packed, float scale, float* sum) {
    constexpr int kFields = 8 / kBits, kWidth = kGroup / kFields;
    for (int k = 0; k < kFields; ++k) {
        float* field = sum + k * kWidth;
        for (int j = 0; j < kWidth; ++j) {
            // Shifting the field to the top of the byte and back sign-extends it.
            const int8_t code = int8_t(int8_t(packed[j] << (8 - kBits - k * kBits)) >> (8 - kBits));
            field[j] = (kFirst ? 0.0f : field[j]) + float(code) * scale;
        }
    }
}

// Five stages, each of which combines adjacent elements and stores sums before differences: the next stage's adjacent
// elements are then those at twice the distance in an ordinary butterfly, and the fifth restores the order. A stage
// depends on the previous one, so all transforms of a group run it together.
INLINE void hadamard(float* x) {
    constexpr int kHalf = kRotated / 2;
    alignas(64) float other[kGroup];
    for (int stage = 0; stage < 5; ++stage) {
        for (int p = 0; p < kGroup; p += kRotated) {
            for (int i = 0; i < kHalf; ++i) {
                other[p + i] = x[p + 2 * i] + x[p + 2 * i + 1];
                other[p + i + kHalf] = x[p + 2 * i] - x[p + 2 * i + 1];
            }
        }
        std::memcpy(x, other, sizeof other);
    }
}

template <class T> INLINE void load_as(const void* x, int64_t group, int64_t num_elements, float* h) {
    const int64_t left = num_elements - group * kGroup;
    const T* from = static_cast<const T*>(x) + group * kGroup;
    if (left >= kGroup) {
        for (int i = 0; i < kGroup; ++i) h[i] = to_float(from[i]);
        return;
    }
    for (int i = 0; i < kGroup; ++i) h[i] = 0.0f;
    for (int i = 0; i < left; ++i) h[i] = to_float(from[i]);
}

template <class T> INLINE void store_as(const float* h, int64_t group, int64_t num_elements, void* out) {
    const int64_t left = num_elements - group * kGroup;
    T* to = static_cast<T*>(out) + group * kGroup;
    if (left >= kGroup) {
        for (int i = 0; i < kGroup; ++i) from_float(h[i], to + i);
        return;
    }
    for (int i = 0; i < left; ++i) from_float(h[i], to + i);
}

// Dispatch on the dtype is per group: the branch is well predicted, and there is a third of the code to compile.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

INLINE int64_t size_of(int dtype) { return dtype == kFloat32 ? 4 : 2; }
INLINE void load(const void* x, int dtype, int64_t group, int64_t num_elements, float* h) {
    if (dtype == kFloat32) load_as<float>(x, group, num_elements, h);
    else if (dtype == kBFloat16) load_as<BFloat16>(x, group, num_elements, h);
    else load_as<Float16>(x, group, num_elements, h);
}
INLINE void store(const float* h, int dtype, int64_t group, int64_t num_elements, void* out) {
    if (dtype == kFloat32) store_as<float>(h, group, num_elements, out);
    else if (dtype == kBFloat16) store_as<BFloat16>(h, group, num_elements, out);
    else store_as<Float16>(h, group, num_elements, out);
}

INLINE int groups_in_tile(int64_t first, int64_t num_elements) {
    const int64_t left = groups_of(num_elements) - first;
    return left < kTile ? int(left) : kTile;
}

template <int kBits>
INLINE void encode(const char* x, int dtype, int64_t num_blocks, int64_t num_elements, bool rotate, uint8_t* out) {
    alignas(64) float h[kTile][kGroup];
    alignas(64) int32_t codes[kGroup];
    alignas(64) uint32_t keys[kTile] = {};
    Scales scales;
    for (int64_t b = 0; b < num_blocks; ++b) {
        const Block block = block_at(out, num_elements, kBits);
        for (int64_t first = 0; first < groups_of(num_elements); first += kTile) {
            const int count = groups_in_tile(first, num_elements);
            for (int t = 0; t < count; ++t) {
                load(x, dtype, first + t, num_elements, h[t]);
                if (rotate) hadamard(h[t]);
                keys[t] = largest_key(h[t]);
            }
            scales_of<kBits>(keys, &scales);
            for (int t = 0; t < count; ++t) {
                codes_of<kBits>(h[t], scales.inverse[t], scales.finite[t], codes);
                pack<kBits>(codes, block.codes + (first + t) * (kGroup * kBits / 8));
                write_scale(block.scales, first + t, uint16_t(scales.bits[t]));
            }
        }
        end_block(out, num_elements, kBits);
        x += num_elements * size_of(dtype);
        out += block_bytes(num_elements, kBits);
    }
}

// `next` may alias `error`: a tile is read before it is written.
template <int kBits>
INLINE void loco(const char* g, int dtype, int64_t num_blocks, int64_t num_elements, float beta, float rest,
                 uint8_t* error, uint8_t* next, uint8_t* out) {
    alignas(64) float h[kTile][kGroup], e[kTile][kGroup];
    alignas(64) int32_t codes[kGroup];
    alignas(64) uint32_t keys[kTile] = {};
    Scales scales;
    for (int64_t b = 0; b < num_blocks; ++b) {
        const Block old = block_at(error, num_elements, 8), kept = block_at(next, num_elements, 8);
        const Block sent = block_at(out, num_elements, kBits);
        for (int64_t first = 0; first < groups_of(num_elements); first += kTile) {
            const int count = groups_in_tile(first, num_elements);
            for (int t = 0; t < count; ++t) {
                load(g, dtype, first + t, num_elements, h[t]);
                unpack<8, true>(old.codes + (first + t) * kGroup, read_scale(old.scales, first + t), e[t]);
                for (int i = 0; i < kGroup; ++i) h[t][i] += e[t][i];
                keys[t] = largest_key(h[t]);
            }
            scales_of<kBits>(keys, &scales);
            for (int t = 0; t < count; ++t) {
                codes_of<kBits>(h[t], scales.inverse[t], scales.finite[t], codes);
                pack<kBits>(codes, sent.codes + (first + t) * (kGroup * kBits / 8));
                write_scale(sent.scales, first + t, uint16_t(scales.bits[t]));
                const float scale = scales.value[t];
                for (int i = 0; i < kGroup; ++i) {
                    e[t][i] = e[t][i] * beta + (h[t][i] - float(codes[i]) * scale) * rest;
                }
                keys[t] = largest_key(e[t]);
            }
            scales_of<8>(keys, &scales);
            for (int t = 0; t < count; ++t) {
                codes_of<8>(e[t], scales.inverse[t], scales.finite[t], codes);
                pack<8>(codes, kept.codes + (first + t) * kGroup);
                write_scale(kept.scales, first + t, scales.finite[t] ? uint16_t(scales.bits[t]) : 0);
            }
        }
        end_block(next, num_elements, 8);
        end_block(out, num_elements, kBits);
        g += num_elements * size_of(dtype);
        error += block_bytes(num_elements, 8);
        next += block_bytes(num_elements, 8);
        out += block_bytes(num_elements, kBits);
    }
}

template <int kBits>
INLINE void decode_sum(uint8_t* payloads, int dtype, int64_t num_ranks, int64_t num_elements, bool rotate,
                       float multiplier, void* out) {
    const int64_t stride = block_bytes(num_elements, kBits);
    for (int64_t group = 0; group < groups_of(num_elements); ++group) {
        alignas(64) float sum[kGroup];
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
            const Block block = block_at(payloads + rank * stride, num_elements, kBits);
            const uint8_t* codes = block.codes + group * (kGroup * kBits / 8);
            const float scale = read_scale(block.scales, group);
            if (rank == 0) unpack<kBits, true>(codes, scale, sum);
            else unpack<kBits, false>(codes, scale, sum);
        }
        if (rotate) {
            hadamard(sum);
            for (int i = 0; i < kGroup; ++i) sum[i] *= 1.0f / kRotated;
        }
        for (int i = 0; i < kGroup; ++i) sum[i] *= multiplier;
        store(sum, dtype, group, num_elements, out);
    }
}

}  // namespace

// Calls `function<bits>` with the other arguments, which dispatch.py has validated.
#define WITH_BITS(function, bits, ...)                      \
    do {                                                    \
        if (bits == 8) function<8>(__VA_ARGS__);            \
        else if (bits == 4) function<4>(__VA_ARGS__);       \
        else function<2>(__VA_ARGS__);                      \
    } while (false)

#define ENTRY_POINTS(isa, attributes)                                                                                \
    attributes void encode_##isa(const char* x, int dtype, int bits, int64_t num_blocks, int64_t num_elements,       \
                                 int rotate, uint8_t* out) {                                                         \
        WITH_BITS(encode, bits, x, dtype, num_blocks, num_elements, rotate, out);                                    \
    }                                                                                                                \
    attributes void loco_##isa(const char* g, int dtype, int bits, int64_t num_blocks, int64_t num_elements,         \
                               float beta, float rest, uint8_t* error, uint8_t* next, uint8_t* out) {                \
        WITH_BITS(loco, bits, g, dtype, num_blocks, num_elements, beta, rest, error, next, out);                     \
    }                                                                                                                \
    attributes void decode_sum_##isa(uint8_t* payloads, int dtype, int bits, int64_t num_ranks, int64_t num_elements,\
                                     int rotate, float multiplier, void* out) {                                      \
        WITH_BITS(decode_sum, bits, payloads, dtype, num_ranks, num_elements, rotate, multiplier, out);              \
    }

extern "C" {

ENTRY_POINTS(baseline, )
int has_baseline() { return 1; }

#if defined(__x86_64__)
// GCC and Clang default to 256-bit vectors for AVX-512, and have different options for 512.
#if defined(__clang__)
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
ENTRY_POINTS(avx2, __attribute__((target("avx2"))))
ENTRY_POINTS(avx512, AVX512)
int has_avx2() { return __builtin_cpu_supports("avx2") != 0; }
int has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
int has_avx2() { return 0; }
int has_avx512() { return 0; }
#endif

}  // extern "C"
