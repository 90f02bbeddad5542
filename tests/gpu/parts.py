"""Claims about GPUs, and the parts of ``make gpu`` that check them. docs/gpu.md has a row for each claim."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One row of docs/gpu.md.

    ``name``: its anchor. ``tests``: the beginning of the names of the ``count`` tests that show it; a test with more to say than that
    it passed prints a figure (``tests.support.gpu.figure``). Empty: the part is a program, which prints a figure.
    """

    name: str
    text: str
    tests: str = ""
    count: int = 1


@dataclass(frozen=True)
class Part:
    """A command that checks claims. ``limit``: seconds after which it is ended. ``alone``: it measures time, so nothing runs beside it."""

    name: str
    limit: float
    arguments: tuple[str, ...]  # of Python
    claims: tuple[Claim, ...]
    alone: bool = False

    @property
    def is_pytest(self) -> bool:
        return self.arguments[:2] == PYTEST[:2]


PYTEST = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-W", "default")

PARTS = (  # the most valuable first; those that measure time come last, one by one
    Part(
        "ddp",
        90,
        (*PYTEST, "tests/train/test_gpu.py"),
        (
            Claim(
                "gradients",
                "One rank: the gradients of the plain model, unused parameters included",
                "test_gradients_on_a_gpu",
                2,
            ),
            Claim(
                "no-wait",
                "In a step in which nothing changes torch sees no wait of the host for the GPU (one rank; waits for events are not seen)",
                "test_the_host_does_not_wait",
            ),
            Claim(
                "shared-gpu",
                "2 and 3 ranks over NCCL, 2 over gloo: gradients are the average",
                "test_ranks_share_a_gpu",
                4,
            ),
            Claim(
                "sync-batchnorm",
                "`SyncBatchNorm` on 2 ranks: as in one process",
                "test_synchronized_batch_norm",
            ),
        ),
    ),
    Part(
        "state",
        120,
        (*PYTEST, "tests/train/test_gpu_state.py"),
        (
            Claim(
                "state",
                "A state of FSDP2 or DDP on 1 to 3 ranks, several of them over gloo: DCP reads ours, we read DCP's",
                "test_a_state_on_a_gpu",
                6,
            ),
            Claim(
                "state-restored",
                "The same states, restored by us on 1 to 3 ranks: every bit",
                "test_what_we_restore",
                6,
            ),
            Claim(
                "deterministic",
                "`DeterministicShards`: the same parameters, bit by bit, with 1, 2 and 3 ranks (gloo), after stops too",
                "test_the_same_bits",
            ),
        ),
    ),
    Part(
        "agent",
        120,
        (*PYTEST, "tests/system/test_gpu.py"),
        (
            Claim(
                "memory-free",
                "A worker is killed, ends or fails in a kernel: its GPU memory is free for the next round, also with `--preload=torch`",
                "test_the_next_round_finds_the_memory",
                6,
            ),
            Claim(
                "agent-killed",
                "A killed agent: its workers end, and their GPU memory is free",
                "test_a_killed_agent",
                2,
            ),
            Claim(
                "fork-server",
                "The fork server and its parked forks hold no device file of CUDA, and one thread each",
                "test_the_fork_server",
            ),
        ),
    ),
    Part(
        "live",
        120,
        (*PYTEST, "tests/system/test_live.py", "-k", "cuda"),
        (
            Claim(
                "live",
                "Live workers over NCCL: the others of a killed one go on, a new one gets their state",
                "test_",
                2,
            ),
        ),
    ),
    Part(
        "mesh",
        200,
        (*PYTEST, "tests/train/test_gpu_mesh.py"),
        (
            Claim("mesh-fsdp2", "torch alone: FSDP2 on 4 ranks trains as one process", "test_fsdp2"),
            Claim("mesh-hsdp", "torch alone: HSDP, 2 × 2 ranks, trains as one process", "test_hsdp"),
            Claim(
                "mesh-tp-fsdp2",
                "torch alone: tensor parallelism × FSDP2, 2 × 2 ranks, trains as one process",
                "test_tp_fsdp2",
            ),
            Claim(
                "mesh-tp-ddp",
                "Tensor parallelism × our module, 2 × 2 ranks, trains as one process",
                "test_tp_ddp",
            ),
            Claim(
                "mesh-pp-ddp",
                "Pipeline (1F1B) × our module, 2 × 2 ranks, trains as one process",
                "test_pp_ddp",
            ),
            Claim(
                "mesh-pp-fsdp2",
                "torch alone: pipeline (1F1B) × FSDP2, 2 × 2 ranks, trains as one process",
                "test_pp_fsdp2",
            ),
            Claim(
                "mesh-checkpoint",
                "`Checkpointer`: a state of FSDP2 × tensor parallelism on 4 ranks comes back on 2",
                "test_checkpoint",
            ),
        ),
    ),
    Part(
        "compile",
        120,
        (*PYTEST, "tests/train/test_gpu_compile.py"),
        (
            Claim(
                "compile",
                "`torch.compile` inside and around our module: gradients as without it (2e-5; bf16 3 %), replicas equal",
                "test_compile",
                8,
            ),
        ),
    ),
    Part(
        "overlap",
        60,
        ("-m", "tests.gpu.overlap", "--svg", "{folder}/gpu-overlap.svg"),
        (
            Claim(
                "overlap",
                "Share of the all-reduces' time that is hidden behind the backward, 2 ranks that share the GPU",
            ),
        ),
        alone=True,
    ),
    Part(
        "steps",
        120,
        ("-m", "tests.gpu.steps"),
        (
            Claim(
                "step-resnet",
                "Step of a ResNet-50, bf16, one rank, with a batch that fills the GPU, beside torch's class",
            ),
            Claim(
                "step-transformer",
                "Step of a transformer, bf16, one rank, with a batch that fills the GPU, beside torch's class",
            ),
            Claim("host-resnet", "The host's time of a step of the ResNet-50 with a small batch"),
            Claim("host-transformer", "The host's time of a step of the transformer with a small batch"),
            Claim("step-shared", "Step of 2 ranks that share the GPU over NCCL, beside torch's class"),
        ),
        alone=True,
    ),
    Part(
        "starts",
        90,
        ("-m", "tests.gpu.starts"),
        (
            Claim(
                "kill-first-kernel",
                "`kill -9` of a worker → the new one's first kernel is done, beside torchrun",
            ),
            Claim("start-first-kernel", "Command → the first kernel of a worker is done, beside torchrun"),
        ),
        alone=True,
    ),
    Part(
        "kills",
        60,
        (
            *("-m", "tests.system.live_kills", "--kills", "{few:8}", "--nproc", "3", "--preload", "torch"),
            *("--device", "{device}", "--claim", "live-kills"),
        ),
        (
            Claim(
                "live-kills",
                "Live workers, 3 ranks over NCCL: `kill -9` of one → the next step of the others",
            ),
        ),
        alone=True,
    ),
    Part(
        "hangs",
        120,
        (*PYTEST, "tests/system/test_gpu_hangs.py"),
        (
            Claim("hang-skipped", "NCCL: a rank leaves out a collective", "test_a_rank_that_leaves_out"),
            Claim("hang-spins", "NCCL: a rank's kernel never ends", "test_a_rank_whose_kernel"),
            Claim("straggler", "NCCL: a rank that is slower than the others", "test_a_rank_that_computes"),
        ),
        alone=True,
    ),
    Part(
        "checkpoints",
        120,
        ("-m", "tests.gpu.checkpoints"),
        (
            Claim(
                "checkpoint-blocks",
                "A save of 1.2 GB on the GPU blocks training for, beside DCP and `torch.save`",
            ),
            Claim("checkpoint-fsdp2", "A save of FSDP2 state, a mesh of one rank, blocks training for"),
            Claim("checkpoint-restore", "1.2 GB restored from the disk to the GPU within"),
        ),
        alone=True,
    ),
    Part(
        "frameworks",
        90,
        ("-m", "tests.gpu.frameworks"),
        (
            Claim(
                "frameworks",
                "accelerate, Lightning, transformers: a worker on the GPU is killed, and goes on from its checkpoint",
            ),
        ),
        alone=True,
    ),
    Part(
        "joins",
        60,
        (
            *("-m", "tests.system.live_joins", "--joins", "{few:3}", "--pause", "0.02", "--nproc", "2"),
            *("--device", "{device}", "--width", "{width:4096}", "--claim", "live-joins"),
        ),
        (
            Claim(
                "live-joins",
                "Live workers, 201 MB of state: the longest step while a new worker is taken in, beyond the median",
            ),
        ),
        alone=True,
    ),
)

NEVER_TRIED = (  # no machine with it has been at hand
    Claim(
        "several-gpus",
        "One GPU for each rank on one machine: NVLink, PCIe, the GPUs of `--numa-binding` and `--virtual-local-rank`",
    ),
    Claim("several-machines", "GPUs on several machines: InfiniBand, RoCE, EFA"),
    Claim("schedulers", "GPUs under Slurm and Kubernetes: `--gpus-per-node`, device plugins, MIG"),
    Claim("device-loss", "A GPU that falls off the bus, or reports errors of its memory (Xid, ECC)"),
    Claim("other-vendors", "AMD (ROCm, RCCL), Intel (XPU)"),
    Claim(
        "cuda-graphs",
        "A CUDA graph that contains a step of our module is refused with one line (torch's class can be captured)",
    ),
)


def of(names: list[str]) -> list[Part]:
    """Return the parts with these names, in their own order. Raises KeyError with the first name that no part has."""
    if unknown := set(names) - {part.name for part in PARTS}:
        raise KeyError(sorted(unknown)[0])
    return [part for part in PARTS if part.name in names]
