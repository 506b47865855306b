"""The benchmark of decoding runs; its figures are for machines at rest."""

from kvfold.recipes.bench import decode

SMALL = "--layers 2 --hidden 32 --intermediate 32 --heads 4 --rank 16 --rope 8 --nope 8 --value 8 --steps 2 --runs 1"


def test_it_prints_both_kinds_of_decoding_for_each_context(capsys):
    decode.main(["--contexts", "40", "80", *SMALL.split()])
    said = capsys.readouterr().out.splitlines()
    assert "2 layers, hidden 32, 4 heads, rank 16 + rope 8, float32" in said[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said[3:]]
    assert [row[:2] for row in rows] == [[n, kind] for n in ("40", "80") for kind in ("stock", "absorbed")]
    assert all(float(cell) > 0 for row in rows for cell in row[2:6])
    assert [row[5] for row in rows[::2]] == ["1.00", "1.00"]
    assert all(0 < float(row[6]) < 1e-4 for row in rows[1::2])  # another order of sums, hence not quite the same


def test_every_run_starts_from_the_same_cache():
    options = ["--contexts", "40", *SMALL.split()]
    model = decode.make_model(decode.parse(options))
    cache = decode.filled_cache(model, 40)
    assert cache.layers[0].keys.shape[-2] == 40
    firsts = [decode.decode(model, cache, 3)[1] for _ in range(2)]
    assert cache.layers[1].values.shape[-2] == 40
    assert firsts[0].equal(firsts[1])
