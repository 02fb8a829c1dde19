import json
import shutil

import pytest

from jaxrunner.errors import CheckpointError
from jaxrunner.models.default_model import default_model_path
from jaxrunner.models.loading import load

from .checkpoints import GOLDEN, error_message
from .test_tokenizer import byte_level_backend


def with_tokenizer(target, num_ids, **files):
    """tiny/llama with a tokenizer of `num_ids` ids; files: name of a JSON file -> its new content."""
    shutil.copytree(GOLDEN / "tiny" / "llama", target)
    backend = byte_level_backend()
    backend.add_tokens([f"<extra{i}>" for i in range(num_ids - backend.get_vocab_size())])
    backend.save(str(target / "tokenizer.json"))
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    return target


def test_k107_end_ids_are_the_union_of_all_sources(tmp_path):
    generation, settings = {"eos_token_id": [1, 9]}, {"eos_token": {"content": "A"}}
    directory = with_tokenizer(tmp_path / "m", 256, generation_config=generation, tokenizer_config=settings)
    model, _, tokenizer = load(directory)
    assert model.eos_token_ids == tokenizer.eos_token_ids == (1, 2, 9, tokenizer.encode("A").ids[0])


def test_ids_without_a_token_are_counted(tmp_path):
    assert load(with_tokenizer(tmp_path / "a", 250))[0].num_token_ids == 250
    assert load(with_tokenizer(tmp_path / "b", 256))[0].num_token_ids is None


def test_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError) as info:
        load(with_tokenizer(tmp_path / "m", 260))
    error_message(info, "260", "256", "tokenizer")


@pytest.mark.smollm2
def test_default_model():
    assert default_model_path().is_file()
    model, weights, tokenizer = load(dtype="bfloat16")
    assert (model.num_layers, model.eos_token_ids, model.num_token_ids) == (30, (2,), None)
    assert weights["embed_tokens"].shape == (tokenizer.vocab_size, 576)
    assert tokenizer.decode(tokenizer.encode("Hello, world!").ids) == "Hello, world!"


def test_directory_without_a_configuration(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load(tmp_path)


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no .gguf file"):
        load(path)


def test_load_gives_model_weights_and_no_tokenizer():
    model, weights, tokenizer = load(GOLDEN / "tiny" / "llama", dtype="auto", layout="stacked")
    assert tokenizer is None
    assert (model.dtype, model.layout, model.eos_token_ids, model.num_token_ids) == ("bfloat16", "stacked", (2,), None)
    assert weights["layers"]["qkv"].shape == (3, 128, 64)


@pytest.mark.parametrize("source", ["/no/such/directory", "./nothing", "a/b/c", "missing.gguf"])
def test_sources_that_are_neither_a_path_nor_a_hub_id(source):
    with pytest.raises(CheckpointError) as info:
        load(source)
    error_message(info, source, "does not exist")


def test_unreachable_hub_names_the_way_out(monkeypatch):
    import huggingface_hub

    asked = {}

    def refuse(repository, **options):
        asked.update(options, repository=repository)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError) as info:
        load("someone/some-model")
    error_message(info, "someone/some-model", "ConnectionError", "no route", "directory")
    assert asked["repository"] == "someone/some-model"
    assert not [pattern for pattern in asked["allow_patterns"] if ".bin" in pattern or ".p" in pattern]
