"""One round of a micro run through the components' own functions, made once, and what their tests need to look at it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

ROOT = Path(__file__).parents[1]
RUN_ID = "run-of-the-tests"


def call(component: Any, folder: Path, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Run a component's function, its outputs real artifacts below `folder`; returns what it returned, and them."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {name: output.type for name, output in component.component_spec.outputs.items() if output.type.startswith("system.")}
    outputs = {name: getattr(dsl, kind.removeprefix("system.").partition("@")[0])(name=name, uri=str(folder / name)) for name, kind in kinds.items()}
    return component.python_func(**given, **outputs), outputs


def fingerprints(outputs: Mapping[str, Any]) -> dict[str, str]:
    """The content of every output that has a manifest."""
    from rlpipe import artifact

    return {name: artifact.fingerprint(Path(made.path)) for name, made in outputs.items() if (Path(made.path) / artifact.MANIFEST).is_file()}


def contents(outputs: Mapping[str, Any]) -> dict[str, bytes]:
    """Every file that a component left, by artifact and path."""
    files = {name: Path(made.path) for name, made in outputs.items()}
    found = {name: [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file()) for name, place in files.items()}
    return {f"{name}/{path.relative_to(files[name])}": path.read_bytes() for name, paths in found.items() for path in paths}


def check_repeatable(component: Any, made: Mapping[str, Any], elsewhere: Path, store: "Store", **given: Any) -> None:
    """Case B13: in the same place, as a retried pod on a volume; and from nothing, as a retried pod: equal outputs, nothing tracked twice."""
    before, counts = contents(made), store.counts()
    call(component, Path(made["metrics"].path).parent, **given)
    assert contents(made) == before
    _, again = call(component, elsewhere, **given)
    assert fingerprints(again) == fingerprints(made) != {}
    assert store.counts() == counts


def check_refused(component: Any, name: str, folder: Path, capsys: pytest.CaptureFixture[str], **given: Any) -> None:
    """Case B01, B20: an input that is gone, or a byte shorter than it was, is refused by its name."""
    damaged = copied(given[name], folder)
    cut(Path(damaged.path))
    missing = type(damaged)(name=name, uri=str(folder / "nowhere" / given[name].name))
    for handed in (damaged, missing):
        with pytest.raises(SystemExit) as ended:
            call(component, folder / "refused", **{**given, name: handed})
        said = capsys.readouterr().err
        assert ended.value.code == 6
        assert handed.name in said or name in said
        assert "do:" in said


def as_floats(value: Any) -> Any:
    """A section as Kubeflow hands it over: every number a float."""
    if isinstance(value, dict):
        return {key: as_floats(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_floats(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def copied(handed: Any, folder: Path) -> Any:
    """The same artifact somewhere else, to be damaged there."""
    import shutil

    place = folder / "copied" / handed.name
    shutil.copytree(handed.path, place)
    return type(handed)(name=handed.name, uri=str(place))


def cut(folder: Path) -> None:
    """Take the last byte off the largest file of an artifact."""
    file = max((path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A task takes the logging of its process in hand, which here is that of all tests."""
    import logging

    kept = [(log, log.level, log.propagate, list(log.handlers)) for log in (logging.getLogger(), logging.getLogger("rlpipe"))]
    yield
    for log, level, propagate, handlers in kept:
        log.level, log.propagate, log.handlers = level, propagate, handlers


class Store:
    """What MLflow holds."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def runs(self) -> dict[str, Any]:
        """The runs by name."""
        client = self.client()
        experiment = client.get_experiment_by_name("rlpipe")
        return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])} if experiment else {}

    def counts(self) -> tuple[int, int]:
        """How many runs and how many registered versions there are."""
        client = self.client()
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return len(client.search_runs(experiments)), len(client.search_model_versions())


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("round")


@pytest.fixture(scope="package", autouse=True)
def store(folder: Path) -> Iterator[Store]:
    """A store of its own for MLflow, and a working folder in which nothing lies."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RLPIPE_RUN_ID", "")
        patch.chdir(folder)
        yield Store(uri)


@pytest.fixture(scope="package")
def sections() -> dict[str, dict[str, Any]]:
    """The sections of configs/micro.yaml as `rlpipe compile` sends them."""
    from rlpipe import params
    from rlpipe.kubeflow import compile as pipelines

    return pipelines.plan(params.read_yaml(ROOT / "configs/micro.yaml")).sections


class Made(dict[str, Any]):
    """The artifacts of the run so far, by name, and the key of the run."""

    run_key = ""


@pytest.fixture(scope="package")
def begun(folder: Path, sections: dict[str, Any]) -> Made:
    """Round 00."""
    from .start import start

    arguments = {"config": sections["start"], "model_config": sections["model"], "tasks_config": sections["tasks"], "tracking": sections["tracking"]}
    key, outputs = call(start, folder / "start", **arguments, params_key="0" * 64, run_id=RUN_ID)
    made = Made(outputs)
    made.run_key = key
    return made


@pytest.fixture(scope="package")
def common(begun: Made, sections: dict[str, Any]) -> dict[str, Any]:
    """What every task of round 01 is given besides artifacts and its section."""
    return {"tracking": sections["tracking"], "round_index": 1, "run_key": begun.run_key, "run_id": RUN_ID}


@pytest.fixture(scope="package")
def for_rollout(begun: Made, common: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    artifacts = {"policy": begun["policy"], "tasks": begun["train_tasks"], "progress_in": begun["progress"], "history_in": begun["history"]}
    return {**artifacts, "evaluation_in": begun["evaluation"], "config": sections["rollout"], **common}


@pytest.fixture(scope="package")
def rolled(folder: Path, for_rollout: dict[str, Any]) -> dict[str, Any]:
    from .rollout import rollout

    return call(rollout, folder / "rollout", **for_rollout)[1]


@pytest.fixture(scope="package")
def for_filter(rolled: dict[str, Any], common: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    return {"trajectories": rolled["trajectories"], "config": sections["filter"], **common}


@pytest.fixture(scope="package")
def filtered(folder: Path, for_filter: dict[str, Any]) -> dict[str, Any]:
    from .filter import filter

    return call(filter, folder / "filter", **for_filter)[1]


@pytest.fixture(scope="package")
def for_reward(filtered: dict[str, Any], begun: Made, common: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    return {"kept": filtered["kept"], "tasks": begun["train_tasks"], "history_in": begun["history"], "config": sections["reward"], **common}


@pytest.fixture(scope="package")
def rewarded(folder: Path, for_reward: dict[str, Any]) -> dict[str, Any]:
    from .reward import reward

    return call(reward, folder / "reward", **for_reward)[1]


@pytest.fixture(scope="package")
def for_train(rewarded: dict[str, Any], begun: Made, common: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    return {"scored": rewarded["scored"], "policy_in": begun["policy"], "evaluation_in": begun["evaluation"], "config": sections["train"], **common}


@pytest.fixture(scope="package")
def trained(folder: Path, for_train: dict[str, Any]) -> dict[str, Any]:
    from .train import train

    return call(train, folder / "train", **for_train)[1]


@pytest.fixture(scope="package")
def for_evaluate(trained: dict[str, Any], begun: Made, common: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    return {"policy": trained["policy"], "tasks": begun["eval_tasks"], "evaluation_in": begun["evaluation"], "config": sections["evaluate"], **common}


@pytest.fixture(scope="package")
def measured(folder: Path, for_evaluate: dict[str, Any]) -> dict[str, Any]:
    from .evaluate import evaluate

    return call(evaluate, folder / "evaluate", **for_evaluate)[1]


@pytest.fixture(scope="package")
def repository(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Section `kubeflow.snapshot` of a git repository with a DVC remote, both folders of this machine."""
    place = tmp_path_factory.mktemp("repository")
    shell(place, "git", "init", "-q", "--bare", "-b", "main", "origin.git")
    shell(place, "git", "clone", "-q", "origin.git", "author")
    author = place / "author"
    shell(author, "dvc", "init", "-q")
    shell(author, "dvc", "remote", "add", "--default", "store", str(place / "store"))
    shell(author, "git", "add", "--all")
    shell(author, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    shell(author, "git", "push", "-q", "origin", "HEAD:main")
    return {"repository": f"file://{place / 'origin.git'}", "commit": shell(author, "git", "rev-parse", "HEAD"), "folder": ".", "branch_prefix": "runs/"}


def shell(place: Path, *command: str) -> str:
    """What a command prints; the virtual environment's programs come first."""
    import os
    import subprocess
    import sys

    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="package")
def resolved(folder: Path, sections: dict[str, Any]) -> Any:
    """The params that preflight wrote."""
    from .preflight import preflight

    given = {name: section for name, section in sections.items() if name != "snapshot"}
    return call(preflight, folder / "preflight", **given, num_rounds=1)[1]["params"]


@pytest.fixture(scope="package")
def for_snapshot_start(begun: Made, resolved: Any, repository: dict[str, Any]) -> dict[str, Any]:
    return {**{name: made for name, made in begun.items() if name != "report"}, "params": resolved, "config": repository, "run_id": RUN_ID}


@pytest.fixture(scope="package")
def first_commit(folder: Path, for_snapshot_start: dict[str, Any]) -> str:
    from .snapshot_start import snapshot_start

    return str(call(snapshot_start, folder / "snapshot_start", **for_snapshot_start)[0])
