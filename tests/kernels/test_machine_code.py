"""Tests that a representative set of kernels compiles as the families planned, and to the machine
code in the table. They need no GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli.bench_records import row, write
from support.cli.benchmark_scripts import IN_CHECKOUT, script
from support.prebuilt import selected_calls

from cupy_flash.errors import CompileError
from cupy_flash.families import FAMILIES, FORWARD
from cupy_flash.families.simt.forward import SimtTile
from cupy_flash.gpu.compiler import Cubin, compile_cubin, known_architectures
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.device import ARCHITECTURES

machine_code = script("machine_code") if IN_CHECKOUT else None
HEAD, TABLE, TESTED = machine_code.read_table() if machine_code else ({}, {}, [])
pytestmark = pytest.mark.skipif(not IN_CHECKOUT, reason="the tests stand outside a checkout")

# Families whose kernels use only dynamic shared memory, of the size in the launch.
ALL_DYNAMIC = ("decode", "hopper", "mma")
# Families whose kernels redistribute registers with setmaxnreg.
HAND_REGISTERS_ROUND = ("hopper", "hopper backward")
# ptxas reports serialized wgmma and ignored setmaxnreg as warnings C7504 to C7520 and C7602, and
# continues.
TROUBLE = re.compile(r"C7[56]\d\d|serializ|setmaxnreg|warning", re.IGNORECASE)


# The first sm_90 kernel of each family; compiling all kernels takes minutes. Backward kernels have
# a quick test in test_gradient_units.py.
QUICK_FAMILIES = ("decode", "mma", "simt")
OF_SM_90 = [each for each in reversed(TESTED) if each.arch == 90 and each.family in QUICK_FAMILIES]
QUICK = list({kernel.family: kernel for kernel in OF_SM_90}.values())
EACH = [
    pytest.param(
        kernel,
        id=f"sm_{kernel.arch} {kernel.job().unit.title}",
        marks=() if kernel in QUICK else pytest.mark.slow,
    )
    for kernel in TESTED
]
OF_FAMILIES = [param for param in EACH if param.values[0].case]
OTHERS = [param for param in EACH if not param.values[0].case]


def trouble_in(log: str) -> list[str]:
    return [line for line in log.splitlines() if TROUBLE.search(line)]


@pytest.fixture(scope="module")
def cubins(
    compile_pool: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> dict[Any, Future[Cubin]]:
    """Return the cubins of all selected kernels; each kernel is compiled once."""
    known, found = known_architectures(), {}
    for kernel in dict.fromkeys(c["kernel"] for c in selected_calls(request) if "kernel" in c):
        if kernel.arch in known:
            job = kernel.job()
            found[kernel] = compile_pool.submit(compile_cubin, job.unit, job.device)
    return found


def compiled(kernel: Any, cubins: dict[Any, Future[Cubin]]) -> Cubin:
    if kernel not in cubins:
        pytest.skip(f"this NVRTC does not know sm_{kernel.arch}")
    return cubins[kernel].result()


def most_spilled(kernel: Any, plan: Plan) -> int:
    """Return the limit of spilled bytes per thread for a default tile, with any NVRTC version."""
    if kernel.family == "hopper":
        return 32
    if kernel.family == "decode":
        # At head_dim 256, and with 32 rows per tile, all 255 registers are in use. The kernel then
        # spills the sequence in which its work range begins: 80 bytes before the first barrier,
        # which are read once. The loop over keys spills nothing. More is spilled with pages of one
        # row (address computations), for sm_100, and with CUDA 12.9.
        from cupy.cuda import nvrtc

        more = kernel.case.page_size == 1 or kernel.arch == 100
        more = more or nvrtc.getVersion() < (13, 0)
        all_in_use = plan.problem.head_dim > 192 or plan.tile.Br == 32
        return (48 if more else 32) + (64 if all_in_use else 0)
    # The float32 tile at the end is faster than smaller tiles although it spills; see its family.
    if kernel.family == "hopper backward":
        # If thread blocks fetch KV tiles, producer warps spill outside of their waits: 164 bytes
        # with NVRTC 13.5, and 28 with 13.0. Consumers spill nothing in their loop.
        if "counters" in plan.schedule.workspace_offsets:
            return 176
        # With packed sequences, a consumer keeps the position of its sequence and looks for rows
        # with one visible key: 44 bytes with NVRTC 13.5, and none with 13.0.
        return 0 if plan.problem.layout.is_dense else 44
    problem = plan.problem
    if kernel.family == "mma backward" and problem.dtype != "float32":
        # Operands are in registers a step before their products.
        return 12 if problem.layout.is_dense else 48
    return 16 if (problem.dtype, problem.head_dim, kernel.arch) == ("float32", 128, 90) else 0


@pytest.mark.parametrize("kernel", OF_FAMILIES)
def test_a_kernel_compiles_to_what_its_family_planned(kernel: Any, cubins: Any) -> None:
    cubin, plan = compiled(kernel, cubins), kernel.plan()
    family, device, tile = machine_code.FAMILY_BY_NAME[kernel.family], plan.device, plan.tile
    assert family.why_not_tile(plan.problem, device, tile) is None
    assert cubin.image.startswith(b"\x7fELF")
    assert trouble_in(cubin.log) == []
    assert set(cubin.resources) == {launch.entry for launch in plan.launches}
    for launch in plan.launches:
        resources = cubin.resources[launch.entry]
        assert resources.spill_bytes <= most_spilled(kernel, plan), f"{tile}: {resources}"
        limit = min(255, device.registers_per_sm // (launch.threads * (launch.min_blocks or 1)))
        assert resources.registers <= limit
        shared_memory = launch.shared_memory + resources.static_shared_memory
        assert shared_memory <= device.shared_memory_per_block
        if kernel.family in ALL_DYNAMIC:
            assert resources.static_shared_memory == 0
        elif kernel.family == "naive":
            # Two tiles of 32 x 33 fit in the 48 KiB that need no opt-in.
            assert resources.static_shared_memory <= 48 << 10
    if isinstance(tile, SimtTile):
        most = FORWARD["simt"].registers(plan.problem, tile)
        assert cubin.resources["simt_forward"].registers <= most
    if kernel.family in HAND_REGISTERS_ROUND:
        # setmaxnreg must not distribute more registers than the launch allocates to the CTA.
        config = family.config(plan.problem, tile, plan.schedule.split)
        warpgroups = plan.threads // 128
        handed_out = config["producer_registers"]
        handed_out += (warpgroups - 1) * config["consumer_registers"]
        assert handed_out <= cubin.resources[plan.main.entry].registers * warpgroups


@pytest.mark.parametrize("kernel", OTHERS)
def test_what_appends_and_merges_compiles_without_spills(kernel: Any, cubins: Any) -> None:
    cubin, unit = compiled(kernel, cubins), kernel.job().unit
    assert "warning" not in cubin.log
    assert set(cubin.resources) == set(unit.entries)
    assert all(resources.spill_bytes == 0 for resources in cubin.resources.values())


@pytest.mark.parametrize("kernel", EACH)
def test_its_machine_code_is_that_of_the_table(kernel: Any, cubins: Any) -> None:
    if reason := machine_code.why_not_comparable(HEAD):
        pytest.skip(reason)
    now = {kernel: machine_code.Code.of(compiled(kernel, cubins), kernel.job().unit.main_entry)}
    assert list(machine_code.differences(TABLE, now)) == []


def test_the_table_holds_what_the_script_calls_representative() -> None:
    # Tests do not load the tuned tables, so tiles are default tiles and not compared.
    def without_tile(kernel: Any) -> tuple[Any, ...]:
        return kernel.arch, kernel.family, kernel.case

    found = {without_tile(kernel) for kernel in machine_code.representative()}
    assert found == {without_tile(kernel) for kernel in TESTED}


@pytest.mark.parametrize("family", FORWARD)
def test_the_tested_kernels_cover_every_choice_that_a_unit_is_compiled_for(family: str) -> None:
    kernels = [kernel for kernel in TESTED if kernel.family == family]
    plans = [kernel.plan() for kernel in kernels]
    problems, tiles = [plan.problem for plan in plans], [plan.tile for plan in plans]

    def found(of: str) -> set[Any]:
        return {getattr(problem, of) for problem in problems}

    sixteen_bit, every = set(DTYPES[:2]), set(DTYPES)
    mma_dtypes = sixteen_bit | {"float32"}
    dtypes = {"decode": sixteen_bit, "hopper": sixteen_bit | {"float32"}, "mma": mma_dtypes}
    assert found("dtype") == dtypes.get(family, every)
    least = {"hopper": {90}, "naive": {75, 80, 90, 120}, "simt": set(ARCHITECTURES)}
    tensor_cores = {arch for arch in ARCHITECTURES if arch >= 80}
    assert {kernel.arch for kernel in kernels} == least.get(family, tensor_cores)
    if family == "naive":
        return
    assert found("causal") == {True, False}
    if family != "simt":
        assert {problem.softmax_scale < 0 for problem in problems} == {True, False}
    layouts = {kernel.case.kind for kernel in kernels}
    assert layouts == {"dense", "varlen", "cache"}
    assert {plan.schedule.split.kind == "fixed" for plan in plans} == {True, False}
    if family in ("decode", "mma"):
        assert found("alignment") == {2, 4, 8, 16}
    if family == "simt":
        assert found("alignment") == {4, 8, 16}
        assert {tile.row_threads for tile in tiles} >= {4, 8, 16, 32}
    if family != "hopper":
        sizes = {kernel.case.page_size for kernel in kernels if kernel.case.kind == "cache"}
        assert sizes >= {1, 16}
    if family == "decode":
        assert {plan.num_splits for plan in plans} >= {None, 1, 3}
        assert {tile.cluster for tile in tiles} == {0, 1, 2, 4, 8}
        assert {(tile.Br, tile.Bc) for tile in tiles} >= {(16, 16), (32, 16), (32, 32)}
        assert found("head_dim") >= {64, 96, 128, 192, 256}
    if family == "hopper":
        assert {tile.Br for tile in tiles} == {64, 128, 192}
        assert {tile.q_stages for tile in tiles} == {1, 2}
    if family == "mma":
        assert {tile.stages for tile in tiles} == {2, 3, 4}
        assert {tile.q_in_registers for tile in tiles} == {0, 1}
        assert {tile.Br // tile.warps for tile in tiles} == {16, 32}


@pytest.mark.parametrize("family", FAMILIES["backward"])
def test_the_tested_gradients_are_of_all_dtypes_masks_and_layouts(family: str) -> None:
    kernels = [kernel for kernel in TESTED if kernel.family == f"{family} backward"]
    problems = [kernel.plan().problem for kernel in kernels]
    dtypes = {"hopper": DTYPES[:2], "mma": DTYPES[:3], "simt": ("float16", *DTYPES[2:])}
    assert {problem.dtype for problem in problems} == set(dtypes[family])
    assert {problem.causal for problem in problems} == {True, False}
    assert {kernel.case.kind for kernel in kernels} == {"dense", "varlen"}


@pytest.mark.parametrize("family", FAMILIES["backward"])
def test_gradients_of_sinks_are_tested(family: str) -> None:
    kernels = [kernel for kernel in TESTED if kernel.family == f"{family} backward" and kernel.wrt]
    assert kernels
    assert all("sink_gradients" in kernel.job().unit.entries for kernel in kernels)


@pytest.mark.parametrize(
    ("direction", "family"), [(d, name) for d in ("tangent", "received") for name in FAMILIES[d]]
)
def test_tangents_and_sums_of_weights_are_tested(direction: str, family: str) -> None:
    problems = [k.plan().problem for k in TESTED if k.family == f"{family} {direction}"]
    assert {problem.direction for problem in problems} == {direction}
    assert {problem.causal for problem in problems} == {True, False}
    assert len({problem.dtype for problem in problems}) > 1


@pytest.fixture
def table_of_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Replace the table by one of a few kernels, which are all that the script compiles."""
    few = dict(itertools.islice(TABLE.items(), 20))
    monkeypatch.setattr(machine_code, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(machine_code, "representative", lambda: list(few))
    monkeypatch.setattr(machine_code, "recorded", dict)
    monkeypatch.setattr(machine_code, "why_not_comparable", lambda head: None)
    machine_code.write_table(few, few)
    return few


def test_some_rows_of_the_table_can_be_written_anew(
    table_of_few: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = machine_code.Code("another", 1, 2)
    monkeypatch.setattr(machine_code, "compiled", lambda kernels, _: dict.fromkeys(kernels, other))
    monkeypatch.setattr("sys.argv", ["machine_code.py", "--only", '"float16"', "--update"])
    assert machine_code.main() == 0
    _, found, tested = machine_code.read_table()
    expected = {k: other if k.case.dtype == "float16" else x for k, x in table_of_few.items()}
    assert list(found.items()) == list(expected.items())
    assert 0 < list(found.values()).count(other) < len(found)
    assert tested == list(table_of_few)


def test_rows_of_changed_sources_are_not_kept(
    table_of_few: dict[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text = machine_code.TABLE.read_text()
    family = next(k.family for k in table_of_few if k.case.dtype != "float16")
    digest = machine_code.FAMILY_BY_NAME[family].digest()
    machine_code.TABLE.write_text(text.replace(f'"{digest}"', f'"{FORMER}"'))
    monkeypatch.setattr("sys.argv", ["machine_code.py", "--only", '"float16"', "--update"])
    assert machine_code.main() == 2
    assert f"the sources of {family} have changed" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "same"), [(1, True), (99, False)])
def test_few_codes_that_changed_are_the_same_if_they_come_out_so_once(
    count: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(itertools.islice(TABLE.items(), 100))
    other = replace(next(iter(before.values())), code="another")
    rounds = itertools.count()

    def codes(jobs: list[Any]) -> Iterator[tuple[Any, Any]]:
        is_first = next(rounds) == 0
        for index, (kernel, _) in enumerate(jobs):
            yield kernel, other if is_first and index < count else before[kernel]

    monkeypatch.setattr(machine_code, "_codes", codes)
    assert (machine_code.compiled(before, before) == before) == same


GRADIENTS_TILE = {"Br": 64, "Bc": 128, "columns": 64, "q_stages": 3, "dout_stages": 2}
FORMER = "0" * 16


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[Any]]]:
    """Return the script's findings in a folder that has only this record."""
    monkeypatch.setattr(machine_code, "RESULTS", path.parent)
    monkeypatch.setattr(machine_code.tuning, "SHIPPED_DIR", path.parent / "none")
    found: dict[str, Any] = machine_code.recorded()
    assert list(found) == [path.name]
    rows: list[tuple[str, str, list[Any]]] = found[path.name]
    return rows


@pytest.mark.parametrize("same", [True, False])
def test_a_record_of_gradients_is_stamped_anew_if_all_kernels_are_the_same(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"family": "hopper", "kernel_digest": FORMER, "tile": GRADIENTS_TILE}
    rows = [row("cupy_flash", n, 1.0, direction="backward", **options) for n in (512, 1024)]
    path = write(tmp_path / "h100.json", rows)
    found = recorded(path, monkeypatch)
    assert [(name, digest) for name, digest, _ in found] == 2 * [("hopper backward", FORMER)]
    kernels = [kernel for *_, kernels in found for kernel in kernels]
    assert {kernel.job().unit.entries for kernel in kernels} == {("row_terms", "key_gradients")}
    before = {kernel: machine_code.Code("as it was", 168, 0) for kernel in kernels}
    now = before if same else before | {kernels[1]: machine_code.Code("another", 168, 0)}
    head = {"digests": {"hopper": "1" * 16, "hopper backward": FORMER}}

    assert machine_code.restamp(head, before, now) == (0 if same else 1)
    present = FAMILIES["backward"]["hopper"].digest()
    digests = {digest for _, digest, _ in recorded(path, monkeypatch)}
    assert digests == {present if same else FORMER}


def test_a_family_of_a_record_is_stamped_anew_beside_one_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = {"Br": 64, "Bc": 64}
    formers = {"mma": FORMER, "simt": "1" * 16}
    rows = [
        row("cupy_flash", seqlen, 1.0, family=family, kernel_digest=digest, tile=tile)
        for seqlen, (family, digest) in zip((512, 1024), formers.items(), strict=True)
    ]
    path = write(tmp_path / "h100.json", rows)
    of_mma, of_simt = (kernels for *_, kernels in recorded(path, monkeypatch))
    before = {kernel: machine_code.Code("as it was", 168, 0) for kernel in (*of_mma, *of_simt)}
    now = before | dict.fromkeys(of_mma, machine_code.Code("another", 168, 0))
    assert machine_code.restamp({"digests": formers}, before, now) == 1
    found = [(family, digest) for family, digest, _ in recorded(path, monkeypatch)]
    assert found == [("mma", FORMER), ("simt", FORWARD["simt"].digest())]


@pytest.mark.parametrize(
    ("provider", "given", "served"),
    [
        ("cupy_flash", {}, {}),
        ("cupy_flash-anew", {}, {}),
        ("cupy_flash-page16", {"kind": "cache"}, {"kind": "cache", "page_size": 16}),
        ("cupy_flash-int8", {"kind": "cache"}, {"kind": "cache", "cache_dtype": "int8"}),
        ("cupy_flash-uniform", {"kind": "varlen", "lengths": 32 * [512]}, {"kind": "dense"}),
    ],
)
def test_a_row_names_the_kernel_of_what_its_provider_serves(
    provider: str, given: Any, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = row(provider, 512, 1.0, kernel_digest=FORMER, tile={"Br": 64, "Bc": 64}, **given)
    ((_, _, (kernel,)),) = recorded(write(tmp_path / "h100.json", [found]), monkeypatch)
    assert {name: getattr(kernel.case, name) for name in served} == served
    assert kernel.case.lengths is None


def test_a_sweep_for_gradients_names_the_kernels_of_both_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(kernel.case for kernel in TESTED if kernel.family == "hopper backward")
    finding = {"family": "hopper", "direction": "backward", "kernel_digest": FORMER}
    finding["cases"] = [case.as_record() | {"weight": 1.0}]
    finding |= {"default_tile": GRADIENTS_TILE, "best_tile": GRADIENTS_TILE | {"q_stages": 2}}
    ((name, digest, kernels),) = recorded(write(tmp_path / "h100.json", [finding]), monkeypatch)
    assert (name, digest) == ("hopper backward", FORMER)
    assert [kernel.case for kernel in kernels] == [case, case]
    assert [dict(kernel.tile)["q_stages"] for kernel in kernels] == [3, 2]


@pytest.mark.parametrize("difference", [-16, 16])
@pytest.mark.parametrize(
    ("family", "cluster"), [("decode", 0), ("decode", 4), ("hopper", 0), ("mma", 0)]
)
def test_a_kernel_does_not_compile_with_other_shared_memory_than_its_family_says(
    family: str, cluster: int, difference: int, compile_pool: ProcessPoolExecutor
) -> None:
    kernels = (kernel for kernel in TESTED if kernel.family == family)
    kernel = next(each for each in kernels if dict(each.tile).get("cluster", 0) == cluster)
    (size,) = (x.shared_memory for x in kernel.plan().launches if x.entry == "attention")
    job = kernel.job()
    before, after = (f"shared_memory = {number};" for number in (size, size + difference))
    text = job.unit.text.replace(before, after, 1)
    assert text != job.unit.text
    with pytest.raises(CompileError, match="as the host planned"):
        compile_cubin(replace(job.unit, text=text), job.device)


@pytest.mark.slow
def test_a_warning_of_serialized_products_is_seen_in_the_log(
    compile_pool: ProcessPoolExecutor,
) -> None:
    # ptxas serializes wgmma around a call that it cannot analyze, such as printf().
    job = next(kernel for kernel in TESTED if kernel.family == "hopper").job()
    call = "hopper_forward<Config>(maps, params);"
    text = job.unit.text.replace(call, call + '\n  printf("%d", params.seqlen_q);', 1)
    assert text != job.unit.text
    assert trouble_in(compile_cubin(replace(job.unit, text=text), job.device).log)
