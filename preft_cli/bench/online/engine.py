"""The OpenAI server of an arm as an `Engine`: what its users would wait for."""

from __future__ import annotations

from importlib import import_module

from engine_patch.status import require_live
from preft_cli.bench.engine import Answered, EngineSpec
from preft_cli.bench.offline import difference
from preft_cli.bench.online.command import adapter_name, free_port, server_command
from preft_cli.bench.online.load import BASE_NAME, run_load
from preft_cli.bench.online.readings import read_counters, read_settings
from preft_cli.bench.online.server import Server
from preft_cli.bench.results import Counters
from preft_cli.bench.workload import Request
from preft_cli.config.schema import LoadConfig
from preft_cli.serving.status import fetch


class OnlineEngine:
    """A server in a child process, and vLLM's own load generator in this one."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start the server and wait until it is ready.

        Raises:
            UserError: it did not come up, or does not answer.
            PreftError: a process of an arm of preft's runs without the prompt rule.
        """
        self._spec = spec
        self._names = [adapter_name(path) for path in spec.adapters]
        port = free_port()
        self._server = Server(server_command(spec, port), port)
        try:
            import_module("vllm.benchmarks.serve")  # takes a good part of the server's start: so now, beside it
            self._server.wait_ready()
            self.settings = read_settings(self._server.get("/server_info?config_format=json"))
            self.patch = self._patch_status() if spec.plugin else []
        except BaseException:  # the worker's SIGTERM too: nobody else has the server's process yet
            self._server.stop()
            raise

    def answer(self, requests: list[Request], *, warm_up: bool = False) -> Answered:
        """See `Engine.answer`. With adapters, each request goes to the model name of its own."""
        self._server.reset_prefix_cache()
        before = self._count()
        outcome = run_load(
            self._server.url,
            requests,
            [self._names[request.adapter] if self._names else BASE_NAME for request in requests],
            LoadConfig() if warm_up else self._spec.load,
            closed_loop=self.settings["max_num_seqs"],
            seed=self._spec.seed,
        )
        return Answered(outcome.seconds, outcome.answers, difference(before, self._count()), outcome.latency)

    def stop(self) -> None:
        """End the server, and with it its engine."""
        self._server.stop()

    def _count(self) -> Counters:
        return read_counters(self._server.get("/metrics").decode(), tiers=self._spec.plugin)

    def _patch_status(self) -> list[dict[str, object]]:
        processes = fetch(self._server.url).processes
        require_live(processes)
        return [process.model_dump() for process in processes]
