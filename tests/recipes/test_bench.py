"""The benchmark of calibration runs; its figures are for machines at rest."""

from kvfold.recipes.bench import calibrate
from kvfold.recipes.tiny import MODEL_DIR


def test_calibration_prints_both_tables(capsys):
    calibrate.main([str(MODEL_DIR), "--windows", "1", "--window", "32", "--runs", "1"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 windows of 32 tokens in torch.float32, 1 alternating runs"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said if line.startswith("|")]
    times, memory = rows[2:5], rows[7:]
    assert [row[0] for row in times] == ["plain forward and backward", "calibration", "calibration --no-fisher"]
    assert times[0][-1] == "1.00"
    assert all(float(cell) >= 0 for row in times for cell in row[1:])
    assert [row[0] for row in memory] == ["1", "4"]
    assert all(100 < float(row[1]) < 4000 for row in memory)  # a process with torch
