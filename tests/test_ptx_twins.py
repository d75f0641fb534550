# SPDX-License-Identifier: MIT
"""The wrappers of ``kernels/ptx/`` and their twins do the same, on the same operands.

On the CPU each probe runs through the twins, and its results are compared with numpy's; on a GPU
through the instructions, and its results are compared with the twins'.
"""

from __future__ import annotations

import re
from pathlib import Path

import hostcuda
import pytest
from compile_matrix import faults
from hostcuda.probes import MARKS
from ptx_cases import CASES, case
from ptx_twins import PROBES, compare

from cupyflash import _compile, devices

HERE = Path(__file__).resolve().parent
HEADERS = sorted(path.name for path in (_compile.kernels_folder() / "ptx").glob("*.cuh"))
TWINS = HERE / "hostcuda" / "ptx"
_FUNCTION = re.compile(r"__device__ __forceinline__ [\w ]+?[ &*](\w+)\(")


def wrappers(header: str) -> set[str]:
    """The functions of a header, as their declarations say."""
    text = (_compile.kernels_folder() / "ptx" / header).read_text()
    return set(_FUNCTION.findall(text))


def mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b\s*[<(]", text) is not None


# ---- every wrapper has its twin and its probe ----------------------------------------------------


def test_headers_and_twins_are_the_same_files():
    assert sorted(path.name for path in TWINS.iterdir()) == HEADERS


@pytest.mark.parametrize("header", HEADERS)
def test_every_wrapper_has_a_twin_and_a_probe(header):
    names = wrappers(header)
    assert names, "no function found; has the form of the declarations changed?"
    twin = (TWINS / header).read_text()
    assert {name for name in names if not mentions(twin, name)} == set()
    used = {probe.split("-")[0] for probe in CASES}
    probed = "\n".join((PROBES / f"{name}.cu").read_text() for name in used)
    assert {name for name in names if not mentions(probed, name)} == set()


def test_wrappers_are_found_whatever_they_return():
    assert wrappers("mbarrier.cuh") >= {"mbarrier_wait", "mbarrier_init"}
    assert wrappers("wgmma.cuh") >= {"wgmma", "wgmma_descriptor", "wgmma_wait", "wgmma_use"}


# ---- on the CPU ----------------------------------------------------------------------------------


class TestTwins:
    pytestmark = MARKS

    @pytest.mark.parametrize("name", CASES)
    def test_twin_agrees_with_numpy(self, name):
        probe = case(name)
        for output, actual in zip(probe.outputs, probe.twin_results(), strict=True):
            compare(output, actual, output.expected)

    @pytest.mark.parametrize(
        "name", [name for name in CASES if not name.startswith(("mma", "wgmma", "scalar"))]
    )
    def test_no_schedule_changes_a_bit(self, name):
        case(name).run_on_host(schedules=True)

    def test_a_column_that_tma_can_not_begin_at(self):
        probe = case("tma-128-64-64-1-1-1")
        probe.arguments[0][3, 0] = 7
        with pytest.raises(hostcuda.HostFault, match="column 7 does not begin at a multiple of 16"):
            probe.run_on_host()


# ---- NVRTC ---------------------------------------------------------------------------------------


def builds():
    """Each probe, with each of its options, for the architectures that its cases need.

    wgmma in float16 is bfloat16's text but for a word, and takes as long to build: that is left to
    the test on a GPU.
    """
    seen = set()
    for wanted in CASES:
        if wanted.startswith("wgmma-f16"):
            continue
        probe = case(wanted)
        for architecture in ("sm_80", "sm_90a"):
            has = devices.architecture_device(architecture).compute_capability
            key = (probe.probe, probe.options, architecture)
            if key not in seen and probe.refusal(has) is None:
                seen.add(key)
                name = "-".join((probe.probe, *probe.options, architecture))
                yield pytest.param(probe, architecture, id=name)


@pytest.mark.parametrize(("probe", "architecture"), list(builds()))
def test_probe_builds(probe, architecture):
    assert faults(probe.build(architecture)) == []


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_agrees_with_the_twin(cupy, name, record_property):
    probe = case(name)
    if reason := probe.refusal(devices.current_device(0).compute_capability):
        pytest.skip(reason)
    try:
        twins = probe.twin_results()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    for output, actual, twin in zip(probe.outputs, probe.run_on_gpu(), twins, strict=True):
        record_property("ptx twin", str(compare(output, actual, twin)))
