"""Small files that claim to be large are refused by name, before memory or time is taken."""

import subprocess
import sys
from pathlib import Path

import pytest
from bombs import BOMBS, assert_refused

PROGRAM = Path(__file__).with_name("bombs.py")
# MB that reading may take beyond torch itself; what a pickle makes is only known once it is made.
MOST = dict.fromkeys(BOMBS, 250) | {"copying": 1500, "doubling": 1500}
MOST |= dict.fromkeys(["layers", "streamed_layers", "words", "large_text"], 600)  # transformers itself


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_takes_little(tmp_path, name):
    assert_refused(PROGRAM, BOMBS, name, tmp_path, most=MOST[name])


def test_the_peak_is_measured():
    code = "from bombs import peak; before = peak(); held = b'x' * (200 << 20); print(peak() - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROGRAM.parent)
    assert 190 < int(done.stdout) < 230


def test_a_file_that_is_compressed_and_sound_is_refused_with_what_to_do(tmp_path):
    BOMBS["compressed_numbers"][0](tmp_path / "b.pth")
    with pytest.raises(Exception, match=r"b.pth is a compressed archive, 4,194,\d+ bytes in \d,\d+, .*write it again"):
        BOMBS["compressed_numbers"][2](tmp_path / "b.pth")
