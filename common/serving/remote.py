"""RemoteReplica: the Replica protocol over a replica process's rollout and control interface.

Every call has a time limit and is safe to repeat, so one whose connection breaks is sent again: a generation carries a `call_id`
that is the same for each attempt, by which the server runs it once and answers all attempts alike. An answer that comes too late
arrives on a connection that is gone and reaches nobody. Errors keep their types and the far side's words.

Refuses what the interface does not carry: stop strings, and priorities, which the server sets. `load` tells what the newest answer
told, so it never waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import ssl
from typing import Any

from common.errors import EngineClosedError, ReplicaUnavailableError, RequestRejectedError
from common.serving.engine import EngineInfo
from common.serving.front.messages import completion_from_wire, load_from_wire, report_from_wire
from common.serving.front.remote_errors import FarProcessError, from_wire
from common.serving.loop import LoopCounters
from common.serving.remote_http import AnswerLostError, HttpAnswer, HttpClient, NotSentError
from common.serving.replica import ReplicaLoad, StageReport
from common.transfer import errors as transfer
from common.transfer.secrets import Secret
from common.types import Completion, Request

RETRY_PAUSES_S = (0.0, 0.1, 0.5)
"""Before the second attempt and those after it. The first is at once: a kept connection may have been closed while it was idle."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteAddress:
    """Where a replica process listens and what it asks for. `tls` is for https; None trusts the machine's authorities."""

    url: str
    rollout_token: Secret
    control_token: Secret
    tls: ssl.SSLContext | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """How long one call may take, its repetitions included."""

    generate_s: float = 600.0
    """One turn, and how long a drain may wait for the last one."""
    sync_s: float = 600.0
    """One stage, commit or comparison of weights."""
    status_s: float = 10.0
    """Whatever needs no work of the engine."""


class _NoAnswerError(Exception):
    """Why no attempt was answered. `sent`: whether one of them may have been carried out."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class RemoteReplica:
    """See the module. Use as `async with`: entering asks what is there, leaving takes no more calls and stops nothing.

    Args:
        store: address of the store that it shall take weights from; None leaves that to how the process was started.
    """

    def __init__(
        self, replica_id: str, address: RemoteAddress, *, limits: TimeLimits | None = None, store: str | None = None
    ) -> None:
        self._id, self._address, self._store = replica_id, address, store
        self._limits = limits or TimeLimits()
        self._http = HttpClient(address.url, tls=address.tls)
        self._load: ReplicaLoad | None = None
        self._info: EngineInfo | None = None
        self._status_at_start: LoopCounters | None = None
        self.counters = LoopCounters()
        """Tokens of the completions that came from here; steps and device seconds as of the newest status, whoever caused them."""

    @property
    def replica_id(self) -> str:
        return self._id

    @property
    def info(self) -> EngineInfo:
        """Of the engine over there; known once entered."""
        assert self._info is not None, f"replica {self._id} was not entered"
        return self._info

    async def __aenter__(self) -> RemoteReplica:
        """Raises ReplicaUnavailableError if nobody answers there, AuthenticationError if a token is wrong."""
        await self.refresh()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._http.close()

    def cut(self) -> None:
        """Give up the calls under way, as if the connection had broken."""
        self._http.cut()

    async def generate(self, request: Request) -> Completion:
        sampling = dataclasses.asdict(request.sampling)
        if sampling.pop("stop_strings"):
            raise RequestRejectedError(f"{request.request_id}: stop strings do not reach a remote replica; stop at token ids")
        if request.priority:
            raise RequestRejectedError(
                f"{request.request_id}: priority={request.priority} does not reach a remote replica, which gives rollouts its own"
            )
        fields = {
            "call_id": secrets.token_hex(16),
            "request_id": request.request_id,
            "prompt_token_ids": request.prompt_token_ids,
            "sampling": sampling,
            "key": dataclasses.asdict(request.key),
            "cache_namespace": request.cache_namespace,
        }
        token, limit_s = self._address.rollout_token, self._limits.generate_s
        try:
            completion = completion_from_wire(await self._ask("/rollout/v1/generate", fields, token=token, limit_s=limit_s))
        except _NoAnswerError as error:
            raise self._gone(error) from None
        self.counters.sampled_tokens += len(completion.token_ids)
        self.counters.prefill_tokens += len(request.prompt_token_ids) - completion.cached_prompt_tokens
        return completion

    async def stage(self, version: int | None = None) -> StageReport:
        return report_from_wire(await self._sync("stage", {"version": version, "store": self._store}))

    async def commit(self) -> int:
        version = int((await self._sync("commit", {}))["version"])
        await self.refresh()
        return version

    async def digests(self) -> dict[str, str]:
        """xxh3-128 of the bits of every live tensor in the dtype that is published, by checkpoint name."""
        return dict((await self._sync("digests", None))["digests"])

    async def refresh(self) -> ReplicaLoad:
        """Ask for what `load` and `counters` tell. One attempt of `status_s` and, since time passes while no loop runs, another."""
        for last in (False, True):
            try:
                fields = await self._control("status", None, self._limits.status_s)
            except EngineClosedError:
                if last:
                    raise
            else:
                break
        self._load = dataclasses.replace(load_from_wire(fields["load"]), replica_id=self._id)
        self._info = EngineInfo(
            name=fields["engine"],
            max_slots=fields["max_slots"],
            max_context_tokens=fields["max_context_tokens"],
            vocab_size=fields["vocab_size"],
        )
        status = LoopCounters(**fields["counters"])
        self._status_at_start = self._status_at_start or status
        since = status.since(self._status_at_start)
        self.counters.num_steps, self.counters.device_s = since.num_steps, since.device_s
        return self._load

    def load(self) -> ReplicaLoad:
        assert self._load is not None, f"replica {self._id} was not entered"
        return self._load

    async def drain(self) -> None:
        await self._control("drain", {}, self._limits.generate_s)
        await self.refresh()

    async def resume(self) -> None:
        await self._control("resume", {}, self._limits.status_s)
        await self.refresh()

    async def _control(self, what: str, fields: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
        try:
            return await self._ask(f"/control/v1/{what}", fields, token=self._address.control_token, limit_s=limit_s)
        except _NoAnswerError as error:
            raise self._gone(error) from None

    async def _sync(self, what: str, fields: dict[str, Any] | None) -> dict[str, Any]:
        """A call about weights: what goes wrong is a TransferError."""
        token, limit_s = self._address.control_token, self._limits.sync_s
        try:
            return await self._ask(f"/control/v1/{what}", fields, token=token, limit_s=limit_s)
        except _NoAnswerError as error:
            kind = transfer.OutcomeUnknownError if error.sent else transfer.UnreachableError
            raise kind(f"{self._where}: {what}: {error}; sending it again is safe") from None
        except (FarProcessError, RequestRejectedError) as error:
            raise transfer.FarSideError(str(error)) from None

    @property
    def _where(self) -> str:
        return f"replica {self._id} at {self._address.url}"

    def _gone(self, error: _NoAnswerError) -> Exception:
        if not error.sent:
            return ReplicaUnavailableError(f"{self._where} cannot be reached: {error}")
        return EngineClosedError(f"{self._where} left a call unanswered: {error}")

    async def _ask(self, path: str, fields: dict[str, Any] | None, *, token: Secret, limit_s: float) -> dict[str, Any]:
        """One call, sent again while its connection breaks. `fields` None asks with GET.

        Raises:
            _NoAnswerError: no attempt was answered.
            RoseError: the far side's error.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        body = b"" if fields is None else json.dumps(fields).encode()
        headers = {"authorization": f"Bearer {token.value.decode()}"}
        sent = False
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                method = "GET" if fields is None else "POST"
                answer = await self._http.ask(method, path, body, headers=headers, timeout_s=deadline_s - loop.time())
            except TimeoutError:
                raise _NoAnswerError(f"nothing within {limit_s:g} s", sent=True) from None
            except (NotSentError, AnswerLostError) as error:
                sent = sent or isinstance(error, AnswerLostError)
                self._http.drop_idle()  # what else is kept was opened to the same process and is no better
                if pause_s is None:
                    raise _NoAnswerError(str(error), sent=sent) from None
                await asyncio.sleep(pause_s)
            else:
                return self._read(answer)
        raise AssertionError("the last attempt returns or raises")

    def _read(self, answer: HttpAnswer) -> dict[str, Any]:
        try:
            fields = json.loads(answer.body)
            if answer.status == 200:
                assert isinstance(fields, dict)
                return fields
            told = fields["error"]
            message, code = str(told["message"]), told["code"]
        except (ValueError, KeyError, TypeError, AssertionError):
            said = answer.body[:200].decode(errors="replace")
            raise FarProcessError(f"{self._where} is none: it answers with status {answer.status} and {said!r}") from None
        raise self._error(answer.status, str(code), message)

    def _error(self, status: int, code: str, message: str) -> Exception:
        """The inverse of `common.serving.front.errors.api_error`."""
        text = f"{self._where}: {message}"
        match status:
            case 400 | 413:
                return RequestRejectedError(text)
            case 401 | 403:
                return transfer.AuthenticationError(text)
            case 503 if code == "engine_closed":
                return EngineClosedError(text)
            case 408 | 429 | 503:
                return ReplicaUnavailableError(text)
            case 409 | 424:
                return from_wire([code, text])
            case _:
                return FarProcessError(text)
