// The Python module flash_cuda._C: the typed fast path of attention, and what Python asks of the build.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include <chrono>
#include <sstream>
#include <string>
#include <vector>

#include "params.h"
#include "record.h"

#ifndef FLASH_TORCH_VERSION_BUILT
#define FLASH_TORCH_VERSION_BUILT TORCH_VERSION
#endif
#ifndef FLASH_CUDA_ARCHS_BUILT
#define FLASH_CUDA_ARCHS_BUILT ""
#endif
#ifndef FLASH_CUDA_WHY
#define FLASH_CUDA_WHY ""
#endif

// FLASH_OPTION_PARAMS with plain integers: Python's numbers are not symbolic here, and SymInt is slower to convert.
#define PLAIN_OPTION_PARAMS                                                                                            \
  std::optional<double> softmax_scale, int64_t causal, int64_t window_left, int64_t window_right, double softcap,      \
      int64_t version, int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p, const OptTensor &dropout_seed,    \
      const OptTensor &cu_seqlens_q, const OptTensor &cu_seqlens_k, const OptTensor &bias,                             \
      const OptTensor &alibi_slopes, const OptTensor &sinks, const OptTensor &block_mask, int64_t block_mask_q,        \
      int64_t block_mask_k, bool deterministic

namespace py = pybind11;

namespace flash::binding {

namespace {

// NOTE: flash_cuda/__init__.py reads this text out of the file when the module was built for another torch and cannot
// be loaded, so it must stay in the binary in one piece.
constexpr const char* kBuiltFor = "flash_cuda-built-for-torch=" FLASH_TORCH_VERSION_BUILT;

#ifdef FLASH_WITH_CUDA
constexpr bool kCudaBuilt = true;
#else
constexpr bool kCudaBuilt = false;
#endif

const char* dtype_tag(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "fp32";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat16: return "fp16";
    case DType::kFloat64: return "fp64";
    default: return "bool";
  }
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// A full call through the dispatcher (autograd, autocast, fake tensors), without the boxing of torch.ops.
Out2 forward(const Tensor& q, const Tensor& k, const Tensor& v, PLAIN_OPTION_PARAMS) {
  return call_fwd(q, k, v, Options{FLASH_OPTION_ARGS});
}

// Seconds that n calls of the kernel take, without Python and the dispatcher: what host time is measured against.
double time_forward(const Tensor& q, const Tensor& k, const Tensor& v, int64_t n) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < n; ++i)
    fwd_cpu(q, k, v, std::nullopt, 0, -1, -1, 0.0, 2, 0, 0, 0.0, {}, {}, {}, {}, {}, {}, {}, 0, 0, false);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

py::object last_call_dict() {
  const auto call = last_call();
  if (!call) return py::none();
  const std::string version = "fa" + std::to_string(call->version);
  py::list copies;
  for (size_t i = 0; i < std::size(kCopiedNames); ++i)
    if (call->copies >> i & 1) copies.append(kCopiedNames[i]);
  py::dict d;
  d["pass_"] = call->backward ? "backward" : "forward";
  d["version"] = version;
  const std::string where = call->device.is_cpu() ? std::string("cpu_") + call->isa : "cuda";
  d["kernel"] = version + (call->backward ? "_bwd_" : "_fwd_") + where + "_" + dtype_tag(call->dtype) +
                (call->head_dim > 0 ? "_hd" + std::to_string(call->head_dim) : "");
  d["device"] = call->device.str();
  d["isa"] = call->isa;
  d["tile"] = py::make_tuple(call->tile.block_m, call->tile.block_n);
  d["grid"] = call->grid;
  d["fast_memory_bytes"] = call->fast_memory_bytes;
  const auto counted = [](int64_t bytes) { return bytes < 0 ? std::nullopt : std::optional<int64_t>(bytes); };
  d["bytes_loaded"] = counted(call->traffic.loaded);
  d["bytes_stored"] = counted(call->traffic.stored);
  d["copies"] = py::tuple(copies);
  d["threads"] = call->threads;
  d["dropout_seed"] = call->dropout_seed;
  return d;
}

// The sizes of a call, after every check that the call itself would make; nothing runs.
py::dict check(const Tensor& q, const Tensor& k, const Tensor& v, PLAIN_OPTION_PARAMS) {
  const Sizes s = check_fwd(q, k, v, Options{FLASH_OPTION_ARGS});
  py::dict d;
  d["packed"] = s.packed;
  d["batch"] = s.batch;
  d["heads"] = s.heads;
  d["heads_kv"] = s.heads_kv;
  d["head_dim"] = s.head_dim;
  d["seqlen_q"] = s.seqlen_q;
  d["seqlen_k"] = s.seqlen_k;
  d["total_q"] = s.total_q;
  d["total_k"] = s.total_k;
  d["softmax_scale"] = s.softmax_scale;
  return d;
}

py::dict build_info() {
  py::dict d;
  d["torch"] = std::string(kBuiltFor).substr(std::string(kBuiltFor).find('=') + 1);
  d["cuda"] = kCudaBuilt;
  d["cuda_archs"] = split(FLASH_CUDA_ARCHS_BUILT, ';');
  d["cuda_why"] = FLASH_CUDA_WHY;
  d["compiler"] = __VERSION__;
  return d;
}

int64_t checked_fast_memory(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes > 0, "flash_cuda.set_cpu_fast_memory: bytes must be positive, got ", bytes,
                    "; pass the size of a core's cache");
  return bytes;
}

// A pointer that is not null, which is all that a plan asks of it.
template <class T>
T* present(bool given) {
  return given ? reinterpret_cast<T*>(uintptr_t{64}) : nullptr;
}

template <class Params>
py::dict plan_dict(const cpu::Plan<Params>& plan) {
  py::list tasks;
  for (int32_t i = 0; i < plan.phase_count; ++i) tasks.append(plan.phases[i].tasks);
  py::dict d;
  d["tile"] = py::make_tuple(plan.tile.block_m, plan.tile.block_n);
  d["grid"] = plan.grid;
  d["fast_memory_bytes"] = plan.fast_memory_bytes;
  d["splits"] = plan.tile.splits;
  d["dq_accum_bytes"] = plan.dq_accum_bytes;
  d["phase_tasks"] = py::tuple(tasks);
  return d;
}

void set_sizes(Problem& p, int64_t batch, int64_t heads, int64_t heads_kv, int64_t head_dim, int64_t seqlen_q,
               int64_t seqlen_k) {
  p.batch = batch;
  p.heads = heads;
  p.heads_kv = heads_kv;
  p.head_dim = head_dim;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
}

// The plan that a call with these sizes would run, without any tensor.
py::dict cpu_plan(const std::string& pass, int64_t version, at::ScalarType dtype, int64_t batch, int64_t heads,
                  int64_t heads_kv, int64_t head_dim, int64_t seqlen_q, int64_t seqlen_k, int64_t block_mask_q,
                  int64_t block_mask_k, int64_t causal, int64_t window_left, int64_t window_right,
                  bool bias, bool sinks, bool dlse, bool dq, bool dkv, bool dbias, bool dsinks,
                  std::optional<int64_t> fast_memory, std::optional<int64_t> threads) {
  TORCH_CHECK_VALUE(pass == "forward" || pass == "backward", "flash_cuda._C.cpu_plan: pass_ must be \"forward\" or ",
                    "\"backward\", got \"", pass, "\"");
  TORCH_CHECK_VALUE(version == 1 || version == 2, "flash_cuda._C.cpu_plan: version must be 1 or 2, got ", version);
  TORCH_CHECK_VALUE(batch > 0 && heads > 0 && heads_kv > 0 && head_dim > 0 && seqlen_q > 0 && seqlen_k > 0,
                    "flash_cuda._C.cpu_plan: every size must be positive; an empty call runs no kernel");
  BwdParams p{};
  set_sizes(p, batch, heads, heads_kv, head_dim, seqlen_q, seqlen_k);
  p.dtype = dtype_code(dtype);
  p.causal = static_cast<Causal>(causal);
  p.window_left = window_left;
  p.window_right = window_right;
  p.block_mask = present<const uint8_t>(block_mask_q > 0);
  p.block_mask_q = block_mask_q;
  p.block_mask_k = block_mask_k;
  p.bias = present<const void>(bias);
  p.sinks = present<const void>(sinks);
  p.q.ptr = p.k.ptr = p.v.ptr = p.out.ptr = p.lse.ptr = present<void>(true);
  const int64_t budget = checked_fast_memory(fast_memory.value_or(cpu_fast_memory()));
  const auto schedule = static_cast<cpu::Version>(version);
  if (pass == "forward") return plan_dict(cpu::plan_fwd(schedule, p, budget));
  p.dout.ptr = present<void>(true);
  p.dlse.ptr = present<void>(dlse);
  p.dq.ptr = present<void>(dq);
  p.dk.ptr = p.dv.ptr = present<void>(dkv);
  p.dbias = present<void>(dbias);
  p.dsinks = present<void>(dsinks);
  return plan_dict(cpu::plan_bwd(schedule, p, budget, static_cast<int>(threads.value_or(at::get_num_threads()))));
}

// Shared memory that a CTA of this build's kernels may have on a CUDA device; 0 where no code of it runs.
int64_t smem_available(int64_t device) {
#ifdef FLASH_WITH_CUDA
  return cuda_smem_available(device);
#else
  TORCH_CHECK(false, "flash_cuda._C.cuda_smem_available: this build is for CPU only");
#endif
}

// What a CUDA kernel of fa2 will take for these sizes, where a CTA may have `smem_available` bytes of shared memory.
py::dict cuda_plan(const std::string& pass, int64_t batch, int64_t heads, int64_t heads_kv, int64_t head_dim,
                   int64_t seqlen_q, int64_t seqlen_k, int64_t smem_available) {
  TORCH_CHECK_VALUE(pass == "forward" || pass == "backward", "flash_cuda._C.cuda_plan: pass_ must be \"forward\" or ",
                    "\"backward\", got \"", pass, "\"");
  py::dict d;
#ifdef FLASH_WITH_CUDA
  Problem p{};
  set_sizes(p, batch, heads, heads_kv, head_dim, seqlen_q, seqlen_k);
  const KernelPlan plan = pass == "forward" ? plan_fa2_fwd(p) : plan_fa2_bwd(p, static_cast<int>(smem_available));
  d["head_dim"] = plan.head_dim;
  d["tile"] = py::make_tuple(plan.block_m, plan.block_n);
  d["threads"] = plan.threads;
  d["smem_bytes"] = plan.smem_bytes;
  d["grid"] = plan.grid;
#else
  TORCH_CHECK(false, "flash_cuda._C.cuda_plan: this build is for CPU only");
#endif
  return d;
}

}  // namespace

}  // namespace flash::binding

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flash::binding;
  using py::arg;
  m.def("forward", &forward, py::call_guard<py::gil_scoped_release>());
  m.def("check", &check);
  m.def("time_forward", &time_forward, py::call_guard<py::gil_scoped_release>());
  m.def("last_call", &last_call_dict);
  m.def("build_info", &build_info);
  m.def("cuda_built", [] { return kCudaBuilt; });
  m.def("cuda_archs", [] { return split(FLASH_CUDA_ARCHS_BUILT, ';'); });
  m.def("cpu_isa", [] { return std::string(flash::cpu::isa()); });
  m.def("cpu_isas", [] { return split(flash::cpu::isa_supported(), ','); });
  m.def("set_cpu_isa", [](const std::string& name) {
    TORCH_CHECK_VALUE(flash::cpu::set_isa(name.c_str()), "flash_cuda.set_cpu_isa: name must be one of ",
                      flash::cpu::isa_supported(), ", got ", name, "; pass one of them");
  });
  m.def("cpu_fast_memory", &cpu_fast_memory);
  m.def("set_cpu_fast_memory", [](int64_t bytes) { return set_cpu_fast_memory(checked_fast_memory(bytes)); });
  m.def("cpu_plan", &cpu_plan, arg("pass_"), arg("version"), arg("dtype"), arg("batch"), arg("heads"), arg("heads_kv"),
        arg("head_dim"), arg("seqlen_q"), arg("seqlen_k"), arg("block_mask_q") = 0, arg("block_mask_k") = 0,
        arg("causal") = 0, arg("window_left") = -1, arg("window_right") = -1,
        arg("bias") = false, arg("sinks") = false, arg("dlse") = false, arg("dq") = true, arg("dkv") = true,
        arg("dbias") = false, arg("dsinks") = false, arg("fast_memory") = py::none(), arg("threads") = py::none());
  m.def("cuda_smem_available", &smem_available, arg("device") = -1);
  m.def("cuda_plan", &cuda_plan, arg("pass_"), arg("batch") = 1, arg("heads") = 1, arg("heads_kv") = 1,
        arg("head_dim") = 64, arg("seqlen_q") = 1, arg("seqlen_k") = 1, arg("smem_available") = 0);
}
