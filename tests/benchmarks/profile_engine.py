"""An engine that lives in this process: its objects, the kinds of its steps, and how its methods are replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine_patch.rule import num_adapted
from tests.benchmarks.profile_report import DECODE, EMPTY, FULL_GRAPH, MODEL, OPS, PIECES, PROMPT


class Live:
    """The objects of an in-process engine. Methods are replaced on them, not on their classes: no other engine sees it."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner

    def timed_parts(self) -> list[tuple[str, Any, str]]:
        """(one of `PARTS`, owner, method); the owner is None where this engine has none."""
        from vllm.v1.executor.uniproc_executor import AsyncOutputFuture

        runner, graphs = self.runner, getattr(self.runner, "cudagraph_manager", None)
        lora_state = getattr(runner, "lora_state", None) or getattr(runner, "input_batch", None)
        return [
            ("execute", runner, "execute_model"),
            ("  prepare inputs", runner, "prepare_inputs"),
            ("  prepare inputs", runner, "_prepare_inputs"),
            ("  prepare attention", runner, "prepare_attn"),
            ("  active adapters", lora_state, "get_activate_loras"),
            ("  token map", lora_state, "make_lora_inputs"),
            ("  set adapters", runner, "_set_active_loras"),
            (FULL_GRAPH, graphs, "run_fullgraph"),
            (PIECES, graphs, "run_pw_graph"),
            (MODEL, runner.model, "forward"),
            *((OPS, owner, name) for owner, name in self._ops()),
            ("sample", runner, "sample_tokens"),
            ("wait", AsyncOutputFuture, "result"),
            ("update", self.scheduler, "update_from_output"),
            ("outputs", self.engine.output_processor, "process_outputs"),
        ]

    def _ops(self) -> list[tuple[Any, str]]:
        """What computes adapters: on a GPU, what the custom ops' bodies call; torch has those themselves."""
        if torch.cuda.is_available():
            module = sys.modules.get("engine_patch.kernels.op")
            return [(module, name) for name in ("shrink", "expand", "silu_and_mul", "silu_and_mul_adapted")]
        manager = getattr(getattr(self.runner, "lora_manager", None), "_adapter_manager", None)
        wrappers = getattr(manager, "punica_wrapper_mapping", {}).values()
        return [(wrapper, name) for wrapper in wrappers for name in ("add_lora_linear", "add_intervention")]


class PromptCounter:
    """How many tokens of a step are of prompts; to be asked about every step, in order."""

    def __init__(self) -> None:
        self._prompt_len: dict[str, int] = {}

    def __call__(self, output: Any) -> int:
        cached = output.scheduled_cached_reqs
        first = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self._prompt_len[new.req_id] = len(new.prompt_token_ids)
            first[new.req_id] = new.num_computed_tokens
        rows = [(self._prompt_len[id_], first[id_], n) for id_, n in output.num_scheduled_tokens.items()]
        return int(num_adapted(*np.array(rows, dtype=np.int64).T).sum()) if rows else 0


def kind_of(output: Any, prompt_tokens: int) -> str:
    """Of a step."""
    return PROMPT if prompt_tokens else DECODE if output.total_num_scheduled_tokens else EMPTY


def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put `make(original)` in the place of `owner.name`; returns what undoes it."""
    own = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    return (lambda: delattr(owner, name)) if own is None else lambda: setattr(owner, name, own)


@contextmanager
def each_step(live: Live, tell: Callable[[str], None]) -> Iterator[None]:
    """`tell` is called with the kind of every step that has tokens, when it is scheduled and before it is executed."""
    count = PromptCounter()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if (kind := kind_of(output, count(output))) != EMPTY:
                tell(kind)
            return output

        return schedule

    undo = replaced(live.scheduler, "schedule", make)
    try:
        yield
    finally:
        undo()
