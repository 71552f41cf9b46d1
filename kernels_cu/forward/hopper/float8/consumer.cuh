// A consumer of the Hopper kernel for float8 inputs. The contribution of a KV tile to O is
// accumulated in the registers that hold the scores of the next KV tile afterwards. So a consumer
// computes its exponentials while the tensor cores work for other consumers:
//
//   tensor cores   | P V of j, Q K^T of j + 1 |                  | P V of j + 1, Q K^T of j + 2 |
//   CUDA cores     |  O += P V of j           | softmax of j + 1 |  O += P V of j + 1           |
#pragma once

#include "forward/hopper/consumer.cuh"
#include "forward/hopper/float8/products.cuh"
#include "forward/hopper/float8/softmax.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperConsumer<Config, true> : HopperConsumer<Config, false> {
  using Base = HopperConsumer<Config, false>;
  using typename Base::Cta;
  using typename Base::Products;
  using typename Base::SoftmaxRow;
  using Stage = typename Products::Stage;
  using Base::Bc;
  using Base::begin;
  using Base::kv_tile;
  using Base::consumer;
  using Base::consumers;
  using Base::cta;
  using Base::products;
  using Base::softmax;
  using Base::work_tile_slot;

  using Base::Base;

  __device__ void consume() {
    softmax.reset();
    if (!this->begin_query_tile()) return;
    if (Config::pingpong && consumer == consumers - 1) this->pingpong_arrive();
    const Stage first = products.next_stage();
    products.start_scores(first);
    float rescale[2];
    process_scores(first, rescale);
    products.clear_output();

    while (true) {
      const bool tile_ends = kv_tile == begin;
      const SoftmaxRow finished[2] = {softmax.rows[0], softmax.rows[1]};
      if (tile_ends) {
        work_tile_slot = Cta::next_work_tile_slot(work_tile_slot);
        if (!this->begin_query_tile()) break;
      } else {
        --kv_tile;
      }
      // In the ring, K comes before V of the previous KV tile.
      const Stage keys = products.next_stage();
      const Stage values = products.next_stage();
      // Without these barriers, consumers stay in step, and no softmax overlaps GEMMs of another.
      if (Config::pingpong) this->pingpong_wait();
      products.template add_output<true>(values, keys, rescale);
      if (Config::pingpong) this->pingpong_arrive();
      if (tile_ends) {
        write_tile(finished);
        softmax.reset();
        products.clear_output();
      }
      process_scores(keys, rescale);
    }

    const Stage values = products.next_stage();
    if (Config::pingpong) this->pingpong_wait();
    products.template add_output<false>(values, values, rescale);
    if (Config::pingpong && consumer < consumers - 1) this->pingpong_arrive();
    write_tile(softmax.rows);
  }

 private:
  // Computes the softmax of a KV tile whose scores have been issued.
  __device__ void process_scores(Stage keys, float (&rescale)[2]) {
    products.wait_scores(keys, kv_tile == begin);
    softmax.apply_factor(products.sums);
    if (kv_tile >= this->first_masked_tile()) {
      const auto mask = Mask<Config>(cta.p, 0).counted_from(kv_tile * Bc + threadIdx.x % 4 * 2);
      softmax.mask(products.sums, [&](int half) {
        return mask.visible_end(this->first_row + Products::lane_row() + 8 * half);
      });
    }
    softmax.exponentiate(products.sums, products.probabilities, rescale);
  }

  __device__ void write_tile(const SoftmaxRow (&finished)[2]) {
    float normalizer[2];
    const bool is_special = this->epilogue().finish_softmax(finished, normalizer);
    this->epilogue().write_output(normalizer, is_special);
  }
};

#endif  // __CUDA_ARCH__ == 900
