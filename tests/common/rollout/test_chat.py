"""Token ids equal transformers' for the same folder, and turns can be concatenated without encoding anything twice."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from common.rollout.chat import ChatTokenizer
from tests.common.rollout.fakes import CHATML_TEMPLATE, WORDS, word_chat, write_chatml_folder

sentences = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)


def messages_of(system: str | None, *turns: str) -> list[dict[str, str]]:
    """Turns by user and assistant in turn, after the system prompt."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": ("user", "assistant")[idx % 2], "content": text} for idx, text in enumerate(turns)]


def reference_ids(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    reference = AutoTokenizer.from_pretrained(folder)
    return reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


@pytest.fixture(params=["words", "chatml", "chatml-qwen2", "saved-chatml"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "words":
        word_chat().save(tmp_path)
    elif request.param == "saved-chatml":
        ChatTokenizer.load(write_chatml_folder(tmp_path / "original")).save(tmp_path)
    else:
        write_chatml_folder(
            tmp_path, tokenizer_class="Qwen2Tokenizer" if request.param == "chatml-qwen2" else "PreTrainedTokenizerFast"
        )
    return tmp_path


@pytest.mark.parametrize("system", [None, "stay stay"])
def test_prompts_equal_those_of_transformers(folder: Path, system: str | None) -> None:
    chat = ChatTokenizer.load(folder)
    assert chat.encode_prompt(system, "go more") == reference_ids(folder, messages_of(system, "go more"))


def test_concatenated_turns_equal_the_whole_chat_of_transformers(folder: Path) -> None:
    chat = ChatTokenizer.load(folder)
    token_ids = chat.encode_prompt("stay", "start")
    for action, observation in (("go", "more"), ("go again", "more more")):
        token_ids += chat.encode_turn(action) + chat.encode_observation(observation, previous_turn_ended=True)
    assert token_ids == reference_ids(folder, messages_of("stay", "start", "go", "more", "go again", "more more"))


def test_special_tokens_and_size_equal_those_of_transformers(folder: Path) -> None:
    chat, reference = ChatTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert chat.pad_token_id == reference.pad_token_id
    assert reference.eos_token_id in chat.stop_token_ids
    assert chat.vocab_size == len(reference)


def test_a_turn_cut_by_length_gets_its_end_token_before_the_observation(folder: Path) -> None:
    chat = ChatTokenizer.load(folder)
    ended = chat.encode_observation("more", previous_turn_ended=True)
    assert chat.encode_observation("more", previous_turn_ended=False) == [chat.stop_token_ids[0], *ended]


@given(turns=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=4), observation=sentences)
def test_word_level_chats_hold_no_tokens_besides_words_and_turn_marks(turns: list[tuple[str, str]], observation: str) -> None:
    chat = word_chat()
    names = ["<|user|>", *turns[0][0].split(), "<|assistant|>"]
    token_ids = chat.encode_prompt(None, turns[0][0])
    for (_, action), (next_observation, _) in zip(turns, [*turns[1:], (observation, "")], strict=True):
        token_ids += chat.encode_turn(action) + chat.encode_observation(next_observation, previous_turn_ended=True)
        names += [*action.split(), "<|end|>", "<|user|>", *next_observation.split(), "<|assistant|>"]
    ids_of = {
        name: idx for idx, name in enumerate(("<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", *WORDS))
    }
    assert token_ids == [ids_of[name] for name in names]


@given(text=sentences)
def test_decoding_words_gives_the_text_without_special_tokens(text: str) -> None:
    assert word_chat().decode(word_chat().encode_turn(text)) == text


def test_unknown_words_become_the_unknown_token() -> None:
    assert word_chat().encode_prompt(None, "go elsewhere")[2] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["go", "stay", "go"], "'go' occurs twice"),
        (["go on"], "'go on' is empty or holds white space"),
        ([""], "'' is empty"),
        (["a<|end|>b"], "contains the special token <|end|>"),
        (["<|user|>"], "contains the special token <|user|>"),
    ],
)
def test_unusable_vocabulary_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        ChatTokenizer.from_vocabulary(words)


BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
LAST_ONLY = "<|im_start|>{{ messages[-1].content }}<|im_end|>"
NO_END_AT_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_start|>{% else %}{{ m.content }}"
    "{% if loop.last %}<|im_end|>{% endif %}{% endif %}{% endfor %}"
)
CHANGED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | replace('OBSERVATION', '') }}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_start|>"
    "{% else %}{{ m.content }} \n<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (BARE, "does not start with a special token"),
        (LAST_ONLY, "leaves out an earlier turn"),
        (NO_END_AT_LAST, "ends an agent's turn with <|im_start|> before another turn but with <|im_end|> at the end"),
        (CHANGED, "changes the observation"),
        ("{% for m in messages %}", "does not compile"),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages.append(1) }}", "cannot render"),
    ],
)
def test_templates_whose_turns_cannot_be_concatenated_are_refused_with_the_reason(
    tmp_path: Path, template: str, message: str
) -> None:
    write_chatml_folder(tmp_path, template=template)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ChatTokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_white_space_before_the_end_token_is_not_part_of_the_next_prompt(tmp_path: Path) -> None:
    chat = ChatTokenizer.load(write_chatml_folder(tmp_path, template=SPACED))
    assert chat.stop_token_ids == (AutoTokenizer.from_pretrained(tmp_path).eos_token_id,)
    assert chat.encode_observation("go", previous_turn_ended=False)[0] == chat.stop_token_ids[0]


def test_a_template_file_goes_before_the_one_in_the_settings(tmp_path: Path) -> None:
    write_chatml_folder(tmp_path, template=BARE)
    (tmp_path / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    assert ChatTokenizer.load(tmp_path).encode_prompt(None, "go") == reference_ids(tmp_path, messages_of(None, "go"))


def test_of_several_named_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    write_chatml_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tools", "template": BARE}, {"name": "default", "template": CHATML_TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTokenizer.load(tmp_path).encode_prompt(None, "go") == reference_ids(tmp_path, messages_of(None, "go"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", None, "tokenizer_config.json does not exist"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", "[]", "holds a JSON list"),
        ("tokenizer_config.json", "{}", "has no chat template"),
    ],
)
def test_damaged_folders_are_refused_by_file_name(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    write_chatml_folder(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        ChatTokenizer.load(tmp_path)


def test_an_end_of_text_token_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    write_chatml_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
    with pytest.raises(ValueError, match=r"eos_token='</s>' .* is not in tokenizer.json"):
        ChatTokenizer.load(tmp_path)
