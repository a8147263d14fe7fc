"""What the nodes' readings say, read; the samples have the form of recorded ones."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster import sensors
from engine.cluster.sensors import parse_macmon
from engine.models import GpuMemory
from tests.data import node_output

IOREG = (
    '      "PerformanceStatistics" = {"In use system memory (driver)"=0,"Alloc system memory"=34170552320,'
    '"Tiler Utilization %"=3,"Renderer Utilization %"=12,"Device Utilization %"=25}\n'
)
OLD = {
    "ecpu_usage": [1404, 0.25],
    "pcpu_usage": [1500, 0.125],
    "gpu_usage": [461, 0.5],
    "gpu_power": 1.5,
    "sys_power": 12.5,
    "all_power": 2.5,
    "memory": {"ram_total": 2**35, "ram_usage": 2**34, "swap_total": 0, "swap_usage": 0},
    "temp": {"cpu_temp_avg": 43.5, "gpu_temp_avg": 0.0},
}
NEW = OLD | {
    "gpu_usage": [1, 0.1],
    "gpu_active_ratio": 0.75,
    "gpu_scaled_ratio": 0.25,
    "gpu_freq_mhz": 1398,
    "cpu_active_ratio": 0.5,
    "cpu_scaled_ratio": 0.125,
}


def test_an_old_macmon_names_a_pair_of_clock_and_ratio() -> None:
    assert parse_macmon(json.dumps(OLD)) == {
        "gpu_use": 0.5,
        "gpu_mhz": 461,
        "gpu_power_w": 1.5,
        "power_w": 12.5,
        "memory_used_bytes": 2**34,
        "swap_used_bytes": 0,
        "cpu_temperature_c": 43.5,
    }


def test_a_new_macmon_names_each_and_the_active_share_is_taken() -> None:
    values = parse_macmon(json.dumps(NEW))
    assert (values["gpu_use"], values["gpu_mhz"], values["cpu_use"]) == (0.75, 1398, 0.5)


LINUX_NETWORK = """Inter-|   Receive                                          |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 999999     10    0    0    0     0          0         0   999999      10    0    0    0     0       0          0
  eth0: {eth}    20    0    0    0     0          0         0     500      20    0    0    0     0       0          0
  ib0:{ib} 1 0 0 0 0 0 0 70 1 0 0 0 0 0 0
"""
MAC_NETWORK = """Name    Mtu   Network       Address            Ipkts Ierrs  Ibytes  Opkts Oerrs  Obytes  Coll
lo0        16384 <Link#1>                         6000     0    9999999     6000     0    9999999     0
lo0        16384 127           127.0.0.1          6000     -    9999999     6000     -    9999999     -
en0        1500  <Link#11>   aa:bb:cc:dd:ee:ff    1000     0       {en}     900     0        300     0
en0        1500  192.168.2     192.168.2.10       1000     -       {en}     900     -        300     -
utun0      1380  <Link#15>                          10     0         40       10     0         20     0
"""


def test_traffic_counts_every_interface_but_the_loopback() -> None:
    first = sensors.traffic([10.0, LINUX_NETWORK.format(eth=1000, ib=30)])
    later = sensors.traffic([12.0, LINUX_NETWORK.format(eth=3000, ib=30)])
    assert first == (10.0, 1030, 570)
    assert sensors.traffic_rates(first, later) == {"received_bytes_per_s": 1000.0, "sent_bytes_per_s": 0.0}
    assert sensors.traffic([1.0, MAC_NETWORK.format(en=700)]) == (1.0, 740, 320)


def test_a_counter_that_begins_anew_gives_no_rate() -> None:
    first, later = (sensors.traffic([at, MAC_NETWORK.format(en=bytes)]) for at, bytes in ((1.0, 700), (2.0, 10)))
    assert sensors.traffic_rates(first, later) == sensors.traffic_rates(None, first) == {}
    assert sensors.traffic_rates(first, first) == {}


@given(st.none() | st.text() | st.lists(st.text() | st.floats(), max_size=3))
def test_traffic_is_none_for_what_is_no_counter(report: object) -> None:
    assert sensors.traffic(report) is None


def test_a_machine_without_a_sensor_for_the_whole_gives_cpu_and_gpu() -> None:
    assert parse_macmon(json.dumps(OLD | {"sys_power": 0.0}))["power_w"] == 2.5


@pytest.mark.parametrize(
    ("file", "gpu", "mhz", "power"), [("macmon-old.json", 0.8125, 402, 21.625), ("macmon-new.json", 0.125, 512, 6.5)]
)
def test_whole_lines_of_macmon(file: str, gpu: float, mhz: float, power: float) -> None:
    values = parse_macmon(node_output(file))
    assert (values["gpu_use"], values["gpu_mhz"], values["power_w"]) == (gpu, mhz, power)
    assert 20e9 < values["memory_used_bytes"] < 30e9
    assert values["swap_used_bytes"] > 2e9
    assert 30 < values["gpu_temperature_c"] < values["cpu_temperature_c"] < 60


def test_use_is_what_the_counters_moved_by() -> None:
    first = sensors.cpu_ticks("cpu  100 0 50 850 0 0 0 0 0 0")
    second = sensors.cpu_ticks("cpu  140 0 60 880 20 0 0 0 7 0")
    assert sensors.cpu_use(first, second) == 0.5
    assert sensors.cpu_use(None, second) is None
    assert sensors.cpu_use(second, first) is None
    assert (
        sensors.cpu_use(sensors.mac_cpu_ticks([0, 0, 10**400, 0]), sensors.mac_cpu_ticks([10**400 + 1, 0, 0, 0]))
        is None
    )
    assert sensors.cpu_use(sensors.mac_cpu_ticks([10, 10, 80, 0]), sensors.mac_cpu_ticks([30, 15, 150, 5])) == 0.3


def test_swap_gpu_and_heat() -> None:
    assert sensors.mac_swap_used("vm.swapusage: total = 2048.00M  used = 1.50G  free = 0.5G") == 3 * 2**29
    assert sensors.mac_gpu_use(IOREG + IOREG.replace("=25", "=71")) == 0.71
    assert sensors.mac_thermal_pressure("com.apple.system.thermalpressurelevel 2\n") == "heavy"
    assert sensors.mac_thermal_pressure("com.apple.system.thermalpressurelevel 9\n") is None


def test_the_newest_line_of_each_gpu() -> None:
    """Written from nvidia-smi's documentation: no such machine has been recorded."""
    lines = [
        "0, 10, 900, 60.5, 50, 1000, 81559",
        "1, 0, 210, [N/A], 30, 300, 24576",
        "0, 90, 1900, 300.5, 70, 40960, 81559",
    ]
    readings, memory = sensors.parse_nvidia_smi(lines)
    assert memory == (
        GpuMemory(index=0, used_bytes=40960 * 2**20, total_bytes=81559 * 2**20),
        GpuMemory(index=1, used_bytes=300 * 2**20, total_bytes=24576 * 2**20),
    )
    assert readings == {"gpu_use": 0.45, "gpu_mhz": 1900, "gpu_power_w": 300.5, "gpu_temperature_c": 70}


def test_a_gpu_in_instances_and_one_that_needs_a_reset_report_what_they_can() -> None:
    """With MIG the use of the whole is not measured; written from nvidia-smi's documentation."""
    lines = [
        "0, [N/A], 1410, 95.2, 41, 4096, 81920",
        "10, [GPU requires reset], [Unknown Error], ERR!, [N/A], [N/A], 0",
    ]
    memory = (GpuMemory(index=0, used_bytes=4096 * 2**20, total_bytes=81920 * 2**20), GpuMemory(index=10))
    assert sensors.parse_nvidia_smi(lines) == (
        {"gpu_mhz": 1410, "gpu_power_w": 95.2, "gpu_temperature_c": 41},
        memory,
    )


@given(st.text() | st.recursive(st.floats() | st.text() | st.none(), st.lists).map(json.dumps))
def test_no_text_whatever_upsets_them(text: str) -> None:
    assert parse_macmon(text) == {}
    sensors.cpu_ticks(text)
    sensors.mac_swap_used(text)
    sensors.mac_gpu_use(text)
    sensors.mac_thermal_pressure(text)
    assert sensors.parse_nvidia_smi([text]) == ({}, ()) or text.count(",") == 6
    assert sensors.mac_cpu_ticks(text) is None


JUNK = st.recursive(st.floats() | st.integers() | st.text() | st.none() | st.booleans(), st.lists, max_leaves=4)


@given(st.fixed_dictionaries(dict.fromkeys(NEW, JUNK)))
def test_impossible_macmon_values_are_not_measured(output: dict[str, object]) -> None:
    for value in parse_macmon(json.dumps(output)).values():
        assert isinstance(value, float | int) and value >= 0
