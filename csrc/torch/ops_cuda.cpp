// The ops for CUDA tensors: check, bind, launch, record.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "check.h"

#ifdef FLASH_WITH_CUDA
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "../core/block_info.h"
#include "record.h"
#include "stages.h"
#endif

namespace flash::binding {

namespace {

// Python's dispatch lists every reason before it comes here; this is for who calls the op itself.
[[noreturn]] void no_kernel(const Options& o, const Tensor& q, const char* reason) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, o.caller(), ": no kernel for q on ", q.device(), ": ", reason);
  __builtin_unreachable();
}

#ifdef FLASH_WITH_CUDA

constexpr int64_t kVector = 8;  // elements of 16 bytes, which the kernels load at once
constexpr int64_t kLargestHeadDim = 256;

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }
cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

void check_supported(const Options& o, const Tensor& q, const Sizes& s) {
  if (o.version != 2) no_kernel(o, q, "fa1 and fa3 have none for CUDA tensors; use version=\"fa2\"");
  if (q.scalar_type() != at::kHalf && q.scalar_type() != at::kBFloat16)
    no_kernel(o, q, "fa2 takes bfloat16 and float16 on CUDA; convert q, k and v with .to()");
  if (s.head_dim > kLargestHeadDim) no_kernel(o, q, "fa2 takes a head_dim of at most 256 on CUDA; split the heads");
  const int64_t longest = std::max(s.seqlen_q, s.seqlen_k), rows = s.packed ? std::max(s.total_q, s.total_k) : 0;
  if (longest > TileBand::kLongest || rows > std::numeric_limits<int32_t>::max())
    no_kernel(o, q, "fa2 takes sequences of at most 2**29 rows on CUDA, and 2**31 packed ones; split them");
  if (s.batch * s.heads > std::numeric_limits<int32_t>::max())
    no_kernel(o, q, "fa2 takes at most 2**31 - 1 heads over the whole batch on CUDA; split the batch");
  if (o.softcap != 0 || o.alibi_slopes || o.bias || o.sinks || o.block_mask || o.dropout_p != 0)
    no_kernel(o, q, "fa2 takes no softcap, alibi_slopes, bias, sinks, block_mask or dropout on CUDA; leave them out");
}

// fa2_smem_available, once for each device.
int smem_available() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  const int device = c10::cuda::current_device();
  int bytes = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (bytes == 0) {
    check_launch(fa2_smem_available(&bytes));
    if (device < kDevices) known[device].store(bytes, std::memory_order_relaxed);
  }
  return bytes;
}

bool is_aligned(const Tensor& t) {
  if (t.size(-1) % kVector != 0 || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
  if (t.size(-1) > 1 && t.stride(-1) != 1) return false;
  for (int64_t d = 0; d < t.dim() - 1; ++d)
    if (t.size(d) > 1 && t.stride(d) % kVector != 0) return false;
  return true;
}

// t as the kernels load it: rows of whole, aligned vectors. Others are copied, and padded with zeros.
Tensor aligned_rows(const Tensor& t, uint32_t bit, uint32_t& copies) {
  if (is_aligned(t)) return t;
  copies |= bit;
  return at::constant_pad_nd(t, {0, (kVector - t.size(-1) % kVector) % kVector}, 0);
}

// at::empty and at::empty_like on the current device, but not through the dispatcher, which costs half a microsecond.
Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return Tensor(at::detail::empty_cuda(sizes, options));
}
Tensor empty_result(const Tensor& like) {
  return like.is_contiguous() ? empty(like.sizes(), like.options()) : empty_rows(like);
}

// A tensor like `like` that a kernel fills, by way of padded rows where the head_dim is no whole vector.
struct Result {
  Tensor result, rows;

  Result(const Tensor& like, int64_t head_dim) : result(empty_result(like)), rows(result) {
    if (like.size(-1) == head_dim) return;
    std::vector<int64_t> sizes = like.sizes().vec();
    sizes.back() = head_dim;
    rows = empty(sizes, like.options());
  }
  void finish() {
    if (!rows.is_same(result)) result.copy_(rows.narrow(-1, 0, result.size(-1)));
  }
};

struct CudaCall {
  Inputs in;

  CudaCall(FwdParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const Options& o, const Sizes& s) {
    uint32_t copies = 0;
    in = bind_inputs(p, aligned_rows(q, kCopiedQ, copies), aligned_rows(k, kCopiedK, copies),
                     aligned_rows(v, kCopiedV, copies), o, s);
    in.copies |= copies;
    p.head_dim = in.q.size(-1);
  }
};

void record(bool backward, const Options& o, const Tensor& q, const KernelPlan& plan, uint32_t copies) {
  LastCall call{};
  call.backward = backward;
  call.version = o.version;
  call.dtype = dtype_code(q.scalar_type());
  call.device = q.device();
  call.isa = "cuda";
  call.traffic = {-1, -1};  // nothing counts on a GPU
  call.head_dim = plan.head_dim;
  call.tile = {plan.block_m, plan.block_n};
  call.grid = plan.grid;
  call.fast_memory_bytes = plan.smem_bytes;
  call.threads = plan.threads;
  call.copies = copies;
  set_last_call(std::move(call));
}

Out2 fwd_cuda(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_OPTION_PARAMS) {
  const Options o{FLASH_OPTION_ARGS};
  const Sizes s = check_fwd(q, k, v, o);
  check_supported(o, q, s);
  const c10::cuda::CUDAGuard guard(q.device());
  const auto statistics = q.options().dtype(at::kFloat);
  Tensor lse = s.packed ? empty({s.heads, s.total_q}, statistics)
                        : empty({s.batch, s.heads, s.seqlen_q}, statistics);
  if (s.no_scores()) {
    Tensor out = empty_rows(q);
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
    record(false, o, q, KernelPlan{}, 0);
    return {out, lse};
  }
  FwdParams p{};
  const CudaCall call(p, q, k, v, o, s);
  Result out(q, p.head_dim);
  p.out = view_of(out.rows);
  p.lse = row_view_of(lse);
  const KernelPlan plan = plan_fa2_fwd(p);
  check_launch(launch_fa2_fwd(p, stream()));
  out.finish();
  record(false, o, q, plan, call.in.copies);
  return {out.result, lse};
}

Out5 bwd_cuda(const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& lse, FLASH_OPTION_PARAMS, std::array<bool, 5> output_mask) {
  const Options o{FLASH_OPTION_ARGS};
  const Sizes s = check_fwd(q, k, v, o);
  check_bwd(s, dout, dlse, q, out, lse, o, output_mask);
  check_supported(o, q, s);
  const c10::cuda::CUDAGuard guard(q.device());
  const auto not_wanted = [&] { return at::empty({0}, q.options()); };
  const bool want_dq = output_mask[0], want_dkv = output_mask[1] || output_mask[2];  // one kernel computes both of the latter
  if (s.no_scores()) {
    const auto zeros = [&](const Tensor& t, bool wanted) { return wanted ? empty_rows(t).zero_() : not_wanted(); };
    record(true, o, q, KernelPlan{}, 0);
    return {zeros(q, want_dq), zeros(k, output_mask[1]), zeros(v, output_mask[2]), not_wanted(), not_wanted()};
  }
  BwdParams p{};
  CudaCall call(p, q, k, v, o, s);
  uint32_t& copies = call.in.copies;
  const Tensor out_rows = aligned_rows(out, kCopiedOut, copies);
  const Tensor dout_rows = aligned_rows(dout, kCopiedDout, copies);
  const Tensor lse_rows = unit_stride(lse, kCopiedLse, copies);
  p.out = view_of(out_rows);
  p.dout = view_of(dout_rows);
  p.lse = row_view_of(lse_rows);
  Tensor dlse_rows;
  if (dlse) {
    dlse_rows = unit_stride(*dlse, kCopiedDlse, copies);
    p.dlse = row_view_of(dlse_rows);
  }
  const KernelPlan plan = plan_fa2_bwd(p, smem_available());

  std::optional<Result> dq, dk, dv;
  const Tensor delta = empty(lse.sizes(), lse.options());
  p.delta = row_view_of(delta);
  Tensor dq_accum, dq_turns;
  if (want_dq) {
    dq.emplace(q, p.head_dim);
    p.dq = view_of(dq->rows);
    p.dq_tiles_of_head = s.packed ? s.total_q / plan.block_m + s.batch
                                  : s.batch * ((s.seqlen_q + plan.block_m - 1) / plan.block_m);
    const int64_t tiles = s.heads * p.dq_tiles_of_head;
    dq_accum = empty({tiles, plan.block_m, plan.head_dim}, lse.options());
    p.dq_accum = dq_accum.mutable_data_ptr();
    if (o.deterministic) {
      dq_turns = empty({1 + tiles}, q.options().dtype(at::kInt));
      p.dq_turns = dq_turns.mutable_data_ptr<int32_t>();
    }
  }
  if (want_dkv) {
    dk.emplace(k, p.head_dim);
    dv.emplace(v, p.head_dim);
    p.dk = view_of(dk->rows);
    p.dv = view_of(dv->rows);
  }
  check_launch(launch_fa2_bwd(p, smem_available(), stream()));
  for (auto* result : {&dq, &dk, &dv})
    if (*result) (*result)->finish();
  record(true, o, q, plan, copies);
  return {dq ? dq->result : not_wanted(), output_mask[1] ? dk->result : not_wanted(),
          output_mask[2] ? dv->result : not_wanted(), not_wanted(), not_wanted()};
}

Tensor dropout_mask_cuda(const Tensor& seed, double dropout_p, c10::SymInt batch, c10::SymInt heads,
                         c10::SymInt seqlen_q, c10::SymInt seqlen_k) {
  const c10::cuda::CUDAGuard guard(seed.device());
  const DropoutMask call(seed, dropout_p, batch, heads, seqlen_q, seqlen_k);
  if (call.keep.numel() > 0)
    check_launch(launch_dropout_mask(call.keep_ptr(), call.seed_ptr(), dropout_p, call.batch, call.heads,
                                     call.seqlen_q, call.seqlen_k, stream()));
  return call.keep;
}

Tensor bwd_preprocess_cuda(const Tensor& dout, const Tensor& out, const OptTensor& dlse) {
  const c10::cuda::CUDAGuard guard(out.device());
  const Preprocess call(dout, out, dlse);
  if (call.delta.numel() > 0) check_launch(launch_bwd_preprocess(call.params, stream()));
  return call.delta;
}

#else

Out2 fwd_cuda(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_OPTION_PARAMS) {
  const Options o{FLASH_OPTION_ARGS};
  check_fwd(q, k, v, o);
  no_kernel(o, q, "this build is for CPU only; build where nvcc is, or move q, k and v to the CPU");
}

Out5 bwd_cuda(const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& lse, FLASH_OPTION_PARAMS, std::array<bool, 5> output_mask) {
  const Options o{FLASH_OPTION_ARGS};
  check_bwd(check_fwd(q, k, v, o), dout, dlse, q, out, lse, o, output_mask);
  no_kernel(o, q, "this build is for CPU only; build where nvcc is, or move q, k and v to the CPU");
}

#endif

}  // namespace

#ifdef FLASH_WITH_CUDA
int64_t cuda_smem_available(int64_t device) {
  c10::cuda::OptionalCUDAGuard guard;
  if (device >= 0) guard.set_index(static_cast<c10::DeviceIndex>(device));
  int bytes = 0;
  const auto error = static_cast<cudaError_t>(fa2_smem_available(&bytes));
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidPtx) {
    cudaGetLastError();  // it is answered: no later launch shall report it
    return 0;
  }
  check_launch(error);
  return bytes;
}
#endif

TORCH_LIBRARY_IMPL(flash_cuda, CUDA, m) {
  m.impl("fwd", &fwd_cuda);
  m.impl("bwd", &bwd_cuda);
#ifdef FLASH_WITH_CUDA
  m.impl("dropout_mask", &dropout_mask_cuda);
  m.impl("bwd_preprocess", &bwd_preprocess_cuda);
#endif
}

}  // namespace flash::binding
