"""Prefixes that a server finds: their salt, their count, and what is said where it tells none."""

import contextlib
import time

from harness.systems.http_engine import HTTPEngine
from harness.work.offline import measure_throughput
from tests.harness.systems.server import Script, Server
from tests.harness.systems.test_http import ask, config, system


def test_prefixes_that_the_server_finds_are_counted_and_their_salt_is_sent():
    long = [list(range(20)), list(range(20, 40))]
    found = {}
    for knows_salts in (False, True):
        script = Script(knows_salts=knows_salts)
        with Server(script) as server:
            llm = HTTPEngine(config(), system(server.base_url))
            with contextlib.closing(llm):
                found[knows_salts] = [
                    measure_throughput(llm, long, 5, clock=time.perf_counter, salt=salt)[0]
                    for salt in ("first", "second")
                ]
        assert [body["cache_salt"] for body in script.bodies] == ["first"] * 2 + ["second"] * 2
    shares = {
        knows: [outcome.metrics["throughput/hit_share"] for outcome in outcomes]
        for knows, outcomes in found.items()
    }
    assert shares == {False: [0, 1], True: [0, 0]}
    assert "40 of 40 prompt tokens were found" in found[False][1].reasons[0]
    assert [outcome.reasons for outcome in found[True]] == [[], []]


def test_a_server_that_does_not_tell_what_it_found_is_noted():
    _, _, stats = ask(Script(tells_hits=False))
    assert stats["prefix_hit_tokens"] is None
    assert "whether prompts were computed is not known" in stats["notes"][-1]


def test_tokens_of_a_template_are_not_of_the_prompt():
    answers = ask(Script(prompt_offset=4, knows_salts=True), [[5] * 8, [5] * 8])
    assert answers[2]["prefix_hit_tokens"] == 8 - 4
