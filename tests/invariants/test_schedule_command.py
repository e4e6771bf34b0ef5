"""The command `invariants schedule`: what it decides, prints and writes, and what it says of mistakes."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invariants import cli
from invariants.commands import schedule_sources
from invariants.commands.schedule_sources import Sizes, costs, scaled, sources
from invariants.errors import UsageError
from invariants.report import document, schedule_picture
from invariants.schedule.actions import parse_rows
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.lowering import lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import Schedule
from invariants.schedule.text import format_csv, parse_csv

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Call the command in an empty folder; its exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["invariants", "schedule", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    monkeypatch.setattr("signal.signal", lambda *_: None)
    return command


@pytest.fixture
def file(tmp_path):
    """Write a CSV file of these rows; its name."""

    def file(*rows, name="mine.csv"):
        (tmp_path / name).write_text("\r\n".join(rows) + "\r\n")
        return name

    return file


def cells(out, check):
    """What the row of a table says: the cells after the first."""
    for line in out.splitlines():
        parts = [part.strip() for part in line.split("│")]
        if len(parts) > 2 and parts[1] == check:
            return parts[2:-1]
    raise AssertionError(f"no row {check!r} in\n{out}")


def test_a_family_holds_in_everything(command):
    status, out, err = command("1f1b", "--pp", 4, "-m", 8)
    assert (status, err) == (0, "")
    assert out.startswith("1f1b: 4 ranks, 8 microbatches, makespan 33, 27.27 % idle\n")
    for check in ("complete", "bubble", "activations", "portable"):
        assert cells(out, check)[0] == "holds"
    for transport in ("buffered", "blocking", "gloo", "nccl-lazy", "nccl-eager"):
        assert cells(out, f"deadlock-free, {transport}")[0] == "holds"
    assert "3/11 of the makespan" in cells(out, "bubble")[1]
    assert cells(out, "0") == ["0", "24", "27.27 %", "9", "4"]
    assert cells(out, "3") == ["3", "24", "27.27 %", "0", "1"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_family_holds(command, name, ranks):
    status, out, err = command(name, "--pp", ranks, "-m", max(3, FAMILIES[name].least * ranks))
    assert (status, err) == (0, ""), out


def test_the_zero_bubble_of_zb_v_is_given_in_both_conventions(command):
    status, out, _ = command("zb-v", "--pp", 4, "-m", 8)
    assert status == 0
    assert "idle 1/17 of the makespan, own span less work at most 0" in cells(out, "bubble")[1]
    assert cells(out, "0")[2:4] == ["5.88 %", "0"]


def test_several_are_compared_at_the_same_layers(command):
    status, out, _ = command("1f1b", "zb-h1", "zb-v", "--pp", 8, "-m", 32)
    assert status == 0
    assert re.search(r"^┃ +┃ 1f1b +┃ zb-h1 +┃ zb-v +┃$", out, re.MULTILINE)
    assert cells(out, "makespan") == ["117", "103", "99.5"]
    assert cells(out, "stages a rank") == ["1", "1", "2"]
    assert cells(out, "peak in flight, greatest") == ["8", "8", "8"]
    assert "each takes 1/v of the costs" in out


def test_virtual_is_for_the_families_that_leave_it_open(command):
    status, out, _ = command("1f1b", "interleaved-1f1b", "--pp", 4, "-m", 8, "--virtual", 2)
    assert status == 0
    assert cells(out, "stages a rank") == ["1", "2"]
    assert cells(out, "makespan") == ["33", "28.5"]


def test_a_deadlock_is_told_with_its_cycle_the_last_actions_and_the_smallest(command):
    arguments = ("1f1b", "--pp", 4, "-m", 8, "--lowering", "textbook")
    status, out, _ = command(*arguments, "--transport", "blocking", "--transport", "gloo")
    assert status == 1
    assert cells(out, "deadlock-free, blocking")[0] == "violated"
    assert cells(out, "deadlock-free, gloo")[0] == "holds"
    assert cells(out, "portable") == ["violated", "not under blocking"]
    told = out[out.index("1f1b: deadlock-free, blocking is violated") :]
    waits = re.findall(r"rank (\d) waits to send \d[FB]\d to rank (\d)", told)
    assert len(waits) >= 2
    assert {source for source, _ in waits} == {target for _, target in waits}
    assert "last done  rank 0: " in told
    assert "smallest   2 ranks and 2 microbatches of it deadlock as well" in told
    small = re.findall(r"^ +(\S+)$", told, re.MULTILINE)
    assert len(small) == 2
    assert not evaluate(parse_csv("\n".join(small), "small"), "blocking").finished


def test_messages_that_swap_are_told(command, file):
    name = file(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1", "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    )
    status, out, _ = command(name, "--transport", "gloo")
    assert status == 1
    assert "ends on wrong data" in out
    assert "rank 0 sends 0F0, and rank 1 receives it as 0F1" in out


def test_a_file_is_judged_as_it_is(command, file):
    name = file("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
    status, out, _ = command(name)
    assert status == 0
    assert re.search(r"^bound by: \d of 9 time units compute on stage \d", out, re.MULTILINE)
    assert out.startswith("mine.csv: 2 ranks, 2 microbatches")
    assert cells(out, "bubble")[0] == cells(out, "activations")[0] == "not applicable"
    assert "sends and receives: added by the lowering in-order" in out
    lowered = file(*format_csv(lower(generate("1f1b", 2, 2), "receive-first")).splitlines())
    status, out, _ = command(lowered)
    assert status == 0
    assert "added by the lowering" not in out


def test_a_file_is_compared_with_a_family(command, file):
    name = file(*format_csv(generate("gpipe", 3, 5)).splitlines())
    assert command(name, "--family", "gpipe")[0] == 0
    status, out, _ = command(name, "--family", "1f1b")
    assert status == 1
    assert cells(out, "bubble")[0] == "holds"
    assert cells(out, "activations") == ["violated", "rank 0 holds 5: expected at most 3, the bound of 1f1b"]


def test_a_last_stage_that_a_family_has_and_a_file_lacks_is_missed(command, file):
    schedule = generate("zb-v", 2, 4)
    name = file(*format_csv(schedule.kept(schedule.stage < 3)).splitlines())
    assert cells(command(name)[1], "complete")[0] == "holds"
    status, out, _ = command(name, "--family", "zb-v")
    assert status == 1
    assert cells(out, "complete") == ["violated", "3F0 is missing"]


def test_stages_that_are_not_as_many_on_each_rank_are_counted_together(command, file):
    assert command(file("0F0,2F0,2B0,0B0", "1F0,1B0"))[1].startswith("mine.csv: 2 ranks, 1 microbatch, 3 stages, ")
    assert command(file("0F0,1F0,1B0,0B0", ""))[1].startswith("mine.csv: 2 ranks, 1 microbatch, makespan 6, ")


def test_costs_that_fit_no_stage_are_a_mistake_in_wrong_schedules_too(command, file):
    status, out, err = command(file("0F0,0B0", "1F0"), "--cost", "activations=1:2:3")
    assert (status, out) == (2, "")
    assert "3 numbers for 2 stages" in err


def test_a_file_that_idles_more_than_a_family_is_told(command, file):
    name = file(*format_csv(generate("1f1b", 3, 5)).splitlines())
    status, out, _ = command(name, "--family", "zb-h1")
    assert status == 1
    assert cells(out, "bubble") == ["violated", "makespan is 21: expected 17, the closed form of zb-h1"]
    assert "own span less work" in out


def test_a_family_that_does_not_exist_at_the_size_of_a_file_is_not_applicable(command, file):
    status, out, _ = command(file("0F0,0B0", "1F0,1B0"), "--family", "dualpipe-v")
    assert status == 0
    assert cells(out, "bubble")[0] == cells(out, "activations")[0] == "not applicable"
    assert "microbatches=1" in cells(out, "bubble")[1]


def test_costs_beyond_a_closed_form_are_not_applicable(command):
    status, out, _ = command("zb-v", "--pp", 2, "-m", 4, "--cost", "F=1,I=1,W=2")
    assert status == 0
    assert cells(out, "bubble") == ["not applicable", "zb-v: a closed form needs W <= F <= I"]


def test_a_long_cycle_is_short_in_the_table_and_told_below(command):
    arguments = ("--pp", 2, "-m", 5, "--virtual", 2, "--lowering", "batched", "--transport", "nccl-lazy")
    status, out, _ = command("interleaved-1f1b", *arguments)
    assert status == 1
    count = int(re.match(r"a cycle of (\d+) waits: ", cells(out, "deadlock-free, nccl-lazy")[1])[1])
    told = out[out.index("deadlock-free, nccl-lazy is violated") :]
    assert len(re.findall(r"^  rank \d waits to ", told, re.MULTILINE)) == count > 2


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), []),
        (("--microbatches", 3), ["0F2 is missing"]),
        (("--microbatches", 1), ["there is no microbatch 1"]),
        (("--virtual", 2), ["2F0 is missing"]),
    ],
)
def test_a_file_should_have_as_many_microbatches_and_stages_as_are_named(command, file, options, found):
    status, out, _ = command(file("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"), *options)
    assert status == bool(found)
    assert all(each in out for each in found)


def test_what_never_ends_is_violated_and_not_drawn(command, file, tmp_path):
    name = file("0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0")
    status, out, err = command(name, "--timeline", "-o", "out.json")
    assert status == 1
    assert "never ends" in out
    assert cells(out, "timeline")[0] == "violated"
    assert "nothing to draw" in err
    assert not (tmp_path / "out.json").exists()


def test_a_stage_on_two_ranks_is_a_verdict_and_no_crash(command, file):
    status, out, err = command(file("0F0,0B0", "0F1,0B1"))
    assert status == 1, err
    assert cells(out, "complete")[0] == "violated"


def test_a_rank_without_work_is_one_without_work(command, file):
    status, out, _ = command(file("0F0,0B0", ""))
    assert status == 0
    assert cells(out, "1") == ["", "0", "100.00 %", "0", "0"]


def test_the_timeline_is_drawn_and_a_window_of_it(command):
    _, out, _ = command("1f1b", "--pp", 2, "-m", 3, "--timeline")
    assert re.search(r"^rank 0 F0-+F1-+\.+B0-+F2-+B1-+\.+B2-+$", out, re.MULTILINE)
    _, out, _ = command("1f1b", "--pp", 2, "-m", 3, "--timeline", "--window", "0:2")
    assert re.search(r"^rank 0 F0-+F1-+$", out, re.MULTILINE)


def test_costs_per_stage_and_of_links_move_the_makespan(command):
    def makespan(cost):
        _, out, _ = command("gpipe", "--pp", 2, "-m", 2, "--cost", cost)
        return re.search(r"makespan (\S+),", out)[1]

    assert makespan("") == "9"
    assert makespan("F=2,I=1/2,W=0.5") == "9"
    assert makespan("F=1:2") == "11"
    assert makespan("latency=1") == "11"
    assert makespan("messages=8,bandwidth=4") == "14"


def test_bytes_are_told_where_they_are_priced(command):
    _, out, _ = command("1f1b", "--pp", 2, "-m", 4, "--cost", "activations=10:100")
    assert cells(out, "0")[-2:] == ["2", "20"]
    assert cells(out, "1")[-2:] == ["1", "100"]


def test_of_many_ranks_some_are_shown(command):
    status, out, _ = command("gpipe", "--pp", 100, "-m", 2)
    assert status == 0
    assert "of 100 ranks" in out
    assert len(out.splitlines()) < 60


MISTAKES = [
    (["nonsense"], ["'nonsense'", "FILE.csv", "1f1b"]),
    (["absent.csv"], ["absent.csv", "No such file"]),
    (["1f1b"], ["1f1b", "--pp"]),
    (["1f1b", "--pp", "4"], ["1f1b", "--microbatches"]),
    (["1f1b", "--pp", "0", "-m", "4"], ["--pp 0", "1 or more"]),
    (["1f1b", "--pp", "2", "-m", "-4"], ["--microbatches -4", "1 or more"]),
    (["1f1b", "--pp", "2", "-m", "4", "--virtual", "2"], ["virtual=2"]),
    (["dualpipe-v", "--pp", "4", "-m", "4"], ["microbatches=4", "8 or more"]),
    (["mine.csv", "--pp", "3"], ["--pp 3", "mine.csv has 2 ranks"]),
    (["mine.csv", "--family", "2f2b"], ["--family '2f2b'", "1f1b"]),
    (["bad.csv"], ["bad.csv", "0F0junk"]),
    (["mine.csv", "--transport", "tcp"], ["'tcp'", "blocking", "nccl-lazy"]),
    (["mine.csv", "--lowering", "none"], ["'none'", "in-order"]),
    (["mine.csv", "--cost", "G=1"], ["'G=1'", "KEY=NUMBER", "latency"]),
    (["mine.csv", "--cost", "F"], ["'F'", "KEY=NUMBER"]),
    (["mine.csv", "--cost", "F=1,F=2"], ["F=2", "twice"]),
    (["mine.csv", "--cost", "F=fast"], ["F=fast", "numbers"]),
    (["mine.csv", "--cost", "F=-1"], ["F=-1", "numbers"]),
    (["mine.csv", "--cost", "F=1/0"], ["F=1/0", "numbers"]),
    (["mine.csv", "--cost", "F=1e999999999"], ["F=1e999999999", "numbers"]),
    (["mine.csv", "--cost", "F=1:2:3"], ["3 numbers for 2 stages"]),
    (["mine.csv", "--cost", "activations=1:2:3"], ["activation_bytes", "3 numbers for 2 stages"]),
    (["mine.csv", "--cost", "latency=1:2"], ["latency=1:2", "one number"]),
    (["mine.csv", "--cost", "bandwidth=1"], ["bandwidth", "message_bytes"]),
    (["mine.csv", "--window", "5"], ["--window 5", "BEGIN:END"]),
    (["mine.csv", "--window", "5:4"], ["--window 5:4", "BEGIN:END"]),
    (["mine.csv", "--timeline", "--window", "900:901"], ["--window 900:901", "makespan"]),
    (["mine.csv", "-o", "out.pdf"], ["-o out.pdf", ".svg, .png, .html, .json"]),
    (["mine.csv", "-o", "out"], ["-o out", ".svg"]),
    (["mine.csv", "-o", "absent/out.json"], ["-o ", "absent does not exist"]),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value))
def test_a_mistake_is_one_line_and_nothing_is_written(command, file, tmp_path, arguments, named):
    file("0F0,0B0", "1F0,1B0")
    file("0F0junk", name="bad.csv")
    before = sorted(tmp_path.iterdir())
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    for part in named:
        assert part in err
    assert sorted(tmp_path.iterdir()) == before


def test_files_of_each_form_are_written_whole(command, tmp_path):
    outs = [arguments for form in schedule_sources.FORMS for arguments in ("-o", f"out.{form}")]
    status, _, err = command("1f1b", "zb-v", "--pp", 2, "-m", 4, *outs)
    assert (status, err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json", "out.png", "out.svg"]
    trace = json.loads((tmp_path / "out.json").read_text())
    assert len(trace["otherData"]["verdicts"]) == 2
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    page = (tmp_path / "out.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "<th>zb-v</th>" in page
    balanced(page)
    assert not re.search(r"(src|href)=\"http", page)
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def balanced(page):
    """Each element that is opened is closed, in order."""
    opened = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br"):
                opened.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Reader().feed(page)
    assert not opened


def test_a_page_escapes_the_names_of_files(command, file, tmp_path):
    name = file("0F0,0B0", name="a<b>&c.csv")
    assert command(name, "-o", "out.html")[0] == 0
    page = (tmp_path / "out.html").read_text()
    assert "a<b>" not in page
    assert "a&lt;b&gt;&amp;c.csv" in page


def test_a_file_that_cannot_be_written_leaves_nothing_and_is_no_verdict(command, tmp_path, monkeypatch):
    def full(file, charts, about):
        file.write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("invariants.commands.schedule.write_trace", full)
    status, out, err = command("1f1b", "--pp", 2, "-m", 2, "-o", "out.json")
    assert status == 3
    assert "could not be written: No space left on device" in err
    assert cells(out, "portable")[0] == "holds"
    assert list(tmp_path.iterdir()) == []


def test_pictures_need_matplotlib_and_nothing_else_does(command, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule_picture, "find_spec", lambda name: None)
    for form in schedule_sources.PICTURES:
        status, out, err = command("1f1b", "--pp", 2, "-m", 2, "-o", f"out.{form}")
        assert (status, out) == (2, "")
        assert "pip install pytest-invariants[pictures]" in err
        assert len(err.splitlines()) == 1
    assert command("1f1b", "--pp", 2, "-m", 2, "--timeline", "-o", "out.json")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_command_imports_neither_torch_nor_matplotlib(tmp_path):
    code = (
        "import sys; from invariants.cli import main\n"
        "sys.argv = ['invariants', 'schedule', 'zb-v', '--pp', '2', '-m', '4', '--timeline', '-o', 'out.json']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit(bool({'torch', 'matplotlib', 'hypothesis'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr + run.stdout


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path):
    program = f"{sys.executable} -c 'from invariants.cli import main; main()'"
    command = f"{program} schedule 1f1b --pp 64 -m 64 --timeline | head -1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (cli.NOBODY_READS, "")
    assert run.stdout.startswith("1f1b: 64 ranks")


@given(st.lists(st.sampled_from("FIWB"), min_size=1, max_size=12), st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_file_holds_there_is_a_verdict(command, file, ops, random):
    rows = [",".join(f"{rank}{op}{random.randrange(3)}" for op in ops) for rank in range(2)]
    name = file(*rows)
    status, out, err = command(name, "--timeline")
    assert status in (0, 1), err
    assert "complete" in out


NUMBERS = st.fractions(0, 100, max_denominator=50)


@given(st.dictionaries(st.sampled_from(["F", "I", "W", "FB", "latency"]), NUMBERS))
def test_costs_are_read_exactly(given):
    read = costs(",".join(f"{key}={value}" for key, value in given.items()))
    names = {"F": "forward", "I": "input_gradient", "W": "weight_gradient", "FB": "overlapped", "latency": "latency"}
    assert read == Costs(**{names[key]: value for key, value in given.items()})


@given(st.lists(NUMBERS, min_size=1, max_size=4), NUMBERS)
def test_scaled_costs_are_a_part_of_each_time(forward, weight):
    price = Costs(tuple(forward), 1, 2, overlapped=3, latency=5)
    assert scaled(price, weight) == Costs(
        tuple(weight * each for each in forward), weight, 2 * weight, overlapped=3 * weight, latency=5
    )


@pytest.mark.parametrize("text", ["F=1,F=2", "overlap=no,overlap=yes", "F=1,overlap=yes,overlap=yes"])
def test_what_is_given_twice_is_a_mistake(text):
    with pytest.raises(UsageError, match="is given twice"):
        costs(text)


def test_nothing_between_commas_is_a_mistake():
    with pytest.raises(UsageError, match="expected KEY=NUMBER"):
        costs("F=1,")


def test_costs_beyond_64_bits_are_rounded_and_can_be_read(command):
    status, out, err = command("1f1b", "--pp", 2, "-m", 1, "--cost", "F=1e99,I=1,W=2", "--transport", "blocking")
    assert (status, err) == (0, "")
    assert "makespan 2e+99" in out
    assert cells(out, "bubble")[0] == "holds"
    assert "0" * 16 not in out


def test_overlap_is_a_word():
    assert costs("overlap=no") == Costs(overlap=False)
    assert costs("overlap=yes") == Costs()
    with pytest.raises(UsageError, match="overlap=no"):
        costs("overlap=maybe")


def test_a_schedule_that_was_read_is_what_was_written(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule = Schedule.of_rows(parse_rows([["0F0", "0B0"], ["1F0", "1B0"]]))
    (source,) = sources([file(*format_csv(schedule).splitlines())], Sizes(None, None, None), None)
    assert source.schedule == schedule
    assert (source.stages, source.microbatches, source.virtual, source.family) == (2, 1, 1, None)


def test_files_appear_whole_or_not_at_all(tmp_path):
    def half():
        with document.whole(tmp_path / "half") as out:
            out.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert list(tmp_path.iterdir()) == []
    with document.whole(tmp_path / "whole") as out:
        out.write(b"whole")
        assert not (tmp_path / "whole").exists()
    assert (tmp_path / "whole").read_bytes() == b"whole"
