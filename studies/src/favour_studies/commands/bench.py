"""`favour bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    networks: Annotated[
        str | None,
        typer.Option(
            help="regression, mlp, wide, lenet-top, lenet-all, resnet18, transformer, classes1000; commas between "
            "them. All by default."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="auto, adjoint, adjoint-bf16, adjoint-r8, secants, pairs, directions, directions-bf16, dplr, dplr-r1, "
            "dplr-r2, diag; "
            "commas between them. By default auto,dplr,diag."
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas between them.")] = "1,32,512",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Only compiled or only eager code; both by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the results; the figure goes beside it.")] = Path(
        "results/bench.json"
    ),
    append: Annotated[
        bool, typer.Option(help="Keep what the file holds of networks and batch sizes not measured now.")
    ] = False,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier file of results: show what changed beyond noise.")
    ] = None,
    only_compare: Annotated[
        bool, typer.Option("--only-compare", help="Measure nothing: compare the file of results as it is.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Folder with mnist/ to train on; without it, what scikit-learn brings.")
    ] = None,
    checkpoints: Annotated[Path, typer.Option(help="Folder of trained weights, written if they are not there.")] = Path(
        "checkpoints"
    ),
    samples: Annotated[float, typer.Option(help="Size of the reference samples, times the usual.")] = 1.0,
    budget: Annotated[float, typer.Option(help="Seconds of timing per network and batch size.")] = 10.0,
    limit: Annotated[float, typer.Option(help="Longest plain forward pass to measure, in seconds.")] = 4.0,
    graphs: Annotated[bool, typer.Option("--graphs", help="CUDA graphs for all that is compiled.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's default.")] = 0,
) -> None:
    """Measure cost, memory and error of the methods beside three samplers; speed-up at equal error.

    Example: favour bench --networks mlp --out bench.json
    """
    import torch

    import favour_studies.bench as suite
    from favour.errors import InvalidValue
    from favour_studies.bench import figure, table

    old = None if compare is None else suite.read(compare)
    if only_compare:
        if old is None:
            raise InvalidValue("`--only-compare` needs `--compare OLD.json`.")
        print(suite.compare(old, suite.read(out)))
        return
    try:
        sizes = tuple(int(part) for part in batch.split(","))
    except ValueError:
        raise InvalidValue(f"`--batch` is {batch!r}; give whole numbers with commas between them.") from None
    suite.keep_freed_memory()
    if threads > 0:
        torch.set_num_threads(threads)
    result = suite.run(
        networks,
        methods,
        out=out,
        append=append,
        batches=sizes,
        device=device,
        modes=("eager", "compiled") if compiled is None else ("compiled",) if compiled else ("eager",),
        data=data,
        checkpoints=str(checkpoints),
        samples=samples,
        budget=budget,
        limit=limit,
        graphs=graphs,
    )
    table.show(result)
    print(f"wrote {out}")
    if result["baselines"]:
        print(f"wrote {figure.draw(result, out.with_suffix('.png'))}")
    if old is not None:
        print(suite.compare(old, result))
