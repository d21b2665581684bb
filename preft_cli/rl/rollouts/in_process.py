"""Answers from an engine in this process, which computes with the trainer's adapter after one copy on the device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from engine_patch.adapter import LowRankPair
from engine_patch.errors import PreftError
from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress
from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling, Synced
from preft_cli.rl.rollouts.answers import require_room, require_whole
from preft_cli.rl.rollouts.engine_args import check_engine_options, engine_args
from preft_cli.rl.rollouts.seeds import prompt_seed
from preft_cli.training.foundation import Foundation

ENGINE = "the engine that samples answers"
FREED = "Error in memory profiling"
"""vLLM asserts that no other program frees memory of the GPU while it measures; any other assertion is a fault of ours."""
MEASURED = (
    ". Beside other programs on a GPU set serve.vllm_args.kv-cache-memory-bytes: then it does not measure what is free"
)


class InProcessRollouts:
    """`vllm.LLM` with one adapter; see `Rollouts`."""

    def __init__(self, config: PreftConfig, foundation: Foundation, answers: int) -> None:
        """`answers`: as many are sampled at once, if the engine can.

        Raises:
            UserError: the engine does not start.
        """
        # The engine core runs in this process too: only there can it read the trainer's tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.exceptions import VLLMError

        from engine_patch.live import LiveAdapter

        check_engine_options(config.serve.vllm_args, [field.name for field in fields(EngineArgs)])
        arguments = engine_args(config, foundation, answers)
        self._max_model_len: int = arguments["max_model_len"]
        self._on_cpu = foundation.precision.device == "cpu"
        self._llm: Any = None
        self._adapter: Any = None
        with progress(f"starting {ENGINE}"):
            try:
                self._llm = LLM(**arguments)
                self._adapter = LiveAdapter(
                    self._llm,
                    config.adapter.name,
                    config.adapter.method,
                    foundation.base.fingerprint,
                    in_flight=config.train.grpo.in_flight,
                )
            except BaseException as error:
                self.stop()
                freed = isinstance(error, AssertionError) and FREED in str(error)
                if not freed and not isinstance(
                    error, (PreftError, VLLMError, ValueError, RuntimeError, TypeError, OSError)
                ):
                    raise
                raise UserError(
                    f"{ENGINE} did not start: {first_line(error)}. Its settings are those of serve and serve.vllm_args; "
                    f"serve.gpu_memory_utilization is its share of the GPU{MEASURED if freed else ''}"
                ) from error

    def sync(self, pairs: Mapping[str, LowRankPair]) -> Synced:
        """See `Rollouts.sync`."""
        try:
            version = self._adapter.sync(pairs)
        except PreftError as error:
            raise UserError(f"the engine did not take the adapter's weights: {error}") from error
        return Synced(version.digest, version.seconds, version.num_bytes)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int, *, adapted: bool = True
    ) -> list[list[Rollout]]:
        """See `Rollouts.generate`."""
        from vllm.exceptions import VLLMError
        from vllm.inputs import TokensPrompt

        require_room(prompts, sampling, self._max_model_len, ENGINE)
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        seeds = [None if self._on_cpu else prompt_seed(seed, number) for number in range(len(prompts))]
        params = [sampling_params(sampling, n, own) for own in seeds]
        try:
            with self._drawing(seed):
                outputs = self._llm.generate(
                    inputs, params, use_tqdm=False, lora_request=self._adapter.request if adapted else None
                )
        except (VLLMError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{ENGINE} failed: {first_line(error)}. If memory ran out, lower serve.gpu_memory_utilization, "
                "serve.max_num_seqs or train.max_length"
            ) from error
        return [read_outputs(output.outputs, n) for output in outputs]

    @contextmanager
    def _drawing(self, seed: int) -> Iterator[None]:
        """vLLM's CPU engine draws from PyTorch's own generator.

        Requests with seeds of their own stop it where a prompt comes in several chunks, and are slow.
        """
        import torch

        if not self._on_cpu:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(prompt_seed(seed, 0))
            yield

    def stop(self) -> None:
        """See `Rollouts.stop`."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self._adapter is not None:
            self._adapter.close()
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._adapter = None
        cleanup_dist_env_and_memory()


def sampling_params(sampling: Sampling, n: int, seed: int | None) -> Any:
    """In vLLM's terms."""
    from vllm import SamplingParams

    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_ids),
        seed=seed,
        logprobs=0,
        detokenize=False,
    )


def read_outputs(outputs: Sequence[Any], n: int) -> list[Rollout]:
    """The answers to one prompt, from vLLM's `CompletionOutput`s.

    Raises:
        UserError: they are not whole.
    """
    try:
        found = [
            Rollout(
                ids := list(one.token_ids), [step[token].logprob for step, token in zip(one.logprobs, ids, strict=True)]
            )
            for one in outputs
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{ENGINE} gave no log-probability for some token ({error!r})") from error
    require_whole(found, [one.finish_reason for one in outputs], n, ENGINE)
    return found


def first_line(error: BaseException) -> str:
    """What an exception says, without the lines that help its author alone."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return next(iter(str(error).strip().splitlines()), "").rstrip(". ") or type(error).__name__
