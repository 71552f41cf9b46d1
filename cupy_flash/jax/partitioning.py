def partitioned(static, function): return function
