import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxrunner.errors import AdmissionError, CheckpointError
from jaxrunner.models.default_model import default_model_path
from jaxrunner.models.gguf_file import GGUFFile
from jaxrunner.models.gguf_tokenizer import tokenizer_from_gguf
from jaxrunner.models.tokenizer import Tokenizer, check_vocab

from .checkpoints import GOLDEN, error_message

TEXTS = json.loads((GOLDEN / "smollm2" / "tokenizer.json").read_text())
PROMPTS = json.loads((GOLDEN / "smollm2" / "prompts.json").read_text())
USER = [{"role": "user", "content": "Hi"}]


def byte_level_backend():
    """One token per byte that may occur in text, and one special token."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:240])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return backend


def directory_with(tmp_path, backend, **files):
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture(scope="module")
def smollm2():
    return tokenizer_from_gguf(GGUFFile.open(default_model_path()).metadata)


@pytest.mark.smollm2
def test_golden_texts(smollm2):
    assert len(TEXTS) == 38
    for case in TEXTS:
        assert smollm2.encode(case["text"]).ids == case["ids"], case["text"]
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["decoded"]


@pytest.mark.smollm2
def test_golden_prompts_and_chat_template(smollm2):
    chats = [prompt for prompt in PROMPTS if prompt["kind"] == "chat"]
    assert len(chats) == 2
    for prompt in chats:
        assert smollm2.apply_chat_template(prompt["messages"]) == prompt["text"]
    texts = [prompt for prompt in PROMPTS if "text" in prompt]
    for prompt in texts:
        ids = smollm2.encode(prompt["text"]).ids
        # One prompt is cut to its first 700 ids.
        assert (ids[:700] if prompt["name"] == "raw_long_700" else ids) == prompt["ids"], prompt["name"]


@pytest.mark.smollm2
def test_smollm2_special_tokens(smollm2):
    assert (smollm2.vocab_size, smollm2.eos_token_ids) == (49152, (2,))
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nHi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"
    assert smollm2.encode("").ids == []
    without = smollm2.apply_chat_template(USER, add_generation_prompt=False)
    assert smollm2.apply_chat_template(USER) == without + "<|im_start|>assistant\n"


def test_directory_without_tokenizer_gives_none():
    assert Tokenizer.from_directory(GOLDEN / "tiny" / "llama") is None


def test_tokenizer_class_does_not_override_the_file(tmp_path):
    backend = byte_level_backend()
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    settings = {"tokenizer_class": "GPT2Tokenizer"}
    tokenizer = Tokenizer.from_directory(directory_with(tmp_path, backend, tokenizer_config=settings))
    assert "Digits" in repr(tokenizer.backend.pre_tokenizer)


def test_k107_end_ids_of_all_files(tmp_path):
    backend = byte_level_backend()
    directory = directory_with(
        tmp_path,
        backend,
        tokenizer_config={"eos_token": "<s>"},
        generation_config={"eos_token_id": [1, 9]},
        config={"eos_token_id": 4},
    )
    assert Tokenizer.from_directory(directory).eos_token_ids == (1, 4, 9, 240)


def test_settings_of_the_file_that_cut_or_pad_are_switched_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.from_directory(directory_with(tmp_path, backend))
    assert len(tokenizer.encode("abcd").ids) == 4


def test_special_tokens_around_a_text_can_be_left_out(tmp_path):
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 240)])
    tokenizer = Tokenizer.from_directory(directory_with(tmp_path, backend))
    ids = tokenizer.encode("ab", add_special_tokens=False).ids
    assert tokenizer.encode("ab").ids == [240, *ids]
    assert tokenizer.vocab_size == 241


def test_more_ids_than_the_model_has(tmp_path):
    tokenizer = Tokenizer(byte_level_backend())
    check_vocab(tokenizer, 241)
    with pytest.raises(CheckpointError) as info:
        check_vocab(tokenizer, 240)
    error_message(info, "241", "240")


def test_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json"):
        Tokenizer.from_directory(tmp_path)


def chat(template, **variables):
    return Tokenizer(byte_level_backend(), chat_template=template, special_tokens={"bos_token": "<s>"}), variables


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}", "<s>user:Hi;"),
        ("{% if true %}\n  {% for m in messages %}\nx\n  {% endfor %}\n{% endif %}\n", "x\n"),
        ("{{ {'k': ['é', '<']} | tojson }}", '{"k": ["é", "<"]}'),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% if add_generation_prompt %}go{% endif %}{% if tools %}no{% endif %}", "go"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_what_templates_can_use(template, expected):
    tokenizer, _ = chat(template)
    assert tokenizer.apply_chat_template(USER) == expected


def test_templates_get_further_variables():
    tokenizer, _ = chat("{{ enable_thinking }}{{ tools[0] }}")
    assert tokenizer.apply_chat_template(USER, enable_thinking=False, tools=["t"]) == "Falset"


def test_templates_run_in_a_sandbox():
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        tokenizer, _ = chat(attack)
        with pytest.raises(AdmissionError, match=r"unsafe|undefined"):
            tokenizer.apply_chat_template(USER)


def test_refusals_of_templates_are_errors_with_their_text():
    tokenizer, _ = chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(AdmissionError, match="roles must alternate"):
        tokenizer.apply_chat_template(USER)
    broken, _ = chat("{% if %}")
    with pytest.raises(CheckpointError, match="Jinja"):
        broken.apply_chat_template(USER)
    with pytest.raises(AdmissionError, match="no chat template"):
        Tokenizer(byte_level_backend()).apply_chat_template(USER)


def test_where_templates_are_found(tmp_path):
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    directory = directory_with(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": named})
    assert Tokenizer.from_directory(directory).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_directory(directory).chat_template == "J"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_directory(directory).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "C"}')
    assert Tokenizer.from_directory(directory).chat_template == "C"


def gguf_metadata(pre, /, **changes):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", "123", "1234", "Ġa", "<|bos|>", "<tool>"]
    merges = ["1 2", "12 3", "123 4", "Ġ a"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * 260 + [3, 4],
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 260,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["<|bos|>", "123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_gguf_splits_digits_as_its_pre_says(pre, pieces):
    assert tokenizer_from_gguf(gguf_metadata(pre)).encode("1234").tokens == pieces


def test_gguf_added_tokens_and_bos():
    tokenizer = tokenizer_from_gguf(gguf_metadata("gpt-2", add_bos_token=True, eot_token_id=261))
    assert tokenizer.encode("<tool> a").ids == [260, 261, 259]
    assert tokenizer.decode([260, 261, 259]) == "<tool> a"
    assert tokenizer.eos_token_ids == (260, 261)
    assert tokenizer_from_gguf(gguf_metadata("llama-bpe", add_bos_token=False)).encode(" a").ids == [259]


@pytest.mark.parametrize("changes", [{"pre": "default"}, {"pre": "deepseek-llm"}, {"model": "llama"}])
def test_gguf_tokenizers_that_are_not_known_exactly_are_named(changes):
    with pytest.raises(CheckpointError) as info:
        tokenizer_from_gguf(gguf_metadata("gpt-2", **changes))
    error_message(info, *changes.values(), "smollm")
