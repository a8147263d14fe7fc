"""The group of strategy "local", its ranks as threads of this process over real connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.protocol.attempt import AttemptSpec
from engine.trainer import elastic_group
from engine.trainer.collective import all_gather_object, broadcast_arrays
from engine.trainer.elastic_group import ElasticGroup, LeftOut
from engine.training.reporting import GroupError, PeerLost
from tests.waiting import wait_until

KEY = b"nonce"
FACTS: dict[str, object] = {"job": 1}


@dataclass
class Ranks:
    address: str
    pool: ThreadPoolExecutor
    notes: list[str] = field(default_factory=list)

    def group(self, rank: int, size: int, key: bytes = KEY) -> ElasticGroup:
        return ElasticGroup(self.address, key, size, rank, self.notes.append)

    def formed(self, size: int) -> list[ElasticGroup]:
        groups: list[ElasticGroup] = self.all(lambda rank: self.group(rank, size), range(size))
        self.all(lambda group: group.check_equal(FACTS), groups)
        return groups

    def all(self, work: Callable[[Any], Any], each: Iterable[Any]) -> list[Any]:
        """`work` on each, at the same time."""
        return [future.result(60) for future in [self.pool.submit(work, one) for one in each]]

    def sums(self, *groups: ElasticGroup) -> list[float]:
        return self.all(lambda group: group.all_sum(mx.array(10.0**group.rank)).item(), groups)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor(8) as pool:
        yield Ranks(f"127.0.0.1:{port}", pool)


def test_a_group_computes_as_a_collective(ranks: Ranks) -> None:
    def work(group: ElasticGroup) -> Any:
        objects = all_gather_object(group, {"rank": group.rank})
        mine = {"w": {"a": mx.arange(3) * -0.0, "b": mx.array(7, mx.bfloat16)}} if group.rank == 1 else None
        received = broadcast_arrays(group, mine, 1)["w"]
        return objects, np.signbit(np.asarray(received["a"])).tolist(), received["b"].item(), group.waited_s > 0

    groups = ranks.formed(3)
    assert ranks.sums(*groups) == [111.0] * 3
    for objects, *rest in ranks.all(work, groups):
        assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert rest == [[True] * 3, 7.0, True]


def test_a_lost_member_is_left_out_and_joins_again(ranks: Ranks) -> None:
    first, second, third = ranks.formed(3)
    first.begin()
    third.leave()
    assert ranks.sums(first, second) == [11.0, 11.0]
    assert (first.size, second.size, third.left_out) == (2, 2, True)
    assert "rank 2 is left out" in ranks.notes[0]
    with pytest.raises(LeftOut, match="not in the group"):
        third.all_sum(mx.array(1.0))
    joining = ranks.pool.submit(third.join, lambda: False)
    wait_until(lambda: first.awaited)
    first.admit("header", lambda: [mx.arange(4)])
    header, contents = joining.result(60)
    assert (header, np.frombuffer(next(contents), np.int32).tolist()) == ("header", [0, 1, 2, 3])
    assert ranks.notes[1:] == ["rank 2 has joined again"]
    assert ranks.sums(first, second, third) == [111.0] * 3
    assert [group.size for group in (first, second, third)] == [3, 3, 3]


def test_a_member_that_cannot_send_any_more_is_left_out(ranks: Ranks) -> None:
    first, second = ranks.formed(2)
    first.leave()
    with pytest.raises(LeftOut):
        second.combine(bytes(8 * 2**20), lambda parts: parts[0])
    assert second.left_out


def test_a_late_member_is_left_out(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_group, "LEAST_WAIT_S", 0.5)
    first, second, third = ranks.formed(3)
    first.begin()
    assert ranks.sums(first, second) == [11.0, 11.0]
    assert "rank 2 is left out until it joins again: it is more than" in ranks.notes[0]
    with pytest.raises(LeftOut):
        third.all_sum(mx.array(1.0))


def test_a_member_that_stops_in_the_middle_of_a_message_is_left_out(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_group, "STALL_S", 1.0)
    first, second, third = ranks.formed(3)
    first.begin()
    # A message's length, and less than that.
    with socket.socket(fileno=third._members[0].fileno()) as raw:
        raw.sendall(b"\0\0\1\0abc")
        assert ranks.sums(first, second) == [11.0, 11.0]
        raw.detach()


def test_a_restarted_rank_finds_a_training_under_way(ranks: Ranks) -> None:
    first, second = ranks.formed(2)
    first.begin()
    second.leave()
    again = ranks.group(1, 2)
    assert again.left_out
    again.check_equal(FACTS)
    other = ranks.group(1, 2)
    other.check_equal({"job": 2})
    refused = ranks.pool.submit(other.join, lambda: False)
    wait_until(lambda: first.awaited)
    first.admit("header", list)
    with pytest.raises(GroupError, match="differ from rank 0's"):
        refused.result(60)
    joining = ranks.pool.submit(again.join, lambda: False)
    wait_until(lambda: first.awaited)
    first.admit("header", list)
    assert joining.result(60)[0] == "header"
    assert ranks.sums(first, again) == [11.0, 11.0]


def test_strangers_do_not_disturb(ranks: Ranks) -> None:
    host, _, port = ranks.address.rpartition(":")
    forming = ranks.pool.submit(ranks.group, 0, 2)

    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    wait_until(listening)
    with socket.create_connection((host, int(port))) as silent:
        with pytest.raises((EOFError, OSError, AuthenticationError)):
            Client((host, int(port)), authkey=b"another")
        with pytest.raises(GroupError, match="is not this"):
            ranks.group(1, 2, key=b"another")
        stranger = Client((host, int(port)), authkey=KEY)
        stranger.send_bytes(b"not JSON")
        second = ranks.group(1, 2)
        silent.close()
    assert ranks.sums(forming.result(60), second) == [11.0, 11.0]


def test_before_the_training_every_rank_is_needed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks.formed(2)
    second.leave()
    with pytest.raises(PeerLost, match="rank 1 was lost before the training began"):
        first.all_sum(mx.array(1.0))
    monkeypatch.setattr(elastic_group, "FORM_LIMIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(GroupError, match=r"rank 1, 2 did not connect within 0\.3 s"):
        ElasticGroup(address, KEY, 3, 0, print)


def test_without_rank_0_there_is_no_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_group, "_GONE_S", 0.3)
    first, second = ranks.formed(2)
    first.leave()
    first._listener.shutdown(socket.SHUT_RDWR)
    first._listener.close()
    with pytest.raises(LeftOut):
        second.all_sum(mx.array(1.0))
    with pytest.raises(PeerLost, match="is gone"):
        second.join(lambda: False)


@pytest.mark.parametrize("strangers", [66, 3])
def test_strangers_that_say_a_byte_at_a_time_do_not_keep_the_group_from_forming(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, strangers: int
) -> None:
    """They held all 64 places, each byte in time; a greeting has its time as a whole, and a new one goes before."""
    monkeypatch.setattr(elastic_group, "GREETING_LIMIT_S", 1.0)
    host, _, port = ranks.address.rpartition(":")
    forming = ranks.pool.submit(ranks.group, 0, 2)
    over = threading.Event()

    def connect() -> socket.socket:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)))
        time.sleep(0.01)
        return connect()

    def trickle(stranger: socket.socket) -> bool:
        """True when it was closed."""
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(b"\0\0\0\x40")
            while not over.wait(0.05):
                stranger.sendall(b"x")
            return False
        return True

    with ThreadPoolExecutor(strangers) as pool:
        trickling = [pool.submit(trickle, connect()) for _ in range(strangers)]
        second = ranks.group(1, 2)
        assert ranks.sums(forming.result(60), second) == [11.0, 11.0]
        assert all(each.result(60) for each in trickling), "none is kept"
        over.set()
    assert ranks.sums(forming.result(60), second) == [11.0, 11.0]


def test_the_groups_key_is_no_nonce_and_lies_in_the_specification_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = list[bytes]()
    monkeypatch.setattr(elastic_group, "ElasticGroup", lambda _address, key, *_: keys.append(key))
    specs = [AttemptSpec("r", 1, "nonce", "ring", 1, [], job={"strategy": "local"}) for _ in range(2)]
    for spec in [*specs, AttemptSpec.from_json(specs[0].to_json())]:
        elastic_group.join_group(spec, 0, print)
    first, second, read = keys
    assert first == read != second
    assert len(first) == 64
    assert b"nonce" not in first
