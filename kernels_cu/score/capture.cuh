// Array that a mask or score function captures. An index outside of the array reads the nearest
// element. cupy_flash/mods/codegen/arguments.py declares the same struct.
#pragma once

#include "tile/element.cuh"

// Returns an element in the type that generated CUDA source computes with: 64-bit integers become
// int, and 16-bit types float.
template <class Element>
__device__ inline Element read_capture(const Element* element) {
  return __ldg(element);
}
__device__ inline bool read_capture(const bool* element) {
  return __ldg(reinterpret_cast<const unsigned char*>(element)) != 0;
}
__device__ inline int read_capture(const unsigned char* element) { return __ldg(element); }
__device__ inline int read_capture(const long long* element) {
  return static_cast<int>(__ldg(element));
}
__device__ inline float read_capture(const half_t* element) {
  return widen(half_t{__ldg(reinterpret_cast<const unsigned short*>(element))});
}
__device__ inline float read_capture(const bfloat16_t* element) {
  return widen(bfloat16_t{__ldg(reinterpret_cast<const unsigned short*>(element))});
}

// Used by kernels that do not preload the bias of a row's keys: each element is loaded when needed.
struct LoadOnDemand {
  template <class Load>
  __device__ auto bias(int, Load load) const {
    return load();
  }
};

template <class Element, class Offset, int Rank, int Strides>
struct CaptureFields {
  const Element* data;
  int shape[Rank];
  Offset strides[Strides];  // in elements; the last stride is omitted if it is 1
};
template <class Element, class Offset, int Rank>
struct CaptureFields<Element, Offset, Rank, 0> {
  const Element* data;
  int shape[Rank];
};
template <class Element, class Offset>
struct CaptureFields<Element, Offset, 0, 0> {
  const Element* data;
};

// `Offset` is int if it can hold the distance between any two elements, otherwise long long. An
// address takes two instructions with int, and four with long long.
template <class Element, class Offset, int Rank, bool ContiguousLast>
struct Capture : CaptureFields<Element, Offset, Rank, (Rank > 0 ? Rank - ContiguousLast : 0)> {
  // Returns the offset of an index along an axis, in elements. The index is clamped to the axis
  // unless `Inside` states that it is valid. With `Inside`, the computation is signed, so that a
  // constant added to the index becomes part of the load instruction.
  template <int Axis, bool Inside = false>
  __device__ Offset offset(int index) const {
    if constexpr (Inside) {
      return step<Axis, Offset>(index);
    } else {
      return step<Axis>(max(0, min(index, this->shape[Axis] - 1)));
    }
  }

  // Like `offset()`, for an index that is not negative.
  template <int Axis, bool Inside = false>
  __device__ Offset offset_from_0(int index) const {
    if constexpr (Inside) {
      return step<Axis, Offset>(index);
    } else {
      return step<Axis>(min(index, this->shape[Axis] - 1));
    }
  }

  template <class... Indices>
  __device__ auto at(Indices... indices) const {
    static_assert(sizeof...(Indices) == Rank, "one index per axis");
    return read_capture(this->data + element_offset<0>(indices...));
  }

  // Call syntax for CUDA source that users write.
  template <class... Indices>
  __device__ auto operator()(Indices... indices) const {
    return at(indices...);
  }

 private:
  // The index is unsigned by default, so that an address takes one multiply-add.
  template <int Axis, class Index = unsigned>
  __device__ Offset step(Index index) const {
    if constexpr (ContiguousLast && Axis == Rank - 1) {
      return index;
    } else {
      return index * this->strides[Axis];
    }
  }

  template <int Axis>
  __device__ Offset element_offset() const {
    return 0;
  }
  template <int Axis, class... Indices>
  __device__ Offset element_offset(int index, Indices... indices) const {
    return offset<Axis>(index) + element_offset<Axis + 1>(indices...);
  }
};
