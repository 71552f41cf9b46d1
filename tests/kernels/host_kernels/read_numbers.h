#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

// The next numbers of standard input; ends the program where there are none.
inline std::vector<int> read(int count) {
  std::vector<int> numbers(count);
  for (int& number : numbers) {
    if (std::scanf("%d", &number) != 1) std::exit(1);
  }
  return numbers;
}
