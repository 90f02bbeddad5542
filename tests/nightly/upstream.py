"""torch's own tests of its data-parallel class, those of the installed copy, with ours in its place.

    python -m tests.nightly.upstream [--torchs] [PART OF A NAME...]

``torch.testing._internal.distributed.distributed_test`` on two ranks over gloo (torch's other tests of the class, test_c10d_gloo and
test_c10d_common, are not among what pip installs). Tests that want a GPU per rank run on CPUs: whatever they
put on a GPU stays where it is. What cannot pass is listed with the reason in ``NOT_OURS``. With ``--torchs`` torch's class stays in its
place: those that need a real GPU have to fail with it, too. ``make nightly`` makes an environment in which this runs.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import unittest
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elastirun.train import DistributedDataParallel

if "--torchs" in sys.argv:
    os.environ["UPSTREAM_TORCHS"] = "1"  # for the processes of the tests, which import this module anew
TORCHS = "UPSTREAM_TORCHS" in os.environ
if not TORCHS:
    torch.nn.parallel.DistributedDataParallel = torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]

os.environ.update(BACKEND="gloo", WORLD_SIZE="2")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())

CPU = torch.device("cpu")
RAISES = "torch's class raises here, ours does what was meant"
INSIDE = "looks at the inside of torch's reducer"
EVENTS = "counts torch's own events in a profile"
MIXED = "mixed_precision= is not supported"
NEEDS_GPU = "cannot run on CPUs"
NOT_OURS = {
    "test_DistributedDataParallel_SyncBatchNorm": NEEDS_GPU,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": NEEDS_GPU,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": NEEDS_GPU,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": NEEDS_GPU,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": NEEDS_GPU,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": NEEDS_GPU,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": NEEDS_GPU,
    "test_DistributedDataParallel_SyncBatchNorm_half": NEEDS_GPU,
    "test_ddp_broadcast_buffers_deprecation_warning": "broadcast_buffers= is not deprecated here",
    "test_ddp_build_debug_param_to_name_mapping": INSIDE,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": INSIDE,
    "test_ddp_comm_hook_logging": INSIDE,
    "test_ddp_compile_static_graph": NEEDS_GPU,
    "test_ddp_control_flow_different_across_ranks": INSIDE,
    "test_ddp_control_flow_same_across_ranks": INSIDE,
    "test_ddp_device": NEEDS_GPU,
    "test_ddp_logging_data_cpu": INSIDE,
    "test_ddp_logging_data_gpu": INSIDE,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": RAISES,
    "test_ddp_multiple_nested_unused_params_error": RAISES,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": MIXED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": MIXED,
    "test_ddp_native_mixed_precision_ignored_params": MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": MIXED,
    "test_ddp_profiling_torch_profiler": EVENTS,
    "test_ddp_python_error_logged": INSIDE,
    "test_ddp_sink_noclone": "allows no clone() at all; outputs are not cloned here, the control words are",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": NEEDS_GPU,
    "test_ddp_unused_params_rebuild_buckets_exception": RAISES,
    "test_detect_ddp_is_actually_static": INSIDE,
    "test_different_graph_across_ranks": INSIDE,
    "test_invalid_static_graph": RAISES,
    "test_skip_all_reduce_unused_parameters": INSIDE,
    "test_static_graph_api_cpu": RAISES,
}
OF_OURS = re.compile(r"DistributedDataParallel\(|_test_DDP|_test_ddp|_test_DistributedDataParallel|_ddp_")


class OnCPUs(TorchFunctionMode):
    """Devices that tests ask for are the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        return function(*args, **kwargs)


def on_cpu(device: Any) -> Any:
    if isinstance(device, torch.device) or (isinstance(device, str) and device.startswith("cuda")) or type(device) is int:
        return CPU
    return device


class Device(type(torch.device)):  # type: ignore[misc]
    """Stands for ``torch.device``: what it makes is the CPU's."""

    def __call__(cls, *_: Any, **__: Any) -> torch.device:
        return CPU

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type(CPU))


def pretend() -> None:
    """One GPU per rank, as far as tests ask for it."""
    # common_device_type asks a GPU for its properties when it is imported, if torch's build has Triton: so before there seem to be GPUs.
    from torch.testing._internal import common_device_type, common_distributed  # noqa: F401

    common_distributed.TEST_CUDA = True
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.manual_seed = lambda *_, **__: None
    for check in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):  # the second: since torch 2.14
        setattr(torch.optim.Optimizer, check, lambda _: None)  # asks the GPU, where torch's build is for one
    torch.nn.Module.cuda = torch.nn.Module.to = lambda self, *_, **__: self
    torch.device = Device("device", (), {"__module__": "torch"})
    OnCPUs().__enter__()


pretend()

from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Upstream(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def names() -> list[str]:
    """The tests that have to do with the class."""
    base = vars(distributed_test.DistributedTest._DistTestBase)
    return [name for name, test in base.items() if name.startswith("test_") and OF_OURS.search(inspect.getsource(test))]


def play(name: str) -> str:
    """Run a test in processes of its own; what went wrong, in one text."""
    result = unittest.TestResult()
    Upstream(name).run(result)
    if result.skipped:
        print(f"{name}: left out by torch: {result.skipped[0][1]}", flush=True)
        return ""
    wrong = "\n".join(text for _, text in result.failures + result.errors)
    if TORCHS:
        print(f"{name}: {'fails' if wrong else 'passes'} with torch's class", flush=True)
        return wrong if name not in NOT_OURS else "passes" if NOT_OURS[name] == NEEDS_GPU and not wrong else ""
    if name in NOT_OURS:
        print(f"{name}: {'fails' if wrong else 'PASSES'}: {NOT_OURS[name]}", flush=True)
        return "" if wrong else "take it out of NOT_OURS"
    print(f"{name}: {'FAILED' if wrong else 'passed'}", flush=True)
    return wrong


def main(parts: list[str]) -> int:
    parts = [part for part in parts if part != "--torchs"]
    chosen = [name for name in names() if not parts or any(part in name for part in parts)]
    failed = {name: wrong for name in chosen if (wrong := play(name))}
    for name, wrong in failed.items():
        print(f"\n{name}\n{wrong}")
    print(f"{len(chosen)} tests, {len(failed)} unexpected")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
