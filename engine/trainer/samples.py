"""Answers to the job's sample_prompts while it trains, greedy and short: of all a training does they change only its
time."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate

from engine.protocol.job import Job
from engine.trainer.model import encode_prompt
from engine.trainer.strategies.base import PartitionedStrategy, Strategy
from engine.training.process import Control
from engine.training.reporting import Reporter

SHARE = 0.05
"""The part of the training time so far that answers take at most, but for the first and the last ones."""


@dataclass
class Samples:
    """Every call is made by every rank. Where rank 0 has the whole model, it answers alone; the others wait for it in
    the collective that comes next."""

    job: Job
    strategy: Strategy
    tokenizer: Any
    control: Control
    reporter: Reporter
    raw: bool
    """Prompts are continued, as the job's data are texts."""

    def __post_init__(self) -> None:
        prompts = self.job.sample_prompts or ()
        self._prompts = {prompt: encode_prompt(self.tokenizer, prompt, raw=self.raw) for prompt in prompts}
        self._began = self._spent_s = self._last_s = 0.0

    def begin(self, iteration: int) -> None:
        """The training begins after `iteration`: the first answers are given, if it is 0. Raises PeerLost."""
        self._began = time.perf_counter()
        if iteration == 0:
            self.take(0)

    def take(self, iteration: int, *, last: bool = False) -> None:
        """Answer all prompts if that is due after `iteration`, as it is for the `last`. Raises PeerLost."""
        strategy, collective = self.strategy, self.strategy.collective
        divided = strategy if isinstance(strategy, PartitionedStrategy) else None
        due = last or iteration % (self.job.sample_every or self.job.steps_per_eval) == 0
        if not due or (divided is None and collective.rank > 0):
            return
        fits = last or collective.rank > 0 or self._fits(iteration)
        if divided is not None:
            fits = collective.all_sum(mx.array(int(fits), mx.int32)).item() == collective.size
        if not fits:
            return
        started = time.perf_counter()
        self.reporter.phase("generating")
        strategy.model.eval()
        answers = self._answer_whole() if divided is None else self._answer_divided(divided)
        strategy.model.train()
        self._last_s = time.perf_counter() - started
        self._spent_s += self._last_s
        facts = {"seconds": self._last_s / len(self._prompts), "share": self._share() if iteration else None}
        for prompt, (text, tokens) in zip(self._prompts, answers if collective.rank == 0 else (), strict=False):
            self.reporter.event("sample", iteration=iteration, prompt=prompt, text=text, tokens=tokens, **facts)
            self.reporter.print(f"iteration {iteration}  {prompt!r}: {text!r}")

    def _share(self, more_s: float = 0.0) -> float:
        """All seconds for answers, and `more_s`, over those for the training."""
        return (self._spent_s + more_s) / (time.perf_counter() - self._began - self._spent_s)

    def _fits(self, iteration: int) -> bool:
        """As many seconds as last time are within SHARE; the first ones always are."""
        if iteration == 0 or (share := self._share(self._last_s)) <= SHARE:
            return True
        self.reporter.warn(
            f"iteration {iteration}: sample_prompts would have taken {share:.1%} of the training time by now, and at "
            f"most {SHARE:.0%} is for them: their answers are put off",
            about="samples",
        )
        return False

    def _answer_whole(self) -> list[tuple[str, int]]:
        """Each answer and its tokens; fewer, where this rank is asked to stop."""
        answers, limit = list[tuple[str, int]](), {"max_tokens": self.job.sample_tokens}
        for tokens in self._prompts.values():
            text, count = "", 0
            with closing(stream_generate(self.strategy.model, self.tokenizer, tokens, **limit)) as responses:
                for response in responses:
                    text, count = text + response.text, response.generation_tokens
                    self.reporter.going_on()
                    if self.control.stop.is_set():
                        return answers
            answers.append((text, count))
        return answers

    def _answer_divided(self, strategy: PartitionedStrategy) -> list[tuple[str, int]]:
        """As above, if any rank is asked to stop; all prompts at once and without a cache: a forward pass moves as much
        between ranks for one row as for several."""
        prompts, ends = list(self._prompts.values()), self.tokenizer.eos_token_ids
        answers: list[list[int]] = [[] for _ in prompts]
        for _ in range(self.job.sample_tokens):
            rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            width = max(map(len, rows))
            # What is behind a row's end is not seen before it.
            logits = strategy.logits(mx.array([row + [0] * (width - len(row)) for row in rows], mx.int32))
            chosen: Any = [0] * len(rows)
            if logits is not None:
                last = mx.array([len(row) - 1 for row in rows])
                chosen = mx.argmax(logits[mx.arange(len(rows)), last], axis=-1).tolist()
            message = mx.array([*chosen, int(self.control.stop.is_set())], mx.int32)
            summed: Any = strategy.collective.all_sum(message).tolist()
            *tokens, stopping = summed
            self.reporter.going_on()
            if stopping:
                return []
            for answer, token in zip(answers, tokens, strict=True):
                if not answer or answer[-1] not in ends:
                    answer.append(token)
            if all(answer[-1] in ends for answer in answers):
                break
        texts = [[token for token in answer if token not in ends] for answer in answers]
        return [(self.tokenizer.decode(text), len(answer)) for text, answer in zip(texts, answers, strict=True)]
