"""Continuous batching of one chunk. B = running attempts, P = prompt tokens, H = hidden width.

What all prompts begin with is computed once for the chunk, the rest of each prompt once for its group; attempts keep only
their own tokens. Attempts that end leave at once, and as soon as `max_tokens_in_flight` allows the next ones enter in the
order of the requests, so that who is computed together follows from the chunk's requests alone.

Tokens in flight are each prompt's once, while its group runs, and `max_new_tokens` for each running attempt. The cache
takes 2 x layers x key heads x head width x 2 or 4 bytes for each, up to twice that for prompts of unequal length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import torch

from rlpipe.engines.base import Begun, Completion, FinishReason, Request, unserved
from rlpipe.engines.kv_store import Store
from rlpipe.engines.runs import Decoding, Run, pieces, prefill
from rlpipe.engines.sampling import draw, uniforms
from rlpipe.engines.stopping import Ending
from rlpipe.engines.tree_model import LOGIT_ROWS, TOKENS_PER_PASS, TreeModel

MIN_SHARED = 16
"""Shorter common beginnings are computed with each prompt: a part of attention of their own costs as much."""


@dataclass(eq=False, slots=True)
class Group:
    """A request's prompt behind what all share, its attempts that wait, and how many run."""

    request: Request
    run: Run
    rest: np.ndarray
    waiting: deque[int]
    running: int = 0
    hidden: torch.Tensor | None = None
    """`[H]` at the prompt's last token, while the prompt is in the cache."""


@dataclass(eq=False, slots=True)
class Attempt:
    """One running attempt; `run` holds its own tokens but the newest."""

    group: Group
    index: int
    run: Run
    uniforms: np.ndarray
    token_ids: list[int]
    logprobs: list[float]
    hidden: torch.Tensor | None = None
    """`[H]` to draw the first token from."""
    reason: FinishReason | None = None

    def completion(self) -> Completion:
        """What the attempt has, as it ended."""
        ids, logprobs = np.array(self.token_ids, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        return Completion(self.group.request.request_id, self.index, ids, logprobs, self.reason or "abort")


def common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Tokens that all prompts begin with, at least one of each left over."""
    shortest = min(len(ids) for ids in prompts)
    rows = np.stack([ids[:shortest] for ids in prompts])
    differing = np.flatnonzero((rows != rows[0]).any(axis=0))
    return min(int(differing[0]) if len(differing) else shortest, shortest - 1)


def generate(
    model: TreeModel, ending: Ending, chunk: Sequence[Request], aborted: AbstractSet[str], max_tokens_in_flight: int | None = None
) -> Iterator[Completion]:
    """All attempts of a chunk, each as soon as it ends. `aborted` may grow meanwhile."""
    # Decided before the first yield: whoever reads the results may abort more.
    gone = [request for request in chunk if request.request_id in aborted]
    wanted = [request for request in chunk if request.request_id not in aborted]
    for request in gone:
        yield from unserved(request, "abort")
    if wanted:
        batch = Batch(model, ending, wanted, aborted, max_tokens_in_flight)
        while batch.busy:
            yield from batch.step()


@dataclass(slots=True)
class Entering:
    """What is computed for attempts that enter: token runs, and who draws from which run's end."""

    runs: list[tuple[Run, np.ndarray]] = field(default_factory=list)
    ends: list[Group | Attempt] = field(default_factory=list)


class Batch:
    """A chunk's attempts on their way; `attempts` lie in the slots of `own` in their order."""

    def __init__(self, model: TreeModel, ending: Ending, requests: Sequence[Request], aborted: AbstractSet[str], max_tokens_in_flight: int | None) -> None:
        self.model, self.ending, self.aborted, self.limit = model, ending, aborted, max_tokens_in_flight
        prompts = [request.prompt_ids for request in requests]
        shared = common_prefix(prompts) if len(prompts) > 1 else 0
        self.shared_ids = prompts[0][: shared if shared >= MIN_SHARED else 0]
        self.trunk = Run(Store(max(len(self.shared_ids), 1)), 0)
        self.num_new = max(request.sampling.max_new_tokens for request in requests)
        self.own = Store(self.num_new)
        self.groups = self._grouped(requests)
        self.attempts: list[Attempt] = []
        self.in_flight = 0
        self.decoding = Decoding(model.device)

    def _grouped(self, requests: Sequence[Request]) -> deque[Group]:
        """Groups with their prompts' rests; rests between two powers of two in length share a store."""
        shared = len(self.shared_ids)
        rests = [request.prompt_ids[shared:] for request in requests]
        longest: dict[int, int] = {}
        for rest in rests:
            size = (len(rest) - 1).bit_length()
            longest[size] = max(longest.get(size, 0), len(rest))
        stores = {size: Store(length) for size, length in longest.items()}
        above = self.trunk if shared else None
        return deque(
            Group(request, Run(stores[(len(rest) - 1).bit_length()], shared, above), rest, deque(range(len(request.seeds))))
            for request, rest in zip(requests, rests, strict=True)
        )

    @property
    def busy(self) -> bool:
        return bool(self.attempts or self.groups)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Let attempts enter, draw one token for each; returns those that ended."""
        running = len(self.attempts)
        entering = Entering()
        ended = self._admit(entering)
        self._prefill(entering)
        self._decode(self.attempts[:running])
        for first in range(0, len(self.attempts), LOGIT_ROWS):
            self._draw(self.attempts[first : first + LOGIT_ROWS])
        leaving = [attempt for attempt in self.attempts if attempt.reason is not None]
        for attempt in leaving:
            self._leave(attempt)
        return ended + [attempt.completion() for attempt in leaving]

    def _admit(self, entering: Entering) -> list[Completion]:
        """Attempts in order, as many as the tokens in flight allow; returns those that need no computing."""
        ended: list[Completion] = []
        while self.groups:
            group = self.groups[0]
            while group.waiting:
                if (done := self._done_before(group)) is not None:
                    ended.append(done)
                elif not self._fits(group):
                    return ended
                else:
                    self._enter(group, entering)
            self.groups.popleft()
            self._release(group)
        return ended

    def _done_before(self, group: Group) -> Completion | None:
        """The completion of the group's next attempt, if it was aborted or has begun with all its tokens."""
        request, index = group.request, group.waiting[0]
        begun = request.begun[index] if request.begun else None
        if request.request_id in self.aborted:
            reason: FinishReason | None = "abort"
        else:
            reason = self.ending.reason(begun.token_ids.tolist(), request.sampling) if begun is not None and len(begun.token_ids) else None
        if reason is None:
            return None
        group.waiting.popleft()
        had = begun or Begun(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
        return Completion(request.request_id, index, had.token_ids, had.logprobs, reason)

    def _cost(self, group: Group) -> int:
        """Tokens that one more attempt of the group brings into flight."""
        trunk = 0 if self.trunk.slot >= 0 else len(self.shared_ids)
        return self.num_new + (0 if group.run.slot >= 0 else len(group.rest) + trunk)

    def _fits(self, group: Group) -> bool:
        # One attempt always runs: the engine takes no request that is over the limit by itself.
        return self.limit is None or not self.attempts or self.in_flight + self._cost(group) <= self.limit

    def _enter(self, group: Group, entering: Entering) -> None:
        self.in_flight += self._cost(group)
        for run, ids in ((self.trunk, self.shared_ids), (group.run, group.rest)):
            if run.slot < 0 and len(ids):
                run.store.add(run, len(ids))
                entering.runs.append((run, ids))
                if run is group.run:
                    entering.ends.append(group)
        index = group.waiting.popleft()
        sampling = group.request.sampling
        begun = group.request.begun[index] if group.request.begun else Begun(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
        run = Run(self.own, len(group.request.prompt_ids), group.run)
        attempt = Attempt(group, index, run, uniforms(group.request.seeds[index], sampling.max_new_tokens), begun.token_ids.tolist(), begun.logprobs.tolist())
        self.own.add(run, len(attempt.token_ids))
        self.attempts.append(attempt)
        group.running += 1
        if attempt.token_ids:
            entering.runs.append((run, begun.token_ids))
            entering.ends.append(attempt)

    def _prefill(self, entering: Entering) -> None:
        """Compute what enters and keep the hidden state at each prompt's end."""
        last = {id(owner.run): owner for owner in entering.ends}
        for found in pieces(entering.runs, TOKENS_PER_PASS):
            hidden, end = self.model.hidden(prefill(found, self.model.device)), 0
            for piece in found:
                end += len(piece.ids)
                if id(piece.run) in last and piece.start + len(piece.ids) == piece.run.store.lengths[piece.run.slot]:
                    last[id(piece.run)].hidden = hidden[end - 1].clone()

    def _decode(self, attempts: Sequence[Attempt]) -> None:
        """Compute the newest token of each attempt that has drawn one."""
        if not attempts:
            return
        for attempt in attempts:
            self.own.lengths[attempt.run.slot] += 1
        hidden = self.model.hidden(self.decoding.step([attempt.run for attempt in attempts], [attempt.token_ids[-1] for attempt in attempts]))
        for attempt, row in zip(attempts, hidden, strict=True):
            attempt.hidden = row

    def _draw(self, attempts: Sequence[Attempt]) -> None:
        """One token for each attempt; siblings that draw from the same prompt share its logits."""
        owners = [attempt if attempt.hidden is not None else attempt.group for attempt in attempts]
        distinct = {id(owner): (owner, attempt.group.request.sampling.temperature) for owner, attempt in zip(owners, attempts, strict=True)}
        rows = {key: i for i, key in enumerate(distinct)}
        logits = self.model.logits(torch.stack([owner.hidden for owner, _ in distinct.values() if owner.hidden is not None]))
        temperature = torch.tensor([temperature for _, temperature in distinct.values()], device=logits.device)
        uniform = torch.tensor([attempt.uniforms[len(attempt.token_ids)] for attempt in attempts], dtype=torch.float64, device=logits.device)
        tokens, logprobs = draw(logits, temperature, uniform, torch.tensor([rows[id(owner)] for owner in owners], device=logits.device))
        for attempt, token, logprob in zip(attempts, tokens.tolist(), logprobs.tolist(), strict=True):
            self._advance(attempt, token, logprob)

    def _advance(self, attempt: Attempt, token: int, logprob: float) -> None:
        request = attempt.group.request
        if request.request_id in self.aborted:
            attempt.reason = "abort"
            return
        attempt.token_ids.append(token)
        attempt.logprobs.append(logprob)
        attempt.reason = self.ending.reason(attempt.token_ids, request.sampling)

    def _leave(self, attempt: Attempt) -> None:
        """Take an attempt out; the last one moves into its slot."""
        slot, last = attempt.run.slot, self.attempts.pop()
        self.own.remove(attempt.run)
        if last is not attempt:
            self.attempts[slot] = last
        self.in_flight -= self.num_new
        attempt.group.running -= 1
        self._release(attempt.group)

    def _release(self, group: Group) -> None:
        """Forget a prompt that nobody needs any more."""
        if group.running == 0 and not group.waiting and group.run.slot >= 0:
            group.run.store.remove(group.run)
            group.run.slot, group.hidden = -1, None
            self.in_flight -= len(group.rest)
