import pytest

from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.studies.search_request import (
    Parameter,
    Space,
    beside,
    default_space,
    overrides_of,
    parameter_of,
    space_of,
)
from tests.harness.cases import SPEC


class Scripted:
    """Proposes the highest number and the last choice."""

    def __init__(self):
        self.asked = []

    def suggest_categorical(self, name, choices):
        self.asked.append(name)
        return choices[-1]

    def suggest_int(self, name, low, high, *, step=1, log=False):
        self.asked.append((name, low, high, step, log))
        return high

    def suggest_float(self, name, low, high, *, step=None, log=False):
        self.asked.append((name, low, high, step, log))
        return high


def parameter(text):
    (override,) = Composer().parse([text])
    return parameter_of(override)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,2", ["1", "2"]),
        ("a=choice(x,'y z')", ["x", "y\\ z"]),
        ("a=range(1,4)", [1, 2, 3]),
        ("a=range(1,8,3)", [1, 4, 7]),
        ("a=range(0.5,2,0.5)", [0.5, 1.0, 1.5]),
        ("a=range(0.1,0.35,0.1)", [0.1, 0.2, 0.3]),
        ("a=interval(1,4)", None),
        ("a=int(interval(1,4))", [1, 2, 3, 4]),
    ],
)
def test_values_of_hydra_s_syntax(text, values):
    assert parameter(text).values() == values


def test_a_scale_may_be_logarithmic():
    trial = Scripted()
    assert parameter("a=tag(log, interval(1,64))").suggest(trial) == 64
    assert trial.asked == [("a", 1.0, 64.0, None, True)]


@pytest.mark.parametrize("text", ["a=range(4,1)", "a=range(1,4,-1)", "a=interval(4,1)", "a=5"])
def test_no_value_is_refused(text):
    with pytest.raises(ConfigError, match="a="):
        parameter(text)


def offloads():
    return space_of(
        [
            Parameter(key="offload.uva.cpu_offload_gb", low=1.0, high=2.0, step=0.5),
            Parameter(key="offload.prefetch.offload_num_in_group", low=1, high=2, step=1),
            Parameter(key="offload", choices=("none", "uva", "prefetch")),
            Parameter(key="engine.seed", low=3, high=4, step=1),
        ]
    )


def test_sizes_of_an_offload_belong_to_trials_with_it():
    found = offloads().combinations(100)
    assert len(found) == 2 * (1 + 3 + 2)
    assert {"offload": "none", "engine.seed": 3} in found
    assert {"offload": "uva", "offload.uva.cpu_offload_gb": 1.5, "engine.seed": 4} in found
    assert offloads().combinations(11) is None
    assert offloads().propose(Scripted()) == {
        "offload": "prefetch",
        "offload.prefetch.offload_num_in_group": 2,
        "engine.seed": 4,
    }
    assert offloads().first() == {"offload": "none", "engine.seed": 3}


def test_settings_of_another_offload_are_left_out():
    base = ["+model=glass", "offload.prefetch.offload_group_size=8", "offload.uva.cpu_offload_gb=1"]
    assert beside(base, ["offload=uva"]) == [base[0], base[2]]
    assert beside(base, ["engine.seed=1"]) == base


def test_without_an_offload_to_choose_its_sizes_count_as_they_are():
    space = space_of([Parameter(key="offload.uva.cpu_offload_gb", low=1, high=3, step=1)])
    found = space.combinations(3)
    assert overrides_of(found[1]) == ["offload.uva.cpu_offload_gb=2"]
    assert overrides_of({"a": 0.1 + 0.2, "b": "x"}) == ["a=0.3", "b=x"]
    assert space_of([Parameter(key="a", low=1.0, high=2.0)]).combinations(9) is None
    with pytest.raises(ConfigError, match="several values"):
        Space(parameters=())


def test_the_space_that_is_taken_where_none_is_given_composes():
    composer = Composer()
    for proposal in default_space(SPEC).combinations(100)[::7]:
        texts = [item for item in overrides_of(proposal) if "cpu_offload_gb" not in item]
        (point,) = composer.plan(["model=glass", *texts]).points
        assert point.config.offload_name == proposal["offload"]
