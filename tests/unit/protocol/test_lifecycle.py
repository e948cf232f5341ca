"""The state tables: closed, and final where they should be."""

from __future__ import annotations

from enum import StrEnum

import pytest

from protocol.errors import InternalError
from protocol.lifecycle import (
    RECEIVE_TABLE,
    SEND_TABLE,
    WORKER_TABLE,
    ReceiveEvent,
    ReceiveState,
    SendEvent,
    SendState,
    WorkerEvent,
    WorkerState,
    follow,
)

TABLES = [
    (SEND_TABLE, SendState, SendEvent, SendState.OFFERED, {SendState.SEALED, SendState.ABORTED}),
    (
        RECEIVE_TABLE,
        ReceiveState,
        ReceiveEvent,
        ReceiveState.RESERVING,
        {ReceiveState.SEALED, ReceiveState.ABORTED},
    ),
    (
        WORKER_TABLE,
        WorkerState,
        WorkerEvent,
        WorkerState.STARTING,
        {WorkerState.STOPPED, WorkerState.LOST},
    ),
]


@pytest.mark.parametrize(("table", "states", "events", "start", "final"), TABLES)
def test_every_state_is_reached_and_only_final_ones_are_left_by_nothing(
    table: dict[tuple[StrEnum, StrEnum], StrEnum],
    states: type[StrEnum],
    events: type[StrEnum],
    start: StrEnum,
    final: set[StrEnum],
) -> None:
    reached, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        for (source, _), target in table.items():
            if source is state and target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(states)
    assert set(states) - {source for source, _ in table} == final
    for state in states:
        for event in events:
            if (state, event) in table:
                assert follow(table, state, event) is table[state, event]
            else:
                with pytest.raises(InternalError, match="cannot take"):
                    follow(table, state, event)


def test_nothing_leads_from_aborted_to_sealed() -> None:
    assert not [t for (s, _), t in RECEIVE_TABLE.items() if s is ReceiveState.ABORTED]
