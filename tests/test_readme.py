"""What the README shows works."""

import pathlib
import re
import subprocess
import sys


ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 18
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    numbers = [float(x) for x in re.findall(r"\d\.\d+", done.stdout)]
    assert len(numbers) == 3 and all(abs(x - 1) < 0.1 for x in numbers), done.stdout


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text())
    assert links and all((ROOT / link).is_file() for link in links)
