"""The official client, unchanged, against the front: answers are the engine's own, errors have the client's own classes."""

from __future__ import annotations

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from common.serving.front.front import ONLINE_PRIORITY
from common.types import Request, SamplingKey, SamplingParams
from tests.common.serving.front.running import MODEL, RunningFront, alone, chatml

CHAT = [{"role": "system", "content": "stay"}, {"role": "user", "content": "go upper"}]


@pytest.fixture(scope="module")
def client(server: RunningFront) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def greedy(prompt: list[int], max_tokens: int, num_top: int = 0) -> Request:
    return Request(
        request_id="alone",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=chatml().stop_token_ids, num_top_logprobs=num_top
        ),
        key=SamplingKey(run_seed=0, trajectory_id=0, turn_idx=0),
        priority=ONLINE_PRIORITY,
    )


def test_a_greedy_completion_is_what_the_engine_gives_alone(client: openai.OpenAI) -> None:
    prompt = chatml().encode_text("go upper")
    expected = alone(greedy(prompt, 40, num_top=3))
    answer = client.completions.create(model=MODEL, prompt="go upper", max_tokens=40, temperature=0, logprobs=3)
    choice = answer.choices[0]
    assert choice.text == chatml().decode([*prompt, *expected.token_ids])[len("go upper") :]
    assert choice.finish_reason == expected.finish_reason.value
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == list(expected.behavior_logprobs)
    for ours, top in zip(choice.logprobs.top_logprobs or [], expected.top_logprobs, strict=True):
        assert sorted(ours.values()) == pytest.approx(sorted(value for _, value in top))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(expected.token_ids))


def test_a_chat_goes_through_the_models_template(client: openai.OpenAI) -> None:
    prompt = chatml().encode_chat(CHAT)
    expected = alone(greedy(prompt, 20, num_top=2))
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content == chatml().decode(expected.token_ids)
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert [entry.logprob for entry in entries] == list(expected.behavior_logprobs)
    assert [bytes(entry.bytes or ()) for entry in entries] == [chatml().token_bytes(token_id) for token_id in expected.token_ids]
    assert [[other.logprob for other in entry.top_logprobs] for entry in entries] == [
        [value for _, value in top] for top in expected.top_logprobs
    ]


def test_content_in_parts_and_the_developer_role_mean_the_same(client: openai.OpenAI) -> None:
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "st"}, {"type": "text", "text": "ay"}]},
        {"role": "user", "content": "go upper"},
    ]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, seed=3).choices[0].message.content
        for messages in (CHAT, parts)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI, n: int) -> None:
    whole = client.completions.create(model=MODEL, prompt=["go", "stay"], max_tokens=30, seed=11, n=n)
    texts, reasons = [""] * (2 * n), [None] * (2 * n)
    usage = None
    for event in client.completions.create(
        model=MODEL, prompt=["go", "stay"], max_tokens=30, seed=11, n=n, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            assert reasons[choice.index] is None, "text after the finish reason"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=30, seed=4)
    deltas = [
        event.choices[0] for event in client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=30, seed=4, stream=True)
    ]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [whole.choices[0].finish_reason]


def test_the_seed_decides_the_draws_and_without_one_they_differ(client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        return client.completions.create(model=MODEL, prompt="go", max_tokens=30, seed=seed).choices[0].text

    assert text(-5) == text(-5)
    assert len({text(None) for _ in range(4)} | {text(2**40)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_frees_the_slot(
    client: openai.OpenAI, server: RunningFront, stream: bool
) -> None:
    fields = {"model": MODEL, "prompt": "go", "max_tokens": 60, "seed": 7, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**fields).choices[0].text
    stop = text[12:15]
    expected = text[: text.index(stop)]
    answer = client.completions.create(**fields, stop=[stop, "never"], stream=stream)
    if isinstance(answer, Completion):
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    else:
        events = [event.choices[0] for event in answer]
        assert "".join(choice.text for choice in events) == expected
        assert events[-1].finish_reason == "stop"
    server.wait_until(server.is_idle)


def test_prompts_may_be_token_ids_and_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    token_ids = chatml().encode_text("go upper")
    texts = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, seed=1, echo=True).choices[0].text
        for prompt in ("go upper", token_ids, [token_ids])
    ]
    assert len(set(texts)) == 1
    assert texts[0].startswith("go upper")


def test_models_are_listed_under_the_name_they_are_asked_by(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": "go", "max_tokens": 100_000}, None, "context_length_exceeded"),
        ({"prompt": [], "max_tokens": 1}, "prompt", "invalid_value"),
        ({"prompt": [99_999], "max_tokens": 1}, "prompt", None),
        ({"prompt": "go", "temperature": 7}, "temperature", "invalid_value"),
        ({"prompt": "go", "extra_body": {"temperature": "0.5"}}, "temperature", "invalid_value"),
        ({"prompt": "go", "extra_body": {"top_p": True}}, "top_p", "invalid_value"),
        ({"prompt": "go", "frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"prompt": "go", "extra_body": {"colour": "red"}}, "colour", "unknown_parameter"),
        ({"prompt": "go", "stream_options": {"include_usage": True}}, "stream_options", None),
        ({"prompt": "go", "n": 0}, "n", "invalid_value"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(
    client: openai.OpenAI, fields: dict[str, object], param: str | None, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, **fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"


def test_neutral_values_of_what_is_not_supported_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=2,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        user="somebody",
        extra_body={"repetition_penalty": 1.0, "tools": None},
    )
    assert isinstance(answer, ChatCompletion)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    assert refused.value.code == "model_not_found"


def test_a_chat_that_the_template_refuses_is_the_clients_mistake(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}])
