// Rows of a paged KV cache, which do not have a constant stride.
#pragma once

#include "params.cuh"

// Address of a row. If `exists` is false, the row is treated as zeros, and `begin` is not accessed.
template <class Element>
struct Row {
  const Element* begin;
  bool exists;
};

// Returns whether a page number is valid; block tables are not validated beforehand.
__device__ inline bool is_valid_page(int number, int pages) {
  return unsigned(number) < unsigned(pages);
}

// K or V rows of one sequence and one KV head in a paged cache.
template <class Element, int PageSize>
struct PagedRows {
  const Element* head;  // the head's first row on page 0
  const int* table;     // the sequence's row of the block table: page numbers
  int64 page_stride;
  int64 row_stride;
  int pages;
  int end;  // number of keys of the sequence; the table may have no entries past it

  __device__ Row<Element> at(int key) const {
    const int page = key < end ? table[key / PageSize] : -1;
    const bool exists = is_valid_page(page, pages);
    return {head + (exists ? page : 0) * page_stride + key % PageSize * row_stride, exists};
  }
};
