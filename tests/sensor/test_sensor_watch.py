"""What counts as wrong with a GPU, from one reading to the next."""

from __future__ import annotations

from shadowsup.supervisor.node_sensor import RECOVERY_XID, Troubles
from shadowsup.supervisor.policy.messages import GpuNotice, GpuTrouble
from shadowsup.supervisor.sensor.watch import RISING_S, GpuWatch
from shadowsup.wire.sensor import GpuNews, GpuNewsKind, GpuReading, SensorBeat

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


def told(*beats: SensorBeat) -> list[tuple[GpuTrouble, int, float] | tuple[str, GpuTrouble]]:
    said: list[tuple[GpuTrouble, int, float] | tuple[str, GpuTrouble]] = []

    def warned(notice: GpuNotice) -> None:
        said.append((notice.kind, notice.number, notice.since_s))

    troubles = Troubles(warned, lambda uuid, kind: said.append((uuid, kind)))
    for beat in beats:
        troubles.take(beat)
    return said


def beat(at_s: float, found: GpuReading, *news: GpuNews) -> SensorBeat:
    return SensorBeat(pid=1, sent_s=at_s, interval_s=1.0, gpus=(found,), news=news)


def test_the_policy_is_told_when_a_trouble_begins_when_it_changes_and_when_it_is_over() -> None:
    said = told(
        beat(1.0, reading(pcie_width=8)),
        beat(2.0, reading(pcie_width=8)),
        beat(3.0, reading(pcie_width=4)),
        beat(4.0, reading()),
        beat(5.0, reading(ecc_rose=2)),
        beat(6.0, GpuReading(uuid=A, lost=True)),
    )
    assert said == [
        (GpuTrouble.PCIE, 8, 1.0),
        (GpuTrouble.PCIE, 4, 1.0),
        (A, GpuTrouble.PCIE),
        (GpuTrouble.ECC, 2, 5.0),
        (GpuTrouble.LOST, 0, 6.0),
        (A, GpuTrouble.ECC),
    ]


def test_an_xid_is_told_as_it_comes_and_a_recovery_action_as_xid_154() -> None:
    xid = GpuNews(uuid=A, kind=GpuNewsKind.XID, number=79, text="Xid 79", at_s=1.5)
    action = GpuNews(uuid=A, kind=GpuNewsKind.RECOVERY, number=2, text="the driver asks for a reboot of the node", at_s=1.6)
    lanes = GpuNews(uuid=A, kind=GpuNewsKind.PCIE, number=8, text="x8", at_s=1.7)
    assert told(beat(2.0, reading(), xid, action, lanes)) == [(GpuTrouble.XID, 79, 1.5), (GpuTrouble.XID, RECOVERY_XID, 1.6)]
