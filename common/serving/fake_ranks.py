"""TwoRankFakeEngine: one engine on two ranks, as tensor parallelism over processes would have it.

Rank 0 (the leader) decides; every call that changes state, and every plan, goes to rank 1 (the follower) as one line of JSON, which
the follower carries out on an engine of its own that has no clock. It refuses to go on when the ranks differ.
Invariant: after each message both ranks have the same state_digest; it is compared after each step and commit.
"""

from __future__ import annotations

import base64
import json

import numpy as np

from common.serving.engine import EngineInfo, EngineLoad, StepLimits, StepPlan, StepResult
from common.serving.fake import FakeEngine
from common.serving.fake_model import FakeWeights
from common.serving.wire import decode_plan, decode_request, encode_plan, encode_request
from common.types import Request


def encode_weights(weights: FakeWeights) -> str:
    def plain(value: np.ndarray) -> dict:
        return {"dtype": str(value.dtype), "shape": value.shape, "data": base64.b64encode(value.tobytes()).decode()}

    return json.dumps({name: plain(value) for name, value in weights.items()})


def decode_weights(text: str) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(base64.b64decode(plain["data"]), plain["dtype"]).reshape(plain["shape"])
        for name, plain in json.loads(text).items()
    }


class FollowerRank:
    """Carries out rank 0's messages on its own engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def handle(self, message: str) -> str | None:
        """Carry out one message; after a step or a commit, return the state digest."""
        fields = json.loads(message)
        engine, body = self._engine, fields["body"]
        match fields["call"]:
            case "add":
                engine.add(decode_request(body))
            case "abort":
                engine.abort(body)
            case "preempt":
                engine.preempt(body["request_id"], keep_cache=body["keep_cache"])
            case "submit":
                engine.submit(decode_plan(body))
            case "collect":
                engine.collect()
            case "commit":
                engine.commit(decode_weights(body["weights"]), version=body["version"])
            case unknown:
                raise ValueError(f"unknown call {unknown!r} from rank 0; both ranks must run the same version")
        return engine.state_digest() if fields["call"] in ("collect", "commit") else None


class TwoRankFakeEngine:
    """See common.serving.engine.StepEngine. `leader` and `follower` must be built alike; the follower's clock must be None."""

    def __init__(self, leader: FakeEngine, follower: FakeEngine) -> None:
        if leader.state_digest() != follower.state_digest() or leader.info != follower.info:
            raise ValueError("leader and follower differ before the first call; build both with the same arguments")
        self._leader = leader
        self._follower: FollowerRank | None = FollowerRank(follower)

    @property
    def info(self) -> EngineInfo:
        return self._leader.info

    def load(self) -> EngineLoad:
        return self._leader.load()

    def add(self, request: Request) -> None:
        self._leader.add(request)
        self._tell("add", encode_request(request))

    def abort(self, request_id: str) -> None:
        self._leader.abort(request_id)
        self._tell("abort", request_id)

    def preempt(self, request_id: str, *, keep_cache: bool) -> None:
        self._leader.preempt(request_id, keep_cache=keep_cache)
        self._tell("preempt", {"request_id": request_id, "keep_cache": keep_cache})

    def plan(self, limits: StepLimits) -> StepPlan | None:
        return self._leader.plan(limits)

    def submit(self, plan: StepPlan) -> None:
        self._leader.submit(plan)
        self._tell("submit", encode_plan(plan))

    def collect(self) -> StepResult:
        result = self._leader.collect()
        self._tell("collect", None)
        return result

    def drain(self) -> StepResult | None:
        result = self._leader.drain()
        if result is not None:
            self._tell("collect", None)
        return result

    def commit(self, weights: FakeWeights, *, version: int) -> None:
        self._leader.commit(weights, version=version)  # raises before the follower hears of weights that do not fit
        self._tell("commit", {"weights": encode_weights(weights), "version": version})

    def close(self) -> None:
        self._leader.close()
        self._follower = None

    def _tell(self, call: str, body: object) -> None:
        assert self._follower is not None
        digest = self._follower.handle(json.dumps({"call": call, "body": body}))
        assert digest in (None, self._leader.state_digest()), (
            f"the ranks differ after {call}: their plans or their draws were not the same"
        )
