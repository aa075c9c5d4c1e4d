"""AttentionView: a pure picture of a traced attention, its numbers beside the definition's, and its forms."""

import json
import math
from xml.etree import ElementTree

import pytest
import torch

from refimpl.attention.tiles import decode_walks, prefill_walks, trace_attention
from refimpl.errors import RefimplError
from refimpl.kernels import attention_cases
from refimpl.visualizers import AttentionView
from refimpl.visualizers.attention_tiles import AttentionTiles, num_positions
from refimpl.visualizers.attention_tiles_svg import LATER, MASKED, SKIPPED
from refimpl.visualizers.figure import plain
from refimpl.visualizers.palette import DARK, LIGHT

FIGURE = AttentionTiles()


def traced(n, G, L, walks):
    shape = {"S": 1, "n": n, "L": L, "Hq": G, "Hkv": 1, "D": 4, "B": 4}
    inputs = attention_cases.make_case(shape, torch.float64, torch.device("cpu"), 3).inputs
    pools = inputs["k_cache"][:, :, 0], inputs["v_cache"][:, :, 0]
    table = inputs["block_table"][0].tolist()
    trace = trace_attention(inputs["query"], *pools, table, L, inputs["softmax_scale"], walks)
    keys = inputs["k_cache"][table, :, 0].flatten(0, 1)[:L]
    return trace, inputs["query"].flatten(0, 1) @ keys.T * inputs["softmax_scale"]


@pytest.fixture(scope="module")
def prefill():
    return traced(14, 1, 18, prefill_walks(14, 18, 4, 4))


@pytest.fixture(scope="module")
def decode():
    return traced(1, 4, 44, decode_walks(1, 4, 44, 3, 16, 8))


def test_the_whole_grid_tells_what_became_of_every_score(prefill):
    trace, scores = prefill
    grid = FIGURE.picture(trace, 10**6)["grid"]
    assert {len(row) for row in grid} == {20}, "whole tiles, which reach beyond 18 keys"
    for row, cells in enumerate(grid):
        end_of_walk = min(-(-(4 + row // 4 * 4 + 4) // 4) * 4, 20)
        for key, cell in enumerate(cells):
            if key >= end_of_walk:
                assert cell == SKIPPED
            elif key > 4 + row:
                assert cell == MASKED
            else:
                assert cell == round(100 * math.exp(scores[row, key] - scores[row, : 5 + row].max()))


def test_a_position_shows_what_is_known_by_then(prefill):
    trace, scores = prefill
    assert num_positions(trace) == len(trace.tiles)
    for position, tile in enumerate(trace.tiles):
        picture = FIGURE.picture(trace, position)
        later = sum(row.count(LATER) for row in picture["grid"])
        taken = trace.tiles[: position + 1]
        assert picture["counts"]["computed"] == sum(len(t.scores) * len(t.scores[0]) for t in taken)
        assert later + picture["counts"]["computed"] + picture["counts"]["skipped"] == 14 * 20
        walk = trace.walks[tile.walk]
        assert picture["now"] == [walk.first_row, walk.end_row, tile.first_key, tile.first_key + 4]
        first_row = [cell for cell in picture["grid"][walk.first_row] if cell >= 0]
        largest = scores[walk.first_row, : len(first_row)].max()
        assert first_row == [round(100 * math.exp(score - largest)) for score in scores[walk.first_row, : len(first_row)]]


def test_the_state_is_told_in_numbers(prefill):
    trace, _ = prefill
    state = FIGURE.picture(trace, 4)["state"]
    tile = trace.tiles[4]
    assert state["head"] == ["", "m", "× old", "l", "a0", "a1", "a2", "a3"]
    assert [row[0] for row in state["rows"]] == ["query 4", "query 5", "query 6", "query 7"]
    assert [row[3] for row in state["rows"]] == [f"{value:.2f}" for value in tile.row_sum]
    assert state["strong"] == [factor < 1 for factor in tile.rescale]
    assert not any(FIGURE.picture(trace, 0)["state"]["strong"]), "a first tile rescales nothing"


def test_words_say_which_keys_and_whose_past_was_scaled(prefill):
    trace, _ = prefill
    for position, tile in enumerate(trace.tiles):
        (who, what), (_, then) = FIGURE.picture(trace, position)["why"]
        end = min(tile.first_key + 3, trace.walks[tile.walk].end_key - 1)
        keys = f"keys {tile.first_key} to {end}" if end > tile.first_key else f"key {end}"
        assert what.startswith(f"takes in {keys}, from block {tile.block_ids[0]}: ")
        assert who == f"Walk {'ABCD'[tile.walk]}"
        assert ("masked" in what) == tile.masked
        least = min(tile.rescale)
        if tile.first_key and least < 1:
            assert f"are multiplied by {least:.2f}" in then
        else:
            assert then in ("Its first tile: m, l and a were empty.", "No row has a new largest score: nothing is rescaled.")


def test_a_merge_is_the_last_moment(decode):
    trace, scores = decode
    assert num_positions(trace) == len(trace.tiles) + 1
    picture = FIGURE.picture(trace, len(trace.tiles))
    assert (picture["moment"], picture["now"]) == ("Merge", None)
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    assert [row[:44] for row in picture["grid"]] == [[round(100 * w) for w in row] for row in weights.tolist()]
    assert all(row[44:] == [MASKED] * 4 for row in picture["grid"])
    share = scores.softmax(1)[2, :16].sum().item()
    assert picture["state"]["rows"][2][1] == f"{100 * share:.0f}%"
    assert picture["state"]["rows"][0][-1].replace("−", "-") == f"{trace.output[0][3]:.2f}"
    assert "3 walks went side by side" in plain(picture["caption"])


def test_the_picture_is_pure_and_json(prefill, decode):
    for trace, _ in (prefill, decode):
        for position in range(num_positions(trace)):
            picture = FIGURE.picture(trace, position)
            text = json.dumps(picture)
            FIGURE.svg(picture, LIGHT)
            FIGURE.text(picture)
            assert json.dumps(picture) == json.dumps(FIGURE.picture(trace, position)) == text
        assert FIGURE.picture(trace, -5) == FIGURE.picture(trace, 0)
        assert FIGURE.picture(trace, 10**6) == FIGURE.picture(trace, num_positions(trace) - 1)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_it_is_drawn_without_a_browser(prefill, decode, palette):
    for trace, _ in (prefill, decode):
        for position in (0, num_positions(trace) - 1):
            picture = FIGURE.picture(trace, position)
            root = ElementTree.fromstring(FIGURE.svg(picture, palette))
            assert root.get("aria-label") == plain(picture["caption"])
            squares = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
            assert len(squares) == sum(map(len, picture["grid"]))
            assert sum("computed and masked" in told for told in squares) == picture["counts"]["masked"]
            assert sum("no key is there" in told for told in squares) == sum(len(r) - trace.context for r in picture["grid"])


def test_letters_say_the_same_as_squares(prefill):
    trace, _ = prefill
    lines = FIGURE.text(FIGURE.picture(trace, len(trace.tiles) - 1)).split("\n")
    assert lines[0] == " query 0 AAAAAxxx············"
    assert lines[13] == "query 13 DDDDDDDDDDDDDDDDDDxx"
    assert FIGURE.text(FIGURE.picture(trace, 0)).split("\n")[13] == "query 13 ????????????????????"


def test_the_widget_sends_every_picture_once_in_the_colours_of_the_page(decode):
    view = AttentionView(decode[0])
    assert (view.position, len(view.pictures)) == (6, 7)
    for position, sent in enumerate(view.pictures):
        picture = FIGURE.picture(decode[0], position)
        assert (sent["why"], sent["moment"]) == (picture["why"], picture["moment"])
        assert "#" not in sent["svg"].replace("url(#refimpl-masked)", ""), "no colour of one theme"
        assert "var(--signal)" in sent["svg"] or sent["moment"] == "Merge"
    assert "4 heads of a group, over 44 keys in blocks of 4" in view.heading
    assert "traceModel(model)" in view._esm
    assert ".attention_tiles" in view._css
    html = view._repr_html_()
    assert "<b>Merge 6 of 6.</b>" in html
    assert "<script" not in html
    assert "var(--" not in html
    assert "head 3 " in view._repr_text()
    assert AttentionView(decode[0], position=-3).position == 0
    view.position = 99
    assert view.position == len(view.pictures) - 1
    assert set(view._repr_mimebundle_()[0]) >= {"text/html", "text/plain"}


def test_what_it_cannot_show_is_refused():
    with pytest.raises(RefimplError, match=r"shows what refimpl\.attention\.tiles\.trace_attention returns; this is a dict"):
        AttentionView({})
    long = traced(1, 4, 1_100, decode_walks(1, 4, 1_100, 1, 16, 64))[0]
    with pytest.raises(
        RefimplError, match="18 pictures of 4 rows over 1,152 keys are 82,944 squares, and there is room for 65,536"
    ):
        AttentionView(long)
