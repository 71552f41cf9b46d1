// Finds the KV tiles of a query tile and the consumers that need each one, if consumers skip tiles.
// The producer warp examines 32 KV tiles at a time, one per lane. A single thread that examined one
// KV tile after the other was slower than the consumers.
#pragma once

#include "forward/hopper/cta.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct KvTileIterator {
  using Cta = HopperCta<Config>;
  using WorkTile = typename Cta::WorkTile;
  using KvTileInfo = typename Cta::KvTileInfo;
  static constexpr int Bc = Config::Bc;
  static constexpr unsigned all_lanes = ~0u;

  int word;          // index of the current group of 32 KV tiles
  unsigned pending;  // bit i is set if KV tile i of the group is still to be returned
  unsigned bits;     // bits of the `KvTileInfo` for the lane's KV tile
  unsigned served;   // bit i is set if consumer i has got a KV tile of this query tile

  // Begins a query tile. Its last KV tile is processed first.
  template <class AnyParams>
  __device__ void enter(const AnyParams& p, const WorkTile& work_tile) {
    served = 0;
    examine_word(p, work_tile, (work_tile.kv_tiles.end - 1) / 32);
  }

  // Returns the KV tile to process after `kv_tile`, or -1 at the end of the query tile.
  template <class AnyParams>
  __device__ int next_tile(const AnyParams& p, const WorkTile& work_tile, int kv_tile) {
    pending &= ~(1u << kv_tile % 32);
    if (pending == 0) examine_word(p, work_tile, previous_word(p, work_tile));
    return pending == 0 ? -1 : word * 32 + 31 - __clz(pending);
  }

  __device__ KvTileInfo info(const WorkTile& work_tile, int kv_tile) {
    unsigned tile_bits = __shfl_sync(all_lanes, bits, kv_tile % 32);
    // A consumer that attends to no KV tile must still write its rows, so it gets the last one.
    if (kv_tile == work_tile.kv_tiles.begin) tile_bits |= KvTileInfo::all_consumers & ~served;
    served |= tile_bits & KvTileInfo::all_consumers;
    return KvTileInfo::create(kv_tile, tile_bits, kv_tile == work_tile.kv_tiles.end - 1);
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  template <class AnyParams>
  __device__ void examine_word(const AnyParams& p, const WorkTile& work_tile, int word) {
    this->word = word;
    const int kv_tile = word * 32 + lane();
    const bool is_inside = work_tile.kv_tiles.begin <= kv_tile && kv_tile < work_tile.kv_tiles.end;
    bits = is_inside ? bits_of(p, work_tile, kv_tile) : 0;
    // The first and last KV tile are always published; without a block mask, so are all others.
    const bool is_published = !Config::block_mask || bits & KvTileInfo::all_consumers ||
                              kv_tile == work_tile.kv_tiles.begin ||
                              kv_tile == work_tile.kv_tiles.end - 1;
    pending = __ballot_sync(all_lanes, is_inside && is_published);
  }

  // Returns the index of the next group of 32 KV tiles that may hold published ones, or -1.
  template <class AnyParams>
  __device__ int previous_word(const AnyParams& p, const WorkTile& work_tile) const {
    const int first = work_tile.kv_tiles.begin / 32;
    if constexpr (Config::block_mask) {
      const auto blocks = Cta::masked_blocks(p, work_tile.coord);
      for (int last = word - 1; last >= first; last -= 32) {
        const int word = last - lane();
        const bool is_wanted = word == first || (word > first && blocks.nonempty_word(word) != 0);
        if (const unsigned wanted = __ballot_sync(all_lanes, is_wanted)) {
          return last - __ffs(wanted) + 1;
        }
      }
      return -1;
    } else {
      return word - 1;
    }
  }

  template <class AnyParams>
  __device__ static unsigned bits_of(const AnyParams& p, const WorkTile& work_tile, int kv_tile) {
    unsigned bits = 0;
    if constexpr (Config::block_mask) {
      const auto blocks = Cta::masked_blocks(p, work_tile.coord);
#pragma unroll
      for (int consumer = 0; consumer < Cta::consumers; ++consumer) {
        bits |= KvTileInfo::bits_of(consumer, blocks.is_nonempty(consumer, kv_tile),
                                    blocks.is_full(consumer, kv_tile),
                                    blocks.slot_of(consumer, kv_tile));
      }
    } else {
      const Mask<Config> mask = work_tile.template mask<Config>(p);
      const int rows = work_tile.sequence(p).seqlen_q;
#pragma unroll
      for (int consumer = 0; consumer < Cta::consumers; ++consumer) {
        const int first = work_tile.coord.q_begin + 64 * consumer, end = min(first + 64, rows);
        const bool is_visible = first < end && mask.visible_begin(first) < (kv_tile + 1) * Bc &&
                                kv_tile * Bc < mask.visible_end(end - 1);
        bits |= KvTileInfo::bits_of(consumer, is_visible, false, 0);
      }
    }
    return bits;
  }
};

#endif  // __CUDA_ARCH__ == 900
