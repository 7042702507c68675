import asyncio
import codecs
import contextlib
import socket

import pytest

from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.sampling import SamplingParams
from engine.errors import ConfigError, EngineError, RequestError
from harness.config.schema import CorrectnessConfig, SystemConfig
from harness.config.serve import Arrivals
from harness.systems import http_engine
from harness.systems.http_engine import (
    MOST_FAILED,
    MOST_UNREACHED,
    HTTPClient,
    HTTPDoor,
    HTTPEngine,
    ServerError,
    StreamedAnswer,
    http_door,
)
from harness.work.correctness import write_reference
from harness.work.drive import run_requests
from harness.worker import Work
from tests.harness.cases import SPEC, scenario
from tests.harness.systems.server import Script, Server, next_token
from tests.harness.test_worker import job
from tests.harness.work.traffic.cases import serve

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def config():
    return EngineConfig(model=ModelConfig(name="tiny", load_format="dummy", spec=SPEC))


def system(base_url, **changes):
    return SystemConfig(kind="http", base_url=base_url, **changes)


def ask(script, prompts=PROMPTS, output=5, /, **changes):
    """Send prompts at once; return the requests and the engine's totals."""
    import time

    with Server(script) as server:
        llm = HTTPEngine(config(), system(server.base_url, **changes))
        try:
            requests, totals = run_requests(
                llm, prompts, output, clock=time.perf_counter, at_once=True, prefix="r"
            )
            return requests, totals, llm.stats()
        finally:
            llm.close()


def test_tokens_and_their_number_are_those_of_the_server():
    requests, totals, stats = ask(Script())
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.is_complete
        assert request.token_ids == [next_token(prompt, index) for index in range(5)]
        assert request.submit_s < request.token_times_s[0]
        assert request.token_times_s == sorted(request.token_times_s)
    assert totals.num_steps == 0
    assert stats["notes"] == []
    assert (stats["tokens"], stats["unknown_ids"], stats["added_tokens"]) == (10, 0, 0)


def test_what_is_sent_says_greedy_and_of_set_length():
    script = Script()
    ask(script, PROMPTS[:1])
    (body,) = script.bodies
    assert body == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }


def test_without_extensions_only_published_fields_are_sent(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    script = Script(with_ids=False)
    requests, _, stats = ask(script, PROMPTS[:1], extensions=False, api_key_env="A_KEY")
    assert not {"ignore_eos", "cache_salt"} & set(script.bodies[0])
    assert script.headers[0]["Authorization"] == "Bearer secret"
    assert requests[0].token_ids == [-1] * 5
    assert stats["unknown_ids"] == 5


def test_tokens_of_one_part_share_a_time_and_a_note_says_so():
    requests, _, stats = ask(Script(tokens_per_part=2, gap_s=0.02), PROMPTS[:1])
    times = requests[0].token_times_s
    assert len(requests[0].token_ids) == 5
    assert times[0] == times[1]
    assert times[2] == times[3]
    assert "5 tokens came in 3 parts" in stats["notes"][0]
    gaps = requests[0].itl_ms  # between parts, as the note says
    assert len(gaps) == 2
    assert min(gaps) > 0


def test_an_empty_reason_is_none():
    requests, _, _ = ask(Script(finish_before=""), PROMPTS[:1])
    assert (requests[0].finish_reason, requests[0].error) == ("length", None)


def test_tokens_of_the_usage_alone_are_added():
    requests, _, stats = ask(Script(with_ids=False, extra_usage=2), PROMPTS[:1])
    assert requests[0].token_ids == [-1] * 7
    assert stats["added_tokens"] == 2
    assert any("usage alone" in note for note in stats["notes"])


def test_another_count_of_the_prompt_is_noted():
    _, _, stats = ask(Script(prompt_offset=1), PROMPTS[:1])
    assert "a prompt of 3 tokens was counted as 4" in stats["notes"][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": 503}, "answered 503"),
        ({"status": 400}, "system.extensions=false"),
        ({"break_after": 2}, "closed the stream after 2 tokens"),
        ({"error_after": 2}, "out of blocks"),
        ({"finish": "content_filter"}, "content_filter"),
        ({"raw": "event: error\ndata: no room\n\n"}, "sent an error: no room"),
        ({"raw": 'data: {"object": "error", "message": "too long"}\n\n'}, "too long"),
    ],
)
def test_what_is_no_answer_fails_that_request(changes, words):
    requests, _, _ = ask(Script(**changes), PROMPTS[:1])
    assert not requests[0].is_complete
    assert words in requests[0].error


@pytest.mark.parametrize(
    "part",
    [
        '{"choices": ["x"]}',
        '{"choices": [{"text": "x", "logprobs": [1]}]}',
        '{"choices": [{"text": "x", "token_ids": ["a"]}]}',
        '{"choices": [], "usage": [1]}',
        '{"choices": [], "usage": {"completion_tokens": "many"}}',
    ],
)
def test_a_part_of_another_form_fails_the_request_and_hangs_nothing(part):
    requests, _, _ = ask(Script(raw=f"data: {part}\n\n"), PROMPTS[:1])
    assert "another form than the published one" in requests[0].error


def test_whatever_goes_wrong_with_an_answer_ends_its_request(monkeypatch):
    async def break_down(*_):
        raise KeyError("unforeseen")

    monkeypatch.setattr(HTTPClient, "complete", break_down)
    requests, _, _ = ask(Script(), PROMPTS[:1])
    assert requests[0].error == "KeyError: 'unforeseen'"
    monkeypatch.setattr(http_engine, "MOST_FAILED", 2)
    with (
        Server(Script()) as server,
        contextlib.closing(HTTPEngine(config(), system(server.base_url))) as llm,
    ):
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
        with contextlib.suppress(EngineError):  # both may have ended before it
            while llm.has_unfinished():
                llm.step()
        assert "2 requests in a row failed" in str(llm.failure)


class Words:
    """A tokenizer whose texts are numbers; it adds some tokens to every text."""

    def __init__(self, *added):
        self.added = list(added)

    def __call__(self, text, verbose=True):
        return {"input_ids": [*self.added, *map(int, text.split())]}

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.mark.parametrize("how", [{"prompts": "text"}, {"api": "chat"}])
def test_text_is_sent_without_what_the_tokenizer_adds(how, monkeypatch):
    words = Words(1)
    monkeypatch.setattr(http_engine, "load_tokenizer", lambda path: words)
    script = Script()
    ask(script, [words("5 6")["input_ids"], [7, 8]], **how)
    sent = [body.get("prompt") or body["messages"][0]["content"] for body in script.bodies]
    assert sorted(sent) == ["5 6", "7 8"]


def test_a_chat_gets_text_and_its_role_alone_is_no_token(monkeypatch):
    monkeypatch.setattr(http_engine, "load_tokenizer", lambda path: Words())
    script = Script()
    requests, _, stats = ask(script, PROMPTS[:1], api="chat")
    assert requests[0].token_ids == [-1] * 5
    assert script.bodies[0]["messages"] == [{"role": "user", "content": "1 2 3"}]
    assert "prompt" not in script.bodies[0]
    assert (stats["parts"], stats["tokens"]) == (5, 5)


def test_a_chat_s_tokens_are_counted_by_log_probabilities():
    answer = StreamedAnswer()
    answer.feed('{"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{}, {}]}}]}', 1)
    assert answer.token_ids == [-1, -1]


def test_a_chat_without_a_tokenizer_and_a_server_of_chats_alone_say_what_to_set():
    with Server(Script()) as server:
        llm = HTTPEngine(config(), system(server.base_url, api="chat"))
        with contextlib.closing(llm), pytest.raises(RequestError, match="tokenizer in the model"):
            llm.add_request([1, 2], GREEDY)
    requests, _, _ = ask(Script(status=404), PROMPTS[:1])
    assert "system.api=chat" in requests[0].error
    with pytest.raises(ConfigError, match="A chat takes text"):
        system("http://localhost:1/v1", api="chat", prompts="token_ids")


def test_numbers_that_a_server_writes_as_text_are_numbers():
    answer = StreamedAnswer()
    answer.feed('{"choices": [{"text": "a", "finish_reason": "length"}]}', 1.0)
    answer.feed('{"choices": [], "usage": {"prompt_tokens": "3", "completion_tokens": "2"}}', 2.0)
    assert (answer.prompt_tokens, answer.end()) == (3, 1)


def test_more_parts_than_the_server_counts_tokens_speak_against_the_figures():
    _, _, stats = ask(Script(with_ids=False, extra_usage=-2), PROMPTS)
    assert "counted 4 tokens fewer than it sent parts" in stats["reasons"][0]
    assert ask(Script(), PROMPTS)[2]["reasons"] == []


def test_where_ids_are_sent_they_count_and_another_count_is_noted():
    requests, _, stats = ask(Script(extra_usage=-2), PROMPTS)
    assert [len(request.token_ids) for request in requests] == [5, 5]
    assert "counted 4 tokens fewer than it sent ids" in stats["notes"][0]
    assert stats["reasons"] == []


def test_answers_that_were_held_back_have_no_times():
    _, _, stats = ask(Script(tokens_per_part=9), PROMPTS, 9)
    assert "2 of 2 answers came in one piece" in stats["reasons"][0]
    assert ask(Script(tokens_per_part=7), PROMPTS, 7)[2]["reasons"] == []  # too few


@pytest.mark.parametrize("told", ["big", 0, -1, None, 2.5])
def test_a_length_that_is_none_is_left(told):
    assert http_engine._length(told) is None
    assert http_engine._length(4096) == 4096


def test_what_is_no_stream_is_named():
    requests, _, _ = ask(Script(raw='{"choices": [{"text": "abc"}]}'), PROMPTS[:1])
    assert "sent application/octet-stream without a token" in requests[0].error


def test_answers_longer_than_asked_speak_against_the_figures():
    _, _, stats = ask(Script(extra_usage=2), PROMPTS)
    assert "2 answers have more tokens than were asked for; r-" in stats["reasons"][0]
    assert "has 7 of 5 tokens" in stats["reasons"][0]


def test_what_comes_after_the_end_is_left():
    part = 'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'
    requests, _, stats = ask(Script(raw=f"{part}data: [DONE]\n\n{part}"), PROMPTS[:1], 1)
    assert len(requests[0].token_ids) == 1
    assert stats["reasons"] == []


def test_a_server_that_refuses_everything_is_given_up():
    with Server(Script(status=500)) as server:
        llm = HTTPEngine(config(), system(server.base_url))
        try:
            for _ in range(MOST_FAILED):
                llm.add_request([1, 2], GREEDY)
            with contextlib.suppress(EngineError):  # the last ones may have ended before it
                while llm.has_unfinished():
                    llm.step()
            assert "100 requests in a row failed" in str(llm.failure)
            assert "answered 500" in str(llm.failure)
        finally:
            llm.close()


def test_silence_beyond_the_limit_fails_the_request():
    requests, _, _ = ask(Script(hang=True), PROMPTS[:1], request_timeout_s=0.05)
    assert "system.request_timeout_s" in requests[0].error


def test_a_host_that_takes_no_connection_is_not_reached(monkeypatch):
    monkeypatch.setattr("harness.systems.http_engine.CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as held:
        for _ in range(2):  # as many as the system keeps for a server that accepts none
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        client = HTTPClient(f"http://127.0.0.1:{full.getsockname()[1]}/v1", None, timeout_s=9)
        try:
            with pytest.raises(ConnectionError, match="ConnectionTimeoutError"):
                client.submit(lambda: client.complete("/completions", {}, print)).result(timeout=9)
        finally:
            client.close()


def test_a_server_that_is_gone_ends_the_run():
    with Server(Script()) as server:
        llm = HTTPEngine(config(), system(server.base_url))

    def ask_in_vain():
        for _ in range(MOST_UNREACHED + 1):
            llm.add_request([1, 2], GREEDY)
            while llm.has_unfinished():
                llm.step()

    try:
        with pytest.raises(EngineError, match=f"{MOST_UNREACHED} requests in a row"):
            ask_in_vain()
    finally:
        llm.close()


def test_no_server_and_no_such_model_are_refused():
    with Server(Script()) as server, pytest.raises(EngineError, match="answered 404"):
        HTTPEngine(config(), system(server.base_url + "/nowhere"))
    with (
        Server(Script(models=())) as server,
        pytest.raises(ConfigError, match="in the server's list, found none"),
    ):
        HTTPEngine(config(), system(server.base_url))
    with pytest.raises(EngineError, match="gave no answer"):
        HTTPEngine(config(), system(server.base_url))
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        HTTPEngine(config(), system(server.base_url, api_key_env="NO_SUCH_KEY"))


def test_a_server_whose_model_is_named_is_not_asked_for_its_list():
    script = Script()
    ask(script, served_model="other")
    assert script.num_models_asked == 0
    assert {body["model"] for body in script.bodies} == {"other"}


def test_the_door_streams_fails_and_cancels():
    script = Script()

    async def talk(llm):
        door = HTTPDoor(llm, max_pending=2, on_step=lambda step, duration_s: None)
        got = [event async for part in door.tokens([1, 2], GREEDY, "a") for event in part]
        assert [event.token_id for event in got] == [next_token([1, 2], i) for i in range(5)]
        assert got[-1].finish_reason == "length"
        script.status = 500
        with pytest.raises(RequestError, match="answered 500"):
            async for _ in door.tokens([1, 2], GREEDY, "b"):
                pass
        script.status, script.hang = 200, True
        waiting = asyncio.ensure_future(anext(door.tokens([1], GREEDY, "c")))
        while len(script.bodies) < 3:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert door.failure is None
        assert door.release() is llm

    with Server(script) as server:
        llm = HTTPEngine(config(), system(server.base_url))
        try:
            asyncio.run(talk(llm))
        finally:
            llm.close()


def test_a_worker_measures_a_server(tmp_path):
    with Server(Script()) as server:
        where = system(server.base_url)
        task = job(system=where)
        result = Work(task, tmp_path, http_door(where), spawned_s=0.0).run()
    assert result["status"] == "ok", result["error"]
    metrics = result["metrics"]
    assert metrics["latency/ttft_ms/mean"] > 0
    assert metrics["throughput/output_tok_s"] > 0
    assert metrics["throughput/decode_tok_s"] is None
    assert metrics["memory/gpu_peak_gib"] is None
    assert result["effective"]["system"] == "http"
    assert result["plan"]["served_model"] == "tiny"


def test_a_request_that_fails_in_the_token_comparison_costs_no_figure(tmp_path):
    check = CorrectnessConfig(num_prompts=3, prompt_tokens=4, output_tokens=5)
    parts = scenario(correctness=check, throughput=None)
    reference = tmp_path / "reference.json"
    prompts = [[index + 1] * 4 for index in range(3)]
    tokens = [[next_token(prompt, index) for index in range(5)] for prompt in prompts]
    write_reference(reference, prompts, tokens)
    with Server(Script(fails=(1,))) as server:
        where = system(server.base_url)
        task = job(system=where, scenario=parts, reference=reference)
        result = Work(task, tmp_path, http_door(where), spawned_s=0.0).run()
    assert result["status"] == "ok", result["error"]
    assert result["metrics"]["latency/ttft_ms/mean"] > 0
    assert result["metrics"]["correctness/equal_share"] == 1
    (reason,) = result["reasons"]
    assert "correctness: 1 of 3 prompts were not answered (the server answered 400" in reason


def test_a_worker_serves_a_schedule_through_a_server(tmp_path):
    from harness.config.schema import ScenarioConfig

    load = serve(num_requests=8, warmup_requests=1, arrivals=Arrivals(process="at_once"))
    with Server(Script()) as server:
        where = system(server.base_url)
        task = job(system=where, scenario=ScenarioConfig(name="serve", serve=load))
        result = Work(task, tmp_path, http_door(where), spawned_s=0.0).run()
    assert result["status"] == "ok", result["error"]
    samples = result["samples"]["serve"]
    assert samples["num_completed"] == samples["num_planned"] == 8


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_the_server_likes(end):
    text = '{"choices": [{"token_ids": [7]}]}'
    last = '{"choices": [{"token_ids": [8], "finish_reason": "length"}]}'
    raw = f": a comment|data:{text}|id: 3||event: message|data: {last}||id: 4||data: [DONE]||"
    requests, _, _ = ask(Script(raw=raw.replace("|", end)), PROMPTS[:1])
    assert requests[0].error is None
    assert requests[0].token_ids == [7, 8]


def test_a_last_line_that_nothing_ended_counts():
    part = '{"choices": [{"text": "a", "token_ids": [7], "finish_reason": "length"}]}'
    requests, _, _ = ask(Script(raw=f"data: {part}"), PROMPTS[:1])
    assert requests[0].is_complete
    assert requests[0].token_ids == [7]
    assert requests[0].token_times_s[0] > requests[0].submit_s


def test_logprobs_count_tokens_where_ids_are_absent():
    answer = StreamedAnswer()
    answer.feed('{"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"]}}]}', 1.0)
    answer.feed('{"choices": [{"text": "", "finish_reason": "stop"}]}', 2.0)
    assert answer.end() == 0
    assert (answer.token_ids, answer.times_s) == ([-1, -1], [1.0, 1.0])
    assert answer.finish_reason == "stop"
    with pytest.raises(ServerError, match="no JSON"):
        answer.feed("{", 3.0)


def test_events_are_read_from_bytes_in_any_pieces():
    text = b"data: one\r\n\r\n: silence\nevent: error\ndata: two\ndata:three\n\n"
    text += b"id: 4\rdata: \xc3\xa9\r\r"
    expected = [("", "one"), ("error", "two\nthree"), ("", "\u00e9")]
    for size in range(1, len(text) + 1):
        events, found = http_engine.Events(), []
        for at in range(0, len(text), size):
            found += events.feed(text[at : at + size])
        assert found + events.feed(b"\n") == expected


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_event():
    assert http_engine.Events().feed(codecs.BOM_UTF8 + b"data: one\n\n") == [("", "one")]
