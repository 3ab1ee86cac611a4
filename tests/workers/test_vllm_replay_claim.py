"""What the gateway writes for an engine is what the plugin in it reads, and nothing else is taken for it."""

from __future__ import annotations

import stat
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shadowsup.supervisor.gateway import held_request
from shadowsup.wire.seal import SEAL, key_of, seal, sealed
from shadowsup.workers.vllm.replay import claim as claims
from shadowsup.workers.vllm.replay.claim import BadClaim, Seen
from shadowsup.workers.vllm.replay.parsers import merged

KEY = bytes(range(32))


def of(extra: dict[str, Any] | None) -> claims.Claim | None:
    return claims.of(extra, lambda: KEY)


def resealed(extra: dict[str, Any]) -> dict[str, Any]:
    return extra | {SEAL: seal(KEY, extra)}


def written(replay: held_request.Replay | None) -> dict[str, Any]:
    import json

    body = {"model": "m", "messages": [], "stream": True, "vllm_xargs": {"mine": 1}}
    xargs: dict[str, Any] = json.loads(held_request.Asked(True, body, b"", KEY).written_for("r~1", 7, replay))["vllm_xargs"]
    return xargs


def test_the_two_ends_agree() -> None:
    fresh = of(written(None))
    assert fresh is not None and (fresh.request, fresh.epoch, fresh.output) == ("r~1", 7, [])
    assert claims.rest(written(None), fresh) == {"mine": 1}
    replay = held_request.Replay(array("I", [1, 2**31]), array("I", [5, 6, 7]), array("I", [1, 2]))
    extra = written(replay)
    claim = of(extra)
    assert claim is not None and (claim.prompt, claim.output, claim.pieces) == ([1, 2**31], [5, 6, 7], [1, 2])
    rest = claims.rest(extra, claim)
    assert set(rest) == {"mine", claims.OUTPUT}
    assert claims.output_of(SimpleNamespace(extra_args=rest)) == [5, 6, 7]
    for nothing in (None, {}, {"mine": 1}):
        assert of(nothing) is None and claims.output_of(SimpleNamespace(extra_args=nothing)) == []


def test_what_is_sent_ahead_has_a_key_and_a_prompt_and_no_output() -> None:
    import json

    body = {"model": "m", "messages": [], "stream": True, "vllm_xargs": {"mine": 1}}
    extra = json.loads(held_request.Asked(True, body, b"", KEY).written_ahead("r", "r.k", array("I", [4, 5])))["vllm_xargs"]
    claim = of(extra)
    assert claim is not None and (claim.stage, claim.prompt, claim.output, claim.goes_on) == ("r.k", [4, 5], [], True)
    assert claims.rest(extra, claim) == {"mine": 1}
    assert claims.ids_of(held_request.little_endian(array("I", [7, 2**31]))) == [7, 2**31]
    assert claims.packed([7, 2**31]) == held_request.packed(array("I", [7, 2**31]))
    for wrong in ({claims.STAGE: 1}, {claims.PROMPT: ""}, {claims.OUTPUT: claims.packed([1]), claims.PIECES: claims.packed([1])}):
        with pytest.raises(BadClaim):
            of(resealed(extra | wrong))


@pytest.mark.parametrize(
    "change",
    [
        {claims.EPOCH: "1"},
        {claims.REQUEST: 3},
        {claims.OUTPUT: "AAA"},
        {claims.OUTPUT: "AAAAAAA="},
        {claims.PIECES: ""},
        {claims.PROMPT: ""},
    ],
)
def test_what_is_no_claim_is_refused(change: dict[str, Any]) -> None:
    extra = written(held_request.Replay(array("I", [1]), array("I", [5]), array("I", [1])))
    with pytest.raises(BadClaim):
        of(resealed(extra | change))


@pytest.mark.parametrize(
    "change",
    [
        {claims.OUTPUT: claims.packed([6])},
        {claims.EPOCH: 8},
        {claims.EPOCH: "7"},
        {claims.HELD: 1},
        {claims.MORE: 5},
        {claims.OUTPUT: [1]},
        {claims.OUTPUT: chr(0xDC80)},
        {claims.EPOCH: 10**5000},
        {claims.EPOCH: 7.0},
        {SEAL: ""},
        {SEAL: 1},
        {SEAL: "é"},
        {SEAL: seal(bytes(32), {})},
    ],
)
def test_what_the_gateway_did_not_seal_says_nothing_and_goes_no_further(change: dict[str, Any]) -> None:
    sound = written(held_request.Replay(array("I", [1]), array("I", [5]), array("I", [1])))
    assert of(sound) is not None
    unsealed = {name: value for name, value in sound.items() if name != SEAL}
    for forged in (sound | change, unsealed | change, unsealed):
        if forged != sound:
            assert of(forged) is None
            assert claims.rest(forged, None) == {"mine": 1}
    assert claims.of(sound, lambda: bytes(32)) is None, "another node's"


def test_a_node_has_one_key_that_others_cannot_read(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: key_of(tmp_path), range(64)))
    assert len(keys) == 1 and len(keys.pop()) == 32
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert not sealed(key_of(other), resealed(written(None)) | {SEAL: seal(key_of(tmp_path), written(None))})
    file.write_bytes(b"")
    with pytest.raises(OSError, match="not a key"):
        key_of(tmp_path)


def test_a_second_one_of_the_same_epoch_is_refused() -> None:
    seen, claim = Seen(), of(written(None))
    assert claim is not None and seen.first(claim.request, claim.epoch) and not seen.first(claim.request, claim.epoch)
    later = of(resealed(written(None) | {claims.EPOCH: 8}))
    assert later is not None and seen.first(later.request, later.epoch)


class Message(SimpleNamespace):
    """Looks like vLLM's DeltaMessage."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**({"content": None, "reasoning": None, "tool_calls": None} | fields))

    @property
    def model_fields_set(self) -> set[str]:
        return {name for name, value in vars(self).items() if value is not None}


def call(index: int, arguments: str | None, name: str | None = None, call_id: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(index=index, id=call_id, function=SimpleNamespace(name=name, arguments=arguments))


def test_what_a_parser_says_of_the_pieces_is_said_at_once() -> None:
    told = None
    for more in (
        None,
        Message(reasoning="th"),
        Message(reasoning="ink", content="a"),
        None,
        Message(content="b"),
        Message(tool_calls=[call(0, None, "f", "id0")]),
        Message(tool_calls=[call(0, '{"x"')]),
        Message(tool_calls=[call(0, ": 1}"), call(1, "{}", "g", "id1")]),
    ):
        told = merged(told, more)
    assert (told.reasoning, told.content) == ("think", "ab")
    got = [(c.index, c.id, c.function.name, c.function.arguments) for c in told.tool_calls]
    assert got == [(0, "id0", "f", '{"x": 1}'), (1, "id1", "g", "{}")]
