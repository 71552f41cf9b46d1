// Prints the work tiles of batches of sequences in the order in which `scheduler/varlen_order.cuh`
// assigns them. Standard input has one line of numbers for each batch: causal, threads, batch,
// seqlen_q, seqlen_k, heads_q, heads_kv, section_keys, total_q, total_k, 1 if there is seqused_k,
// splits, `deterministic`, and then cu_seqlens_q, cu_seqlens_k and seqused_k. The output has a line
// for each work tile: batch, head, head_kv, q_begin, begin and end of the KV tiles, q_first,
// seqlen_q, k_first, seqlen_k. An empty line ends a batch.
#include "cuda_on_cpu.h"

#include "scheduler/varlen_order.cuh"

#include <cstdio>

#include "read_numbers.h"

// Number of words of the workspace before the order, with split KV.
constexpr int partial_words = 5;

template <bool Causal, bool Split>
struct Config {
  static constexpr int Br = 64, Bc = 32;
  static constexpr bool causal = Causal, padded = false, split_keys = Split;
  static constexpr bool window_left = false, window_right = false, prefix = false,
                        offsets = false, seqused_q = false;
};

struct DeterministicBuilders : VarlenOrder::CtaThreads {
  static constexpr bool deterministic = true;
};

template <bool Causal, bool Split>
void print_work_tiles(const Params& p, int threads, int section_keys, bool deterministic) {
  std::vector<int> scratch(VarlenOrder::scratch_words);
  // With split KV, the order comes after the partial results.
  const VarlenOrder order = VarlenOrder(p).offset_by(Split ? partial_words : 0);
  constexpr int Br = Config<Causal, Split>::Br;
  run_block(threads, [&] {
    if (deterministic) {
      order.template build<Br, DeterministicBuilders>(p, scratch.data());
    } else {
      order.template build<Br, VarlenOrder::CtaThreads>(p, scratch.data());
    }
  });
  run_block(32, [&] {
    static WorkTile<true> next;
    const bool is_first = threadIdx.x == 0;
    const auto fetch = [&] { return order.fetch(); };
    while (true) {
      fetch_work_tile<Config<Causal, Split>>(p, order, fetch, section_keys, next, is_first);
      if (is_first && !next.is_end_of_work()) {
        const Sequence& at = next.sequence(p);
        std::printf("%d %d %d %d %d %d %d %d %d %d\n", next.coord.batch, next.coord.head,
                    next.coord.head_kv, next.coord.q_begin, next.kv_tiles.begin, next.kv_tiles.end,
                    at.q_first, at.seqlen_q, at.k_first, at.seqlen_k);
      }
      __syncthreads();
      if (next.is_end_of_work()) return;
    }
  });
  std::printf("\n");
}

int main() {
  int causal;
  while (std::scanf("%d", &causal) == 1) {
    const std::vector<int> sizes = read(12);
    const int threads = sizes[0];
    Params p = {};
    p.batch = sizes[1];
    p.seqlen_q = sizes[2];
    p.seqlen_k = sizes[3];
    p.heads_q = sizes[4];
    p.heads_kv = sizes[5];
    const int section_keys = sizes[6];
    const std::vector<int> q = read(p.batch + 1), k = read(p.batch + 1);
    const std::vector<int> used = read(sizes[9] ? p.batch : 0);
    p.cu_seqlens_q = q.data();
    p.cu_seqlens_k = k.data();
    p.seqused_k = sizes[9] ? used.data() : nullptr;
    p.total_q = sizes[7];
    p.total_k = sizes[8];
    // The workspace is filled with a large number, so that reading unwritten words fails the test.
    p.num_splits = sizes[10];
    std::vector<int> workspace(2 * p.batch + 2 + (p.num_splits > 1 ? partial_words : 0),
                               0x7fffffff);
    p.workspace = workspace.data();
    if (p.num_splits > 1) {
      print_work_tiles<false, true>(p, threads, section_keys, sizes[11]);
    } else if (causal) {
      print_work_tiles<true, false>(p, threads, section_keys, sizes[11]);
    } else {
      print_work_tiles<false, false>(p, threads, section_keys, sizes[11]);
    }
  }
}
