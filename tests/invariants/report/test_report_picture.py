"""Pictures by matplotlib: read back where they can be, and the same each time."""

import io
import re
import struct
import sys
from xml.etree import ElementTree

import pytest

from invariants.errors import UsageError
from invariants.report import schedule_picture
from invariants.report.schedule_chart import Chart
from invariants.report.schedule_picture import write_picture
from invariants.schedule.costs import Costs
from invariants.schedule.families import generate
from invariants.schedule.table import Schedule
from invariants.schedule.timeline import simulate

pytest.importorskip("matplotlib")


def chart(name, ranks, microbatches, costs=None):
    return Chart.of(name, f"{name}: a title", simulate(generate(name, ranks, microbatches), costs))


def drawn(charts, form="svg", window=None):
    file = io.BytesIO()
    write_picture(file, form, charts, window)
    return file.getvalue()


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def colours(svg):
    return set(re.findall(r"fill: (#[0-9a-f]{6})", svg.decode()))


def test_each_box_has_its_microbatch_and_each_kind_its_colour():
    svg = drawn([chart("zb-h1", 2, 3)])
    found = texts(svg)
    assert "zb-h1: a title" in found
    assert {"rank 0", "rank 1", "F forward", "I input gradient", "W weight gradient", "idle"} <= set(found)
    assert "B full backward" not in found
    assert found.count("2") >= 2 * 3  # two ranks, three computations each; and the axes' own
    assert set(schedule_picture.COLOURS.values()) - colours(svg) == {schedule_picture.COLOURS[3]}
    assert schedule_picture.IDLE_COLOUR in colours(svg)


def test_numbers_that_do_not_fit_are_left_out():
    svg = drawn([chart("gpipe", 2, 150)])
    assert "149" not in texts(svg)
    assert set(schedule_picture.COLOURS.values()) & colours(svg)


def test_boxes_too_narrow_become_an_image_with_the_same_legend():
    svg = drawn([chart("1f1b", 2, 2000)])
    assert b"<image" in svg
    assert "mean colours: single computations are too narrow here" in texts(svg)
    assert "F forward" in texts(svg)
    assert len(svg) < 1_000_000


def test_stages_after_a_ranks_first_are_darker():
    svg = drawn([chart("zb-v", 2, 4)])
    assert set(schedule_picture.LATER.values()) & colours(svg)
    assert "darker: not the rank's first stage" in texts(svg)


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_same_charts_make_the_same_bytes(form):
    charts = [chart("1f1b", 3, 4)]
    assert drawn(charts, form) == drawn(charts, form)


def test_a_png_is_one_and_wide_enough():
    png = drawn([chart("dualpipe-v", 2, 4)], "png")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 1800
    assert height >= 400


def test_several_schedules_share_one_scale_of_time_and_are_named_at_their_memory():
    found = texts(drawn([chart("gpipe", 4, 8), chart("1f1b", 4, 8)]))
    assert {"gpipe: a title", "1f1b: a title", "gpipe, rank 0: 8", "1f1b, rank 0: 4"} <= set(found)


def test_bytes_are_drawn_where_they_are_known():
    found = texts(drawn([chart("1f1b", 2, 3, Costs(activation_bytes=(3_000_000, 500)))]))
    assert {"bytes in flight, and the most of each rank", "rank 0: 6 MB", "rank 1: 500 B"} <= set(found)


def test_a_window_leaves_out_what_is_outside():
    everything, part = (texts(drawn([chart("1f1b", 2, 9)], window=window)) for window in (None, (0.0, 6.0)))
    assert everything.count("8") > part.count("8") == 0


@pytest.mark.parametrize("schedule", [Schedule.of_rows([(), ()]), generate("gpipe", 1, 1), generate("gpipe", 300, 2)])
@pytest.mark.parametrize("costs", [Costs(0, 0, 0), Costs()])
def test_nothing_little_and_many_ranks_can_be_drawn(schedule, costs):
    assert ElementTree.fromstring(drawn([Chart.of("some", "some", simulate(schedule, costs))])) is not None


def test_without_matplotlib_a_picture_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(schedule_picture, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("pip install pytest-invariants[pictures]")) as error:
        schedule_picture.require_matplotlib()
    assert "\n" not in str(error.value)


def test_matplotlib_is_imported_when_a_picture_is_drawn_and_not_before(pytester):
    pytester.makepyfile("")
    code = "import sys, invariants.report.schedule_picture; sys.exit('matplotlib' in sys.modules)"
    assert pytester.run(sys.executable, "-c", code).ret == 0
