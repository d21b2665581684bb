"""`--fail-on`: what is refused before the run, and what is met after it."""

from __future__ import annotations

import pytest

from preft_cli.bench.fail_on import parse
from preft_cli.bench.results import Spread
from preft_cli.errors import UserError
from tests.unit.bench_results import make_result

ARMS = ["base", "lora", "lorap"]
RESULT = make_result({"base": [10, 10, 10], "lora": [4, 5, 4.5], "lorap": [8.7, 8.5, 9]})


def met(text: str) -> str | None:
    [condition] = parse([text], ARMS)
    return condition.met(RESULT)


@pytest.mark.parametrize(
    ("text", "is_met"),
    [
        ("lorap/base<0.9", True),
        ("lorap/base < 0.86", False),
        (" lorap / base <= 0.88 ", True),
        ("lorap/base.low<0.86", True),
        ("lorap/base.high<0.89", False),
        ("lorap/base.high<=0.91", True),
        ("lorap/base.median>0.8", True),
        ("lorap/lora>=1.5", True),
        ("base/lorap>1.1", True),  # the result keeps lorap/base
        ("failures==0", True),
        ("failures!=0", False),
        ("failures>0", False),
        ("lora.requests_per_second<5", True),
        ("lora.requests_per_second.high<4.9", False),
        ("lora.output_tokens_per_second<40", False),
        ("lora.preemptions>2", True),
        ("lora.preemptions>3", False),
        ("lora.failures>0", False),
    ],
)
def test_signs_and_quantities(text: str, is_met: bool) -> None:
    assert (met(text) is not None) == is_met


def test_the_sentence() -> None:
    assert met("lorap/base<0.9") == "lorap/base is 0.87 (0.85 to 0.9), which meets --fail-on lorap/base<0.9"
    assert met("failures == 0") == "failures is 0, which meets --fail-on failures == 0"
    assert met("lorap/base.low<0.9") == "lorap/base.low is 0.85, which meets --fail-on lorap/base.low<0.9"


def test_what_the_result_lacks_is_met() -> None:
    said = "the result has no lorap/base, so --fail-on lorap/base<0.1 counts as met"
    [ratio, speed] = parse(["lorap/base<0.1", "lorap.requests_per_second<1"], ARMS)
    without = RESULT.model_copy(update={"ratios": {}, "arms": {"base": RESULT.arms["base"]}})
    assert ratio.met(without) == said
    assert "counts as met" in str(speed.met(without))
    assert "counts as met" in str(met("lora.ttft_p99_ms>500"))  # an offline result
    nothing = RESULT.model_copy(update={"ratios": {"base/lorap": Spread(median=0, low=0, high=0)}})
    assert "counts as met" in str(ratio.met(nothing))


def test_latencies_of_an_online_result() -> None:
    online = make_result({"base": [10, 10], "lora": [4, 4]}, ttft_ms=300)
    limit, far = parse(["lora.ttft_p99_ms>899", "lora.tpot_p50_ms>31"], ["base", "lora"])
    assert limit.met(online) == "lora.ttft_p99_ms is 900 (900 to 900), which meets --fail-on lora.ttft_p99_ms>899"
    assert far.met(online) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a quantity, a sign and a number, such as lorap/base<0.9"),
        ("lorap/base", "expected a quantity"),
        ("lorap/base<", "expected a quantity"),
        ("lorap/base<0.9<1", "expected a quantity"),
        ("lorap/base=0.9", "expected a quantity"),
        ("lorap/base<nan", "expected a quantity"),
        ("lorap/base<inf", "expected a quantity"),
        ("lorap/base<much", "expected a quantity"),
        ("lorp/base<0.9", "no arm lorp (did you mean lorap?); its arms: base, lora, lorap (bench.arms)"),
        ("direftp/base<0.9", "no arm direftp; its arms"),
        ("direft.requests_per_second<1", "no arm direft"),
        ("lorap/lorap<0.9", "a ratio needs two arms"),
        ("lorap/base.mean<0.9", "no arm base.mean (did you mean base?)"),
        ("lora.request_per_second<1", "(did you mean lora.requests_per_second?)"),
        ("failure>0", "there is no quantity failure (did you mean failures?)"),
        ("lora<1", "there is no quantity lora; known: A/B"),
        ("failures.low>0", "there is no quantity failures.low"),
    ],
)
def test_nonsense_is_refused_before_the_run(text: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(["failures>0", text], ARMS)
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith(f"--fail-on {text.strip()}: ")
    assert said in str(refused.value)
