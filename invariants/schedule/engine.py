"""Programs that wait for each other, run to their end or to where they stick.

Such programs have no choice: what may start once may start ever after, so one evaluation decides, in whatever order it
goes. It is linear in the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.compiled import available, loop

NOTHING, NOBODY = -1, -2
WAITING, STARTED, DONE = 0, 1, 2
STATES, AWAITED = 3, 4
"""Bits of a state while a network runs: which it is, and whether a queue waits for the next one."""


@dataclass(frozen=True)
class Network:
    """What waits for what. A *step* is one or more actions that start and end together.

    `queues` [Q+1]: where each queue begins in `order` [A], which lists the actions of one queue after another's.
    `opens` [A], by place in `order`: whether a step begins there. A step starts when the step before it in its queue is
    done, and so is each action that `before` [A] names for one of its actions; it is done as soon as each action that
    `beside` [A] names for one of its actions has started. They hold `NOTHING` for an action that waits for nothing, and
    `NOBODY` for one that waits for what does not exist: its step never starts, or is never done.

    An empty array stands for the plain case, which costs no memory: actions in their own order, each a step of its own,
    none with anything to wait for.
    """

    queues: NDArray[np.int64]
    order: NDArray[np.int32]
    opens: NDArray[np.bool_]
    before: NDArray[np.int32]
    beside: NDArray[np.int32]


@dataclass(frozen=True)
class Rest:
    """Where a network comes to rest: `reached` [Q], each queue's place in `order`; `state` [A] of each action."""

    reached: NDArray[np.int64]
    state: NDArray[np.uint8]


def run(network: Network) -> Rest:
    """Run it."""
    if available():
        # numpy asks the system for large pages, which numba does not.
        state, waiting = np.zeros(network.queues[-1], np.uint8), np.empty(network.queues[-1], np.int32)
        columns = network.queues, network.order, network.opens, network.before, network.beside
        return Rest(_run_loop(*columns, state, waiting), state)
    return _run_waves(network)


@loop
def _run_loop(
    queues: NDArray[np.int64],
    order: NDArray[np.int32],
    opens: NDArray[np.bool_],
    before: NDArray[np.int32],
    beside: NDArray[np.int32],
    state: NDArray[np.uint8],
    waiting: NDArray[np.int32],
) -> NDArray[np.int64]:
    count, actions = len(queues) - 1, queues[-1]
    ordered, compound = len(order) > 0, len(opens) > 0
    reached = queues[:-1].copy()
    # Queues that wait for an action: a list through `following`, its head in `waiting` where the state says so.
    following = np.full(count, -1, np.int32)
    ready = np.arange(count - 1, -1, -1).astype(np.int32)
    size = count
    while size:
        size -= 1
        queue = ready[size]
        while reached[queue] < queues[queue + 1]:
            begin = reached[queue]
            end = begin + 1
            while compound and end < queues[queue + 1] and not opens[end]:
                end += 1
            lack, level = NOTHING, state[order[begin] if ordered else begin] & STATES
            if (len(before) if level == WAITING else len(beside)) > 0:
                for place in range(begin, end):
                    action = order[place] if ordered else place
                    need = before[action] if level == WAITING else beside[action]
                    if need == NOBODY or (need >= 0 and state[need] & STATES < DONE - level):
                        lack = need
            if lack != NOTHING:
                if lack != NOBODY:
                    following[queue] = waiting[lack] if state[lack] & AWAITED else NOTHING
                    waiting[lack] = queue
                    state[lack] |= AWAITED
                break
            for place in range(begin, end):
                action = order[place] if ordered else place
                woken = waiting[action] if state[action] & AWAITED else NOTHING
                state[action] = level + 1
                while woken >= 0:
                    ready[size] = woken
                    size += 1
                    woken = following[woken]
            if level == STARTED:
                reached[queue] = end
    for i in range(actions):
        state[i] &= STATES
    return reached


def _run_waves(network: Network) -> Rest:
    """The same by numpy, in waves: all queues together take their next step, or half of it."""
    queues, actions = network.queues, int(network.queues[-1])
    order = network.order if len(network.order) else np.arange(actions, dtype=np.int32)
    begins = np.flatnonzero(network.opens) if len(network.opens) else np.arange(actions)
    ends = np.append(begins[1:], actions)
    at, last = np.searchsorted(begins, queues[:-1]), np.searchsorted(begins, queues[1:])
    needs = [
        column if len(column) else np.full(actions, NOTHING, np.int32) for column in (network.before, network.beside)
    ]
    state = np.zeros(actions + 2, np.uint8)  # the last two stand for NOBODY and NOTHING
    state[NOTHING] = DONE
    moved = True
    while moved:
        going = np.flatnonzero(at < last)
        moved = False
        for level in (WAITING, STARTED):
            place, end = begins[at[going]], ends[at[going]]
            ready = state[order[place]] == level
            widest = int((end - place).max(initial=0))
            for member in range(widest):
                need = needs[level][order[np.minimum(place + member, end - 1)]]
                ready &= state[need] >= DONE - level
            for member in range(widest):
                state[order[np.minimum(place + member, end - 1)[ready]]] = level + 1
            moved |= bool(ready.any())
        at[going[state[order[begins[at[going]]]] == DONE]] += 1
    reached = np.append(begins, actions)[at]
    return Rest(np.where(at == last, queues[1:], reached), state[:actions])
