import pytest

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.registry import ENGINES, GAINS, REGISTRIES, Registry


def test_duplicates_are_refused():
    registry = Registry("thing")
    registry.register("mine")(object())
    with pytest.raises(InputError, match="'mine' exists already"):
        registry.register("mine")(object())
    with pytest.raises(InputError, match="'uniform' exists already"):
        GAINS.register("uniform")(object())


def test_unknown_names_suggest_near_ones():
    with pytest.raises(UnknownName, match="did you mean uniform"):
        GAINS.get("unifrom")


def test_what_is_registered_in_a_script_is_found_and_listed():
    registry = Registry("gain")
    thing = registry.register("from_a_script")(object())
    assert registry.get("from_a_script") is thing
    assert {"from_a_script", "uniform"} <= set(registry)


@pytest.mark.parametrize("what", sorted(REGISTRIES))
def test_every_entry_loads(what):
    for name in REGISTRIES[what]:
        assert callable(REGISTRIES[what].get(name)), name


def test_a_broken_entry_says_which_it_is(monkeypatch):
    from importlib.metadata import EntryPoint

    registry = Registry("gain")
    broken = EntryPoint("broken", "no_such_package.module:Thing", "bitplan.gains")
    monkeypatch.setattr(registry, "_installed", {"broken": broken}, raising=False)
    registry.__dict__["_installed"] = {"broken": broken}
    with pytest.raises(InputError, match=r"no_such_package.module:Thing\) does not load"):
        registry.get("broken")


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("local", {"workers": 1.5}, "local: workers is 1.5, and must be a whole number"),
        ("local", {"workers": True}, "local: workers is True, and must be a whole number"),
        ("local", {"workers": "2"}, "local: workers is '2', and must be a whole number"),
        ("local", {"workers": None}, "local: workers is None, and must be a whole number"),
        ("cluster", {"cpus": "1"}, "cluster: cpus is '1', and must be a number"),
        ("cluster", {"address": 5}, "cluster: address is 5, and must be a text"),
        ("cluster", {"address": ["x"]}, r"cluster: address is \['x'\], and must be a text"),
    ],
)
def test_an_option_of_another_kind_is_refused_before_it_is_used(engine, options, said):
    with pytest.raises(InputError, match=said):
        ENGINES.make(engine, options)


def test_what_is_as_good_is_taken():
    assert ENGINES.make("cluster", {"cpus": 1, "address": None}).cpus == 1
    assert ENGINES.make("cluster", {"cpus": 0.5, "address": "auto"}).address == "auto"
