"""What counts as wrong with a GPU, from one reading to the next."""

from __future__ import annotations

from shadowsup.supervisor.sensor.watch import RISING_S, GpuWatch
from shadowsup.wire.sensor import GpuNewsKind, GpuReading

A = "GPU-a"


def reading(**figures: object) -> GpuReading:
    base: dict[str, object] = {"ecc_uncorrected": 0, "pcie_width": 16, "pcie_width_max": 16, "recovery_action": 0}
    return GpuReading(uuid=A, **{**base, **figures})  # type: ignore[arg-type]


def test_a_healthy_gpu_is_no_news() -> None:
    watch = GpuWatch()
    for second in range(5):
        found, news = watch.take(reading(), float(second))
        assert (found.warnings, news) == ((), ())


def test_errors_that_were_there_before_are_not_news_but_rising_ones_are() -> None:
    watch = GpuWatch()
    assert watch.take(reading(ecc_uncorrected=7), 0.0)[1] == ()
    found, (news,) = watch.take(reading(ecc_uncorrected=9), 1.0)
    assert (news.kind, news.number, news.uuid, news.at_s) == (GpuNewsKind.ECC, 2, A, 1.0)
    assert found.warnings == ("uncorrected memory errors rose by 2, 0 s ago",)
    still, none = watch.take(reading(ecc_uncorrected=9), 30.0)
    assert (len(still.warnings), none) == (1, ())
    assert watch.take(reading(ecc_uncorrected=9), 1.0 + RISING_S)[0].warnings == ()


def test_a_driver_that_was_reloaded_counts_from_zero_again() -> None:
    watch = GpuWatch()
    watch.take(reading(ecc_uncorrected=9), 0.0)
    assert watch.take(reading(ecc_uncorrected=0), 1.0)[1] == ()


def test_lost_lanes_are_told_once_and_warned_of_as_long_as_they_are_missing() -> None:
    watch = GpuWatch()
    found, (news,) = watch.take(reading(pcie_width=8), 0.0)
    assert (news.kind, news.number, found.warnings) == (GpuNewsKind.PCIE, 8, ("PCIe link at x8 of x16",))
    found, none = watch.take(reading(pcie_width=8), 1.0)
    assert (len(found.warnings), none) == (1, ())
    assert watch.take(reading(), 2.0)[0].warnings == ()
    assert len(watch.take(reading(pcie_width=4), 3.0)[1]) == 1


def test_a_link_that_nvml_cannot_see_has_lost_nothing() -> None:
    assert GpuWatch().take(reading(pcie_width=0), 0.0) == (reading(pcie_width=0), ())
    assert GpuWatch().take(reading(pcie_width=None), 0.0)[0].warnings == ()


def test_what_the_driver_asks_for_is_said_in_words() -> None:
    watch = GpuWatch()
    found, (news,) = watch.take(reading(recovery_action=4), 0.0)
    assert (news.kind, news.number) == (GpuNewsKind.RECOVERY, 4)
    assert found.warnings == ("the driver asks to drain and reset this GPU",)
    assert "action 99" in watch.take(reading(recovery_action=99), 1.0)[1][0].text


def test_a_gpu_that_fell_off_the_bus_is_told_once() -> None:
    watch = GpuWatch()
    watch.take(reading(), 0.0)
    lost = GpuReading(uuid=A, lost=True)
    assert [news.kind for news in watch.take(lost, 1.0)[1]] == [GpuNewsKind.LOST]
    assert watch.take(lost, 2.0)[1] == ()
