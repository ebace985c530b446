"""One training as files: what the coordinator hands to the ranks, and what they hand back.

job.json        config, places and round
alive           touched by the coordinator; ranks end when it stops
report.json     rank 0's report, when all is done
error-R.json    why rank R ended
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe import artifact, errors
from rlpipe.errors import RlpipeError
from rlpipe.step import Report
from rlpipe.train.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from rlpipe.train.section import Config

JOB, ALIVE, REPORT = "job.json", "alive", "report.json"
PLACES = ("scored", "policy_in", "evaluation_in", "policy")


@dataclass(frozen=True)
class Job:
    """The step `train` of one round, once `scored` is known to be worth training on."""

    config: Config
    scored: Path
    policy_in: Path
    evaluation_in: Path
    policy: Path
    round_index: int

    def fit(self, ranks: Ranks = ALONE) -> Report:
        """Train, as one of `ranks`; only the first writes `policy`.

        Raises:
            ArtifactError: what was written is not whole.
        """
        from rlpipe import dataset
        from rlpipe.policies.causal_lm import POLICY_MODULE
        from rlpipe.train.fit import fit
        from rlpipe.train.whole import check_whole

        dropped = artifact.read_manifest(self.scored).get("facts", {}).get("dropped", {})
        places = {"policy_in": self.policy_in, "evaluation_in": self.evaluation_in, "policy": self.policy}
        report = fit(self.config, dataset.read_groups(self.scored), **places, round_index=self.round_index, dropped=dropped, ranks=ranks)
        if ranks.first and report.outcome is None:
            check_whole(self.policy / POLICY_MODULE, self.policy_in / POLICY_MODULE)
        return report

    def at(self, **places: Path) -> Job:
        """The same job with other places."""
        return replace(self, **places)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Terms:
    """How ranks and coordinator wait for each other, in seconds.

    Attributes:
        exchange: a rank that keeps the others waiting longer is given up.
        grace: ranks end when the coordinator was not heard of for this long.
        held: the coordinator holds the other end of the ranks' standard input; they end at once when that is closed.
    """

    exchange: float
    grace: float
    held: bool = False


def write(folder: Path, job: Job, terms: Terms) -> Path:
    """Put a job into `folder`; returns the file that ranks read."""
    places = {name: str(getattr(job, name).absolute()) for name in PLACES}
    content = {"config": job.config.model_dump(mode="json"), "places": places, "round_index": job.round_index, "terms": asdict(terms)}
    (folder / ALIVE).touch()
    artifact.write_json(folder / JOB, content)
    return folder / JOB


def read(file: Path) -> tuple[Job, Terms]:
    """A job as `write` put it."""
    from rlpipe.train.section import Config

    content = json.loads(file.read_text(encoding="utf-8"))
    places = {name: Path(path) for name, path in content["places"].items()}
    return Job(Config.model_validate(content["config"]), **places, round_index=content["round_index"]), Terms(**content["terms"])


def write_report(folder: Path, report: Report) -> None:
    """Hand the report back; its presence says that the policy is whole."""
    artifact.write_text(folder / REPORT, json.dumps(asdict(report)))  # in the order that the step gives its numbers


def read_report(folder: Path) -> Report | None:
    """The report, if the ranks came that far."""
    file = folder / REPORT
    return Report(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Hand back why a rank ended."""
    said: dict[str, Any] = {"type": type(error).__name__, "what": " ".join(str(error).split())[:2000]}
    if isinstance(error, RlpipeError):
        said |= {"what": error.what, "got": _text(error.got), "accepted": _text(error.accepted), "do": error.do}
    artifact.write_json(folder / f"error-{rank}.json", said)


def read_error(folder: Path) -> RlpipeError | None:
    """The first explained failure of a rank, with the type it had there; None if no rank explained itself."""
    for file in _errors(folder):
        said = json.loads(file.read_text(encoding="utf-8"))
        kind = getattr(errors, said["type"], None)
        if isinstance(kind, type) and issubclass(kind, RlpipeError):
            return kind(said["what"], got=said["got"], accepted=said["accepted"], do=said["do"])
    return None


def other_errors(folder: Path) -> str:
    """What else ranks raised, first come first, as one line."""
    found = [(file.stem.removeprefix("error-"), json.loads(file.read_text(encoding="utf-8"))) for file in _errors(folder)]
    return "; ".join(f"rank {rank}: {said['type']}: {said['what']}" for rank, said in found)


def _errors(folder: Path) -> list[Path]:
    return sorted(folder.glob("error-*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
