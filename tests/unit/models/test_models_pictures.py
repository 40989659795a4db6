"""Models that see: prompts with pictures, the trainer's forward pass against plain transformers', the engine's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scratch_folders import scratch_folder
from tiny_hub import randomise
from tiny_pictures import EOS, IMAGE, PLACEHOLDERS, VIDEO, dots, make_model_that_sees
from torch import Tensor

from headway.config.model import ModelConfig
from headway.config.schema import TrainerConfig
from headway.control.logprob_limits import disagreement
from headway.generator.engines import select
from headway.generator.engines.hf.engine import HfEngine
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.reference import PublishedModel
from headway.models.hf.model import HfModel, load_hf
from headway.models.hf.pictures import PictureWorker, load_processor
from headway.models.hf.pixels import FOLDER, Pixels, PixelStore
from headway.models.hf.prompts import PictureClient
from headway.models.loading import weights_of
from headway.records.errors import BufferCorrupt, ConfigurationError
from headway.records.generation import GenerationRequest, PartialResponse, SamplingParameters
from headway.records.task import Task
from headway.records.tokens import pixel_rows
from headway.trainer.learner import Learner
from headway.trainer.ranks import Ranks
from headway.trainer.service import TrainerService
from tests.conformance.engine import Session
from tests.conformance.engine import request as text_request
from tests.support.simulated_run import experiment_of

torch.set_num_threads(1)
ALL = pytest.mark.parametrize("kind", PLACEHOLDERS)
# Dots of the pictures of each prompt, and the response to it.
CASES: list[tuple[tuple[int, ...], list[int]]] = [((2,), [11, 12, 9]), ((), [12]), ((4, 1), [13, EOS]), ((3,), [14])]


@functools.cache
def scratch() -> Path:
    return scratch_folder("pictures")


@functools.cache
def folder_of(kind: str) -> Path:
    return make_model_that_sees(scratch() / kind, kind)


@functools.cache
def worker_of(kind: str) -> PictureWorker:
    return PictureWorker(None, model_path=str(folder_of(kind)), trust=False, folder=str(store_folder()))


@functools.cache
def store_folder() -> Path:
    return scratch() / FOLDER


def messages(pictures: int) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": "unused"}} for _ in range(pictures)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


@functools.cache
def prompt(kind: str, counts: tuple[int, ...]) -> tuple[list[int], str]:
    """Token ids and the hash of the pixel arrays of a prompt with pictures of so many dots each."""
    files = [(str(scratch() / f"{count}-{place}.png"), "") for place, count in enumerate(counts)]
    for place, count in enumerate(counts):
        dots(count, place).save(files[place][0])
    if not counts:
        return [2, 10, 3], ""
    ids, digest, size = worker_of(kind).prompt(messages(len(counts)), files)
    assert size > 0
    return list(ids), digest


def reference(kind: str, counts: Sequence[int], response: list[int], model: Any) -> Tensor:
    """Log-probabilities of the response by plain transformers: one document, its processor's own inputs."""
    processor = load_processor(folder_of(kind))
    shown = [dots(count, place) for place, count in enumerate(counts)]
    inputs = dict(
        processor(text=[f"<user>{PLACEHOLDERS[kind] * len(shown)}?<model>"], images=shown or None, return_tensors="pt")
    )
    more = torch.tensor([response])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(more)], 1)
    inputs.pop("attention_mask")
    logits = model(**inputs, use_cache=False).logits[0]
    logits = logits.index_fill(-1, torch.tensor([IMAGE, VIDEO] if kind == "Qwen2_5_VL" else [IMAGE]), -256.0)
    ids = inputs["input_ids"][0]
    chosen = torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]
    return chosen[-len(response) :]


def trained(kind: str, model: HfModel, order: Sequence[int]) -> list[Tensor]:
    """Log-probabilities of the responses of CASES in one forward pass of the trainer's model."""
    store, ids, pixels = PixelStore(store_folder()), [], []
    for number in order:
        counts, response = CASES[number]
        prompt_ids, digest = prompt(kind, counts)
        ids.append(torch.tensor(prompt_ids + response))
        pixels.append(store.read(digest) if digest else {})
    hidden = model.forward_packed(torch.cat(ids), [len(one) for one in ids], None, pixels)
    logits = model.head(hidden).split([len(one) for one in ids])
    found = [torch.log_softmax(z[:-1], -1).gather(-1, one[1:, None])[:, 0] for z, one in zip(logits, ids, strict=True)]
    return [one[-len(CASES[number][1]) :] for one, number in zip(found, order, strict=True)]


@ALL
def test_prompts_have_as_many_placeholders_as_the_pictures_take(kind: str) -> None:
    one, digest = prompt(kind, (2,))
    both, other = prompt(kind, (4, 1))
    assert one.count(IMAGE) > 1
    assert both.count(IMAGE) == 2 * one.count(IMAGE)
    assert digest != other
    again = worker_of(kind).prompt(messages(1), [(str(scratch() / "2-0.png"), "")])
    assert again[1] == digest
    assert list(again[0]) == one


@ALL
def test_the_forward_pass_and_gradients_are_those_of_plain_transformers(kind: str) -> None:
    from transformers import AutoModelForImageTextToText

    model = load_hf(folder_of(kind), "float32", "cpu")
    plain = AutoModelForImageTextToText.from_pretrained(folder_of(kind), dtype=torch.float32).eval()
    order = (0, 1, 2, 3)
    got = trained(kind, model, order)
    expected = [reference(kind, counts, response, plain) for counts, response in CASES]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    torch.cat(got).sum().backward()
    torch.cat(expected).sum().backward()
    theirs = dict(plain.named_parameters())
    checked = 0
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            grad = theirs[name].grad
            assert grad is not None
            assert parameter.grad is not None
            assert (parameter.grad - grad).abs().max() <= 1e-4 * grad.abs().max(), name
            checked += 1
    assert checked > 10


def test_what_a_picture_shows_changes_what_is_said() -> None:
    model = load_hf(folder_of("Gemma3"), "float32", "cpu")
    store = PixelStore(store_folder())
    ids, digest = prompt("Gemma3", (2,))
    other = prompt("Gemma3", (3,))[1]
    with torch.no_grad():
        first, second = (
            model.forward_packed(torch.tensor(ids), [len(ids)], None, [store.read(one)])[-1] for one in (digest, other)
        )
    assert (first - second).abs().max() > 1e-2


def asked(kind: str, name: str, counts: tuple[int, ...], **fields: Any) -> GenerationRequest:
    ids, digest = prompt(kind, counts)
    how = SamplingParameters(max_tokens=6, seed=len(name) + sum(counts), stop_token_ids=(EOS,))
    partial = fields.pop("partial", PartialResponse(token_rows=pixel_rows(digest)))
    return GenerationRequest(request_id=name, prompt_ids=ids, sampling=how, partial=partial, **fields)


@ALL
@pytest.mark.parametrize("slots", [1, 4])
def test_the_engine_samples_what_the_trainer_computes(kind: str, slots: int) -> None:
    model = load_hf(folder_of(kind), "float32", "cpu")
    engine = HfEngine(model, slots=slots, max_context_tokens=64, pixels=PixelStore(store_folder()))
    session = Session(engine)
    session.submit(
        *(asked(kind, name, counts) for name, counts in zip("abcde", [(2,), (), (4, 1), (3,), (2,)], strict=True))
    )
    session.step(2)
    engine.update_weights(weights_of(model), 1, "recompute")
    session.step(1)
    results = session.run()
    store = PixelStore(store_folder())
    for name, result in results.items():
        assert result.finish_reason in ("stop", "length"), result.error
        ids = [*session.requests[name].prompt_ids, *result.response.ids]
        rows = session.requests[name].partial.token_rows
        assert result.response.token_rows == rows
        pixels = store.read(rows["pixels"].data.array.tobytes().hex()) if rows else {}
        with torch.no_grad():
            logits = model.head(model.forward_packed(torch.tensor(ids), [len(ids)], None, [pixels]))
        chosen = torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        got = torch.tensor(result.response.logprobs)
        assert (got - chosen[-len(got) :]).abs().max() <= 1e-4, name
        assert IMAGE not in result.response.ids


def test_a_response_goes_on_from_its_tokens_and_pictures() -> None:
    def sampled(partial: PartialResponse | None, most: int) -> Any:
        engine = HfEngine(
            load_hf(folder_of("Qwen2_5_VL"), "float32", "cpu"),
            slots=1,
            max_context_tokens=64,
            pixels=PixelStore(store_folder()),
        )
        session = Session(engine)
        fields = {} if partial is None else {"partial": partial}
        one = asked("Qwen2_5_VL", "a", (2,), **fields)
        session.submit(one)
        session.step(most)
        engine.abort(list(session.engine._open))  # pyright: ignore[reportAttributeAccessIssue]
        return session.run()["a"].response

    whole, begun = sampled(None, 6), sampled(None, 2)
    assert len(begun.ids) < len(whole.ids)
    assert begun.token_rows == whole.token_rows != {}
    assert sampled(begun, 6).ids == whole.ids


def test_requests_with_pictures_are_refused_by_what_cannot_show_them() -> None:
    store = PixelStore(store_folder())
    model = load_hf(folder_of("Gemma3"), "float32", "cpu")
    blind, gone = HfEngine(model, slots=1, max_context_tokens=64), pixel_rows("0" * 32)
    session = Session(blind)
    session.submit(asked("Gemma3", "a", (2,)), text_request("b", range(9, 12), max_tokens=1))
    results = session.run()
    assert "which this engine can't read" in results["a"].error
    assert results["a"].refused
    assert not results["b"].error
    session = Session(HfEngine(model, slots=1, max_context_tokens=64, pixels=store))
    session.submit(asked("Gemma3", "a", (2,), partial=PartialResponse(token_rows=gone)))
    assert "pixel arrays of a prompt can't be read" in session.run()["a"].error


# --- trainer and engine compared ----------------------------------------------------------------------------------


def compared(kind: str, monkeypatch: pytest.MonkeyPatch, faulty: Callable[[Pixels], Pixels] | None = None) -> Any:
    """How far the two sides differ over a prompt with pictures; the engine sees what ``faulty`` makes of its arrays."""
    service: Any = object.__new__(TrainerService)
    service.experiment, service.version = experiment_of(Path("unused")), 1
    chosen = ModelConfig(path=str(folder_of(kind)), implementation="transformers")
    store = PixelStore(store_folder())
    service.learner = Learner(chosen, TrainerConfig(), torch.device("cpu"), Ranks(), pixels=store)
    trainer = service.score(tuple(prompt(kind, (2,))[0]), prompt(kind, (2,))[1])
    assert IMAGE not in trainer.probe.ids  # which no picture is there for
    engine = HfEngine(load_hf(chosen.path, "float32", "cpu"), slots=1, max_context_tokens=64, pixels=store)
    if faulty is not None:
        monkeypatch.setattr(store, "read", lambda digest, read=store.read: faulty(read(digest)))
    return disagreement(trainer, engine.score(trainer.probe), "float32")


@ALL
def test_trainer_and_engine_agree_on_a_prompt_with_pictures(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest, wrong = compared(kind, monkeypatch)
    assert wrong == ""
    assert largest.keys() == {"packed", "prefill", "decode"}
    assert max(largest.values()) < 5e-5


@ALL
@pytest.mark.parametrize("fault", ["dropped", "shifted"])
def test_an_engine_with_other_pixels_is_refused(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(pixels: Pixels) -> Pixels:
        moved = {name: np.roll(one, 1, -1) for name, one in pixels.items() if name == "pixel_values"}
        return {} if fault == "dropped" else {**pixels, **moved}

    wrong = compared(kind, monkeypatch, faulty).wrong
    assert wrong.startswith("the engine's prefill and the trainer disagree behind a prompt with pictures: ")
    assert "Their hidden states diverge at the embedding" in wrong


def test_an_engine_that_forgets_the_positions_behind_pictures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfModel, "position_shift", 0)
    wrong = compared("Qwen2_5_VL", monkeypatch).wrong
    assert wrong.startswith("the engine's decoding on its cache and its prefill disagree behind a prompt with pictures")


# --- storage -----------------------------------------------------------------------------------------------------


def test_pixel_arrays_are_stored_once_and_checked(tmp_path: Path) -> None:
    store = PixelStore(tmp_path / "pixels")
    arrays = {"pixel_values": np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2), "grid": np.array([[1, 2, 2]])}
    digest = store.write(arrays)
    assert store.write(dict(reversed(arrays.items()))) == digest
    assert len(list((tmp_path / "pixels").iterdir())) == 1
    found = store.read(digest)
    assert all((found[name] == array).all() for name, array in arrays.items())
    other = store.write({"pixel_values": np.ones((1, 20), np.float32)})
    file = tmp_path / "pixels" / f"{digest}.safetensors"
    file.write_bytes((tmp_path / "pixels" / f"{other}.safetensors").read_bytes())
    assert store.read(digest) is found  # it is in memory
    again = PixelStore(tmp_path / "pixels")
    with pytest.raises(BufferCorrupt, match="aren't what was stored"):
        again.read(digest)
    again.remove(digest, 1)  # it was written later
    assert digest in store.stored()
    again.remove(digest, store.stored()[digest])
    with pytest.raises(BufferCorrupt, match="can't be read"):
        again.read(digest)
    assert set(store.stored()) == {other}
    file.touch()  # empty
    assert store.write(arrays) == digest
    assert (PixelStore(tmp_path / "pixels").read(digest)["grid"] == arrays["grid"]).all()


def test_pixel_arrays_go_when_nobody_has_needed_them_twice(tmp_path: Path) -> None:
    experiment: Any = SimpleNamespace(
        run=SimpleNamespace(directory=str(tmp_path)),
        model=SimpleNamespace(path="", trust_remote_code=False, chat_template_kwargs={}),
    )
    nothing: Any = SimpleNamespace(now=lambda: 0.0)
    pictures, store = PictureClient(nothing, nothing, experiment), PixelStore(tmp_path / FOLDER)
    a, b, c, d, e = (store.write({"pixels": np.full(3, value, np.float32)}) for value in range(5))
    pictures._held_prompts["t"] = (Task(task_id="t", prompt="?", pixels=c), (), 0)
    pictures._next_group_pixels = e
    pictures.remove_unneeded({a})
    os.utime(tmp_path / FOLDER / f"{d}.safetensors", ns=(1, 1))  # it was asked for again
    pictures.remove_unneeded({a, b})
    pictures.remove_unneeded({a, d})
    assert set(store.stored()) == {a, b, c, d, e}
    pictures.remove_unneeded({a, d})
    assert set(store.stored()) == {a, c, d, e}


# --- what is refused ---------------------------------------------------------------------------------------------


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    make_model_that_sees(tmp_path / "m")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "m" / name).unlink()
    with pytest.raises(ConfigurationError, match="processor"):
        load_processor(tmp_path / "m")


def test_a_prompt_that_the_processor_refuses_names_it(tmp_path: Path) -> None:
    dots(2).save(tmp_path / "a.png")
    with pytest.raises(ConfigurationError, match="its processor refuses a prompt with 1 pictures"):
        worker_of("Gemma3").prompt(messages(2), [(str(tmp_path / "a.png"), "")])
    with pytest.raises(ConfigurationError, match="no such picture"):
        worker_of("Gemma3").prompt(messages(1), [(str(tmp_path / "b.png"), "")])
    with pytest.raises(ConfigurationError, match=r"a[.]png: the picture has changed since the tasks were read"):
        worker_of("Gemma3").prompt(messages(1), [(str(tmp_path / "a.png"), "0" * 32)])


def test_arrays_of_a_prompts_tokens_that_nobody_knows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dots(2).save(tmp_path / "a.png")
    worker = PictureWorker(None, model_path=str(folder_of("Gemma3")), trust=False, folder=str(tmp_path / FOLDER))
    plain = worker._processor

    def processor(**given: Any) -> dict[str, Any]:
        made = dict(plain(**given))
        return made | {"group_of_token": np.zeros_like(made["input_ids"])}

    monkeypatch.setattr(worker, "_processor", processor)
    with pytest.raises(ConfigurationError, match=r"its processor makes group_of_token \[1, \d+\] of \d+ tokens, which"):
        worker.prompt(messages(1), [(str(tmp_path / "a.png"), "")])
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("kind", ["PaliGemma", "Gemma"])
def test_a_model_whose_tokens_see_those_behind_them_is_refused(tmp_path: Path, kind: str) -> None:
    import transformers

    text: dict[str, Any] = dict(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=128, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    if kind == "PaliGemma":
        seeing = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, image_size=16)
        config = transformers.PaliGemmaConfig(
            text_config={**text, "model_type": "gemma"},
            vision_config={**seeing, "model_type": "siglip_vision_model", "patch_size": 8, "projection_dim": 32},
            image_token_index=5, projection_dim=32, hidden_size=32,
        )  # fmt: skip
        model: Any = transformers.PaliGemmaForConditionalGeneration(config)
    else:
        model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**text, use_bidirectional_attention=True))
    randomise(model).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{kind}For.* isn't causal: its tokens attend to later tokens"):
        load_hf(tmp_path, "float32", "cpu")


def test_what_a_picture_stands_for_is_not_sampled_at_any_temperature() -> None:
    model = load_hf(folder_of("Qwen2_5_VL"), "float32", "cpu")
    logits = model.sampled(torch.zeros(2, model.config.vocabulary_size))
    for temperature in (0.01, 1.0, 50.0):
        probabilities = torch.softmax(logits / temperature, -1)
        assert probabilities[:, [IMAGE, VIDEO]].max() == 0.0
        assert probabilities[:, EOS].min() > 0.0


def test_vllm_is_told_what_a_picture_stands_for_and_scored_without_it() -> None:
    folder = str(folder_of("Qwen2_5_VL"))
    published = PublishedModel.of(ModelConfig(path=folder))
    published.load("float32")
    settings = EngineSettings(model_path=folder, dtype="float32", slots=1, max_context_tokens=64, engine="vllm")
    assert select._bias(settings, published.shape) == {IMAGE: -100.0, VIDEO: -100.0}
    assert min(published.logprobs([2, IMAGE, VIDEO, 3])) > -50  # vLLM's prompts have them too
