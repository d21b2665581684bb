"""One engine in this process, and the latency of single requests by where their adapter is."""

from __future__ import annotations

import random
from typing import Any

import torch

from engine_patch.pool.tiers import AdapterTiers
from engine_patch.ref import AdapterRef
from tests.benchmarks import common, disk
from tests.benchmarks.common import seconds, synchronise

PROMPT_TOKENS = 256


class Latencies:
    """An engine in this process, its tiers, and adapters that are put where they are wanted."""

    def __init__(self, llm: Any, refs: list[AdapterRef], vocab: int) -> None:
        from engine_patch.requests import lora_request

        self.llm, self.refs, self._rng, self._vocab = llm, refs, random.Random(0), vocab
        # Made before files go cold: a server reads headers when it lists its folder.
        self.requests = {ref.digest: lora_request(ref.path.stem, ref.path) for ref in refs}
        self.tiers: AdapterTiers = llm.collective_rpc(lambda worker: worker.model_runner.lora_manager.preft)[0]
        for ref in refs:
            self.tiers.load(ref)
        self._scratch = torch.empty_like(self._host_bytes(refs[0]), device=common.device())
        self.cached: list[float] = []
        """Share of each file that was in the page cache before it was read cold."""

    def resident(self, ref: AdapterRef) -> float:
        """A request whose adapter is on the device."""
        self.answer(ref)
        self._expect(ref, host=True, device=True)
        return seconds(lambda: self.answer(ref))

    def host(self, ref: AdapterRef) -> float:
        """A request whose adapter is in host memory only."""
        self.tiers.load(ref)
        self._off_device(ref)
        self._expect(ref, host=True, device=False)
        return seconds(lambda: self.answer(ref))

    def cold(self, ref: AdapterRef) -> float:
        """A request whose adapter is on disk only, out of the page cache."""
        self._to_file(ref)
        taken = seconds(lambda: self.answer(ref))
        self._expect(ref, host=True, device=True)
        return taken

    def read(self, ref: AdapterRef) -> float:
        """No request: a cold file to host memory."""
        self._to_file(ref)
        return seconds(lambda: self.tiers.load(ref))

    def copy(self, ref: AdapterRef) -> float:
        """No request: as many bytes from host to device by one copy."""
        self.tiers.load(ref)
        source = self._host_bytes(ref)

        def work() -> None:
            self._scratch.copy_(source, non_blocking=True)
            synchronise()

        return seconds(work)

    def answer(self, ref: AdapterRef | None) -> None:
        """One request from its arrival to its token."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=[self._rng.randrange(self._vocab) for _ in range(PROMPT_TOKENS)])
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        request = self.requests[ref.digest] if ref else None
        (output,) = self.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
        if len(output.outputs[0].token_ids) != 1:
            raise RuntimeError(f"a request came back without its token: {output}")

    def _host_bytes(self, ref: AdapterRef) -> torch.Tensor:
        return self.tiers.host.adapters[ref.digest].bytes

    def _off_device(self, ref: AdapterRef) -> None:
        synchronise()
        self.tiers.want([], [])  # no request is left
        if ref.digest in self.tiers.device.adapters:
            self.tiers.device.drop(ref.digest)

    def _to_file(self, ref: AdapterRef) -> None:
        self._off_device(ref)
        self.tiers.forget(ref.digest)
        self._expect(ref, host=False, device=False)
        self.cached.append(disk.drop(ref.path))

    def _expect(self, ref: AdapterRef, host: bool, device: bool) -> None:
        found = (ref.digest in self.tiers.host.adapters, ref.digest in self.tiers.device.adapters)
        if found != (host, device):
            raise RuntimeError(f"the adapter is not where it should be measured: (host, device) is {found}")
