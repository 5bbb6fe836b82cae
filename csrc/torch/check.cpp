#include "check.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "../flash.h"

// `caller` is in scope wherever these are used.
#define REQUIRE(cond, ...) TORCH_CHECK_VALUE(cond, caller, ": ", __VA_ARGS__)
#define REQUIRE_TYPE(cond, ...) TORCH_CHECK_TYPE(cond, caller, ": ", __VA_ARGS__)

namespace flash::binding {

namespace {

std::string dtype_name(at::ScalarType type) { return c10::str("torch.", c10::getDtypeNames(type).first); }

void check_device(const char* caller, const char* name, const Tensor& t, c10::Device device) {
  REQUIRE(t.device() == device, name, " must be on ", device, " like q, got ", t.device(),
          "; move it with .to(q.device)");
}

void check_tensors(const char* caller, const Tensor& q, const Tensor& k, const Tensor& v, bool packed) {
  const int64_t dims = packed ? 3 : 4;
  auto check_rank = [&](const char* name, const Tensor& t, const char* length) {
    REQUIRE(t.dim() == dims, name, " must have ", dims, " dimensions (", packed ? "total_" : "batch, seqlen_", length,
            ", heads, head_dim), got ", t.dim(), " ", shape_of(t), "; ",
            t.dim() < dims ? "add the missing one" : "flatten or split it");
  };
  check_rank("q", q, "q");
  check_rank("k", k, "k");
  check_rank("v", v, "k");
  REQUIRE_TYPE(is_supported_float(q), "q must be float32, bfloat16, float16 or float64, got ", dtype_of(q),
               "; convert q, k and v with .to()");
  REQUIRE_TYPE(k.scalar_type() == q.scalar_type(), "k must have the dtype of q, ", dtype_of(q), ", got ", dtype_of(k),
               "; convert it with k.to(q.dtype)");
  REQUIRE_TYPE(v.scalar_type() == q.scalar_type(), "v must have the dtype of q, ", dtype_of(q), ", got ", dtype_of(v),
               "; convert it with v.to(q.dtype)");
  check_device(caller, "k", k, q.device());
  check_device(caller, "v", v, q.device());
}

void check_sizes(const char* caller, const Sizes& s, const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!s.packed)
    REQUIRE(k.size(0) == s.batch, "k must have the batch size of q, ", s.batch, ", got ", k.size(0),
            "; expand or slice one of them");
  REQUIRE(k.size(-1) == s.head_dim, "k must have the head_dim of q, ", s.head_dim, ", got ", k.size(-1),
          "; pad the smaller one with zeros");
  // Named one by one: a whole shape would read wrong to who passed layout="bhsd".
  auto check_same = [&](int64_t dim, const char* what) {
    REQUIRE(v.size(dim) == k.size(dim), "v must have the ", what, " of k, ", k.size(dim), ", got ", v.size(dim),
            "; pass the values that belong to these keys");
  };
  if (!s.packed) check_same(-4, "batch size");
  check_same(-3, s.packed ? "rows" : "seqlen_k");
  check_same(-2, "heads");
  check_same(-1, "head_dim");
  REQUIRE(s.heads_kv == 0 ? s.heads == 0 : s.heads % s.heads_kv == 0,
          "the heads of q must be a multiple of the heads of k, ", s.heads_kv, ", got ", s.heads,
          "; if heads and sequence are swapped, see the argument layout");
  REQUIRE(s.head_dim > 0 || q.numel() + s.total_q + s.total_k == 0, "q must have a head_dim of at least 1, got 0",
          "; drop the empty call");
}

void check_scalars(const char* caller, const Options& o, const Sizes& s, at::ScalarType dtype) {
  // As the kernels will see it: float32 has no 1e39, and its 1e-50 is 0, which would turn a cap off.
  const auto seen = [dtype](double x) { return dtype == at::kDouble ? x : static_cast<double>(static_cast<float>(x)); };
  const auto note = [&](double x) { return std::isfinite(x) && x > 0 ? c10::str(" (", seen(x), " in float32)") : ""; };
  REQUIRE(!o.softmax_scale || (std::isfinite(seen(*o.softmax_scale)) && *o.softmax_scale >= 0),
          "softmax_scale must be finite and not negative, got ", *o.softmax_scale, note(*o.softmax_scale),
          "; pass None for 1 / sqrt(head_dim)");
  REQUIRE(std::isfinite(seen(o.softcap)) && o.softcap >= 0 && (o.softcap == 0 || seen(o.softcap) > 0),
          "softcap must be finite and not negative, got ", o.softcap, note(o.softcap), "; 0.0 turns it off");
  REQUIRE(o.causal >= 0 && o.causal <= 2, "causal must be 0 (off), 1 (bottom right) or 2 (top left), got ", o.causal,
          "; pass one of them");
  REQUIRE(o.version >= 1 && o.version <= 3, "version must be 1, 2 or 3, got ", o.version,
          "; pass one of them");
  REQUIRE(s.window_left >= -1 && s.window_right >= -1, "window_size must not be negative, got (", s.window_left, ", ",
          s.window_right, "); None leaves a side unbounded");
}

// cu_seqlens[0 .. batch] of a packed tensor with `total` rows whose longest sequence may have `longest` rows.
void check_cu_seqlens(const char* caller, const char* side, const Tensor& cu, int64_t batch, int64_t total,
                      int64_t longest, c10::Device device) {
  REQUIRE_TYPE(cu.scalar_type() == at::kInt, "cu_seqlens_", side, " must be torch.int32, got ", dtype_of(cu),
               "; convert it with .to(torch.int32)");
  REQUIRE(cu.dim() == 1 && cu.size(0) == batch + 1, "cu_seqlens_", side,
          " must be a 1-D tensor of batch + 1 offsets like cu_seqlens_q, got shape ", shape_of(cu),
          "; pass the cumulated lengths with a leading 0");
  REQUIRE(longest >= 0, "max_seqlen_", side, " must not be negative, got ", longest, "; pass the longest length");
  check_device(caller, side[0] == 'q' ? "cu_seqlens_q" : "cu_seqlens_k", cu, device);
  if (!device.is_cpu()) return;  // reading them would wait for the device
  const int32_t* offsets = cu.const_data_ptr<int32_t>();
  const int64_t stride = cu.stride(0);
  REQUIRE(offsets[0] == 0, "cu_seqlens_", side, " must start at 0, got ", offsets[0],
          "; pass the cumulated lengths with a leading 0");
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t begin = offsets[i * stride], end = offsets[(i + 1) * stride];
    REQUIRE(end >= begin, "cu_seqlens_", side, " must not decrease, got ", end, " after ", begin, " at index ", i + 1,
            "; pass the cumulated lengths");
    REQUIRE(end - begin <= longest, "max_seqlen_", side, " must be at least the longest sequence, ", end - begin,
            ", got ", longest, "; pass the longest length");
  }
  REQUIRE(offsets[batch * stride] == total, "cu_seqlens_", side, " must end at the rows of ", side, ", ", total,
          ", got ", offsets[batch * stride], "; slice ", side, " or append the missing lengths");
}

void check_bias(const char* caller, const Tensor& bias, const Sizes& s, c10::Device device) {
  REQUIRE_TYPE(is_supported_float(bias) || bias.scalar_type() == at::kBool,
               "bias must be a float tensor (added to the scores) or torch.bool (True: visible), got ", dtype_of(bias),
               "; convert it with .bool() or .float()");
  check_device(caller, "bias", bias, device);
  const int64_t full[4] = {s.batch, s.heads, s.seqlen_q, s.seqlen_k};
  bool fits = bias.dim() <= 4;
  for (int64_t d = 1; fits && d <= bias.dim(); ++d) fits = bias.size(-d) == 1 || bias.size(-d) == full[4 - d];
  REQUIRE(fits, "bias must broadcast to (batch, heads, ",
          s.packed ? "max_seqlen_q, max_seqlen_k" : "seqlen_q, seqlen_k", ") = (", full[0], ", ", full[1], ", ",
          full[2], ", ", full[3], "), got ", shape_of(bias), "; unsqueeze or slice it");
}

void check_head_vectors(const char* caller, const Options& o, const Sizes& s, c10::Device device) {
  if (o.alibi_slopes) {
    const Tensor& slopes = *o.alibi_slopes;
    REQUIRE_TYPE(is_supported_float(slopes), "alibi_slopes must be a float tensor, got ", dtype_of(slopes),
                 "; convert it with .float()");
    check_device(caller, "alibi_slopes", slopes, device);
    const bool per_head = slopes.dim() == 1 && slopes.size(0) == s.heads;
    const bool per_batch = slopes.dim() == 2 && slopes.size(0) == s.batch && slopes.size(1) == s.heads;
    REQUIRE(per_head || per_batch, "alibi_slopes must be (heads,) or (batch, heads) = (", s.batch, ", ", s.heads,
            "), got ", shape_of(slopes), "; give one slope per head of q");
  }
  if (o.sinks) {
    REQUIRE_TYPE(is_supported_float(*o.sinks), "sinks must be a float tensor, got ", dtype_of(*o.sinks),
                 "; convert it with .float()");
    check_device(caller, "sinks", *o.sinks, device);
    REQUIRE(o.sinks->dim() == 1 && o.sinks->size(0) == s.heads, "sinks must be (heads,) = (", s.heads, "), got ",
            shape_of(*o.sinks), "; give one sink per head of q");
  }
}

void check_block_mask(const char* caller, const Options& o, const Sizes& s, c10::Device device) {
  const Tensor& mask = *o.block_mask;
  REQUIRE_TYPE(mask.scalar_type() == at::kBool, "block_mask must be torch.bool, got ", dtype_of(mask),
               "; convert it with .bool()");
  check_device(caller, "block_mask", mask, device);
  REQUIRE(o.block_mask_q > 0 && o.block_mask_k > 0, "block_mask must have a block_size of at least (1, 1), got (",
          o.block_mask_q, ", ", o.block_mask_k, "); build it with flash_cuda.BlockMask");
  const int64_t rows = (s.seqlen_q + o.block_mask_q - 1) / o.block_mask_q;
  const int64_t cols = (s.seqlen_k + o.block_mask_k - 1) / o.block_mask_k;
  REQUIRE(mask.dim() == 4 && (mask.size(0) == 1 || mask.size(0) == s.batch) &&
              (mask.size(1) == 1 || mask.size(1) == s.heads) && mask.size(2) == rows && mask.size(3) == cols,
          "block_mask must have blocks of shape (batch or 1, heads or 1, query blocks, key blocks) = (", s.batch, ", ",
          s.heads, ", ", rows, ", ", cols, ") for blocks of ", o.block_mask_q, " x ", o.block_mask_k, ", got ",
          shape_of(mask), "; build it for these lengths");
}

}  // namespace

std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << "(";
  for (int64_t d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.size(d);
  text << ")";
  return text.str();
}

bool is_supported_float(const Tensor& t) {
  const auto type = t.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

std::string dtype_of(const Tensor& t) { return dtype_name(t.scalar_type()); }

at::ScalarType accumulation_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

void check_dropout(const char* caller, double dropout_p, const OptTensor& seed, c10::Device device, const char* name) {
  REQUIRE(dropout_p >= 0 && dropout_p < 1, "dropout_p must be in [0, 1), got ", dropout_p, "; 0.0 turns it off");
  if (!seed) {
    REQUIRE(dropout_p == 0, name, " must be given when dropout_p is not 0, got None; draw two int64");
    return;
  }
  REQUIRE_TYPE(seed->scalar_type() == at::kLong, name, " must be torch.int64, got ", dtype_of(*seed),
               "; draw it with torch.randint(-2**63, 2**63 - 1, (2,))");
  REQUIRE(seed->dim() == 1 && seed->size(0) == 2, name, " must have shape (2), got ", shape_of(*seed),
          "; draw two int64");
  check_device(caller, name, *seed, device);
}

Sizes check_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
  const char* caller = o.caller();
  Sizes s{};
  s.packed = o.packed();
  check_tensors(caller, q, k, v, s.packed);
  s.heads = q.size(-2);
  s.heads_kv = k.size(-2);
  s.head_dim = q.size(-1);
  if (s.packed) {
    REQUIRE(o.cu_seqlens_q, "cu_seqlens_q must be given with cu_seqlens_k, got None; pass both");
    REQUIRE(o.cu_seqlens_k, "cu_seqlens_k must be given with cu_seqlens_q, got None; pass both");
    s.batch = o.cu_seqlens_q->dim() == 1 ? o.cu_seqlens_q->size(0) - 1 : 0;
    REQUIRE(s.batch >= 0, "cu_seqlens_q must hold batch + 1 offsets, got none; pass a leading 0");
    s.seqlen_q = o.max_seqlen_q.guard_int(__FILE__, __LINE__);
    s.seqlen_k = o.max_seqlen_k.guard_int(__FILE__, __LINE__);
    s.total_q = q.size(0);
    s.total_k = k.size(0);
  } else {
    s.batch = q.size(0);
    s.seqlen_q = q.size(1);
    s.seqlen_k = k.size(1);
    s.total_q = s.batch * s.seqlen_q;
    s.total_k = s.batch * s.seqlen_k;
  }
  check_sizes(caller, s, q, k, v);
  if (s.packed) {
    check_cu_seqlens(caller, "q", *o.cu_seqlens_q, s.batch, s.total_q, s.seqlen_q, q.device());
    check_cu_seqlens(caller, "k", *o.cu_seqlens_k, s.batch, s.total_k, s.seqlen_k, q.device());
  }
  s.window_left = o.window_left.guard_int(__FILE__, __LINE__);
  s.window_right = o.window_right.guard_int(__FILE__, __LINE__);
  check_scalars(caller, o, s, q.scalar_type());
  s.softmax_scale = o.softmax_scale ? *o.softmax_scale : 1.0 / std::sqrt(static_cast<double>(s.head_dim));
  check_dropout(caller, o.dropout_p, o.dropout_seed, q.device());
  if (o.bias) check_bias(caller, *o.bias, s, q.device());
  check_head_vectors(caller, o, s, q.device());
  if (o.block_mask) check_block_mask(caller, o, s, q.device());
  if (s.packed) {  // "or more" may be far more than there is: no sequence is longer than all of them together
    s.seqlen_q = std::min(s.seqlen_q, s.total_q);
    s.seqlen_k = std::min(s.seqlen_k, s.total_k);
  }
  return s;
}

void check_bwd(const Sizes& s, const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& out,
               const Tensor& lse, const Options& o, const std::array<bool, 5>& output_mask) {
  const char* caller = o.caller();
  auto check_like = [&](const char* name, const Tensor& t, const char* of, const Tensor& like) {
    REQUIRE(t.sizes() == like.sizes(), name, " must have the shape of ", of, ", ", shape_of(like), ", got ",
            shape_of(t), "; pass what forward returned or received");
    REQUIRE_TYPE(t.scalar_type() == like.scalar_type(), name, " must have the dtype of ", of, ", ", dtype_of(like),
                 ", got ", dtype_of(t), "; convert it with .to()");
    check_device(caller, name, t, q.device());
  };
  check_like("out", out, "q", q);
  check_like("dout", dout, "q", q);
  const auto statistics = accumulation_type(q.scalar_type());
  REQUIRE_TYPE(lse.scalar_type() == statistics, "lse must be ", dtype_name(statistics), ", got ", dtype_of(lse),
               "; pass what forward returned");
  const bool shaped = s.packed ? lse.dim() == 2 && lse.size(0) == s.heads && lse.size(1) == s.total_q
                               : lse.dim() == 3 && lse.size(0) == s.batch && lse.size(1) == s.heads &&
                                     lse.size(2) == s.seqlen_q;
  REQUIRE(shaped, "lse must have shape ", s.packed ? "(heads, total_q)" : "(batch, heads, seqlen_q)", ", got ",
          shape_of(lse), "; pass what forward returned");
  check_device(caller, "lse", lse, q.device());
  if (dlse) check_like("dlse", *dlse, "lse", lse);
  REQUIRE(!output_mask[3] || (o.bias && o.bias->scalar_type() != at::kBool),
          "output_mask must ask for dbias only with a float bias, got ", o.bias ? "a bool one" : "None",
          "; pass False");
  REQUIRE(!output_mask[4] || o.sinks, "output_mask must ask for dsinks only with sinks, got None; pass False");
}

}  // namespace flash::binding
