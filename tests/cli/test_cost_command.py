"""`nas cost`: a space at its Deployment, one architecture as it stands, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nas.architecture import Architecture
from nas.cost import Deployment, cost, full_attention, parameters
from search_spaces import load_space
from search_spaces.designs import architectures
from tests.cli.conftest import Nas, write_space
from tests.cli.test_cli_refusals import refused

HYBRID = Architecture.model_validate(
    {
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 128,
        "layers": [
            {"mixer": "kda", "heads": 2, "head_dim": 32, "conv_size": 4},
            {"mixer": "kda", "heads": 2, "head_dim": 32, "conv_size": 4},
            {"mixer": "softmax", "heads": 4, "head_dim": 16, "kv_heads": 1, "window": 32},
            {"mixer": "softmax", "heads": 4, "head_dim": 16, "kv_heads": 2},
        ],
        "routing": {"kind": "cler_h"},
    }
)
P1_CACHE = {"3:1": (288, 2080), "6:1": (168, 1064), "12:1": (108, 556), "24:1": (78, 302), "pure": (48, 48)}
"""MiB at 4k and 32k for Gated DeltaNet, convolutions left out (papers.md)."""


def rows_of(nas: Nas, *arguments: str) -> list[dict[str, Any]]:
    ended = nas("cost", *arguments, "--json")
    assert (ended.code, ended.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(ended.out)
    return found


def test_every_design_of_a_space_at_every_context(nas: Nas, folder: Path) -> None:
    write_space(folder / "routed.yaml", kv_groups=[1, 2], routing=["none", "clvr"])
    rows = rows_of(nas, "routed.yaml", "--context", "4k,32k")
    space = load_space("routed.yaml")
    assert [row["context"] for row in rows] == [4096] * (len(rows) // 2) + [32768] * (len(rows) // 2)
    assert len(rows) == 2 * (1 + len(architectures(space)))
    names = [row["design"] for row in rows if row["context"] == 4096]
    assert len(set(names)) == len(names)
    assert names[0] == "Full attention"
    assert {"Gated DeltaNet 4:1 GQA2 +CLVR", "GLA pure"} <= set(names)
    for row in rows:
        parts = row["attention_bytes"] + row["recurrent_bytes"] + row["convolution_bytes"]
        full = space.deployment.model_copy(update={"context": row["context"]}).full_attention_bytes()
        assert row["kv_cache_bytes"] == parts
        assert row["kv_cache_ratio"] == parts / full
        assert row["layers"] == 24


def test_p1s_cache_table(nas: Nas) -> None:
    rows = rows_of(nas, "p1-grid", "--context", "4k,32k")
    cache = {(row["design"], row["context"]): row["attention_bytes"] + row["recurrent_bytes"] for row in rows}
    for ratio, sizes in P1_CACHE.items():
        found = [cache[f"Gated DeltaNet {ratio}", context] for context in (4096, 32768)]
        assert found == [size * 2**20 for size in sizes]
    assert cache["Full attention", 32768] == 6144 * 2**20
    pure = next(row for row in rows if row["design"] == "Gated DeltaNet pure")
    assert pure["parameters"] == pytest.approx(1.466e9, rel=2e-3)


def test_the_rows_of_an_architecture_are_its_own(nas: Nas, folder: Path) -> None:
    (folder / "design.json").write_text(HYBRID.canonical_json())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "nas_hybrid", "architecture": HYBRID.canonical(), "vocab_size": 288})
    )
    rows = rows_of(nas, "design.json", "--context", "16, 1M")
    assert rows == rows_of(nas, "config.json", "--context", "16,1048576")
    assert [row["context"] for row in rows] == [16, 2**20]
    price = cost(HYBRID, 16)
    full = cost(full_attention(HYBRID), 16).kv_cache_bytes
    assert full == 4 * 2 * 64 * 16 * 2
    assert rows[0] == price.model_dump() | {
        "design": "2 Kimi Delta Attention + SWA32 4:1 GQA2 +CLER-H",
        "kv_cache_bytes": price.kv_cache_bytes,
        "kv_cache_ratio": price.kv_cache_bytes / full,
        # two KDA layers keep 9728 bytes each, the window 64 a token up to 32, the full layer 128 a token:
        # 19456 + 192 c <= 1024 c
        "break_even_context": 24,
        "backbones": ["kda"],
        "layers": 4,
        "full_attention_layers": [3],
        "placement": "interleaved",
        "kv_heads": 2,
        "routing": "cler_h",
        "diagram": "--wF",
    }
    assert rows[0]["parameters"] == parameters(HYBRID)
    assert {row["context"] for row in rows_of(nas, "design.json")} == {Deployment().context}


def test_a_design_given_twice_is_priced_once(nas: Nas, folder: Path) -> None:
    write_space(folder / "same.yaml", backbones=["gla"], ratios=["4:1", [3]])
    names = [row["design"] for row in rows_of(nas, "same.yaml")]
    assert names == ["Full attention", "GLA 4:1"]


def test_a_name_taken_twice_has_the_digest_added() -> None:
    from nas.cli.cost import unique_names

    wider = HYBRID.model_copy(update={"intermediate_size": 256})
    plain = HYBRID.model_copy(update={"layers": HYBRID.layers[:2]})
    names = unique_names([HYBRID, wider, plain])
    assert list(names.values()) == [HYBRID, wider, plain]
    assert [name.partition(" [")[2] for name in names] == [f"{HYBRID.digest[:6]}]", f"{wider.digest[:6]}]", ""]


def test_the_table_names_every_column_and_unit(nas: Nas) -> None:
    out = nas("cost", "tiny.yaml", "--context", "4k,1m").out
    head, _, first = (" ".join(line.split()) for line in out.splitlines()[:3])
    assert head == "design context KV state conv total of full even at params FLOPs P1"
    assert first == "Full attention 4k 768 MiB 0 B 0 B 768 MiB 100% 1 1.36 B 3.4 B 403 M"
    pure = [line for line in out.splitlines() if line.startswith("Gated DeltaNet pure")]
    assert [line.split()[3] for line in pure] == ["4k", "1m"]
    assert {line.partition("%")[2].split()[0] for line in pure} == {"134"}
    assert "\x1b" not in out


@pytest.mark.parametrize("columns", ["100", "80"])
def test_a_narrow_table_is_grouped_by_context(nas: Nas, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = nas("cost", "tiny.yaml", "--context", "4k,32k,128k,1m").out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    headings = [line.strip() for line in lines if line.startswith("at ")]
    assert headings == ["at 4k", "at 32k", "at 128k", "at 1m"]
    assert len([line for line in lines if "768 MiB" in line and "100%" in line]) == 1
    assert len([line for line in lines if line.startswith("Gated DeltaNet pure ")]) == 4
    assert ("FLOPs" in lines[0]) == (columns == "100")


def test_the_readme_shows_what_the_command_prints(nas: Nas, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    command, *shown = text.partition("$ nas cost p1-grid")[2].partition("```")[0].splitlines()
    monkeypatch.setenv("COLUMNS", "100")
    printed = [line.rstrip() for line in nas("cost", "p1-grid", *command.split()).out.splitlines()]
    assert len(shown) > 8
    assert [line for line in shown if line != "..."] == [line for line in printed if line in shown]


@pytest.mark.parametrize("given", ["4x", "0", "", ",", "4k,", "1.5k", "-3", "k", "1048577m", "٣", "9" * 200])
def test_a_bad_context(nas: Nas, given: str) -> None:
    ended = nas("cost", "tiny.yaml", f"--context={given}")
    refused(ended, "--context=", "allowed are 1 to 1048576m tokens, such as 4096 or 4k or 1m, by commas")
    assert len(ended.error) < 250


def test_contexts_are_priced_once(nas: Nas) -> None:
    rows = rows_of(nas, "tiny.yaml", "--context", "4k,4096, 4K")
    assert {row["context"] for row in rows} == {4096}
    assert len({row["design"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("{", ["not valid JSON"]),
        ("[" * 100_000, ["not valid JSON"]),
        ('{"architecture": {"vocab_size": 1}}', ["hidden_size: Field required"]),
        ('{"architecture": null}', ["valid dictionary"]),
        ('{"layers": [{"mixer": "gdn", "heads": 1, "head_dim": 1}]}', ["mixer 'gdn' is unknown"]),
        ("[1]", ["expected a mapping of fields, got list"]),
        ('{"name": "x"}', ["Field required"]),
    ],
)
def test_a_bad_architecture_file(nas: Nas, folder: Path, content: str, parts: list[str]) -> None:
    (folder / "bad.json").write_text(content)
    refused(nas("cost", "bad.json"), "bad.json: ", *parts)


def test_a_file_that_is_not_there(nas: Nas) -> None:
    refused(nas("cost", "none.json"), "'none.json' cannot be read")
    refused(nas("cost", "p1-gird"), "did you mean 'p1-grid'?")
