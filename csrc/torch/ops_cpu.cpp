// The ops for CPU tensors: check, bind, plan, run, record.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "record.h"
#include "run_cpu.h"
#include "stages.h"

namespace flash::binding {

namespace {

cpu::Version cpu_version(const Options& o) {
  TORCH_CHECK(o.version <= 2, o.caller(), ": version must be 1 or 2 for tensors on the CPU, got ", o.version,
              " (fa3 is written for Hopper GPUs); pass version=\"fa2\"");
  return static_cast<cpu::Version>(o.version);
}

Tensor not_wanted(const Tensor& like) { return at::empty({0}, like.options()); }

template <class Params>
void record(bool backward, const Options& o, const Params& params, const cpu::Plan<Params>& plan,
            const RunReport& report, uint32_t copies) {
  set_last_call({backward, o.version, params.dtype, c10::kCPU, cpu::isa(), 0, plan.tile, plan.grid, plan.fast_memory_bytes,
                 report.traffic, report.threads, copies, o.dropout_p > 0 ? o.dropout_seed : std::nullopt});
}

// A call without a single score launches nothing; it is recorded like any other.
template <class Params>
void record_empty(bool backward, const Options& o, const Tensor& q) {
  Params params{};
  params.dtype = dtype_code(q.scalar_type());
  record(backward, o, params, cpu::Plan<Params>{}, RunReport{}, 0);
}

// Makes the gradients that are wanted; the others keep the shape (0,).
struct Gradients {
  Tensor dq, dk, dv, dbias, dsinks;
  bool want_dq, want_dkv;

  Gradients(const Inputs& in, const Options& o, const std::array<bool, 5>& wanted)
      : want_dq(wanted[0]), want_dkv(wanted[1] || wanted[2]) {
    dq = want_dq ? empty_rows(in.q) : not_wanted(in.q);
    // One task computes both, so both get memory when one is wanted.
    dk = want_dkv ? empty_rows(in.k) : not_wanted(in.k);
    dv = want_dkv ? empty_rows(in.v) : not_wanted(in.v);
    dbias = wanted[3] ? at::empty(o.bias->sizes(), o.bias->options()) : not_wanted(in.q);
    dsinks = wanted[4] ? at::empty(o.sinks->sizes(), in.sinks.options()) : not_wanted(in.q);
  }

  void zero() {
    for (Tensor* t : {&dq, &dk, &dv, &dbias, &dsinks}) t->zero_();
  }

  Out5 result(const Options& o, const std::array<bool, 5>& wanted) {
    return {dq, wanted[1] ? dk : not_wanted(dk), wanted[2] ? dv : not_wanted(dv), dbias,
            wanted[4] ? dsinks.to(o.sinks->scalar_type()) : dsinks};
  }
};

void bind_gradients(BwdParams& p, Gradients& g, const Options& o, const std::array<bool, 5>& wanted) {
  if (g.want_dq) p.dq = view_of(g.dq);
  if (g.want_dkv) {
    p.dk = view_of(g.dk);
    p.dv = view_of(g.dv);
  }
  if (wanted[3]) {
    p.dbias = g.dbias.mutable_data_ptr();
    for (int64_t d = 1; d <= 4; ++d) p.dbias_size[4 - d] = d <= o.bias->dim() ? o.bias->size(-d) : 1;
  }
  if (wanted[4]) p.dsinks = g.dsinks.mutable_data_ptr();
}

Out5 bwd_cpu(const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
             const Tensor& out, const Tensor& lse, FLASH_OPTION_PARAMS, std::array<bool, 5> output_mask) {
  const Options o{FLASH_OPTION_ARGS};
  const Sizes s = check_fwd(q, k, v, o);
  check_bwd(s, dout, dlse, q, out, lse, o, output_mask);
  const cpu::Version schedule = cpu_version(o);

  BwdParams p{};
  Inputs in = bind_inputs(p, q, k, v, o, s);
  Gradients g(in, o, output_mask);
  if (s.no_scores()) {
    g.zero();
    record_empty<BwdParams>(true, o, q);
    return g.result(o, output_mask);
  }
  const Tensor out_rows = unit_stride(out, kCopiedOut, in.copies);
  const Tensor lse_rows = unit_stride(lse, kCopiedLse, in.copies);
  const Tensor dout_rows = unit_stride(dout, kCopiedDout, in.copies);
  Tensor dlse_rows;
  p.out = view_of(out_rows);
  p.lse = row_view_of(lse_rows);
  p.dout = view_of(dout_rows);
  if (dlse) {
    dlse_rows = unit_stride(*dlse, kCopiedDlse, in.copies);
    p.dlse = row_view_of(dlse_rows);
  }
  bind_gradients(p, g, o, output_mask);
  const cpu::Plan<BwdParams> plan = cpu::plan_bwd(schedule, p, cpu_fast_memory(), at::get_num_threads());
  const Tensor delta = at::empty(lse.sizes(), lse.options());
  p.delta = row_view_of(delta);
  const Tensor dq_accum = at::empty({static_cast<int64_t>(plan.dq_accum_bytes)}, q.options().dtype(at::kByte));
  p.dq_accum = plan.dq_accum_bytes > 0 ? dq_accum.mutable_data_ptr() : nullptr;
  const RunReport report = run_phases(plan, p);
  record(true, o, p, plan, report, in.copies);
  return g.result(o, output_mask);
}

// One call per (batch, head) pair, on all threads.
template <class Body>
void for_each_head(int64_t pairs, const Body& body) {
  at::parallel_for(0, pairs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t bh = begin; bh < end; ++bh) body(bh);
  });
}

Tensor dropout_mask_cpu(const Tensor& seed, double dropout_p, c10::SymInt batch, c10::SymInt heads,
                        c10::SymInt seqlen_q, c10::SymInt seqlen_k) {
  const DropoutMask call(seed, dropout_p, batch, heads, seqlen_q, seqlen_k);
  for_each_head(call.batch * call.heads, [&](int64_t bh) {
    cpu::dropout_mask(call.keep_ptr(), call.seed_ptr(), dropout_p, bh, call.seqlen_q, call.seqlen_k);
  });
  return call.keep;
}

Tensor bwd_preprocess_cpu(const Tensor& dout, const Tensor& out, const OptTensor& dlse) {
  const Preprocess call(dout, out, dlse);
  for_each_head(call.params.batch * call.params.heads, [&](int64_t bh) { cpu::bwd_preprocess(call.params, bh); });
  return call.delta;
}

}  // namespace

Out2 fwd_cpu(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_OPTION_PARAMS) {
  const Options o{FLASH_OPTION_ARGS};
  const Sizes s = check_fwd(q, k, v, o);
  const cpu::Version schedule = cpu_version(o);
  FwdParams p{};
  const Inputs in = bind_inputs(p, q, k, v, o, s);
  Tensor out = empty_rows(in.q);
  const auto statistics = q.options().dtype(accumulation_type(q.scalar_type()));
  Tensor lse = s.packed ? at::empty({s.heads, s.total_q}, statistics)
                        : at::empty({s.batch, s.heads, s.seqlen_q}, statistics);
  if (s.no_scores()) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    record_empty<FwdParams>(false, o, q);
    return {out, lse};
  }
  p.out = view_of(out);
  p.lse = row_view_of(lse);
  const cpu::Plan<FwdParams> plan = cpu::plan_fwd(schedule, p, cpu_fast_memory());
  const RunReport report = run_phases(plan, p);
  record(false, o, p, plan, report, in.copies);
  return {out, lse};
}

TORCH_LIBRARY_IMPL(flash_cuda, CPU, m) {
  m.impl("fwd", &fwd_cpu);
  m.impl("bwd", &bwd_cpu);
  m.impl("dropout_mask", &dropout_mask_cpu);
  m.impl("bwd_preprocess", &bwd_preprocess_cpu);
}

}  // namespace flash::binding
