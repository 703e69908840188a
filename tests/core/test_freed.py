"""What is freed is kept for the next step: counted in pages that the system has to hand out again."""

import subprocess
import sys

_LOOP = """
import resource
import numpy as np
from bitplan.core.malloc_tuning import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step = [np.ones(1 << 20) for _ in range(4)]  # 32 MB, more than is kept unasked
        del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
pages()
print(int(kept), pages())
"""


def test_memory_that_is_freed_is_taken_again_without_the_system():
    done = subprocess.run([sys.executable, "-c", _LOOP], capture_output=True, text=True, check=True)
    kept, pages = map(int, done.stdout.split())
    # An allocator that cannot, as on other systems, says so; then nothing is known of how many pages there are.
    assert pages < 100 or not kept
    assert kept or not sys.platform.startswith("linux")
