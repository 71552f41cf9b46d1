"""State of the CPU backend's threads after Ctrl-C, after an error, and in a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cupy_flash.cpu.thread_pool import Stop, run_in_parallel

ROOT = Path(__file__).parents[2]

COMMON = """
import os, signal, sys, threading, time
import numpy as np
from threadpoolctl import threadpool_info
from cupy_flash import attention_reference, flash_attention

# A shell that runs the tests in the background has its children ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

def blas_threads():
    return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]

def check_a_call():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 700, 4, 32), dtype=np.float32)
    out = flash_attention(q, k, v, backend="cpu")
    assert np.abs(out - attention_reference(q, k, v)).max() < 1e-5

before = blas_threads()
# Minutes of work.
long = np.ones((1, 65536, 8, 64), np.float32)
"""


def run_script(text):
    command = [sys.executable, "-W", "ignore", "-c", COMMON + text]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 120}
    result = subprocess.run(command, cwd=ROOT, env=environment, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGINT is sent otherwise there")
@pytest.mark.parametrize(
    "call",
    [
        "flash_attention(long, long, long, backend='cpu')",
        "flash_attention(long, long[:, :, :1], long[:, :, :1], tile=(8, 8), backend='cpu')",
        "flash_attention_varlen(*[long[0]] * 3, *[[0, 65536]] * 2, *[65536] * 2, backend='cpu')",
        "flash_attention_backward(*[long] * 5, np.zeros((1, 8, 65536), np.float32), backend='cpu')",
        "flash_attention_varlen(*[long[0]] * 3, *[[0, 65536]] * 2, *[65536] * 2, backend='cpu',"
        " batch_invariant=True)",
    ],
)
def test_ctrl_c_ends_a_long_call_within_a_second_and_leaves_all_as_it_was(call):
    out = run_script(f"""
from cupy_flash import flash_attention_backward, flash_attention_varlen
pressed = []
def press():
    time.sleep(0.7)
    pressed.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
try:
    {call}
except KeyboardInterrupt:
    print(time.perf_counter() - pressed[0])
else:
    sys.exit("not interrupted")
assert threading.active_count() == 1, threading.enumerate()
assert blas_threads() == before
check_a_call()
""")
    assert float(out) < 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_computes_has_all_of_its_blas_threads():
    run_script("""
compute = lambda: flash_attention(long, long, long, backend="cpu")
threading.Thread(target=compute, daemon=True).start()
deadline = time.monotonic() + 60
while blas_threads() == before:
    assert time.monotonic() < deadline
    time.sleep(0.01)
child = os.fork()
if child == 0:
    code = 1
    try:
        assert blas_threads() == before
        check_a_call()
        assert blas_threads() == before
        code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
# Not with the thread, which has minutes to go.
os._exit(os.waitstatus_to_exitcode(status))
""")


def test_calls_that_overlap_hold_blas_and_leave_it_as_it_was_whichever_ends_last():
    run_script("""
from cupy_flash.cpu.thread_pool import single_threaded_blas
began, end = threading.Event(), threading.Event()
held = []
def last():
    with single_threaded_blas:
        began.set()
        end.wait()
        held.append(blas_threads())
thread = threading.Thread(target=last)
with single_threaded_blas:
    thread.start()
    began.wait()
end.set()
thread.join()
assert held == [[1] * len(before)], held
assert blas_threads() == before
# A thread that is not the first to hold it, with nobody else at work.
thread = threading.Thread(target=last)
thread.start()
thread.join()
assert held[1] == [1] * len(before), held
assert blas_threads() == before
""")


def test_an_error_in_one_thread_stops_the_others_and_is_raised():
    stop = Stop()
    at_work = threading.Barrier(2)
    caller, ended = threading.get_ident(), []

    def work(items):
        for _ in items:
            at_work.wait(10)
            if threading.get_ident() == caller:
                while not stop.requested:
                    time.sleep(0.001)
                ended.append("caller")
            else:
                ended.append("other")
                raise RuntimeError("broken")

    items = iter(range(100))
    with pytest.raises(RuntimeError, match="broken"):
        run_in_parallel(2, items, work, stop)
    assert next(items) == 2
    assert ended == ["other", "caller"]


def test_no_more_threads_start_than_there_are_items():
    seen = []

    def work(items):
        seen.append([threading.current_thread(), *items])

    run_in_parallel(8, iter("a"), work, Stop())
    assert seen == [[threading.current_thread(), "a"]]
