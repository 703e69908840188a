"""Run every benchmark: `make bench`."""

from benchmarks import eagl, export, finetune, qat_step, select, startup, trace

for benchmark in (select, trace, startup, eagl, qat_step, finetune, export):
    print(f"\n== {benchmark.__name__}: {(benchmark.__doc__ or '').splitlines()[0]}")
    benchmark.main()
