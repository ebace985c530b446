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

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
LAUNCHED = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
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
        """This rank's part: every value belongs to exactly one rank."""
        return values[self.rank :: self.size]

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

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            import torch

            torch.distributed.barrier()


ALONE = Ranks()


def rank_of(environ: Mapping[str, str]) -> int:
    """The rank a launcher gave this process; 0 if none did."""
    launcher = _launcher(environ)
    return int(environ[LAUNCHED[launcher][0]]) if launcher else 0


def _launcher(environ: Mapping[str, str]) -> str | None:
    """The launcher that started this process: libraries leave single variables of one behind, never all."""
    return next((name for name, names in LAUNCHED.items() if all(variable in environ for variable in names)), None)


def join(folder: Path, seconds: float, environ: Mapping[str, str] = os.environ) -> Ranks:
    """Meet the other ranks that torchrun or mpirun started.

    Args:
        folder: seen by all ranks; mpirun's meet by a file in it, torchrun's have been told where.
        seconds: how long ranks wait for each other, here and in every later exchange.

    Raises:
        EngineError: neither launcher started this process, or the first rank did not show up in time.
    """
    import torch

    launcher = _launcher(environ)
    if launcher is None:
        raise EngineError("no launcher started this rank", accepted="torchrun or Open MPI's mpirun", do="set train.launcher instead of starting ranks by hand")
    rank, size, local, per_node = (int(environ[name]) for name in LAUNCHED[launcher])
    timeout = timedelta(seconds=seconds)
    if launcher == "torchrun":
        torch.distributed.init_process_group("gloo", timeout=timeout)
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))  # what other libraries look for
        store = _meet(folder / f"meet-{environ.get('PMIX_NAMESPACE', 'mpi')}.json", rank, size, timeout)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, per_node)


def _meet(file: Path, rank: int, size: int, timeout: timedelta) -> torch.distributed.TCPStore:
    """The store that rank 0 opens on a free port and names in a file."""
    from torch.distributed import TCPStore

    if rank == 0:
        address = socket.gethostbyname(socket.gethostname())
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
