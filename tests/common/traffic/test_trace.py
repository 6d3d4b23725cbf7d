"""Traces: what is read is what the file says, changes are declared, and a wrong row is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.traffic.trace import Trace, TraceRequest, load_trace, packaged_traces, parse_trace

TEXT = "arrival_s,prompt_tokens,output_tokens\n0.5,100,10\n1.5,3,1\n4,7,2\n"


def test_rows_are_read_as_they_stand() -> None:
    trace = parse_trace(TEXT, name="t")
    assert trace.requests[0] == TraceRequest(arrival_s=0.5, prompt_tokens=100, output_tokens=10)
    assert (len(trace.requests), trace.span_s, trace.longest_context) == (3, 4.0, 110)


def test_sessions_are_optional_by_row() -> None:
    trace = parse_trace("arrival_s,prompt_tokens,output_tokens,session_id\n0,1,1,a\n1,1,1,\n", name="t")
    assert [request.session_id for request in trace.requests] == ["a", None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "row 1: the header"),
        ("a,b,c\n1,2,3\n", "row 1: the header is 'a,b,c'"),
        ("arrival_s,prompt_tokens,output_tokens\n", ": there is no row below"),
        (TEXT + "5,1\n", "row 5: 2 fields"),
        (TEXT + "x,1,1\n", "row 5: arrival_s='x'"),
        (TEXT + "-1,1,1\n", "row 5: arrival_s='-1'"),
        (TEXT + "nan,1,1\n", "row 5: arrival_s='nan'"),
        (TEXT + "3,1,1\n", "row 5: arrival_s=3 is before the row above (4); sort"),
        (TEXT + "5,0,1\n", "row 5: prompt_tokens='0'"),
        (TEXT + "5,1,1.5\n", "row 5: output_tokens='1.5'"),
    ],
)
def test_a_wrong_row_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"folder/t.csv{words}" if words[0] == ":" else f"folder/t.csv {words}")):
        parse_trace(text, name="t", source="folder/t.csv")


def test_a_window_starts_at_zero_and_is_declared() -> None:
    part = parse_trace(TEXT, name="t").window(1.0, 3.0)
    assert [request.arrival_s for request in part.requests] == [0.5]
    assert (part.span_s, part.description) == (2.0, "t, 1-3 s")
    with pytest.raises(ValueError, match="nothing of t arrives from 2 to 3 s"):
        parse_trace(TEXT, name="t").window(2.0, 3.0)


def test_scaling_keeps_every_request_and_is_declared() -> None:
    trace = parse_trace(TEXT, name="t").scaled(time=2.0, prompts=0.25, outputs=0.5)
    assert [request.arrival_s for request in trace.requests] == [1.0, 3.0, 8.0]
    assert [(request.prompt_tokens, request.output_tokens) for request in trace.requests] == [(25, 5), (1, 1), (2, 1)]
    assert (trace.span_s, trace.description) == (8.0, "t, time x 2, prompts x 0.25, outputs x 0.5")
    with pytest.raises(ValueError, match="outputs=0"):
        trace.scaled(outputs=0)


def test_the_packaged_traces_are_whole() -> None:
    sizes = {name: len(load_trace(name).requests) for name in packaged_traces()}
    assert sizes == {"azure2023_code_burst10min_pub": 2339, "azure2023_conv_pub": 9717}


def test_a_file_outside_the_package_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TEXT)
    trace = load_trace(str(path))
    assert isinstance(trace, Trace)
    assert (trace.name, len(trace.requests)) == ("mine", 3)
    with pytest.raises(ValueError, match="azure2023_conv_pub"):
        load_trace("azure2023_con")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"mine\.csv"):
        load_trace(str(path))
