// SPDX-License-Identifier: MIT
// mma.cuh: host twin. Products are exact; float sums are cut off, not rounded, as tensor cores do.
#pragma once

namespace cupyflash {

// One lane's share of d, a and b, each element as double.
template <int kD, int kA, int kB>
struct MmaOperands {
  double d[kD];
  double a[kA];
  double b[kB];
};
template <int kD>
struct MmaResult {
  double d[kD];
};

inline double cut_to_float(double x) {
  const float rounded = float(x);
  if (!(fabs(double(rounded)) > fabs(x)) || isinf(rounded)) return rounded;
  return nextafterf(rounded, 0.0f);
}

inline double half_bits(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
inline double bfloat16_bits(unsigned bits) { return host::bit_cast<float>(bits << 16); }
inline double tf32_bits(unsigned bits) { return host::bit_cast<float>(bits & 0xffffe000u); }

// m16n8k: kPack elements of a row or column of k lie in one register.
template <int k, int kPack, bool cut>
void multiply_m16n8(const MmaOperands<4, k / 2, k / 4>* in, MmaResult<4>* out) {
  double a[16][k], b[k][8];
  constexpr int kPart = 4 * kPack;  // of k, that one register of each lane of four covers
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int part = 0; part < k / kPart; ++part) {
      for (int p = 0; p < kPack; ++p) {
        const int at = part * kPart + t * kPack + p;
        a[g][at] = in[lane].a[(2 * part) * kPack + p];
        a[g + 8][at] = in[lane].a[(2 * part + 1) * kPack + p];
        b[at][g] = in[lane].b[part * kPack + p];
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + e / 2 * 8, col = lane % 4 * 2 + e % 2;
      double sum = in[lane].d[e];
      for (int x = 0; x < k; ++x) sum = fma(a[row][x], b[x][col], sum);
      out[lane].d[e] = cut ? cut_to_float(sum) : sum;
    }
  }
}

template <class Convert>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                  const Convert& convert, const char* what, host::Place place) {
  MmaOperands<4, 8, 4> in;
  for (int e = 0; e < 4; ++e) in.d[e] = d[e];
  for (int e = 0; e < 8; ++e) in.a[e] = convert(a[e / 2] >> (e % 2 * 16) & 0xffffu);
  for (int e = 0; e < 4; ++e) in.b[e] = convert(b[e / 2] >> (e % 2 * 16) & 0xffffu);
  const auto out = host::warp_collective<MmaResult<4>>(
      0xffffffffu, what, place, in,
      [](const MmaOperands<4, 8, 4>* values, host::Members, MmaResult<4>* results) {
        multiply_m16n8<16, 2, true>(values, results);
      });
  for (int e = 0; e < 4; ++e) d[e] = float(out.d[e]);
}

// m16n8k16, f16.
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                             host::Place place = host::Place::here()) {
  mma_m16n8k16(d, a, b, half_bits, "mma_m16n8k16_f16", place);
}

// m16n8k16, bf16.
inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                              host::Place place = host::Place::here()) {
  mma_m16n8k16(d, a, b, bfloat16_bits, "mma_m16n8k16_bf16", place);
}

template <bool cut>
MmaResult<4> mma_m16n8k8(const MmaOperands<4, 4, 2>& in, const char* what, host::Place place) {
  return host::warp_collective<MmaResult<4>>(
      0xffffffffu, what, place, in,
      [](const MmaOperands<4, 4, 2>* values, host::Members, MmaResult<4>* results) {
        multiply_m16n8<8, 1, cut>(values, results);
      });
}

// m16n8k8, tf32.
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                             host::Place place = host::Place::here()) {
  MmaOperands<4, 4, 2> in;
  for (int e = 0; e < 4; ++e) in.d[e] = d[e], in.a[e] = tf32_bits(a[e]);
  for (int e = 0; e < 2; ++e) in.b[e] = tf32_bits(b[e]);
  const auto out = mma_m16n8k8<true>(in, "mma_m16n8k8_tf32", place);
  for (int e = 0; e < 4; ++e) d[e] = float(out.d[e]);
}

// m16n8k8, f64.
inline void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], const double (&b)[2],
                            host::Place place = host::Place::here()) {
  const MmaOperands<4, 4, 2> in{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const auto out = mma_m16n8k8<false>(in, "mma_m16n8k8_f64", place);
  for (int e = 0; e < 4; ++e) d[e] = out.d[e];
}

// m16n8k16, f64.
inline void mma_m16n8k16_f64(double (&d)[4], const double (&a)[8], const double (&b)[4],
                             host::Place place = host::Place::here()) {
  MmaOperands<4, 8, 4> in;
  for (int e = 0; e < 4; ++e) in.d[e] = d[e], in.b[e] = b[e];
  for (int e = 0; e < 8; ++e) in.a[e] = a[e];
  const auto out = host::warp_collective<MmaResult<4>>(
      0xffffffffu, "mma_m16n8k16_f64", place, in,
      [](const MmaOperands<4, 8, 4>* values, host::Members, MmaResult<4>* results) {
        multiply_m16n8<16, 1, false>(values, results);
      });
  for (int e = 0; e < 4; ++e) d[e] = out.d[e];
}

// m8n8k4, f64.
inline void mma_m8n8k4_f64(double& d0, double& d1, double a, double b,
                           host::Place place = host::Place::here()) {
  const MmaOperands<2, 1, 1> in{{d0, d1}, {a}, {b}};
  const auto out = host::warp_collective<MmaResult<2>>(
      0xffffffffu, "mma_m8n8k4_f64", place, in,
      [](const MmaOperands<2, 1, 1>* values, host::Members, MmaResult<2>* results) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int e = 0; e < 2; ++e) {
            double sum = values[lane].d[e];
            for (int x = 0; x < 4; ++x) {
              sum =
                  fma(values[lane / 4 * 4 + x].a[0], values[(lane % 4 * 2 + e) * 4 + x].b[0], sum);
            }
            results[lane].d[e] = sum;
          }
        }
      });
  d0 = out.d[0], d1 = out.d[1];
}

}  // namespace cupyflash
