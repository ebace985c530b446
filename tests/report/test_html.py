"""Pages are complete in themselves, say what happened, and show text of policies and users as text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlpipe import tasks
from rlpipe.errors import ArtifactError, ConfigError
from rlpipe.report import attempts, html
from rlpipe.trajectory import RewardValue, Span
from tests.report.factories import attempt, evaluated, record, written

LOADING = ("src", "href", "action", "data", "poster", "srcset", "background")
VOID = ("meta", "br", "i", "path", "use")


class Page(HTMLParser):
    """The elements of a page with their attributes, and all of its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        self.words = " ".join([*self.words.split(), *data.split()])


def scored_page(tmp_path: Path, **changes: object) -> str:
    rows = [attempt(place, reward=place % 2, **changes) for place in range(16)]
    return html.page(record(), {}, {"scored": written(tmp_path / "scored", rows)})


def test_page_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    page = Page(scored_page(tmp_path))
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.elements}
    named = [(tag, key, value) for tag, found in page.elements for key, value in found.items() if key in LOADING or key.startswith("on")]
    assert named == []
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}) in page.elements
    linked = {found["xlink:href"] for _, found in page.elements if "xlink:href" in found}
    assert all(str(link).startswith("#") for link in linked)


def test_numbers_reasons_and_plots_are_shown(tmp_path: Path) -> None:
    numbers = {"sampled_reward": 0.4375, "num_groups": 6, "num_groups_with_signal": 4, "kl": None, "reward_length": 1234567}
    written(tmp_path / "scored", [attempt(place, reward=place % 2) for place in range(16)])
    made = record(numbers=numbers, reasons={"zero_signal": 2}, outputs={"scored": "f" * 64})
    page = Page(html.page(made, {}, {"scored": tmp_path / "scored"}))
    text = page.words
    for expected in (
        "Reward, round 1 done",
        "Mean reward 0.4375",
        "Groups with signal 4",
        "KL to the reference policy not measured",
        "Mean of the reward length 1,234,567",
        "groups dropped: all attempts earned the same 2",
    ):
        assert expected in text
    labels = [found["aria-label"] for tag, found in page.elements if tag == "svg"]
    assert labels == ["Number of groups of each kind", "Histogram of completion lengths", "Histogram of rewards", "Histogram of the mean reward of each group"]
    for axis in ("completion length (tokens)", "reward of a trajectory", "mean reward of a group", "trajectories", "groups"):
        assert axis in page.text


def test_same_record_and_artifacts_give_same_bytes_in_another_process(tmp_path: Path) -> None:
    here = scored_page(tmp_path)
    code = (
        "import sys; from pathlib import Path; from rlpipe.report import html; from tests.report.factories import record;"
        f"sys.stdout.write(html.page(record(), {{}}, {{'scored': Path({str(tmp_path / 'scored')!r})}}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path), "SOURCE_DATE_EPOCH": "0"}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment, cwd=tmp_path).stdout
    assert there.decode() == here


def test_home_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    """Containers with a read-only root give users no home folder."""
    code = "from rlpipe.report import plots; print(plots.shares({'a': 1}, 'groups', ('#000000',))[:4])"
    environment = {key: value for key, value in os.environ.items() if key not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")} | {"HOME": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("<svg\n", "")
    assert not (tmp_path / "none").exists()


HOSTILE = '<script>alert("&")</script></pre><img src=x onerror=y>'


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rewards = (RewardValue(HOSTILE, 1.0), RewardValue("judge", None, "error", HOSTILE))
    changes = {"task_id": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE, "rewards": rewards, "status_reason": HOSTILE, "finish_reason": HOSTILE}
    folder = written(tmp_path / "scored", [attempt(place, reward=1.0, **changes) for place in range(2)])
    made = record(numbers={f"reward_{HOSTILE}": 1.0}, reasons={HOSTILE: 1}, params={"key": HOSTILE}, inputs={"kept": HOSTILE})
    text = html.page(made, {}, {"scored": folder})
    page = Page(text)
    assert page.open == []
    assert {tag for tag, _ in page.elements} & {"script", "img"} == set()
    assert page.text.count(HOSTILE) >= 2 * len(changes) + 2


def test_control_characters_are_shown_and_long_texts_cut(tmp_path: Path) -> None:
    text = "a\x00b\x1b[31m\r\n‮c" + "x" * 5000 + "the end"
    page = Page(scored_page(tmp_path, completion=text))
    assert "a\\x00b\\x1b[31m\\r↵\n\\u202ec" in page.text
    assert f"{len(text) - 3000:,} characters left out" in page.text
    assert "xxxthe end" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f‪-‮]", page.text)


def test_trained_spans_are_marked(tmp_path: Path) -> None:
    spans = (Span("prompt", 0, 2), Span("policy", 2, 3, trained=True), Span("environment", 3, 4), Span("policy", 4, 5, turn=1, trained=False))
    page = Page(scored_page(tmp_path, spans=spans))
    assert "Completion, trained in part" in page.text
    assert "policy 2–3, trained, version 0, temperature 1" in page.text
    assert "policy 4–5, version 0, temperature 1" in page.text
    assert ("i", {"class": "trained", "style": "flex: 1 1 0"}) in page.elements


@pytest.mark.parametrize(("outcome", "says"), [("no_signal", "the policy goes on byte for byte"), ("stopped", "had reached its goal")])
def test_empty_dataset_says_so(tmp_path: Path, outcome: str, says: str) -> None:
    page = Page(html.page(record(outcome=outcome), {"kept": written(tmp_path / "kept", [])}, {"scored": written(tmp_path / "scored", [])}))
    assert "scored has no trajectories." in page.text
    assert says in page.text
    assert outcome.replace("_", " ") in page.text


def test_a_damaged_dataset_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "scored", [attempt(0, reward=1.0)])
    (folder / "part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ArtifactError, match="is damaged"):
        html.page(record(), {}, {"scored": folder})


def test_chosen_rows_spread_over_rewards_and_name_every_status(tmp_path: Path) -> None:
    rows = [attempt(place, reward=place / 100) for place in range(100)]
    rows[40] = attempt(40, reward=0.4, status="truncated")
    rows[70] = attempt(70, status="infra_error")
    found = attempts.facts(written(tmp_path / "scored", rows))
    chosen = attempts.choose(found)
    assert len(chosen) == 10
    assert {40, 70, 0, 99} <= set(chosen)
    assert [place for place in chosen if place != 70] == sorted(place for place in chosen if place != 70)
    assert chosen[-1] == 70
    assert max(after - before for before, after in zip(sorted(chosen), sorted(chosen)[1:], strict=False)) <= 20
    assert [row.trajectory_id for row in attempts.rows(tmp_path / "scored", chosen[:2])] == ["01/task-0/0/0", f"01/task-{chosen[1] // 4}/0/{chosen[1] % 4}"]


def test_rows_are_spread_over_lengths_where_nothing_is_scored(tmp_path: Path) -> None:
    rows = [attempt(place, num_tokens=1 + (place * 7) % 40) for place in range(40)]
    found = attempts.facts(written(tmp_path / "trajectories", rows))
    lengths = [int(found.lengths[place]) for place in attempts.choose(found)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1], len(lengths)) == (1, 40, 10)


def test_fewer_rows_than_ten_are_all_shown(tmp_path: Path) -> None:
    found = attempts.facts(written(tmp_path / "trajectories", [attempt(place) for place in range(3)]))
    assert attempts.choose(found) == [0, 1, 2]


def test_rows_are_found_over_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlpipe import artifact, dataset
    from rlpipe.trajectory import groups_of

    with dataset.Writer(tmp_path / "kept", rows_per_shard=8) as writer:
        for group in groups_of(attempt(place) for place in range(40)):
            writer.write(group)
    artifact.write_manifest(tmp_path / "kept")
    assert len(dataset.shards(tmp_path / "kept")) == 5
    assert [row.prompt for row in attempts.rows(tmp_path / "kept", [39, 8, 0])] == ["question 39", "question 8", "question 0"]


def test_evaluation_names_wins_and_regressions(tmp_path: Path) -> None:
    champion = {"a": True, "b": True, "c": False, "d": False, "e": True}
    now = {"a": True, "b": False, "c": True, "d": False, "e": None}
    before = evaluated(tmp_path / "before", champion, champion, round_index=0, decision="promote", accuracy=0.6)
    after = evaluated(tmp_path / "after", now, champion, round_index=1, decision="hold", accuracy=0.5)
    tasks.save(tmp_path / "eval.jsonl", [tasks.Task(task_id=name, prompt=f"ask {name}", reference=f"<{name}>") for name in now])
    made = record("evaluate", numbers={"greedy_accuracy": 0.5, "promoted": 0})
    page = Page(html.page(made, {"evaluation_in": before, "tasks": tmp_path / "eval.jsonl"}, {"evaluation": after}))
    text = page.words
    assert "Evaluate, round 1 hold 1 tasks won and 1 lost of 4" in text
    assert "The champion solved it, this policy does not: 1 task Task Prompt Reference Greedy completion Tokens Attempts right b ask b <b> says b 2 –" in text
    assert "This policy solves it, the champion did not: 1 task" in text
    assert "Could not be scored for both: 1 task" in text
    assert "engine lost" in text
    assert [found["aria-label"] for tag, found in page.elements if tag == "svg"] == ["Share of held-out tasks solved", "Number of held-out tasks of each kind"]


def test_start_is_compared_with_nothing(tmp_path: Path) -> None:
    folder = evaluated(tmp_path / "evaluation", {"a": True, "b": False}, {"a": True, "b": False}, round_index=0, decision="promote", accuracy=0.5)
    text = Page(html.page(record("start", round=0), {}, {"evaluation": folder})).text
    assert "Not solved: 1 task" in text
    assert "the champion did not" not in text


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_named(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"reports need {library}.*pip install 'rlpipe\[kubeflow\]'"):
        scored_page(tmp_path)
