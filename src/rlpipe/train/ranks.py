"""The processes that train one policy together. Each takes its share of the rows of every optimizer step."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlpipe import artifact
from rlpipe.errors import EngineError
from rlpipe.policies.device import device

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
BUCKET = 25_000_000
"""Numbers added up over the ranks at once: what is held twice meanwhile."""
LAUNCHED = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "deepspeed": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
}
"""Where each launcher says which rank a process is, of how many, and the same on its node."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together; alone unless told otherwise.

    Attributes:
        rank: 0 to size - 1; rank 0 writes what is kept.
        size: processes in all.
        per_node: processes on this machine, which share its cores.
    """

    rank: int = 0
    size: int = 1
    per_node: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes what is kept."""
        return self.rank == 0

    def share(self, values: Sequence[T]) -> Sequence[T]:
        """This rank's part: every value belongs to exactly one rank.

        Dealt out to and fro from the last one on, so that of values sorted by size all ranks get about as much in all.
        """
        mine = (self.rank, 2 * self.size - 1 - self.rank)
        return [value for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True) if left % (2 * self.size) in mine]

    def largest_share(self, count: int) -> int:
        """The most that any rank gets of `count` values."""
        return -(-count // self.size)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank; all must call it."""
        if self.size == 1:
            return [value]
        import torch

        found: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found  # type: ignore[return-value]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the ranks; all must call it with tensors of the same shapes."""
        if self.size == 1 or not tensors:
            return
        import torch

        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            torch.distributed.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            import torch

            torch.distributed.barrier()


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors in their order, together while they are of at most `BUCKET` numbers and of one kind."""
    buckets: list[list[torch.Tensor]] = []
    held = 0
    for tensor in tensors:
        held += tensor.numel()
        if not buckets or held > BUCKET or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            held = tensor.numel()
        buckets[-1].append(tensor)
    return buckets


ALONE = Ranks()


def rank_of(environ: Mapping[str, str]) -> int:
    """The rank a launcher gave this process; 0 if none did."""
    launcher = _launcher(environ)
    return int(environ[LAUNCHED[launcher][0]]) if launcher else 0


def _launcher(environ: Mapping[str, str]) -> str | None:
    """The launcher that started this process: libraries leave single variables of one behind, never all."""
    return next((name for name, names in LAUNCHED.items() if all(variable in environ for variable in names)), None)


def exchange() -> str:
    """How ranks exchange tensors, as torch names it: NCCL between accelerators, gloo in main memory."""
    return "gloo" if device().type == "cpu" else "cpu:gloo,cuda:nccl"


def join(folder: Path, seconds: float, environ: Mapping[str, str] = os.environ) -> Ranks:
    """Meet the other ranks that torchrun, mpirun or the deepspeed launcher started.

    Args:
        folder: seen by all ranks; they meet by a file in it, but torchrun's have been told where.
        seconds: how long ranks wait for each other, here and in every later exchange.

    Raises:
        EngineError: none of these launchers started this process, or the first rank did not show up in time.
    """
    import torch

    launcher = _launcher(environ)
    if launcher is None:
        raise EngineError(
            "no launcher started this rank", accepted="torchrun, Open MPI's mpirun or deepspeed", do="set train.launcher instead of starting ranks by hand"
        )
    rank, size, local, per_node = (int(environ[name]) for name in LAUNCHED[launcher])
    timeout = timedelta(seconds=seconds)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))  # what other libraries look for
    if device().type == "cuda":
        torch.cuda.set_device(device())
    if launcher == "torchrun":
        torch.distributed.init_process_group(exchange(), timeout=timeout)
    else:
        store = _meet(folder / f"meet-{environ.get('PMIX_NAMESPACE', launcher)}.json", rank, size, timeout, alone=per_node == size)
        torch.distributed.init_process_group(exchange(), store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, per_node)


def _meet(file: Path, rank: int, size: int, timeout: timedelta, alone: bool) -> torch.distributed.TCPStore:
    """The store that rank 0 opens on a free port and names in a file; within the machine where it is `alone`."""
    from torch.distributed import TCPStore

    if rank == 0:
        address = "127.0.0.1" if alone else socket.gethostbyname(socket.gethostname())
        store = TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        artifact.write_json(file, {"address": address, "port": store.port})
        return store
    until = time.monotonic() + timeout.total_seconds()
    while not file.is_file():
        if time.monotonic() > until:
            raise EngineError("rank 0 did not show up", got=f"no {file.name} after {timeout.total_seconds():.0f} s", do="look at the log of the first node")
        time.sleep(0.2)
    place = json.loads(file.read_text(encoding="utf-8"))
    return TCPStore(place["address"], place["port"], size, is_master=False, timeout=timeout)
