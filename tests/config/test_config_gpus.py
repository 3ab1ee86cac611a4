"""GPU ids: what people write, resolved once to UUIDs; ambiguity is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shadowsup.supervisor.config.gpus import GpuIdentity, check_gpu_id, resolve
from shadowsup.supervisor.errors import Problem

A = "GPU-8f6d1c2a-1111-2222-3333-444455556666"
B = "GPU-8f6d1c2b-1111-2222-3333-444455556666"
C = "GPU-0a0b0c0d-1111-2222-3333-444455556666"
M1 = "MIG-11111111-1111-2222-3333-444455556666"
M2 = "MIG-11111112-1111-2222-3333-444455556666"
MACHINE = (
    GpuIdentity(0, A),
    GpuIdentity(1, B),
    GpuIdentity(2, C, mig_enabled=True),
    GpuIdentity(2, M1),
    GpuIdentity(2, M2),
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("0", "0"),
        ("07", "7"),
        (A, A),
        (A.upper(), A),
        ("gpu-8f6d1c2a", "GPU-8f6d1c2a"),
        (M1, M1),
        (f"MIG-{A}/1/0", f"MIG-{A}/1/0"),
    ],
)
def test_an_id_is_brought_to_its_usual_spelling(text: str, canonical: str) -> None:
    assert check_gpu_id(text) == canonical


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("GPU-8f", "too short"),
        ("cuda:1", "write 1"),
        ("gpu0", "write 0"),
        ("nvidia", "not a GPU id"),
        ("-1", "not a GPU id"),
        ("GPU-xyz", "not a GPU id"),
        ("", "not a GPU id"),
        ("all", "not a GPU id"),
    ],
)
def test_what_is_no_id_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_gpu_id(text)


def test_ids_are_resolved_to_uuids_in_their_order() -> None:
    assert resolve(["1", A, M2], MACHINE) == (B, A, M2)
    assert resolve(["GPU-8f6d1c2b"], MACHINE) == (B,)
    assert resolve([], MACHINE) == ()


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (["7"], "no GPU 7 here; there is 0=GPU-8f6d1c2a"),
        (["GPU-ffffffff"], "no GPU GPU-ffffffff"),
        (["GPU-8f6d1c2"], "too short"),
        (["MIG-1111111"], "too short"),
        (["0", "GPU-8f6d1c2a"], "are the same GPU"),
        (["2"], "divided by MIG"),
        ([C], f"name an instance: {M1}, {M2}"),
    ],
)
def test_an_id_that_names_none_or_the_same_or_a_divided_gpu_is_refused(ids: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resolve(ids, MACHINE)


def test_a_short_id_that_fits_two_gpus_is_refused() -> None:
    """P23."""
    twins = (GpuIdentity(0, A), GpuIdentity(1, A.replace("1111", "1112")))
    with pytest.raises(ValueError, match="is ambiguous"):
        resolve(["GPU-8f6d1c2a"], twins)


def test_a_machine_without_gpus_says_so() -> None:
    with pytest.raises(ValueError, match="there is no GPU"):
        resolve(["0"], ())


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ("[0, 0]", "0 is there twice"),
        ("[0, '0']", "twice"),
        ("[00]", "octal"),
        ("[GPU-8f]", "too short"),
        ("0", "a list is wanted"),
        ("[-1]", "index"),
    ],
)
def test_ids_of_a_config_are_checked_with_their_place(worker_problems: Callable[..., list[Problem]], ids: str, told: str) -> None:
    found = worker_problems(f"gpus: {ids}")
    assert any(told in problem.message for problem in found)
    assert {problem.line for problem in found} == {6}
