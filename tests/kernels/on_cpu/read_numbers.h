#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

// Returns the next `count` numbers of standard input; exits the program if there are fewer.
inline std::vector<int> read(int count) {
  std::vector<int> numbers(count);
  for (int& number : numbers) {
    if (std::scanf("%d", &number) != 1) std::exit(1);
  }
  return numbers;
}
