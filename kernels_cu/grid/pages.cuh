// Rows that do not follow one another in memory.
#pragma once

#include "params.cuh"

// Where a row begins. One that is not there is taken for zeros, and its address is never read.
template <class Element>
struct Row {
  const Element* begin;
  bool is_there;
};

// Whether there is a page of this number: nobody has checked a table.
__device__ inline bool is_page(int number, int pages) { return unsigned(number) < unsigned(pages); }

// The keys or values that one sequence has in pages of a cache, for one head.
template <class Element, int PageSize>
struct PagedRows {
  const Element* head;  // of page 0
  const int* table;     // the sequence's page numbers
  int64 page_stride;
  int64 row_stride;
  int pages;
  int end;  // of its keys: behind it the table may end

  __device__ Row<Element> at(int key) const {
    const int page = key < end ? table[key / PageSize] : -1;
    const bool is_there = is_page(page, pages);
    return {head + (is_there ? page : 0) * page_stride + key % PageSize * row_stride, is_there};
  }
};
