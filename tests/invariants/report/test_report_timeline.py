"""The terminal's picture: read back, character by character."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.report.schedule_chart import Chart
from invariants.report.schedule_terminal import BANDS, LINES, NARROW, timeline_text
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.table import Schedule
from invariants.schedule.timeline import simulate


def chart(name, ranks, microbatches, costs=None):
    return Chart.of(name, name, simulate(generate(name, ranks, microbatches), costs))


def lines(chart, width, window=None):
    """Each rank's characters, band after band."""
    found = {}
    for line in timeline_text(chart, width, window).plain.splitlines():
        if match := re.fullmatch(r"rank (\d+) +(.*)", line):
            found.setdefault(int(match[1]), []).append(match[2])
    return found


@given(st.sampled_from([name for name in FAMILIES if name != "dualpipe-v"]), st.integers(1, 4), st.integers(1, 8))
def test_each_computation_is_drawn_with_its_letter_its_number_and_its_length(name, ranks, microbatches):
    drawn = chart(name, ranks, microbatches)
    scale = max(4, -(-NARROW // int(drawn.makespan)))
    columns = scale * int(drawn.makespan)
    for rank, (line,) in lines(drawn, columns + len("rank 0 ")).items():
        assert len(line) == columns
        part = drawn.of_rank(rank)
        cells = re.findall(r"([A-Za-z])(\d+)(-*)|(\.+)", line)
        assert [(letter.upper(), int(number)) for letter, number, _, idle in cells if not idle] == [
            ({0: "F", 1: "I", 2: "W", 3: "B"}[op], microbatch)
            for op, microbatch in zip(drawn.op[part].tolist(), drawn.microbatch[part].tolist(), strict=True)
        ]
        at = 0
        starts = []
        for letter, number, dashes, idle in cells:
            if not idle:
                starts.append(at / scale)
            at += len(letter + number + dashes + idle)
        assert starts == drawn.start[part].tolist()


def test_the_textbook_picture_of_1f1b():
    assert (
        timeline_text(chart("1f1b", 2, 3), 55).plain
        == """\
1f1b
time 0 to 12, 0.25 a column
rank 0 F0--F1--........B0------F2--B1------....B2------
rank 1 ....F0--B0------F1--B1------F2--B2------........
F forward, B full backward, . idle; numbers are microbatches"""
    )


@given(st.sampled_from(list(FAMILIES)), st.integers(1, 6), st.integers(12, 40), st.integers(0, 200))
def test_no_line_of_a_rank_is_wider_than_the_terminal(name, ranks, microbatches, width):
    for bands in lines(chart(name, ranks, microbatches), width).values():
        assert len(bands) <= BANDS
        assert all(len(line) <= max(NARROW, width - len("rank 0 ")) for line in bands)


@given(st.integers(2, 4), st.integers(30, 40), st.integers(2, BANDS))
def test_bands_go_on_where_the_last_one_ended(ranks, microbatches, bands):
    drawn = chart("zb-h1", ranks, microbatches)
    one = lines(drawn, int(drawn.makespan) + len("rank 0 "))
    for rank, several in lines(drawn, -(-int(drawn.makespan) // bands) + len("rank 0 ")).items():
        assert len(several) == bands
        assert "".join(several) == "".join(one[rank])


def test_what_is_too_narrow_is_drawn_by_what_fills_most_of_a_column():
    text = timeline_text(chart("1f1b", 2, 500), 60).plain
    assert "a column shows what fills most of it" in text
    assert "numbers" not in text
    (first,) = lines(chart("1f1b", 2, 500), 60)[0]
    assert set(first) == {"B"}


def test_overlapped_computations_share_a_cell():
    drawn = chart("dualpipe-v", 2, 4)
    wide = lines(drawn, 10 * int(drawn.makespan) + 7)
    assert re.search(r"F\d\+b\d-+|f\d\+B\d-+", "".join(wide[0]))
    narrow = "".join(lines(drawn, int(drawn.makespan) + 7)[0])
    assert re.search(r"X-+", narrow)
    assert "X two at once" in timeline_text(drawn, 80).plain


def test_of_many_ranks_some_are_drawn_and_the_text_says_so():
    text = timeline_text(chart("gpipe", 100, 2), 120)
    assert len(lines(chart("gpipe", 100, 2), 120)) <= LINES + 1
    assert text.plain.endswith(f"{len(lines(chart('gpipe', 100, 2), 120))} of 100 ranks")


def test_a_window_draws_its_part_of_time():
    drawn = chart("1f1b", 2, 3)
    assert lines(drawn, 40, (0, 4))[0] == ["F0" + "-" * 6 + "F1" + "-" * 6 + "." * 16]


def test_letters_and_idle_have_colours_of_their_own():
    styles = {str(span.style) for span in timeline_text(chart("zb-v", 2, 4), 120).spans}
    assert len(styles) == 4


@pytest.mark.parametrize("schedule", [Schedule.of_rows([(), ()]), generate("gpipe", 1, 1)])
def test_nothing_and_nearly_nothing_can_be_drawn(schedule):
    for costs in (Costs(0, 0, 0), Costs()):
        drawn = Chart.of("small", "small", simulate(schedule, costs))
        assert len(lines(drawn, 80)) == schedule.ranks
