import pytest

from engine.errors import ConfigError
from harness.studies.search_request import parse_request

GOAL = ["--maximize", "throughput/output_tok_s"]


def test_settings_with_several_values_are_the_space():
    words = ["model=glass", "offload=uva", "offload.uva.cpu_offload_gb=range(1,4)", *GOAL]
    request = parse_request([*words, "--trials", "5", "--seed", "3"])
    assert request.base == ("model=glass", "offload=uva")
    assert request.space.describe() == {"offload.uva.cpu_offload_gb": "1..3 step 1"}
    assert (request.trials, request.seed, request.minutes) == (5, 3, None)
    assert parse_request(words).name == parse_request([*words, "--trials", "9"]).name
    assert parse_request(words).name != request.name  # another seed is another search
    assert parse_request(["--help"]) is None


def test_without_several_values_the_offload_is_searched():
    request = parse_request(["model=glass", *GOAL])
    keys = [parameter.key for parameter in request.space.parameters]
    assert keys[:2] == ["offload", "offload.uva.cpu_offload_gb"]
    with pytest.raises(ConfigError, match="offload=uva alone"):
        parse_request(["model=glass", "offload=uva", *GOAL])


def test_a_file_says_the_same_and_the_command_line_wins(tmp_path):
    file = tmp_path / "search.yaml"
    file.write_text(
        "base: [model=glass, offload=uva]\n"
        "space:\n  offload.uva.cpu_offload_gb: range(1,4)\n  engine.max_num_seqs: [8, 16]\n"
        "minimize: latency/itl_ms/p50\nsubject_to: ['memory/gpu_peak_gib<=2']\n"
        "trials: 7\nminutes: 2\nseed: 1\n"
    )
    request = parse_request(["--file", str(file)])
    assert request.base == ("model=glass", "offload=uva")
    assert request.space.describe() == {
        "offload.uva.cpu_offload_gb": "1..3 step 1",
        "engine.max_num_seqs": "8,16",
    }
    assert (request.goal.metric, request.goal.is_maximum) == ("latency/itl_ms/p50", False)
    assert [str(item) for item in request.goal.constraints] == ["memory/gpu_peak_gib<=2"]
    assert (request.trials, request.minutes, request.seed) == (7, 2.0, 1)
    words = ["--file", str(file), *GOAL, "--trials", "3", "model=smollm2_135m"]
    other = parse_request(words)
    assert other.base == ("model=smollm2_135m", "offload=uva")
    assert (other.goal.is_maximum, other.trials) == (True, 3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model=glass", "engine.sed=1,2", *GOAL], "Did you mean"),
        (["model=glass", "offload=none,uvaa", *GOAL], "Did you mean uva"),
        (["model=glas", "engine.seed=1,2", *GOAL], "Did you mean glass"),
        (["model=glass", "engine.seed=1,2"], "one objective"),
        (["model=glass", "engine.seed=1,2", *GOAL, "--trials", "0"], "--trials: expected"),
        (["model=glass", "engine.seed=1,2", *GOAL, "--minutes", "-1"], "--minutes: expected"),
        (["model=glass", "engine.seed=1,2", *GOAL, "--minutes", "nan"], "--minutes: expected"),
        (["model=glass", "engine.seed=1,2", *GOAL, "--seed", "-1"], "--seed: expected"),
        (["model=glass", "engine.seed=1,2", *GOAL, "--name", "a/b"], "--name: expected"),
        (["--file", "absent.yaml", *GOAL], "--file: expected a YAML file"),
        (["--nothing"], "--help"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(words, text):
    with pytest.raises(ConfigError, match=text):
        parse_request(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"trails: 3", "Did you mean trials"),
        (b"base: [model=glass, 3]", "base: expected a list of texts, got 3 in it"),
        (b"seed: soon", "--seed: expected an integer of 0 or more, got 'soon'"),
        (b"name: \xff", "expected a YAML file"),
    ],
)
def test_a_mistake_in_a_file_is_said(text, words, tmp_path):
    file = tmp_path / "search.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        parse_request(["--file", str(file), "model=glass", *GOAL])


def test_one_text_of_a_file_may_stand_alone(tmp_path):
    file = tmp_path / "search.yaml"
    file.write_text("base: model=glass\nsubject_to: memory/gpu_peak_gib<=2\n")
    request = parse_request(["--file", str(file), *GOAL])
    assert request.base == ("model=glass",)
    assert [str(item) for item in request.goal.constraints] == ["memory/gpu_peak_gib<=2"]
