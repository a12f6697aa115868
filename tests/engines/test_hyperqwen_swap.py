"""vLLM swapped in place between two real checkpoints: the answers are a fresh engine's, and a mixture is found out."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs import all_of, has_vllm, hyperqwen_spec

from citadel.engine import EngineInfo, EngineSpec, Job, Sampling
from citadel.errors import LlmUnavailable
from engines.hyperqwen import Hyperqwen
from tests.models.checkpoints import make, read_weights, reordered, write_weights

pytestmark = [pytest.mark.real, has_vllm, pytest.mark.timeout(300)]

SWAPS = 20
PROMPTS = [[7, 300, 12], list(range(40, 60)), [(11 * place) % 800 for place in range(90)]]
"""The last is long enough for whole blocks of it to be kept for the next job that begins alike."""


def spec(model: str, folder: Path, cache: Path) -> EngineSpec:
    hyperqwen_spec(folder)
    return EngineSpec(model, folder, "batch", 4, 512, None, cache)


async def answers(engine: Any, run: str) -> list[Any]:
    """Tokens and log probabilities of every prompt, exactly, and how much of each an earlier model's job left."""
    found: list[Any] = []
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)
        pieces = await all_of(engine, Job(f"{run}-{number}", prompt, sampling))
        found.append([(entry.token_id, entry.logprob, entry.top) for piece in pieces for entry in piece.logprobs])
        assert {piece.cached_tokens for piece in pieces} == {0}
    return found


@pytest.mark.parametrize(
    "tied", [pytest.param(False, id="untied", marks=pytest.mark.all), pytest.param(True, id="tied")]
)
async def test_after_each_of_20_swaps_a_model_answers_as_loaded_afresh_and_a_mixture_is_found_out(
    tmp_path: Path, tied: bool
) -> None:
    folders = [make(tmp_path / "one", tied=tied), make(tmp_path / "other", reordered, tied=tied)]
    specs = [spec(folder.name, folder, tmp_path / "cache") for folder in folders]
    first = await Hyperqwen.load(specs[0], lambda _fraction: None)
    fresh = [await answers(first, "fresh-0")]
    await first.close()
    engine = await Hyperqwen.load(specs[1], lambda _fraction: None)
    try:
        fresh.append(await answers(engine, "fresh-1"))
        assert fresh[0] != fresh[1]
        for number in range(SWAPS):
            turn = number % 2
            engine = await engine.swap_to(specs[turn])
            assert await answers(engine, f"swap-{number}") == fresh[turn], f"swap {number}"
        await mixtures_are_found_out(engine, folders, tmp_path)
        engine = await engine.swap_to(specs[0])
        assert await answers(engine, "again") == fresh[0], "whatever was in it"
        await an_answer_that_is_not_the_recorded_one_fails_the_swap(engine, specs[1])
    finally:
        await engine.close()


async def mixtures_are_found_out(engine: Any, folders: list[Path], tmp_path: Path) -> None:
    """The engine is the second model: with one tensor of the first, and with one that a checkpoint lacks."""
    from engines.hyperqwen_swap import first_answer  # noqa: PLC0415 - it imports vLLM

    llm, model = engine._parts.llm, engine._model
    one, other = (read_weights(folder) for folder in folders)
    half = make(tmp_path / "half")
    answer = await first_answer(llm, model)
    for name in ("model.layers.1.self_attn.k_norm.weight", "model.embed_tokens.weight"):
        write_weights(half, {**other, name: one[name]})
        assert await llm.collective_rpc("swap_weights", args=(str(half),)) == [[]]
        assert await first_answer(llm, model) != answer, name
    write_weights(half, {name: tensor for name, tensor in other.items() if name != "model.norm.weight"})
    assert await llm.collective_rpc("swap_weights", args=(str(half),)) == [["model.norm.weight"]]


async def an_answer_that_is_not_the_recorded_one_fails_the_swap(engine: Any, to: EngineSpec) -> None:
    for file in (to.cache_dir / "first-answers").iterdir():
        file.write_text("[0.5]")
    with pytest.raises(LlmUnavailable, match="answers otherwise"):
        await engine.swap_to(to)
    assert engine.dead is not None


def test_an_expert_that_lacks_a_weight_is_told_from_what_no_expert_has() -> None:
    with warnings.catch_warnings(action="ignore"):  # vLLM and torch give some about their own code
        import torch  # noqa: PLC0415 - it takes seconds

        from engines.hyperqwen_worker import some_lack  # noqa: PLC0415 - it imports vLLM

    experts, nothing = torch.zeros(4, 2, 3), float("nan")
    assert not some_lack(experts)
    experts[:, 1] = nothing
    assert not some_lack(experts), "as a part that this architecture does not use"
    experts[:2] = 0.0
    assert some_lack(experts)


# Sleep mode, which no CPU has: a stand-in for vLLM takes note of what is asked of it.


class Asked:
    """In place of an AsyncLLM that is loaded with `enable_sleep_mode`; whether it wakes up is `wakes`."""

    def __init__(self, *, sleeps: bool, wakes: bool = True) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
        self.calls: list[str] = []
        self._wakes = wakes

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake {' '.join(tags)}")
        return self._wakes and tags == ["kv_cache"]

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[list[str]]:
        self.calls.append(method)
        return [[], []]

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("forget")
        return True


@pytest.fixture
def asked_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Awaitable[Any]]:
    """Asks a stand-in for a swap that its answer would let pass."""
    from engines import hyperqwen_swap  # noqa: PLC0415 - it imports vLLM

    folders = [make(tmp_path / "one"), make(tmp_path / "other", reordered)]
    one, other = (spec(folder.name, folder, tmp_path / "cache") for folder in folders)
    key = hyperqwen_swap.swap_key(one)
    assert key is not None
    old = hyperqwen_swap.Model(
        one, EngineInfo(512, 4, "stand-in"), hyperqwen_swap.Limits(512, 896, seeds=True, guesses=False), key, "identity"
    )
    hyperqwen_swap._answers(other).write(key, hyperqwen_swap.identity(folders[1]), [1.0])

    async def answer(*_: Any) -> list[float]:
        return [1.0]

    monkeypatch.setattr(hyperqwen_swap, "first_answer", answer)
    return lambda llm: hyperqwen_swap.swap(llm, old, other)


async def test_asleep_the_weights_are_loaded_before_the_cache_is_woken(asked_swap: Any) -> None:
    llm = Asked(sleeps=True)
    assert (await asked_swap(llm)).name == "other"
    assert llm.calls == ["sleep 2", "wake weights", "swap_weights", "wake kv_cache", "forget"]


async def test_without_sleep_mode_nothing_sleeps(asked_swap: Any) -> None:
    llm = Asked(sleeps=False)
    await asked_swap(llm)
    assert llm.calls == ["swap_weights", "forget"]


async def test_an_engine_that_does_not_wake_up_is_not_used(asked_swap: Any) -> None:
    with pytest.raises(LlmUnavailable, match="wake up"):
        await asked_swap(Asked(sleeps=True, wakes=False))
