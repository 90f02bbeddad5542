"""Tests of the arithmetic of intervals, of the reading of a trace and of the drawing, with made-up events."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.gpu.timeline import (
    BACKWARD,
    NODE,
    STEP,
    Event,
    Profile,
    contains,
    count_kernels,
    draw,
    intersection,
    is_all_reduce,
    length,
    profiles,
    union,
)

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_union() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([(5, 6), (0, 2)], gap=3) == [(0, 6)]
    assert union([(0, 9), (1, 2), (8, 8.5)]) == [(0, 9)]
    assert union([]) == []


def test_intersection() -> None:
    assert intersection([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]
    assert intersection([(0, 1)], [(1, 2)]) == []
    assert length([(0, 1), (4, 6)]) == 3


def test_contains() -> None:
    assert [contains([(1, 2), (4, 5)], at) for at in (0, 1, 2, 3, 4.5, 6)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]


def test_names_of_kernels() -> None:
    assert is_all_reduce(ALL_REDUCE) and is_all_reduce("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)")
    assert is_all_reduce("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)")
    assert not is_all_reduce("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    assert not is_all_reduce("void at::native::reduce_kernel<512, 1>()")


def event(cat: str, name: str, begin: float, end: float, correlation: int | None = None) -> Event:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args}


EVENTS = [  # the host launches in [10, 20] what the GPU computes in [15, 60]
    {"ph": "M", "name": "process_name"},
    event("user_annotation", STEP, 0, 100),
    event("gpu_user_annotation", STEP, 5, 70),
    event("user_annotation", BACKWARD, 10, 20),
    event("cpu_op", NODE + ": MmBackward0", 10, 16),
    event("cuda_runtime", "cudaLaunchKernel", 5, 6, 1),
    event("kernel", "forward", 6, 15, 1),
    event("cuda_runtime", "cudaLaunchKernel", 11, 12, 2),
    event("kernel", "first", 15, 40, 2),
    event("cuda_driver", "cuLaunchKernelEx", 13, 14, 3),
    event("kernel", ALL_REDUCE, 20, 30, 3),
    event("cuda_runtime", "cudaMemcpyAsync", 15, 16, 4),
    event("gpu_memcpy", "Memcpy DtoD", 40, 45, 4),
    event("kernel", ALL_REDUCE, 40, 60, 99),  # its launch is not in the trace
    event("cuda_runtime", "cudaLaunchKernelExC", 18, 19, 5),
    event("kernel", "divides", 60, 62, 5),
    event("cuda_runtime", "cudaLaunchKernel", 25, 26, 6),
    event("kernel", "optimizer", 62, 70, 6),
    event("kernel", ALL_REDUCE, 200, 210, 98),  # of something else
]


def test_a_trace_with_a_gpu() -> None:
    (found,) = profiles(EVENTS)
    assert found == Profile(backward=[(15, 40), (40, 45)], reduce=[(20, 30), (40, 60)], finish=[(60, 62)])
    assert (found.hidden, found.exposed, found.whole) == (0.5, 15, (15, 62))
    assert count_kernels(EVENTS) == (7, 1)


def test_a_trace_without_a_gpu() -> None:
    (found,) = profiles(
        [
            event("user_annotation", STEP, 0, 100),
            event("user_annotation", BACKWARD, 10, 50),
            event("cpu_op", NODE + ": MmBackward0", 10, 30),
            event("user_annotation", "gloo:all_reduce", 20, 50),
        ]
    )
    assert found == Profile(backward=[(10, 30)], reduce=[(20, 50)], finish=[])
    assert found.hidden == 1 / 3


def test_the_drawing_is_xml() -> None:
    (found,) = profiles(EVENTS)
    root = ElementTree.fromstring(draw("<a> & b", [("ours", found), ("torch", found)]))
    assert sum(child.tag.endswith("rect") for child in root) == 1 + 2 * 4 + 3
