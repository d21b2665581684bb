"""`train.quantize_base`: refused by name before weights are loaded, or trained like any other base (needs bitsandbytes)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from preft_cli.adapters.folder import load_trained
from preft_cli.errors import UserError
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training import plan, quantise, session
from preft_cli.training.run import train
from tests.unit.test_training_run import ROWS, config
from tests.unit.tiny import save_tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantised")
    save_tiny(root / "base")
    for name in ("train", "heldout"):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return root


def test_without_bitsandbytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    monkeypatch.setattr(session, "load_base", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match=r"train\.quantize_base: bitsandbytes is not installed: pip install"):
        train(config(root / "base", train={"quantize_base": "4bit"}), root)
    quantise.check_quantised(None)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("method", ["direftp", "lorap+direftp"])
def test_the_base_is_quantised_and_the_mask_holds(
    root: Path, monkeypatch: pytest.MonkeyPatch, bits: str, method: str
) -> None:
    pytest.importorskip("bitsandbytes")
    seen: list[AdaptedModel] = []
    original = session.Session.fit

    def fit(self: session.Session, checkpoint: Path | None) -> None:
        original(self, checkpoint)
        seen.append(self.adapted)

    monkeypatch.setattr(session.Session, "fit", fit)
    options = {"quantize_base": bits, "max_steps": 5, "output_dir": f"{bits}-{method}"}
    result = train(config(root / "base", adapter={"method": method}, train=options), root)
    assert result.held_out is not None
    assert result.held_out.adapter < result.held_out.base
    (adapted,) = seen
    assert sum(type(m).__module__.startswith("bitsandbytes") for m in adapted.model.modules()) == 14
    assert {parameter.dtype for parameter in adapted.trainable().values()} == {torch.float32}
    saved = load_trained(root / options["output_dir"] / "adapter")
    assert saved.meta["note"] == f"trained on a {bits[0]}-bit base; serve on the unquantised base"

    ids = torch.tensor([[5, 6, 7, 8]], device=adapted.model.device)
    adapted.model.eval()

    def logits(adapted_tokens: int) -> torch.Tensor:
        adapted.mask.set(torch.arange(4, device=ids.device)[None] < adapted_tokens)
        with torch.no_grad():
            return adapted.model(input_ids=ids).logits[0]

    with adapted.disabled():
        plain = logits(4)
    torch.testing.assert_close(logits(0), plain, msg="nothing is adapted where the mask says so")
    assert (logits(2)[:2] - logits(4)[:2]).abs().max() < 1e-4
    assert (logits(2)[2:] - logits(4)[2:]).abs().max() > 1e-3
