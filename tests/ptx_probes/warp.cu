// SPDX-License-Identifier: MIT
// Shuffles, votes and reductions of a warp, and the votes of a block.
struct Params {
  const unsigned* x;  // (threads)
  unsigned* y;        // (12, threads)
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  constexpr unsigned kAll = 0xffffffffu;
  const int t = threadIdx.x;
  const unsigned x = params.x[t];
  unsigned* y = params.y + t;
  const auto put = [&](unsigned value) {
    *y = value;
    y += blockDim.x;
  };
  put(__shfl_xor_sync(kAll, x, 1));
  put(__shfl_xor_sync(kAll, x, 2));
  put(__float_as_uint(__shfl_xor_sync(kAll, __uint_as_float(x), 16)));
  const double wide = __longlong_as_double(static_cast<long long>(x) << 20 | 0x3ff0000000000001ll);
  put(static_cast<unsigned>(__double_as_longlong(__shfl_xor_sync(kAll, wide, 8)) >> 20));
  put(__shfl_sync(kAll, x, x % 32));
  put(__shfl_sync(kAll, x, 3, 8));
  put(__shfl_up_sync(kAll, x, 5, 16));
  put(__shfl_down_sync(kAll, x, 5, 16));
  put(__any_sync(kAll, x % 64 == 0));
  put(__ballot_sync(kAll, x % 3 == 0));
  put(__reduce_max_sync(kAll, static_cast<int>(x)));
  put(__syncthreads_count(x % 5 == 0));
}
