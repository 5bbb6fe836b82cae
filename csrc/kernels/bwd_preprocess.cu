// Before any backward kernel: delta = rowsum(dout * out) - dlse. With it the gradient of a score is P * (dP - delta),
// and a gradient that comes through LSE costs nothing more. Bound by memory: out and dout are read once. The sums of dQ
// become zero on the way, which would take a launch of its own otherwise.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../core/common.h"

namespace flash {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 128;         // of one head; finding (batch, head) takes 64-bit divisions: once per 128 rows
constexpr int64_t kMaxGrid = 1 << 20;  // further tiles come round in the loop, so that no size overflows a grid axis

template <class Element, int kVec>
struct alignas(sizeof(Element) * kVec) Vector {
  Element element[kVec];
};

template <class T>
__device__ void zero(T* to, int64_t count) {  // by all threads of the grid
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) to[i] = T{};
}

// A row is read by `lanes` neighbouring threads (a power of two up to a warp), kVec elements at a time.
template <class Element, int kVec>
__global__ void __launch_bounds__(kThreads) bwd_preprocess_kernel(const __grid_constant__ BwdParams p, int lanes) {
  using Vec = Vector<Element, kVec>;
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = kThreads / lanes;
  const int64_t dq_tiles = p.heads * p.dq_tiles_of_head;
  if (p.dq_accum != nullptr) zero(static_cast<float4*>(p.dq_accum), dq_tiles * p.dq_tile_size / 4);
  if (p.dq_turns != nullptr) zero(p.dq_turns, 1 + dq_tiles);
  const int64_t row_tiles = ceil_div(p.seqlen_q, kTileRows), tiles = p.batch * p.heads * row_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first = tile % row_tiles * kTileRows;
    const int64_t head = tile / row_tiles % p.heads, batch = tile / row_tiles / p.heads;
    const int64_t offset = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;  // packed: where this sequence begins
    const int64_t rows = (p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] - offset : p.seqlen_q) - first;

    const auto rows_of = [&](const TensorView& t) {
      return static_cast<const Element*>(t.ptr) + batch * t.batch_stride + head * t.head_stride;
    };
    const auto values_of = [&](const RowView& t) {
      return static_cast<float*>(t.ptr) + batch * t.batch_stride + head * t.head_stride + offset + first;
    };
    const Element* out = rows_of(p.out) + (offset + first) * p.out.row_stride;     // [rows, head_dim]
    const Element* dout = rows_of(p.dout) + (offset + first) * p.dout.row_stride;  // [rows, head_dim]
    const float* dlse = p.dlse.ptr ? values_of(p.dlse) : nullptr;                  // [rows]
    float* delta = values_of(p.delta);                                             // [rows]

    // The bounds are the same for the whole block: every thread of a warp must come to the shuffles.
    for (int base = 0; base < kTileRows && base < rows; base += groups) {
      const int row = base + group;
      const bool active = row < rows && row < kTileRows;
      float sum = 0;
      if (active) {
        for (int64_t d = int64_t{lane} * kVec; d < p.head_dim; d += lanes * kVec) {
          const Vec a = *reinterpret_cast<const Vec*>(out + row * p.out.row_stride + d);
          const Vec b = *reinterpret_cast<const Vec*>(dout + row * p.dout.row_stride + d);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            sum += static_cast<float>(a.element[i]) * static_cast<float>(b.element[i]);
          }
        }
      }
      for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (active && lane == 0) delta[row] = sum - (dlse ? dlse[row] : 0.f);
    }
  }
}

bool aligned16(const TensorView& t, int64_t element_bytes) {
  const int64_t strides = t.batch_stride | t.row_stride | t.head_stride;  // the lowest bit that any of them has
  return reinterpret_cast<uintptr_t>(t.ptr) % 16 == 0 && strides * element_bytes % 16 == 0;
}

template <class Element, int kVec>
cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * kVec < p.head_dim) lanes *= 2;
  const int64_t tiles = p.batch * p.heads * ceil_div(p.seqlen_q, kTileRows);
  const unsigned grid = static_cast<unsigned>(max_of<int64_t>(1, min_of(tiles, kMaxGrid)));  // 1: there may be zeros to write
  bwd_preprocess_kernel<Element, kVec><<<grid, kThreads, 0, stream>>>(p, lanes);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(Element);
  const bool vectors =
      p.head_dim % kVec == 0 && aligned16(p.out, sizeof(Element)) && aligned16(p.dout, sizeof(Element));
  return vectors ? launch<Element, kVec>(p, stream) : launch<Element, 1>(p, stream);
}

}  // namespace

int launch_bwd_preprocess(const BwdParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (p.dtype) {
    case DType::kFloat32: return launch<float>(p, cuda_stream);
    case DType::kBFloat16: return launch<__nv_bfloat16>(p, cuda_stream);
    case DType::kFloat16: return launch<__half>(p, cuda_stream);
    default: return cudaErrorInvalidValue;  // float64 is for gradcheck, which runs on the CPU
  }
}

}  // namespace flash
