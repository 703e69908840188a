"""Run every benchmark: `make bench`."""

from benchmarks import (
    eagl,
    engines,
    export,
    finetune,
    hawq,
    integer,
    latency,
    matmulnbits,
    page,
    qat_step,
    select,
    startup,
    trace,
)

for benchmark in (
    select,
    trace,
    startup,
    eagl,
    hawq,
    qat_step,
    finetune,
    engines,
    export,
    integer,
    latency,
    matmulnbits,
    page,
):
    print(f"\n== {benchmark.__name__}: {(benchmark.__doc__ or '').splitlines()[0]}")
    benchmark.main()
