"""The prefix cache in the engine: the same tokens with hits as without, and hits only where they may be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace.worker.engine.engine import TransformersEngine
from kit import engines, tiny_models

OUTPUT = 6
BLOCK = 4

# Full attention; sliding windows alone; both, with softcaps; both, with sinks and experts.
ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt_oss")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(llama: Path) -> Iterator[TransformersEngine]:
    engine = engines.tiny_engine(llama)
    yield engine
    engine.close()


def test_tokens_with_hits_equal_those_of_a_fresh_forward(folder: Path) -> None:
    engine = engines.tiny_engine(folder)
    stem, *tails = engines.random_prompts((30, 1, 2, 9, 17))
    first = engines.run(engine, [engines.job("stem", stem, max_new_tokens=OUTPUT)])["stem"]
    assert first.cached_tokens == 0
    # What extends the stem, what equals it, what leaves it half way, and what shares nothing: in one batch.
    prompts = [[*stem, *tail] for tail in tails] + [stem, stem[:17], [*stem[:14], 7, 7, 7], tails[-1]]
    out = engines.run(engine, [engines.job(str(i), p, max_new_tokens=OUTPUT) for i, p in enumerate(prompts)])
    assert [out[str(i)].cached_tokens for i in range(len(prompts))] == [28, 28, 28, 28, 28, 16, 12, 0]
    for number, prompt in enumerate(prompts):
        assert out[str(number)].token_ids == engines.reference(folder, prompt, OUTPUT)[0]


def test_output_is_found_as_a_prompt(folder: Path) -> None:
    engine = engines.tiny_engine(folder)
    (prompt,) = engines.random_prompts((10,))
    answer = engines.run(engine, [engines.job("a", prompt, max_new_tokens=14)])["a"].token_ids
    turn = [*prompt, *answer, 9, 8, 7]
    second = engines.run(engine, [engines.job("b", turn, max_new_tokens=OUTPUT)])["b"]
    assert second.cached_tokens == 20  # of 23 computed tokens, in blocks of four; the newest was never fed
    assert second.token_ids == engines.reference(folder, turn, OUTPUT)[0]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_token_is_always_computed(llama: Path, engine: TransformersEngine, length: int) -> None:
    (prompt,) = engines.random_prompts((length,))
    for turn in ("first", "again"):
        out = engines.run(engine, [engines.job(turn, prompt, max_new_tokens=OUTPUT)])[turn]
        assert out.cached_tokens == (0 if turn == "first" else (length - 1) // BLOCK * BLOCK)
        assert out.token_ids == engines.reference(llama, prompt, OUTPUT)[0]


def test_choices_that_arrive_together_compute_their_prompt_once(llama: Path, engine: TransformersEngine) -> None:
    (prompt,) = engines.random_prompts((41,))  # two steps of 24
    jobs = [engines.job(f"f.{i}", prompt, max_new_tokens=OUTPUT, temperature=1.0, sampling_seed=i) for i in range(6)]
    out = engines.run(engine, [*jobs, engines.job("f.6", prompt, max_new_tokens=OUTPUT)])
    assert [out[f"f.{i}"].cached_tokens for i in range(7)] == [0, 40, 40, 40, 40, 40, 40]
    assert out["f.6"].token_ids == engines.reference(llama, prompt, OUTPUT)[0]
    assert len({tuple(out[job.rid].token_ids) for job in jobs}) > 1


def test_a_takeover_finds_prompt_and_output(folder: Path) -> None:
    engine = engines.tiny_engine(folder)
    (prompt,) = engines.random_prompts((18,))
    tokens, _ = engines.reference(folder, prompt, 12)
    assert engines.run(engine, [engines.job("a", prompt, max_new_tokens=12)])["a"].token_ids == tokens
    engine.add(engines.job("b", prompt, max_new_tokens=12), tokens[:7])
    assert [piece.start for piece in engine._scheduler.schedule()] == [24], "18 + 7 tokens, the last one computed"
    again = engines.drain(engine)["b"]
    assert again.token_ids == tokens[7:]
    assert again.cached_tokens is None, "what the first worker said of it stands"


def test_a_preempted_sequence_finds_its_own_blocks(llama: Path) -> None:
    engine = engines.tiny_engine(llama, max_running=1)
    (prompt,) = engines.random_prompts((20,))
    out: dict[str, engines.Generation] = {}
    engine.add(engines.job("batch", prompt, lane="batch", max_new_tokens=OUTPUT))
    for _ in range(3):
        engines.advance(engine, out)
    engine.add(engines.job("now", [9, 9], lane="rt", max_new_tokens=1))
    engines.advance(engine, out)
    assert out["now"].finish is not None
    (piece,) = engine._scheduler.schedule()
    assert (piece.sequence.rid, piece.start) == ("batch", 20)
    assert engine._scheduler.preemptions == 1
    while engine.has_work():
        engines.advance(engine, out)
    assert out["batch"].token_ids == engines.reference(llama, prompt, OUTPUT)[0]
    assert out["batch"].cached_tokens == 0, "its own blocks are no saving of the request"


@pytest.mark.parametrize(("setting", "cached"), [("tenant", 0), ("shared", 20), ("off", 0)])
def test_tenants_share_only_where_told(llama: Path, setting: str, cached: int) -> None:
    engine = engines.tiny_engine(llama, prefix_cache=setting)
    (prompt,) = engines.random_prompts((24,))
    assert engines.run(engine, [engines.job("a", prompt, tenant="ann")])["a"].cached_tokens == 0
    assert engines.run(engine, [engines.job("b", prompt, tenant="bob")])["b"].cached_tokens == cached
    again = engines.run(engine, [engines.job("c", prompt, tenant="ann")])["c"]
    assert again.cached_tokens == (0 if setting == "off" else 20)


def test_a_flush_forgets_what_runs_too(engine: TransformersEngine) -> None:
    (prompt,) = engines.random_prompts((24,))
    engines.run(engine, [engines.job("before", prompt)])
    engine.add(engines.job("during", prompt, max_new_tokens=30))
    engine.step()
    assert engine.flush_cache() == 28  # 24 of the prompt; of eight tokens of output seven were fed
    engines.drain(engine)
    assert engines.run(engine, [engines.job("after", prompt)])["after"].cached_tokens == 0
    assert engines.run(engine, [engines.job("then", prompt)])["then"].cached_tokens == 20


def test_a_full_pool_gives_away_what_was_used_least_recently(llama: Path) -> None:
    engine = engines.tiny_engine(llama, context_length=48, kv_memory="28kb")  # 13 blocks of four tokens, two layers
    old, kept, new = engines.random_prompts((16, 16, 20))
    for rid, prompt in (("old", old), ("kept", kept), ("old again", old), ("kept again", kept), ("new", new)):
        engines.run(engine, [engines.job(rid, prompt, max_new_tokens=2)])
    assert engines.run(engine, [engines.job("kept", kept, max_new_tokens=2)])["kept"].cached_tokens == 12
    assert engine._scheduler.blocks.evictions > 0
    assert engines.run(engine, [engines.job("old", old, max_new_tokens=2)])["old"].cached_tokens in (0, 4, 8)
