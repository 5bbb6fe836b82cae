// The gradient of the bias, summed over the dimensions that it is broadcast along. A pass of its own: a task owns one
// tile of dBias and recomputes dS for every (batch, head, query tile, key tile) that the tile stands for. That costs two
// more products for those who ask for it, and needs neither atomics nor memory that grows with heads.
#include "bwd_tile.h"
#include "isa.h"

namespace flash::cpu::FLASH_ISA {
namespace {

// The tiles of dBias along one dimension, and what one of them stands for.
struct BiasAxis {
  int64_t size;   // of dBias; 1: broadcast
  int64_t block;  // 1 along batch and heads
  int64_t full;   // how many indices or tiles the scores have along it
  int64_t tiles() const { return size == 1 ? 1 : ceil_div(size, block); }
  Range members(int64_t tile) const { return size == 1 ? Range{0, full} : Range{tile, tile + 1}; }
};

template <class T, Version kVersion>
void bias_task(const BwdParams& p, Tile tile, int64_t task, void* scratch, Traffic& traffic) {
  using A = Accum<T>;
  const BiasAxis axis[4] = {{p.dbias_size[0], 1, p.batch},
                            {p.dbias_size[1], 1, p.heads},
                            {p.dbias_size[2], tile.block_m, ceil_div(p.seqlen_q, tile.block_m)},
                            {p.dbias_size[3], tile.block_n, ceil_div(p.seqlen_k, tile.block_n)}};
  int64_t at[4];
  for (int a = 3; a >= 0; --a) at[a] = task % axis[a].tiles(), task /= axis[a].tiles();

  Arena arena{static_cast<char*>(scratch)};
  BwdBuffers<T> b(arena, p, tile);
  A* sum = arena.take<A>(tile.block_m * b.s_stride);
  const bool one_row = p.dbias_size[2] == 1, one_col = p.dbias_size[3] == 1;
  const Range out_rows = elements_of(at[2], axis[2].block, p.dbias_size[2]);
  const Range out_cols = elements_of(at[3], axis[3].block, p.dbias_size[3]);
  for (int64_t x = 0; x < tile.block_m * b.s_stride; ++x) sum[x] = 0;

  const Range batches = axis[0].members(at[0]), heads = axis[1].members(at[1]);
  const Range m_blocks = axis[2].members(at[2]), n_blocks = axis[3].members(at[3]);
  for (int64_t batch = batches.begin; batch < batches.end; ++batch)
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const Head<A> h = Head<A>::of(p, batch, head);
      for (int64_t m = m_blocks.begin; m < m_blocks.end; ++m)
        for (int64_t n = n_blocks.begin; n < n_blocks.end; ++n) {
          const Range rows = elements_of(m, tile.block_m, h.seq.seqlen_q);
          const Range cols = elements_of(n, tile.block_n, h.seq.seqlen_k);
          if (!h.visits(rows, cols)) continue;
          b.load_keys(p, batch, head / (p.heads / p.heads_kv), h.seq, cols, traffic);
          b.load_queries(kVersion, p, batch, head, h.seq, rows, traffic);
          b.score_tile(p, h, rows, cols, false, traffic);
          for (int64_t i = 0; i < rows.end - rows.begin; ++i) {
            A* out = sum + (one_row ? 0 : i) * b.s_stride;
            const A* ds = b.acc_ds + i * b.s_stride;
            for (int64_t j = 0; j < cols.end - cols.begin; ++j) out[one_col ? 0 : j] += ds[j];
          }
        }
    }

  const int64_t first = ((at[0] * p.dbias_size[1] + at[1]) * p.dbias_size[2] + out_rows.begin) * p.dbias_size[3];
  const auto write = [&](auto* dbias) {
    for (int64_t i = 0; i < out_rows.end - out_rows.begin; ++i)
      for (int64_t j = 0; j < out_cols.end - out_cols.begin; ++j) {
        auto& out = dbias[first + i * p.dbias_size[3] + out_cols.begin + j];
        if constexpr (std::is_same_v<decltype(out), double&>)
          out = static_cast<double>(sum[i * b.s_stride + j]);
        else
          from_accum(static_cast<float>(sum[i * b.s_stride + j]), out);
      }
  };
  switch (p.bias_dtype) {
    case DType::kFloat64: write(static_cast<double*>(p.dbias)); break;
    case DType::kBFloat16: write(static_cast<bf16*>(p.dbias)); break;
    case DType::kFloat16: write(static_cast<fp16*>(p.dbias)); break;
    default: write(static_cast<float*>(p.dbias));
  }
  traffic.stored += (out_rows.end - out_rows.begin) * (out_cols.end - out_cols.begin) * Head<A>::size_of(p.bias_dtype);
}

template <class T>
Phase<BwdParams> phase_of(Version version, const BwdParams& p, Tile tile) {
  using A = Accum<T>;
  Arena measure{nullptr};
  const BwdBuffers<T> b(measure, p, tile);
  measure.take<A>(tile.block_m * b.s_stride);
  const int64_t rows = p.dbias_size[2] == 1 ? 1 : ceil_div(p.dbias_size[2], tile.block_m);
  const int64_t cols = p.dbias_size[3] == 1 ? 1 : ceil_div(p.dbias_size[3], tile.block_n);
  return {p.dbias_size[0] * p.dbias_size[1] * rows * cols, static_cast<size_t>(measure.used),
          version == Version::kFa1 ? bias_task<T, Version::kFa1> : bias_task<T, Version::kFa2>};
}

}  // namespace

void bwd_bias_phase(Version version, const BwdParams& p, Tile tile, Phase<BwdParams>& phase) {
  phase = for_dtype(p.dtype, [&](auto element) { return phase_of<decltype(element)>(version, p, tile); });
}

}  // namespace flash::cpu::FLASH_ISA
