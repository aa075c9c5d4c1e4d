"""The files for Prometheus and Grafana: every query asks for what a server exports, and Prometheus can read it."""

import importlib.resources
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from refimpl import Engine, EngineArgs
from refimpl.notebooks.gallery.board import COLUMN, LEFT, RIGHT, TOP, Series, draw
from refimpl.server.metric_names import METRICS
from refimpl.server.metrics import ServerMetrics

FOLDER = importlib.resources.files("refimpl.server").joinpath("monitoring")
DASHBOARD = json.loads(FOLDER.joinpath("grafana.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
QUERIES = [target["expr"] for target in TARGETS]
PROMTOOL = shutil.which("promtool")
VARIABLES = {"$__rate_interval": "1m", "$model": ".*", "$engine": ".*"}


@pytest.fixture(scope="module")
def exported():
    """The labels of every sample of a server that drafts and swaps, by the sample's name."""
    options = {"num_gpu_blocks_override": 16, "swap_space": 0.01, "max_model_len": 64}
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    engine = Engine(EngineArgs(model="tiny", device="cpu", speculative_config=drafts, **options))
    metrics = ServerMetrics("tiny")
    metrics.watch(engine)
    families = list(text_string_to_metric_families(metrics.render().decode()))
    engine.close()
    return {sample.name: sample.labels.keys() for family in families for sample in family.samples}


def test_a_query_asks_for_samples_and_labels_that_are_exported(exported):
    for target in TARGETS:
        query = target["expr"]
        asked = re.findall(r"(refimpl:\w+)\{(.*?)\}", query)
        assert len(asked) == query.count("refimpl:") > 0, query
        for name, matchers in asked:
            assert set(re.findall(r"(\w+)=~", matchers)) <= exported[name], query
        kept = re.findall(r"by \((\w+)\) \(rate\((refimpl:\w+)\{", query)
        assert len(kept) == query.count(" by ")
        assert all(label in exported[name] for label, name in kept), query
        told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert told <= ({label for label, _ in kept} if "sum" in query else exported[asked[0][0]]), query


def test_no_metric_is_left_out(exported):
    ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
    named = {name for query in QUERIES for name in re.findall(r"refimpl:(\w+)", query)}
    assert {metric.name for metric in METRICS if any(metric.name + end in named for end in ends[metric.kind])} == {
        metric.name for metric in METRICS
    }


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool (of Prometheus) on PATH, to parse queries with")
def test_prometheus_can_read_its_configuration_and_every_query(tmp_path):
    rules = []
    for number, query in enumerate(QUERIES):
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        assert "$" not in query
        rules.append({"record": f"query:{number}", "expr": query})
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    (tmp_path / "prometheus.yml").write_text(FOLDER.joinpath("prometheus.yml").read_text())
    for what, file in (("rules", "rules.json"), ("config", "prometheus.yml")):
        done = subprocess.run([PROMTOOL, "check", what, tmp_path / file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_drawing_has_every_panel_and_a_line_for_each_series_that_is_broken_where_there_is_no_value():
    def ask(query):
        nothing, points = float("nan"), [(0.0, 1.0), (5.0, 2.0)]
        return [
            Series({"engine": "0"}, points),
            Series({"engine": "<1>"}, [*points, (6.0, nothing), (7.0, 1.0), (8.0, 4.0)]),
        ]

    drawing = ElementTree.fromstring(draw(DASHBOARD, ask, 10.0))
    texts = {text.text or "" for text in drawing.findall(".//{*}text")}
    assert all(any(text.startswith(panel["title"]) for text in texts) for panel in DASHBOARD["panels"])
    assert {"engine 0", "engine <1>", "10 s"} <= texts
    paths = [path.get("d") for path in drawing.findall(".//{*}path")]
    assert len(paths) == 2 * len(QUERIES)
    assert [(path.count("M"), path.count("L")) for path in paths] == len(QUERIES) * [(1, 1), (2, 2)]
    first = DASHBOARD["panels"][1]["gridPos"]
    assert paths[1].endswith(f",{TOP:.1f}"), "the largest value is at the top of its panel"
    assert f"L{first['w'] * COLUMN - RIGHT - 0.2 * (first['w'] * COLUMN - LEFT - RIGHT):.1f}," in paths[1]
