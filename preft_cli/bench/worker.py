"""One arm in its own process: `python -m preft_cli.bench.worker SPEC.json RESULT.json`.

Standard input must be a pipe from the process that started it: when that process dies, so does everything here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from preft_cli.bench.results import Repetition, WorkerResult, write_json
from preft_cli.bench.workload import Request, Workload, failure

SHOWN_FAILURES = 10

GRACE_S = 10.0
"""Seconds that the engine has to stop by itself when the parent has died."""


class WorkerSpec(BaseModel):
    """All that the process needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: str
    engine_args: dict[str, Any]
    requests: Path
    """A `Workload` as JSON, one file for all arms."""
    adapters: list[Path]
    """Empty: no adapters. A `.preft` file or a PEFT folder each; requests name them by position."""
    plugin: bool
    """Whether preft's engine plugin must be live."""
    residual_stream: bool = False
    """`model.residual_stream`."""
    progress: Path
    """One `Progress` a line is appended here."""


class Progress(BaseModel):
    """A phase that ended."""

    phase: str
    seconds: float
    note: str = ""


def main(arguments: list[str]) -> None:
    """Run the arm of `SPEC.json`, write `RESULT.json`."""
    spec_path, result_path = map(Path, arguments)
    # Leave through the interpreter's exit, where the engine takes down its processes and shared memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=die_with_parent, daemon=True).start()
    write_json(run_arm(WorkerSpec.model_validate_json(spec_path.read_text())), result_path)


def die_with_parent() -> None:
    """Wait for the end of standard input, then end the whole process group: no engine outlives its benchmark."""
    # Not sys.stdin.read(): its lock, held by this thread, would break the interpreter's exit.
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def run_arm(spec: WorkerSpec) -> WorkerResult:
    """Start the engine, warm it up, time the repetitions."""
    from vllm import LLM

    workload = Workload.model_validate_json(spec.requests.read_text())
    started = time.perf_counter()
    llm = LLM(**spec.engine_args, **plugin_args(spec))
    start_seconds = time.perf_counter() - started
    patch = patch_status(llm) if spec.plugin else []
    report(spec, "start", start_seconds)
    loras = [lora_request(index, path) for index, path in enumerate(spec.adapters)]
    failed: list[str] = []
    warmed = run_repetition(llm, workload.warmup, loras, failed)
    report(spec, "warm-up", warmed.seconds)
    repetitions = []
    for requests in workload.repetitions:
        done = run_repetition(llm, requests, loras, failed)
        repetitions.append(done)
        report(spec, "repetition", done.seconds, f"{done.requests_per_second:.2f} req/s")
    return WorkerResult(
        arm=spec.arm,
        requests_digest=workload.digest(),
        start_seconds=start_seconds,
        engine=engine_settings(llm),
        patch=patch,
        repetitions=repetitions,
        failed=failed[:SHOWN_FAILURES],
    )


def plugin_args(spec: WorkerSpec) -> dict[str, Any]:
    """The plugin's engine arguments: all adapters stay in host memory, as the stock engine's do."""
    if not spec.plugin:
        return {}
    needed = sum(path.stat().st_size for path in spec.adapters)
    options = {"host_pool_bytes": max(needed, 1 << 30), "residual_stream": spec.residual_stream}
    return {"additional_config": {"preft": options}}


def run_repetition(llm: Any, requests: list[Request], loras: list[Any], failed: list[str]) -> Repetition:
    """Answer all requests at once and time it; failures are added to `failed` in words."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests]
    lengths = [{"min_tokens": request.output_len, "max_tokens": request.output_len} for request in requests]
    params = [SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **length) for length in lengths]
    adapters = [loras[request.adapter] for request in requests] if loras else None
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    seconds = time.perf_counter() - started
    answers = [(len(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]
    return judge(requests, answers, seconds, failed)


def judge(
    requests: list[Request], answers: list[tuple[int, str | None]], seconds: float, failed: list[str]
) -> Repetition:
    """Count what came back against what was asked; a missing answer is a failure of no tokens."""
    answers = answers + [(0, "no answer")] * (len(requests) - len(answers))
    pairs = zip(requests, answers, strict=True)
    reasons = [reason for request, (count, finish) in pairs if (reason := failure(request, count, finish))]
    failed += reasons
    return Repetition(
        seconds=seconds,
        requests=len(requests),
        tokens_asked=sum(request.output_len for request in requests),
        tokens_produced=sum(count for count, _ in answers),
        failures=len(reasons),
    )


def lora_request(index: int, path: Path) -> Any:
    """vLLM's name for an adapter: the stock engine takes PEFT folders, the plugin `.preft` files."""
    if path.suffix == ".preft":
        from engine_patch import requests

        return requests.lora_request(path.stem, path)
    from vllm.lora.request import LoRARequest

    return LoRARequest(path.name, index + 1, str(path))


def patch_status(llm: Any) -> list[dict[str, Any]]:
    """Status of the plugin in the engine core and in every worker.

    Raises:
        PreftError: if one of them runs without it: its numbers would be the stock engine's.
    """
    from engine_patch.status import ask_offline, require_live

    statuses = ask_offline(llm)
    require_live(statuses)
    return [status.model_dump() for status in statuses]


def engine_settings(llm: Any) -> dict[str, Any]:
    """The settings that decide speed, as the engine resolved them from its arguments and defaults."""
    config = llm.llm_engine.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    lora = config.lora_config
    return {
        "device": config.device_config.device_type,
        "dtype": str(model.dtype),
        "enforce_eager": model.enforce_eager,
        "compilation_mode": str(config.compilation_config.mode),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "lora": None
        if lora is None
        else {
            "max_loras": lora.max_loras,
            "max_cpu_loras": lora.max_cpu_loras,
            "max_lora_rank": lora.max_lora_rank,
            "dtype": str(lora.lora_dtype),
        },
    }


def report(spec: WorkerSpec, phase: str, seconds: float, note: str = "") -> None:
    """Tell the parent that a phase ended."""
    with spec.progress.open("a") as file:
        file.write(Progress(phase=phase, seconds=seconds, note=note).model_dump_json() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
