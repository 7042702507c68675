"""Ctrl-C is raised between steps, and nothing is lost."""

import signal
import threading

import pytest

from engine.text.sessions import interrupt_afterwards
from tests.tiny import greedy, greedy_params, make_prompt, open_llm

PROMPTS = [make_prompt(length, seed=3) for length in (1, 12, 30)]


@pytest.fixture(autouse=True)
def handler():
    """SIGINT as a shell leaves it to a foreground process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_waits_and_the_second_does_not():
    done = []

    @interrupt_afterwards()
    def run():
        with interrupt_afterwards():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        done.append(2)
        signal.raise_signal(signal.SIGINT)
        done.append(3)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_of_before_gets_it_once():
    came, done = [], []
    signal.signal(signal.SIGINT, lambda number, _: came.append((number, list(done))))
    with interrupt_afterwards():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert came == [(signal.SIGINT, [1])]
    with interrupt_afterwards():
        done.append(2)
    assert len(came) == 1


def test_other_threads_and_ignored_signals_are_left_alone():
    def run():
        with interrupt_afterwards():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run()
    assert handlers == [signal.default_int_handler, signal.SIG_IGN]


def test_a_step_is_whole_and_the_next_call_returns_its_tokens(tiny, monkeypatch):
    llm = open_llm(tiny.folder("llama"))
    scheduler = llm._engine.core.scheduler
    commit, calls = scheduler.commit, []

    def interrupted(*args):
        events = commit(*args)
        calls.append(1)
        if len(calls) in {2, 5}:
            signal.raise_signal(signal.SIGINT)
        return events

    monkeypatch.setattr(scheduler, "commit", interrupted)
    for index, prompt in enumerate(PROMPTS):
        llm.add_request(prompt, greedy_params(7), str(index))
    tokens, interrupts = {}, 0
    while llm.has_unfinished():
        try:
            for event in llm.step():
                tokens.setdefault(event.request_id, []).append(event.token_id)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    assert [tokens[str(index)] for index in range(3)] == tiny.greedy("llama", PROMPTS, 7)
    llm.close()


def test_generate_drops_its_own_prompts_and_keeps_the_tokens_of_others(tiny, monkeypatch):
    llm = open_llm(tiny.folder("llama"))
    core = llm._engine.core
    step, calls = core.step, []

    def interrupted():
        events = step()
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return events

    llm.add_request(PROMPTS[0], greedy_params(7), "mine")
    with monkeypatch.context() as patched:
        patched.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1:3], greedy_params(7))
    events = []
    while llm.has_unfinished():
        events += llm.step()
    assert {event.request_id for event in events} == {"mine"}
    assert [event.token_id for event in events] == tiny.greedy("llama", PROMPTS[:1], 7)[0]
    assert greedy(llm, PROMPTS, 7) == tiny.greedy("llama", PROMPTS, 7)
    llm.close()
