"""Run schedules on one engine, in this process, and say what every request was answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_patch.requests import lora_request
from engine_patch.store.file import read_header
from engine_patch.store.format import ITEMSIZE, layout_of
from engine_patch.store.layout import PAGE_BYTES
from tests.schedules.draw import BLOCK, MAX_MODEL_LEN, Ask, EngineSetting, Schedule


@dataclass
class Answer:
    """One sample of one request, perhaps cut by an abort."""

    ask: Ask
    prompt: list[int]
    content: int | None
    """Index of the adapter's content when the request was made; None for the base model."""
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float] | None


@contextmanager
def engine(model: Path, setting: EngineSetting, files: list[Path]) -> Iterator[Any]:
    """The `LLM`, with its engine core in this process, so that mutations reach it and nothing runs beside it."""
    import torch
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        str(model),
        dtype=setting.dtype,
        enable_lora=True,
        max_loras=setting.slots,
        additional_config={"preft": pools(setting, files)},
        max_lora_rank=setting.max_rank,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.budget,
        block_size=BLOCK,
        num_gpu_blocks_override=setting.blocks,
        enable_prefix_caching=setting.prefix_caching,
        scheduling_policy=setting.policy,
        kv_cache_memory_bytes=1 << 28,
        tensor_parallel_size=setting.tensor_parallel,
        enforce_eager=setting.eager or not torch.cuda.is_available(),
        disable_log_stats=False,
        skip_tokenizer_init=True,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def pools(setting: EngineSetting, files: list[Path]) -> dict[str, int]:
    """The sizes of the pools in bytes, as the engine takes them."""
    itemsize = ITEMSIZE[setting.dtype]
    largest = max(layout_of(read_header(file).groups, itemsize).num_pages for file in files) * PAGE_BYTES
    return {"gpu_pool_bytes": int(setting.pool * largest), "host_pool_bytes": int(setting.host * largest)}


class Driver:
    """Names and what they stand for outlive a schedule, as they do in a server."""

    def __init__(self, llm: Any, files: list[Path], temperature: float = 1.0) -> None:
        self._engine, self._files, self._temperature = llm.llm_engine, files, temperature
        self._content: dict[str, int] = {}
        self._count = 0
        self.reloads_midway = 0
        """Names that came to stand for another content while requests for the former were running."""

    def run(self, schedule: Schedule) -> list[Answer]:
        """Step the engine until everything has ended; the answers of all samples."""
        waiting, reloads = list(enumerate(schedule.asks)), sorted(schedule.reloads)
        running: dict[str, tuple[int, int]] = {}
        answers: dict[tuple[int, int], Answer] = {}
        ended: set[int] = set()
        asked: dict[int, tuple[list[int], int | None]] = {}
        step = 0
        while waiting or running:
            while reloads and reloads[0][0] <= step:
                _, name, content = reloads.pop(0)
                asking = any(schedule.asks[index].name == name for index, _ in running.values())
                self.reloads_midway += asking and self._content.get(name) not in (None, content)
                self._content[name] = content
            for index, ask in list(waiting):
                if ask.arrival > step or (ask.second_turn_of is not None and ask.second_turn_of not in ended):
                    continue
                waiting.remove((index, ask))
                before = answers[ask.second_turn_of, 0] if ask.second_turn_of is not None else None
                prompt = [*before.prompt, *before.tokens, *ask.prompt] if before else ask.prompt
                prompt = prompt[: MAX_MODEL_LEN - ask.max_tokens]
                asked[index] = prompt, self._add(index, ask, prompt, running, step)
            # An engine core in another process answers only if there is something to do.
            for out in self._engine.step() if running else ():
                if out.request_id not in running:  # aborted, with an answer on its way
                    continue
                index, _ = running[out.request_id]
                for sample in out.outputs:
                    answers[index, sample.index] = self._answer(schedule.asks[index], *asked[index], out, sample)
                if out.finished:
                    ended.add(index)
                    del running[out.request_id]
            for request_id, (index, began) in list(running.items()):
                limit = schedule.asks[index].abort_after
                if limit is not None and step - began >= limit:
                    self._engine.abort_request([request_id])
                    ended.add(index)
                    del running[request_id]
            step += 1
        return list(answers.values())

    def _add(
        self, index: int, ask: Ask, prompt: list[int], running: dict[str, tuple[int, int]], step: int
    ) -> int | None:
        """Hand the request to the engine; the content that its adapter's name stands for now."""
        from vllm import SamplingParams

        content = None
        if ask.name is not None:
            content = self._content.setdefault(ask.name, len(self._content) % len(self._files))
        sampling = SamplingParams(
            temperature=self._temperature,
            n=ask.n,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if ask.prompt_logprobs else None,
            detokenize=False,
        )
        self._count += 1
        request_id = f"r{self._count}"
        adapter = lora_request(ask.name, self._files[content]) if ask.name and content is not None else None
        self._engine.add_request(
            request_id, {"prompt_token_ids": prompt}, sampling, lora_request=adapter, priority=ask.priority
        )
        running[request_id] = index, step
        return content

    @staticmethod
    def _answer(ask: Ask, prompt: list[int], content: int | None, out: Any, sample: Any) -> Answer:
        logprobs = [step[token].logprob for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        given = None
        if ask.prompt_logprobs and out.prompt_logprobs:
            given = [step[token].logprob for step, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)]
        return Answer(ask, prompt, content, list(sample.token_ids), logprobs, given)
