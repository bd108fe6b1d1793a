"""Pictures of graphs, and the command that draws them."""

import pytest

import lsgd_jax as lj
from train.tools import graphs


@pytest.mark.parametrize("workers", [1, 8])
def test_every_graph_can_be_drawn(workers, tmp_path):
    for name in graphs.BUILDERS:
        path = graphs.draw(getattr(lj.topology, name)(workers), tmp_path / f"{name}.png")
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_command(tmp_path, capsys):
    assert graphs.main(["ring", "6", str(tmp_path / "ring.png")]) == 0
    assert "ring" in capsys.readouterr().out and (tmp_path / "ring.png").exists()
    for wrong in ([], ["star", "3", "x"], ["ring", "-1", "x"], ["ring", "0", "x"]):
        assert graphs.main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1
