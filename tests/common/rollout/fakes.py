"""A scripted sampler, environments that misbehave in one way each, and the chats and suites the rollout tests share."""

import asyncio
import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Environment, StepOutcome, TaskSuite
from common.rollout.worker import Sampler, run_episode
from common.types import Completion, FinishReason, Request, SamplingParams, Split, Task, Trajectory

WORDS = ("go", "stay", "start", "more", "again", "finish")
TASK = Task(task_id="counter/train/0", split=Split.TRAIN, spec="")

# Written for these tests in the manner of Qwen3's: thoughts of earlier turns are left out, the last turn's are kept, and a
# system turn is the first message's alone. The white space around its last block shows unless blocks are trimmed.
CHATML_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- said + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
  {% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@functools.cache
def word_chat() -> ChatTokenizer:
    return ChatTokenizer.from_vocabulary(WORDS)


def write_chatml_folder(folder: Path, *, template: str = CHATML_TEMPLATE, tokenizer_class: str = "PreTrainedTokenizerFast") -> Path:
    """A byte-level BPE tokenizer with ChatML turns, as Qwen's are, trained on a few words and saved in Hugging Face form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(["go stay start more again finish upper updown"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": tokenizer_class,
        "chat_template": template,
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class ScriptedSampler:
    """Answers turn i of every episode with turns[i] (token ids), and notes the requests."""

    def __init__(self, turns: Sequence[Sequence[int]], *, finish_reason: FinishReason = FinishReason.STOP) -> None:
        self.turns = turns
        self.finish_reason = finish_reason
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        token_ids = tuple(self.turns[request.key.turn_idx])
        return Completion(
            request_id=request.request_id,
            token_ids=token_ids,
            behavior_logprobs=tuple(-0.5 - idx for idx in range(len(token_ids))),
            weight_versions=tuple(request.key.turn_idx + 1 for _ in token_ids),
            finish_reason=self.finish_reason,
            error="the device is gone" if self.finish_reason is FinishReason.ERROR else None,
        )


class CountingEnvironment:
    """Says `more` until the action `finish`, which pays 1. Tests override one method to break it."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.num_closed = 0

    async def reset(self, task: Task) -> str:
        return "start"

    async def step(self, action: str) -> StepOutcome:
        self.actions.append(action)
        done = action == "finish"
        return StepOutcome(observation="more", reward=float(done), done=done, success=done)

    async def close(self) -> None:
        self.num_closed += 1


class RaisingEnvironment(CountingEnvironment):
    async def step(self, action: str) -> StepOutcome:
        raise RuntimeError("the simulator lost its connection")


class SlowEnvironment(CountingEnvironment):
    """Never answers; sets `step_ended` when it is told to give up."""

    def __init__(self) -> None:
        super().__init__()
        self.step_ended = asyncio.Event()

    async def step(self, action: str) -> StepOutcome:
        self.actions.append(action)
        try:
            await asyncio.Event().wait()
        finally:
            self.step_ended.set()
        raise AssertionError


class StubbornEnvironment(CountingEnvironment):
    """Goes on waiting however often it is cancelled."""

    async def step(self, action: str) -> StepOutcome:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


class SlowResetEnvironment(CountingEnvironment):
    async def reset(self, task: Task) -> str:
        await asyncio.Event().wait()
        raise AssertionError


class FakeSuite:
    """One task played in environments of the given class; keeps those it made."""

    def __init__(
        self, environment_class: Callable[[], Environment] = CountingEnvironment, *, max_turns: int = 4, num_tasks: int = 1
    ) -> None:
        self.environment_class = environment_class
        self.environments: list[Environment] = []
        self.max_turns = max_turns
        self.system_prompt: str | None = None
        self._num_tasks = num_tasks

    def num_tasks(self, split: Split) -> int:
        return self._num_tasks

    def task(self, split: Split, task_idx: int) -> Task:
        return Task(task_id=f"counter/{split.value}/{task_idx}", split=split, spec="")

    def make_environment(self) -> Environment:
        self.environments.append(self.environment_class())
        return self.environments[-1]

    def vocabulary(self) -> Sequence[str]:
        return WORDS


def episode(
    suite: TaskSuite,
    sampler: Sampler,
    chat: ChatTokenizer,
    *,
    task: Task = TASK,
    max_tokens: int = 4,
    max_context_tokens: int = 200,
    turn_timeout_s: float = 30.0,
    trajectory_id: int = 7,
) -> Awaitable[Trajectory]:
    """run_episode with what a test does not care about filled in."""
    return run_episode(
        suite=suite,
        task=task,
        chat=chat,
        sampler=sampler,
        sampling=SamplingParams(max_tokens=max_tokens),
        run_seed=3,
        trajectory_id=trajectory_id,
        group_id=2,
        max_context_tokens=max_context_tokens,
        turn_timeout_s=turn_timeout_s,
    )
