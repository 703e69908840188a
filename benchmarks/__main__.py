"""Run every benchmark: `make bench`."""

from benchmarks import finetune, select, startup, trace

for benchmark in (select, trace, startup, finetune):
    print(f"\n== {benchmark.__name__}: {(benchmark.__doc__ or '').splitlines()[0]}")
    benchmark.main()
