"""The page by Streamlit's own test driver: with no database, an empty study and a filled one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import demo_store
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import data
from dashboard.launch import APP, command, url
from nas.store import Store


def page(monkeypatch: pytest.MonkeyPatch, *arguments: str, **query: str) -> AppTest:
    monkeypatch.setattr(sys, "argv", [str(APP), *arguments])
    test = AppTest.from_file(str(APP), default_timeout=60)
    for name, value in query.items():
        test.query_params[name] = value
    return test.run()


def html(test: AppTest) -> str:
    return "\n".join(str(element.proto.body) for element in test.get("html"))


def query(test: AppTest, name: str) -> str:
    """A parameter of the address; Streamlit gives a list or a string, depending on its version."""
    value = test.query_params[name]
    return value if isinstance(value, str) else value[0]


def trial_shown(test: AppTest) -> Any:
    return test.number_input(key="jump").value


def test_no_database_yet_says_how_to_start(monkeypatch: pytest.MonkeyPatch, fresh_url: str) -> None:
    test = page(monkeypatch, "--storage", fresh_url)
    assert not test.exception
    assert "nas launch" in test.info[0].value
    assert not Path(fresh_url.removeprefix("sqlite:///")).exists()  # a look creates nothing


def test_database_without_a_study(monkeypatch: pytest.MonkeyPatch, fresh_url: str) -> None:
    Store.open(fresh_url).close()
    test = page(monkeypatch, "--storage", fresh_url)
    assert not test.exception
    assert "no study yet" in test.info[0].value


def test_study_without_a_trial(monkeypatch: pytest.MonkeyPatch, fresh_url: str) -> None:
    demo_store.empty(fresh_url)
    test = page(monkeypatch, "--storage", fresh_url)
    assert not test.exception
    assert "no trial yet" in test.info[0].value


def test_study_with_no_finished_trial(monkeypatch: pytest.MonkeyPatch, fresh_url: str) -> None:
    demo_store.fill(fresh_url, trials=2)  # both still run
    test = page(monkeypatch, "--storage", fresh_url)
    assert not test.exception
    assert trial_shown(test) == 0
    assert "no complete trial yet" in html(test)


def test_filled_study_shows_everything(monkeypatch: pytest.MonkeyPatch, demo_url: str) -> None:
    monkeypatch.setenv("NAS_STORAGE", demo_url)
    test = page(monkeypatch)
    assert not test.exception
    assert not test.warning
    assert test.selectbox(key="study").value == "demo"
    assert len(test.get("plotly_chart")) == 4
    frame = test.dataframe[0].value
    assert list(frame["trial"]) == list(range(28))
    assert "failed (diverged)" in set(frame["state"])
    assert (frame["front"] == "★").sum() >= 3
    with Store.open(demo_url, read_only=True) as store:
        best = max((row for row in store.trials(1) if row.state == "complete"), key=lambda row: row.recall or 0)
    assert trial_shown(test) == best.number
    assert f"{best.recall:.3f}" in html(test)


def test_address_selects_the_trial(monkeypatch: pytest.MonkeyPatch, demo_url: str) -> None:
    test = page(monkeypatch, "--storage", demo_url, study="demo", trial="3")
    assert trial_shown(test) == 3
    assert "GLA pure" in html(test)
    test.number_input(key="jump").set_value(4).run()
    assert query(test, "trial") == "4"
    assert trial_shown(test) == 4


@pytest.mark.parametrize(("name", "value"), [("trial", "99"), ("trial", "-1"), ("trial", "x"), ("study", "other")])
def test_unknown_selection_is_said(monkeypatch: pytest.MonkeyPatch, demo_url: str, name: str, value: str) -> None:
    test = page(monkeypatch, "--storage", demo_url, **{name: value})
    assert not test.exception
    assert f"{name}={value!r} does not exist" in test.warning[0].value


def test_filters_narrow_the_table(monkeypatch: pytest.MonkeyPatch, demo_url: str) -> None:
    test = page(monkeypatch, "--storage", demo_url)
    test.button_group(key="states").set_value(["complete"]).run()
    assert set(test.dataframe[0].value["state"]) == {"complete"}
    test.button_group(key="backbones").set_value(["Full attention"]).run()
    assert list(test.dataframe[0].value["design"]) == ["Full attention"]


def test_page_follows_the_study(monkeypatch: pytest.MonkeyPatch, fresh_url: str) -> None:
    test = page(monkeypatch, "--storage", fresh_url)
    demo_store.fill(fresh_url, trials=6)
    test.run()
    assert len(test.dataframe[0].value) == 6
    demo_store.fill(fresh_url, trials=7, study="second")
    test.run()
    assert test.selectbox(key="study").options == ["second", "demo"]
    test.selectbox(key="study").set_value("demo").run()
    assert len(test.dataframe[0].value) == 6
    assert query(test, "study") == "demo"


def test_a_study_is_read_once_per_revision(monkeypatch: pytest.MonkeyPatch, demo_url: str) -> None:
    reads: list[int] = []
    trials = Store.trials

    def counted(store: Store, study_id: int, *rest: Any) -> Any:
        reads.append(study_id)
        return trials(store, study_id, *rest)

    monkeypatch.setattr(Store, "trials", counted)
    data._snapshot.clear()
    test = page(monkeypatch, "--storage", demo_url)
    test.run()
    test.run()
    assert reads == [1]


def test_reader_never_stops_a_writer(fresh_url: str) -> None:
    demo_store.fill(fresh_url, trials=6)
    stop = threading.Event()

    def read() -> int:
        reads = 0
        while not stop.is_set():
            (info,) = data.studies(fresh_url)
            reads += len(data.snapshot(fresh_url, info).records)
        return reads

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        with Store.open(fresh_url) as store:
            for number in range(50):
                store.set_meta(1, "count", number)
        stop.set()
        assert reader.result() > 0


def test_command_starts_streamlit_quietly(demo_url: str) -> None:
    found = command(demo_url, 8777, "demo")
    assert found[:5] == [sys.executable, "-m", "streamlit", "run", str(APP)]
    flags = dict(zip(found[5 : found.index("--") : 2], found[6 : found.index("--") : 2], strict=True))
    assert flags["--server.headless"] == "true"
    assert flags["--browser.gatherUsageStats"] == "false"
    assert flags["--server.fileWatcherType"] == "none"
    assert flags["--server.address"] == "127.0.0.1"
    assert flags["--server.port"] == "8777"
    assert data.options(found[found.index("--") + 1 :], {}) == data.Options(demo_url, "demo")
    assert "--storage" not in command(None)
    assert url(8777) == "http://127.0.0.1:8777/"


def test_options_take_the_environment_and_refuse_the_rest() -> None:
    assert data.options([], {}).storage == "sqlite:///nas.db"
    assert data.options([], {"NAS_STORAGE": "sqlite:///x.db"}).storage == "sqlite:///x.db"
    with pytest.raises(ValueError, match=r"'--port' is unknown; allowed: --storage URL, --study NAME"):
        data.options(["--port", "1"], {})
