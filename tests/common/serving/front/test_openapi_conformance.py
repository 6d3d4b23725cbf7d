"""The server's OpenAPI document: valid by the standard's own schemas, and requests generated from it bring no 5xx.

schemathesis makes the requests, right ones and wrong ones, and holds every answer to the document: its status is listed, its
content type and its fields are as stated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.common.serving.front.running import CONTROL_TOKEN, MODEL, ROLLOUT_TOKEN, RunningFront

NUM_EXAMPLES = 60
STOPS_SERVING = "/control/v1/drain"
"""Left out: it makes other calls answer 503, as it should. test_rollout_api has it."""
SAMPLING_PATHS = {"/v1/completions", "/v1/chat/completions", "/rollout/v1/generate"}
BODY_PATHS = SAMPLING_PATHS | {"/control/v1/stage"}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""What OpenAPI 3.1 says that its schemas are written in."""


def references(node: Any) -> set[str]:
    """Every `$ref` in a document."""
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_the_document_is_valid_and_every_schema_in_it(server: RunningFront) -> None:
    document = server.ask("/openapi.json")[1]
    assert document["openapi"].startswith("3.1.")
    schemathesis.openapi.from_dict(document).validate()  # by the published schema of OpenAPI 3.1, which leaves schemas aside
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate({"$schema": DIALECT} | schema)
    assert references(document) == {f"#/components/schemas/{name}" for name in schemas}, "one leads nowhere or a schema is unused"
    identifiers = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(identifiers)) == len(identifiers) > 10


def token_for(path: str) -> str | None:
    return {"rollout": ROLLOUT_TOKEN, "control": CONTROL_TOKEN}.get(path.split("/")[1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_generated_requests_bring_no_5xx_and_documented_answers(server: RunningFront, mode: schemathesis.GenerationMode) -> None:
    """A wrong request is a wrong body: the one parameter that is not in a body is a text in a path, and every text is one."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: defaultdict[str, Counter[int]] = defaultdict(Counter)
    wrong = mode is schemathesis.GenerationMode.NEGATIVE

    def call(case: Any) -> None:
        path, token = case.operation.path, token_for(case.operation.path)
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # another name would be all that the server looks at
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        response = case.call_and_validate(checks=CHECKS, headers=headers, timeout=60)
        statuses[path][response.status_code] += 1

    operations = [result.ok() for result in schema.get_all_operations()]
    asked = [operation for operation in operations if operation.path != STOPS_SERVING and (operation.body or not wrong)]
    for operation in asked:
        strategy = operation.as_strategy(generation_mode=mode)
        settled = settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        settled(given(case=strategy)(call))()
    assert set(statuses) == {operation.path for operation in asked} >= BODY_PATHS
    assert all(statuses[path].total() >= NUM_EXAMPLES for path in BODY_PATHS), statuses
    if wrong:
        assert all(set(statuses[path]) == {400} for path in BODY_PATHS), statuses
    else:
        assert all(statuses[path][200] for path in SAMPLING_PATHS), statuses
    server.wait_until(server.is_idle)
    assert server.engine.fault is None
