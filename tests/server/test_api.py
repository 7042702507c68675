"""The API as clients see it: shapes, streams, refusals, bounds."""

import json
import re
from typing import Any

import httpx
import pytest

from server.schemas import ChatRequest, CompletionRequest
from tests.server.launch import MAX_LEN, Served, wait_for

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "hello"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose end is [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def completed(served: Served, **body: Any) -> dict[str, Any]:
    response = served.post("/v1/completions", **(GREEDY | body))
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_stream_is_the_whole_in_parts(served: Served) -> None:
    for extra in ({}, {"logprobs": 3}, {"n": 3, "temperature": 1, "seed": 7}, {"echo": True}):
        body = {"prompt": "once upon \u00e9\u4e2d\U0001f600", **extra}
        whole = completed(served, **body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = served.post("/v1/completions", **(GREEDY | body | options))
        *chunks, usage = events(response)
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        for choice in whole["choices"]:
            mine = [
                part
                for chunk in chunks
                for part in chunk["choices"]
                if part["index"] == choice["index"]
            ]
            assert "".join(part["text"] for part in mine) == choice["text"]
            assert [part["finish_reason"] for part in mine if part["finish_reason"]] == ["length"]
            if choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    told = [x for part in mine for x in (part["logprobs"] or {}).get(name, [])]
                    assert told == values


def test_a_line_separator_in_an_answer_ends_no_line_of_its_event(served: Served) -> None:
    prompt = "a\u2028b\u2029c\x85d"
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as response:
        first, *_ = response.iter_lines()  # which ends lines at these characters
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == prompt


def test_a_chat_streams_its_role_once_and_each_end_once(served: Served) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 10, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 2, "n": 2}
    whole = served.post("/v1/chat/completions", **body).json()
    assert whole["object"] == "chat.completion"
    chunks = events(served.post("/v1/chat/completions", **body, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        assert choice["message"]["role"] == "assistant"
        mine = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        roles = [part["delta"].get("role") for part in mine]
        assert roles == ["assistant", *[None] * (len(mine) - 1)]
        text = "".join(part["delta"].get("content") or "" for part in mine)
        assert text == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
        told = [x for part in mine for x in (part["logprobs"] or {"content": []})["content"]]
        assert told == choice["logprobs"]["content"]
        assert len(told) == 10
        assert all(len(each["top_logprobs"]) == 2 for each in told)
        assert bytes(x for each in told for x in each["bytes"]).decode(errors="replace") == text
    count = served.post("/tokenize", messages=HELLO).json()["count"]
    assert whole["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 20,
        "total_tokens": count + 20,
        "prompt_tokens_details": whole["usage"]["prompt_tokens_details"],
    }


def test_several_prompts_are_numbered_by_prompt_and_token_ids_are_taken(served: Served) -> None:
    ids = served.post("/tokenize", prompt="two").json()["tokens"]
    whole = completed(served, prompt=["one", "two"], n=2, temperature=1, seed=3)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 48
    greedy = completed(served, prompt="two", return_token_ids=True)["choices"][0]
    by_ids = completed(served, prompt=ids, return_token_ids=True, echo=True)["choices"][0]
    assert by_ids["token_ids"] == greedy["token_ids"]
    assert by_ids["text"] == "two" + greedy["text"]
    assert len(completed(served, prompt=[ids, ids])["choices"]) == 2


def test_best_of_returns_the_most_probable_answers(served: Served) -> None:
    body = {"prompt": "best", "temperature": 1, "seed": 5, "logprobs": 0}
    every = completed(served, **body, n=4)["choices"]
    best = completed(served, **body, n=1, best_of=4)
    texts = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [texts[0]["text"]]
    assert best["usage"]["completion_tokens"] == 48


def test_a_stop_string_that_spans_tokens_ends_the_text_and_never_shows(served: Served) -> None:
    text = completed(served, prompt="stop here", max_tokens=40)["choices"][0]["text"]
    plain = [place for place in range(4, len(text) - 3) if "\ufffd" not in text[place : place + 3]]
    for place in plain[:3]:
        stop = text[place : place + 3]
        expected = text[: text.index(stop)]
        for stops in (stop, [stop, "never there"]):
            body = {"prompt": "stop here", "max_tokens": 40, "stop": stops}
            choice = completed(served, **body)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
            assert choice["stop_reason"] == stop
            parts = events(served.post("/v1/completions", **(GREEDY | body), stream=True))
            assert "".join(part["choices"][0]["text"] for part in parts) == expected
    # What began like a stop string and was none comes with the end.
    body = {"prompt": "stop here", "max_tokens": 40, "stop": f"{text[-1]}never"}
    assert completed(served, **body)["choices"][0]["text"] == text


def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(served: Served) -> None:
    """Those that the same tokens had when they were generated."""
    body = {"logprobs": 2, "return_token_ids": True}
    prompt = "hallo there, once more"
    made = completed(served, prompt=prompt, **body)["choices"][0]
    ids = served.post("/tokenize", prompt=prompt).json()["tokens"]
    whole = completed(served, prompt=ids + made["token_ids"], echo=True, max_tokens=1, **body)
    found = whole["choices"][0]["logprobs"]
    assert len({len(values) for values in found.values()}) == 1
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["text_offset"][:2] == [0, len(found["tokens"][0])]
    again = {name: values[len(ids) : -1] for name, values in found.items()}
    assert again["tokens"] == made["logprobs"]["tokens"]
    assert again["token_logprobs"] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)
    for mine, theirs in zip(again["top_logprobs"], made["logprobs"]["top_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_a_stream_tells_an_echoed_prompt_s_log_probabilities_once(served: Served) -> None:
    body = GREEDY | {"prompt": ["abc", "hallo"], "echo": True, "logprobs": 1}
    whole = served.post("/v1/completions", **body).json()["choices"]
    for index, choice in enumerate(whole):
        chunks = events(served.post("/v1/completions", **body, stream=True))
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [each for part in told for each in part[name]] == choice["logprobs"][name]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_null_is_not_given(served: Served, path: str) -> None:
    names = (
        *("n", "temperature", "top_p", "seed", "stop", "logprobs", "stream", "stream_options"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "user", "tools", "tool_choice"),
        *("max_tokens", "response_format", "top_logprobs", "min_p", "top_k", "echo", "best_of"),
    )
    body = {"prompt": "x", "messages": HELLO, **dict.fromkeys(names)}
    body |= {"max_tokens": 3, "unknown_field": {"a": [1]}}
    assert served.post(path, **body).status_code == 200


REFUSALS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop_token_ids": [VOCAB_OUTSIDE := 10**6]}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [VOCAB_OUTSIDE]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("change", "param"), REFUSALS)
def test_a_bad_value_is_refused_and_named(
    served: Served, change: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        body = {**GREEDY, "prompt": "x", "stream": stream, **change}
        error = refused(served.post("/v1/completions", **body), 400)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"]


def test_a_refusal_is_short_whatever_was_sent(served: Served) -> None:
    long = "x" * 1_000_000
    for path, body in (
        ("/v1/completions", {"prompt": "a", "model": long}),
        ("/v1/completions", {"prompt": "a", "stop": {long: long}}),
        ("/v1/chat/completions", {"messages": [{"role": long, "content": "a"}]}),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": {long: [long]}}),
    ):
        response = served.post(path, **body)
        assert 400 <= response.status_code < 500
        assert "got '" in response.text or "got {" in response.text
        assert len(response.content) < 2000


def test_options_of_a_stream_need_one(served: Served) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True}}
    error = refused(served.post("/v1/completions", **body), 400)
    assert error["param"] == "stream_options"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "x", "temperature": NaN}', "JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "finite"),
        (b'{"prompt": "x", "temperature": Infinity}', "JSON"),
        (b'{"prompt": ', "JSON"),
        (b"[1, 2]", "object"),
        (b'"text"', "object"),
        (b"", "JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "JSON"),
        (b'{"messages": [' + b"{}," * 200_000 + b"{}]}", "objects"),
        (b'{"prompt": [' + b"[1]," * 200_000 + b"[1]]}", "lists"),
        (b'{"prompt": {' + b'"a":1,' * 400_000 + b'"a":1}}', "members"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(served: Served, body: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers)
    assert words in refused(response, 400)["message"]


def test_a_byte_order_mark_is_passed_over(served: Served) -> None:
    headers = {"content-type": "application/json"}
    body = b'\xef\xbb\xbf{"prompt": "x"}'
    assert httpx.post(f"{served.url}/tokenize", content=body, headers=headers).status_code == 200


def test_a_template_s_variable_may_have_any_name(served: Served) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"tokenizer": 1, "": 2, "a b": 3}}
    assert served.post("/tokenize", **body).status_code == 200


def test_no_top_log_probabilities_need_no_log_probabilities(served: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "logprobs": False, "top_logprobs": 0}
    assert served.post("/v1/chat/completions", **body).status_code == 200
    error = refused(served.post("/v1/chat/completions", **body | {"top_logprobs": 1}), 400)
    assert error["param"] == "top_logprobs"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_one_rule_for_lengths_on_both_routes_streamed_or_not(
    served: Served, path: str, stream: bool
) -> None:
    def ask(length: int, limit: int) -> httpx.Response:
        text = "a" * (length - extra)
        chat = [{"role": "user", "content": text}]
        body = {"messages": chat} if "chat" in path else {"prompt": text}
        return served.post(path, **body, max_tokens=limit, stream=stream, ignore_eos=True)

    frame = served.post("/tokenize", messages=[{"role": "user", "content": "a"}])
    extra = frame.json()["count"] - 1 if "chat" in path else 0
    fits = ask(MAX_LEN - 2, 2)
    assert fits.status_code == 200
    assert '"finish_reason":"length"' in fits.text
    for length, limit in ((MAX_LEN - 2, 3), (MAX_LEN, 1), (MAX_LEN + 1, 1)):
        error = refused(ask(length, limit), 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]
        assert str(MAX_LEN) in error["message"]
        assert str(length) in error["message"]


@pytest.mark.parametrize("field", ["prompt", "messages", "tools"])
def test_a_text_far_too_long_is_refused_before_its_tokens_are_made(
    served: Served, field: str
) -> None:
    text = "a" * 1_000_000
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    body: dict[str, Any] = {
        "prompt": {"prompt": text},
        "messages": {"messages": [{"role": "user", "content": text}]},
        "tools": {"messages": HELLO, "tools": [tool]},
    }[field]
    path = "/v1/completions" if field == "prompt" else "/v1/chat/completions"
    error = refused(served.post(path, **body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 1200 tokens" in error["message"]
    assert re.search(r"prompt has 1000\d\d\d characters", error["message"])
    assert served.post("/tokenize", prompt=text[:50_000]).json()["count"] == 50_000


def test_where_a_length_is_not_given_it_is_the_rest(served: Served) -> None:
    body = {"prompt": "a" * (MAX_LEN - 3), "ignore_eos": True}
    whole = served.post("/v1/completions", **body).json()
    assert whole["usage"]["completion_tokens"] == 3


def test_refusals_of_paths_methods_types_names_and_sizes(served: Served) -> None:
    error = refused(served.post("/v1/embeddings", input="x"), 404)
    assert error["code"] == "unsupported_endpoint"
    refused(httpx.get(f"{served.url}/v1/completions"), 405)
    refused(httpx.post(f"{served.url}/v1/completions", data={"prompt": "x"}), 415)
    zipped = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(httpx.post(f"{served.url}/v1/completions", content=b"x", headers=zipped), 415)
    text = {"content-type": "text/plain"}
    refused(httpx.post(f"{served.url}/v1/completions", content="{}", headers=text), 415)
    error = refused(served.post("/v1/completions", prompt="x", model="other"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    refused(served.get("/v1/models/no/such"), 404)
    refused(served.post("/v1/completions/", prompt="x"), 404)
    refused(httpx.get(f"{served.url}/v1/models", headers={"Host": "evil.example"}), 403)
    refused(served.post("/v1/completions", prompt="x" * 2**25), 413)


def test_models_versions_and_pages(served: Served) -> None:
    listed = served.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "org/tiny"]
    assert {card["max_model_len"] for card in listed["data"]} == {MAX_LEN}
    assert served.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
    assert served.get("/health").json()["state"] == "ready"
    assert served.get("/ping").status_code == 200
    for path in ("/health", "/ping"):
        found = httpx.head(f"{served.url}{path}")
        assert (found.status_code, found.content) == (200, b"")
    assert served.get("/version").json()["version"]
    assert "/v1/chat/completions" in served.get("/docs").text
    assert "/tokenize" in served.get("/openapi.json").json()["paths"]


def test_info_says_what_is_in_force(served: Served) -> None:
    found = served.get("/info").json()
    assert (found["model"], found["max_num_seqs"], found["backend"]) == ("tiny", 8, "none")
    assert found["max_model_len"] == MAX_LEN
    assert found["memory"]["gpu_items"]["weights"] == sum(found["placement_bytes"].values())
    assert found["memory"]["gpu_budget_bytes"] > 0


def test_text_and_tokens_go_both_ways(served: Served) -> None:
    text = "there \u00fc\u4e2d\U0001f600"
    found = served.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == MAX_LEN
    assert served.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    refused(served.post("/detokenize", tokens=[-1]), 400)
    refused(served.post("/tokenize"), 400)
    error = refused(served.post("/tokenize", prompt="x" * (4 * 2**20 + 1)), 400)
    assert "at most 4194304 characters to count tokens of, got 4194305" in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages.0.tool_calls.0"),
    ],
)
def test_a_message_of_another_form_is_refused(
    served: Served, message: dict[str, Any], param: str
) -> None:
    error = refused(served.post("/v1/chat/completions", messages=[message]), 400)
    assert error["param"] == param


def test_parts_of_a_content_are_joined_and_tools_reach_the_template(served: Served) -> None:
    parts = [{"type": "text", "text": "hal"}, {"type": "text", "text": "lo"}]
    message = {"role": "user", "content": parts}
    joined = [{"role": "user", "content": "hal\nlo"}]
    tokens = served.post("/tokenize", messages=[message]).json()["tokens"]
    assert tokens == served.post("/tokenize", messages=joined).json()["tokens"]
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    tokens = served.post("/tokenize", messages=HELLO, tools=tools).json()["tokens"]
    assert "look_up" in served.post("/detokenize", tokens=tokens).json()["prompt"]
    body = {"messages": HELLO, "max_tokens": 4}
    with_tools = served.post("/v1/chat/completions", **body, tools=tools)
    assert with_tools.status_code == 200
    without = served.post("/v1/chat/completions", **body, tools=tools, tool_choice="none").json()
    assert without["usage"]["prompt_tokens"] < with_tools.json()["usage"]["prompt_tokens"]
    refused(served.post("/v1/chat/completions", **body, tools=[{"type": "x"}]), 400)


def test_counters_move_by_exactly_what_was_asked(served: Served) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [served.metric(name) for name in names]
    for _ in range(3):
        completed(served, prompt="abcde", max_tokens=7)
    assert [served.metric(name) for name in names] == [before[0] + 15, before[1] + 21]
    assert served.metric("vllm:e2e_request_latency_seconds_count") > 0


def test_metrics_tell_where_memory_went(served: Served) -> None:
    text = served.get("/metrics").text
    found = dict(re.findall(r'^tightfit:gpu_plan_bytes\{item="(\w+)".* (\S+)$', text, re.MULTILINE))
    assert float(found["weights"]) > 0
    assert float(found["kv_cache"]) > 0
    budget = served.metric("tightfit:gpu_budget_bytes")
    assert 0 < budget <= 0.125 * 2**30
    assert sum(map(float, found.values())) <= budget
    assert served.metric("tightfit:host_plan_bytes") >= sum(map(float, found.values()))
    assert 'gpu_uuid=""' in text  # there is no GPU
    assert served.get("/load").json() == {"server_load": 0}


@pytest.mark.thorough
def test_what_a_chat_leaves_out_is_of_the_generation_config(served: Served) -> None:
    def length(**body: Any) -> int:
        body |= {"messages": HELLO, "ignore_eos": True}
        whole = served.post("/v1/chat/completions", **body).json()
        return int(whole["usage"]["completion_tokens"])

    assert [length(), length(max_tokens=None), length(max_tokens=40)] == [33, 33, 40]
    long = [{"role": "user", "content": "a" * (MAX_LEN - 40)}]
    body = {"messages": long, "ignore_eos": True}
    whole = served.post("/v1/chat/completions", **body).json()
    assert whole["usage"]["total_tokens"] == MAX_LEN


def test_sampling_parameters_that_a_request_has_win_over_defaults() -> None:
    defaults = {"temperature": 0.7, "top_k": 20, "max_tokens": 5}
    params = CompletionRequest(prompt="x", temperature=0).to_params(defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0, 20, 16)
    params = ChatRequest(messages=HELLO, top_k=None).to_params(defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.7, 20, 5)


def test_the_log_has_a_line_for_each_request_with_its_id(served: Served) -> None:
    url = f"{served.url}/v1/completions"
    body = GREEDY | {"prompt": "to be logged"}
    response = httpx.post(url, json=body, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    line = wait_for(lambda: next((x for x in served.lines if '"mine-1"' in x), None))
    found = json.loads(line)
    assert (found["status"], found["completion_tokens"]) == (200, 12)
    assert found["prompt"] == "to be logged"
    assert found["answer"] == [response.json()["choices"][0]["text"]]
    assert served.get("/version").headers["x-request-id"]


def test_an_answer_has_the_form_that_was_asked_for(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "response_format": form}
    choice = served.post("/v1/chat/completions", **body, seed=1).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["answer"] in {"yes", "no"}
    chunks = events(served.post("/v1/chat/completions", **body, seed=1, stream=True))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"]
    for bad in (
        {"type": "json_schema"},
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}},
    ):
        for stream in (False, True):
            changed = body | {"response_format": bad, "stream": stream}
            refused(served.post("/v1/chat/completions", **changed), 400)


def test_a_form_that_cannot_be_enforced_is_refused_in_the_client_s_words(served: Served) -> None:
    schema = {"type": "string", "pattern": "("}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    endless = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for body, param in (
        ({"response_format": form}, "response_format"),
        ({"response_format": form, "ignore_eos": True}, "response_format"),
        ({"response_format": endless}, "response_format"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
    ):
        error = refused(served.post("/v1/chat/completions", messages=HELLO, **body), 400)
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: expected ")


@pytest.mark.thorough
def test_a_forced_call_of_a_tool_is_one(served: Served) -> None:
    parameters = {
        "type": "object",
        "properties": {"q": {"$ref": "#/$defs/Body"}},
        "required": ["q"],
        "additionalProperties": False,
        "$defs": {"Body": {"enum": ["sun", "moon"]}},
    }
    names = ("find", "guess")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in names
    ]
    named = {"type": "function", "function": {"name": "guess"}}
    body = {"messages": HELLO, "max_tokens": 400, "tools": tools, "seed": 2}
    body["parallel_tool_calls"] = False
    for choice, known in (("required", names), (named, ("guess",))):
        whole = served.post("/v1/chat/completions", **body, tool_choice=choice).json()["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] is None
        [call] = whole["message"]["tool_calls"]
        assert call["function"]["name"] in known
        assert json.loads(call["function"]["arguments"])["q"] in {"sun", "moon"}
        streamed = {**body, "tool_choice": choice, "stream": True}
        chunks = events(served.post("/v1/chat/completions", **streamed))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        [told] = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert told["function"] == call["function"]
        assert told["index"] == 0
    body["tool_choice"] = {"type": "function", "function": {"name": "absent"}}
    assert refused(served.post("/v1/chat/completions", **body), 400)["param"] == "tool_choice"
    tools[0]["function"]["parameters"] = True
    param = "tools.0.function.parameters"
    assert refused(served.post("/v1/chat/completions", **body), 400)["param"] == param
