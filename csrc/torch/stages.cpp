#include "stages.h"

#include <ATen/ops/empty.h>

#include "record.h"

#define REQUIRE(cond, ...) TORCH_CHECK_VALUE(cond, caller, ": ", __VA_ARGS__)
#define REQUIRE_TYPE(cond, ...) TORCH_CHECK_TYPE(cond, caller, ": ", __VA_ARGS__)

namespace flash::binding {

namespace {

int64_t size_argument(const char* name, const c10::SymInt& value) {
  const char* caller = "flash_cuda.dropout_mask";
  const int64_t size = value.guard_int(__FILE__, __LINE__);
  REQUIRE(size >= 0, name, " must not be negative, got ", size, "; pass a size");
  return size;
}

}  // namespace

DropoutMask::DropoutMask(const Tensor& seed_words, double dropout_p, const c10::SymInt& b, const c10::SymInt& h,
                         const c10::SymInt& rows, const c10::SymInt& cols)
    : batch(size_argument("batch", b)),
      heads(size_argument("heads", h)),
      seqlen_q(size_argument("seqlen_q", rows)),
      seqlen_k(size_argument("seqlen_k", cols)) {
  check_dropout("flash_cuda.dropout_mask", dropout_p, seed_words, seed_words.device(), "seed");
  seed = seed_words.contiguous();
  keep = at::empty({batch, heads, seqlen_q, seqlen_k}, seed.options().dtype(at::kBool));
}

Preprocess::Preprocess(const Tensor& dout_in, const Tensor& out_in, const OptTensor& dlse_in) {
  const char* caller = "flash_cuda.bwd_preprocess";
  REQUIRE(out_in.dim() == 3 || out_in.dim() == 4, "out must have 3 or 4 dimensions, got ", out_in.dim(), " ",
          shape_of(out_in), "; pass what forward returned");
  REQUIRE_TYPE(is_supported_float(out_in), "out must be float32, bfloat16, float16 or float64, got ", dtype_of(out_in),
               "; pass what forward returned");
  REQUIRE(dout_in.sizes() == out_in.sizes(), "dout must have the shape of out, ", shape_of(out_in), ", got ",
          shape_of(dout_in), "; pass the gradient of out");
  REQUIRE_TYPE(dout_in.scalar_type() == out_in.scalar_type(), "dout must have the dtype of out, ", dtype_of(out_in),
               ", got ", dtype_of(dout_in), "; convert it with .to()");
  REQUIRE(dout_in.device() == out_in.device(), "dout must be on ", out_in.device(), " like out, got ",
          dout_in.device(), "; move it with .to(out.device)");
  const bool packed = out_in.dim() == 3;
  const auto statistics = out_in.options().dtype(accumulation_type(out_in.scalar_type()));
  const int64_t heads = out_in.size(-2), rows = out_in.size(-3);
  delta = packed ? at::empty({heads, rows}, statistics) : at::empty({out_in.size(0), heads, rows}, statistics);
  uint32_t copies = 0;
  out = unit_stride(out_in, kCopiedOut, copies);
  dout = unit_stride(dout_in, kCopiedDout, copies);
  if (dlse_in) {
    REQUIRE(dlse_in->sizes() == delta.sizes(), "dlse must have shape ", shape_of(delta), ", got ", shape_of(*dlse_in),
            "; pass the gradient of LSE");
    REQUIRE_TYPE(dlse_in->scalar_type() == delta.scalar_type(), "dlse must be ", dtype_of(delta), ", got ",
                 dtype_of(*dlse_in), "; convert it with .to()");
    REQUIRE(dlse_in->device() == out_in.device(), "dlse must be on ", out_in.device(), " like out, got ",
            dlse_in->device(), "; move it with .to(out.device)");
    dlse = unit_stride(*dlse_in, kCopiedDlse, copies);
    params.dlse = row_view_of(dlse);
  }
  params.batch = packed ? 1 : out_in.size(0);
  params.heads = params.heads_kv = heads;
  params.head_dim = out_in.size(-1);
  params.seqlen_q = rows;
  params.dtype = dtype_code(out_in.scalar_type());
  params.out = view_of(out);
  params.dout = view_of(dout);
  params.delta = row_view_of(delta);
}

}  // namespace flash::binding
