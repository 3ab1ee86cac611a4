"""The keeper's book alone: random lives of many clients, and what must hold after every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.book import Book, Changed, Effect, Freed, Grant, Publish, worker_of
from shadowsup.memkeeper.deposits import Deposits
from shadowsup.memkeeper.errors import KeeperError, StaleHandle
from shadowsup.memkeeper.segments import SegmentSet

MODELS = [p.Fingerprint(items=(("model", name),)) for name in ("a", "b")]
connections = st.integers(1, 4)
models = st.sampled_from(MODELS)


def new_book() -> Book:
    ids = itertools.count()
    return Book(7, new_id=lambda: f"{next(ids):x}", clock=lambda: 1.0)


class Lives(RuleBasedStateMachine):
    """Clients ask, publish, seal, drop and die in any order. The shell is played by `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.book = new_book()
        self.alive: set[int] = set()
        self.waiting: dict[int, p.Fingerprint] = {}
        """Connections whose `get_weights` is not answered."""
        self.may_publish: dict[p.Fingerprint, int] = {}
        self.freed: set[str] = set()

    def apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Grant(connection=number, set=each):
                    assert self.waiting.pop(number) == each.first.fingerprint
                    assert each.sealed and number in each.leases
                case Publish(connection=number):
                    model = self.waiting.pop(number)
                    assert self.may_publish.get(model) in (None, number), "two publishers of one set of weights"
                    self.may_publish[model] = number
                case Freed(set=each):
                    assert each.set_id not in self.freed, "freed twice"
                    self.freed.add(each.set_id)
                    if not each.sealed:
                        self.may_publish.pop(each.first.fingerprint, None)
                case Changed():
                    pass

    @rule(number=connections)
    def connect(self, number: int) -> None:
        if number not in self.alive:
            self.alive.add(number)
            assert self.book.connect(number, f"chat.{number}", ()) == ((), [])

    @rule(number=connections)
    def die(self, number: int) -> None:
        if number in self.alive:
            self.alive.discard(number)
            self.waiting.pop(number, None)
            self.may_publish = {model: publisher for model, publisher in self.may_publish.items() if publisher != number}
            self.apply(self.book.disconnect(number))
            assert not any(number in each.leases for each in self.book.sets.values())

    @rule(number=connections, model=models)
    def ask(self, number: int, model: p.Fingerprint) -> None:
        if number in self.alive and number not in self.waiting:
            self.waiting[number] = model
            if self.may_publish.get(model) == number and not self.writing(model):
                del self.may_publish[model]  # it asks again in place of publishing
            try:
                self.apply(self.book.get_weights(number, model, "host"))
            except KeeperError:
                assert self.may_publish.get(model) == number
                del self.waiting[number]

    @rule(number=connections, model=models)
    def create(self, number: int, model: p.Fingerprint) -> None:
        if number not in self.alive or number in self.waiting:
            return
        allowed = self.may_publish.get(model, number) == number and not self.writing(model) and not self.readable(model)
        request = p.Create(kind=p.Kind.WEIGHTS, worker="", fingerprint=model, device="host", sizes=(10,))
        try:
            planned = self.book.plan_weights(number, request, [4096])
        except KeeperError:
            assert not allowed
        else:
            assert allowed
            self.may_publish[model] = number
            self.book.add(number, planned)

    @rule(number=connections, model=models)
    def seal(self, number: int, model: p.Fingerprint) -> None:
        each = self.writing(model)
        if each is not None and number in self.alive and number in each.leases:
            assert self.book.to_seal(number, each.set_id) is each
            self.may_publish.pop(model)
            self.apply(self.book.seal(each, {"checksum": "1"}))
            assert self.book.to_seal(number, each.set_id) is None

    @rule(number=connections, data=st.data(), discard=st.booleans())
    @precondition(lambda self: self.book.sets)
    def drop(self, number: int, data: st.DataObject, discard: bool) -> None:
        each = data.draw(st.sampled_from(sorted(self.book.sets.values(), key=lambda each: each.set_id)))
        if number in self.alive and number in each.leases:
            if not each.sealed:
                self.may_publish.pop(each.first.fingerprint)
            self.apply(self.book.drop(number, each.set_id, discard=discard))

    @rule()
    def free_worker(self) -> None:
        self.apply(self.book.free(worker="chat", set_id=""))
        assert not self.book.sets

    def writing(self, model: p.Fingerprint) -> SegmentSet | None:
        return next((each for each in self.book.sets.values() if not each.sealed and each.first.fingerprint == model), None)

    def readable(self, model: p.Fingerprint) -> SegmentSet | None:
        sets = self.book.sets.values()
        return next((each for each in sets if each.sealed and not each.superseded and each.first.fingerprint == model), None)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        for model in self.waiting.values():
            assert self.readable(model) is None
            assert self.may_publish.get(model) in self.alive, "a reader waits and nobody publishes"

    @invariant()
    def leases_are_of_the_living_and_what_is_left_is_kept_for_a_reason(self) -> None:
        for each in self.book.sets.values():
            assert set(each.leases) <= self.alive
            assert each.leases or (each.sealed and not each.superseded)
            assert each.set_id not in self.freed


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def kv_request(worker: str = "chat", model: p.Fingerprint = MODELS[0]) -> p.GetKv:
    return p.GetKv(worker=worker, fingerprint=model, device="host", kv_sizes=(4096,), ledger_size=4096)


def with_kv(book: Book, number: int, request: p.GetKv) -> SegmentSet:
    planned = book.plan_kv(request, [4096], 4096, {})
    book.add(number, planned)
    return planned


def test_what_a_keeper_had_is_the_same_after_a_restore() -> None:
    book = new_book()
    book.connect(1, "chat.1", ())
    book.connect(2, "chat.2", ())
    with_kv(book, 1, kv_request())
    weights = book.plan_weights(
        2, p.Create(kind=p.Kind.WEIGHTS, worker="", fingerprint=MODELS[0], device="host", sizes=(1, 1)), [4096, 4096]
    )
    book.add(2, weights)
    book.seal(weights, {"checksum": "1"})
    after = new_book()
    sets, left_over = after.restore(reversed(book.infos()))
    assert len(sets) == 2 and left_over == []
    assert sorted(after.infos(), key=repr) == sorted(book.infos(), key=repr)
    assert after.expecting
    assert after.connect(5, "chat.2", weights.segments)[0] == ()
    assert [type(effect) for effect in after.expire()] == [Changed]
    assert {each.first.kind: tuple(each.leases.values()) for each in after.sets.values()} == {p.Kind.KV: (), p.Kind.WEIGHTS: ("chat.2",)}
    assert not after.expecting


def test_half_written_weights_are_their_publishers_only() -> None:
    book = new_book()
    book.connect(1, "chat.1", ())
    writing = book.plan_weights(1, p.Create(kind=p.Kind.WEIGHTS, worker="", fingerprint=MODELS[0], device="host", sizes=(1,)), [4096])
    book.add(1, writing)
    after = new_book()
    after.restore(book.infos())
    after.connect(8, "chat.2", writing.segments)
    with pytest.raises(KeeperError):
        after.to_seal(8, writing.set_id)
    after.connect(9, "chat.1", writing.segments)
    assert after.to_seal(9, writing.set_id) is not None


def test_half_written_weights_that_nobody_leases_are_not_restored() -> None:
    book = new_book()
    book.connect(1, "chat.1", ())
    book.add(1, book.plan_weights(1, p.Create(kind=p.Kind.WEIGHTS, worker="", fingerprint=MODELS[0], device="host", sizes=(1,)), [4096]))
    (info,) = book.infos()
    assert new_book().restore([msgspec.structs.replace(info, leases=())]) == ([], [info.manifest.segment])


def test_kv_and_its_ledger_are_one_set() -> None:
    """Bytes and the index of them live and die together."""
    book = new_book()
    book.connect(1, "chat.1", ())
    each = with_kv(book, 1, kv_request())
    assert [manifest.kind for manifest in each.manifests] == [p.Kind.KV, p.Kind.LEDGER]
    assert book.find_kv(kv_request(), [4096], 4096) is each
    for other in (kv_request(worker="code"), kv_request(model=MODELS[1])):
        assert book.find_kv(other, [4096], 4096) is None
    assert book.find_kv(kv_request(), [8192], 4096) is None
    assert book.supersede("code") == []
    assert [type(effect) for effect in book.supersede("chat")] == [Changed]
    assert book.find_kv(kv_request(), [4096], 4096) is None
    assert [type(effect) for effect in book.drop(1, each.set_id, discard=False)] == [Freed]


def test_stale_ids_are_named() -> None:
    with pytest.raises(StaleHandle, match="is of generation 3; this keeper is generation 7"):
        new_book().drop(1, "set-3-abc", discard=False)
    with pytest.raises(StaleHandle, match="it was freed"):
        new_book().drop(1, "set-7-abc", discard=False)


def test_holdings_name_what_is_held_for_whom() -> None:
    book = new_book()
    book.connect(1, "chat.1", ())
    with_kv(book, 1, kv_request())
    assert book.holdings() == [("kv of chat", 8192, ("chat.1",))]


@pytest.mark.parametrize(("client", "worker"), [("chat.3", "chat"), ("a.b.12", "a.b"), ("supervisor", "supervisor"), ("x.y", "x.y")])
def test_an_engine_id_names_its_worker(client: str, worker: str) -> None:
    assert worker_of(client) == worker


def test_a_set_is_given_out_when_all_its_deposits_are_acknowledged() -> None:
    deposits = Deposits()
    first, second, other = deposits.add("s", 1.0), deposits.add("s", 2.0), deposits.add("t", 3.0)
    assert deposits.wait("s", 4, created=True) == []
    assert deposits.wait("u", 5, created=False) == [("u", 5, False)]
    assert deposits.acknowledged(first) == [] and deposits.oldest_s == 2.0
    assert deposits.acknowledged(99) == []
    assert deposits.acknowledged(second) == [("s", 4, True)]
    assert deposits.wait("t", 6, created=True) == []
    assert deposits.freed("t") == [("t", 6, True)]
    assert deposits.oldest_s is None
    assert deposits.acknowledged(other) == []


def test_slabs_of_several_devices_are_one_set() -> None:
    book = new_book()
    book.connect(1, "chat.1", ())
    request = msgspec.structs.replace(kv_request(), device="GPU-a", kv_sizes=(4096, 8192), devices=("GPU-a", "GPU-b"))
    planned = book.plan_kv(request, [4096, 8192], 4096, {})
    assert [manifest.device for manifest in planned.manifests] == ["GPU-a", "GPU-b", "host"]
    book.add(1, planned)
    assert book.find_kv(request, [4096, 8192], 4096) is planned
    assert book.find_kv(msgspec.structs.replace(request, devices=("GPU-a", "GPU-c")), [4096, 8192], 4096) is None
    with pytest.raises(KeeperError, match="2 KV slabs on 1 devices"):
        book.find_kv(msgspec.structs.replace(request, devices=("GPU-a",)), [4096, 8192], 4096)


def test_the_ranks_of_an_engine_are_its_workers() -> None:
    assert [worker_of(client) for client in ("a.b.3", "a.b.3/1", "supervisor", "a.b.x/1")] == ["a.b", "a.b", "supervisor", "a.b.x/1"]
