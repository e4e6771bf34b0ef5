"""What a recorder noted, cut into steps; from literal operations, without processes."""

from dataclasses import replace

from invariants.communication import Operation
from invariants.probes.communicated import Communicated


class Noted:
    """A recorder that has noted `operations`, up to number `posted`."""

    def __init__(self, posted=0):
        self.noted = [operation(number) for number in range(posted)]
        self.complete = True
        self.watches = False

    @property
    def posted(self):
        return len(self.noted)

    def post(self, count):
        self.noted += [operation(number) for number in range(self.posted, self.posted + count)]

    def operations(self, since):
        return self.noted[since:]

    def watch_buffers(self):
        self.watches = True


def operation(number):
    return Operation(0, number, "all_reduce", "0", (0, 1), number + 1, posted=100.5 + number, completed=100.7 + number)


def numbers(rows):
    return {(row.step, row.inside): [each.number for each in row.operations] for row in rows}


def test_operations_belong_to_the_step_in_which_they_were_posted_and_probes_to_none():
    recorder = Noted(posted=3)
    cut = Communicated(recorder)
    assert recorder.watches
    recorder.post(2)  # the build
    cut.goes_on(1, inside=True)
    recorder.post(2)
    cut.goes_on(0)  # gradients are looked at
    recorder.post(1)
    cut.goes_on(1, inside=True)
    recorder.post(1)
    cut.goes_on(1)
    cut.goes_on(2, inside=True)
    cut.goes_on(2)
    recorder.post(1)  # a save
    rows = cut.posted(4, resumed=True)
    assert numbers(rows) == {
        (0, False): [0, 1, 4],
        (1, True): [2, 3, 5],
        (1, False): [],
        (2, True): [],
        (2, False): [6],
    }
    assert {(row.rank, row.resumed) for row in rows} == {(4, True)}


def test_times_become_their_order():
    recorder = Noted()
    cut = Communicated(recorder)
    recorder.post(3)
    recorder.noted[0] = replace(recorder.noted[0], completed=103.1)
    recorder.noted[1] = replace(recorder.noted[1], completed=0.0)
    (row,) = cut.posted(0, resumed=False)
    assert [(each.posted, each.completed) for each in row.operations] == [(1.0, 5.0), (2.0, 0.0), (3.0, 4.0)]


def test_nothing_is_posted_and_too_much_is():
    recorder = Noted()
    cut = Communicated(recorder)
    assert numbers(cut.posted(0, resumed=False)) == {(0, False): []}
    recorder.complete = False
    assert cut.posted(0, resumed=False) is None
