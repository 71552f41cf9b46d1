// A consumer of the Hopper kernel where q, k and v are of float8. Its softmax takes longer than a
// product, and a block's share of the output is added apart, so that the order is another than that
// of 16 bits: the output of a block, then the scores of the next, which the tensor cores compute
// while the share is added:
//
//   tensor cores   | P V of j | Q K^T of j + 1 |                    | P V of j + 1 | ...
//   CUDA cores     |          | O += share     | softmax of j + 1   |              | O += share
//
// Where there are no registers for shares and scores at once, the scores come behind the adding,
// and only other consumers fill the gap.
#pragma once

#include "forward/hopper/consumer.cuh"
#include "forward/hopper/float8_products.cuh"
#include "forward/hopper/float8_softmax.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperConsumer<Config, true> : HopperConsumer<Config, false> {
  using Base = HopperConsumer<Config, false>;
  using typename Base::Cta;
  using typename Base::Products;
  using typename Base::SoftmaxRow;
  using Slot = typename Products::Slot;
  using Base::begin;
  using Base::block;
  using Base::consumer;
  using Base::consumers;
  using Base::products;
  using Base::softmax;
  using Base::visit;

  using Base::Base;

  __device__ void consume() {
    softmax.reset();
    if (!this->enter_tile()) return;
    if (Config::turns && consumer == consumers - 1) this->pass_turn();
    const Slot first = products.take_slot();
    products.start_scores(first);
    float rescale[2];
    take_block(first, rescale);
    products.clear_output();

    while (true) {
      const bool tile_ends = block == begin;
      const SoftmaxRow finished[2] = {softmax.rows[0], softmax.rows[1]};
      if (tile_ends) {
        visit = Cta::next_visit(visit);
        if (!this->enter_tile()) break;
      } else {
        --block;
      }
      // The ring has keys ahead of the values of the block before.
      const Slot keys = products.take_slot();
      const Slot values = products.take_slot();
      if (Config::turns) this->take_turn();
      products.start_output(values);
      if (Config::early_scores) products.start_scores(keys);
      if (Config::turns) this->pass_turn();
      products.add_output(values, rescale, true);
      if (!Config::early_scores) products.start_scores(keys);
      if (tile_ends) {
        write_tile(finished);
        softmax.reset();
        products.clear_output();
      }
      take_block(keys, rescale);
    }

    const Slot values = products.take_slot();
    if (Config::turns) this->take_turn();
    products.start_output(values);
    if (Config::turns && consumer < consumers - 1) this->pass_turn();
    products.add_output(values, rescale, false);
    write_tile(softmax.rows);
  }

 private:
  // The softmax of a block whose scores are under way.
  __device__ void take_block(Slot keys, float (&rescale)[2]) {
    products.await_scores(keys, block == begin);
    softmax.apply_factor(products.scores);
    if (block >= this->first_masked_block()) this->apply_mask();
    softmax.exponentiate(products.scores, products.probabilities, rescale);
  }

  __device__ void write_tile(const SoftmaxRow (&finished)[2]) {
    float normalizer[2];
    this->results().finish_softmax(finished, normalizer);
    this->results().write_output(normalizer);
  }
};

#endif  // __CUDA_ARCH__ == 900
