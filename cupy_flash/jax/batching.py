def batched(static, function, again): return function
