"""How figures are shown to people."""

import pytest

from kvfold.common.output import print_report, print_table


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("kv_bytes", 512, "512"),
        ("kv_bytes", 8192, "8,192 (8.00 KiB)"),
        ("kv_bytes", 2**28, "268,435,456 (256.00 MiB)"),
        ("kv_bytes", 2**29, "536,870,912 (0.50 GiB)"),
        ("kv_bytes", 2**32, "4,294,967,296 (4.00 GiB, 4.29 GB)"),
        ("score_bytes", 2**35, "34,359,738,368 (32.00 GiB, 34.36 GB)"),
        ("weight_bytes", 2**41, "2,199,023,255,552 (2.00 TiB, 2.20 TB)"),
        ("flops", 999, "999"),
        ("attention_flops", 4 * 4096**2 * 64 * 32, "137,438,953,472 (137.44 GFLOP)"),
        ("prompt_flops", 3 * 10**21, "3,000,000,000,000,000,000,000 (3000.00 EFLOP)"),
        ("tokens", 12345, "12,345"),
        ("ratio", 0.25, "0.25"),
        ("reason", None, "-"),
        ("passed", True, "yes"),
    ],
)
def test_units(key, value, shown, capsys):
    print_report({key: value}, as_json=False)
    assert capsys.readouterr().out == f"{key}  {shown}\n"


def test_only_the_main_process_speaks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    print_report({"tokens": 1}, as_json=True)
    print_table([{"a": 1}], {"a": "a"}, title="title")
    assert capsys.readouterr().out == ""
