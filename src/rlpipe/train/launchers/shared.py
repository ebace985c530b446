"""A folder on a volume that coordinator and trainer pods both mount, through which inputs go out and the policy comes back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rlpipe.errors import ConfigError
from rlpipe.train.job import Job

INPUTS = ("scored", "policy_in", "evaluation_in")


@contextmanager
def job_folder(shared: Path, claim: str) -> Iterator[Path]:
    """An empty folder for one job on the shared volume, removed afterwards.

    Raises:
        ConfigError: the volume is not mounted here.
    """
    if not shared.is_dir():
        raise ConfigError(
            "train.launcher.shared_folder is not there", got=str(shared), accepted=f"claim {claim} mounted", do="mount the claim into the task train too"
        )
    folder = shared / "rlpipe" / uuid4().hex[:12]
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # trainer pods may run as another user
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def send(job: Job, shared: Path, folder: Path) -> Job:
    """The job as trainer pods see it: what does not lie on the shared volume is copied there, and `policy` is made there."""
    root = shared.resolve()
    places = {}
    for name in INPUTS:
        place = getattr(job, name).resolve()
        if not place.is_relative_to(root):
            place = Path(shutil.copytree(place, folder / "inputs" / name))
        places[name] = place
    policy = job.policy.resolve()
    return job.at(**places, policy=policy if policy.is_relative_to(root) else folder / "policy")


def fetch(sent: Job, job: Job) -> None:
    """Bring the policy that was made for `sent` to where `job` wants it."""
    if sent.policy != job.policy.resolve():
        shutil.rmtree(job.policy, ignore_errors=True)
        shutil.copytree(sent.policy, job.policy)
